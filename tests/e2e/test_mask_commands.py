"""Commands on masks: `transfer`, values that a training ignored, names, and sources besides folders, by the command line."""

import csv
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests import forked
from tests.data.test_sources_masks import PETS
from tests.e2e.test_segmentation import PYRAMID, TINY, write_pair
from tests.training.runs import environment, trained
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import contract_from_json, contract_to_json
from vitrail.deploy.runtimes.open import open_checkpoint

Done = subprocess.CompletedProcess[str]
METHODS = ["linear", "linear-4", "lora", "full"]
TRANSFER = ("transfer", "backbone.safetensors", "shapes", "--workers", "0")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create images with masks of the values 0, 1 and 2, without names, and an untrained classifier."""
    folder = tmp_path_factory.mktemp("commands")
    for number in range(16):
        write_pair(folder / "shapes" / "train", f"{number:02}", number)
    for number in range(6):
        write_pair(folder / "shapes" / "val", f"{number:02}", 1000 + number)
    torch.manual_seed(0)
    model = vitrail.build(None, patch=8, width=32, depth=4, heads=2, classes=5, image_size=32)
    vitrail.save(model, folder / "backbone.safetensors", preprocessing=Preprocessing((32, 32), (32, 32)))
    return folder


def run(tmp: Path, *arguments: str) -> Done:
    return forked.run(*arguments, cwd=tmp, env=environment(tmp))


def run_json(tmp: Path, *arguments: str) -> dict[str, Any]:
    done = run(tmp, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def last_line(done: Done) -> str:
    assert done.returncode == 2, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def ignoring(tmp: Path) -> Path:
    """Train with the value 2 ignored; the run is moved, so that its data is not recognised by its path."""
    trained(tmp, "shapes", "--out", "trained", *TINY, *PYRAMID, "--steps", "3", "--ignore", "2")
    copy = tmp / "elsewhere"
    copy.mkdir()
    shutil.copyfile(tmp / "trained" / "model.safetensors", copy / "model.safetensors")
    shutil.copytree(tmp / "shapes", tmp / "others")
    return copy / "model.safetensors"


@pytest.fixture(scope="module")
def compared(tmp: Path) -> dict[str, Any]:
    return run_json(tmp, *TRANSFER, "--out", "compared")


# --- transfer ---


def test_transfer_compares_trainings_of_masks(tmp: Path, compared: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in compared["rows"]}
    assert list(rows) == METHODS
    assert (compared["measure"], compared["split"], compared["images"]) == ("miou", "validation", 6)
    for method, row in rows.items():
        assert 0 <= row["interval"][0] <= row["score"] <= row["interval"][1] <= 1
        summary = json.loads((tmp / "compared" / method / "summary.json").read_text())
        assert row["score"] == summary["miou"]
        recipe = json.loads((tmp / "compared" / method / "recipe.json").read_text())
        tune, decoder = ("head", "LinearDecoder") if method.startswith("linear") else (method, "UPerNet")
        assert (recipe["name"], recipe["tune"], recipe["model"]["decoder"]["type"]) == ("segment", tune, decoder)
        assert row["about"].startswith(decoder)
    assert json.loads((tmp / "compared" / "linear-4" / "recipe.json").read_text())["model"]["decoder"]["layers"] == [
        *(-4, -3, -2, -1)
    ]
    assert rows["linear"]["trainable"] < rows["linear-4"]["trainable"] < rows["full"]["trainable"]
    before = vitrail.load(tmp / "backbone.safetensors").state_dict()
    for method in ("linear", "linear-4"):
        after = vitrail.load(tmp / "compared" / method / "model.safetensors").state_dict()
        assert all(
            torch.equal(after[f"backbone.{name}"], before[name]) for name in before if name.startswith("blocks.")
        )


def test_models_of_the_comparison_evaluate_to_its_scores(tmp: Path, compared: dict[str, Any]) -> None:
    scores = {row["method"]: row["score"] for row in compared["rows"]}
    found = run_json(tmp, "evaluate", "compared/full", "--against", "compared/linear")
    assert found["miou"] == pytest.approx(scores["full"], abs=2e-3)
    assert found["against"][0]["miou"] == pytest.approx(scores["linear"], abs=2e-3)
    assert len(found["comparisons"]) == 1


def test_a_finished_comparison_is_not_trained_again(tmp: Path, compared: dict[str, Any]) -> None:
    again = run(tmp, *TRANSFER, "--out", "compared")
    assert again.returncode == 0, again.stderr
    assert "steps" not in again.stderr
    assert "mIoU" in again.stdout
    assert f"{100 * compared['rows'][3]['score']:.2f} %" in again.stdout
    edited = tmp / "edited"
    shutil.copytree(tmp / "shapes", edited)
    done = run(
        tmp, "transfer", "backbone.safetensors", "edited", "--out", "moved", "--methods", "linear", "--minutes", "1e-9"
    )
    assert done.returncode == 0, done.stderr
    assert "linear was skipped: the budget of 1e-09 minutes is used up" in done.stdout
    path = edited / "train" / "masks" / "00.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = (mask[0, 0] + 1) % 3
    Image.fromarray(mask).save(path)
    refused = run(tmp, "transfer", "backbone.safetensors", "edited", "--out", "moved", "--methods", "linear")
    assert "with other weights, data or settings: give another --out" in last_line(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "knn"), "knn does not apply to masks, which shapes has: use linear, linear-4, lora, full"),
        (("--methods", "full,head"), "head does not apply to masks"),
        (("--methods", "few-shot"), "unknown method 'few-shot'"),
        (("--per-class", "2"), "--per-class needs one label per image"),
        (("--ignore", "0,1,2"), "no mask with a value that is not ignored"),
    ],
)
def test_what_makes_no_sense_for_masks_is_refused(tmp: Path, arguments: tuple[str, ...], message: str) -> None:
    line = last_line(run(tmp, *TRANSFER, "--out", "refused", *arguments))
    assert message in line
    assert not (tmp / "refused").exists()


def test_linear_4_is_refused_for_classes(tmp: Path) -> None:
    done = run(tmp, "transfer", "backbone.safetensors", "digits", "--out", "refused", "--methods", "linear-4")
    assert "linear-4 does not apply to one class per image, which digits has: use knn, linear, head" in last_line(done)
    assert not (tmp / "refused").exists()


def test_a_method_that_a_family_lacks_is_listed(tmp: Path) -> None:
    model = vitrail.build("R50x1", classes=3, image_size=32)
    vitrail.save(model, tmp / "resnet.safetensors", preprocessing=Preprocessing((32, 32), (32, 32)))
    found = run_json(
        tmp, "transfer", "resnet.safetensors", "shapes", "--workers", "0", "--out", "resnet", "--methods", "lora"
    )
    assert found["rows"] == []
    assert "does not support" in found["left_out"]["lora"]
    shallow = vitrail.build(None, patch=8, width=32, depth=2, heads=2, classes=5, image_size=32)
    vitrail.save(shallow, tmp / "shallow.safetensors", preprocessing=Preprocessing((32, 32), (32, 32)))
    done = run(tmp, "transfer", "shallow.safetensors", "shapes", "--out", "shallow", "--methods", "linear-4")
    assert done.returncode == 0, done.stderr
    assert "linear-4 was skipped: it reads 4 layers, and the model has 2" in done.stdout


def test_transfer_from_a_segmentation_model_ignores_what_its_training_ignored(tmp: Path, ignoring: Path) -> None:
    arguments = ("transfer", str(ignoring), "shapes", "--workers", "0", "--methods", "linear,lora")
    done = run(tmp, *arguments, "--out", "again")
    assert done.returncode == 0, done.stderr
    assert "the value 2 of the masks is ignored, as in the training of elsewhere: --ignore changes that" in done.stderr
    for method, decoder in (("linear", "LinearDecoder"), ("lora", "UPerNet")):
        recipe = json.loads((tmp / "again" / method / "recipe.json").read_text())
        assert recipe["data"]["ignore"] == [2, 255]
        assert recipe["model"]["decoder"]["type"] == decoder  # a new one, or that of the checkpoint
        assert vitrail.load(tmp / "again" / method / "model.safetensors").labels == ("0", "1")


# --- values that a training ignored ---


def test_evaluation_ignores_what_the_training_ignored(tmp: Path, ignoring: Path) -> None:
    assert vitrail.load(ignoring).card["ignore"] == [2, 255]
    done = run(tmp, "evaluate", str(ignoring), "others")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "is ignored" in line]
    assert line.strip() == "the value 2 of the masks is ignored, as in the training of elsewhere: --ignore changes that"
    found = run_json(tmp, "evaluate", str(ignoring), "others", "--against", "trained")
    counted = sum(row["pixels"] for row in found["per_class"])
    masks = [np.asarray(Image.open(path)) for path in (tmp / "others" / "val" / "masks").iterdir()]
    assert counted == sum(int((mask != 2).sum()) for mask in masks)
    assert found["comparisons"][0]["difference"] == 0


def test_ignore_overrides_what_the_training_ignored(tmp: Path, ignoring: Path) -> None:
    line = last_line(run(tmp, "evaluate", str(ignoring), "others", "--ignore", "255"))
    assert "was not trained on the classes '2': name them as in training, or add their values to --ignore" in line
    found = run_json(tmp, "evaluate", str(ignoring), "others", "--ignore", "1,2")
    assert [row["class"] for row in found["per_class"] if row["pixels"]] == ["0"]


def test_a_class_of_the_model_is_not_ignored_silently(tmp: Path, ignoring: Path) -> None:
    shutil.copytree(tmp / "shapes", tmp / "renumbered")
    (tmp / "renumbered" / "classes.txt").write_text("0 0\n2 1\n1 ignore\n")  # the model's class 1 has the value 2 here
    line = last_line(run(tmp, "evaluate", str(ignoring), "renumbered"))
    assert (
        "the value 2 of the masks is '1', a class of elsewhere, and the training of elsewhere ignored it: give --ignore"
        in line
    )
    assert run_json(tmp, "evaluate", str(ignoring), "renumbered", "--ignore", "255")["n"] == 6


def test_export_compares_with_labels(tmp: Path, ignoring: Path) -> None:
    done = run(tmp, "export", str(ignoring), "model.onnx", "--verify", "others", "--limit", "4")
    assert done.returncode == 0, done.stderr
    assert (
        "note: the value 2 of the masks is ignored, as in the training of elsewhere: --ignore changes that"
        in done.stderr
    )
    assert "mIoU" in done.stdout
    assert "without labels" not in done.stderr
    found = run_json(tmp, "evaluate", "model.onnx", "others")  # the exported file has the values too
    assert {row["class"] for row in found["per_class"]} == {"0", "1"}
    refused = run(tmp, "export", str(ignoring), "more.onnx", "--verify", "others", "--ignore", "255")
    assert "was not trained on the classes '2'" in last_line(refused)
    assert not (tmp / "more.onnx").exists()
    assert "--ignore needs --verify DATA" in last_line(run(tmp, "export", str(ignoring), "more.onnx", "--ignore", "2"))


def test_files_of_earlier_versions_state_ignored_values_in_their_recipe_or_not_at_all(
    tmp: Path, ignoring: Path
) -> None:
    model = vitrail.load(ignoring)
    del model.card["ignore"]
    vitrail.save(model, tmp / "earlier.safetensors")
    contract = open_checkpoint(tmp / "earlier.safetensors").contract
    assert contract.ignore == (2,)
    assert run_json(tmp, "evaluate", "earlier.safetensors", "others")["n"] == 6
    stored = json.loads(contract_to_json(contract, "float"))
    del stored["ignore"]
    assert contract_from_json(json.dumps(stored))[0].ignore is None
    with pytest.raises(ValueError, match="an ignored value of masks must be a whole number >= 0, got -1"):
        contract_from_json(json.dumps(stored | {"ignore": [-1]}))


# --- fingerprints ---


def test_the_fingerprint_of_an_evaluation_has_the_content_of_masks(tmp: Path, ignoring: Path) -> None:
    def fingerprint(*data: str) -> str:
        return run_json(tmp, "evaluate", "trained", *data)["data"]["fingerprint"]

    shutil.copytree(tmp / "shapes", tmp / "touched")
    before = fingerprint("touched")
    assert fingerprint("touched") == before
    path = tmp / "touched" / "val" / "masks" / "00.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = 1 - min(mask[0, 0], 1)
    Image.fromarray(mask).save(path)
    assert fingerprint("touched") != before


# --- names and sources ---


def write_sources(tmp: Path, to: Path) -> dict[str, str]:
    """Write the pairs of `shapes` in other forms; return the sources by their name."""
    pairs = {
        (split, path.stem): (path, path.parents[1] / "masks" / path.name)
        for split in ("train", "val")
        for path in sorted((tmp / "shapes" / split / "images").iterdir())
    }
    for (split, stem), (image, mask) in pairs.items():
        (to / "one" / split).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, to / "one" / split / f"{stem}.png")
        shutil.copyfile(mask, to / "one" / split / f"{stem}_mask.png")
    (to / "tar").mkdir()
    for split in ("train", "val"):
        with tarfile.open(to / "tar" / f"{split}-000.tar", "w") as tar:
            for (of, stem), files in pairs.items():
                for path, ending in zip(files, ("png", "mask.png") if of == split else (), strict=False):
                    header = tarfile.TarInfo(f"{stem}.{ending}")
                    header.size = path.stat().st_size
                    tar.addfile(header, io.BytesIO(path.read_bytes()))
    with (to / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "mask", "split"))
        writer.writerows((*files, split) for (split, _), files in pairs.items())
    return {"one folder": str(to / "one"), "shards": str(to / "tar"), "list": str(to / "pairs.csv")}


def test_every_source_is_checked_and_trains_to_the_same_weights(tmp: Path, tmp_path: Path) -> None:
    (tmp / "names.txt").write_text("ground\nred\nblue\n")
    short = (*TINY, *PYRAMID, "--steps", "3", "--names", str(tmp / "names.txt"))
    trained(tmp, "shapes", "--out", "named", *short)
    expected = vitrail.load(tmp / "named" / "model.safetensors")
    assert expected.labels == ("ground", "red", "blue")
    counts = run_json(tmp, "check", "shapes")["splits"]
    for name, source in write_sources(tmp, tmp_path).items():
        result = run_json(tmp, "check", source)
        assert (result["ok"], result["splits"]) == (True, counts), name
        out = f"named-{name.split()[0]}"
        trained(tmp, source, "--out", out, *short)
        found = vitrail.load(tmp / out / "model.safetensors").state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.state_dict().items()), name


def test_a_python_object_trains_evaluates_and_resumes(
    tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def read(split: str) -> list[tuple[np.ndarray, np.ndarray]]:
        files = sorted((tmp / "shapes" / split / "images").iterdir())
        return [(np.asarray(Image.open(p)), np.asarray(Image.open(p.parents[1] / "masks" / p.name))) for p in files]

    data = {"train": read("train"), "validation": read("val")}
    options: dict[str, Any] = {"size": 32, "batch_size": 8, "steps": 3, "workers": 0, "width": 32, "depth": 2}
    settings = ["model.backbone.size.heads=2", "model.decoder.channels=16"]
    directory, summary = vitrail.train(data, out=tmp_path / "run", settings=settings, **options)
    assert 0 <= summary["miou"] <= 1
    found = vitrail.evaluate(directory, data, workers=0).as_dict()
    assert found["miou"] == pytest.approx(summary["miou"], abs=2e-3)
    assert any(
        "was trained on" in note for note in vitrail.evaluate(directory, data, split="train").as_dict()["data"]["notes"]
    )
    assert vitrail.resume(directory, data=data)[1]["miou"] == summary["miou"]  # finished: nothing is trained
    (directory / "summary.json").unlink()
    edited = {**data, "train": [(image, mask.copy()) for image, mask in data["train"]]}
    edited["train"][0][1][0, 0] = 2 - edited["train"][0][1][0, 0]
    with pytest.raises(ValueError, match="started with other images in python:dict: give the same object"):
        vitrail.resume(directory, data=edited)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ground\nred\n", "has no name for 1 of 3 classes, first '2': add it, or rename the class"),
        ("", "is empty"),
        (None, "no such file"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp: Path, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "names.txt").write_text(text)
    line = last_line(run(tmp, "check", "shapes", "--names", str(tmp_path / "names.txt")))
    assert message in line
    assert "--names" in line or "names.txt" in line


@pytest.mark.skipif(not PETS.exists(), reason="no photographs beside this checkout (../shared/data)")
def test_real_pets_in_one_folder(tmp: Path, tmp_path: Path) -> None:
    for path in sorted((PETS / "validation" / "images").iterdir())[:12]:
        (tmp_path / path.name).symlink_to(path)
        (tmp_path / f"{path.stem}_mask.png").symlink_to(PETS / "validation" / "masks" / f"{path.stem}.png")
    result = run_json(tmp, "check", str(tmp_path), "--ignore", "3")
    assert (result["images"], result["kind"], result["classes"]) == (12, "masks", ["1", "2"])
