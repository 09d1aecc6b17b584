"""With one or two seeds a small difference may be chance of training: findings say so, and verdicts allow for it."""

from pathlib import Path

import pytest

from tests.studies import made
from vitrail.studies.caution import TRIAL, WHOLE, cautious, limited
from vitrail.studies.intervals import Difference, difference
from vitrail.studies.record import answered
from vitrail.studies.study import Answer
from vitrail.studies.unfinished import too_early

PICTURES = 1_000_000  # so many that half a point is far outside their interval


def said(agreement) -> Answer:
    return Answer("Depth is better by +3.0 points.", agreement, (), (), (), "")


@pytest.mark.parametrize(("seeds", "told"), [(1, "with 1 seed, which"), (2, "with 2 seeds, which")])
def test_few_seeds_are_told_in_the_same_sentence(seeds, told):
    finding = cautious(said("agrees"), seeds).finding
    assert finding == (
        f"Depth is better by +3.0 points; {told} cannot tell chance of training from a difference, 1 point or less counts for "
        "nothing."
    )
    assert finding.count(". ") == 0


@pytest.mark.parametrize(
    ("before", "after"), [("agrees", "agrees"), ("disagrees", "disagrees"), ("no difference", "unclear")]
)
def test_that_nothing_was_seen_with_few_seeds_is_no_finding(before, after):
    assert cautious(said(before), 2).agreement == after
    assert cautious(said(before), 3) == said(before)


def test_of_what_is_unfinished_seeds_say_nothing():
    assert cautious(too_early(["ViT"], ""), 1) == too_early(["ViT"], "")


@pytest.mark.parametrize(("apart", "clear"), [(0.005, False), (0.0099, False), (0.02, True)])
def test_with_few_seeds_a_difference_is_clear_beyond_a_point(apart, clear):
    for seeds in (1, 2):
        found = difference([0.5 + apart] * seeds, [0.5] * seeds, PICTURES)
        assert found.low > 0
        assert (found.seeds, found.clear, found.opposite.clear) == (seeds, clear, clear)
    assert difference([0.5 + apart] * 3, [0.5] * 3, PICTURES).clear


def test_a_difference_knows_the_seeds_of_the_one_that_has_fewer():
    assert difference([0.7, 0.71, 0.72], [0.5], PICTURES).seeds == 1
    assert Difference(0.1, 0.05, 0.15).seeds == 3


@pytest.mark.parametrize(("seeds", "agreement"), [(1, "unclear"), (3, "no difference")])
def test_an_answer_is_as_cautious_as_the_place_with_fewest_seeds(tmp_path: Path, seeds: int, agreement: str):
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup, ("none", "1-D"))
    results = [
        result if result.phase == "tune" else made.Result(result.at, "final", {"test": 0.5, "pictures": 10_000}, 1.0)
        for result in made.made_results(study, setup)
    ]
    kept = [r for r in results if r.phase == "tune" or r.at["positions"] == "none" or int(str(r.at["seed"])) < seeds]
    answer, _, _ = answered(study, setup, kept)
    assert answer is not None
    assert answer.agreement == agreement
    assert ("with 1 seed, which" in answer.finding) is (seeds == 1)


def test_a_scale_that_is_too_short_agrees_with_nobody():
    answer = limited(said("disagrees"), "test")
    assert (answer.agreement, answer.limits) == ("unclear", f"{TRIAL} {said('disagrees').limits}")
    assert limited(said("disagrees"), "laptop") == said("disagrees")
    assert limited(said("agrees"), "cluster").limits == WHOLE
