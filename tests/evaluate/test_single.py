"""Measures of one label for each picture, against scikit-learn and by hand."""

import json

import numpy as np
import pytest

from tests.evaluate import made
from vitrail.evaluate import measures, surest_mistakes
from vitrail.evaluate.single import confused_pairs, confusion, per_class
from vitrail.evaluate.verdicts import judge

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


def softmax(logits):
    wide = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return wide / wide.sum(1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 7, 40])
def test_measures_are_those_of_scikit_learn(classes):
    logits, targets = made.single(classes=classes)
    found, said = measures(logits, targets), logits.argmax(1)
    labels = list(range(classes))
    assert found["images"] == 400
    assert found["top1"] == sklearn.accuracy_score(targets, said)
    assert found["loss"] == pytest.approx(sklearn.log_loss(targets, softmax(logits), labels=labels), rel=1e-9)
    assert found["balanced_accuracy"] == pytest.approx(sklearn.balanced_accuracy_score(targets, said))
    present = sorted(set(targets.tolist()))
    assert found["f1"] == pytest.approx(sklearn.f1_score(targets, said, labels=present, average="macro"))
    if classes > 5:
        assert found["top5"] == pytest.approx(sklearn.top_k_accuracy_score(targets, logits, k=5, labels=labels))
    else:
        assert "top5" not in found


def test_each_class_is_as_scikit_learn_says():
    logits, targets = made.single()
    found = per_class(judge(logits, targets))
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(targets, logits.argmax(1))
    for name, theirs in {"precision": precision, "recall": recall, "f1": f1, "support": support}.items():
        np.testing.assert_allclose(found[name], theirs)


def test_confusion_matrix_and_its_commonest_pairs_are_right():
    logits, targets = made.single()
    verdicts = judge(logits, targets)
    matrix = confusion(verdicts)
    np.testing.assert_array_equal(matrix, sklearn.confusion_matrix(targets, logits.argmax(1)))
    pairs = confused_pairs(verdicts, 5)
    off = matrix - np.diag(np.diag(matrix))
    assert [often for *_, often in pairs] == sorted(off.ravel().tolist(), reverse=True)[:5]
    assert all(matrix[truth, said] == often and truth != said for truth, said, often in pairs)


def test_a_class_without_pictures_is_left_out_of_the_mean_and_not_called_zero():
    logits = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    found = per_class(judge(logits, np.array([0, 0, 1])))
    assert np.isnan(found["recall"][2])
    assert measures(logits, np.array([0, 0, 1]))["balanced_accuracy"] == 1.0


def test_values_are_plain_json():
    for logits, targets in (made.single(), made.several()):
        found = measures(logits, targets)
        assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_without_intervals_the_rest_is_the_same():
    logits, targets = made.single()
    whole = measures(logits, targets)
    quick = measures(logits, targets, intervals=False)
    assert quick == {name: value for name, value in whole.items() if not name.endswith("interval")}


def test_huge_logits_do_not_overflow():
    found = measures(np.array([[1e30, -1e30], [1e4, 0]], dtype=np.float32), np.array([0, 1]))
    assert found["top1"] == 0.5
    assert found["loss"] == pytest.approx(5000)


def test_equal_logits_count_for_the_first_class_alone():
    found = measures(np.zeros((60, 6), dtype=np.float32), np.repeat(np.arange(6), 10))
    assert found["top1"] == pytest.approx(1 / 6)
    assert found["top5"] == pytest.approx(5 / 6)


def test_blocks_do_not_change_the_verdicts(monkeypatch):
    logits, targets = made.single()
    whole = judge(logits, targets)
    monkeypatch.setattr("vitrail.evaluate.verdicts.BLOCK", 50)
    parts = judge(logits, targets)
    np.testing.assert_array_equal(whole.place, parts.place)
    np.testing.assert_array_equal(whole.loss, parts.loss)


def test_surest_mistakes_come_first_and_are_mistakes():
    logits, targets = made.single(skill=1.0)
    chosen = surest_mistakes(logits, targets, 20)
    sure = softmax(logits)
    assert len(chosen) == 20
    assert (logits[chosen].argmax(1) != targets[chosen]).all()
    assert (np.diff(sure[chosen].max(1)) <= 0).all()
    others = np.setdiff1d(np.flatnonzero(logits.argmax(1) != targets), chosen)
    assert sure[others].max() <= sure[chosen[-1]].max()


def test_no_mistakes_are_no_mistakes():
    assert surest_mistakes(np.eye(4) * 9, np.arange(4), 10).tolist() == []


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (np.zeros((0, 3)), np.zeros(0, int), "no pictures"),
        (np.zeros((2, 3)), np.zeros(3, int), r"\[2, 3\] and targets \[3\]"),
        (np.zeros((2, 3)), np.array([0, 3]), "0 to 3, but there are 3 classes"),
        (np.zeros((2, 3)), np.array([-1, 0]), "-1 to 0"),
        (np.zeros((2, 3)), np.zeros((2, 4)), "3 logits and 4 targets"),
        (np.array([[0, 1], [np.nan, 0]]), np.array([0, 1]), "picture 1 are not finite"),
    ],
)
def test_what_does_not_fit_is_refused(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        measures(logits, targets)
