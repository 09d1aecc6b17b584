"""Panoptic segments of an EoMT model: rows, the files that `predict` writes them to, and refusals."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.asked import model as save_classifier
from tests.deploy.asked import vitrail as command
from tests.deploy.masks import COLOURS, LABELS, SIDE, eomt_segmenter, photos, save_eomt, save_segmenter
from tests.deploy.test_predict_resume import Killed, killed_after
from vitrail.deploy.predict import resume as resuming
from vitrail.deploy.predict.panoptic import encode_panoptic_png
from vitrail.deploy.predict.predict import InferenceOptions
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.deploy.runtimes.panoptic import (
    PanopticOptions,
    PanopticOutput,
    PanopticReader,
    PanopticSegment,
    measure_segments,
    overlay_segments,
    shade_colour,
)
from vitrail.deploy.runtimes.precision import PrecisionCheck
from vitrail.models.eomt import PackedQueries, unpack_queries
from vitrail.reports.masks import OPACITY, parse_colour
from vitrail.utils.json import to_json
from vitrail.utils.precision import PrecisionChoice
from vitrail.utils.rle import decode_rle

COUNT = 6
LENIENT = ("--score-threshold", "0.3", "--overlap-threshold", "0.1")
KEYWORDS = {"panoptic": True, "score_threshold": 0.3, "overlap_threshold": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("panoptic")
    save_eomt(root / "eomt.safetensors", things=[False, False, True, True])
    save_segmenter(root / "linear.safetensors")
    save_classifier(root / "classifier.safetensors")
    photos(root / "photos", COUNT)
    return root


def predict(place: Path, out: object, *more: object) -> int:
    arguments = place / "eomt.safetensors", place / "photos", "--out", out, "--panoptic", *LENIENT
    return command("predict", *arguments, *more)


def rows_of(place: Path, **options) -> list:
    return list(vitrail.predict(place / "eomt.safetensors", place / "photos", **KEYWORDS, **options))


def read_ids(path: Path | io.BytesIO) -> np.ndarray:
    """Return the ids of a panoptic PNG."""
    with Image.open(path) as image:
        assert image.mode == "RGB"
        red, green, blue = np.moveaxis(np.asarray(image).astype(np.int64), 2, 0)
    return red + 256 * green + 65536 * blue


# --- rows ---


def test_rows_have_segments_that_do_not_overlap(place: Path) -> None:
    rows = rows_of(place)
    assert sum(len(row.segments) for row in rows) > len(rows), "images have several segments"
    for row in rows:
        assert row.mask is None
        assert row.labels == LABELS
        assert (row.segment_ids.dtype, row.segment_ids.shape) == (np.int32, (60, 96))
        assert [segment.id for segment in row.segments] == list(range(1, len(row.segments) + 1))
        assert set(np.unique(row.segment_ids)) <= {0, *(segment.id for segment in row.segments)}
        for segment in row.segments:
            pixels = row.segment_ids == segment.id
            left, top, width, height = segment.box
            assert pixels.sum() == segment.area == pixels[top : top + height, left : left + width].sum()
            assert pixels[top].any()
            assert pixels[top + height - 1].any()
            assert pixels[:, left].any()
            assert pixels[:, left + width - 1].any()
            assert segment.label == LABELS[segment.index]
            assert segment.thing == (segment.index >= 2)
            assert 0.3 < segment.score <= 1


def test_stuff_of_the_model_file_is_joined_and_the_option_wins(place: Path) -> None:
    def count(rows: list, index: int) -> int:
        return max(sum(segment.index == index for segment in row.segments) for row in rows)

    usual, objects, regions = (rows_of(place, stuff=stuff) for stuff in (None, [], "all"))
    assert max(count(objects, index) for index in (0, 1)) > 1
    assert all(count(usual, index) <= 1 for index in (0, 1))
    assert all(count(regions, index) <= 1 for index in range(4))
    assert {segment.thing for row in objects for segment in row.segments} == {True}
    assert {segment.thing for row in regions for segment in row.segments} == {False}
    for one, other in zip(objects, regions, strict=True):
        assert np.array_equal(one.segment_ids > 0, other.segment_ids > 0)


def test_a_high_threshold_leaves_no_segment(place: Path) -> None:
    rows = vitrail.predict(place / "eomt.safetensors", place / "photos", panoptic=True, score_threshold=1.0)
    for row in rows:
        assert row.segments == ()
        assert not row.segment_ids.any()
        assert row.error is None


def test_outputs_that_are_not_finite_are_an_error_row() -> None:
    model = eomt_segmenter()
    with torch.no_grad():
        model.head.classifier.weight[0] = torch.nan
    (row,) = vitrail.predict(model, [np.zeros((50, 40, 3), np.uint8)], panoptic=True)
    assert (row.segment_ids, row.error) == (None, "the outputs of the model are not finite")


def test_a_reader_refuses_too_much_work() -> None:
    packed = np.zeros((2, 16 + 3), np.float32)
    packed[:, 16] = 9.0
    reader = PanopticReader((32, 32), (4, 4), ("sky", "car"), (False, True))
    assert reader.find(packed, (10, 20), max_values=400).ids.shape == (10, 20)
    with pytest.raises(ValueError, match=r"20×10 pixels, the limit for 2 queries is 0.0 million"):
        reader.find(packed, (10, 20), max_values=399)


MEMORY = """
import resource
import numpy as np
from vitrail.deploy.runtimes.panoptic import PanopticReader

queries, cells, size = 100, 8, (1500, 2000)
packed = np.random.default_rng(0).normal(size=(queries, cells * cells + 3)).astype(np.float32)
packed[:, -3] = 9
reader = PanopticReader((64, 64), (cells, cells), ("sky", "car"), (False, True))
reader.find(packed[:2], (64, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reader.find(packed, size)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is that of Linux")
def test_memory_does_not_grow_with_queries_times_pixels() -> None:
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 100 * 1500 * 2000, "less than a byte for every query and pixel"


def test_packed_queries_are_those_of_the_model() -> None:
    model, images = eomt_segmenter(), torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        (expected,), packed = model.predict_queries(images), PackedQueries(model, "a test")(images)
    found = unpack_queries(packed, len(LABELS), (8, 8))
    assert torch.equal(found.masks, expected.masks)
    assert torch.equal(found.classes, expected.classes)


@pytest.mark.parametrize(("noise", "passed"), [(1e-4, True), (8.0, False)])
def test_lower_precisions_are_judged_by_the_pixels_of_semantic_masks(noise: float, passed: bool) -> None:
    model = eomt_segmenter()
    with torch.no_grad():
        packed = PackedQueries(model, "a test")(torch.randn(64, 3, SIDE, SIDE)).numpy()
    contract = ModelContract(model.preprocessing, LABELS, config=to_json(model.config))
    check = PrecisionCheck(contract, "queries", PrecisionChoice("bf16", "measured"))
    rng = np.random.default_rng(0)
    check.add(packed, packed + noise * rng.standard_normal(packed.shape).astype(np.float32))
    assert check.passed is passed
    assert "pixels" in check.why


def test_boxes_and_areas_by_hand() -> None:
    ids = np.array([[1, 1, 0, 2], [0, 1, 0, 2], [2, 0, 0, 0]], np.int32)
    assert measure_segments(ids, 2) == [(3, (0, 0, 2, 2)), (3, (0, 0, 4, 3))]
    assert measure_segments(np.zeros((2, 2), np.int32), 0) == []


def test_an_overlay_has_shades_of_the_class_and_borders() -> None:
    ids = np.zeros((40, 60), np.int32)
    ids[:, :20], ids[:, 20:40] = 1, 2
    segments = tuple(PanopticSegment(n, 1, "road", True, 0.9, 800, (0, 0, 20, 40)) for n in (1, 2))
    image = np.full((40, 60, 3), 100, np.uint8)
    colours = tuple(map(parse_colour, COLOURS))
    drawn = overlay_segments(image, PanopticOutput(ids, segments), colours)
    lighter = shade_colour(colours[1], 1)
    assert lighter != colours[1]
    for column, colour in ((5, colours[1]), (30, lighter)):
        assert drawn[20, column] == pytest.approx(np.array(colour) * OPACITY + 100 * (1 - OPACITY), abs=2)
    assert tuple(drawn[20, 19]) == colours[1], "a line in full colour between two objects of a class"
    assert tuple(drawn[20, 20]) == lighter
    assert (drawn[:, 45:] == 100).all(), "no segment"
    assert len({shade_colour(colours[1], number) for number in range(5)}) == 5


def test_more_segments_than_an_overlay_has_colours() -> None:
    ids = np.arange(1, 301, dtype=np.int32).reshape(15, 20)
    segments = tuple(PanopticSegment(n, 0, "sky", True, 0.9, 1, (0, 0, 1, 1)) for n in range(1, 301))
    drawn = overlay_segments(np.zeros((15, 20, 3), np.uint8), PanopticOutput(ids, segments), [(255, 255, 255)])
    assert drawn.reshape(-1, 3)[:255].any(1).all()
    assert not drawn.reshape(-1, 3)[255:].any()


def test_a_png_has_ids_of_three_bytes() -> None:
    ids = np.array([[0, 1, 255], [256, 65535, 70000]], np.int32)
    assert np.array_equal(read_ids(io.BytesIO(encode_panoptic_png(ids))), ids)


# --- files ---


def test_a_directory_is_in_the_panoptic_format_of_coco(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "segments"
    assert predict(place, f"{out}/", "--overlays") == 0
    coco, expected = json.loads((out / "panoptic.json").read_text(encoding="utf-8")), rows_of(place)
    assert coco["categories"] == [
        {"id": number, "name": name, "isthing": int(number > 2)} for number, name in enumerate(LABELS, start=1)
    ]
    assert coco["errors"] == []
    assert [image["file_name"] for image in coco["images"]] == [row.path for row in expected]
    assert [annotation["file_name"] for annotation in coco["annotations"]] == [
        *("000.png", "002.png", "004.png"),
        *(f"below/{n:03d}.png" for n in (1, 3, 5)),
    ]
    for image, annotation, row in zip(coco["images"], coco["annotations"], expected, strict=True):
        assert (image["id"], image["height"], image["width"]) == (annotation["image_id"], 60, 96)
        ids = read_ids(out / annotation["file_name"])
        assert np.array_equal(ids, row.segment_ids)
        for info, segment in zip(annotation["segments_info"], row.segments, strict=True):
            assert info == {
                "id": segment.id,
                "category_id": segment.index + 1,
                "area": (ids == segment.id).sum(),
                "bbox": list(segment.box),
                "iscrowd": 0,
                "score": pytest.approx(segment.score, abs=1e-5),
            }
        with Image.open((out / annotation["file_name"]).with_suffix(".overlay.jpg")) as overlay:
            assert overlay.size == (96, 60)


def test_json_lines_have_run_lengths(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(place, tmp_path / "s.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == COUNT
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()]
    for line, row in zip(lines, rows_of(place), strict=True):
        assert (line["path"], line["height"], line["width"], line["error"]) == (row.path, 60, 96, None)
        for item, segment in zip(line["segments"], row.segments, strict=True):
            pixels = decode_rle(item["rle"]["counts"], *item["rle"]["size"])
            assert np.array_equal(pixels, row.segment_ids == segment.id)
            assert (item["id"], item["label"], item["thing"]) == (segment.id, segment.label, segment.thing)
            assert (item["area"], item["bbox"]) == (segment.area, list(segment.box))
            assert item["score"] == pytest.approx(segment.score, abs=1e-5)


def test_standard_output_has_a_line_per_image(place: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert predict(place, "-", "--limit", 1) == 0
    (line,) = capsysbinary.readouterr().out.decode().splitlines()
    row = rows_of(place)[0]
    largest = max(row.segments, key=lambda segment: segment.area)
    assert line.startswith(f"{row.path}: {largest.label} {100 * largest.area / 60 / 96:.1f} %, ")
    assert predict(place, "-", "--limit", 1, "--score-threshold", 1) == 0
    assert capsysbinary.readouterr().out.decode().endswith(": no segments\n")
    assert predict(place, "-", "--limit", 1, "--format", "jsonl") == 0
    assert json.loads(capsysbinary.readouterr().out)["height"] == 60


def contents(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and "whole" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["segments/", "segments.jsonl"])
def test_a_killed_run_resumes_to_the_same_segments(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)
    (tmp_path / "whole").mkdir()
    assert predict(place, f"{tmp_path}/whole/{name}", "--batch-size", 1) == 0
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            predict(place, f"{tmp_path}/{name}", "--batch-size", 1)
    stream = tmp_path / name / "panoptic.json" if name == "segments/" else tmp_path / name
    assert not stream.exists()
    with stream.with_name(f"{stream.name}.partial").open("ab") as file:
        file.write(b'{"half a row')
    capsys.readouterr()
    assert predict(place, f"{tmp_path}/{name}", "--batch-size", 1, "--resume", "--mask-threshold", 0.6) == 2
    assert "was started with --mask-threshold None, which is 0.6 now" in capsys.readouterr().err
    assert predict(place, f"{tmp_path}/{name}", "--batch-size", 1, "--resume") == 0
    assert contents(tmp_path) == contents(tmp_path / "whole")


def test_several_processes_share_a_directory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for more in ((), ("--force",)):  # the second run replaces the first, and keeps what it has written
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            assert predict(place, f"{tmp_path}/segments/", *more) == 0
        coco = json.loads((tmp_path / "segments" / "panoptic.json").read_text())
        names = [annotation["file_name"] for annotation in coco["annotations"]]
        assert len(set(names)) == COUNT
        assert all((tmp_path / "segments" / name).is_file() for name in names)
        assert [image["id"] for image in coco["images"]] == list(range(1, COUNT + 1))


def files_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_force_deletes_the_files_of_the_old_run_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "segments"
    assert predict(place, f"{out}/", "--overlays") == 0
    (out / "mine.png").write_bytes(b"of the user")
    assert predict(place, f"{out}/", "--limit", 2) == 2
    assert "panoptic.json exists: give another name, or --force to replace it" in capsys.readouterr().err
    assert predict(place, f"{out}/", "--force", "--limit", 2) == 0
    assert files_below(out) == {"panoptic.json", "mine.png", "000.png", "002.png"}
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            predict(place, f"{out}/", "--force", "--batch-size", 1)
    assert "004.png" in files_below(out)
    assert predict(place, f"{out}/", "--force", "--limit", 1) == 0
    assert files_below(out) == {"panoptic.json", "mine.png", "000.png"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("panoptic.json", '{"images": [], "annotations": [{"file_name": "000.png"}]}'),
        ("panoptic.json.partial", '{"mask": "000.png"}\n'),
        ("masks.csv", "path,mask,error\nx,000.png,\n"),
    ],
)
def test_other_files_protect_their_directory(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "000.png").write_bytes(b"of the user")
    for more in ((), ("--force",), ("--resume",)):
        assert predict(place, f"{tmp_path}/", *more) == 2
        assert "has other files: give a new or an empty directory" in capsys.readouterr().err
    assert (tmp_path / "000.png").read_bytes() == b"of the user"


def test_an_unreadable_image_is_an_error_row(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = photos(tmp_path / "photos", 2)
    (images / "bad.jpg").write_bytes(b"no image")
    for name in ("segments/", "s.jsonl"):
        arguments = place / "eomt.safetensors", images, "--out", f"{tmp_path}/{name}", "--panoptic"
        assert command("predict", *arguments) == 0
        assert "1 of 3 images are unreadable" in capsys.readouterr().out
    coco = json.loads((tmp_path / "segments" / "panoptic.json").read_text())
    assert [len(coco["images"]), len(coco["annotations"]), len(coco["errors"])] == [2, 2, 1]
    assert coco["errors"][0]["file_name"].endswith("bad.jpg")
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [bool(line["error"]) for line in lines] == [False, True, False]
    assert lines[1]["segments"] == []


# --- things and stuff ---


def test_a_model_that_states_nothing_has_things_only_and_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_eomt(tmp_path / "plain.safetensors")
    note = "the model file does not say which classes are stuff: all count as things"
    for more, expected, noted in (((), [1] * 4, True), (("--stuff", "sky,été"), [0, 1, 1, 0], False)):
        out = tmp_path / f"segments{noted}"
        assert command("predict", model, place / "photos", "--out", f"{out}/", "--panoptic", *more) == 0
        assert (note in capsys.readouterr().out) is noted
        coco = json.loads((out / "panoptic.json").read_text())
        assert [category["isthing"] for category in coco["categories"]] == expected


def test_stuff_is_stored_by_convert(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save_eomt(tmp_path / "plain.safetensors"), tmp_path / "named.safetensors"
    categories = [{"id": 7 * k, "name": name, "isthing": int(name == "car")} for k, name in enumerate(LABELS)]
    (tmp_path / "categories.json").write_text(json.dumps(categories))
    assert command("convert", source, out, "--to", "vitrail", "--stuff", tmp_path / "categories.json") == 0
    assert vitrail.load(out).card["things"] == [False, False, True, False]
    again = tmp_path / "again.safetensors"
    assert command("convert", out, again, "--to", "vitrail") == 0
    assert vitrail.load(again).card["things"] == [False, False, True, False]
    capsys.readouterr()
    for arguments, message in (
        ((source, out, "--to", "hf", "--stuff", "sky"), "--stuff needs --to vitrail: the format hf does not store it"),
        ((source, again, "--to", "vitrail", "--stuff", "sty"), "the model has no class 'sty' (like 'sky'?)"),
        ((place / "classifier.safetensors", again, "--to", "vitrail", "--stuff", "a"), "--stuff does not support"),
    ):
        assert command("convert", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_things_of_another_number_of_classes_are_ignored_and_wrong_ones_are_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = place / "photos" / "000.png"
    old = save_eomt(tmp_path / "old.safetensors", things=[True, False])
    (row,) = vitrail.predict(old, image, **KEYWORDS)
    assert all(segment.thing for segment in row.segments)
    wrong = save_eomt(tmp_path / "wrong.safetensors", things=[1, 0, "x", True])
    assert command("predict", wrong, image, "--out", "-", "--panoptic") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "things in the model file must be true or false for each class" in line


# --- refusals ---


def test_refusals_are_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object, model: str = "eomt.safetensors") -> str:
        assert command("predict", place / model, place / "photos", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    folder, lines = ("--out", f"{tmp_path}/segments/"), ("--out", tmp_path / "s.jsonl")
    panoptic = (*folder, "--panoptic")
    assert "--panoptic needs queries: use --decoder eomt, got LinearDecoder" in refused(
        *panoptic, model="linear.safetensors"
    )
    assert "--panoptic does not support Vision Transformers" in refused(*panoptic, model="classifier.safetensors")
    assert "--flip is for semantic masks: leave it out with --panoptic" in refused(*panoptic, "--flip")
    assert "--inference is for semantic masks" in refused(*panoptic, "--inference", "sliding")
    assert "--score-threshold needs --panoptic" in refused(*folder, "--score-threshold", 0.5)
    assert "--stuff needs --panoptic" in refused(*folder, "--stuff", "sky")
    assert "--mask-threshold must be from 0 to 1, got -1" in refused(*panoptic, "--mask-threshold", -1)
    assert "--overlap-threshold must be from 0 to 1, got nan" in refused(*panoptic, "--overlap-threshold", "nan")
    assert "the model has no class 'skyy' (like 'sky'?)" in refused(*panoptic, "--stuff", "road,skyy")
    assert "--panoptic needs PyTorch: leave out --runtime onnx" in refused(*panoptic, "--runtime", "onnx")
    assert "--top is for classes of images" in refused(*panoptic, "--top", 3)
    assert "--overlays needs a directory" in refused(*lines, "--panoptic", "--overlays")
    assert "is not for segments: use --out panoptic/" in refused("--out", tmp_path / "s.json", "--panoptic")
    assert "is not for segments: use --out panoptic/" in refused(*folder, "--panoptic", "--format", "coco")
    (place / "eomt.onnx").touch()
    assert "--panoptic needs the checkpoint: the exported file" in refused(*panoptic, model="eomt.onnx")
    assert not (tmp_path / "segments").exists()
    assert not (tmp_path / "s.jsonl").exists()


def test_python_refuses_the_same(place: Path) -> None:
    with pytest.raises(ValueError, match=r"panoptic= is for vitrail\.predict"):
        vitrail.embed(place / "eomt.safetensors", place / "photos", panoptic=True)
    with pytest.raises(ValueError, match="overlap_threshold= needs panoptic="):
        InferenceOptions(overlap_threshold=0.5)
    with pytest.raises(ValueError, match="score_threshold= must be from 0 to 1, got 2"):
        PanopticOptions(score_threshold=2)
