"""`vitrail.train` and its companions on Python objects: the run, what it records, resuming it, evaluating it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import train as train_by_command
from vitrail.data.sources import load_dataset
from vitrail.training.recipe import Data, Machine

COUNT = 48
TINY: dict[str, Any] = {"batch_size": 8, "width": 16, "depth": 1, "device": "cpu"}
LABELS = np.arange(COUNT) % 2


def make_images(seed: int = 0) -> np.ndarray:
    """Return blue and red noise, [n, 12, 12, 3]."""
    pixels = np.random.default_rng(seed).integers(0, 100, (COUNT, 12, 12, 3), dtype=np.uint8)
    pixels[np.arange(COUNT), :, :, LABELS * 2] += 150
    return pixels


class Colours(torch.utils.data.Dataset):
    """A map-style dataset with names, one sample of which is unreadable."""

    classes = ("red", "blue")

    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == 5:
            raise OSError("no such row")
        return Image.fromarray(self.images[index]), int(LABELS[index])


class Cut(Exception):
    """Stands for whatever ends a process in the middle of a run."""


def cut_at(step: int):
    def listen(record: dict[str, Any]) -> None:
        if record.get("kind") == "timing" and record["step"] >= step:
            raise Cut

    return listen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a dataset that nothing disturbed."""
    out = tmp_path_factory.mktemp("objects") / "whole"
    vitrail.train(Colours(make_images()), out=out, steps=6, **TINY)
    return out


def read_run(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def test_run_on_a_dataset_records_what_identifies_it(run: Path) -> None:
    record = read_run(run)
    data = record["data"]
    assert (data["where"], data["kind"]) == ("python:Colours", "Colours")
    assert data["fingerprint"] == load_dataset(Colours(make_images())).fingerprint
    assert [entry["path"] for entry in data["skipped"]] == ["Colours[5]"]
    assert sum(split["images"] for split in data["splits"].values()) == COUNT - 1
    assert record["labels"] == ["red", "blue"]
    assert vitrail.load(run / "model.safetensors").labels == ("red", "blue")
    assert (run / "report.html").is_file()


def test_resumed_run_needs_the_same_object(run: Path, tmp_path: Path) -> None:
    images, out = make_images(), tmp_path / "cut"
    frequent = Machine(save_seconds=0)
    with pytest.raises(Cut):
        vitrail.train(Colours(images), out=out, steps=6, machine=frequent, listeners=(cut_at(3),), **TINY)
    with pytest.raises(
        ValueError, match=r"was started on python:Colours: give the same Python object, vitrail\.resume"
    ):
        vitrail.resume(out)
    done = train_by_command(tmp_path, "--resume", "cut")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "give the same Python object, vitrail.resume(RUN, data=OBJECT)" in done.stderr
    other = images.copy()
    other[7, 0, 0, 0] ^= 1
    line = "started with other images in python:Colours: give the same object, or start a new run"
    with pytest.raises(ValueError, match=line):
        vitrail.resume(out, data=Colours(other))
    assert not (out / "summary.json").exists()
    directory, summary = vitrail.resume(out, data=Colours(images), workers=0)
    assert (directory, summary["steps"]) == (out, 6)
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_object_for_a_run_on_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        vitrail.train("digits", out=tmp_path / "cut", steps=6, listeners=(cut_at(1),), **TINY)
    with pytest.raises(ValueError, match="was started on digits: leave out data"):
        vitrail.resume(tmp_path / "cut", data=[])


def test_recipe_of_such_a_run_is_repeated_with_the_object(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="python:Colours is a Python object, not a file"):
        vitrail.train(recipe=run / "recipe.json", out=tmp_path / "a")
    out, _ = vitrail.train(Colours(make_images()), recipe=run / "recipe.json", out=tmp_path / "b", device="cpu")
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_do_not_depend_on_workers(run: Path, tmp_path: Path, workers: int) -> None:
    out, _ = vitrail.train(Colours(make_images()), out=tmp_path / "a", steps=6, workers=workers, **TINY)
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_training_data_is_recognised_when_it_is_evaluated(run: Path) -> None:
    data = Colours(make_images())
    held_out = vitrail.evaluate(run, data, split="validation", device="cpu")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert held_out.as_dict()["top1"] == summary["top1"]
    everything = vitrail.evaluate(run, data, device="cpu")
    assert everything.evaluations[0].selection.notes == (
        "whole was trained on python:Colours, so its metrics are too optimistic: "
        "use split='validation' for held-out data",
    )
    assert vitrail.evaluate(run, Colours(make_images(1)), device="cpu").evaluations[0].selection.notes == ()


def test_a_loaded_model_is_evaluated_like_its_file(run: Path, tmp_path: Path) -> None:
    model = vitrail.load(run / "model.safetensors")
    data = {"test": (make_images(2), np.array(["red", "blue"])[LABELS])}
    from_file, loaded = vitrail.evaluate(run, data, device="cpu"), vitrail.evaluate(model, data, device="cpu")
    assert np.array_equal(from_file.evaluations[0].outputs.logits, loaded.evaluations[0].outputs.logits)
    assert loaded.evaluations[0].selection.split == "test"
    loaded.write(tmp_path / "out")
    assert "the loaded model" in (tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8")
    assert vitrail.evaluate(model, data, against=[run], device="cpu").pairs[0].test.p_value == 1


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    for index, image in enumerate(make_images()):
        path = tmp_path / "photos" / ("blue" if LABELS[index] else "red") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    out, summary = vitrail.train(tmp_path / "photos", out=tmp_path / "run", epochs=1, size=16, seed=3, **TINY)
    recipe = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["data"]["where"] == str(tmp_path / "photos")
    assert (recipe["seed"], recipe["epochs"], recipe["model"]["image_size"]) == (3, 1, [16, 16])
    assert summary["images"] > 0
    assert vitrail.evaluate(out, tmp_path / "photos", device="cpu").as_dict()["data"]["split"] == "all"
    assert vitrail.check(tmp_path / "photos", workers=0).is_ok


def test_fields_of_the_data_are_keywords(tmp_path: Path) -> None:
    data = (make_images(), LABELS)
    out, _ = vitrail.train(data, out=tmp_path / "a", steps=1, fractions=(0.5, 0.25, 0.25), balance="weights", **TINY)
    recipe = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["data"]["balance"] == "weights"
    assert set(read_run(out)["data"]["splits"]) == {"train", "validation", "test"}
    out, _ = vitrail.train(Data("digits"), out=tmp_path / "b", steps=1, per_class=2, patience=1, **TINY)
    assert read_run(out)["data"]["splits"]["train"]["images"] == 20
    assert json.loads((out / "recipe.json").read_text(encoding="utf-8"))["patience"] == 1
    with pytest.raises(ValueError, match=r"has no images for a validation split: give fractions=\(0\.8, 0\.2, 0\)"):
        vitrail.train(data, out=tmp_path / "c", steps=1, fractions=(1.0, 0.0, 0.0), **TINY)


def test_multi_label_arrays_are_trained_on(tmp_path: Path) -> None:
    hot = np.stack([LABELS, 1 - LABELS, np.arange(COUNT) % 3 == 0], axis=1)
    _, summary = vitrail.train((make_images(), hot), out=tmp_path / "run", steps=2, **TINY)
    assert 0 <= summary["map"] <= 1


def test_pretraining_takes_images_without_labels(tmp_path: Path) -> None:
    images = [Image.fromarray(image) for image in make_images()]
    out, summary = vitrail.pretrain(images, method="mae", out=tmp_path / "run", steps=2, batch_size=8, device="cpu")
    assert summary["method"] == "mae"
    assert read_run(out)["data"]["where"] == "python:list"
    with pytest.raises(ValueError, match=r"list\[0\] has no label: .* vitrail\.pretrain"):
        vitrail.train(images, out=tmp_path / "other", **TINY)


def test_default_directory_has_the_name_of_the_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, _ = vitrail.train((make_images(), LABELS), steps=1, **TINY)
    assert out == Path("runs/arrays-scratch-small-1")
