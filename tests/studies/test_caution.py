"""With one or two seeds a small difference may be training noise: findings and verdicts account for it."""

from pathlib import Path

import pytest

from tests.studies import made
from vitrail.studies.base import incomplete_answer
from vitrail.studies.intervals import Difference, estimate_difference
from vitrail.studies.record import (
    CLUSTER_SCALE_LIMITS,
    TEST_SCALE_LIMITS,
    add_scale_limits,
    compute_answer,
    qualify_by_seeds,
)
from vitrail.studies.study import Answer

N_IMAGES = 1_000_000  # so many that half a point is far outside their interval


def make_answer(agreement) -> Answer:
    return Answer("Depth is better by +3.0 points.", agreement, (), (), (), "")


@pytest.mark.parametrize(("seeds", "text"), [(1, "with 1 seed"), (2, "with 2 seeds")])
def test_finding_names_few_seeds_in_the_same_sentence(seeds, text):
    finding = qualify_by_seeds(make_answer("agrees"), seeds).finding
    assert finding == (
        f"Depth is better by +3.0 points; {text}, differences of 1 point or less are ignored as training noise."
    )
    assert finding.count(". ") == 0


@pytest.mark.parametrize(
    ("before", "after"), [("agrees", "agrees"), ("disagrees", "disagrees"), ("no difference", "unclear")]
)
def test_no_difference_with_few_seeds_is_unclear(before, after):
    assert qualify_by_seeds(make_answer(before), 2).agreement == after
    assert qualify_by_seeds(make_answer(before), 3) == make_answer(before)


def test_incomplete_answer_is_not_qualified():
    assert qualify_by_seeds(incomplete_answer(["ViT"], ""), 1) == incomplete_answer(["ViT"], "")


@pytest.mark.parametrize(("apart", "clear"), [(0.005, False), (0.0099, False), (0.02, True)])
def test_few_seeds_need_a_difference_above_one_point(apart, clear):
    for seeds in (1, 2):
        found = estimate_difference([0.5 + apart] * seeds, [0.5] * seeds, N_IMAGES)
        assert found.low > 0
        assert (found.seeds, found.is_clear, found.negated.is_clear) == (seeds, clear, clear)
    assert estimate_difference([0.5 + apart] * 3, [0.5] * 3, N_IMAGES).is_clear


def test_difference_has_the_smaller_number_of_seeds():
    assert estimate_difference([0.7, 0.71, 0.72], [0.5], N_IMAGES).seeds == 1
    assert Difference(0.1, 0.05, 0.15).seeds == 3


@pytest.mark.parametrize(("seeds", "agreement"), [(1, "unclear"), (3, "no difference")])
def test_verdict_uses_the_point_with_fewest_seeds(tmp_path: Path, seeds: int, agreement: str):
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup, ("none", "1-D"))
    results = [
        result
        if result.phase == "tune"
        else made.CellResult(result.at, "final", {"test": 0.5, "pictures": 10_000}, 1.0)
        for result in made.made_results(study, setup)
    ]
    kept = [r for r in results if r.phase == "tune" or r.at["positions"] == "none" or int(str(r.at["seed"])) < seeds]
    answer, _, _ = compute_answer(study, setup, kept)
    assert answer is not None
    assert answer.agreement == agreement
    assert ("with 1 seed, " in answer.finding) is (seeds == 1)


def test_test_scale_is_always_unclear():
    answer = add_scale_limits(make_answer("disagrees"), "test")
    assert (answer.agreement, answer.limits) == ("unclear", f"{TEST_SCALE_LIMITS} {make_answer('disagrees').limits}")
    assert add_scale_limits(make_answer("disagrees"), "laptop") == make_answer("disagrees")
    assert add_scale_limits(make_answer("agrees"), "cluster").limits == CLUSTER_SCALE_LIMITS
