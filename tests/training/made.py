"""A small loss module, and a batch for it."""

import torch
from torch import Tensor

import vitrail
from vitrail.data.rng import StepRandom
from vitrail.objectives.classification import Classification, ClassificationLoss

CPU = torch.device("cpu")


def task(objective: Classification = Classification(), **slots: object) -> ClassificationLoss:  # noqa: B008
    """A model of three layers with a head that is not zero, so that every parameter gets a gradient."""
    torch.manual_seed(0)
    given: dict[str, object] = {"patch": 4, "width": 16, "depth": 3, "heads": 2, "classes": 5, "image_size": 16}
    model = vitrail.build(None, **(given | {"channels": 1} | slots))
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return objective.build(model)


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 16, 16, generator=generator), torch.arange(count) % 5


def draw(count: int = 8, first: int = 0, total: int | None = None, step: int = 0) -> StepRandom:
    return StepRandom(seed=3, step=step, first=first, count=count, total=total or count, device=CPU)
