"""Files that vitrail 0.1.0 wrote still load, resume, evaluate, predict, search and report.

The files and the commands that wrote them are in `fixtures/`. Only the command line and the public names of `vitrail` are used
here, so that this file can stay as it is while everything below them is renamed.
"""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

import vitrail
from vitrail.cli import main

FIXTURES = Path(__file__).parent / "fixtures"
WRITTEN_IN = "/opt/fixtures"  # the directory that the search index names
WRITTEN_AT = (
    1_700_000_000  # the time of change of the images, in seconds: an index and a checkout disagree on it otherwise
)
STEPS, STOPPED_AT = 8, 4  # of the interrupted runs

FINISHED = ("bit", "dino", "distil", "lora", "mae", "mpp", "vit")
CLASSIFIERS = ("bit", "distil", "lora", "vit")
INTERRUPTED = ("adamw", "distil-features", "distil-soft", "distil-tokens", "lamb", "lora", "muon")
INTERRUPTED_PRETRAINING = ("dino", "features", "mae", "mpp")
PARTS = sorted(path.stem for path in (FIXTURES / "parts").glob("*.safetensors"))
RECIPES = sorted(path.stem for path in (FIXTURES / "recipes").glob("*.json"))
EXPORTED = {"onnx": "onnxruntime", "xml": "openvino", "pt2": "torch"}  # ending: the library that runs it


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of all fixtures, which is the working directory, as the version that wrote them left it."""
    root = tmp_path / "written"
    shutil.copytree(FIXTURES, root)
    for image in (root / "images").rglob("*.png"):
        os.utime(image, (WRITTEN_AT, WRITTEN_AT))
    index = root / "index" / "index.json"
    index.write_text(index.read_text(encoding="utf-8").replace(WRITTEN_IN, str(root)), encoding="utf-8")
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    return root


def run(*arguments: str) -> None:
    """Run a command, which must succeed."""
    assert main(list(arguments)) == 0


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json and return what it printed."""
    capsys.readouterr()
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def read_json(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file or of JSON lines."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines)) if str(path).endswith(".csv") else [json.loads(line) for line in lines]


def compute_outputs(model: torch.nn.Module, pixels: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(pixels).numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


def mark_log(run_directory: Path) -> bytes:
    """Change one digit of the first loss in a run's log, so that a log written anew would differ; return the log."""
    log = run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    digits = str(lines[0]["loss"])
    marked = digits[:-1] + ("1" if digits[-1] != "1" else "2")
    data = log.read_bytes().replace(digits.encode(), marked.encode(), 1)
    log.write_bytes(data)
    return data


# Models


@pytest.mark.parametrize("name", PARTS)
def test_model_with_every_part_computes_the_same(name: str) -> None:
    """One file for each position embedding, pooling, block, head and so on, with random weights."""
    expected = np.load("parts/expected.npz")
    model = vitrail.load(f"parts/{name}.safetensors")
    channels = 1 if name == "grey" else 3
    assert_close(compute_outputs(model, torch.from_numpy(expected["pixels"][:, :channels])), expected[f"{name}:output"])
    if f"{name}:prepared" in expected:
        assert model.preprocessing is not None
        with Image.open("parts/image.png") as image:
            # one step of 8-bit colour, scaled by the smallest std: image libraries may round otherwise
            assert_close(model.preprocessing(image).numpy(), expected[f"{name}:prepared"], atol=1.01 / 255 / 0.2)
    if expected[f"{name}:output"].shape[1] == 3:
        assert tuple(model.labels or ()) == ("ant", "bée", "cat")


@pytest.mark.parametrize("name", FINISHED)
def test_trained_model_gives_the_same_logits(name: str) -> None:
    expected = np.load("finished/expected.npz")
    model = vitrail.load(f"finished/{name}/model.safetensors")
    assert model.preprocessing is not None
    pixels = torch.stack([model.preprocessing(Image.open(path)) for path in expected["images"].tolist()])
    assert_close(compute_outputs(model, pixels), expected[name])


def test_model_is_saved_and_loaded_again() -> None:
    """A file of the earlier version becomes one of this version, with the same weights, labels and preprocessing."""
    model = vitrail.load("finished/vit/model.safetensors")
    vitrail.save(model, "again.safetensors")
    again = vitrail.load("again.safetensors")
    assert again.labels == model.labels
    assert again.preprocessing == model.preprocessing
    pixels = torch.randn(2, 1, 16, 16)
    assert np.array_equal(compute_outputs(again, pixels), compute_outputs(model, pixels))


def test_adapter_of_lora_merges_into_its_base() -> None:
    expected = np.load("finished/expected.npz")
    model = vitrail.load("finished/vit/model.safetensors", adapter="finished/lora/adapter")
    assert model.preprocessing is not None
    pixels = torch.stack([model.preprocessing(Image.open(path)) for path in expected["images"].tolist()])
    assert_close(compute_outputs(model, pixels), expected["lora"])


@pytest.mark.parametrize("name", FINISHED)
def test_model_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("describe", f"finished/{name}/model.safetensors")
    assert capsys.readouterr().out


# Finished runs


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_run_evaluates_to_its_accuracy(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "evaluate", f"finished/{name}", "digits", "--split", "test")
    recorded = read_json(f"finished/{name}/summary.json")
    assert found["images"] == recorded["images"] == 270
    assert found["top1"] == pytest.approx(recorded["top1"], abs=1.01 / 270)  # one image may change sides
    assert found["loss"] == pytest.approx(recorded["loss"], abs=1e-3)


@pytest.mark.parametrize("name", FINISHED)
def test_finished_run_is_left_as_it_is(name: str) -> None:
    directory = Path("finished", name)
    before = {path: path.read_bytes() for path in directory.glob("*.safetensors")}
    run("pretrain" if name in ("dino", "mae", "mpp") else "train", "--resume", str(directory))
    assert {path: path.read_bytes() for path in directory.glob("*.safetensors")} == before


@pytest.mark.parametrize("name", FINISHED)
def test_finished_run_is_reported(name: str) -> None:
    run("report", f"finished/{name}")
    page = Path(f"finished/{name}/report.html").read_text(encoding="utf-8")
    recorded = read_json(f"finished/{name}/summary.json")
    score = recorded["top1"] if name in CLASSIFIERS else recorded["knn"]
    assert f"{100 * score:.1f}" in page or f"{100 * score:.2f}" in page


def test_runs_are_compared() -> None:
    run("report", "finished/vit", "finished/lora", "finished/bit", "--out", "comparison.html")
    page = Path("comparison.html").read_text(encoding="utf-8")
    for name in ("vit", "lora", "bit"):
        assert f"{100 * read_json(f'finished/{name}/summary.json')['top1']:.1f}" in page


def test_earlier_evaluation_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    earlier, rows = read_json("evaluation/evaluation.json"), read_rows("evaluation/predictions.csv")
    run("evaluate", "finished/vit", "digits", "--split", "test", "--out", "evaluation")
    assert read_json("evaluation/evaluation.json")["top1"] == pytest.approx(earlier["top1"], abs=1.01 / 270)
    assert len(read_rows("evaluation/predictions.csv")) == len(rows)


@pytest.mark.parametrize("name", ["vit", "mae"])
def test_model_is_fine_tuned(name: str) -> None:
    run("train", "digits", "--init", f"finished/{name}/model.safetensors", "--steps", "2", "--out", "tuned")
    assert read_json("tuned/summary.json")["steps"] == 2


# Interrupted runs


@pytest.mark.parametrize("name", INTERRUPTED + INTERRUPTED_PRETRAINING)
def test_interrupted_run_resumes_to_its_end(name: str) -> None:
    directory = Path("interrupted", name)
    progress = read_json(directory / "checkpoints" / f"step-{STOPPED_AT:08d}" / "progress.json")
    before = mark_log(directory)
    assert len(before) == progress["logged"]
    assert not (directory / "model.safetensors").exists()
    run("pretrain" if name in INTERRUPTED_PRETRAINING else "train", "--resume", str(directory))
    after = (directory / "metrics.jsonl").read_bytes()
    assert after.startswith(before)  # the marked digit too: the steps before the checkpoint were not trained again
    records = [json.loads(line) for line in after[len(before) :].splitlines()]
    steps = [record["step"] for record in records]
    assert steps[0] > STOPPED_AT
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert all(np.isfinite(record["loss"]) for record in records if "loss" in record)
    recorded = read_json(directory / "summary.json")
    assert recorded["steps"] == STEPS
    assert (directory / "report.html").is_file()
    vitrail.load(directory / "model.safetensors")
    if name == "lora":  # trained already: a resumed run with other weights would be far off
        assert recorded["top1"] > 0.8


@pytest.mark.parametrize("name", ["adamw", "mae"])
def test_interrupted_run_is_reported(name: str) -> None:
    run("report", f"interrupted/{name}")
    assert Path(f"interrupted/{name}/report.html").is_file()


# Recipes


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("mae")])
def test_recipe_trains(name: str) -> None:
    run("train", "--recipe", f"recipes/{name}.json", "--out", "once")
    assert read_json("once/summary.json")["steps"] == 1


def test_masked_autoencoder_continues_with_its_decoder() -> None:
    """At a learning rate of 1e-12, every tensor of pretraining.safetensors comes back as it was."""
    run("pretrain", "--recipe", "recipes/mae-continued.json", "--out", "once")
    before, after = load_file("finished/mae/pretraining.safetensors"), load_file("once/pretraining.safetensors")
    for name, tensor in before.items():
        like = [other for other in after.values() if other.shape == tensor.shape]
        assert any(np.allclose(other, tensor, atol=1e-6) for other in like), name


# Exported files


@pytest.mark.parametrize("ending", EXPORTED)
def test_exported_file_evaluates_to_the_same_accuracy(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(EXPORTED[ending], reason=f"{EXPORTED[ending]} is not installed")
    found = run_json(capsys, "evaluate", f"exported/vit.{ending}", "digits", "--split", "test")
    recorded = read_json("finished/vit/summary.json")
    assert found["top1"] == pytest.approx(recorded["top1"], abs=1.01 / 270)
    assert found["loss"] == pytest.approx(recorded["loss"], abs=1e-3)


@pytest.mark.parametrize("ending", EXPORTED)
def test_exported_file_predicts_the_same(ending: str) -> None:
    pytest.importorskip(EXPORTED[ending], reason=f"{EXPORTED[ending]} is not installed")
    run("predict", f"exported/vit.{ending}", "images", "--out", "again.jsonl", "--top", "3")
    assert_same_predictions("again.jsonl")


# Predictions, features and search


def assert_same_predictions(path: str) -> None:
    """Check labels and probabilities against the complete file of the earlier version."""
    found, expected = read_rows(path), read_rows("predictions.jsonl")
    assert [(row["path"], row["label"]) for row in found] == [(row["path"], row["label"]) for row in expected]
    scores = np.array([[float(row["score"]) for row in rows] for rows in (found, expected)])
    assert_close(scores[0], scores[1])


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_partial_predictions_are_completed(ending: str) -> None:
    partial = Path(f"interrupted/predictions.{ending}.partial").read_bytes()
    top = ("--top", "3") if ending == "jsonl" else ()
    out = f"interrupted/predictions.{ending}"
    run("predict", "finished/vit/model.safetensors", "images", "--out", out, "--resume", *top)
    assert Path(out).read_bytes().startswith(partial)
    assert_same_predictions(out)


def test_partial_features_are_completed() -> None:
    partial = Path("interrupted/features.npy.partial").read_bytes()
    run("embed", "finished/vit/model.safetensors", "images", "--out", "interrupted/features.npy", "--resume")
    assert Path("interrupted/features.npy").read_bytes().startswith(partial)
    run("embed", "finished/vit/model.safetensors", "images", "--out", "anew.npy")
    assert_close(np.load("interrupted/features.npy"), np.load("anew.npy"))  # ten rows of the earlier version among them
    found, expected = read_rows("interrupted/features.npy.paths.csv"), read_rows("anew.npy.paths.csv")
    assert found == expected


@pytest.mark.parametrize("model", ["model.safetensors", "moved.safetensors", "vit.pt2"])
def test_index_finds_the_same_neighbours(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the model where it was, with it moved, and with an exported file of it."""
    expected = read_json("neighbours.json")
    where: tuple[str, ...] = ()
    if model == "moved.safetensors":
        Path("finished/vit/model.safetensors").rename(model)
        where = ("--model", model)
    elif model == "vit.pt2":
        where = ("--model", "exported/vit.pt2")
    found = run_json(capsys, "search", "find", "index", *expected, "--top", "3", *where)
    assert len(found["answers"]) == len(expected)
    for answer in found["answers"]:
        cosines = {os.path.relpath(each["path"]): each["cosine"] for each in answer["neighbours"]}
        assert list(cosines) == list(expected[answer["query"]])
        assert cosines == pytest.approx(expected[answer["query"]], abs=1e-3)


def test_index_is_updated(capsys: pytest.CaptureFixture[str]) -> None:
    """Vectors of images that did not change are kept, and those of new ones added."""
    shutil.copy("images/0/00.png", "images/0/copy.png")
    vectors = np.load(next(Path("index").glob("vectors-*.npy")))
    run("search", "index", "finished/vit/model.safetensors", "images", "--out", "index", "--update")
    updated = np.load(next(Path("index").glob("vectors-*.npy")))
    assert len(updated) == len(vectors) + 1
    kept = [any(np.array_equal(row, new) for new in updated) for row in vectors]
    assert all(kept)
    capsys.readouterr()
    run("search", "find", "index", "images/0/00.png", "--top", "1")
    assert "copy.png" in capsys.readouterr().out
