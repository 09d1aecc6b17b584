"""The alarm on what tiny runs really did: it goes off in each that collapsed, names the cause, and in none that is healthy."""

import pytest

from tests.evaluate.histories import COLLAPSED, HEALTHY, history
from vitrail.evaluate.collapse import (
    ALIKE,
    BROKEN,
    NO_ANSWER,
    NO_ANSWER_CLOSE,
    NO_ANSWER_FAST,
    ONE_ANSWER,
    ONE_ANSWER_FAST,
    SLOW_CENTRE,
    Collapse,
    collapse,
)

CAUSES = {
    "no centring": ONE_ANSWER,
    "no sharpening": NO_ANSWER,
    "rate": NO_ANSWER_FAST,
    "rate, without a teacher": ALIKE,
}


def alarm(name: str, **known) -> Collapse | None:
    """The first alarm as the run goes on."""
    method, rows = history(name)
    found = (collapse(rows[:count], method, **known) for count in range(1, len(rows) + 1))
    return next((each for each in found if each), None)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_left_alone(name):
    assert alarm(name, lr=1e-3) is None


@pytest.mark.parametrize(("name", "why"), COLLAPSED.items())
def test_collapsed_runs_are_found_with_their_cause(name, why):
    found = alarm(name, lr=0.3)
    assert found is not None
    assert found.cause == CAUSES[why]
    option = {
        "no centring": "--set objective.centre=0.9",
        "no sharpening": "--set objective.teacher_temperature=0.04",
    }.get(why, "--lr 0.1")
    assert found.advice.endswith(option)


@pytest.mark.parametrize("name", COLLAPSED)
def test_it_takes_three_validations_after_the_start(name):
    found, (_, rows) = alarm(name), history(name)
    assert found is not None
    assert found.step >= rows[3]["step"]
    assert found.step <= rows[-1]["step"]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("place", [1, 4, -1])
def test_a_single_odd_validation_is_no_alarm(name, place):
    method, rows = history(name)
    odd = {"loss": rows[1]["loss"], "spread": 0.0, "rank": 0.0}
    odd |= {"teacher_entropy": 0.0, "teacher_diversity": 0.0} if method == "dino" else {}
    rows[place] = rows[place] | odd
    assert all(collapse(rows[:count], method) is None for count in range(1, len(rows) + 1))


@pytest.mark.parametrize("key", ["loss", "spread", "rank", "teacher_entropy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan"])  # a journal writes them as text
def test_numbers_that_are_not_finite_are_an_alarm_at_once(key, value):
    _, rows = history(next(iter(HEALTHY)))
    rows[2] = rows[2] | {key: value}
    found = collapse(rows[:3], "dino", lr=0.03)
    assert found == Collapse(BROKEN, "use a third of it, --lr 0.01", rows[2]["step"])
    assert collapse(rows, "dino") is None  # and it is judged by what follows, should it go on


def test_what_is_set_well_is_not_blamed():
    fallen = next(name for name, why in COLLAPSED.items() if why == "no centring")
    for centre, cause in ((None, ONE_ANSWER), (0.999, SLOW_CENTRE), (0.9, ONE_ANSWER_FAST)):
        found = alarm(fallen, objective={"centre": centre})
        assert found is not None
        assert found.cause == cause
    warm = next(name for name, why in COLLAPSED.items() if why == "no sharpening")
    for temperature, cause in ((0.07, NO_ANSWER), (0.04, NO_ANSWER_FAST)):
        found = alarm(warm, objective={"teacher_temperature": temperature, "standardise": 0.9})
        assert found is not None
        assert found.cause == cause
    found = alarm(warm, objective={"teacher_temperature": 0.04, "standardise": None})
    assert found is not None
    assert found.cause == NO_ANSWER_CLOSE
    assert found.advice.endswith("--set objective.standardise=0.9")


def test_a_burnt_run_is_the_rate_s_fault_though_every_picture_gets_one_answer():
    # vitrail pretrain digits --method dino --lr 1 --set optimizer.clip=none, validated every five steps.
    keys = ("step", "loss", "spread", "rank", "teacher_entropy", "teacher_diversity")
    rows = [
        (0, 7.17503, 0.13138, 9.868, 0.870252, 0.888103),
        (5, 0.00249, 0.05500, 15.903, 0.000315, 0.000315),
        (10, 0.13947, 0.12660, 5.212, 0.013832, 0.013832),
        (15, 7.63495, 0.07833, 3.923, 0.520260, 0.520261),
    ]
    burnt = [dict(zip(keys, row, strict=True)) for row in rows]
    found = collapse(burnt, "dino", 1.0, {"centre": 0.9, "teacher_temperature": 0.07})
    assert found == Collapse(ONE_ANSWER_FAST, "use a third of it, --lr 0.33", 15)


def test_features_that_begin_alike_are_given_time():
    # A fresh network whose pictures all look alike, and which slowly begins to tell them apart.
    rows = [{"step": 0, "loss": 8.0, "spread": 0.02, "rank": 30.0, "teacher_entropy": 0.75, "teacher_diversity": 0.752}]
    for step in range(1, 12):
        telling = 2e-4 * 1.6**step
        row = {"step": 50 * step, "loss": 8.3, "spread": 0.02 * 1.3**step, "rank": 30.0}
        rows.append(row | {"teacher_entropy": 0.999 - telling, "teacher_diversity": 0.999})
    assert all(collapse(rows[:count], "dino") is None for count in range(1, 13))
    still = [rows[0], *({**rows[1], "step": row["step"]} for row in rows[1:])]
    assert collapse(still[:6], "dino") is None
    found = collapse(still[:7], "dino")
    assert found is not None
    assert found.cause == NO_ANSWER


def test_a_masked_model_that_still_learns_is_left_alone_however_alike_its_features():
    start = {"step": 0, "loss": 1.2, "spread": 0.8, "rank": 20.0}
    falling = [{"step": 50 * k, "loss": 1 - 0.01 * k, "spread": 0.02, "rank": 2.0} for k in range(1, 8)]
    assert collapse([start, *falling], "mae") is None
    stuck = [row | {"loss": 1.0} for row in falling]
    found = collapse([start, *stuck], "mae")
    assert found is not None
    assert found.cause == ALIKE


def test_before_the_first_validation_there_is_nothing_to_say():
    _, rows = history(next(iter(COLLAPSED)))
    assert collapse([], "dino") is None
    assert collapse(rows[:1], "dino") is None


@pytest.mark.parametrize("name", HEALTHY)
def test_without_a_beginning_to_hold_them_against_runs_are_left_alone(name):
    method, rows = history(name)
    assert collapse([{"step": 0, "loss": 7.0, "spread": "nan", "rank": "nan"}, *rows[1:]], method) is None


def test_without_a_rate_the_advice_still_names_the_option():
    found = alarm(next(name for name, why in COLLAPSED.items() if why == "rate"))
    assert found is not None
    assert "--lr" in found.advice
