"""Masks of images of any size, and the files that `predict` writes them to."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitrail
from tests.deploy.asked import model as save_classifier
from tests.deploy.asked import vitrail as command
from tests.deploy.masks import COLOURS, LABELS, SIDE, photos, save_segmenter, segmenter
from tests.deploy.test_predict_resume import Killed, killed_after
from vitrail.data.dataset import Store
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.predict import parallel
from vitrail.deploy.predict import resume as resuming
from vitrail.deploy.predict.inputs import collect_images, collect_inputs, join_stores
from vitrail.deploy.predict.masks import name_masks
from vitrail.deploy.predict.parallel import BatchSizeTuner, ParallelInference
from vitrail.deploy.predict.predict import InferenceOptions, open_pool, with_overlays
from vitrail.deploy.runtimes import masks as inference
from vitrail.deploy.runtimes.base import Runtime
from vitrail.deploy.runtimes.masks import MaskInference, MaskOptions, place_windows
from vitrail.reports.masks import parse_colour
from vitrail.tasks import masks as task
from vitrail.tasks.masks import predict_mask
from vitrail.utils.rle import decode_rle

COUNT = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masks")
    save_segmenter(root / "model.safetensors")
    save_classifier(root / "classifier.safetensors")
    photos(root / "photos", COUNT)
    return root


def predict(place: Path, out: object, *more: object) -> int:
    return command("predict", place / "model.safetensors", place / "photos", "--out", out, "--runtime", "torch", *more)


def masks_of(place: Path, **options) -> list[np.ndarray]:
    rows = vitrail.predict(place / "model.safetensors", place / "photos", **options)
    return [row.mask for row in rows if row.mask is not None]


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- inference at any size ---


def pointwise(pixels: np.ndarray) -> np.ndarray:
    """Return logits of three classes that depend on the red of each pixel alone."""
    red = pixels[:, 0].astype(np.float32) / 255
    return 20 * np.stack([1 - red, np.full_like(red, 0.65), red], axis=1)


def bands(height: int, width: int) -> Image.Image:
    """Return an image of three vertical bands, dark, grey and bright."""
    red = np.repeat([0, 110, 255], -(-width // 3))[:width].astype(np.uint8)
    return Image.fromarray(np.repeat(np.tile(red, (height, 1))[..., None], 3, axis=2))


def run_inference(image: Image.Image, run=pointwise, classes: int = 3, **options) -> np.ndarray:
    method = MaskInference(Preprocessing((16, 16), (16, 16), fit="squash"), MaskOptions(**options), classes)
    (output,) = method.run(run, [method.prepare(image)])
    assert output is not None
    return output.mask


def test_a_mask_is_the_argmax_of_the_resized_logits(place: Path) -> None:
    model, row = segmenter(), next(vitrail.predict(place / "model.safetensors", place / "photos"))
    assert row.mask is not None
    assert row.mask.dtype == np.uint8
    with torch.no_grad():
        logits = model(model.preprocessing(Path(row.path))[None])
    resized = F.interpolate(logits, (60, 96), mode="bilinear", align_corners=False)[0]
    assert (row.mask == resized.argmax(0).numpy()).mean() > 0.999
    assert len(np.unique(row.mask)) > 1
    assert row.labels == LABELS
    assert sum(share for _, share in row.shares) == pytest.approx(1)
    assert row.shares[0][0] == LABELS[np.bincount(row.mask.ravel()).argmax()]


def test_classes_are_resized_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 9, 5).round(decimals=1)  # with ties
    logits[3] = logits[1]
    whole = predict_mask(logits, (40, 31))
    assert np.array_equal(whole, F.interpolate(logits[None], (40, 31), mode="bilinear")[0].argmax(0).numpy())
    monkeypatch.setattr(task, "RESIZED_VALUES", 2 * 40 * 31)
    assert np.array_equal(predict_mask(logits, (40, 31)), whole)


@pytest.mark.parametrize("length", [16, 17, 26, 27, 40, 1000])
def test_windows_cover_an_image_and_overlap_by_a_third(length: int) -> None:
    starts = place_windows(length, 16)
    assert starts[0] == 0
    assert starts[-1] == length - 16
    steps = np.diff(starts)
    assert (steps <= 16 * 2 / 3 + 1).all()
    assert len(starts) == 1 or (steps > 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flip": True},
        {"inference": "sliding"},
        {"inference": "sliding", "flip": True},
        {"inference": "sliding", "scales": (1.0, 1.5)},
    ],
)
@pytest.mark.parametrize("size", [(48, 96), (96, 48), (16, 16), (7, 120)])
def test_every_way_finds_classes_that_depend_on_the_pixel_alone(options: dict, size: tuple[int, int]) -> None:
    mask, bright = run_inference(bands(*size), **options), np.asarray(bands(*size))[..., 0]
    expected = np.select([bright == 0, bright == 110], [0, 1], 2)
    assert mask.shape == size
    inner = slice(size[1] // 6, size[1] // 6 + 1), slice(size[1] // 2, size[1] // 2 + 1), slice(-size[1] // 6, None)
    for part in inner:  # away from the edges of the bands, which resizing blurs
        assert (mask[:, part] == expected[:, part]).all()


def test_flip_averages_probabilities_of_the_mirror_image() -> None:
    def leans_left(pixels: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(pixels), 3, 16, 16), np.float32)
        logits[:, 1, :, :8], logits[:, 2] = 2.0, 1.0
        return logits

    image = bands(16, 16)
    assert (run_inference(image, leans_left) == np.repeat([1, 2], 8)).all()
    mean = run_inference(image, leans_left, flip=True)
    assert (mean == mean[:, ::-1]).all()


def test_sliding_windows_see_small_objects_that_a_squashed_image_loses(place: Path) -> None:
    whole, sliding = masks_of(place), masks_of(place, inference="sliding")
    assert [mask.shape for mask in sliding] == [mask.shape for mask in whole]
    assert any((first != second).any() for first, second in zip(whole, sliding, strict=True))
    image = np.zeros((16, 320, 3), np.uint8)
    image[:, 100:104] = 255
    assert (run_inference(Image.fromarray(image), inference="sliding")[:, 101:103] == 2).all()
    assert not (run_inference(Image.fromarray(image)) == 2).any()


def test_images_are_upright(place: Path, tmp_path: Path) -> None:
    image = Image.open(place / "photos" / "000.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    turned, straight = (
        next(vitrail.predict(place / "model.safetensors", path)) for path in (tmp_path, place / "photos")
    )
    assert turned.mask is not None
    assert np.array_equal(turned.mask, straight.mask)


def test_wrong_options_are_one_line(place: Path) -> None:
    with pytest.raises(ValueError, match="unknown inference='tiles': use whole or sliding"):
        masks_of(place, inference="tiles")
    with pytest.raises(ValueError, match="scales= needs inference='sliding'"):
        masks_of(place, scales=(1.0, 1.5))
    with pytest.raises(ValueError, match=r"scales= must be one or more numbers >= 1, got \(0.5,\)"):
        masks_of(place, inference="sliding", scales=(0.5,))
    with pytest.raises(ValueError, match=r"top= is for classes of images, and .* predicts masks: leave it out"):
        vitrail.predict(place / "model.safetensors", place / "photos", top=2)
    with pytest.raises(ValueError, match=r"flip= is for segmentation models, and .* predicts no masks"):
        vitrail.predict(place / "classifier.safetensors", place / "photos", flip=True)
    with pytest.raises(ValueError, match="merge= does not support segmentation models"):
        masks_of(place, merge=2)


def test_an_image_too_long_for_windows_is_an_error_row(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_MAP_BYTES", 4 * len(LABELS) * SIDE * 52)
    long = np.zeros((SIDE, 60, 3), np.uint8)
    images = [np.zeros((SIDE, 40, 3), np.uint8), long]
    first, second = vitrail.predict(place / "model.safetensors", images, inference="sliding")
    assert first.mask is not None
    assert second.error is not None
    assert "60×32 pixels × 4 classes need more than " in second.error
    assert second.error.endswith("GB in sliding windows: use inference='whole' or smaller scales")
    (row,) = vitrail.predict(place / "model.safetensors", images[:1], inference="sliding", scales=(1, 2))
    assert row.error is not None
    assert "smaller scales" in row.error


def test_outputs_that_are_not_finite_are_an_error_row(place: Path) -> None:
    model = segmenter()
    with torch.no_grad():
        model.head.classifier.weight[0] = torch.nan
    for options in ({}, {"inference": "sliding"}):
        (row,) = vitrail.predict(model, [np.zeros((50, 40, 3), np.uint8)], **options)
        assert row.mask is None
        assert row.error == "the outputs of the model are not finite"


MEMORY = """
import resource, sys
import numpy as np
from PIL import Image
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import Runtime
from vitrail.deploy.runtimes.masks import MaskInference, MaskOptions

classes, side, length = 150, 64, 1024
method = MaskInference(Preprocessing((side, side), (side, side), fit="squash"), MaskOptions(sys.argv[1]), classes)
image = Image.fromarray(np.zeros((8 * side, 8 * length, 3), np.uint8))
logits = np.ones((1, classes, side, side), np.float32)
run = lambda pixels: np.repeat(logits, len(pixels), 0)
prepared = [method.prepare(image)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(method.run(run, prepared))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is that of Linux")
@pytest.mark.parametrize("mode", ["whole", "sliding"])
def test_memory_does_not_grow_with_classes_times_pixels(mode: str) -> None:
    found = subprocess.run([sys.executable, "-c", MEMORY, mode], capture_output=True, text=True, check=True)
    probabilities, part = 4 * 150 * 64 * 1024, 4 * task.RESIZED_VALUES  # of all windows; of the image, a few classes
    pixels = 512 * 8192
    limit = 2 * probabilities + 2 * part + 24 * pixels  # and maps of the best class
    assert limit < 4 * 150 * pixels / 6, "the probabilities of the image would be six times as much"
    assert int(found.stdout) < limit


def test_few_windows_are_computed_at_once() -> None:
    lengths: list[int] = []

    def run(pixels: np.ndarray) -> np.ndarray:
        lengths.append(len(pixels))
        return pointwise(pixels)

    run_inference(bands(16, 512), run, inference="sliding")
    assert max(lengths) <= inference.WINDOWS < sum(lengths)


# --- memory of batches ---


def test_large_images_make_small_batches(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    whole, run = masks_of(place), MaskInference.run

    def record(self: MaskInference, *arguments) -> object:
        lengths.append(len(arguments[1]))
        return run(self, *arguments)

    monkeypatch.setattr(MaskInference, "run", record)
    size = 3 * SIDE * SIDE + 60 * 96  # of the model's pixels and of a mask
    for maximum, expected in ((2 * size, [2, 2, 2]), (2 * size + 1, [3, 3]), (1, [1] * COUNT)):
        monkeypatch.setattr(parallel, "MAX_BATCH_BYTES", maximum)
        masks = masks_of(place, batch_size=COUNT, workers=1)
        assert lengths == expected
        assert all((first == second).mean() > 0.999 for first, second in zip(whole, masks, strict=True))
        lengths.clear()


def test_finished_masks_wait_within_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    count, size = 40, 16 * 16
    monkeypatch.setattr(parallel, "MAX_PENDING_BYTES", 3 * size)
    images = collect_images([np.full((16, 16, 3), 6 * number, np.uint8) for number in range(count)])
    squash = MaskInference(Preprocessing((16, 16), (16, 16), fit="squash"), MaskOptions(), 3)
    lanes = [cast(Runtime, pointwise)] * 2
    batches = ParallelInference(images, 0, count, squash, lanes, BatchSizeTuner(1, 1, fixed=True))
    seen = []
    for batch in batches:
        time.sleep(0.005)  # slower than the threads
        seen.append(batch.start)
        assert len(batches.finished) <= 3 + len(lanes)
        assert batch.nbytes == size
    assert seen == list(range(count))


def test_overlays_keep_few_images(place: Path) -> None:
    pool = open_pool(place / "model.safetensors", "logits", InferenceOptions(batch_size=16), 32)
    assert pool.batch_size.size == 16
    with_overlays(pool)
    assert pool.batch_size.size == 4


# --- files ---


def test_a_directory_has_a_palette_png_per_image(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "masks"
    assert predict(place, f"{out}/", "--overlays") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{out}/"
    table, expected = read_table(out / "masks.csv"), masks_of(place)
    assert [row["mask"] for row in table] == ["000.png", "002.png", "004.png"] + [
        f"below/{n:03d}.png" for n in (1, 3, 5)
    ]
    for row, mask in zip(table, expected, strict=True):
        with Image.open(out / row["mask"]) as image:
            assert image.mode == "P"
            assert np.array_equal(np.asarray(image), mask)
            palette = np.array(image.getpalette()).reshape(-1, 3)
        assert [tuple(colour) for colour in palette[: len(LABELS)]] == [parse_colour(colour) for colour in COLOURS]
        assert [float(row[label]) for label in LABELS] == pytest.approx(
            [(mask == index).mean() for index in range(len(LABELS))], abs=1e-5
        )
        with Image.open((out / row["mask"]).with_suffix(".overlay.jpg")) as overlay:
            assert overlay.size == (96, 60)


def test_json_lines_and_coco_have_the_same_masks(place: Path, tmp_path: Path) -> None:
    assert predict(place, tmp_path / "masks.jsonl") == 0
    assert predict(place, tmp_path / "masks.json") == 0
    expected = masks_of(place)
    lines = [json.loads(line) for line in (tmp_path / "masks.jsonl").read_text(encoding="utf-8").splitlines()]
    coco = json.loads((tmp_path / "masks.json").read_text(encoding="utf-8"))
    assert [category["name"] for category in coco["categories"]] == list(LABELS)
    names = {category["id"]: category["name"] for category in coco["categories"]}
    assert coco["errors"] == []
    assert len({annotation["id"] for annotation in coco["annotations"]}) == len(coco["annotations"])
    for line, image, mask in zip(lines, coco["images"], expected, strict=True):
        assert (line["height"], line["width"], line["error"]) == (*mask.shape, None)
        assert line["path"] == image["file_name"]
        assert [item["share"] for item in line["classes"]] == sorted(
            (item["share"] for item in line["classes"]), reverse=True
        )
        for item in line["classes"]:
            assert item["rle"]["size"] == list(mask.shape)
            pixels = decode_rle(item["rle"]["counts"], *mask.shape)
            assert np.array_equal(pixels, mask == LABELS.index(item["label"]))
        found = [annotation for annotation in coco["annotations"] if annotation["image_id"] == image["id"]]
        assert {names[annotation["category_id"]] for annotation in found} == {item["label"] for item in line["classes"]}
        for annotation in found:
            pixels = decode_rle(annotation["segmentation"]["counts"], *mask.shape)
            assert np.array_equal(pixels, mask == LABELS.index(names[annotation["category_id"]]))
            left, top, width, height = annotation["bbox"]
            assert pixels[top : top + height, left : left + width].sum() == pixels.sum() == annotation["area"]
            assert pixels[top].any()
            assert pixels[:, left].any()


def test_standard_output_has_a_line_per_image(place: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert predict(place, "-", "--limit", 2, "--inference", "sliding", "--flip") == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    shares = masks_of(place, inference="sliding", flip=True)[0]
    assert len(lines) == 2
    largest = np.bincount(shares.ravel()).argmax()
    assert lines[0].startswith(f"{place}/photos/000.png: {LABELS[largest]} {100 * (shares == largest).mean():.1f} %, ")
    assert predict(place, "-", "--limit", 1, "--format", "jsonl") == 0
    assert json.loads(capsysbinary.readouterr().out)["height"] == 60


@pytest.mark.parametrize("name", ["masks/", "masks.jsonl", "masks.json"])
def test_a_killed_run_resumes_to_the_same_masks(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)
    (tmp_path / "whole").mkdir()
    assert predict(place, f"{tmp_path}/whole/{name}", "--batch-size", 1) == 0
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            predict(place, f"{tmp_path}/{name}", "--batch-size", 1)
    stream = tmp_path / name / "masks.csv" if name == "masks/" else tmp_path / name
    assert not stream.exists()
    with stream.with_name(f"{stream.name}.partial").open("ab") as file:
        file.write(b"half a row")
    if name == "masks/":
        assert len(list((tmp_path / name).glob("**/*.png"))) == 3
    assert predict(place, f"{tmp_path}/{name}", "--batch-size", 1, "--flip", "--resume") == 2, "other masks"
    assert predict(place, f"{tmp_path}/{name}", "--batch-size", 1, "--resume") == 0

    def contents(root: Path) -> dict[str, bytes]:
        files = [path for path in root.rglob("*") if path.is_file() and "whole" not in path.relative_to(root).parts]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    assert contents(tmp_path) == contents(tmp_path / "whole")


def test_several_processes_share_a_directory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert predict(place, f"{tmp_path}/masks/") == 0
    table = read_table(tmp_path / "masks" / "masks.csv")
    assert len(table) == COUNT
    assert all((tmp_path / "masks" / row["mask"]).is_file() for row in table)
    assert len({row["mask"] for row in table}) == COUNT


def test_an_unreadable_image_is_an_error_row(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = photos(tmp_path / "photos", 2)
    (images / "bad.jpg").write_bytes(b"no image")
    for name in ("masks/", "m.jsonl", "m.json"):
        assert command("predict", place / "model.safetensors", images, "--out", f"{tmp_path}/{name}") == 0
        assert "1 of 3 images are unreadable" in capsys.readouterr().out
    (row,) = [row for row in read_table(tmp_path / "masks" / "masks.csv") if row["error"]]
    assert row["path"].endswith("bad.jpg")
    assert row["mask"] == row["sky"] == ""
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [bool(line["error"]) for line in lines] == [False, True, False]
    coco = json.loads((tmp_path / "m.json").read_text())
    assert [len(coco["images"]), len(coco["errors"])] == [2, 1]


def test_names_mirror_folders_and_number_those_that_are_equal(tmp_path: Path) -> None:
    paths = ["a/cat.png", "a/cat.jpg", "a/b/cat.jpg", "a/CAT.webp", "a/cat-2.png"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    inputs = collect_inputs([tmp_path / path for path in paths])
    assert name_masks(inputs, len(paths)) == ["cat", "cat-2", "b/cat", "CAT-3", "cat-2-2"]
    assert name_masks(inputs, 1) == ["cat"]


class Named:
    """Images that have only names."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def name(self, item: int) -> str:
        return self.names[item]


def names_of(names: list[str]) -> list[str]:
    return name_masks(join_stores([(cast(Store, Named(names)), None)], (), "names"), len(names))


def test_names_keep_dots_and_the_numbers_of_rows() -> None:
    assert names_of(["p/photo.2024-01-01", "p/photo.2024-01-02.JPG"]) == ["photo.2024-01-01", "photo.2024-01-02"]
    rows = ["a/train.parquet[0]", "a/train.parquet[12]", "a/v1.5[3]", "a/image[3]", "a/train.npz[12]"]
    assert names_of(rows) == ["train-0", "train-12", "v1.5-3", "image-3", "train-12-2"]


def test_numbering_many_equal_names_takes_linear_time() -> None:
    count = 20_000
    start = time.process_time()
    names = names_of(["cat.png"] * count)
    assert names[-1] == f"cat-{count}"
    assert len(set(names)) == count
    assert time.process_time() - start < 10, "200 million lookups would take half a minute or more"


def test_names_stay_inside_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos", 1)
    photos(tmp_path / "work" / "more", 1)
    monkeypatch.chdir(tmp_path / "work")
    inputs = collect_inputs(["../photos/000.png", "more/000.png", tmp_path / "photos" / "000.png"])
    for name in name_masks(inputs, len(inputs)):
        assert not os.path.isabs(name)
        assert ".." not in Path(name).parts


def test_refusals_are_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object, model: str = "model") -> str:
        paths = place / f"{model}.safetensors", place / "photos"
        assert command("predict", *paths, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    folder, listed = f"{tmp_path}/masks/", tmp_path / "m.jsonl"
    assert "--top is for classes of images, and " in refused("--out", folder, "--top", 3)
    assert "--merge does not support segmentation models" in refused("--out", folder, "--merge", 2)
    assert "--overlays needs a directory" in refused("--out", listed, "--overlays")
    assert "is not for masks: use --out masks/" in refused("--out", tmp_path / "m.csv")
    assert "is not for masks: use --out masks/" in refused("--out", listed, "--format", "png")
    assert "--format coco is not for --out -" in refused("--out", "-", "--format", "coco")
    for option in ("--overlays", "--flip"):
        assert f"{option} is for segmentation models" in refused("--out", listed, option, model="classifier")
    assert "--overlays is for segmentation models" in refused("--out", folder, "--overlays", model="classifier")
    assert "predicts classes, give a .csv" in refused("--out", folder, model="classifier")
    assert "has other files: give a new or an empty directory" in refused("--out", place / "photos", "--force")
    assert not (tmp_path / "masks").exists()
    assert not listed.exists()


def test_force_and_complete_directories(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"{tmp_path}/masks/"
    assert predict(place, out, "--limit", 1) == 0
    assert predict(place, out, "--limit", 1) == 2
    assert "masks.csv exists: give another name, or --force to replace it" in capsys.readouterr().err
    assert predict(place, out, "--force") == 0
    assert len(read_table(tmp_path / "masks" / "masks.csv")) == COUNT


def files_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_force_deletes_the_masks_of_the_old_table_alone(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "masks"
    assert predict(place, f"{out}/", "--overlays") == 0
    assert "below/001.overlay.jpg" in files_below(out)
    (out / "mine.png").write_bytes(b"of the user")
    (tmp_path / "outside.png").write_bytes(b"of the user")
    with (out / "masks.csv").open("a") as table:
        table.write(f"x,../outside.png,,\ny,{tmp_path}/outside.png,,\n")
    assert predict(place, f"{out}/", "--force", "--limit", 2) == 0
    assert files_below(out) == {"masks.csv", "mine.png", "000.png", "002.png"}
    assert (tmp_path / "outside.png").exists()


def test_force_deletes_the_masks_of_an_interrupted_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            predict(place, f"{tmp_path}/masks/", "--batch-size", 1)
    assert "004.png" in files_below(tmp_path / "masks")
    assert predict(place, f"{tmp_path}/masks/", "--force", "--limit", 1) == 0
    assert files_below(tmp_path / "masks") == {"masks.csv", "000.png"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("masks.csv", "image,mask\n000.png,a.png\n"),
        ("masks.csv", "path,mask,errors\n"),
        ("masks.csv.bak", "path,mask,error\n"),
        ("masks.csv.partial.json", '{"rows": 1}'),
    ],
)
def test_other_tables_protect_their_directory(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "000.png").write_bytes(b"of the user")
    for more in ((), ("--force",), ("--resume",)):
        assert predict(place, f"{tmp_path}/", *more) == 2
        assert "has other files: give a new or an empty directory" in capsys.readouterr().err
    assert (tmp_path / "000.png").read_bytes() == b"of the user"
