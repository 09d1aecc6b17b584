"""Small encoders without classes, pictures for them, and chance."""

import torch
from torch import Tensor

import vitrail
from vitrail.data.rng import StepRandom
from vitrail.models.vit import ViT

SMALL: dict[str, object] = {"patch": 8, "width": 32, "depth": 2, "heads": 2, "classes": None, "image_size": 32}


def encoder(**slots: object) -> ViT:
    """Two layers on 4×4 patches of 8×8 pixels."""
    torch.manual_seed(0)
    model = vitrail.build(None, **(SMALL | slots))
    assert isinstance(model, ViT)
    return model


def pictures(count: int = 4, channels: int = 3, size: int = 32) -> Tensor:
    """Normalised pictures: values between -1 and 1, so between 0 and 1 with a mean and deviation of 0.5."""
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def draw(count: int = 4, first: int = 0, total: int | None = None, step: int = 0) -> StepRandom:
    return StepRandom(seed=3, step=step, first=first, count=count, total=total or count, device=torch.device("cpu"))
