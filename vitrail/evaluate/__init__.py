"""How good a model is, from its logits and the targets: numbers, intervals, and where it goes wrong. NumPy alone."""

from vitrail.evaluate.measures import measures, score_name
from vitrail.evaluate.mistakes import surest_mistakes

__all__ = ["measures", "score_name", "surest_mistakes"]
