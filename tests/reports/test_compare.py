"""Comparison of runs: differences of recipes, paired tests, and their text."""

import json

import numpy as np
import pytest

from tests.reports.made import made_run
from vitrail.reports.compare import compare_runs, format_run_comparison, render_comparison
from vitrail.reports.run import ABSENT, find_differences, format_value


@pytest.fixture
def two(tmp_path):
    return [
        made_run(tmp_path / "worse", photographs=False, skill=2.0, seed=1),
        made_run(tmp_path / "better", photographs=False, skill=4.5, seed=2, lr=1e-4),
    ]


def test_differences_are_listed_by_field():
    first = {"type": "R", "optimizer": {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999]}, "epochs": 5, "same": 1}
    second = {
        "type": "R",
        "optimizer": {"type": "AdamW", "lr": 3e-4, "betas": [0.9, 0.95]},
        "epochs": 5,
        "same": 1,
        "x": None,
    }
    assert dict(find_differences([first, second])) == {
        "optimizer.lr": [1e-3, 3e-4],
        "optimizer.betas": [[0.9, 0.999], [0.9, 0.95]],
        "x": [ABSENT, None],
    }


def test_objects_of_different_types_are_not_descended():
    found = dict(
        find_differences([{"optimizer": {"type": "SGD", "lr": 0.1}}, {"optimizer": {"type": "Muon", "lr": 0.02}}])
    )
    assert [format_value(value) for value in found["optimizer"]] == ["SGD(lr=0.1)", "Muon(lr=0.02)"]


def test_lists_are_compared_by_index_only_if_equally_long():
    flip, crop = {"type": "Flip", "rate": 0.5}, {"type": "Crop", "size": 8}
    assert dict(find_differences([{"a": [flip]}, {"a": [flip | {"rate": 0.1}]}])) == {"a[0].rate": [0.5, 0.1]}
    assert dict(find_differences([{"a": [flip]}, {"a": [flip, crop]}])) == {"a": [[flip], [flip, crop]]}
    assert format_value([True, None, 1e-4]) == "[yes, none, 0.0001]"


def test_true_and_one_differ():
    assert list(find_differences([{"a": 1}, {"a": True}])) == [("a", [1, True])]
    assert list(find_differences([{"a": 1}, {"a": 1.0}])) == []


def test_a_significant_difference_is_reported_with_its_numbers(two):
    comparison = compare_runs(two)
    assert list(comparison.differences) == ["optimizer.lr", "seed"]
    pair = comparison.to_dict()["pairs"][0]
    assert pair["compared"]
    assert pair["beyond_chance"]
    scores = [run["score"] for run in comparison.to_dict()["runs"]]
    assert pair["difference"] == pytest.approx(scores[1] - scores[0])
    assert pair["difference"] == pytest.approx((pair["second_only"] - pair["first_only"]) / pair["pictures"])
    text = format_run_comparison(comparison)
    assert "better is" in text
    assert "points ahead of worse" in text
    assert ", significant (McNemar’s mid-p" in text
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_equal_predictions_have_no_difference(tmp_path):
    comparison = compare_runs([made_run(tmp_path / name, photographs=False) for name in "ab"])
    assert comparison.differences == {}
    assert "a and b are correct on the same samples." in format_run_comparison(comparison)
    assert "The recipes are equal." in format_run_comparison(comparison)


def test_the_order_of_images_does_not_matter(two):
    path = two[1] / "evaluation" / "validation.json"
    before = compare_runs(two).pairs[0].test
    names = json.loads(path.read_text())["names"]
    order = np.random.default_rng(0).permutation(len(names))
    path.write_text(json.dumps({"names": [names[k] for k in order]}))
    with np.load(path.with_suffix(".npz")) as file:
        kept = {key: file[key][order] for key in ("logits", "targets")}
    np.savez(path.with_suffix(".npz"), **kept)
    assert compare_runs(two).pairs[0].test == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda run: (run / "evaluation" / "validation.npz").unlink(),
            "better has no stored logits of its validation split",
        ),
        (lambda run: (run / "evaluation" / "validation.json").unlink(), "names of their images were not stored"),
        (
            lambda run: (run / "evaluation" / "validation.json").write_text(
                json.dumps({"names": list(map(str, range(341)))})
            ),
            "evaluated on different images",
        ),
        (
            lambda run: (run / "run.json").write_text((run / "run.json").read_text().replace('"hat",', '"cap",')),
            "their classes differ",
        ),
    ],
    ids=["logits", "names", "images", "classes"],
)
def test_incomparable_runs_have_a_reason(two, change, reason):
    change(two[1])
    assert reason in format_run_comparison(compare_runs(two))
    assert reason in render_comparison(two)


def test_multilabel_runs_are_compared_by_map(tmp_path):
    made = [
        made_run(tmp_path / str(skill), classes=8, several=True, skill=skill, seed=int(skill)) for skill in (1.0, 3.0)
    ]
    pair = compare_runs(made).pairs[0]
    assert pair.test is not None
    assert pair.test.p_value is None
    assert pair.test.is_significant


def test_unfinished_runs_are_included(two, tmp_path):
    part = made_run(tmp_path / "part", finished=False)
    assert "not finished" in format_run_comparison(compare_runs([*two, part]))


def test_many_runs_are_each_compared_with_the_best(tmp_path):
    made = [made_run(tmp_path / str(k), photographs=False, skill=1 + k, seed=k, epochs=2) for k in range(6)]
    pairs = compare_runs(made).pairs
    assert [(pair.first, pair.second) for pair in pairs] == [(k, 5) for k in range(5)]


def test_runs_of_the_same_name_get_unique_names(tmp_path):
    made = [made_run(tmp_path / name / "run", photographs=False, epochs=1) for name in "ab"]
    assert compare_runs(made).names == ["a/run", "b/run"]


def test_duplicate_and_single_runs_are_errors(two):
    with pytest.raises(ValueError, match="given twice"):
        compare_runs([two[0], two[0]])
    with pytest.raises(ValueError, match="at least 2 runs, got 1"):
        compare_runs(two[:1])
