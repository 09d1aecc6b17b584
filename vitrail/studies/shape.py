"""Deeper, wider, more heads, smaller patches, everything: what each buys for its compute (appendix D, figure 8).

    vitrail paper run shape --scale laptop

One base model, and models that differ from it in one dimension, or in depth and width together. What they cost is counted on the
models (`vitrail describe`), relative to the base. Each has its rate tuned by as many tries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vitrail.recipe import Recipe
from vitrail.studies.accuracies import NONE_YET, judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import macs, recipe, vit
from vitrail.studies.intervals import difference, grouped, points
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import lacking, too_early

BASE, DEPTH, WIDTH, MLP, HEADS, PATCH, ALL = "base", "depth", "width", "MLP", "heads", "patch size", "everything"
DIMENSIONS = (DEPTH, WIDTH, MLP, HEADS, PATCH, ALL)
LIMITS = (
    "A small base and short training on few pictures: larger models are not trained for longer, so what a dimension gives after "
    "many epochs is not seen. The paper goes up to 64 layers, and scores 5-shot accuracy on ImageNet."
)
WORTH = 1.2  # times the base's compute, from which on there is something to divide a gain by


@dataclass(frozen=True)
class Shape:
    """A model of the study as its results tell it."""

    dimension: str
    value: str
    compute: float  # times the base's
    tests: Sequence[float]  # by seed


def places(setup: Setup) -> list[tuple[dict[str, Setting], dict[str, Any]]]:
    """Where each model lies in the grid, and how it differs from the base."""
    sizes = setup.scale.sizes
    ratio = sizes["width"] // sizes["heads"]
    changes: list[tuple[str, str, dict[str, Any]]] = [(BASE, f"{sizes['depth']} layers of {sizes['width']}", {})]
    changes += [(DEPTH, f"{n} layers", {"depth": n}) for n in sizes["depths"]]
    changes += [(WIDTH, f"{n} wide", {"width": n, "mlp_width": 4 * sizes["width"]}) for n in sizes["widths"]]
    changes += [(MLP, f"{n}", {"mlp_width": n}) for n in sizes["mlps"]]
    changes += [(HEADS, f"{n}", {"heads": n}) for n in sizes["head_counts"]]
    changes += [(PATCH, f"{n} pixels", {"patch": n}) for n in sizes["patches"]]
    changes += [
        (ALL, f"{deep} layers of {wide}", {"depth": deep, "width": wide, "heads": wide // ratio})
        for deep, wide in sizes["all"]
    ]
    cost = macs(vit(setup))
    return [
        ({"dimension": name, "value": value, "compute": round(macs(vit(setup, **change)) / cost, 3)}, change)
        for name, value, change in changes
    ]


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every model with its own tries."""
    known = places(setup)
    models = {(place["dimension"], place["value"]): vit(setup, **change) for place, change in known}

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, models[place["dimension"], place["value"]], rate, seed)

    return tuned(setup, results, [place for place, _ in known], made)


def read(results: Sequence[Result], scale: Scale) -> Answer:
    pictures = judged_on(results)
    shapes = [
        Shape(str(name), str(value), float(compute or 0), tests)
        for (name, value, compute), tests in grouped(results, "dimension", "value", "compute").items()
    ]
    shapes.sort(key=lambda shape: ((BASE, *DIMENSIONS).index(shape.dimension), shape.compute))
    there = [BASE for shape in shapes if shape.dimension == BASE] + list(comparable(shapes))
    if missing := lacking([(name,) for name in there], (BASE, DEPTH, WIDTH)):
        return too_early(missing, LIMITS)
    base = shapes[0]
    finding, agreement = found(shapes, pictures)
    lines = {name: [s for s in shapes if s.dimension in (BASE, name)] for name in DIMENSIONS}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("scaled", "to", "compute", "rate", "test", "more than the base", "per doubling"),
        rows=tuple(
            (
                shape.dimension,
                shape.value,
                f"×{shape.compute:.2g}",
                rate_of(results, {"dimension": shape.dimension, "value": shape.value}),
                told(shape.tests, pictures),
                told_difference(difference(shape.tests, base.tests, pictures) if shape is not base else None),
                told_gain(gain(shape, base)) if shape.compute >= WORTH else NONE_YET,
            )
            for shape in shapes
        ),
        charts=(
            Chart(
                "Test accuracy against compute relative to the base",
                "lines",
                tuple(
                    series(name, {s.compute: s.tests for s in sorted(line, key=lambda s: s.compute)}, pictures)
                    for name, line in lines.items()
                    if len({s.compute for s in line}) > 1
                ),
                x_name="compute of a picture, times the base's",
                y_name="top-1",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=returns(shapes),
    )


def gain(shape: Shape, base: Shape) -> list[float]:
    """What each seed gains on the base for each doubling of its compute."""
    doublings = math.log2(shape.compute)
    return [(mine - before) / doublings for mine, before in zip(shape.tests, base.tests, strict=False)]


def told_gain(gains: Sequence[float]) -> str:
    return points(difference(gains, [0.0] * len(gains)))


def comparable(shapes: Sequence[Shape]) -> dict[str, Shape]:
    """Of every dimension that costs something, the model nearest to the compute that all of them reach.

    Gains shrink as compute grows: a dimension that was scaled further would look worse for it.
    """
    costly: dict[str, list[Shape]] = {}
    for shape in shapes:
        if shape.dimension != BASE and shape.compute >= WORTH:
            costly.setdefault(shape.dimension, []).append(shape)
    reached = min((max(shape.compute for shape in each) for each in costly.values()), default=1.0)
    return {name: min(each, key=lambda shape: abs(math.log(shape.compute / reached))) for name, each in costly.items()}


def found(shapes: Sequence[Shape], pictures: int | None) -> tuple[str, Agreement]:
    """Dimensions at about the same compute by what a doubling of it gains; depth and width among them as in the paper."""
    base, top = shapes[0], comparable(shapes)
    gains = {name: gain(shape, base) for name, shape in top.items()}
    order = sorted(gains, key=lambda name: -fmean(gains[name]))
    first, last = order[0], order[-1]
    most, least = told_gain(gains[first]), told_gain(gains[last])
    spent = [f"{shape.compute:.2g}" for shape in sorted(top.values(), key=lambda shape: shape.compute)]
    at = spent[0] if spent[0] == spent[-1] else f"{spent[0]} to {spent[-1]}"
    ends = ("gains most", "least") if fmean(gains[first]) >= 0 else ("loses least", "most")
    ranked = f"for each doubling of compute, at {at} times the base's, {first} {ends[0]}, {most}, and {last} {ends[1]}, {least}"
    apart = difference(gains[DEPTH], gains[WIDTH])
    changes = {name: difference(shape.tests, base.tests, pictures) for name, shape in top.items()}
    if not any(change.clear and change.mean > 0 for change in changes.values()):
        worse = [f"{name} {points(change)}" for name, change in changes.items() if change.clear]
        if worse:
            said = f"Nothing gains on the base at this scale, and scaling does harm: {', '.join(worse)}"
            return f"{said}; {ranked}.", "disagrees"
        return f"No difference at this scale: nothing gains clearly on the base; {ranked}.", "no difference"
    if math.isnan(apart.low):
        said = f"too few seeds to tell depth from width, {points(apart)} apart"
        return f"Of what was scaled, {ranked}; {said}.", "unclear"
    if not apart.clear:
        return f"Of what was scaled, {ranked}; depth and width do not differ clearly: {points(apart)}.", "unclear"
    if apart.mean > 0:
        over = [name for name in gains if surely_more(gains[name], gains[DEPTH])]
        under = [name for name in gains if surely_more(gains[WIDTH], gains[name])]
        but = [f"{' and '.join(over)} more than depth"] if over else []
        but += [f"{' and '.join(under)} less than width"] if under else []
        said = f"depth gains more than width, by {points(apart)}" + (f", but {', '.join(but)}" if but else "")
        return f"Of what was scaled, {ranked}; {said}.", "unclear" if but else "agrees"
    return f"Of what was scaled, {ranked}; depth gains less than width: {points(apart)}.", "disagrees"


def surely_more(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether one gain is clearly larger than another."""
    found = difference(first, second)
    return found.clear and found.mean > 0


def returns(shapes: Sequence[Shape]) -> tuple[str, ...]:
    """How much of depth's gain comes with its first step, where it has two; and what smaller patches do."""
    base = shapes[0]
    deep = [shape for shape in shapes if shape.dimension == DEPTH]
    notes = []
    if len(deep) > 1:
        first = difference(deep[0].tests, base.tests)
        more = difference(deep[-1].tests, deep[0].tests)
        notes.append(f"Depth: {points(first)} to {deep[0].value}, and {points(more)} from there to {deep[-1].value}.")
    finer = [shape for shape in shapes if shape.dimension == PATCH and shape.compute >= WORTH]
    if finer:
        notes.append(
            f"Patches of {finer[-1].value}: {points(difference(finer[-1].tests, base.tests))} in a model as deep and as wide."
        )
    return tuple(notes)


STUDY = Study(
    name="shape",
    question="Which dimension of the model is best scaled: depth, width, MLP, heads, patch size, or everything?",
    where="figure 8, appendix D.2",
    found=(
        "Depth gives the biggest improvements, clearly visible up to 64 layers with diminishing returns after 16; width seems to "
        "give the smallest changes; smaller patches give surprisingly robust improvements without new parameters; scaling "
        "everything in proportion gives robust improvements (5-shot on ImageNet, in a figure; no number is given)."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=1, steps=3, batch=32,
            sizes={
                "width": 16, "depth": 1, "heads": 2, "patch": 4, "depths": (2,), "widths": (32,), "mlps": (128,),
                "head_counts": (4,), "patches": (2,), "all": ((2, 24),),
            },
        ),
        # 16 tokens, width 64, depth 4: 900 pictures/s on a free core, 2,800/s without training; others in proportion as
        # measured. 600 steps × 64 = 38,400 pictures, and validation and test cost as much as 6,000 more. Seconds for 1,000
        # pictures: base and heads 1.1 each, depth 2.2 and 4.6, width 1.7 and 2.4, MLP 1.6 and 2.4, patches 0.5 and 2.8,
        # everything 1.6 and 2.4: 25.5 for all 13. × 44.4 × (2 tries + 3 seeds) = 5,660 s, and 65 × 8 s to begin = 6,180 s;
        # two at a time 52 min.
        "laptop": Scale(
            "fashion-mnist", 52, "two cores", seeds=3, steps=600, batch=64, rates=(1e-3, 3e-3),
            sizes={
                "width": 64, "depth": 4, "heads": 4, "patch": 7, "depths": (8, 16), "widths": (96, 128), "mlps": (512, 1024),
                "head_counts": (2, 8), "patches": (14, 4), "all": ((5, 80), (6, 96)),
            },
        ),
        # 16 tokens of CIFAR-10 at width 192 and depth 8, reckoned with 30,000 pictures/s: 10,000 steps × 256 take 85 s, and
        # 30 s more. 13 models cost 38 times the base: 5 × (38 × 85 + 13 × 30) s = 302 min.
        "gpu": Scale(
            "cifar-10", 302, "one GPU", seeds=3, steps=10_000, batch=256, rates=(3e-4, 1e-3),
            sizes={
                "width": 192, "depth": 8, "heads": 3, "patch": 8, "depths": (16, 32), "widths": (288, 384), "mlps": (1536, 3072),
                "head_counts": (6, 12), "patches": (16, 4), "all": ((10, 256), (12, 320)), "precision": "bf16", "warmup": 1_000,
            },
        ),
        # 49 patches of 32 pixels at B's width and 8 layers, with table 3's settings for ImageNet-21k. 30 epochs of 14 M:
        # 102,500 steps, 4 h, reckoned with 30,000 pictures/s on eight GPUs. 14 models that cost 43 times the base in all, at
        # the paper's rate.
        "cluster": Scale(
            "imagenet-21k", 10_300, "8 GPUs", seeds=1, steps=102_500, batch=4096,
            sizes={
                "width": 768, "depth": 8, "heads": 12, "patch": 32, "depths": (16, 32, 64), "widths": (1152, 1536),
                "mlps": (6144, 12288), "head_counts": (6, 24), "patches": (16,), "all": ((10, 960), (12, 1152)), "image": 224,
                "dropout": 0.1, "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
)  # fmt: skip
