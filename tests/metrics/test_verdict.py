"""Verdict of a self-supervised run, from constructed numbers, and the options that its suggestions name."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from vitrail.cli import build_parser
from vitrail.metrics.convergence import is_falling
from vitrail.metrics.paired import PairedTest, compare_correct
from vitrail.metrics.verdict import FEW_EPOCHS, RunFacts, describe_difference, judge_difference, suggest_changes
from vitrail.reports.pretraining import OPTION_PATTERN
from vitrail.reports.verdict import format_verdict
from vitrail.training.recipe import Data, Facts, with_settings
from vitrail.training.recipes import build_recipe
from vitrail.training.runs.pretraining import NO_LABELS, find_recipe_epochs, takes_stem

LONG = RunFacts("dino", 50_000, 100.0, recipe_epochs=100.0, lr=3e-3)
SMALL = Facts(5_000, 10, False, (32, 32), 3, False)


def compare(baseline_only: int, ours_only: int, both: int = 500) -> PairedTest:
    baseline = np.array([True] * (baseline_only + both) + [False] * ours_only)
    ours = np.array([False] * baseline_only + [True] * (both + ours_only))
    return compare_correct(baseline, ours)


def summary_of(**tests: PairedTest) -> dict:
    return {"verdict": {"baselines": {f"knn_{name}": describe_difference(test) for name, test in tests.items()}}}


@pytest.mark.parametrize(
    ("baseline_only", "ours_only", "finding"),
    [
        (20, 80, "better"),
        (80, 20, "worse"),
        (50, 54, "no clear difference"),
        (0, 0, "no clear difference"),
        (0, 12, "better"),
        (0, 1, "no clear difference"),
    ],
)
def test_finding_follows_from_the_interval(baseline_only: int, ours_only: int, finding: str) -> None:
    test = compare(baseline_only, ours_only)
    assert judge_difference(test) == finding
    assert (test.interval[0] > 0) == (finding == "better")
    assert describe_difference(test)["interval"] == list(test.interval)


def test_paired_interval_finds_a_difference_that_two_intervals_do_not() -> None:
    """Of 750 images all are correct with one, and 720 with the other."""
    assert judge_difference(compare(0, 30, both=720)) == "better"


def test_sentences_for_every_finding() -> None:
    better, worse, unclear = compare(20, 80, 500), compare(80, 20, 500), compare(50, 54, 500)
    assert format_verdict(summary_of(random=better, pixels=better)) == [
        "Features are better than those of the untrained network by 10.0 points (6.8–13.2) and "
        "than raw pixels by 10.0 (6.8–13.2)."
    ]
    assert format_verdict(summary_of(random=better, pixels=worse)) == [
        "Features are better than those of the untrained network by 10.0 points (6.8–13.2). "
        "They are worse than raw pixels by 10.0 points (6.8–13.2)."
    ]
    assert format_verdict(summary_of(random=unclear, pixels=unclear)) == [
        "No clear difference from the untrained network: 0.7 points (−2.7 to 4.0), "
        "nor from raw pixels: 0.7 points (−2.7 to 4.0)."
    ]
    assert format_verdict(summary_of(pixels=compare(54, 50))) == [
        "No clear difference from raw pixels: −0.7 points (−4.0 to 2.7)."
    ]


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        "better",
        {},
        {"baselines": None},
        {"baselines": {"knn_pixels": {"finding": "better"}}},
        {"baselines": {"knn_pixels": {"finding": "good", "difference": 0.1, "interval": [0, 0.2]}}},
        {"baselines": {"knn_pixels": {"finding": "better", "difference": "nan", "interval": [0, 0.2]}}},
    ],
)
def test_missing_numbers_give_no_sentence(verdict: object) -> None:
    assert format_verdict({"knn": 0.5, "verdict": verdict}) == []
    assert format_verdict({"knn": 0.5}) == []


def test_without_labels_the_reason_is_given() -> None:
    suggestions = suggest_changes([], replace(LONG, epochs=50))
    sentences = format_verdict({"verdict": {"baselines": {}, "reason": "no labels", "suggestions": suggestions}})
    assert sentences == [
        "Whether the features are better than untrained ones was not measured: no labels.",
        "What to try: train longer (--epochs 100, now 50): that is the recipe's length for this data.",
    ]
    assert suggest_changes([], replace(LONG, images=10)) == []


def test_nothing_is_suggested_for_features_that_are_better() -> None:
    assert suggest_changes(["better", "better"], replace(LONG, epochs=1, images=10, stem=True, falling=True)) == []


@pytest.mark.parametrize(
    ("changes", "suggested"),
    [
        ({"epochs": 12}, ["train longer (--epochs 100, now 12): that is the recipe's length for this data"]),
        ({"epochs": 12, "steps": 600}, ["train longer (--steps 5000, now 600): that is the recipe's length"]),
        ({"epochs": 96}, []),
        ({"falling": True}, ["train longer (--epochs 200, now 100): the loss was still falling"]),
        ({"epochs": 5, "recipe_epochs": 5}, [f"train longer (--epochs {FEW_EPOCHS}, now 5)"]),
        ({"epochs": 5, "recipe_epochs": None}, [f"train longer (--epochs {FEW_EPOCHS}, now 5)"]),
        ({"epochs": 12, "patience": 3}, []),
        ({"epochs": 12, "patience": 3, "falling": True}, ["stop later (--patience 6, now 3)"]),
        ({"stem": True}, ["use a convolutional stem, as the images are small (--set model.embed=ConvStem)"]),
        ({"images": 800}, ["use more images or start from trained weights (--init FILE): 800 training images are few"]),
        ({"images": 800, "media": "video"}, ["use more videos or start from trained weights (--init FILE): 800"]),
        ({"images": 800, "initialised": True}, []),
        ({"method": "mae"}, ["use --method dino, whose features need no fine-tuning"]),
        ({"epochs": 1, "collapse": ("too high", "lower it, --lr 0.001")}, ["too high: lower it, --lr 0.001"]),
    ],
)
def test_suggestions_follow_from_facts_of_the_run(changes: dict, suggested: list[str]) -> None:
    found = suggest_changes(["no clear difference", "better"], replace(LONG, **changes))
    assert len(found) == len(suggested)
    assert all(text.startswith(start) for text, start in zip(found, suggested, strict=True))


def test_worse_features_of_a_long_run_blame_the_learning_rate() -> None:
    (found,) = suggest_changes(["worse", "better"], LONG)
    assert found == "the learning rate may be too high: lower it to a third, --lr 0.001"
    assert not any("--lr" in text for text in suggest_changes(["worse", "worse"], replace(LONG, epochs=3)))


def test_suggested_options_exist() -> None:
    variants = [{"epochs": 3}, {"epochs": 3, "steps": 90}, {"falling": True}, {"falling": True, "patience": 2}]
    variants += [{"stem": True, "images": 10}, {"method": "mpp"}, {}]
    parser, recipe = build_parser(), build_recipe("mpp", SMALL, Data("photos"))
    options = set()
    for changes in variants:
        for text in suggest_changes(["worse", "worse"], replace(LONG, **changes)):
            assert "--" in text, text
            options |= set(OPTION_PATTERN.findall(text))
        for text in suggest_changes(["no clear difference"], replace(LONG, **changes)):
            options |= set(OPTION_PATTERN.findall(text))
    assert {option.split()[0][2:] for option in options} == {
        *("epochs", "steps", "patience", "set", "init", "lr", "method"),
    }
    for option in options:
        parsed = parser.parse_args(["pretrain", "photos", *shlex.split(option)])
        if parsed.set:
            with_settings(recipe, parsed.set)
    assert parser.parse_args(shlex.split(NO_LABELS.partition("vitrail ")[2])).probe


@pytest.mark.parametrize(
    ("method", "overrides", "takes"),
    [
        ("mpp", {}, True),
        ("mae", {}, False),  # it hides patches, which must not overlap
        ("dino", {}, False),  # its model has a stem already
        ("dino", {"model": "S/16"}, True),
        ("mpp", {"model": "S/14"}, False),  # no power of two
    ],
)
def test_a_stem_is_suggested_only_where_the_method_takes_it(method: str, overrides: dict, takes: bool) -> None:
    assert takes_stem(build_recipe(method, replace(SMALL, overrides=overrides), Data("photos"))) is takes


def test_length_of_the_recipe_does_not_depend_on_that_of_the_run() -> None:
    short = build_recipe("mae", replace(SMALL, overrides={"steps": 10}), Data("photos"))
    assert short.epochs is None
    assert find_recipe_epochs(short, SMALL) == 400
    assert find_recipe_epochs(build_recipe("dino", SMALL, Data("photos")), SMALL) == 200
    assert find_recipe_epochs(short, replace(SMALL, channels=0)) is None


@pytest.mark.parametrize(
    ("losses", "falling"),
    [
        (np.linspace(2, 1, 40), True),
        (np.geomspace(2, 1, 40) * 0 + 1, False),
        (1 + np.exp(-np.linspace(0, 20, 80)), False),
        (np.linspace(1, 2, 40), False),
        (np.linspace(2, 1, 7), False),
        (np.array([2.0, 1.0] * 20) + np.linspace(0.1, 0, 40), False),  # noise hides the fall
        (np.array([*np.linspace(2, 1, 39), np.nan]), False),
    ],
)
def test_a_falling_loss_is_told_from_noise(losses: np.ndarray, falling: bool) -> None:
    assert is_falling(losses.tolist()) is falling
