"""The training alarm: constructed signals on both sides of each condition, then recorded runs, healthy and collapsed."""

import math

import pytest

from tests.metrics.histories import BURNT, COLLAPSED, HEALTHY, IMAGES, parse_rows, read_history
from vitrail.metrics.collapse import (
    AGREEMENT,
    BELOW_UNTRAINED,
    CLOSE_FEATURES,
    COLLAPSED_FEATURES,
    DIVERGED_LOSS,
    DIVERGENCE,
    FEATURE_COLLAPSE,
    HIGH_TEMPERATURE,
    NO_CENTRE,
    NOT_FINITE,
    OUTPUT_COLLAPSE,
    SAME_OUTPUT,
    SLOW_CENTRE,
    UNIFORM_OUTPUT,
    WARM_UP,
    WORSE_THAN_UNTRAINED,
    Collapse,
    detect_collapse,
)

START = {"step": 0, "loss": 2.0, "spread": 0.8, "rank": 40.0, "knn": 0.5}
DINO_START = START | {"loss": 6.0, "teacher_entropy": 0.4, "teacher_diversity": 0.7}
FIRST = WARM_UP + AGREEMENT  # the first validation at which anything but divergence is an alarm
KNN_IMAGES = 400  # 95 % interval of 0.5: 0.451 to 0.549


def make_history(start: dict[str, float], validations: int = 12, **signals: float | list[float]) -> list[dict]:
    """Return a history whose signals stay as at the start, except those given: one value for all validations, or a list."""
    count = next((len(value) for value in signals.values() if isinstance(value, list)), validations)
    given = {key: value if isinstance(value, list) else [value] * count for key, value in signals.items()}
    return [start] + [
        start | {"step": 10 * n} | {key: values[n - 1] for key, values in given.items()} for n in range(1, count + 1)
    ]


def first_alarm(history: list[dict], method: str = "mae", **known) -> Collapse | None:
    """Return the first alarm as the run goes on."""
    found = (detect_collapse(history[:count], method, **known) for count in range(1, len(history) + 1))
    return next(filter(None, found), None)


# --- divergence ---


@pytest.mark.parametrize("key", ["loss", "spread", "rank", "teacher_entropy", "teacher_diversity"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "nan", "inf"])  # a journal writes them as text
def test_signal_that_is_not_finite_is_an_alarm_at_once(key, value):
    history = make_history(DINO_START)
    history[1] |= {key: value}
    found = detect_collapse(history[:2], "dino", lr=0.03)
    assert found == Collapse(DIVERGENCE, NOT_FINITE, "lower it to a third, --lr 0.01", 10)
    assert detect_collapse(history, "dino") is None  # a run that goes on is judged by what follows


@pytest.mark.parametrize("method", ["mae", "mpp", "features", "dino"])
def test_loss_above_its_start_that_does_not_fall_is_divergence(method):
    start = DINO_START if method == "dino" else START
    for factor, alarmed in ((1.45, False), (1.55, True), (100.0, True)):
        history = make_history(start, loss=factor * start["loss"])
        found = first_alarm(history, method, lr=0.3, objective={"out": 256})  # log 256 is 5.5, below DINO's first loss
        assert (found is not None) is alarmed
        if found:
            assert found == Collapse(DIVERGENCE, DIVERGED_LOSS, "lower it to a third, --lr 0.1", 10 * AGREEMENT)
    rising = make_history(start, loss=[start["loss"] * 1.3**n for n in range(8)])
    assert first_alarm(rising, method, objective={"out": 256}) is not None


def test_spike_of_the_loss_that_falls_again_is_no_alarm():
    assert first_alarm(make_history(START, loss=[9.0, 9.0, *[1.5] * 8])) is None
    assert first_alarm(make_history(START, loss=[40.0, 20.0, 10.0, 5.0, 2.5, 1.2])) is None


def test_loss_of_dino_may_rise_to_that_of_a_uniform_output():
    history = make_history(DINO_START | {"loss": 4.0}, loss=7.5)
    assert first_alarm(history, "dino", objective={"out": 2048}) is None  # log 2048 is 7.6
    assert first_alarm(history, "dino", objective={"out": 16}) is not None
    assert first_alarm(history, "dino") is None  # without K there is no reference
    found = first_alarm(make_history(DINO_START, loss=12.0), "dino", objective={"out": 2048})
    assert found is not None
    assert found.condition == DIVERGENCE


# --- output collapse ---


def make_outputs(entropy: float, diversity: float, **more: float) -> list[dict]:
    return make_history(DINO_START, teacher_entropy=entropy, teacher_diversity=diversity, **more)


@pytest.mark.parametrize(
    ("entropy", "diversity", "alarmed"),
    [
        (0.3, 0.3009, True),  # the same output for every image
        (0.3, 0.3011, False),
        (0.9980, 0.9989, True),  # a uniform output for every image
        (0.9980, 0.9991, False),
        (0.05, 0.19, True),  # a few outputs for all images
        (0.05, 0.21, False),
    ],
)
def test_outputs_without_information_about_the_image_are_output_collapse(entropy, diversity, alarmed):
    found = first_alarm(make_outputs(entropy, diversity), "dino")
    assert (found is not None) is alarmed
    if found:
        assert (found.condition, found.step) == (OUTPUT_COLLAPSE, 10 * FIRST)


def test_outputs_are_only_checked_for_dino():
    assert first_alarm(make_outputs(1.0, 1.0), "mae") is None


@pytest.mark.parametrize(
    ("entropy", "spread", "objective", "cause", "option"),
    [
        (0.1, 0.8, {}, NO_CENTRE, "--set objective.centre=0.9"),
        (0.1, 0.8, {"centre": None}, NO_CENTRE, "--set objective.centre=0.9"),
        (0.1, 0.8, {"centre": 0.999}, SLOW_CENTRE, "--set objective.centre=0.9"),
        (0.1, 0.8, {"centre": 0.9}, SAME_OUTPUT, "--lr 0.1"),
        (0.9, 0.8, {"centre": 0.9}, SAME_OUTPUT, "--lr 0.1"),
        (1.0, 0.8, {}, HIGH_TEMPERATURE, "--set objective.teacher_temperature=0.04"),
        (1.0, 0.8, {"teacher_temperature": 0.07}, HIGH_TEMPERATURE, "--set objective.teacher_temperature=0.04"),
        (1.0, 0.8, {"teacher_temperature": 0.04, "standardise": 0.9}, UNIFORM_OUTPUT, "--lr 0.1"),
        (1.0, 0.8, {"teacher_temperature": 0.04, "standardise": None}, CLOSE_FEATURES, "--set objective.standardise=0.9"),
        (1.0, 0.07, {}, UNIFORM_OUTPUT, "--lr 0.1"),
        (1.0, 0.07, {"teacher_temperature": 1.0, "standardise": None}, CLOSE_FEATURES, "--set objective.standardise=0.9"),
    ],
)  # fmt: skip
def test_cause_of_an_output_collapse_is_a_setting_that_can_cause_it(entropy, spread, objective, cause, option):
    found = first_alarm(make_outputs(entropy, entropy, spread=spread), "dino", lr=0.3, objective=objective)
    assert found is not None
    assert found.cause == cause
    assert found.advice.endswith(option)


def test_outputs_that_recover_are_no_alarm():
    grow = [0.0002 * 1.5**n for n in range(12)]  # below a thousandth at first, and at each validation more
    slow = make_history(DINO_START, teacher_entropy=[0.999 - value for value in grow], teacher_diversity=0.999)
    assert first_alarm(slow, "dino") is None
    warm_up = make_history(DINO_START, teacher_entropy=0.7, teacher_diversity=[0.7] * (FIRST - 1) + [0.8] * 6)
    assert first_alarm(warm_up, "dino") is None
    dip = [0.8] * 5 + [0.7] * (AGREEMENT - 1) + [0.8] * 5
    assert first_alarm(make_history(DINO_START, teacher_entropy=0.7, teacher_diversity=dip), "dino") is None


# --- feature collapse ---


@pytest.mark.parametrize("method", ["mae", "mpp", "features", "dino"])
@pytest.mark.parametrize(
    ("spread", "rank", "alarmed"),
    [
        (0.049, 1.0, True),
        (0.051, 1.0, False),
        (0.9, 0.24, True),
        (0.9, 0.26, False),
        (1.1, 0.1, False),  # fewer directions, in which features spread further
        (0.0, 0.0, True),
    ],
)
def test_small_fraction_of_the_untrained_spread_or_rank_is_feature_collapse(method, spread, rank, alarmed):
    start = DINO_START if method == "dino" else START
    history = make_history(start, spread=spread * start["spread"], rank=rank * start["rank"])
    found = first_alarm(history, method, lr=0.3)
    assert (found is not None) is alarmed
    if found:
        advice = "lower it to a third, --lr 0.1"
        assert found == Collapse(FEATURE_COLLAPSE, COLLAPSED_FEATURES, advice, 10 * FIRST)


def test_features_that_recover_are_no_alarm():
    assert first_alarm(make_history(START, rank=[4.0] * (FIRST - 1) + [20.0] * 6)) is None
    assert first_alarm(make_history(START, rank=[20.0] * 5 + [4.0] * (AGREEMENT - 1) + [20.0] * 5)) is None
    assert first_alarm(make_history(START, rank=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])) is None
    assert first_alarm(make_history(START, spread=[0.01 * 1.3**n for n in range(12)])) is None


@pytest.mark.parametrize("method", ["mae", "mpp", "features"])
def test_features_are_left_alone_while_the_loss_of_a_fixed_target_falls(method):
    """A teacher may tell little apart: then its student does too, and still trains."""
    falling = make_history(START, loss=[2.0 * 0.99**n for n in range(12)])
    alike = [record | {"spread": 0.01, "rank": 2.0} for record in falling[1:]]
    assert first_alarm([START, *alike], method) is None
    assert first_alarm([START, *(record | {"loss": 1.9} for record in alike)], method) is not None


def test_features_with_a_better_knn_accuracy_than_untrained_are_not_collapsed():
    assert first_alarm(make_history(START, rank=4.0, knn=0.65), images=KNN_IMAGES) is None
    assert first_alarm(make_history(START, rank=4.0, knn=0.55), images=KNN_IMAGES) is not None
    assert first_alarm(make_history(START, rank=4.0, knn=0.65)) is not None  # without an interval it is no evidence


# --- worse than untrained ---


def test_knn_accuracy_below_the_untrained_interval_is_an_alarm():
    for accuracy, alarmed in ((0.41, False), (0.39, True)):  # 0.41: up to 0.459; 0.39: up to 0.439
        found = first_alarm(make_history(START, knn=accuracy), images=KNN_IMAGES, lr=0.3)
        assert (found is not None) is alarmed
        if found:
            advice = "lower it to a third, --lr 0.1"
            assert found == Collapse(WORSE_THAN_UNTRAINED, BELOW_UNTRAINED, advice, 10 * FIRST)


def test_interval_of_the_knn_accuracy_follows_the_number_of_images():
    history = make_history(START, knn=0.39)
    assert first_alarm(history, images=40) is None
    assert first_alarm(history, images=None) is None
    assert first_alarm(make_history(START, knn=0.47), images=10_000) is not None


def test_knn_accuracy_that_recovers_is_no_alarm():
    assert first_alarm(make_history(START, knn=[0.2] * (FIRST - 1) + [0.5] * 6), images=KNN_IMAGES) is None
    assert (
        first_alarm(make_history(START, knn=[0.5] * 5 + [0.2] * (AGREEMENT - 1) + [0.5] * 5), images=KNN_IMAGES) is None
    )
    assert first_alarm(make_history(START, knn=[0.1 + 0.03 * n for n in range(14)]), images=KNN_IMAGES) is None


def test_run_that_starts_from_trained_weights_may_get_worse_for_knn():
    history = make_history(START, knn=0.1)
    assert first_alarm(history, images=KNN_IMAGES, untrained=False) is None
    assert first_alarm(history, images=KNN_IMAGES, untrained=True) is not None


def test_records_without_labels_have_no_knn_accuracy():
    history = [{key: value for key, value in row.items() if key != "knn"} for row in make_history(START)]
    assert first_alarm(history, images=KNN_IMAGES) is None


# --- all conditions ---


def test_no_validations_are_no_alarm():
    assert detect_collapse([], "dino") is None
    assert detect_collapse([START], "mae") is None


def test_advice_names_the_option_also_without_a_learning_rate():
    found = first_alarm(make_history(START, rank=0.0))
    assert found is not None
    assert found.advice.endswith("--lr LR")


@pytest.mark.parametrize("name", HEALTHY)
def test_recorded_healthy_run_is_no_alarm(name):
    method, history = read_history(name)
    assert first_alarm(history, method, lr=1e-3, objective={"out": 512}, images=IMAGES.get(name)) is None


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("index", [1, 4, -1])
def test_single_bad_validation_is_no_alarm(name, index):
    method, history = read_history(name)
    bad = {"loss": 1e6, "spread": 0.0, "rank": 0.0, "knn": 0.0}
    bad |= {"teacher_entropy": 0.0, "teacher_diversity": 0.0} if method == "dino" else {}
    history[index] = history[index] | bad
    assert first_alarm(history, method, images=KNN_IMAGES) is None


@pytest.mark.parametrize("name", HEALTHY)
def test_start_without_signals_is_no_alarm(name):
    method, history = read_history(name)
    history[0] = {"step": 0, "loss": "nan", "spread": "nan", "rank": "nan"}
    assert first_alarm(history, method, images=KNN_IMAGES) is None


@pytest.mark.parametrize(("name", "cause"), COLLAPSED.items())
def test_recorded_collapse_is_found_with_its_cause(name, cause):
    method, history = read_history(name)
    found = first_alarm(history, method, lr=0.3)
    assert found is not None
    assert found.cause == cause
    option = {
        NO_CENTRE: "--set objective.centre=0.9",
        HIGH_TEMPERATURE: "--set objective.teacher_temperature=0.04",
    }.get(cause, "--lr 0.1")
    assert found.advice.endswith(option)


def test_recorded_run_with_far_too_high_a_learning_rate_is_found_with_and_without_labels():
    history, objective = parse_rows(BURNT), {"out": 2048, "centre": 0.9, "teacher_temperature": 0.04}
    found = first_alarm(history, "dino", lr=1.0, objective=objective, images=160)
    assert found == Collapse(WORSE_THAN_UNTRAINED, BELOW_UNTRAINED, "lower it to a third, --lr 0.33", 30)
    found = first_alarm(history, "dino", lr=1.0, objective=objective)
    assert found == Collapse(DIVERGENCE, DIVERGED_LOSS, "lower it to a third, --lr 0.33", 40)
