"""`vitrail train` on folders, tables and names, and what it says when something is wrong."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import environment, summary, train, trained

TINY = ("--set", "model.size.depth=1", "--set", "model.size.width=32", "--batch-size", "8", "--workers", "0")
COLOURS = {"blue": (30, 40, 220), "green": (30, 200, 60), "red": (220, 40, 30)}


def picture(path: Path, colour: tuple[int, int, int], seed: int, side: int = 24) -> None:
    """A field of one colour with noise, different for every seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-30, 30, (side, side, 3))
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(12):
            picture(tmp_path / "photos" / "train" / name / f"{number}.png", colour, 100 * number + len(name))
        for number in range(4):
            picture(tmp_path / "photos" / "val" / name / f"{number}.png", colour, 7000 + 100 * number + len(name))
    return tmp_path / "photos"


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_folder_becomes_a_model_with_its_labels(folder: Path, tmp_path: Path) -> None:
    done = trained(tmp_path, "photos", "--out", "run", "--epochs", "8", *TINY)
    assert "3 classes; 36 train, 12 validation" in done.stderr
    assert summary(tmp_path / "run")["top1"] > 0.6  # 1.0 from the second epoch on where measured; chance is 1/3
    model = vitrail.load(tmp_path / "run" / "model.safetensors")
    assert model.labels == ("blue", "green", "red")
    assert model.preprocessing is not None
    right = 0
    for target, name in enumerate(model.labels):
        for path in sorted((folder / "val" / name).iterdir()):
            with Image.open(path) as image:
                right += int(model(model.preprocessing(image)[None]).argmax()) == target
    assert right / 12 == pytest.approx(summary(tmp_path / "run")["top1"], abs=1.5 / 12)  # an image may be undecided


def test_bad_files_are_skipped_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "red" / "empty.jpg").touch()
    (folder / "train" / "red" / "text.png").write_text("not a picture")
    done = trained(tmp_path, "photos", "--out", "run", "--steps", "2", *TINY)
    assert "2 bad files are left out" in done.stderr
    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"]
    assert {Path(each["path"]).name for each in skipped} == {"empty.jpg", "text.png"}


def test_class_that_is_new_in_validation_is_named(folder: Path, tmp_path: Path) -> None:
    picture(folder / "val" / "violet" / "1.png", (130, 0, 180), 1)
    done = train(tmp_path, "photos", "--out", "run", "--steps", "2", *TINY)
    assert done.returncode == 2
    assert "'violet'" in done.stderr
    assert not (tmp_path / "run").exists()
    done = trained(tmp_path, "photos", "--out", "run", "--steps", "2", "--allow-class-mismatch", *TINY)
    assert "violet" in done.stderr
    assert summary(tmp_path / "run")["images"] == 12


def test_multi_label_table_is_evaluated_by_map(folder: Path, tmp_path: Path) -> None:
    rows = [("path", "label", "split")]
    for split in ("train", "val"):
        for name in COLOURS:
            for path in sorted((folder / split / name).iterdir()):
                rows.append((str(path), name if name == "green" else f"{name}|warm-or-cold", split))
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    done = trained(tmp_path, "table.csv", "--out", "run", "--epochs", "8", *TINY)
    found = summary(tmp_path / "run")
    assert found["map"] > 0.7  # 1.0 where measured; chance is 0.42
    assert "mAP" in done.stdout
    assert vitrail.load(tmp_path / "run" / "model.safetensors").labels == ("blue", "green", "red", "warm-or-cold")


@pytest.mark.parametrize("balance", ["weights", "sampling"])
def test_class_imbalance_options(folder: Path, tmp_path: Path, balance: str) -> None:
    for number in range(2, 12):
        (folder / "train" / "red" / f"{number}.png").unlink()
    trained(tmp_path, "photos", "--out", "run", "--epochs", "12", "--balance", balance, *TINY)
    assert summary(tmp_path / "run")["balanced_accuracy"] > 0.6


def test_images_of_every_mode_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    with Image.open(folder / "train" / "red" / "0.png") as image:
        image.convert("L").save(folder / "train" / "red" / "grey.png")
        image.convert("RGBA").save(folder / "train" / "red" / "rgba.png")
        image.convert("P").save(folder / "train" / "red" / "palette.gif")
        image.convert("CMYK").save(folder / "train" / "red" / "cmyk.jpg")
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(folder / "train" / "red" / "turned.jpg", exif=exif)
    trained(tmp_path, "photos", "--out", "run", "--epochs", "1", *TINY)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["splits"]["train"]["images"] == 41


@pytest.mark.parametrize("how", ["head", "last-1", "lora"])
def test_fine_tuning_changes_predictions(folder: Path, tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    start = vitrail.build(None, patch=8, width=32, depth=2, heads=2, classes=7, image_size=24)
    vitrail.save(start, tmp_path / "start.safetensors", preprocessing=vitrail.Preprocessing((24, 24), (24, 24)))
    trained(tmp_path, "photos", "--init", "start.safetensors", "--tune", how, "--out", "run", "--steps", "3", *TINY[4:])
    before, after = start.state_dict(), vitrail.load(tmp_path / "run" / "model.safetensors").state_dict()
    changed = {name for name in after if name.startswith("head") or not torch.equal(before[name], after[name])}
    assert set(after) == set(before)
    if how == "head":
        assert changed == {"head.weight", "head.bias"}
    elif how == "last-1":
        assert {name.split(".")[0] for name in changed} == {"blocks", "pool", "head"}
        assert not any(name.startswith("blocks.0") for name in changed)
    else:
        assert "blocks.0.msa.qkv.weight" in changed
        assert "blocks.0.msa.qkv.bias" not in changed


def test_nonfinite_loss_stops_with_file_names(folder: Path, tmp_path: Path) -> None:
    wild = (
        "--set",
        "optimizer=SGD",
        "--set",
        "optimizer.lr=1e30",
        "--set",
        "optimizer.clip=none",
        "--set",
        "schedule.warmup=0",
    )
    done = train(tmp_path, "photos", "--out", "run", "--steps", "20", *TINY, *wild)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "at step" in last
    assert "learning rate" in last
    assert ".png" in last
    done = train(tmp_path, "photos", "--out", "tolerant", "--steps", "20", "--skip-nonfinite", "3", *TINY, *wild)
    assert done.returncode == 2
    assert done.stderr.count(" skipped: ") == 3


def test_training_stops_early_and_keeps_the_best(folder: Path, tmp_path: Path) -> None:
    """Twelve images have thirteen accuracies: it can improve 12 times, each within 3 epochs, so it stops before the 60th."""
    trained(tmp_path, "photos", "--out", "run", "--epochs", "60", "--patience", "3", *TINY)
    found = summary(tmp_path / "run")
    assert found["stopped"] == "early"
    assert found["weights"] == "best"
    assert found["steps"] < 60 * 4
    assert found["best_validation"] == found["top1"]


def test_accumulation_gives_the_same_gradients(folder: Path, tmp_path: Path) -> None:
    """Parts of unequal size, an optimiser that shows the size of a gradient, and mixing across the parts."""
    plain = ("--set", "model.embed=Patches", "--set", "optimizer=SGD", "--set", "objective.mixup=0.2")
    trained(tmp_path, "photos", "--out", "one", "--steps", "4", *TINY, *plain)
    trained(tmp_path, "photos", "--out", "three", "--steps", "4", "--set", "accumulate=3", *TINY, *plain)
    for name in ("loss", "grad_norm"):
        one, three = (
            [row[name] for row in lines(tmp_path / run) if row["kind"] == "train"] for run in ("one", "three")
        )
        assert one == pytest.approx(three, rel=1e-3)


def test_half_precision_trains(folder: Path, tmp_path: Path) -> None:
    trained(tmp_path, "photos", "--out", "run", "--epochs", "8", "--precision", "bf16", *TINY)
    assert summary(tmp_path / "run")["top1"] > 0.6  # 1.0 where measured; chance is 1/3


@pytest.mark.slow
def test_compiled_model_trains(folder: Path, tmp_path: Path) -> None:
    trained(tmp_path, "photos", "--out", "run", "--epochs", "6", "--compile", *TINY)
    assert summary(tmp_path / "run")["top1"] > 0.6  # 1.0 where measured; chance is 1/3
    assert vitrail.load(tmp_path / "run" / "model.safetensors").config.classes == 3


def test_tensorboard_gets_every_number(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, "photos", "--out", "run", "--steps", "4", "--log", "tensorboard", *TINY)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "validation/top1"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("photos", "--recipe", "finetun"), "did you mean 'finetune'"),
        (("photos", "--set", "optimizer.lrr=1"), "did you mean 'lr'"),
        (("photos", "--set", "optimizer.lr=fast"), "is not float"),
        (("photos", "--set", "optimizer=Adamm"), "did you mean 'AdamW'"),
        (("photos", "--set", "epochs"), "NAME=VALUE"),
        (("photos", "--recipe", "finetune"), "--init"),
        (("photoss",), "photoss"),
        ((), "no data: give a folder"),
        (("photos", "--device", "tpu"), "unknown device"),
        (("photos", "--device", "cuda"), "no CUDA device"),
        (("photos", "--recipe", "nowhere/recipe.json"), "not a recipe"),
        (("photos", "--init", "missing.safetensors"), "missing.safetensors"),
        (("photos", "--lr", "-1"), "must be > 0"),
        (("photos", "--tune", "tail"), "unknown tuning mode"),
        (("photos", "--steps", "0"), "must be > 0"),
        (("photos", "--epochs", "nan"), "must be > 0"),
        (("photos", "--epochs", "2", "--steps", "3"), "give one of them"),
        (("photos", "--device", "cpu:x"), "unknown device"),
        (("photos", "--set", "validate_every=1e400"), "must be > 0"),
        (("photos", "--keep-checkpoints", "0"), "must be >= 1"),
        (("photos", "--workers", "-1"), "must be >= 0"),
        (("photos", "--set", "objective.mixup=0.2", "--batch-size", "1"), "use --batch-size 2 or more, got 1"),
        (("photos", "--set", "model.channels=2"), "set model.channels=3"),
        (("--balance", "weights"), "needs DATA"),
    ],
)
def test_mistakes_are_one_line(folder: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = train(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert said in last
    assert last.startswith("vitrail train: ")
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_summary_for_machines_is_json_alone(folder: Path, tmp_path: Path) -> None:
    done = trained(tmp_path, "photos", "--steps", "1", "--json", "--quiet", *TINY)
    assert json.loads(done.stdout)["steps"] == 1
    assert done.stderr == ""
    assert (tmp_path / "runs" / "photos-scratch-small-1" / "report.html").is_file()


def test_vanished_held_out_images_are_not_counted_as_correct(folder: Path, tmp_path: Path) -> None:
    """All of class 0: whoever scores a missing answer as zeros would call them right."""
    code = (
        "from pathlib import Path\nimport vitrail.training.train as t\nold = t.prepare_data\n"
        "def prepare(*a, **k):\n    found = old(*a, **k)\n"
        "    [p.unlink() for p in Path('photos/val/blue').glob('[012].png')]\n    return found\n"
        "t.prepare_data = prepare\nt.train('photos', out='run', steps=2, batch_size=8)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "run")
    assert found["images"] == 9
    assert len(found["unreadable"]) == 3


def test_unknown_overrides_are_refused() -> None:
    with pytest.raises(TypeError, match="batchsize"):
        vitrail.train("digits", batchsize=7)  # type: ignore[call-arg]


def test_recipe_from_a_file_is_changed_with_set_alone(folder: Path, tmp_path: Path) -> None:
    trained(tmp_path, "photos", "--out", "run", "--steps", "1", *TINY)
    done = train(tmp_path, "--recipe", "run/recipe.json", "--lr", "1")
    assert done.returncode == 2
    assert "--set" in done.stderr
    trained(tmp_path, "--recipe", "run/recipe.json", "--set", "epochs=1", "--out", "again")
    assert summary(tmp_path / "again")["steps"] == 4


def test_head_is_new_for_other_labels_and_kept_for_the_same(folder: Path, tmp_path: Path) -> None:
    start = vitrail.build(None, patch=8, width=32, depth=1, heads=2, classes=3, image_size=24)
    torch.nn.init.constant_(start.head.bias, 50.0)
    pipeline = vitrail.Preprocessing((24, 24), (24, 24))
    for labels in (("x", "y", "z"), ("blue", "green", "red")):
        vitrail.save(start, tmp_path / "start.safetensors", labels=labels, preprocessing=pipeline)
        slow = ("--init", "start.safetensors", "--lr", "1e-9", "--steps", "1", "--batch-size", "8")
        done = trained(tmp_path, "photos", *slow, "--out", f"run-{labels[0]}")
        bias = vitrail.load(tmp_path / f"run-{labels[0]}" / "model.safetensors").head.bias
        assert torch.allclose(bias, torch.full((3,), 50.0 if labels[0] == "blue" else 0.0), atol=1e-3)
        assert ("its head is kept" in done.stderr) == (labels[0] == "blue")


def test_run_survives_a_closed_stderr(folder: Path, tmp_path: Path) -> None:
    """Standard error is closed, or nobody reads it, or it cannot show every letter."""
    for name, redirect in (("closed", "2>&-"), ("unread", "2> >(head -c 1 > /dev/null)"), ("ascii", "")):
        line = f"{sys.executable} -m vitrail train photos --out {name} --steps 2 {' '.join(TINY)} {redirect}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment(tmp_path) | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, (name, done.stderr)
        assert (tmp_path / name / "summary.json").is_file()


def test_training_from_a_thread_works(folder: Path, tmp_path: Path) -> None:
    code = (
        "import threading, vitrail\n"
        "t = threading.Thread(target=lambda: vitrail.train('photos', out='run', steps=2, batch_size=8))\n"
        "t.start(); t.join()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(tmp_path), timeout=120, check=True)
    assert (tmp_path / "run" / "summary.json").is_file()
