"""A table of images and numbers through the command line: check, train, resume, tune, evaluate, compare, report."""

import csv
import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests import forked
from tests.training.runs import assert_same, environment, interrupted, summary, train, trained

TINY = ("--set", "model.size.depth=2", "--set", "ema=EMA", "--batch-size", "16", "--workers", "0")
LENGTH = ("--epochs", "12")
TARGETS = ("--targets", "bright,offset")


def write_tables(folder: Path, count: int = 80) -> None:
    """Write grey images with their brightness, and a target of another unit that follows from it."""
    rng, lines = np.random.default_rng(0), ["path,split,bright,offset,kind"]
    (folder / "grey").mkdir(parents=True)
    for number in range(count):
        value = rng.uniform(20, 235)
        pixels = rng.normal(value, 8, (16, 16)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "grey" / f"{number:03}.png")
        split = "train" if number < 0.75 * count else "val"
        lines.append(f"grey/{number:03}.png,{split},{value:.3f},{2000 - value / 100:.5f},{'ab'[number % 2]}")
    (folder / "grey.csv").write_text("\n".join(lines) + "\n")
    (folder / "other.csv").write_text("\n".join(lines).replace("bright", "light") + "\n")
    bad = (
        "grey/000.png,train,,1,a\ngrey/001.png,train,nan,1,a\ngrey/002.png,train,1e999,1,a\ngrey/003.png,train,x,1,a\n"
    )
    (folder / "bad.csv").write_text("\n".join(lines) + "\n" + bad)
    (folder / "flat.csv").write_text("path,split,x\n" + "".join(f"grey/{n:03}.png,train,3\n" for n in range(30)))
    labels = (f"grey/{n:03}.png,{math.sqrt(n + 2):.4f}" for n in range(count))
    (folder / "labels.csv").write_text("path,label\n" + "\n".join(labels) + "\n")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression")
    write_tables(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp: Path) -> Path:
    trained(tmp, "grey.csv", *TARGETS, "--out", "whole", *TINY, *LENGTH)
    return tmp / "whole"


def test_numbers_are_learnt_in_their_own_units(whole: Path) -> None:
    record = json.loads((whole / "run.json").read_text())
    assert (record["recipe_name"], record["task"], record["labels"]) == ("regress", "numbers", ["bright", "offset"])
    assert record["data"]["splits"]["train"]["targets"]["offset"]["mean"] == pytest.approx(1998.7, abs=0.3)
    found = summary(whole)
    assert (found["validation_score"], found["images"]) == ("r2", 20)
    assert found["r2"] > 0.3  # 0.98 where measured; the mean of the targets has 0
    assert found["interval"][0] <= found["r2"] <= found["interval"][1]
    assert len(found["target_mae"]) == 2
    assert "mae" not in found  # of different units


def test_the_model_file_predicts_in_the_units_of_the_targets(tmp: Path, whole: Path) -> None:
    model = vitrail.load(whole / "model.safetensors")
    recipe = json.loads((whole / "recipe.json").read_text())
    assert model.labels == ("bright", "offset")
    assert model.card["targets"]["mean"] == pytest.approx(recipe["objective"]["mean"])
    assert model.preprocessing is not None
    with Image.open(tmp / "grey" / "079.png") as image, torch.no_grad():
        bright, offset = model(model.preprocessing(image)[None])[0].tolist()
    assert -200 < bright < 500
    assert 1990 < offset < 2010
    with np.load(whole / "evaluation" / "validation.npz") as arrays:
        assert arrays["predictions"].shape == arrays["numbers"].shape == (20, 2)


def test_the_best_weights_have_the_highest_r2(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["r2"] for row in rows if row["kind"] == "validation"}
    found = summary(whole)
    assert found["best_validation"] == max(scores.values()) == scores[found["best_step"]]


def test_report_shows_errors_values_and_worst_images(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    for text in ("R²", "predicted over true", "errors", "Images with the largest errors", "std of the target"):
        assert text in page, text
    for text in ("top-1", "Calibration", "Confusion", "Per-class", " classes"):
        assert text not in page, text
    assert len(list((whole / "evaluation" / "pictures").glob("validation-*.jpg"))) == 20


def test_evaluation_repeats_the_result_of_the_run(tmp: Path, whole: Path) -> None:
    done = forked.run("evaluate", "whole", "--json", "--out", "evaluated", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["r2"] == pytest.approx(summary(whole)["r2"], abs=1e-4)
    assert (found["task"], [row["target"] for row in found["per_target"]]) == ("numbers", ["bright", "offset"])
    assert all(row["mae_interval"][0] <= row["mae"] <= row["mae_interval"][1] for row in found["per_target"])
    with (tmp / "evaluated" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    errors = [float(row["predicted bright"]) - float(row["bright"]) for row in rows]
    assert errors == pytest.approx([float(row["error bright"]) for row in rows], abs=1e-3)
    assert np.abs(errors).mean() == pytest.approx(found["per_target"][0]["mae"], rel=1e-4)
    assert "Images with the largest errors" in (tmp / "evaluated" / "report.html").read_text()
    again = forked.run("evaluate", "whole", "grey.csv", "--out", "evaluated", cwd=tmp, env=environment(tmp))
    assert again.returncode == 0, again.stderr  # the directory is that of an evaluation
    assert "largest errors" in again.stdout
    assert "offset" in again.stdout


def test_two_models_are_compared_on_the_same_images(tmp: Path, whole: Path) -> None:
    trained(tmp, "grey.csv", "--targets", "offset,bright", "--out", "short", *TINY, "--steps", "1")
    done = forked.run("evaluate", "whole", "--against", "short", "--json", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["comparisons"]
    assert pair["difference"] < 0
    assert "more R² than short" in pair["verdict"]
    trained(tmp, "grey.csv", *TARGETS, "--out", "brief", *TINY, "--steps", "1")
    compared = forked.run("report", "whole", "brief", "--out", "pair.html", cwd=tmp, env=environment(tmp))
    assert compared.returncode == 0, compared.stderr
    assert "more R² than brief" in (tmp / "pair.html").read_text()


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(tmp: Path, whole: Path) -> None:
    options = ("grey.csv", *TARGETS, "--out", "killed", *TINY, *LENGTH, "--save-seconds", "0")
    assert interrupted(tmp, tmp / "killed", signal.SIGKILL, 10, *options) == -signal.SIGKILL
    trained(tmp, "--resume", "killed")
    assert_same(tmp / "killed", whole)


def test_a_run_is_not_resumed_with_other_numbers(tmp: Path) -> None:
    (tmp / "edited.csv").write_text((tmp / "grey.csv").read_text())
    options = ("edited.csv", *TARGETS, "--out", "edited", *TINY, *LENGTH, "--save-seconds", "0")
    assert interrupted(tmp, tmp / "edited", signal.SIGKILL, 2, *options) == -signal.SIGKILL
    lines = (tmp / "edited.csv").read_text().splitlines()
    (tmp / "edited.csv").write_text("\n".join([*lines[:5], lines[5].replace(",train,", ",train,1"), *lines[6:]]) + "\n")
    done = train(tmp, "--resume", "edited")
    assert done.returncode == 2
    assert "edited" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("tune", ["full", "head", "lora"])
def test_a_checkpoint_is_tuned_to_numbers(tmp: Path, tune: str) -> None:
    torch.manual_seed(0)
    classifier = vitrail.build(patch=8, width=32, depth=2, heads=2, classes=7, image_size=16)
    vitrail.save(classifier, tmp / f"{tune}.safetensors")
    options = ("--init", f"{tune}.safetensors", "--tune", tune, "--steps", "4", "--batch-size", "16", "--workers", "0")
    trained(tmp, "grey.csv", "--targets", "bright", "--out", f"tuned-{tune}", *options, "--patience", "2")
    found = summary(tmp / f"tuned-{tune}")
    assert {"r2", "mae", "rmse", "mae_interval"} <= set(found)
    model = vitrail.load(tmp / f"tuned-{tune}" / "model.safetensors")
    assert (model.config.classes, model.labels) == (1, ("bright",))
    before, after = classifier.state_dict(), model.state_dict()
    changed = {name: not torch.equal(before[name], after[name]) for name in before if not name.startswith("head.")}
    embed, attention = changed["embed.projection.weight"], changed["blocks.0.msa.qkv.weight"]
    assert (embed, attention) == {"full": (True, True), "head": (False, False), "lora": (False, True)}[tune]


def test_a_model_of_the_same_targets_keeps_its_head(tmp: Path, whole: Path) -> None:
    options = (
        "--init",
        "whole",
        "--out",
        "again",
        "--steps",
        "1",
        "--lr",
        "1e-9",
        "--workers",
        "0",
        "--set",
        "ema=none",
    )
    done = trained(tmp, "grey.csv", *TARGETS, *options)
    assert "has the same labels: its head is kept" in done.stderr
    assert summary(tmp / "again")["r2"] == pytest.approx(summary(whole)["r2"], abs=0.05)


def test_a_recipe_learns_the_statistics_of_its_own_data(tmp: Path, whole: Path) -> None:
    lines = (tmp / "grey.csv").read_text().splitlines()
    scaled = [
        ",".join([*row[:2], str(1000 * float(row[2])), *row[3:]]) for row in (line.split(",") for line in lines[1:])
    ]
    (tmp / "scaled.csv").write_text("\n".join([lines[0], *scaled]) + "\n")
    trained(tmp, "scaled.csv", *TARGETS, "--recipe", "whole/recipe.json", "--set", "steps=1", "--out", "scaled")
    first, second = (json.loads((tmp / run / "recipe.json").read_text())["objective"] for run in ("whole", "scaled"))
    assert second["mean"][0] == pytest.approx(1000 * first["mean"][0])


def test_check_shows_ranges_and_names_bad_rows(tmp: Path) -> None:
    done = forked.run("check", "bad.csv", *TARGETS, cwd=tmp, env=environment(tmp))
    assert done.returncode == 1
    for text in ("2 targets", "smallest", "target-value", "bright is missing (bad.csv, line 82)", "4 errors"):
        assert text in done.stdout, text
    good = forked.run("check", "grey.csv", *TARGETS, cwd=tmp, env=environment(tmp))
    assert (good.returncode, "ready to train" in good.stdout) == (0, True)
    assert "\n\n\n" not in good.stdout


def test_bad_rows_are_left_out_and_listed(tmp: Path) -> None:
    done = trained(tmp, "bad.csv", *TARGETS, "--out", "left-out", *TINY, "--steps", "1")
    assert "4 bad files are left out" in done.stderr
    record = json.loads((tmp / "left-out" / "run.json").read_text())
    assert [entry["detail"].rpartition(", ")[2] for entry in record["data"]["skipped"]] == [
        f"line {number})" for number in (82, 83, 84, 85)
    ]
    assert record["data"]["splits"]["train"]["images"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grey.csv", "--targets", "brite"), "grey.csv has no column 'brite' (like 'bright'?)"),
        (("grey.csv", "--targets", "kind"), "kind 'a' is not a number"),
        (("grey.csv",), "columns of numbers need --targets"),
        (("labels.csv",), "the labels are numbers such as 1.4142: use --targets label to learn numbers"),
        (
            ("flat.csv", "--targets", "x"),
            "'x' is the same for all training images of flat.csv: leave it out of --targets",
        ),
        (("digits", "--targets", "x"), "digits is no table with columns of numbers"),
        (("grey.csv", *TARGETS, "--balance", "weights"), "--balance is for classes or masks"),
        (("grey.csv", *TARGETS, "--task", "multi"), "--task is for classes or masks"),
        (("grey.csv", *TARGETS, "--per-class", "3"), "--per-class is for classes or masks"),
        (("grey.csv", *TARGETS, "--names", "imagenet"), "--names is for classes or masks"),
        (("grey.csv", *TARGETS, "--ignore", "3"), "--ignore is for classes or masks"),
        (("grey.csv", *TARGETS, "--teacher", "none.safetensors"), "--teacher teaches classes"),
        (
            ("grey.csv", *TARGETS, "--recipe", "deit"),
            "does not learn numbers, which grey.csv has: use --recipe regress",
        ),
        (("grey.csv", *TARGETS, "--decoder", "linear"), "does not use --decoder"),
        (("digits", "--recipe", "regress"), "does not learn one class per image"),
    ],
)
def test_bad_requests_are_one_line(tmp: Path, arguments: tuple[str, ...], message: str) -> None:
    done = train(tmp, *arguments, "--out", "refused", "--steps", "2", "--workers", "0")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "whole", "other.csv"), "other.csv has no column 'bright'"),
        (("evaluate", "whole", "digits"), "digits is no table with columns of numbers"),
        (("evaluate", "whole", "--probe", "knn"), "a probe needs classes of images, and"),
        (("evaluate", "whole", "--only-present"), "--only-present is for classes, and whole predicts numbers"),
        (("evaluate", "whole", "grey.csv", "--map", "index"), "--map is for classes, and whole predicts numbers"),
        (("evaluate", "whole", "--names", "imagenet"), "--names is for classes or masks"),
        (("inspect", "whole", "grey/000.png", "--names", "imagenet", "--out", "figures"), "leave out --names"),
    ],
)
def test_commands_of_classes_say_so_in_one_line(
    tmp: Path, whole: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = forked.run(*arguments, cwd=tmp, env=environment(tmp))
    assert done.returncode == 2, done.stdout
    assert message in done.stderr.splitlines()[-1], done.stderr


def test_inspection_shows_the_numbers(tmp: Path, whole: Path) -> None:
    done = forked.run("inspect", "whole", "grey/000.png", "--out", "figures", "--json", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    (image,) = json.loads(done.stdout)["images"]
    (row,) = vitrail.predict(whole, tmp / "grey" / "000.png", device="cpu")
    assert image["values"] == pytest.approx(dict(row.values), rel=1e-3)
    assert image["predicted"] == []


def test_python_samples_are_trained_and_evaluated(tmp: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(20, 235, 40)
    samples = [(rng.normal(value, 8, (16, 16)).clip(0, 255).astype(np.uint8), value) for value in values]
    directory, found = vitrail.train(
        samples, targets="bright", out=tmp / "python", steps=2, batch_size=8, workers=0, device="cpu"
    )
    assert math.isfinite(found["r2"])
    result = vitrail.evaluate(directory, samples, split="validation", workers=0, device="cpu")
    assert result.as_dict()["r2"] == pytest.approx(found["r2"], abs=1e-3)
