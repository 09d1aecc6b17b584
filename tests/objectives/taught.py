"""A small student and a small teacher that differ in everything, and a batch for them."""

from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import StepRandom
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.teacher import Teacher

OURS = Preprocessing((16, 16), (16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
THEIRS = Preprocessing((24, 24), (28, 28), mean=(0.5,), std=(0.5,))  # larger, and grey
CLASSES = 5


def model(seed: int = 0, name: str | None = None, **slots: Any) -> ViT | BiT:
    """A model whose answers differ from class to class."""
    torch.manual_seed(seed)
    given: dict[str, object] = {"classes": CLASSES, "image_size": 16, "channels": 3}
    given |= {"patch": 4, "width": 16, "depth": 2, "heads": 2} if name is None else {}
    made = vitrail.build(name, **(given | slots))
    for module in made.head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
    return made


def teacher(order: list[int] | None = None, **slots: Any) -> Teacher:
    return Teacher(model(7, image_size=24, channels=1, **slots), THEIRS, order)


def residual() -> BiT:
    made = model(3, "R50x0.25", root="small")
    assert isinstance(made, BiT)
    return made


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    """Pictures as the student gets them, and a label for each."""
    pixels = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return OURS.normalise(pixels), torch.arange(count) % CLASSES


def draw(count: int = 8, first: int = 0, total: int | None = None) -> StepRandom:
    return StepRandom(seed=3, step=0, first=first, count=count, total=total or count, device=torch.device("cpu"))
