"""Evaluation of models: metrics, predictions and a report; probes and transfer."""

from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.selection import EvaluationData

__all__ = ["EvaluationData", "evaluate"]
