"""Evaluation of segmentation models: classes by name, colours of the model, whole upright images, precision."""

import copy
import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.masks import reorder_classes
from vitrail.models.adapt import segment_from
from vitrail.models.segmenter import Segmenter
from vitrail.reports.masks import parse_colour
from vitrail.tasks import task_of
from vitrail.training.distributed import Team
from vitrail.training.runs.supervised import compute_outputs
from vitrail.utils.precision import PrecisionChoice

CLASSES, COLOURS = ("ground", "red", "blue"), ("#112233", "#aa0000", "#0000aa")
ORIENTATION = 0x0112


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write images of three vertical bands, and their masks, with colours that are not the model's."""
    folder, rng = tmp_path / "bands", np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(6):
        mask = np.repeat(rng.permutation(3), 16).astype(np.uint8)[None].repeat(40, 0)
        pixels = np.array([(120, 120, 120), (220, 40, 30), (30, 60, 220)], np.uint8)[mask]
        pixels[rng.random(mask.shape) < 0.3] = 255
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("ground #808080\nred #dc281e\nblue #1e3cdc\n")
    return folder


def build_model(seed: int = 0) -> Segmenter:
    """Return a model whose masks have several classes."""
    torch.manual_seed(seed)
    source = vitrail.build(patch=8, width=32, depth=1, heads=2, image_size=32, classes=5)
    source.preprocessing = Preprocessing((32, 32), (36, 36))
    model = segment_from(source, "linear", len(CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.labels, model.card = CLASSES, {"colours": list(COLOURS)}
    return model.eval()


def with_outputs(model: Segmenter, order: list[int], extra: str | None = None) -> Segmenter:
    """Return the model with its outputs in another order, and one that is never predicted."""
    labels, colours = [CLASSES[k] for k in order], [COLOURS[k] for k in order]
    if extra is not None:
        labels, colours = [*labels, extra], [*colours, "#00ff00"]
    other = copy.deepcopy(model.replace_head(len(labels)))
    assert isinstance(other, Segmenter)
    for name, tensor in other.head.classifier.named_parameters():  # type: ignore[union-attr]
        tensor.data.fill_(-1e4 if name == "bias" else 0)
        tensor.data[: len(order)] = model.head.classifier.get_parameter(name).data[order]  # type: ignore[union-attr]
    other.labels, other.preprocessing, other.card = tuple(labels), model.preprocessing, {"colours": colours}
    return other.eval()


def test_a_segmenter_of_a_classifier_sees_the_whole_upright_image() -> None:
    pipeline = build_model().preprocessing
    assert pipeline is not None
    assert (pipeline.fit, pipeline.resize, pipeline.turn) == ("squash", (32, 32), True)
    plain = vitrail.build(patch=8, width=32, depth=1, heads=2, image_size=32)
    assert segment_from(plain, "linear", 3).preprocessing is plain.preprocessing is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fit": "cover"}, "masks need the whole image: preprocessing.fit must be 'squash', got 'cover'"),
        ({"resize": (36, 36)}, "masks need the whole image: preprocessing.resize must be its size"),
    ],
)
def test_a_model_that_sees_a_part_of_the_image_is_refused(data: Path, changes: dict, message: str) -> None:
    model = build_model()
    assert model.preprocessing is not None
    model.preprocessing = replace(model.preprocessing, **changes)
    with pytest.raises(ValueError, match=message):
        evaluate(model, str(data))
    open_checkpoint(model, output_kind="features")  # features of a part are as good


def test_a_turned_image_is_evaluated_upright(data: Path) -> None:
    model = build_model()
    assert model.preprocessing is not None
    model.preprocessing = replace(model.preprocessing, turn=False)  # as files of earlier versions have it
    expected = evaluate(model, str(data)).as_dict()
    for path in (data / "images").iterdir():
        with Image.open(path) as image:
            stored, exif = image.transpose(Image.Transpose.ROTATE_90), Image.Exif()
        exif[ORIENTATION] = 6  # shown after a quarter turn clockwise
        stored.save(path, exif=exif)
    assert evaluate(model, str(data)).as_dict()["confusion"] == expected["confusion"]


def test_legend_and_drawings_have_the_colours_of_the_model(data: Path) -> None:
    model = with_outputs(build_model(), [2, 0, 1], extra="sky")  # the data has three classes in another order
    report = evaluate(model, str(data)).report_data()
    assert report.labels == ["blue", "ground", "red", "sky"]
    assert report.palette == tuple(map(parse_colour, ("#0000aa", "#112233", "#aa0000", "#00ff00")))
    assert len(report.evaluation.images) == 6


def test_the_report_of_a_model_with_more_classes_is_written(data: Path, tmp_path: Path) -> None:
    model = with_outputs(build_model(), [2, 0, 1], extra="sky")
    evaluate(model, str(data), against=[build_model()]).write(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "#0000aa" in page
    assert "#1e3cdc" not in page  # the data's blue


def test_classes_are_reordered_by_name() -> None:
    found = reorder_classes(np.arange(6).reshape(1, 3, 2), ["b", "a"], ["a", "new", "b"])
    assert found.tolist() == [[[1, 0, 0], [3, 0, 2], [5, 0, 4]]]


def test_confusion_is_the_sum_over_images_and_rows_do_not_grow_with_the_square_of_classes(data: Path) -> None:
    model = evaluate(build_model(), str(data), split="train").evaluations[0]
    pixels, confusion = model.evaluation.pixels.sum(0), np.array(model.confusion_dict()["confusion"]["matrix"])
    assert confusion.sum() == len(model.evaluation) * 40 * 48
    assert [np.diagonal(confusion).tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist()] == pixels.tolist()
    assert model.outputs.logits.shape == (len(model.evaluation), 5 * 3)


@pytest.mark.parametrize("extra", [None, "sky"])
def test_models_with_other_orders_and_more_classes_are_compared_by_name(data: Path, extra: str | None) -> None:
    first, other = build_model(), build_model(1)
    plain = evaluate(first, str(data), against=[other]).pairs[0].test
    ordered = evaluate(first, str(data), against=[with_outputs(other, [2, 0, 1], extra)]).pairs[0].test
    assert plain.difference != 0
    assert ordered == plain
    same = evaluate(first, str(data), against=[with_outputs(first, [1, 2, 0], extra)]).pairs[0].test
    assert (same.difference, same.first_only, same.second_only) == (0, 0, 0)


def test_a_mapping_of_classes_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"class_map= is for classes, and .* predicts masks: leave it out"):
        evaluate(build_model(), str(data), class_map="index")


def test_rows_of_no_image_are_an_empty_array(data: Path) -> None:
    images = load_dataset(str(data), fractions=(1.0, 0.0, 0.0))["train"]
    rows = task_of(images).reduce_outputs(torch.zeros(0, 3, 8, 8), images, np.zeros(0, np.int64))
    assert (rows.shape, rows.dtype) == ((0, 5 * 3 + 3 * 3), np.int64)


def test_a_process_without_images_computes_on_a_blank_one() -> None:
    model, team = build_model(), Team(0, 1, torch.device("cpu"))
    seen: list[int] = []

    def run(pixels: Tensor) -> Tensor:
        seen.append(len(pixels))
        return model(pixels)

    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), empty, empty)
    with torch.no_grad():
        assert compute_outputs(run, batch, lambda pixels: pixels.float(), team).shape == (0, 3, 32, 32)
    assert seen == [1]


def test_precision_is_chosen_and_checked_by_pixels(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = importlib.import_module("vitrail.deploy.runtimes.precision")
    for name, value in {"MIN_IMAGES": 2, "MIN_MACS": 0, "CHECKED_IMAGES": 4}.items():
        monkeypatch.setattr(precision, name, value)
    monkeypatch.setattr(precision, "CHOICES", {})
    monkeypatch.setattr(precision, "measure_runtimes", lambda *_: PrecisionChoice("bf16", "measured"))
    expected = evaluate(build_model(), str(data), precision="fp32").as_dict()
    found = evaluate(build_model(), str(data), batch_size=2)
    (note,) = [note for note in found.evaluations[0].deployed.notes if "first 4 images" in note]
    assert "bf16" in note
    assert found.as_dict()["miou"] == pytest.approx(expected["miou"], abs=0.02)
