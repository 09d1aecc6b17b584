"""`vitrail predict`: a row per image, in order, with an error for unreadable images."""

import json
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as package
from tests.data.making import encoded, tree
from tests.data.spoilt import bomb
from tests.deploy.asked import CLASSES, images, model, read, vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.predict.inputs import collect_inputs
from vitrail.deploy.predict.parallel import MIN_TRIALS, BatchSizeTuner, ParallelInference, RowInference
from vitrail.deploy.predict.predict import InferenceOptions, predict

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"
SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "imagenet-samples"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("predict")
    model(root / "model.safetensors")
    images(root / "photos")
    return root


def expected(place, path: str) -> np.ndarray:
    """Return the probabilities of one image, computed directly."""
    net = package.load(place / "model.safetensors")
    with Image.open(path) as image, torch.inference_mode():
        return net(net.preprocessing(image)[None]).softmax(1)[0].numpy()


def test_every_image_has_a_row_with_its_prediction(place):
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", place / "a.csv") == 0
    rows = read(place / "a.csv")
    assert [row["path"] for row in rows] == [f"{place}/photos/{number:04d}.png" for number in range(20)]
    assert list(rows[0]) == ["path", "label", "score", "error"]
    for row in rows:
        probabilities = expected(place, row["path"])
        assert row["label"] == CLASSES[probabilities.argmax()]
        assert float(row["score"]) == pytest.approx(probabilities.max(), rel=1e-4)
        assert row["error"] is None
    assert len({row["label"] for row in rows}) > 1


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_top_predictions_in_every_format(place, form):
    out = place / f"top.{form}"
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", out, "--top", 3) == 0
    for row in read(out):
        probabilities = expected(place, row["path"])
        first = np.argsort(-probabilities)[:3]
        answers = row.get("answers") or [{"label": row[f"label{n}"], "score": row[f"score{n}"]} for n in ("", "2", "3")]
        assert [each["label"] for each in answers] == [CLASSES[k] for k in first]
        assert [float(each["score"]) for each in answers] == pytest.approx(probabilities[first].tolist(), rel=1e-4)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch", [1, 7, None])
def test_rows_do_not_depend_on_batches_and_workers(place, workers, batch):
    rows = list(
        predict(
            place / "model.safetensors",
            [place / "photos"],
            options=InferenceOptions("torch", batch_size=batch, workers=workers),
        )
    )
    plain = [expected(place, row.path) for row in rows]
    assert [row.path for row in rows] == sorted(row.path for row in rows)
    assert len(rows) == 20
    assert [row.label for row in rows] == [CLASSES[each.argmax()] for each in plain]
    assert [row.score for row in rows] == pytest.approx([each.max() for each in plain], rel=1e-4)


def test_unreadable_images_are_rows_with_an_error(place, capsys):
    whole = encoded(5, "JPEG")
    root = tree(
        place / "spoilt",
        {"0.png": 1, "1.png": b"", "2.jpg": whole[: len(whole) // 2], "3.png": bomb(), "4.png": b"text", "6.png": 6},
    )
    Image.new("CMYK", (9, 9), (10, 200, 30, 0)).save(root / "5.jpg")
    (root / "list.csv").write_text("path\ngone.png\n0.png\n")
    out = place / "spoilt.csv"
    assert vitrail("predict", place / "model.safetensors", root, root / "list.csv", "--out", out) == 0
    rows = read(out)
    assert [row["error"] is None for row in rows] == [True, False, False, False, False, True, True, False, True]
    assert all((row["label"] is None) == (row["error"] is not None) for row in rows)
    assert "not an image" in rows[1]["error"]
    assert "truncated" in rows[2]["error"].lower()
    assert "too large to decode safely" in rows[3]["error"]
    assert "No such file" in rows[7]["error"]
    assert "5 of 9 images are unreadable" in capsys.readouterr().out


def test_only_unreadable_images(place, capsys):
    root = tree(place / "none", {"1.png": b"", "2.png": b""})
    for form in ("csv", "parquet", "npy"):
        command = "embed" if form == "npy" else "predict"
        assert vitrail(command, place / "model.safetensors", root, "--out", place / f"none.{form}") == 0
        assert [row["error"] is not None for row in read(place / f"none.{form}")] == [True, True]
    assert "2 of 2 images are unreadable" in capsys.readouterr().out


def test_existing_file_needs_force(place, capsys):
    out = place / "kept.csv"
    out.write_text("precious")
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", out) == 2
    assert "exists: give another name, or --force" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", out, "--force") == 0
    assert len(read(out)) == 20
    assert not list(place.glob("kept.csv?*"))


def test_standard_output_holds_only_rows(place, capfdbinary):
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", "-", "--limit", 3) == 0
    sys.stdout.flush()
    captured = capfdbinary.readouterr()
    lines = captured.out.decode().splitlines()
    assert lines[0] == "path,label,score,error"
    assert len(lines) == 4
    assert b"3 images in" in captured.err


def test_json_summary(place, capsys):
    out = place / "told.jsonl"
    assert vitrail("predict", place / "model.safetensors", place / "photos", "--out", out, "--json", "--limit", 5) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["errors"], report["resumed"], report["runtime"], report["whole"]) == (
        5,
        0,
        0,
        "torch",
        True,
    )
    assert report["images_per_second"] == pytest.approx(5 / report["seconds"], rel=0.1)
    assert report["batch"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.txt"], "unknown format of --out a.txt: use --format or a file suffix of csv, jsonl, parquet"),
        (["--out", "-", "--format", "parquet"], "cannot be written to standard output"),
        (["--out", "-", "--json"], "--json needs --out FILE"),
        (["--out", "no/such/a.csv"], "no such directory: no/such"),
        (["--out", "b.csv", "--top", "8"], "--top must be <= 7"),
        (["--out", "b.csv", "--top", "0"], "--top must be >= 1, got 0"),
        (["--out", "b.csv", "--limit", "0"], "--limit must be >= 1, got 0"),
        (["--out", "b.csv", "--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        (["--out", "b.csv", "--workers", "0"], "--workers must be >= 1, got 0"),
        (["--out", "b.csv", "--resume", "--force"], "give one of them"),
        (["--out", "b.csv", "--device", "gpu"], "unknown device"),
        (["--out", "b.csv", "--merge", "-1"], "--merge must be >= 0, got -1"),
    ],
)
def test_user_errors_give_one_line(place, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert vitrail("predict", "model.safetensors", "photos", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (place / "b.csv").exists()


def test_multilabel_model_uses_sigmoids(place):
    net = package.load(place / "model.safetensors")
    recipe = {"data": {"task": "multi"}, "objective": {"loss": "sigmoid"}}
    package.save(net, place / "several.safetensors", recipe=recipe)
    (row,) = predict(place / "several.safetensors", place / "photos", top=7, limit=1)
    with Image.open(row.path) as image, torch.inference_mode():
        probabilities = net(net.preprocessing(image)[None]).sigmoid()[0]
    assert dict(row.predictions) == pytest.approx(dict(zip(CLASSES, probabilities.tolist(), strict=True)), rel=1e-4)


def test_token_merging_and_its_error_without_tokens(place, capsys):
    plain = [
        row.score for row in predict(place / "model.safetensors", place / "photos", options=InferenceOptions("torch"))
    ]
    less = [
        row.score
        for row in predict(place / "model.safetensors", place / "photos", options=InferenceOptions("torch", merge=1))
    ]
    assert plain != less
    net = package.build("R50x1", classes=2, image_size=32)
    package.save(net, place / "resnet.safetensors", preprocessing=Preprocessing((32, 32), (32, 32)))
    arguments = ("predict", place / "resnet.safetensors", place / "photos", "--out", place / "r.csv", "--merge", 2)
    assert vitrail(*arguments) == 2
    assert "--merge does not support BiT ResNets" in capsys.readouterr().err


class Slow:
    """A runtime that counts its calls."""

    name = "torch"

    def __init__(self, most: int = 10**9, kind: type[Exception] = MemoryError) -> None:
        self.most, self.kind, self.sizes, self.threads = most, kind, [], set()

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        self.sizes.append(len(pixels))
        self.threads.add(threading.get_ident())
        if len(pixels) > self.most:
            raise self.kind("out of memory")
        return pixels[:, 0, 0, :2].astype(np.float32)


def lanes(place, runtimes, pace, count=20):
    return ParallelInference(
        collect_inputs([str(place / "photos")]), 0, count, RowInference(Preprocessing((4, 4), (4, 4))), runtimes, pace
    )


def test_out_of_memory_halves_the_batch(place):
    runtime = Slow(3, RuntimeError)
    pace = BatchSizeTuner(16, 16, fixed=True)
    assert sum(len(made.names) for made in lanes(place, [runtime], pace)) == 20
    assert pace.size <= 4
    assert max(runtime.sizes[-2:]) <= 4


def test_model_error_is_raised_by_the_iterator(place):
    with pytest.raises(MemoryError):
        list(lanes(place, [Slow(0)], BatchSizeTuner(2, 2)))
    before = threading.active_count()
    for _ in lanes(place, [Slow(), Slow()], BatchSizeTuner(2, 2)):
        break
    assert threading.active_count() <= before


def test_shared_runtime_is_called_by_one_thread_at_a_time(place):
    inside = threading.Lock()

    class Alone(Slow):
        def __call__(self, pixels):
            assert inside.acquire(blocking=False), "two lanes at once"
            try:
                return super().__call__(pixels)
            finally:
                inside.release()

    runtime = Alone()
    assert sum(len(made.names) for made in lanes(place, [runtime] * 4, BatchSizeTuner(1, 1))) == 20


def test_outputs_that_are_not_finite_are_an_error_of_the_image(place):
    class Odd(Slow):
        def __call__(self, pixels):
            found = super().__call__(pixels)
            found[0, 0] = np.nan
            return found

    (made,) = lanes(place, [Odd()], BatchSizeTuner(4, 4), count=4)
    assert made.errors == {0: "the outputs of the model are not finite"}
    assert made.values[1] is not None


def test_batch_size_grows_to_the_fastest():
    def settles(seconds, first=4, most=64):
        pace = BatchSizeTuner(first, most)
        for _ in range(100):
            pace.record(pace.size, seconds(pace.size))
        return pace.size

    assert settles(lambda size: 1 + 0.1 * size) == 64
    assert settles(lambda size: 1 + 0.1 * size, most=16) == 16
    assert settles(lambda size: 0.1 * size * size) == 1
    assert settles(lambda size: size * (1 if size == 8 else 1.5)) == 8
    fixed = BatchSizeTuner(5, 64, fixed=True)
    for _ in range(3 * MIN_TRIALS):
        fixed.record(5, 1.0)
    assert fixed.size == 5


def test_memory_does_not_grow_with_the_number_of_images(place, tmp_path):
    def peak(count):
        lists = tmp_path / f"{count}.csv"
        lists.write_text("path\n" + "\n".join(f"{place}/photos/{n % 20:04d}.png" for n in range(count)))
        rows = predict(place / "model.safetensors", lists, options=InferenceOptions("torch", batch_size=8, workers=1))
        next(rows)
        tracemalloc.start()
        left = sum(1 for _ in rows)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert left == count - 1
        return found

    peak(200)  # fills caches
    few, many = peak(200), peak(1600)
    assert many < few + 150_000, (few, many)  # about a path for each image; the pixels would be a hundred times as much


@pytest.mark.skipif(not (WEIGHTS.exists() and SAMPLES.exists()), reason="DeiT-Ti and its samples are not in ../shared")
def test_deit_tiny_predicts_photographs_in_batches_as_alone():
    rows = list(predict(WEIGHTS, sorted(SAMPLES.iterdir())[:6], options=InferenceOptions("torch")))
    net = package.load(WEIGHTS)
    with Image.open(rows[0].path) as image, torch.inference_mode():
        alone = net(net.preprocessing(image)[None]).softmax(1)[0]
    assert rows[0].label == str(int(alone.argmax()))
    assert rows[0].score == pytest.approx(float(alone.max()), abs=1e-4)
    assert sum(row.label == str(int(Path(row.path).name[:4])) for row in rows) >= 4
