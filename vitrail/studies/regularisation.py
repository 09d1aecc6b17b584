"""Are augmentation and regularisation a substitute for more data? After "How to train your ViT?" (Steiner et al. 2021).

    vitrail paper run regularisation --scale laptop

The same model for the same number of steps, with no, light or strong augmentation, with and without regularisation (dropout,
stochastic depth, weight decay), on few, more and many pictures; and plainly, with neither, on more pictures still. What the
best of them is worth is read off the plain curve: with how many pictures would plain training be as good? Between two sizes
the curve is a straight line over the logarithm of the number. Which is the best of them is chosen on validation pictures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from vitrail.data.augment import AugmentSlot, Fit, Flip, PadCrop, RandAugment, RandomResizedCrop
from vitrail.engine.optim import AdamW
from vitrail.objectives.classification import Classification
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import judged_on, series, told
from vitrail.studies.base import is_small, recipe, vit
from vitrail.studies.intervals import Difference, difference, estimate, grouped, points
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import too_early

NONE, LIGHT, STRONG = "none", "light", "strong"
REGULAR = "dropout, depth, decay"
PLAIN = (NONE, NONE)
MIXUP, DROPPED, DECAY = 0.5, 0.1, 0.1  # of strong augmentation; of regularisation
TEN = 10  # times the data, which the authors' abstract claims
SHARES, BEYOND = (1 / 16, 1 / 8, 1 / 4), (1 / 2, 1.0)  # of the most pictures: of every way, and of plain training alone
LIMITS = (
    "One small model, one number of steps and one strength of regularisation; the authors train many models, also longer ones, "
    "and pre-train them on millions of pictures. What is worth more than the largest plain run, or less than the smallest, is "
    "told as no more than that, and its interval is of the way itself: that the plain curve is not known exactly comes on top."
)


def ways(scale: Scale) -> list[tuple[str, str]]:
    """Augmentation and regularisation, the plain way first."""
    kinds = scale.sizes.get("augmentations", (NONE, LIGHT, STRONG))
    return [(augmentation, regular) for augmentation in kinds for regular in (NONE, REGULAR)]


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every way on every size, and plain training beyond."""
    sizes = setup.scale.sizes
    most = min(sizes["most"], setup.facts.images // setup.facts.classes)
    shares, beyond = sizes.get("shares", SHARES), sizes.get("beyond", BEYOND)
    grid = [(way, share) for share in shares for way in ways(setup.scale)] + [(PLAIN, share) for share in beyond]
    families = [
        {"augmentation": way[0], "regularisation": way[1], "per class": max(1, round(share * most))}
        for way, share in grid
    ]

    def training(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        count = int(str(place["per class"]))
        return made(setup, str(place["augmentation"]), str(place["regularisation"]), count, rate, seed)

    return tuned(setup, results, families, training)


def made(setup: Setup, augmentation: str, regular: str, count: int, rate: float, seed: int) -> Recipe:
    """One way to train on so many pictures of each class."""
    rates = {"dropout": DROPPED, "stochastic_depth": DROPPED} if regular == REGULAR else {"dropout": 0.0}
    model = vit(setup, **rates)
    plain = recipe(setup, model, rate, seed, data=replace(setup.data, per_class=count, drawn=seed))
    return replace(
        plain,
        augment=augmented(setup, model.image_size, augmentation),
        objective=Classification(loss=setup.facts.loss, mixup=MIXUP if augmentation == STRONG else 0.0),
        optimizer=AdamW(lr=rate, weight_decay=DECAY if regular == REGULAR else 0.0),
    )


def augmented(setup: Setup, size: tuple[int, int], augmentation: str) -> tuple[AugmentSlot, ...]:
    """Small pictures are moved by an eighth, photographs cropped; mirrored in colour alone; RandAugment where it is strong."""
    small = is_small(setup)
    whole = Fit(size, interpolation="bilinear" if small else "bicubic")
    if augmentation == NONE:
        return (whole,)
    turned: tuple[AugmentSlot, ...] = (Flip(),) if setup.facts.channels > 1 else ()
    moved = (
        (whole, PadCrop(max(1, min(size) // 8), "reflect")) if small else (RandomResizedCrop(size, scale=(0.25, 1.0)),)
    )
    return (*moved, *turned, *((RandAugment(2, 9.0),) if augmentation == STRONG else ()))


@dataclass(frozen=True)
class Worth:
    """How many times as many pictures a way is worth, beginning with so many of each class."""

    count: int
    way: tuple[str, str]
    times: float  # 0 where it is worse than the smallest plain run, infinite where it is better than the largest
    low: float
    high: float
    least: float  # what the smallest and the largest plain run are worth
    most: float
    change: Difference  # to plain training on the same pictures


def as_many(curve: Sequence[tuple[int, float]], accuracy: float) -> float:
    """With how many pictures plain training has this accuracy: 0 below the curve, infinitely many beyond it."""
    reached = curve[0]
    if accuracy <= reached[1]:
        return float(reached[0]) if accuracy == reached[1] else 0.0
    for there in curve[1:]:
        if there[1] >= accuracy:
            along = (accuracy - reached[1]) / (there[1] - reached[1])
            return math.exp(math.log(reached[0]) + along * (math.log(there[0]) - math.log(reached[0])))
        if there[1] > reached[1]:  # where more pictures were no better by chance, the line goes straight on
            reached = there
    return math.inf


def worths(results: Sequence[Result], pictures: int | None) -> list[Worth]:
    """For each size on which several ways were tried, what the one that validates best is worth."""
    tests = grouped(results, "per class", "augmentation", "regularisation")
    validations = grouped(results, "per class", "augmentation", "regularisation", number="validation")
    plain = {int(str(place[0])): values for place, values in tests.items() if place[1:] == PLAIN}
    curve = [(count, fmean(plain[count])) for count in sorted(plain)]
    found = []
    for count in plain:
        tried = {place: fmean(v) for place, v in validations.items() if place[0] == count and place[1:] != PLAIN}
        if not tried:
            continue
        best = max(tried, key=lambda place: tried[place])
        if best not in tests:
            continue
        reached = estimate(tests[best], pictures)
        change = difference(tests[best], plain[count], pictures)
        times, low, high = (
            as_many(curve, value) / count if math.isfinite(value) else math.nan
            for value in (reached.mean, reached.low, reached.high)
        )
        ends = (curve[0][0] / count, curve[-1][0] / count)
        found.append(Worth(count, (str(best[1]), str(best[2])), times, low, high, *ends, change))
    return found


def read(results: Sequence[Result], scale: Scale) -> Answer:
    pictures = judged_on(results)
    tests = grouped(results, "per class", "augmentation", "regularisation")
    known = worths(results, pictures)
    if not known:
        return too_early(["plain training and another way on the same pictures"], LIMITS)
    finding, agreement = found(known)
    by_way: dict[tuple[Any, ...], dict[int, Sequence[float]]] = {}
    for place, values in tests.items():
        by_way.setdefault(place[1:], {})[int(str(place[0]))] = values
    counts = sorted({count for values in by_way.values() for count in values})
    chosen = {(each.count, each.way): each for each in known}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("augmentation", "regularisation", *(f"{count:,} a class" for count in counts)),
        rows=tuple(
            (*map(str, way), *(cell(values.get(count), pictures, chosen.get((count, way))) for count in counts))
            for way, values in by_way.items()
        ),
        charts=(
            Chart(
                "Test accuracy as the training set grows",
                "lines",
                tuple(series(named(way), {**dict(sorted(values.items()))}, pictures) for way, values in by_way.items()),
                "training pictures of each class",
                "top-1 on test pictures",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=tuple(
            f"With {each.count:,} pictures of each class, {named(each.way)} validates best of what was tried beside plain "
            f"training, and is worth {times(each)} the pictures."
            for each in known
        ),
    )


def found(known: Sequence[Worth]) -> tuple[str, Agreement]:
    """What the best way is worth where data is scarcest, and where it is not."""
    first, rest = known[0], known[1:]
    also = "".join(f", with {each.count:,} {times(each)}" for each in rest)
    if not first.change.clear:
        return (
            f"With {first.count:,} pictures of each class augmentation and regularisation make no clear difference to plain "
            f"training at this scale: {named(first.way)} is worth {times(first)} the pictures{also}.",
            "no difference",
        )
    if first.change.mean < 0:
        return (
            f"Augmentation and regularisation are no substitute for data here: with {first.count:,} pictures of each class "
            f"even the best of them, {named(first.way)}, is clearly worse than plain training ({points(first.change)}){also}.",
            "disagrees",
        )
    short = first.high < TEN
    missed = ", short of the order of magnitude that the authors found" if short else ""
    return (
        f"Augmentation and regularisation stand in for data: with {first.count:,} pictures of each class the best of them, "
        f"{named(first.way)}, is worth {times(first)} the pictures{also}{missed}.",
        "disagrees" if short else "agrees",
    )


def named(way: Sequence[Any]) -> str:
    """A way in words."""
    if tuple(way) == PLAIN:
        return "plain"
    augmentation = "no augmentation" if way[0] == NONE else f"{way[0]} augmentation"
    return augmentation if way[1] == NONE else f"{augmentation} with regularisation"


def times(each: Worth) -> str:
    """3.1 times (2.5 to 3.8); what lies beyond the plain curve is told by the curve's end."""
    if each.times == 0:
        return f"less than {each.least:.1f} times"
    if math.isinf(each.times):
        return f"more than {each.most:.1f} times"
    if math.isnan(each.low):
        return f"{each.times:.1f} times"
    low = f"{each.low:.1f}" if each.low else f"less than {each.least:.1f}"
    high = f"more than {each.most:.1f}" if math.isinf(each.high) else f"{each.high:.1f}"
    return f"{each.times:.1f} times ({low} to {high})"


def cell(values: Sequence[float] | None, pictures: int | None, chosen: Worth | None) -> str:
    """An accuracy in the table, with what it is worth where it is the best."""
    return told(values, pictures) + (f", {times(chosen)}" if chosen is not None else "")


STUDY = Study(
    name="regularisation",
    question="Are augmentation and regularisation a substitute for more data?",
    where="after the paper: “How to train your ViT?” (Steiner et al. 2021)",
    found=(
        "With more compute, augmentation and regularisation give the same performance as an order of magnitude more training "
        "data (Steiner et al. 2021, abstract)."
    ),
    scales={
        "test": Scale(
            "digits", 0.3, "one core", seeds=1, steps=3, batch=32,
            sizes={
                "width": 16, "depth": 1, "heads": 2, "patch": 4, "most": 40, "augmentations": (NONE, STRONG),
                "shares": (1 / 4,), "beyond": (1.0,),
            },
        ),
        # Width 64, depth 4, 16 patches: 1,000 pictures/s on a core; RandAugment makes 1,600/s, so 620/s with it. 1,000 steps
        # × 128 = 128,000 pictures: 128 s, strong 206 s, and 18 s to begin and to judge. A seed: 14 × 146 s + 6 × 224 s =
        # 3,390 s. Two seeds, one rate, on two cores: 57 min. From 200 to 3,200 pictures of each class.
        "laptop": Scale(
            "cifar-10", 57, "two cores", seeds=2, steps=1_000, batch=128,
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 8, "most": 3_200},
        ),
        # Ti/16 at 224², 1,500 pictures/s with bf16: 20,000 steps × 256 = 57 min; 20 ways and sizes, two tries and three seeds
        # each.
        "gpu": Scale(
            "imagenet", 5_700, "one GPU", seeds=3, steps=20_000, batch=256, rates=(5e-4, 1e-3),
            sizes={
                "width": 192, "depth": 12, "heads": 3, "patch": 16, "image": 224, "most": 1_280, "precision": "bf16",
                "warmup": 2_000,
            },
        ),
        # B/16 on ImageNet-21k, 30 epochs of 14 M pictures in batches of 4,096: 102,500 steps at 7,000 pictures/s on eight
        # GPUs, 17 h a run; 20 ways and sizes, one rate, two seeds.
        "cluster": Scale(
            "imagenet-21k", 40_800, "8 GPUs", seeds=2, steps=102_500, batch=4096,
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "most": 1_000, "precision": "bf16",
                "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
)  # fmt: skip
