"""A folder of images and masks through the command line: check, train, resume, evaluate, report."""

import csv
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests import forked
from tests.training.runs import assert_same, environment, interrupted, summary, train, trained
from vitrail.data.sources import load_dataset
from vitrail.reports.run import read_run
from vitrail.tasks import task_of
from vitrail.tasks.base import reduce_batch

TINY = ("--set", "model.backbone.size.depth=2", "--set", "model.backbone.size.width=32")
TINY += ("--set", "model.backbone.size.heads=2", "--size", "32", "--batch-size", "8", "--workers", "0")
LENGTH = ("--steps", "90", "--lr", "3e-3")
PYRAMID = ("--set", "model.decoder.channels=16")
COLOURS = {1: (220, 40, 30), 2: (30, 60, 220)}


def write_pair(folder: Path, name: str, seed: int, side: tuple[int, int] = (40, 48)) -> None:
    """Write a grey field with a red and a blue rectangle, and the mask of them."""
    rng, (height, width) = np.random.default_rng(seed), side
    pixels = np.full((height, width, 3), 120) + rng.integers(-20, 20, (height, width, 3))
    mask = np.zeros((height, width), np.uint8)
    for value, colour in COLOURS.items():
        top, left = rng.integers(0, height - 16), rng.integers(0, width - 16)
        mask[top : top + 16, left : left + 16] = value
        pixels[mask == value] = colour
    for kind, array in (("images", pixels.clip(0, 255).astype(np.uint8)), ("masks", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / kind / f"{name}.png")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmentation")
    for number in range(24):
        write_pair(folder / "shapes" / "train", f"{number:02}", number)
    for number in range(8):
        write_pair(folder / "shapes" / "val", f"{number:02}", 1000 + number)
    (folder / "shapes" / "classes.txt").write_text("ground #808080\nred #dc281e\nblue #1e3cdc\n")
    return folder


@pytest.fixture(scope="module")
def whole(tmp: Path) -> Path:
    trained(tmp, "shapes", "--out", "whole", *TINY, *PYRAMID, *LENGTH)
    return tmp / "whole"


def test_masks_are_recognised_and_learnt(tmp: Path, whole: Path) -> None:
    record = json.loads((whole / "run.json").read_text())
    assert (record["recipe_name"], record["task"]) == ("segment", "masks")
    assert record["labels"] == ["ground", "red", "blue"]
    assert record["data"]["colours"] == ["#808080", "#dc281e", "#1e3cdc"]
    assert record["data"]["splits"]["train"]["classes"]["red"] > 0
    found = summary(whole)
    assert found["miou"] > 0.35  # 0.54 where measured; a mask of ground alone has 0.24
    assert found["interval"][0] <= found["miou"] <= found["interval"][1]
    assert {"pixel_accuracy", "boundary_iou", "iou"} <= set(found)


def test_model_file_predicts_masks_with_its_labels(tmp: Path, whole: Path) -> None:
    model = vitrail.load(whole / "model.safetensors")
    assert (model.labels, model.card["colours"][1]) == (("ground", "red", "blue"), "#dc281e")
    assert model.preprocessing is not None
    with Image.open(tmp / "shapes" / "val" / "images" / "00.png") as image:
        logits = model(model.preprocessing(image)[None])
    assert logits.shape == (1, 3, 32, 32)


def test_report_shows_classes_confusion_and_worst_images(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    for text in ("mean IoU", "boundary IoU", "Confusion of pixels", "Images with the lowest IoU", "ground"):
        assert text in page, text
    assert len(list((whole / "evaluation" / "pictures").glob("validation-*.jpg"))) == 8
    with np.load(whole / "evaluation" / "validation.npz") as arrays:
        assert arrays["pixels"].shape == (8, 3, 3)
        assert arrays["confusion"].sum() == arrays["pixels"][:, 1].sum() == 8 * 40 * 48  # at the size of the masks


def test_matrices_of_each_image_in_files_of_earlier_versions_are_read(tmp: Path, whole: Path) -> None:
    now = read_run(whole).evaluations["validation"]
    old = tmp / "old"
    shutil.copytree(whole, old)
    matrices = np.zeros((8, 3, 3), np.int64)
    matrices[:, range(3), range(3)] = now.pixels[:, 0]  # as if all other pixels were of one wrong class
    matrices[:, 0, 1] = 5
    np.savez_compressed(old / "evaluation" / "validation.npz", confusions=matrices, boundary=now.boundary)
    found = read_run(old).evaluations["validation"]
    assert np.array_equal(found.pixels[:, 1], matrices.sum(2))
    assert np.array_equal(found.confusion, matrices.sum(0))
    done = forked.run("report", "old", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert "Confusion of pixels" in (old / "report.html").read_text()


def test_a_validation_mask_that_was_removed_is_left_out(tmp: Path) -> None:
    shutil.copytree(tmp / "shapes", tmp / "fewer")
    images = load_dataset(str(tmp / "fewer"))["validation"]
    unreadable: dict[str, str] = {}
    (tmp / "fewer" / "val" / "masks" / "02.png").unlink()
    indices, rows, sums = reduce_batch(task_of(images), torch.zeros(8, 3, 32, 32), images, np.arange(8), unreadable)
    assert indices.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert (len(rows), sums["confusion"].sum()) == (7, 7 * 40 * 48)
    assert [Path(name).name for name in unreadable] == ["02.png"]


def test_evaluation_repeats_the_result_of_the_run(tmp: Path, whole: Path) -> None:
    done = forked.run("evaluate", "whole", "--json", "--out", "evaluated", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["miou"] == pytest.approx(summary(whole)["miou"], abs=2e-3)
    assert (found["task"], [row["class"] for row in found["per_class"]]) == ("masks", ["ground", "red", "blue"])
    with (tmp / "evaluated" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert all(0 <= float(row["miou"]) <= 1 and int(row["pixels"]) == 40 * 48 for row in rows)
    assert "Images with the lowest IoU" in (tmp / "evaluated" / "report.html").read_text()


def test_two_models_are_compared_on_the_same_masks(tmp: Path, whole: Path) -> None:
    trained(tmp, "shapes", "--out", "short", *TINY, "--steps", "2")
    done = forked.run("evaluate", "whole", "--against", "short", "--json", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["comparisons"]
    assert pair["difference"] < 0
    assert pair["beyond_chance"]
    compared = forked.run("report", "whole", "short", "--json", cwd=tmp, env=environment(tmp))
    assert compared.returncode == 0, compared.stderr


def test_an_ignored_class_neither_trains_nor_counts(tmp: Path) -> None:
    trained(tmp, "shapes", "--out", "ignoring", *TINY, "--steps", "2", "--ignore", "2")
    assert json.loads((tmp / "ignoring" / "run.json").read_text())["labels"] == ["ground", "red"]
    blue = sum(int((np.asarray(Image.open(path)) == 2).sum()) for path in (tmp / "shapes" / "val" / "masks").iterdir())
    with np.load(tmp / "ignoring" / "evaluation" / "validation.npz") as arrays:
        assert arrays["confusion"].sum() == 8 * 40 * 48 - blue


def test_backbone_of_a_classifier_is_kept_and_the_decoder_is_new(tmp: Path, whole: Path) -> None:
    backbone = vitrail.build(patch=8, width=32, depth=2, heads=2, image_size=32, classes=5)
    vitrail.save(backbone, tmp / "backbone.safetensors")
    options = ("--tune", "head", "--batch-size", "8", "--workers", "0", "--steps", "2")
    trained(tmp, "shapes", "--init", "backbone.safetensors", "--out", "frozen", *options)
    model = vitrail.load(tmp / "frozen" / "model.safetensors")
    ours, theirs = model.backbone.state_dict(), backbone.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert "LinearDecoder" in json.loads((tmp / "frozen" / "recipe.json").read_text())["model"]["decoder"]["type"]


@pytest.mark.parametrize("decoder", ["linear", "linear-4", "eomt"])
def test_every_decoder_trains_and_evaluates(tmp: Path, decoder: str) -> None:
    backbone = vitrail.build(patch=8, width=32, depth=4, heads=2, image_size=32)
    vitrail.save(backbone, tmp / "deep.safetensors")
    options = ("--batch-size", "8", "--workers", "0", "--steps", "3", "--decoder", decoder)
    trained(tmp, "shapes", "--init", "deep.safetensors", "--out", decoder, *options)
    found = json.loads((tmp / decoder / "recipe.json").read_text())
    matched = {"eomt": "MaskMatching"}.get(decoder, "Segmentation")
    assert found["objective"]["type"] == matched
    assert 0 <= summary(tmp / decoder)["miou"] <= 1
    model = vitrail.load(tmp / decoder / "model.safetensors")
    ours, theirs = model.backbone.state_dict(), backbone.state_dict()  # type: ignore[union-attr]
    moved = [name for name in ours if name.startswith("blocks.") and not torch.equal(ours[name], theirs[name])]
    assert len(moved) > 20  # the loss reaches the layers of the backbone
    losses = [json.loads(line).get("loss") for line in (tmp / decoder / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(loss) for loss in losses if loss is not None)
    assert any(loss is not None for loss in losses)


def test_a_trained_eomt_knows_things_and_stuff_and_writes_segments(tmp: Path) -> None:
    for number in range(6):
        write_pair(tmp / "objects", f"{number:02}", number)
    things = {"ground": 0, "red": 1, "blue": 1}
    classes = [{"id": number, "name": name, "isthing": thing} for number, (name, thing) in enumerate(things.items())]
    (tmp / "objects" / "classes.json").write_text(json.dumps(classes))
    vitrail.save(vitrail.build(patch=8, width=32, depth=4, heads=2, image_size=32), tmp / "deep.safetensors")
    options = ("--init", "deep.safetensors", "--batch-size", "4", "--workers", "0", "--steps", "2")
    trained(tmp, "objects", "--out", "segments-run", "--decoder", "eomt", *options)
    assert vitrail.load(tmp / "segments-run" / "model.safetensors").card["things"] == [False, True, True]
    arguments = ("segments-run", "objects/images", "--out", "segments/", "--panoptic", "--score-threshold", "0.1")
    done = forked.run("predict", *arguments, cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert "stuff" not in done.stdout
    coco = json.loads((tmp / "segments" / "panoptic.json").read_text())
    assert {category["name"]: category["isthing"] for category in coco["categories"]} == things
    assert len(coco["annotations"]) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shapes", "--recipe", "finetune", "--init", "backbone.safetensors"), "use --recipe segment"),
        (("shapes", "--balance", "sampling"), "--balance sampling needs classes of images"),
        (("shapes", "--per-class", "3"), "--per-class needs one label per image"),
        (("shapes", "--set", "augment.1=RandomErasing"), "RandomErasing"),
        (("shapes", "--decoder", "eomt", "--model", "Swin-T"), "EoMT does not support Swin"),
        (
            ("shapes", "--decoder", "upernet", "--batch-size", "1", "--size", "32"),
            "with UPerNet trains on at least 2 images",
        ),
        (
            ("shapes", "--decoder", "upernet", "--batch-size", "3", "--size", "32", "--set", "accumulate=2"),
            "with UPerNet trains on at least 2 images at a time, got 1",
        ),
        (("digits", "--decoder", "linear"), "does not use --decoder"),
        (("digits", "--recipe", "segment"), "does not learn one class per image"),
    ],
)
def test_bad_requests_are_one_line(tmp: Path, arguments: tuple[str, ...], message: str) -> None:
    vitrail.save(vitrail.build(patch=8, width=32, depth=1, heads=2, image_size=32), tmp / "backbone.safetensors")
    done = train(tmp, *arguments, "--out", "refused", "--steps", "2", "--workers", "0")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()[-1]) < 220
    assert message in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("evaluate", "whole", "shapes", "--probe", "knn"),
            "a probe needs classes of images, and shapes has masks: use vitrail transfer",
        ),
        (("transfer", "whole", "shapes", "--methods", "knn", "--out", "table"), "knn does not apply to masks"),
        (("evaluate", "whole", "digits"), "predicts masks, and the data has classes of images"),
        (("predict", "whole", "shapes", "--out", "rows.csv"), "rows.csv is not for masks: use --out masks/"),
        (("convert", "whole", "there", "--to", "timm"), "timm does not support segmentation models"),
    ],
)
def test_commands_without_masks_say_so_in_one_line(
    tmp: Path, whole: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = forked.run(*arguments, cwd=tmp, env=environment(tmp))
    assert done.returncode == 2, done.stdout
    assert message in done.stderr.splitlines()[-1], done.stderr


def test_inspection_shows_the_attention_of_the_backbone(tmp: Path, whole: Path) -> None:
    image = "shapes/val/images/00.png"
    done = forked.run("inspect", "whole", image, "--out", "figures", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert (tmp / "figures" / "index.html").is_file()


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(tmp: Path, whole: Path) -> None:
    options = ("shapes", "--out", "killed", *TINY, *PYRAMID, *LENGTH, "--save-seconds", "0")
    assert interrupted(tmp, tmp / "killed", signal.SIGKILL, 20, *options) == -signal.SIGKILL
    trained(tmp, "--resume", "killed")
    assert_same(tmp / "killed", whole)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("preprocessing.fit=cover", "masks need the whole image: preprocessing.fit must be 'squash', got 'cover'"),
        ("preprocessing.turn=false", "preprocessing.turn must be True, got False"),
    ],
)
def test_preprocessing_of_a_part_of_the_image_is_refused(tmp: Path, setting: str, message: str) -> None:
    done = train(tmp, "shapes", "--out", "cropped", *TINY, "--steps", "2", "--set", setting)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp / "cropped").exists()


def test_a_run_is_not_resumed_with_edited_masks(tmp: Path) -> None:
    shutil.copytree(tmp / "shapes", tmp / "edited")
    options = ("edited", "--out", "stopped", *TINY, *PYRAMID, *LENGTH, "--save-seconds", "0")
    assert interrupted(tmp, tmp / "stopped", signal.SIGKILL, 5, *options) == -signal.SIGKILL
    path = tmp / "edited" / "train" / "masks" / "00.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = (mask[0, 0] + 1) % 3
    Image.fromarray(mask).save(path)
    done = train(tmp, "--resume", "stopped")
    assert done.returncode == 2, done.stdout
    assert "or others: restore them, or start a new run" in done.stderr.splitlines()[-1], done.stderr
