"""Tests of the lines that a training run prints for a validation."""

import pytest

from vitrail.cli.text.training import TrainingDisplay

RECORD = {"kind": "validation", "step": 1200, "epoch": 3.0, "loss": 5.12345, "spread": 0.6219, "rank": 41.27}


def shown(record, capsys):
    TrainingDisplay().on_record(record)
    return capsys.readouterr().err


def test_signals_without_labels_are_one_line(capsys):
    assert shown(RECORD, capsys) == "epoch      3  step   1,200  loss 5.1235  rank 41.3  spread 0.622\n"


def test_knn_and_teacher_entropy_are_shown_if_measured(capsys):
    record = RECORD | {"knn": 0.48123, "teacher_entropy": 0.7113, "teacher_diversity": 0.98, "best": True}
    line = shown(record, capsys)
    assert line == (
        "epoch      3  step   1,200  loss 5.1235  k-NN 48.12 %  rank 41.3  spread 0.622  teacher entropy 0.711  best so far\n"
    )
    assert len(line) < 120


def test_non_finite_values_are_shown(capsys):
    broken = RECORD | {"loss": float("nan"), "spread": float("nan"), "rank": float("nan")}
    assert shown(broken, capsys).count("nan") == 3


@pytest.mark.parametrize(("key", "word"), [("top1", "top-1"), ("map", "mAP")])
def test_validation_with_labels_shows_accuracy_or_map(key, word, capsys):
    record = {"kind": "validation", "step": 7, "epoch": 1, "loss": 0.5, key: 0.75}
    assert shown(record, capsys) == f"epoch      1  step       7  validation {word} 75.00 %  loss 0.5000\n"
