"""Are augmentation and regularisation a substitute for more data? After "How to train your ViT?" (Steiner et al. 2021).

    vitrail paper run regularisation --scale laptop

The same model is trained for the same number of steps with no, light or strong augmentation, with and without regularisation
(dropout, stochastic depth, weight decay), on several set sizes; and with neither on larger sets. The best method, selected on
validation images, is expressed as a factor of data: the number of images with which plain training reaches its accuracy. Between
two sizes the curve of plain training is linear in the logarithm of the number of images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from vitrail.data.transforms.augment import AugmentSlot, Fit, Flip, PadCrop, RandAugment, RandomResizedCrop
from vitrail.objectives.classification import Classification
from vitrail.studies.base import build_recipe, configure_study_vit, has_small_images, incomplete_answer, plan_tuned
from vitrail.studies.intervals import (
    Difference,
    build_series,
    count_test_images,
    estimate_difference,
    estimate_mean,
    format_accuracy,
    format_points,
    group_values,
)
from vitrail.studies.study import Agreement, Answer, Cell, CellResult, Chart, GridPoint, Study, StudyScale, StudySetup
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Recipe

NONE, LIGHT, STRONG = "none", "light", "strong"
REGULARISED = "dropout, depth, decay"
BASELINE = (NONE, NONE)
MIXUP, DROPOUT, DECAY = 0.5, 0.1, 0.1  # of strong augmentation; of regularisation
CLAIMED_FACTOR = 10  # of data, claimed in the authors' abstract
DATA_SHARES, BASELINE_SHARES = (
    (1 / 16, 1 / 8, 1 / 4),
    (1 / 2, 1.0),
)  # of the most images: of every method, and of plain training alone
LIMITS = (
    "One small model, one number of steps and one strength of regularisation; the authors train many models, also longer ones, "
    "and pre-train them on millions of images. Methods better than the largest plain run, or worse than the smallest, are only "
    "bounded. Intervals cover the method itself, not the uncertainty of the plain curve."
)


def list_methods(scale: StudyScale) -> list[tuple[str, str]]:
    """Return all pairs of augmentation and regularisation, the plain pair first."""
    kinds = scale.sizes.get("augmentations", (NONE, LIGHT, STRONG))
    return [(augmentation, regular) for augmentation in kinds for regular in (NONE, REGULARISED)]


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return the cells of every method at every size, and of plain training at larger sizes."""
    sizes = setup.scale.sizes
    most = min(sizes["most"], setup.facts.images // setup.facts.classes)
    shares, beyond = sizes.get("shares", DATA_SHARES), sizes.get("beyond", BASELINE_SHARES)
    grid = [(method, share) for share in shares for method in list_methods(setup.scale)] + [
        (BASELINE, share) for share in beyond
    ]
    families = [
        {"augmentation": method[0], "regularisation": method[1], "per class": max(1, round(share * most))}
        for method, share in grid
    ]

    def training(point: GridPoint, lr: float, seed: int) -> Recipe:
        count = int(str(point["per class"]))
        return training_recipe(setup, str(point["augmentation"]), str(point["regularisation"]), count, lr, seed)

    return plan_tuned(setup, results, families, training)


def training_recipe(
    setup: StudySetup, augmentation: str, regularisation: str, per_class: int, lr: float, seed: int
) -> Recipe:
    """Return the recipe of one method on `per_class` images per class."""
    drop = {"dropout": DROPOUT, "stochastic_depth": DROPOUT} if regularisation == REGULARISED else {"dropout": 0.0}
    model = configure_study_vit(setup, **drop)
    plain = build_recipe(setup, model, lr, seed, data=replace(setup.data, per_class=per_class, drawn=seed))
    return replace(
        plain,
        augment=choose_augmentation(setup, model.image_size, augmentation),
        objective=Classification(loss=setup.facts.loss, mixup=MIXUP if augmentation == STRONG else 0.0),
        optimizer=AdamW(lr=lr, weight_decay=DECAY if regularisation == REGULARISED else 0.0),
    )


def choose_augmentation(setup: StudySetup, size: tuple[int, int], augmentation: str) -> tuple[AugmentSlot, ...]:
    """Return pad-crops for small and random crops for large images, flips for colour images, RandAugment if strong."""
    small = has_small_images(setup)
    whole = Fit(size, interpolation="bilinear" if small else "bicubic")
    if augmentation == NONE:
        return (whole,)
    flip: tuple[AugmentSlot, ...] = (Flip(),) if setup.facts.channels > 1 else ()
    crop = (
        (whole, PadCrop(max(1, min(size) // 8), "reflect")) if small else (RandomResizedCrop(size, scale=(0.25, 1.0)),)
    )
    return (*crop, *flip, *((RandAugment(2, 9.0),) if augmentation == STRONG else ()))


@dataclass(frozen=True)
class DataEquivalent:
    """Factor of data that a method is worth at a set size."""

    per_class: int
    method: tuple[str, str]
    factor: float  # 0 below the smallest plain run, infinite above the largest
    low: float
    high: float
    least: float  # factors of the smallest and the largest plain run
    most: float
    change: Difference  # to plain training on the same images


def equivalent_images(curve: Sequence[tuple[int, float]], accuracy: float) -> float:
    """Return the number of images with which plain training has this accuracy: 0 below the curve, inf above it."""
    reached = curve[0]
    if accuracy <= reached[1]:
        return float(reached[0]) if accuracy == reached[1] else 0.0
    for there in curve[1:]:
        if there[1] >= accuracy:
            along = (accuracy - reached[1]) / (there[1] - reached[1])
            return math.exp(math.log(reached[0]) + along * (math.log(there[0]) - math.log(reached[0])))
        if there[1] > reached[1]:  # skip sizes at which more images were not better
            reached = there
    return math.inf


def data_equivalents(results: Sequence[CellResult], n_images: int | None) -> list[DataEquivalent]:
    """Return the data equivalent of the method with the best validation accuracy, for each size with several methods."""
    tests = group_values(results, "per class", "augmentation", "regularisation")
    validations = group_values(results, "per class", "augmentation", "regularisation", number="validation")
    plain = {int(str(point[0])): values for point, values in tests.items() if point[1:] == BASELINE}
    curve = [(count, fmean(plain[count])) for count in sorted(plain)]
    equivalents = []
    for count in plain:
        tried = {point: fmean(v) for point, v in validations.items() if point[0] == count and point[1:] != BASELINE}
        if not tried:
            continue
        best = max(tried, key=lambda point: tried[point])
        if best not in tests:
            continue
        reached = estimate_mean(tests[best], n_images)
        change = estimate_difference(tests[best], plain[count], n_images)
        times, low, high = (
            equivalent_images(curve, value) / count if math.isfinite(value) else math.nan
            for value in (reached.mean, reached.low, reached.high)
        )
        ends = (curve[0][0] / count, curve[-1][0] / count)
        equivalents.append(DataEquivalent(count, (str(best[1]), str(best[2])), times, low, high, *ends, change))
    return equivalents


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    n_images = count_test_images(results)
    tests = group_values(results, "per class", "augmentation", "regularisation")
    known = data_equivalents(results, n_images)
    if not known:
        return incomplete_answer(["plain training and another method on the same images"], LIMITS)
    finding, agreement = formulate_finding(known)
    by_method: dict[tuple[Any, ...], dict[int, Sequence[float]]] = {}
    for point, values in tests.items():
        by_method.setdefault(point[1:], {})[int(str(point[0]))] = values
    counts = sorted({count for values in by_method.values() for count in values})
    chosen = {(best.per_class, best.method): best for best in known}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("augmentation", "regularisation", *(f"{count:,} a class" for count in counts)),
        rows=tuple(
            (
                *map(str, method),
                *(format_cell(values.get(count), n_images, chosen.get((count, method))) for count in counts),
            )
            for method, values in by_method.items()
        ),
        charts=(
            Chart(
                "Test accuracy as the training set grows",
                "lines",
                tuple(
                    build_series(format_method(method), {**dict(sorted(values.items()))}, n_images)
                    for method, values in by_method.items()
                ),
                "training images per class",
                "top-1 on test images",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=tuple(
            f"With {best.per_class:,} images per class, {format_method(best.method)} has the best validation accuracy "
            f"besides plain training, and is worth {format_factor(best)} the images."
            for best in known
        ),
    )


def formulate_finding(equivalents: Sequence[DataEquivalent]) -> tuple[str, Agreement]:
    """Report the data equivalent of the best method at the smallest size, and at the others."""
    first, rest = equivalents[0], equivalents[1:]
    also = "".join(f", with {other.per_class:,} {format_factor(other)}" for other in rest)
    if not first.change.is_clear:
        return (
            f"With {first.per_class:,} images per class augmentation and regularisation make no clear difference to plain "
            f"training at this scale: {format_method(first.method)} is worth {format_factor(first)} the images{also}.",
            "no difference",
        )
    if first.change.mean < 0:
        return (
            f"Augmentation and regularisation are no substitute for data here: with {first.per_class:,} images per class "
            f"even the best of them, {format_method(first.method)}, is clearly worse than plain training "
            f"({format_points(first.change)}){also}.",
            "disagrees",
        )
    short = first.high < CLAIMED_FACTOR
    missed = ", short of the order of magnitude that the authors found" if short else ""
    return (
        f"Augmentation and regularisation stand in for data: with {first.per_class:,} images per class the best of them, "
        f"{format_method(first.method)}, is worth {format_factor(first)} the images{also}{missed}.",
        "disagrees" if short else "agrees",
    )


def format_method(method: Sequence[Any]) -> str:
    """Return a method as text."""
    if tuple(method) == BASELINE:
        return "plain"
    augmentation = "no augmentation" if method[0] == NONE else f"{method[0]} augmentation"
    return augmentation if method[1] == NONE else f"{augmentation} with regularisation"


def format_factor(equivalent: DataEquivalent) -> str:
    """Return text such as "3.1 times (2.5 to 3.8)"; values beyond the plain curve are bounded by its ends."""
    if equivalent.factor == 0:
        return f"less than {equivalent.least:.1f} times"
    if math.isinf(equivalent.factor):
        return f"more than {equivalent.most:.1f} times"
    if math.isnan(equivalent.low):
        return f"{equivalent.factor:.1f} times"
    low = f"{equivalent.low:.1f}" if equivalent.low else f"less than {equivalent.least:.1f}"
    high = f"more than {equivalent.most:.1f}" if math.isinf(equivalent.high) else f"{equivalent.high:.1f}"
    return f"{equivalent.factor:.1f} times ({low} to {high})"


def format_cell(values: Sequence[float] | None, n_images: int | None, equivalent: DataEquivalent | None) -> str:
    """Return an accuracy as text, with the data equivalent of the best method."""
    return format_accuracy(values, n_images) + (f", {format_factor(equivalent)}" if equivalent is not None else "")


STUDY = Study(
    name="regularisation",
    question="Are augmentation and regularisation a substitute for more data?",
    reference="after the paper: “How to train your ViT?” (Steiner et al. 2021)",
    paper_finding=(
        "With more compute, augmentation and regularisation give the same performance as an order of magnitude more training "
        "data (Steiner et al. 2021, abstract)."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.3, "one core", seeds=1, steps=3, batch=32,
            sizes={
                "width": 16, "depth": 1, "heads": 2, "patch": 4, "most": 40, "augmentations": (NONE, STRONG),
                "shares": (1 / 4,), "beyond": (1.0,),
            },
        ),
        # Width 64, depth 4, 16 patches: 1,000 images/s on a core; RandAugment makes 1,600/s, so 620/s with it. 1,000 steps
        # × 128 = 128,000 images: 128 s, strong 206 s, and 18 s to start and to evaluate. A seed: 14 × 146 s + 6 × 224 s =
        # 3,390 s. Two seeds, one learning rate, on two cores: 57 min. From 200 to 3,200 images per class.
        "laptop": StudyScale(
            "cifar-10", 57, "two cores", seeds=2, steps=1_000, batch=128,
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 8, "most": 3_200},
        ),
        # Ti/16 at 224², 1,500 images/s with bf16: 20,000 steps × 256 = 57 min; 20 methods and sizes, two tuning runs and
        # three seeds each.
        "gpu": StudyScale(
            "imagenet", 5_700, "one GPU", seeds=3, steps=20_000, batch=256, lrs=(5e-4, 1e-3),
            sizes={
                "width": 192, "depth": 12, "heads": 3, "patch": 16, "image": 224, "most": 1_280, "precision": "bf16",
                "warmup": 2_000,
            },
        ),
        # B/16 on ImageNet-21k, 30 epochs of 14 M images in batches of 4,096: 102,500 steps at 7,000 images/s on eight
        # GPUs, 17 h a run; 20 methods and sizes, one learning rate, two seeds.
        "cluster": StudyScale(
            "imagenet-21k", 40_800, "8 GPUs", seeds=2, steps=102_500, batch=4096,
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "most": 1_000, "precision": "bf16",
                "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
)  # fmt: skip
