"""Runs within a time budget, the share of validation, the time left, and the weights that are kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import SMALL, assert_same, summary, train, trained
from vitrail.cli.text.training import format_outcome
from vitrail.reports.page import write_report
from vitrail.training import recipe_choice
from vitrail.training.budget import FINISH_SECONDS, choose_steps, has_same_steps
from vitrail.training.recipe import Data, Facts, Recipe, read_recipe, with_settings, write_recipe
from vitrail.training.recipe_choice import build_named_recipe
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.validation import (
    MAX_SHARE,
    count_passes,
    count_training_passes,
    describe_validation,
    limit_validation,
)
from vitrail.training.step_time import StepTime
from vitrail.training.train import resume
from vitrail.training.trainer import Plan

NOTHING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def digits() -> Prepared:
    return prepare_data(Data("digits"))


@pytest.fixture(scope="module")
def unlabelled() -> Prepared:
    return prepare_data(Data("digits", task="none"))


def build(prepared: Prepared, name: str, **overrides: Any) -> tuple[Recipe, Facts]:
    facts = replace(prepared.measure_facts(), overrides={}, chosen=[], used=set())
    data = Data("digits", task="none" if name in ("mae", "dino", "mpp") else "auto")
    return build_named_recipe(name, facts, data, None, overrides), facts


def count_validations(recipe: Recipe, prepared: Prepared) -> int:
    per_epoch = len(prepared.train) // recipe.batch_size
    every = max(1, round(recipe.validate_every * per_epoch))
    return Plan(recipe.total_steps(per_epoch), every).count_validations(0)


def share(recipe: Recipe, prepared: Prepared) -> float:
    """Return the validations' share of the training time, by counted costs."""
    cost = count_passes(recipe, prepared)
    steps = recipe.total_steps(len(prepared.train) // recipe.batch_size)
    counted = count_validations(recipe, prepared) * cost.validation + cost.begin
    return counted / (steps * recipe.batch_size * count_training_passes(recipe))


@pytest.mark.parametrize("name", ["mae", "dino", "mpp"])
@pytest.mark.parametrize("steps", [100, 400, 2_000])
def test_validation_of_pretraining_takes_a_tenth(unlabelled: Prepared, name: str, steps: int) -> None:
    asked, _ = build(unlabelled, name, steps=steps)
    recipe = limit_validation(asked, unlabelled)
    assert share(asked, unlabelled) > MAX_SHARE or recipe == asked
    assert share(recipe, unlabelled) <= MAX_SHARE or (count_validations(recipe, unlabelled) == 1 and steps == 100)
    assert replace(recipe, validate_every=1.0, validation_images=None) == replace(asked, validate_every=1.0)


def test_validation_of_long_runs_stays_as_it_is(unlabelled: Prepared, digits: Prepared) -> None:
    for prepared, name in ((unlabelled, "mae"), (digits, "scratch-small")):
        recipe, _ = build(prepared, name)
        assert limit_validation(recipe, prepared) == recipe


def test_fields_given_by_the_user_stay(unlabelled: Prepared) -> None:
    asked, _ = build(unlabelled, "mae", steps=45)
    assert limit_validation(asked, unlabelled, frozenset({"validate_every"})) == asked
    assert limit_validation(replace(asked, patience=3), unlabelled) == replace(asked, patience=3)
    assert limit_validation(asked, unlabelled, frozenset({"validation_images"})).validation_images is None


def test_slow_validation_with_labels_is_rare_but_never_missing(digits: Prepared) -> None:
    asked, _ = build(digits, "scratch-small", steps=60)
    assert count_validations(asked, digits) > 1
    once = limit_validation(asked, digits, passes=1e-3)
    assert count_validations(once, digits) == 1
    assert describe_validation(once, digits) == "validation once, after the last step: the run is short"
    assert describe_validation(asked, digits).endswith("steps: at most a tenth of the time")


@pytest.mark.parametrize("seconds", [60.0, 300.0])
@pytest.mark.parametrize("name", ["scratch-small", "mae"])
def test_chosen_steps_fill_the_budget(digits: Prepared, unlabelled: Prepared, seconds: float, name: str) -> None:
    prepared = unlabelled if name == "mae" else digits
    own, _ = build(prepared, name)
    per_epoch = len(prepared.train) // own.batch_size
    pace = StepTime(startup=4.0, step=2.0, evaluation=0.0, steps_per_epoch=per_epoch, image=2e-3, save=0.25)
    recipe, facts = choose_steps(lambda more: build(prepared, name, **more), prepared, pace, seconds, NOTHING)
    assert recipe.steps is not None
    cost, n = count_passes(recipe, prepared), count_validations(recipe, prepared)
    validation = n * (cost.validation * pace.image + pace.save) + cost.begin * pace.image
    total = 4.0 + 2.0 * recipe.steps + validation + cost.ending * pace.image + pace.save + FINISH_SECONDS
    assert 0.9 * seconds < total <= seconds
    assert any(line.startswith(f"steps {recipe.steps}: of the recipe's") for line in facts.chosen)


def test_budget_never_exceeds_the_recipe(digits: Prepared) -> None:
    pace = StepTime(startup=1.0, step=1e-3, evaluation=0.0, steps_per_epoch=8, image=1e-4, save=0.1)
    own, _ = build(digits, "scratch-small")
    recipe, facts = choose_steps(lambda more: build(digits, "scratch-small", **more), digits, pace, 3600.0, NOTHING)
    assert recipe.steps == own.total_steps(8)
    assert any("all of the recipe's" in line for line in facts.chosen)


def test_too_short_a_budget_is_one_line(digits: Prepared) -> None:
    pace = StepTime(startup=4.0, step=20.0, evaluation=0.0, steps_per_epoch=8, image=1e-3)
    with pytest.raises(
        ValueError, match=r"^minutes= is too short for 5 steps of 20 s .*: give at least 1\.\d minutes more$"
    ):
        choose_steps(lambda more: build(digits, "scratch-small", **more), digits, pace, 30.0, NOTHING)


def test_recipes_that_differ_in_speed_are_measured_again(digits: Prepared) -> None:
    recipe, _ = build(digits, "scratch-small", steps=60)
    longer, _ = build(digits, "scratch-small", steps=90)
    assert has_same_steps(replace(longer, augment=recipe.augment), recipe)
    assert not has_same_steps(with_settings(recipe, ["objective.patch_dropout=0.5"]), recipe)


@pytest.mark.slow
def test_run_within_minutes_stores_its_steps_and_resumes_without_measuring(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained(tmp, "digits", "--out", "timed", *SMALL, "--set", "optimizer=AdamW", "--minutes", "0.3")
    recipe = read_recipe(tmp / "timed" / "recipe.json")
    assert recipe.epochs is None
    assert recipe.steps == summary(tmp / "timed")["steps"]
    assert f"  steps {recipe.steps:,}: " in done.stderr
    assert "  validation " in done.stderr
    trained(tmp, "--recipe", "timed/recipe.json", "--out", "again")
    assert_same(tmp / "again", tmp / "timed")
    (tmp / "again" / "summary.json").unlink()
    monkeypatch.setattr(recipe_choice, "fit_recipe", None)  # a call would fail
    resume(tmp / "again")
    assert_same(tmp / "again", tmp / "timed")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digits", "--minutes", "0"), "minutes must be > 0"),
        (("digits", "--minutes", "nan"), "minutes must be > 0"),
        (("digits", "--minutes", "1", "--steps", "5"), "--minutes and --steps are both given: give one of them"),
        (("digits", "--minutes", "1", "--set", "epochs=5"), "--minutes and --epochs are both given: give one of them"),
        (("--recipe", "given.json", "--minutes", "1"), "--minutes is for named recipes"),
        (("--resume", "timed", "--minutes", "1"), "leave out --minutes"),
    ],
)
def test_budget_that_cannot_be_kept_is_one_line(
    tmp: Path, digits: Prepared, arguments: tuple[str, ...], text: str
) -> None:
    write_recipe(build(digits, "scratch-small")[0], tmp / "given.json")
    done = train(tmp, *arguments, *(() if "--resume" in arguments else ("--out", "refused")))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr
    assert not (tmp / "refused").exists()


def test_time_left_counts_validations() -> None:
    plan = Plan(steps=45, validate_every=10)
    assert [plan.count_validations(done) for done in (0, 9, 10, 40, 44, 45)] == [5, 5, 4, 1, 1, 0]
    assert Plan(steps=40, validate_every=10).count_validations(39) == 1


LAST_IS_WORSE = {
    "top1": 0.9778, "interval": [0.95, 0.99], "images": 270, "split": "test", "seconds": 28.0, "steps": 200,
    "images_per_second": 903.0, "weights": "ema", "stopped": "end", "validation_score": "top1",
    "last_validation": 0.9786, "best_validation": 0.9872, "best_step": 140,
}  # fmt: skip


def test_outcome_names_the_kept_weights_and_the_best() -> None:
    lines = format_outcome(LAST_IS_WORSE, Path("run")).splitlines()
    assert lines[1:] == [
        "model   run/model.safetensors (EMA of the weights, step 200: validation top-1 97.86 %)",
        "best    run/best.safetensors (step 140: validation top-1 98.72 %; --set keep=best or --patience N keeps these)",
        "report  run/report.html",
    ]
    lines = format_outcome(LAST_IS_WORSE | {"weights": "best"}, Path("run")).splitlines()
    assert lines[1:3] == [
        "model   run/model.safetensors (best weights, step 140: validation top-1 98.72 %)",
        "        last weights, step 200: validation top-1 97.86 %",
    ]


@pytest.mark.parametrize("change", [{"best_step": 200}, {"last_validation": 0.9872}, {"last_validation": None}])
def test_outcome_is_short_where_the_last_weights_are_the_best(change: dict[str, Any]) -> None:
    assert format_outcome(LAST_IS_WORSE | change, Path("run")).splitlines()[1:] == [
        "model   run/model.safetensors",
        "report  run/report.html",
    ]


def test_summary_and_page_name_the_kept_weights_and_the_best(tmp: Path) -> None:
    run = tmp / "kept"
    trained(tmp, "digits", "--out", "kept", *SMALL, "--steps", "8", "--set", "validate_every=0.1")
    found = summary(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [row["top1"] for row in rows if row["kind"] == "validation"]
    assert found["validation_score"] == "top1"
    assert (found["last_validation"], found["best_validation"]) == (scores[-1], max(scores))
    assert found["validation"]["top1"] == scores[-1]  # of the written model
    found |= {"best_step": 4, "best_validation": found["last_validation"] + 0.125}
    (run / "summary.json").write_text(json.dumps(found))
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "model.safetensors: EMA of the weights, step 8: validation top-1" in page
    assert f"Best.safetensors: step 4: validation top-1 {100 * found['best_validation']:.2f} %" in page
