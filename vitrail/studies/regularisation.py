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
from vitrail.studies import base
from vitrail.studies.intervals import Difference, Scores, format_points
from vitrail.studies.study import Answer, Cell, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Recipe

NONE, LIGHT, STRONG = "none", "light", "strong"
REGULARISED = "dropout, depth, decay"
BASELINE = (NONE, NONE)
MIXUP, DROPOUT, DECAY = 0.5, 0.1, 0.1  # of strong augmentation; of regularisation
CLAIMED_FACTOR = 10  # of data, claimed in the authors' abstract
DATA_SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the most images, for every method
BASELINE_SHARES = (1 / 2, 1.0)  # for plain training alone
LIMITS = (
    "One small model, one number of steps and one strength of regularisation; the authors train many models, also longer ones, "
    "and pre-train them on millions of images. Methods better than the largest plain run, or worse than the smallest, are only "
    "bounded. Intervals cover the method itself, not the uncertainty of the plain curve."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every method at every size, and of plain training at larger sizes."""
    sizes = setup.scale.sizes
    most = min(sizes["most"], setup.facts.images // setup.facts.classes)
    kinds = sizes.get("augmentations", (NONE, LIGHT, STRONG))
    methods = [(augmentation, regular) for augmentation in kinds for regular in (NONE, REGULARISED)]
    grid = [(method, share) for share in sizes.get("shares", DATA_SHARES) for method in methods]
    grid += [(BASELINE, share) for share in sizes.get("beyond", BASELINE_SHARES)]
    families = [
        {"augmentation": method[0], "regularisation": method[1], "per class": max(1, round(share * most))}
        for method, share in grid
    ]

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        is_strong, is_regularised = point["augmentation"] == STRONG, point["regularisation"] == REGULARISED
        drop = {"dropout": DROPOUT, "stochastic_depth": DROPOUT} if is_regularised else {"dropout": 0.0}
        model = base.configure_study_vit(setup, **drop)
        return base.build_recipe(
            setup,
            model,
            lr,
            seed,
            data=replace(setup.data, per_class=int(str(point["per class"])), drawn=seed),
            augment=choose_augmentation(setup, model.image_size, str(point["augmentation"])),
            objective=Classification(loss=setup.facts.loss, mixup=MIXUP if is_strong else 0.0),
            optimizer=AdamW(lr=lr, weight_decay=DECAY if is_regularised else 0.0),
        )

    return base.plan_tuned(setup, results, families, make_recipe)


def choose_augmentation(setup: StudySetup, size: tuple[int, int], augmentation: str) -> tuple[AugmentSlot, ...]:
    """Return pad-crops for small and random crops for large images, flips for colour images, RandAugment if strong."""
    small = base.has_small_images(setup)
    augment: list[AugmentSlot] = [Fit(size, interpolation="bilinear" if small else "bicubic")]
    if augmentation == NONE:
        return tuple(augment)
    if small:
        augment.append(PadCrop(max(1, min(size) // 8), "reflect"))
    else:
        augment = [RandomResizedCrop(size, scale=(0.25, 1.0))]
    augment += [Flip()] if setup.facts.channels > 1 else []
    augment += [RandAugment(2, 9.0)] if augmentation == STRONG else []
    return tuple(augment)


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

    def __str__(self) -> str:
        """Return text such as "3.1 times (2.5 to 3.8)"; values beyond the plain curve are bounded by its ends."""
        below, above = f"less than {self.least:.1f}", f"more than {self.most:.1f}"
        if self.factor == 0 or math.isinf(self.factor):
            return f"{above if self.factor else below} times"
        if math.isnan(self.low):
            return f"{self.factor:.1f} times"
        low = f"{self.low:.1f}" if self.low else below
        high = above if math.isinf(self.high) else f"{self.high:.1f}"
        return f"{self.factor:.1f} times ({low} to {high})"


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


def data_equivalents(results: Results, tests: Scores) -> list[DataEquivalent]:
    """Return the data equivalent of the method with the best validation accuracy, for each size with several methods."""
    validations = Scores(results, "per class", "augmentation", "regularisation", number="validation")
    counts = [count for count, *method in tests if tuple(method) == BASELINE]
    curve = [(count, fmean(tests[count, *BASELINE])) for count in sorted(counts)]
    equivalents = []
    for count in counts:
        tried = [point for point in validations if point[0] == count and point[1:] != BASELINE]
        best = max(tried, key=lambda point: fmean(validations[point]), default=None)
        if best is None or best not in tests:
            continue
        reached, change = tests.estimate(best), tests.subtract(best, (count, *BASELINE))
        factor, low, high = (
            equivalent_images(curve, value) / count if math.isfinite(value) else math.nan
            for value in (reached.mean, reached.low, reached.high)
        )
        least, most = curve[0][0] / count, curve[-1][0] / count
        equivalents.append(DataEquivalent(count, best[1:], factor, low, high, least, most, change))
    return equivalents


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests = Scores(results, "per class", "augmentation", "regularisation")
    known = data_equivalents(results, tests)
    if not known:
        return base.incomplete_answer(["plain training and another method on the same images"], LIMITS)
    counts = sorted({count for count, *_ in tests})
    methods = list(dict.fromkeys(point[1:] for point in tests))
    worth = {(best.per_class, *best.method): f", {best}" for best in known}
    lines = {format_method(method): {(n, *method): n for n in counts if (n, *method) in tests} for method in methods}
    names = ("training images per class", "top-1 on test images")
    return Answer(
        *formulate_finding(known),
        columns=("augmentation", "regularisation", *(f"{count:,} a class" for count in counts)),
        rows=tuple(
            (*method, *(tests.format((n, *method)) + worth.get((n, *method), "") for n in counts)) for method in methods
        ),
        charts=(tests.lines("Test accuracy as the training set grows", lines, *names),),
        limits=LIMITS,
        notes=tuple(
            f"With {best.per_class:,} images per class, {format_method(best.method)} has the best validation accuracy "
            f"besides plain training, and is worth {best} the images."
            for best in known
        ),
    )


def formulate_finding(equivalents: Sequence[DataEquivalent]) -> Finding:
    """Report the data equivalent of the best method at the smallest size, and at the others."""
    first, *rest = equivalents
    method, few = format_method(first.method), f"{first.per_class:,} images per class"
    also = "".join(f", with {other.per_class:,} {other}" for other in rest)
    methods = "augmentation and regularisation"
    if not first.change.is_clear:
        same = "make no clear difference to plain training at this scale"
        return f"With {few} {methods} {same}: {method} is worth {first} the images{also}.", "no difference"
    best = f"the best of them, {method}, is"
    if first.change.is_loss:
        worse = f"with {few} even {best} clearly worse than plain training ({format_points(first.change)})"
        return f"{methods.capitalize()} are no substitute for data here: {worse}{also}.", "disagrees"
    worth = f"{methods.capitalize()} stand in for data: with {few} {best} worth {first} the images{also}"
    if first.high < CLAIMED_FACTOR:
        return f"{worth}, short of the order of magnitude that the authors found.", "disagrees"
    return f"{worth}.", "agrees"


def format_method(method: Sequence[Any]) -> str:
    """Return a method as text."""
    if tuple(method) == BASELINE:
        return "plain"
    augmentation = "no augmentation" if method[0] == NONE else f"{method[0]} augmentation"
    return augmentation if method[1] == NONE else f"{augmentation} with regularisation"


STUDY = Study(
    name="regularisation",
    question="Are augmentation and regularisation a substitute for more data?",
    reference="after the paper: “How to train your ViT?” (Steiner et al. 2021)",
    paper_finding=(
        "With more compute, augmentation and regularisation give the same performance as an order of magnitude more training "
        "data (Steiner et al. 2021, abstract)."
    ),
    scales={
        "test": base.on_one_core(minutes=0.3, seeds=1, steps=3, sizes=base.vit_sizes(
            16, 1, 2, 4, most=40, augmentations=(NONE, STRONG), shares=(1 / 4,), beyond=(1.0,))),
        # Width 64, depth 4, 16 patches: 1,000 images/s on a core; RandAugment makes 1,600/s, so 620/s with it. 1,000 steps
        # × 128 = 128,000 images: 128 s, strong 206 s, and 18 s to start and to evaluate. A seed: 14 × 146 s + 6 × 224 s =
        # 3,390 s. Two seeds, one learning rate, on two cores: 57 min. From 200 to 3,200 images per class.
        "laptop": base.on_two_cores(minutes=57, seeds=2, steps=1_000, batch=128, sizes=base.vit_sizes(
            64, 4, 4, 8, most=3_200)),
        # Ti/16 at 224², 1,500 images/s with bf16: 20,000 steps × 256 = 57 min; 20 methods and sizes, two tuning runs and
        # three seeds each.
        "gpu": base.on_gpu(data="imagenet", minutes=5_700, steps=20_000, lrs=(5e-4, 1e-3), sizes=base.vit_sizes(
            192, 12, 3, 16, image=224, most=1_280, precision="bf16", warmup=2_000)),
        # B/16 on ImageNet-21k, 30 epochs of 14 M images in batches of 4,096: 102,500 steps at 7,000 images/s on eight
        # GPUs, 17 h a run; 20 methods and sizes, one learning rate, two seeds.
        "cluster": base.on_cluster(minutes=40_800, seeds=2, sizes=base.vit_sizes(
            768, 12, 12, 16, image=224, most=1_000, precision="bf16", warmup=10_000)),
    },
    plan=plan, interpret=interpret_results,
)  # fmt: skip
