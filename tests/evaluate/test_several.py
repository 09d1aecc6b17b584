"""Measures of several labels for each picture, against scikit-learn."""

import numpy as np
import pytest

from tests.evaluate import made
from vitrail.evaluate import measures, score_name, surest_mistakes
from vitrail.evaluate.mistakes import worst_label
from vitrail.evaluate.several import average_precision, per_class

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_scikit_learn(seed):
    logits, targets = made.several(seed=seed)
    theirs = sklearn.average_precision_score(targets, logits, average=None)
    np.testing.assert_allclose(average_precision(logits, targets), theirs, rtol=1e-12)
    assert measures(logits, targets)["map"] == pytest.approx(theirs.mean())


def test_other_measures_are_those_of_scikit_learn():
    logits, targets = made.several()
    found, said = measures(logits, targets), logits >= 0
    assert found["f1"] == pytest.approx(sklearn.f1_score(targets, said, average="macro"))
    assert found["micro_f1"] == pytest.approx(sklearn.f1_score(targets, said, average="micro"))
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    each = [sklearn.log_loss(targets[:, k], chance[:, k], labels=[0, 1]) for k in range(targets.shape[1])]
    assert found["loss"] == pytest.approx(np.mean(each))
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(targets, said)
    ours = per_class(logits, targets)
    for name, theirs in {"precision": precision, "recall": recall, "f1": f1, "support": support}.items():
        np.testing.assert_allclose(ours[name], theirs)


def test_interval_holds_the_value_and_is_the_same_each_time():
    logits, targets = made.several()
    first, second = measures(logits, targets), measures(logits, targets)
    assert first == second
    low, high = first["interval"]
    assert low < first["map"] < high
    assert high - low < 0.15


def test_every_measure_has_an_interval_that_drawing_pictures_gives():
    logits, targets = made.several()
    found, said = measures(logits, targets), logits >= 0
    generator, drawn = np.random.default_rng(9), []
    for _ in range(400):
        rows = generator.integers(len(said), size=len(said))
        macro, micro = (sklearn.f1_score(targets[rows], said[rows], average=how) for how in ("macro", "micro"))
        drawn.append((macro, micro, measures(logits[rows], targets[rows], intervals=False)["loss"]))
    for name, values in zip(("f1", "micro_f1", "loss"), np.array(drawn).T, strict=True):
        assert found[f"{name}_interval"] == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.01), name
        assert found[f"{name}_interval"][0] < found[name] < found[f"{name}_interval"][1]
    low, high = found["calibration_error_interval"]
    assert 0 < low < found["calibration_error"] < high


def test_bootstrap_weights_are_the_same_as_drawing_pictures():
    from vitrail.evaluate.several import Ranking

    logits, targets = made.several(n=50)
    drawn = np.random.default_rng(3).integers(50, size=50)
    times = np.bincount(drawn, minlength=50)[None]
    theirs = sklearn.average_precision_score(targets[drawn, 0], logits[drawn, 0])
    assert Ranking(logits[:, 0], targets[:, 0]).average_precision(times)[0] == pytest.approx(theirs)


def test_a_class_that_no_picture_has_is_left_out():
    logits, targets = made.several()
    whole = measures(logits, targets)["map"]
    wider = measures(np.pad(logits, ((0, 0), (0, 1))), np.pad(targets, ((0, 0), (0, 1))))["map"]
    assert wider == pytest.approx(whole)


def test_no_labels_at_all_are_refused():
    with pytest.raises(ValueError, match="none of the 3 pictures has a label"):
        measures(np.zeros((3, 2)), np.zeros((3, 2), np.uint8))


def test_surest_mistakes_are_the_labels_furthest_off():
    logits = np.array([[5.0, -5], [-9, 1], [3, -8], [2, 2]])
    targets = np.array([[1, 0], [1, 1], [1, 0], [1, 0]], np.uint8)
    assert surest_mistakes(logits, targets, 9).tolist() == [1, 3]
    assert worst_label(logits[1], targets[1]) == (0, pytest.approx(1.234e-4, rel=1e-3))


def test_a_run_is_judged_by_what_its_task_allows():
    assert (score_name(False), score_name(True)) == ("top1", "map")
