"""Masks over HTTP: POST /segment as JSON and PNG, its refusals and limits, and the page of a segmentation model."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from PIL import Image

import vitrail
from tests.deploy.masks import COLOURS, LABELS, photos, save_eomt, save_segmenter
from tests.serve.made import FORM, Client, form, picture, serving, tiny
from vitrail.serve import masks as served_masks
from vitrail.utils.rle import decode_rle


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("segment")
    save_segmenter(root / "masks.safetensors")
    tiny(root / "classes.safetensors")
    save_eomt(root / "eomt.safetensors", things=[False, False, True, True])
    photos(root / "photos", 2)
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    names = ("masks", "classes", "eomt")
    with serving(*(f"{name}={place / name}.safetensors" for name in names)) as running:
        yield running


def fill_mask(said: dict) -> np.ndarray:
    """Return the class of every pixel of a response."""
    mask = np.full((said["height"], said["width"]), 255, np.uint8)
    for item in said["classes"]:
        pixels = decode_rle(item["rle"]["counts"], *item["rle"]["size"])
        assert (mask[pixels] == 255).all(), "no pixel has two classes"
        mask[pixels] = LABELS.index(item["label"])
    return mask


def test_json_has_the_mask_of_predict(client: Client, place: Path) -> None:
    path = place / "photos" / "000.png"
    status, said, _ = client.ask("POST", "/segment", path.read_bytes(), Content_Type="image/png")
    assert status == 200
    assert said["model"] == "masks"
    ((mask,),) = [[item["mask"] for item in said["masks"]]]
    expected = next(vitrail.predict(place / "masks.safetensors", path)).mask
    assert expected is not None
    assert fill_mask(mask).shape == expected.shape
    assert (fill_mask(mask) == expected).mean() > 0.999  # batches may round differently
    shares = [item["share"] for item in mask["classes"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert all(item["colour"] == COLOURS[LABELS.index(item["label"])] for item in mask["classes"])


def test_png_has_the_same_mask_in_its_colours(client: Client, place: Path) -> None:
    data = (place / "photos" / "000.png").read_bytes()
    status, said, headers = client.ask("POST", "/segment?format=png", data, Content_Type="image/png")
    assert (status, headers["content-type"]) == (200, "image/png")
    expected = next(vitrail.predict(place / "masks.safetensors", place / "photos" / "000.png")).mask
    with Image.open(io.BytesIO(said)) as image:
        assert expected is not None
        assert image.size == expected.shape[::-1]
        assert (np.asarray(image) == expected).mean() > 0.999
        assert tuple(image.getpalette()[3:6]) == (255, 0, 0)


def test_a_turned_image_has_an_upright_mask(client: Client, place: Path) -> None:
    with Image.open(place / "photos" / "000.png") as image:
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    status, said, _ = client.ask("POST", "/segment", file.getvalue(), Content_Type="image/png")
    assert status == 200
    _, straight, _ = client.ask(
        "POST", "/segment", (place / "photos" / "000.png").read_bytes(), Content_Type="image/png"
    )
    assert said["masks"] == straight["masks"]


def test_large_images_decoded_in_a_process_keep_their_size(client: Client) -> None:
    file = io.BytesIO()
    Image.new("RGB", (2100, 1000)).save(file, "PNG")
    status, said, _ = client.ask("POST", "/segment", file.getvalue(), Content_Type="image/png")
    assert status == 200
    assert (said["masks"][0]["mask"]["height"], said["masks"][0]["mask"]["width"]) == (1000, 2100)


def test_several_images_are_batched_and_a_bad_one_is_named(client: Client) -> None:
    body = form(("a.png", picture(0)), ("bad.png", b"no image"), ("b.png", picture(1, (20, 60))))
    status, said, _ = client.ask("POST", "/segment", body, Content_Type=FORM)
    assert status == 200
    assert [item["name"] for item in said["masks"]] == ["a.png", "bad.png", "b.png"]
    assert "not an image" in said["masks"][1]["error"]
    assert fill_mask(said["masks"][2]["mask"]).shape == (20, 60)
    status, said, _ = client.ask("POST", "/segment?format=png", body, Content_Type=FORM)
    assert (status, said["error"]) == (413, "a PNG is the mask of one image, got 3: leave out format=png")


def test_the_wrong_route_names_the_right_one(client: Client) -> None:
    for path, message in {
        "/predict?model=masks": "'masks' predicts masks: use POST /segment",
        "/segment?model=classes": "'classes' predicts classes: use POST /predict",
    }.items():
        status, said, _ = client.ask("POST", path, picture(), Content_Type="image/png")
        assert (status, said["error"]) == (409, message)
    status, said, _ = client.ask("POST", "/attention?model=masks", picture(), Content_Type="image/png")
    assert status == 409
    status, said, _ = client.ask("POST", "/embed?model=masks", picture(), Content_Type="image/png")
    assert (status, len(said["features"][0]["values"])) == (200, 32)
    status, said, _ = client.ask("POST", "/segment?format=gif", picture(), Content_Type="image/png")
    assert status == 422
    status, said, _ = client.ask("POST", "/segment", b"no image", Content_Type="image/png")
    assert status == 422


def test_models_tell_masks_and_colours(client: Client) -> None:
    _, said, _ = client.ask("GET", "/models")
    first, second, third = said["models"]
    assert (first["masks"], first["colours"], first["labels"]) == (True, list(COLOURS), list(LABELS))
    assert (second["masks"], second["colours"]) == (False, None)
    assert [model["panoptic"] for model in (first, second, third)] == [False, False, True]


def test_masks_have_a_limit_of_work(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_masks, "MAX_MASK_VALUES", 4 * 40 * 40)
    status, said, _ = client.ask("POST", "/segment", picture(0, (40, 48)), Content_Type="image/png")
    assert (status, said["error"]) == (413, "48×40 pixels, the limit for 4 classes is 0.0 million")
    assert client.ask("POST", "/segment", picture(0, (40, 40)), Content_Type="image/png")[0] == 200


def test_masks_share_the_limits_of_predictions(place: Path) -> None:
    with serving(f"masks={place / 'masks.safetensors'}", pixels=2000, images=2) as client:
        status, said, _ = client.ask("POST", "/segment", picture(0, (60, 60)), Content_Type="image/png")
        assert status == 413
        assert "60×60 pixels" in said["error"]
        body = form(*((f"{number}.png", picture()) for number in range(3)))
        assert client.ask("POST", "/segment", body, Content_Type=FORM)[0] == 413


def test_concurrent_clients_get_their_own_masks(client: Client, place: Path) -> None:
    images = [picture(seed, (30 + seed, 40)) for seed in range(8)]
    found: dict[int, np.ndarray] = {}

    def ask(number: int) -> None:
        _, said, _ = client.ask("POST", "/segment", images[number], Content_Type="image/png")
        found[number] = fill_mask(said["masks"][0]["mask"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, data in enumerate(images):
        alone = next(vitrail.predict(place / "masks.safetensors", [Image.open(io.BytesIO(data))])).mask
        assert alone is not None
        assert (found[number] == alone).mean() > 0.999  # batches may round differently


# --- panoptic segments ---

LENIENT = "panoptic=true&score_threshold=0.3&overlap_threshold=0.1"


def test_segments_are_those_of_predict(client: Client, place: Path) -> None:
    paths = [place / "photos" / "000.png", place / "photos" / "below" / "001.png"]
    body = form(*((path.name, path.read_bytes()) for path in paths), ("bad.png", b"no image"))
    status, said, _ = client.ask("POST", f"/segment?model=eomt&{LENIENT}", body, Content_Type=FORM)
    assert status == 200
    assert "not an image" in said["masks"][2]["error"]
    options = {"panoptic": True, "score_threshold": 0.3, "overlap_threshold": 0.1}
    rows = vitrail.predict(place / "eomt.safetensors", paths, **options)
    for item, row in zip(said["masks"], rows, strict=False):
        mask, ids = item["mask"], row.segment_ids
        assert ids is not None
        assert (mask["height"], mask["width"]) == ids.shape
        assert len(mask["segments"]) == len(row.segments) > 1
        for found, segment in zip(mask["segments"], row.segments, strict=True):
            pixels = decode_rle(found["rle"]["counts"], *found["rle"]["size"])
            assert (pixels == (ids == segment.id)).mean() > 0.999  # batches may round differently
            assert found["area"] == pixels.sum()
            left, top, width, height = found["bbox"]
            assert pixels[top : top + height, left : left + width].sum() == found["area"]
            assert (found["id"], found["label"], found["thing"]) == (segment.id, segment.label, segment.thing)
            assert found["score"] == pytest.approx(segment.score, abs=1e-4)
            assert found["colour"] == COLOURS[segment.index]


def test_the_same_model_still_gives_semantic_masks(client: Client, place: Path) -> None:
    data = (place / "photos" / "000.png").read_bytes()
    status, said, _ = client.ask("POST", "/segment?model=eomt", data, Content_Type="image/png")
    assert status == 200
    expected = next(vitrail.predict(place / "eomt.safetensors", place / "photos" / "000.png")).mask
    assert expected is not None
    assert (fill_mask(said["masks"][0]["mask"]) == expected).mean() > 0.999


def test_segments_are_refused_in_one_line(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(query: str) -> tuple[int, str]:
        status, said, _ = client.ask("POST", f"/segment?{query}", picture(), Content_Type="image/png")
        return status, said["error"]

    assert ask("panoptic=1") == (409, "'masks' has no queries: panoptic needs a checkpoint of EoMT")
    assert ask("model=eomt&panoptic=1&format=png") == (422, "segments are JSON: leave out format=png or panoptic")
    assert ask("model=classes&panoptic=1") == (409, "'classes' predicts classes: use POST /predict")
    status, message = ask("model=eomt&panoptic=1&mask_threshold=2")
    assert (status, message.split(":")[0]) == (422, "mask_threshold")
    assert ask("model=eomt&panoptic=perhaps")[0] == 422
    monkeypatch.setattr(served_masks, "MAX_MASK_VALUES", 40 * 48)
    status, message = ask(f"model=eomt&{LENIENT}")
    assert status == 413
    assert message.startswith("48×40 pixels, the limit for ")
    assert message.endswith(" queries is 0.0 million")


# --- the page ---


def test_the_page_draws_the_mask_over_the_image(client: Client, browser, tmp_path: Path) -> None:
    from tests.serve.test_page import file, visiting

    address = f"http://127.0.0.1:{client.port}"
    pixels = np.full((48, 80, 3), 100, np.uint8)
    pixels[:, 40:] = (200, 120, 40)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    _, said, _ = client.ask("POST", "/segment", data.getvalue(), Content_Type="image/png")
    classes, mask = said["masks"][0]["mask"]["classes"], fill_mask(said["masks"][0]["mask"])
    with visiting(browser, address) as page:
        page.locator("#files").set_input_files([file("street.png", data.getvalue(), "image/png")])
        page.locator("#masking").wait_for(state="visible")
        assert page.locator("#controls").is_hidden()
        assert page.locator(".scores li").count() == len(classes)
        assert page.locator(".scores .label").all_inner_texts() == [item["label"] for item in classes]

        def drawn() -> np.ndarray:
            values = page.evaluate(
                "(() => { const { width, height } = document.querySelector('.map'), copy = new OffscreenCanvas(width, height);"
                " const context = copy.getContext('2d', { willReadFrequently: true });"
                " context.drawImage(document.querySelector('.map'), 0, 0);"
                " return [...context.getImageData(0, 0, width, height).data]; })()"
            )
            return np.array(values).reshape(48, 80, 4)[..., :3]

        def slide(value: int) -> None:
            page.locator("#opacity").evaluate(
                "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", value
            )

        slide(100)
        table = np.array([[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in COLOURS])
        assert np.array_equal(drawn(), table[mask])
        slide(0)
        assert np.abs(drawn() - pixels).max() <= 1
        slide(100)
        page.locator(".scores button").first.click()
        page.mouse.move(0, 0)
        largest = mask == LABELS.index(classes[0]["label"])
        assert page.locator(".scores button").first.get_attribute("aria-pressed") == "false"
        page.wait_for_timeout(100)
        assert np.abs(drawn() - pixels)[largest].max() <= 1
        if len(classes) > 1:
            assert np.array_equal(drawn()[~largest], table[mask][~largest])
        page.locator("#model").select_option("classes")
        page.locator("#controls").wait_for(state="visible")
        assert page.locator("#masking").is_hidden()


def test_a_tall_image_stays_within_the_window(client: Client, browser) -> None:
    from tests.serve.test_page import file, visiting

    data = io.BytesIO()
    Image.new("RGB", (60, 240), (200, 120, 40)).save(data, "PNG")
    with visiting(browser, f"http://127.0.0.1:{client.port}") as page:
        page.locator("#files").set_input_files([file("tower.png", data.getvalue(), "image/png")])
        page.locator("#masking").wait_for(state="visible")
        box, height = page.locator(".pane.a .frame").bounding_box(), page.evaluate("innerHeight")
        assert box["height"] <= 0.67 * height
        assert box["width"] / box["height"] == pytest.approx(1 / 4, abs=0.01)
