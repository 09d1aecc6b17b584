"""A run that learns a teacher's features from pictures alone: taught, and watched like all that learn without labels."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.draw import Draw
from vitrail.objectives.feature_distillation import FeatureDistillation, FeatureDistiller
from vitrail.objectives.task import Task
from vitrail.run.pretraining import Pretraining
from vitrail.run.supervised import in_pairs
from vitrail.run.teaching import WithTeacher


@dataclass
class Imitation(WithTeacher, Pretraining):
    """A student on its way to the features of its teacher."""

    answered: dict[int, Tensor] = field(default_factory=dict)  # by the teacher, about each batch that is watched

    @property
    def score(self) -> str:
        return (
            "knn" if self.votes else "cosine"
        )  # unlike other losses without labels, this one says how far it has come

    def task(self, model: ViT | BiT, steps: int) -> Task:
        return self.taught(model)

    def batch(self) -> int:
        assert isinstance(self.objective, FeatureDistillation)
        return in_pairs(super().batch(), self.objective, self.team.world)

    def said_of(self, task: Task, images: Any, draw: Draw) -> dict[str, Tensor]:
        """The teacher is asked the first time only: every validation looks at the same crops."""
        assert isinstance(task, FeatureDistiller)
        if draw.step not in self.answered:
            self.answered[draw.step] = task.asked(images)
        return task.signals(images, draw, self.answered[draw.step])
