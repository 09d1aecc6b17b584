"""Single-label metrics against scikit-learn and against values computed by hand."""

import json

import numpy as np
import pytest

from tests.metrics import made
from vitrail.metrics import compute_metrics, find_confident_mistakes
from vitrail.metrics.accuracy import compute_class_metrics, confusion_matrix, find_confused_pairs, predict_classes

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


def softmax(logits):
    wide = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return wide / wide.sum(1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 7, 40])
def test_metrics_equal_scikit_learn(classes):
    logits, targets = made.single(classes=classes)
    metrics, predicted = compute_metrics(logits, targets), logits.argmax(1)
    labels = list(range(classes))
    assert metrics["images"] == 400
    assert metrics["top1"] == sklearn.accuracy_score(targets, predicted)
    assert metrics["loss"] == pytest.approx(sklearn.log_loss(targets, softmax(logits), labels=labels), rel=1e-9)
    assert metrics["balanced_accuracy"] == pytest.approx(sklearn.balanced_accuracy_score(targets, predicted))
    present = sorted(set(targets.tolist()))
    assert metrics["f1"] == pytest.approx(sklearn.f1_score(targets, predicted, labels=present, average="macro"))
    if classes > 5:
        assert metrics["top5"] == pytest.approx(sklearn.top_k_accuracy_score(targets, logits, k=5, labels=labels))
    else:
        assert "top5" not in metrics


def test_class_metrics_equal_scikit_learn():
    logits, targets = made.single()
    metrics = compute_class_metrics(predict_classes(logits, targets))
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(targets, logits.argmax(1))
    for name, theirs in {"precision": precision, "recall": recall, "f1": f1, "support": support}.items():
        np.testing.assert_allclose(metrics[name], theirs)


def test_confusion_matrix_and_most_confused_pairs():
    logits, targets = made.single()
    verdicts = predict_classes(logits, targets)
    matrix = confusion_matrix(verdicts)
    np.testing.assert_array_equal(matrix, sklearn.confusion_matrix(targets, logits.argmax(1)))
    pairs = find_confused_pairs(verdicts, 5)
    off = matrix - np.diag(np.diag(matrix))
    assert [count for *_, count in pairs] == sorted(off.ravel().tolist(), reverse=True)[:5]
    assert all(matrix[truth, predicted] == count and truth != predicted for truth, predicted, count in pairs)


def test_a_class_without_images_is_nan_and_left_out_of_the_mean():
    logits = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    metrics = compute_class_metrics(predict_classes(logits, np.array([0, 0, 1])))
    assert np.isnan(metrics["recall"][2])
    assert compute_metrics(logits, np.array([0, 0, 1]))["balanced_accuracy"] == 1.0


def test_values_are_json_serialisable():
    for logits, targets in (made.single(), made.several()):
        metrics = compute_metrics(logits, targets)
        assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_intervals_do_not_change_the_other_values():
    logits, targets = made.single()
    whole = compute_metrics(logits, targets)
    quick = compute_metrics(logits, targets, intervals=False)
    assert quick == {name: value for name, value in whole.items() if not name.endswith("interval")}


def test_huge_logits_do_not_overflow():
    metrics = compute_metrics(np.array([[1e30, -1e30], [1e4, 0]], dtype=np.float32), np.array([0, 1]))
    assert metrics["top1"] == 0.5
    assert metrics["loss"] == pytest.approx(5000)


def test_equal_logits_predict_the_first_class():
    metrics = compute_metrics(np.zeros((60, 6), dtype=np.float32), np.repeat(np.arange(6), 10))
    assert metrics["top1"] == pytest.approx(1 / 6)
    assert metrics["top5"] == pytest.approx(5 / 6)


def test_block_size_does_not_change_predictions(monkeypatch):
    logits, targets = made.single()
    whole = predict_classes(logits, targets)
    monkeypatch.setattr("vitrail.metrics.accuracy.BLOCK", 50)
    parts = predict_classes(logits, targets)
    np.testing.assert_array_equal(whole.rank, parts.rank)
    np.testing.assert_array_equal(whole.loss, parts.loss)


def test_confident_mistakes_are_sorted_by_confidence():
    logits, targets = made.single(skill=1.0)
    chosen = find_confident_mistakes(logits, targets, 20)
    sure = softmax(logits)
    assert len(chosen) == 20
    assert (logits[chosen].argmax(1) != targets[chosen]).all()
    assert (np.diff(sure[chosen].max(1)) <= 0).all()
    others = np.setdiff1d(np.flatnonzero(logits.argmax(1) != targets), chosen)
    assert sure[others].max() <= sure[chosen[-1]].max()


def test_no_mistakes_give_an_empty_result():
    assert find_confident_mistakes(np.eye(4) * 9, np.arange(4), 10).tolist() == []


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (np.zeros((0, 3)), np.zeros(0, int), "no images"),
        (np.zeros((2, 3)), np.zeros(3, int), r"\[2, 3\] and targets \[3\]"),
        (np.zeros((2, 3)), np.array([0, 3]), "must be 0 to 2, got 0 to 3"),
        (np.zeros((2, 3)), np.array([-1, 0]), "-1 to 0"),
        (np.zeros((2, 3)), np.zeros((2, 4)), "3 logits but 4 targets"),
        (np.array([[0, 1], [np.nan, 0]]), np.array([0, 1]), "image 1 are not finite"),
    ],
)
def test_invalid_inputs_are_errors(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(logits, targets)
