"""Multi-label metrics against scikit-learn."""

import numpy as np
import pytest

from tests.metrics import made
from vitrail.metrics import compute_metrics, find_confident_mistakes, find_worst_label, score_name
from vitrail.metrics.multilabel import average_precision, compute_label_metrics

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_equals_scikit_learn(seed):
    logits, targets = made.several(seed=seed)
    theirs = sklearn.average_precision_score(targets, logits, average=None)
    np.testing.assert_allclose(average_precision(logits, targets), theirs, rtol=1e-12)
    assert compute_metrics(logits, targets)["map"] == pytest.approx(theirs.mean())


def test_other_metrics_equal_scikit_learn():
    logits, targets = made.several()
    metrics, predicted = compute_metrics(logits, targets), logits >= 0
    assert metrics["f1"] == pytest.approx(sklearn.f1_score(targets, predicted, average="macro"))
    assert metrics["micro_f1"] == pytest.approx(sklearn.f1_score(targets, predicted, average="micro"))
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    each = [sklearn.log_loss(targets[:, k], chance[:, k], labels=[0, 1]) for k in range(targets.shape[1])]
    assert metrics["loss"] == pytest.approx(np.mean(each))
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(targets, predicted)
    ours = compute_label_metrics(logits, targets)
    for name, theirs in {"precision": precision, "recall": recall, "f1": f1, "support": support}.items():
        np.testing.assert_allclose(ours[name], theirs)


def test_interval_contains_the_value_and_is_deterministic():
    logits, targets = made.several()
    first, second = compute_metrics(logits, targets), compute_metrics(logits, targets)
    assert first == second
    low, high = first["interval"]
    assert low < first["map"] < high
    assert high - low < 0.15


def test_intervals_equal_those_of_resampling_images():
    logits, targets = made.several()
    metrics, predicted = compute_metrics(logits, targets), logits >= 0
    generator, drawn = np.random.default_rng(9), []
    for _ in range(400):
        rows = generator.integers(len(predicted), size=len(predicted))
        macro, micro = (sklearn.f1_score(targets[rows], predicted[rows], average=how) for how in ("macro", "micro"))
        drawn.append((macro, micro, compute_metrics(logits[rows], targets[rows], intervals=False)["loss"]))
    for name, values in zip(("f1", "micro_f1", "loss"), np.array(drawn).T, strict=True):
        assert metrics[f"{name}_interval"] == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.01), name
        assert metrics[f"{name}_interval"][0] < metrics[name] < metrics[f"{name}_interval"][1]
    low, high = metrics["calibration_error_interval"]
    assert 0 < low < metrics["calibration_error"] < high


def test_bootstrap_counts_equal_resampling_images():
    from vitrail.metrics.multilabel import Ranking

    logits, targets = made.several(n=50)
    drawn = np.random.default_rng(3).integers(50, size=50)
    times = np.bincount(drawn, minlength=50)[None]
    theirs = sklearn.average_precision_score(targets[drawn, 0], logits[drawn, 0])
    assert Ranking(logits[:, 0], targets[:, 0]).average_precision(times)[0] == pytest.approx(theirs)


def test_a_class_without_images_is_left_out():
    logits, targets = made.several()
    whole = compute_metrics(logits, targets)["map"]
    wider = compute_metrics(np.pad(logits, ((0, 0), (0, 1))), np.pad(targets, ((0, 0), (0, 1))))["map"]
    assert wider == pytest.approx(whole)


def test_targets_without_labels_are_an_error():
    with pytest.raises(ValueError, match="none of the 3 images has a label"):
        compute_metrics(np.zeros((3, 2)), np.zeros((3, 2), np.uint8))


def test_confident_mistakes_have_the_largest_wrong_logits():
    logits = np.array([[5.0, -5], [-9, 1], [3, -8], [2, 2]])
    targets = np.array([[1, 0], [1, 1], [1, 0], [1, 0]], np.uint8)
    assert find_confident_mistakes(logits, targets, 9).tolist() == [1, 3]
    assert find_worst_label(logits[1], targets[1]) == (0, pytest.approx(1.234e-4, rel=1e-3))


def test_score_name_depends_on_the_task():
    assert (score_name(False), score_name(True)) == ("top1", "map")
