"""What the studies share: the paper's model at the size that a scale names, and a plain way to train it.

A scale's `sizes` names width, depth, heads and patch. Pictures of up to 64 pixels are taken whole. Photographs are taken at 128²
with patches four times as large, so there are as many tokens as in a small picture. Where `sizes` names `image`, every picture
is taken at that side and patches are as they stand: the larger scales do so.
"""

import math
from functools import cache
from typing import Any

from vitrail.data.augment import AugmentSlot, Fit, Flip, RandomResizedCrop
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Linear
from vitrail.models.bit import BiTConfig
from vitrail.models.build import configure_vit
from vitrail.models.cost import count
from vitrail.models.vit import ViTConfig
from vitrail.objectives.classification import Classification
from vitrail.recipe import Recipe
from vitrail.studies.study import Setup

SMALL, PHOTOGRAPH, LARGER = 64, 128, 4  # pixels, pixels, times
PASSES = 3  # forward, and backward for the inputs and for the weights: each multiplies as much


def is_small(setup: Setup) -> bool:
    """Whether pictures are taken whole."""
    return max(setup.facts.side) <= SMALL and not setup.facts.several_sizes


def larger(setup: Setup) -> int:
    """By how much a patch of this scale is larger on these pictures."""
    return 1 if "image" in setup.scale.sizes or is_small(setup) else LARGER


def image_size(setup: Setup, step: int) -> tuple[int, int]:
    """The size at which pictures are taken: in pixels, the next multiple of `step`."""
    told = setup.scale.sizes.get("image")
    if told is not None:
        height, width = told, told
    else:
        height, width = setup.facts.side if is_small(setup) else (PHOTOGRAPH, PHOTOGRAPH)
    return math.ceil(height / step) * step, math.ceil(width / step) * step


def vit(setup: Setup, **changes: Any) -> ViTConfig:
    """The paper's model at this scale: plain patches, class token, learned 1-D positions. `changes` are of `configure_vit`."""
    sizes = setup.scale.sizes
    slots: dict[str, Any] = {
        name: sizes[name] for name in ("width", "depth", "heads", "patch", "dropout") if name in sizes
    }
    slots |= changes
    slots["patch"] *= larger(setup)
    slots.setdefault("image_size", image_size(setup, slots["patch"]))
    return configure_vit(classes=setup.facts.classes, channels=setup.facts.channels, **slots)


def recipe(setup: Setup, model: ViTConfig | BiTConfig, rate: float, seed: int, **changes: Any) -> Recipe:
    """Training after the paper: Adam with decoupled decay, warm-up, a straight line down, gradients clipped to 1.

    `changes` are fields of the recipe. It is validated once, at the end: nothing is chosen on the way. `sizes` may name
    weight_decay, warmup (steps) and precision.
    """
    scale, size = setup.scale, model.image_size
    half = (0.5,) * setup.facts.channels
    small = is_small(setup)
    steps = changes.get("steps", scale.steps)
    settled: dict[str, Any] = {
        "name": "study",
        "data": setup.data,
        "model": model,
        "preprocessing": Preprocessing(
            size, size, interpolation="bilinear" if small else "bicubic", mean=half, std=half, turn=True
        ),
        "augment": augmentation(setup, size),
        "objective": Classification(loss=setup.facts.loss),
        "optimizer": AdamW(lr=rate, weight_decay=scale.sizes.get("weight_decay", 0.1)),
        "schedule": Linear(warmup=scale.sizes.get("warmup", max(1, steps // 10))),
        "batch_size": scale.batch,
        "steps": steps,
        "precision": scale.sizes.get("precision", "fp32"),
        "validate_every": float(steps),  # more epochs than there are
        "seed": seed,
    }
    return Recipe(**(settled | changes))


def augmentation(setup: Setup, size: tuple[int, int]) -> tuple[AugmentSlot, ...]:
    """Photographs are cropped; small pictures are left whole, and mirrored in colour: digits have a left and a right."""
    if not is_small(setup):
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    return (fit,) if setup.facts.channels == 1 else (fit, Flip())


@cache
def macs(model: ViTConfig | BiTConfig) -> int:
    """Multiply-adds of one picture, forward, as `vitrail describe` counts them."""
    return count(model).macs


def training_macs(model: ViTConfig | BiTConfig, pictures: int) -> int:
    """Multiply-adds of a training run that sees so many pictures, each as often as it sees it."""
    return PASSES * pictures * macs(model)
