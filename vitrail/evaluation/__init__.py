"""`vitrail evaluate`: a model's file and pictures in; numbers, predictions and a page out."""

from vitrail.evaluation.choosing import Wanted
from vitrail.evaluation.evaluating import evaluate

__all__ = ["Wanted", "evaluate"]
