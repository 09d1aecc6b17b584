"""Runs side by side: what differs, by how much, and whether it is more than chance."""

import json

import numpy as np
import pytest

from tests.report.made import made_run
from vitrail.report import compare
from vitrail.report.compare import compare_runs
from vitrail.report.differences import ABSENT, brief, differences
from vitrail.report.side_by_side import text


@pytest.fixture
def two(tmp_path):
    return [
        made_run(tmp_path / "worse", photographs=False, skill=2.0, seed=1),
        made_run(tmp_path / "better", photographs=False, skill=4.5, seed=2, lr=1e-4),
    ]


def test_differences_are_found_field_by_field():
    first = {"type": "R", "optimizer": {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999]}, "epochs": 5, "same": 1}
    second = {
        "type": "R",
        "optimizer": {"type": "AdamW", "lr": 3e-4, "betas": [0.9, 0.95]},
        "epochs": 5,
        "same": 1,
        "x": None,
    }
    assert dict(differences([first, second])) == {
        "optimizer.lr": [1e-3, 3e-4],
        "optimizer.betas": [[0.9, 0.999], [0.9, 0.95]],
        "x": [ABSENT, None],
    }


def test_slots_of_another_type_are_shown_whole():
    found = dict(differences([{"optimizer": {"type": "SGD", "lr": 0.1}}, {"optimizer": {"type": "Muon", "lr": 0.02}}]))
    assert [brief(value) for value in found["optimizer"]] == ["SGD(lr=0.1)", "Muon(lr=0.02)"]


def test_lists_are_compared_place_by_place_only_when_equally_long():
    flip, crop = {"type": "Flip", "rate": 0.5}, {"type": "Crop", "size": 8}
    assert dict(differences([{"a": [flip]}, {"a": [flip | {"rate": 0.1}]}])) == {"a[0].rate": [0.5, 0.1]}
    assert dict(differences([{"a": [flip]}, {"a": [flip, crop]}])) == {"a": [[flip], [flip, crop]]}
    assert brief([True, None, 1e-4]) == "[yes, none, 0.0001]"


def test_true_and_one_differ():
    assert list(differences([{"a": 1}, {"a": True}])) == [("a", [1, True])]
    assert list(differences([{"a": 1}, {"a": 1.0}])) == []


def test_a_clear_difference_is_told_with_its_numbers(two):
    found = compare_runs(two)
    assert list(found.differences) == ["optimizer.lr", "seed"]
    pair = found.as_dict()["pairs"][0]
    assert pair["compared"]
    assert pair["beyond_chance"]
    scores = [run["score"] for run in found.as_dict()["runs"]]
    assert pair["difference"] == pytest.approx(scores[1] - scores[0])
    assert pair["difference"] == pytest.approx((pair["second_only"] - pair["first_only"]) / pair["pictures"])
    said = text(found)
    assert "better is" in said
    assert "points ahead of worse" in said
    assert "beyond chance" in said
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_same_predictions_are_not_told_apart(tmp_path):
    made = [made_run(tmp_path / name, photographs=False) for name in "ab"]
    found = compare_runs(made)
    assert found.differences == {}
    assert "a and b get the same pictures right." in text(found)
    assert "The recipes are the same." in text(found)


def test_pictures_in_another_order_are_still_the_same(two):
    path = two[1] / "evaluation" / "validation.json"
    before = compare_runs(two).pairs[0].found
    names = json.loads(path.read_text())["names"]
    order = np.random.default_rng(0).permutation(len(names))
    path.write_text(json.dumps({"names": [names[k] for k in order]}))
    with np.load(path.with_suffix(".npz")) as file:
        kept = {key: file[key][order] for key in ("logits", "targets")}
    np.savez(path.with_suffix(".npz"), **kept)
    assert compare_runs(two).pairs[0].found == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: (run / "evaluation" / "validation.npz").unlink(), "better kept no logits of its validation split"),
        (lambda run: (run / "evaluation" / "validation.json").unlink(), "names of their pictures were not kept"),
        (
            lambda run: (run / "evaluation" / "validation.json").write_text(
                json.dumps({"names": list(map(str, range(341)))})
            ),
            "judged on different pictures",
        ),
        (
            lambda run: (run / "run.json").write_text((run / "run.json").read_text().replace('"hat",', '"cap",')),
            "their classes differ",
        ),
    ],
    ids=["logits", "names", "pictures", "classes"],
)
def test_what_cannot_be_compared_says_why(two, change, reason):
    change(two[1])
    assert reason in text(compare_runs(two))
    assert reason in compare(two)


def test_several_labels_are_compared_by_map(tmp_path):
    made = [
        made_run(tmp_path / str(skill), classes=8, several=True, skill=skill, seed=int(skill)) for skill in (1.0, 3.0)
    ]
    pair = compare_runs(made).pairs[0]
    assert pair.found is not None
    assert pair.found.chance is None
    assert pair.found.beyond_chance


def test_unfinished_runs_take_part(two, tmp_path):
    part = made_run(tmp_path / "part", finished=False)
    assert "not finished" in text(compare_runs([*two, part]))


def test_of_many_runs_each_is_compared_with_the_best(tmp_path):
    made = [made_run(tmp_path / str(k), photographs=False, skill=1 + k, seed=k, epochs=2) for k in range(6)]
    pairs = compare_runs(made).pairs
    assert [(pair.first, pair.second) for pair in pairs] == [(k, 5) for k in range(5)]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    made = [made_run(tmp_path / name / "run", photographs=False, epochs=1) for name in "ab"]
    assert compare_runs(made).names == ["a/run", "b/run"]


def test_one_run_twice_and_one_run_alone_are_refused(two):
    with pytest.raises(ValueError, match="given twice"):
        compare_runs([two[0], two[0]])
    with pytest.raises(ValueError, match="at least two"):
        compare_runs(two[:1])
