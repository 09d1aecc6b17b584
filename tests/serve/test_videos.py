"""Videos over HTTP: POST /predict of a model of clips, its limits, and files that are no videos."""

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")
pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")

import vitrail
from tests.deploy.clips import CLIP, LABELS, frames, save_model, write_mp4
from tests.serve.made import FORM, Client, form, picture, serving, tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    save_model(root / "clips.safetensors", replace(CLIP, clips=2))
    tiny(root / "images.safetensors")
    write_mp4(root / "short.mp4", frames(12))
    write_mp4(root / "long.mp4", frames(60))
    write_mp4(root / "large.mp4", frames(12).repeat(4, 1).repeat(4, 2))
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    models = f"clips={place / 'clips.safetensors'}", f"images={place / 'images.safetensors'}"
    with serving(*models, frames=50, video_seconds=4.0, pixels=10_000) as running:
        yield running


def test_predictions_and_features_are_those_of_the_library(client: Client, place: Path) -> None:
    data = (place / "short.mp4").read_bytes()
    (row,) = vitrail.predict(place / "clips.safetensors", place / "short.mp4", top=3, device="cpu")
    status, said, _ = client.post("/predict", data, "video/mp4")
    assert status == 200, said
    assert {a["label"]: a["score"] for a in said["predictions"][0]["answers"]} == pytest.approx(
        dict(row.predictions), abs=1e-5
    )
    status, said, _ = client.post("/embed", data, "application/octet-stream")
    (features,) = vitrail.embed(place / "clips.safetensors", place / "short.mp4", device="cpu")
    assert status == 200
    assert features.features is not None
    assert said["features"][0]["values"] == pytest.approx(features.features.tolist(), abs=1e-5)


def test_a_bad_part_of_a_form_has_an_error_instead(client: Client, place: Path) -> None:
    files = [("a.mp4", (place / "short.mp4").read_bytes()), ("b.mp4", b"no video"), ("c.png", picture())]
    status, said, _ = client.ask("POST", "/predict", form(*files), Content_Type=FORM)
    assert status == 200
    good, bad, image = said["predictions"]
    assert {answer["label"] for answer in good["answers"]} == set(LABELS)
    for part in (bad, image):
        assert "not a readable video" in part["error"]


def test_what_is_no_video_is_refused_in_one_line(client: Client, place: Path) -> None:
    whole = (place / "short.mp4").read_bytes()
    playlist = b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"
    for body in (b"no video", picture(), playlist, b"RIFF\0\0\0\0AVI LIST", whole[:200], whole[:-2000]):
        status, said, _ = client.post("/predict", body, "video/mp4")
        assert status == 422, (body[:20], said)
        assert "\n" not in said["error"]
    status, said, _ = client.post("/predict?model=images", whole, "video/mp4")
    assert status == 422
    assert client.post("/predict", whole, "video/mp4")[0] == 200  # still serves


def test_limits_are_those_of_the_frames_not_of_the_header(client: Client, place: Path) -> None:
    long, large = (place / "long.mp4").read_bytes(), (place / "large.mp4").read_bytes()
    status, said, _ = client.post("/predict", long, "video/mp4")
    assert (status, said["error"]) == (413, "the video: 60 frames, the limit is 50")
    lying = bytearray(long)
    for box, offset in ((b"mvhd", 20), (b"mdhd", 20), (b"tkhd", 24)):  # durations, and a version of 0
        at = lying.index(box)
        struct.pack_into(">I", lying, at + offset, 1)
    status, said, _ = client.post("/predict", bytes(lying), "video/mp4")
    assert status == 413
    status, said, _ = client.post("/predict", large, "video/mp4")
    assert status == 413
    assert "144×96 pixels, the limit is 0.01 million" in said["error"]
    slow = write_mp4(place / "slow.mp4", frames(12), rate=1).read_bytes()
    status, said, _ = client.post("/predict", slow, "video/mp4")
    assert (status, said["error"]) == (413, "the video: 12 s long, the limit is 4 s")


def test_the_service_says_that_the_model_takes_videos(client: Client) -> None:
    models = client.ask("GET", "/models")[1]["models"]
    assert [model["clip"] for model in models] == [{"frames": 4, "stride": 2, "views": 2}, None]
    assert not models[0]["attention"]
    status, said, _ = client.post("/attention", b"x", "video/mp4")
    assert (status, said["error"]) == (409, "'clips' takes videos: attention maps are of images")
    assert b"Choose a video" in client.ask("GET", "/page.js")[1]


def test_the_page_takes_a_video(client: Client, place: Path, browser) -> None:
    from tests.serve.test_page import file, until, visiting

    (row,) = vitrail.predict(place / "clips.safetensors", place / "short.mp4", device="cpu")
    with visiting(browser, f"http://127.0.0.1:{client.port}") as page:
        assert page.locator("#choose").inner_text() == "Choose a video"
        assert page.locator("#files").get_attribute("accept") == "video/*"
        page.locator("#files").set_input_files([file("short.mp4", (place / "short.mp4").read_bytes(), "video/mp4")])
        until(page, "document.querySelector('.pane.a.predicted') && !document.querySelector('.busy')", 20)
        assert page.locator(".pane.a .verdict b").inner_text() == row.label
        page.locator("#model").select_option("images")
        assert page.locator("#choose").inner_text() == "Choose an image"
