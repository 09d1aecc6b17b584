"""Sounds over HTTP: POST /predict, /attention and /spectrogram of a model of sounds, its limits, and what is no sound."""

import base64
import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")
pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")

import vitrail
from tests.data.sounds import LABELS, encode_sound, mutate_sounds, save_model, tone
from tests.serve.made import FORM, Client, form, picture, serving, tiny
from vitrail.analysis import trace_image


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sounds")
    save_model(root / "sounds.safetensors")
    tiny(root / "images.safetensors")
    (root / "tone.wav").write_bytes(encode_sound(tone(400, 0.4)))
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    models = f"sounds={place / 'sounds.safetensors'}", f"images={place / 'images.safetensors'}"
    with serving(*models, video_seconds=4.0) as running:
        with suppress(TimeoutError):  # a busy machine may take long to start the process that decodes
            running.post("/predict", (place / "tone.wav").read_bytes(), "audio/wav")
        yield running


def test_predictions_and_features_are_those_of_the_library(client: Client, place: Path) -> None:
    wave = tone(400, 0.4, 16_000)
    for data in ((place / "tone.wav").read_bytes(), encode_sound(np.stack([wave, wave / 2], 1), 16_000, "FLAC")):
        (row,) = vitrail.predict(place / "sounds.safetensors", [data], top=3, device="cpu")
        status, said, _ = client.post("/predict", data, "audio/wav")
        assert status == 200, said
        answers = {answer["label"]: answer["score"] for answer in said["predictions"][0]["answers"]}
        assert answers == pytest.approx(dict(row.predictions), abs=1e-5)
    status, said, _ = client.post("/embed", data, "application/octet-stream")
    (features,) = vitrail.embed(place / "sounds.safetensors", [data], device="cpu")
    assert features.features is not None
    assert said["features"][0]["values"] == pytest.approx(features.features.tolist(), abs=1e-5)


def test_a_bad_part_of_a_form_has_an_error_instead(client: Client, place: Path) -> None:
    short = encode_sound(tone(400, 0.01))
    files = [
        ("a.wav", (place / "tone.wav").read_bytes()),
        ("b.mp3", b"no sound"),
        ("c.png", picture()),
        ("d.wav", short),
    ]
    status, said, _ = client.ask("POST", "/predict", form(*files), Content_Type=FORM)
    assert status == 200
    good, *bad = said["predictions"]
    assert {answer["label"] for answer in good["answers"]} == set(LABELS)
    assert [part["error"] for part in bad[:2]] == [
        f"{name}: not a sound, or none of WAV, FLAC, OGG, MP3, AIFF" for name in ("b.mp3", "c.png")
    ]
    assert bad[2]["error"] == "d.wav: 10 ms are shorter than a frame of 25 ms"


def test_limits_and_refusals(client: Client, place: Path) -> None:
    status, said, _ = client.post("/predict", encode_sound(tone(400, 5.0)), "audio/wav")
    assert (status, said["error"]) == (413, "the sound: 5 s long, the limit is 4 s")
    status, said, _ = client.post("/predict", b"\x1a\x45\xdf\xa3 what a browser records", "audio/webm")
    assert (status, "WebM is not read: convert it to WAV" in said["error"]) == (422, True)
    lying = bytearray((place / "tone.wav").read_bytes())
    lying[40:44] = (2**31).to_bytes(4, "little")  # the size of its samples
    assert client.post("/predict", bytes(lying), "audio/wav")[0] in (200, 413)
    assert client.post("/predict?model=images", (place / "tone.wav").read_bytes(), "audio/wav")[0] == 422
    status, said, _ = client.post("/spectrogram?model=images", picture(), "image/png")
    assert (status, said["error"]) == (409, "'images' takes images: spectrograms are of sounds")
    assert client.post("/predict", (place / "tone.wav").read_bytes(), "audio/wav")[0] == 200  # still serves


def decode_picture(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("L")).astype(float)


def test_spectrograms_have_low_frequencies_at_the_bottom(client: Client, place: Path) -> None:
    data = (place / "tone.wav").read_bytes()
    status, said, _ = client.post("/spectrogram", data, "audio/wav")
    assert status == 200, said
    axes, pixels = said["axes"], decode_picture(said["image"])
    heights = np.interp(np.linspace(0, 1, len(pixels)), np.linspace(0, 1, len(axes["heights"])), axes["heights"])
    assert heights[0] == pytest.approx(4000, rel=0.05)
    assert heights[pixels.mean(1).argmax()] == pytest.approx(400, rel=0.15)
    assert axes["begin"] == pytest.approx(-0.04, abs=0.02)  # 38 frames in 48
    assert [text for _, text in axes["seconds"]] == ["0", "0.1", "0.2", "0.3"]
    assert "1k" in [text for _, text in axes["hertz"]]


def test_attention_maps_are_those_of_the_model_turned_over(client: Client, place: Path) -> None:
    data = (place / "tone.wav").read_bytes()
    model = vitrail.load(place / "sounds.safetensors").eval()
    assert model.preprocessing is not None
    trace = trace_image(model, model.preprocessing(data)[None], at=(3, 2), views=("attention",))
    assert trace.attention is not None
    assert trace.attention_at is not None
    status, said, _ = client.post("/attention?layer=1&head=0", data, "audio/wav")
    assert status == 200, said
    np.testing.assert_allclose(said["map"], trace.attention[0, 0, ::-1], atol=1e-5)
    status, said, _ = client.post("/attention?layer=2&patch=0,2", data, "audio/wav")  # row 0 is the highest
    np.testing.assert_allclose(said["map"], trace.attention_at[1, :, ::-1].mean(0), atol=1e-5)
    status, said, _ = client.post("/attention", data, "audio/wav")
    assert (said["grid"], said["lift"], set(said["axes"]) >= {"hertz", "seconds"}) == ([4, 6], 0, True)


def test_the_service_says_that_the_model_takes_sounds(client: Client) -> None:
    models = client.ask("GET", "/models")[1]["models"]
    assert [model["sound"] for model in models] == [{"rate": 8000, "seconds": 0.48}, None]
    assert models[0]["attention"]


def test_mutated_sounds_are_answered_in_one_line(client: Client, place: Path) -> None:
    files = [(f"{number}.wav", data) for number, data in enumerate(mutate_sounds(60))]
    status, said, _ = client.ask("POST", "/predict", form(*files), Content_Type=FORM)
    assert status == 200, said
    assert len(said["predictions"]) == 60
    for part in said["predictions"]:
        error = part.get("error", "")
        assert part.get("answers") or (error and "\n" not in error and len(error) < 300)
    assert client.post("/predict", encode_sound(tone(400)), "audio/wav")[0] == 200


def test_the_page_takes_sounds_and_records(client: Client, place: Path, browser) -> None:
    from tests.serve.test_page import file, until, visiting

    data = (place / "tone.wav").read_bytes()
    (row,) = vitrail.predict(place / "sounds.safetensors", [data], device="cpu")
    with visiting(browser, f"http://127.0.0.1:{client.port}") as page:
        page.locator("#model").select_option("images")
        assert page.locator("#choose").inner_text() == "Choose an image"
        assert page.locator("#record").is_hidden()
        page.locator("#model").select_option("sounds")
        assert page.locator("#choose").inner_text() == "Choose a sound"
        assert page.locator("#invitation").inner_text() == "Drop a sound here"
        page.locator("#files").set_input_files([file("tone.wav", data, "audio/wav")])
        until(page, "document.querySelector('.pane.a .box.heard') && !document.querySelector('.busy')", 20)
        assert page.locator(".pane.a .verdict b").inner_text() == row.label
        assert page.locator(".pane.a .tick.hertz").first.inner_text().endswith("Hz")
        assert "s, " in page.locator(".pane.a .caption").inner_text()
        assert page.locator(".pane.a .player").is_visible()
        made = "encodeWav(Float32Array.from({ length: 800 }, (_, k) => Math.sin(k / 3)), 8000)"
        size = page.evaluate(f"(async () => (await {made}.arrayBuffer()).byteLength)()")
        assert size == 44 + 1600
