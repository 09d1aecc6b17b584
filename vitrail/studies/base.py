"""Shared building blocks of studies: the paper's model at the size of a scale, its recipe, tuning and few-shot measures.

A scale's `sizes` gives width, depth, heads and patch. Images of up to 64 pixels keep their size. Larger images are resized to
128² with patches four times as large, so the number of tokens is that of a small image. If `sizes` has `image`, every image is
resized to that side and patches are not enlarged (the larger scales).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import AugmentSlot, Fit, Flip, RandomResizedCrop
from vitrail.evaluation.probes import ProbeSettings, probe
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.flops import count
from vitrail.models.registry import configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.studies.study import NO_FINDING, Answer, Cell, CellResult, GridPoint, StudySetup
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Recipe
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.schedule import Linear

SHOTS, DRAWS = 5, 5


def measure_five_shot(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the 5-shot test accuracy of a final run's model, mean over five training subsets; {} for other phases."""
    return measure_five_shot_of(str(run / "model.safetensors"), cell)


def measure_five_shot_of(model: str, cell: Cell) -> dict[str, Any]:
    """Return the 5-shot accuracy of any model file on the data of a final run, e.g. of its initial weights."""
    if cell.phase != "final" or cell.recipe.data.task == "multi":
        return {}
    data = replace(cell.recipe.data, per_class=SHOTS * DRAWS, drawn=0, test=True)  # few images: features are cheap
    prepared = prepare_data(data)
    if prepared.train.is_multi_label:  # few-shot accuracy is defined for single labels
        return {}
    settings = ProbeSettings(shots=(SHOTS,), draws=DRAWS)
    report = probe(model, data, ["few-shot"], settings, cache=False, prepared=prepared)
    return {"five-shot": report.results[0].score}


def plan_tuned(
    setup: StudySetup,
    results: Sequence[CellResult],
    points: Sequence[GridPoint],
    make_recipe: Callable[[GridPoint, float, int], Recipe],
) -> list[Cell]:
    """Return the tuning cells of every grid point, and the final cells of the points whose tuning cells are all finished.

    A tuning cell is {**point, "rate": lr, "seed": 0} in the phase "tune". A scale with one learning rate has none.
    """
    lrs = setup.scale.lrs
    cells = [
        Cell({**point, "rate": lr, "seed": 0}, make_recipe(point, lr, 0), "tune")
        for point in points
        for lr in lrs
        if len(lrs) > 1
    ]
    for point in points:
        best = select_lr(point, lrs, results)
        if best is not None:
            seeds = range(setup.scale.seeds)
            cells += [Cell({**point, "rate": best, "seed": seed}, make_recipe(point, best, seed)) for seed in seeds]
    return cells


def select_lr(
    point: GridPoint, lrs: Sequence[float], results: Sequence[CellResult], phase: str = "tune"
) -> float | None:
    """Return the learning rate with the best validation accuracy, the first of ties; None while a tuning run is missing."""
    if len(lrs) == 1:
        return lrs[0]
    scores: list[float] = []
    for lr in lrs:
        at = {**point, "rate": lr, "seed": 0}
        matches = [result for result in results if result.phase == phase and dict(result.at) == at]
        if not matches:
            return None
        score = float(matches[0].numbers["validation"])
        scores.append(-math.inf if math.isnan(score) else score)
    return lrs[scores.index(max(scores))]


MAX_WHOLE_SIDE, PHOTO_SIDE, PHOTO_PATCH_FACTOR = 64, 128, 4  # pixels, pixels, times
TRAINING_PASSES = 3  # forward, backward to the inputs, backward to the weights: the same number of multiply-adds each


def has_small_images(setup: StudySetup) -> bool:
    """Return True if images keep their size."""
    return max(setup.facts.side) <= MAX_WHOLE_SIDE and not setup.facts.several_sizes


def patch_factor(setup: StudySetup) -> int:
    """Return the factor by which patches of this scale are enlarged for these images."""
    return 1 if "image" in setup.scale.sizes or has_small_images(setup) else PHOTO_PATCH_FACTOR


def choose_image_size(setup: StudySetup, multiple: int) -> tuple[int, int]:
    """Return the input size in pixels, rounded up to a multiple of `multiple`."""
    side = setup.scale.sizes.get("image")
    if side is not None:
        height, width = side, side
    else:
        height, width = setup.facts.side if has_small_images(setup) else (PHOTO_SIDE, PHOTO_SIDE)
    return math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple


def configure_study_vit(setup: StudySetup, **changes: Any) -> TokenConfig:
    """Return the paper's model at this scale: patches, class token, learned 1-D positions. `changes`: see `configure_tokens`."""
    sizes = setup.scale.sizes
    slots: dict[str, Any] = {
        name: sizes[name] for name in ("width", "depth", "heads", "patch", "dropout") if name in sizes
    }
    slots |= changes
    slots["patch"] *= patch_factor(setup)
    slots.setdefault("image_size", choose_image_size(setup, slots["patch"]))
    return configure_tokens(classes=setup.facts.classes, channels=setup.facts.channels, **slots)


def build_recipe(setup: StudySetup, model: ModelConfig, lr: float, seed: int, **changes: Any) -> Recipe:
    """Return the paper's training recipe: AdamW, warm-up, linear decay, gradients clipped to 1.

    `changes` are fields of the recipe. Validation runs once, at the end. `sizes` may give weight_decay, warmup (steps) and
    precision.
    """
    scale, size = setup.scale, model.image_size
    half = (0.5,) * setup.facts.channels
    small = has_small_images(setup)
    steps = changes.get("steps", scale.steps)
    defaults: dict[str, Any] = {
        "name": "study",
        "data": setup.data,
        "model": model,
        "preprocessing": Preprocessing(
            size, size, interpolation="bilinear" if small else "bicubic", mean=half, std=half, turn=True
        ),
        "augment": choose_augmentation(setup, size),
        "objective": Classification(loss=setup.facts.loss),
        "optimizer": AdamW(lr=lr, weight_decay=scale.sizes.get("weight_decay", 0.1)),
        "schedule": Linear(warmup=scale.sizes.get("warmup", max(1, steps // 10))),
        "batch_size": scale.batch,
        "steps": steps,
        "precision": scale.sizes.get("precision", "fp32"),
        "validate_every": float(steps),  # in epochs: only at the end
        "seed": seed,
    }
    return Recipe(**(defaults | changes))


def choose_augmentation(setup: StudySetup, size: tuple[int, int]) -> tuple[AugmentSlot, ...]:
    """Return random crops and flips for large images, flips for small colour images, nothing for grey ones (digits)."""
    if not has_small_images(setup):
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    return (fit,) if setup.facts.channels == 1 else (fit, Flip())


@cache
def count_macs(model: ModelConfig) -> int:
    """Return the multiply-adds of one forward pass of one image, as `vitrail describe` counts them."""
    return count(model).macs


def count_training_macs(model: ModelConfig, n_images: int) -> int:
    """Return the multiply-adds of a training run over `n_images` images, repeats included."""
    return TRAINING_PASSES * n_images * count_macs(model)


def find_missing(present: Iterable[tuple[object, ...]], required: Iterable[str]) -> list[str]:
    """Return the required settings without a finished run."""
    finished = {key[0] for key in present}
    return [setting for setting in required if setting not in finished]


def incomplete_answer(missing: Sequence[str], limits: str) -> Answer:
    """Return the answer of a study whose required runs are missing."""
    return Answer(
        finding=f"{NO_FINDING}: no finished run of {'; '.join(missing)}.",
        agreement="unclear",
        columns=("missing",),
        rows=tuple((setting,) for setting in missing),
        charts=(),
        limits=limits,
    )
