"""Accuracy gained per compute by scaling depth, width, MLP, heads, patch size or everything (figure 8, appendix D.2).

    vitrail paper run shape --scale laptop

One base model, and models that differ from it in one dimension, or in depth and width together. Compute is counted on the models
(`vitrail describe`), relative to the base. The learning rate of each model is tuned with the same number of runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vitrail.studies.base import (
    build_recipe,
    configure_study_vit,
    count_macs,
    find_missing,
    incomplete_answer,
    plan_tuned,
)
from vitrail.studies.intervals import (
    NO_VALUE,
    build_series,
    count_test_images,
    estimate_difference,
    find_lr,
    format_accuracy,
    format_difference,
    format_points,
    group_values,
)
from vitrail.studies.study import (
    Agreement,
    Answer,
    Cell,
    CellResult,
    Chart,
    GridPoint,
    Setting,
    Study,
    StudyScale,
    StudySetup,
)
from vitrail.training.recipe import Recipe

BASE, DEPTH, WIDTH, MLP, HEADS, PATCH, ALL = "base", "depth", "width", "MLP", "heads", "patch size", "everything"
DIMENSIONS = (DEPTH, WIDTH, MLP, HEADS, PATCH, ALL)
LIMITS = (
    "A small base and short training on few images: larger models are not trained for longer, so what a dimension gives after "
    "many epochs is not seen. The paper goes up to 64 layers, and scores 5-shot accuracy on ImageNet."
)
MIN_COST_RATIO = 1.2  # smallest compute relative to the base for which a gain per doubling is computed


@dataclass(frozen=True)
class ScaledModel:
    """A model of the study with its relative cost and scores."""

    dimension: str
    value: str
    cost: float  # relative to the base
    scores: Sequence[float]  # by seed


def list_shapes(setup: StudySetup) -> list[tuple[dict[str, Setting], dict[str, Any]]]:
    """Return the grid point of each model and its differences from the base."""
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
    cost = count_macs(configure_study_vit(setup))
    return [
        (
            {
                "dimension": name,
                "value": value,
                "compute": round(count_macs(configure_study_vit(setup, **change)) / cost, 3),
            },
            change,
        )
        for name, value, change in changes
    ]


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return the cells of every model, each with its own tuning."""
    known = list_shapes(setup)
    models = {(point["dimension"], point["value"]): configure_study_vit(setup, **change) for point, change in known}

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        return build_recipe(setup, models[point["dimension"], point["value"]], lr, seed)

    return plan_tuned(setup, results, [point for point, _ in known], make_recipe)


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    n_images = count_test_images(results)
    shapes = [
        ScaledModel(str(name), str(value), float(compute or 0), tests)
        for (name, value, compute), tests in group_values(results, "dimension", "value", "compute").items()
    ]
    shapes.sort(key=lambda shape: ((BASE, *DIMENSIONS).index(shape.dimension), shape.cost))
    there = [BASE for shape in shapes if shape.dimension == BASE] + list(select_comparable(shapes))
    if missing := find_missing([(name,) for name in there], (BASE, DEPTH, WIDTH)):
        return incomplete_answer(missing, LIMITS)
    base = shapes[0]
    finding, agreement = formulate_finding(shapes, n_images)
    lines = {name: [s for s in shapes if s.dimension in (BASE, name)] for name in DIMENSIONS}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("scaled", "to", "compute", "rate", "test", "more than the base", "per doubling"),
        rows=tuple(
            (
                shape.dimension,
                shape.value,
                f"×{shape.cost:.2g}",
                find_lr(results, {"dimension": shape.dimension, "value": shape.value}),
                format_accuracy(shape.scores, n_images),
                format_difference(
                    estimate_difference(shape.scores, base.scores, n_images) if shape is not base else None
                ),
                format_gain(gains_per_doubling(shape, base)) if shape.cost >= MIN_COST_RATIO else NO_VALUE,
            )
            for shape in shapes
        ),
        charts=(
            Chart(
                "Test accuracy against compute relative to the base",
                "lines",
                tuple(
                    build_series(name, {s.cost: s.scores for s in sorted(line, key=lambda s: s.cost)}, n_images)
                    for name, line in lines.items()
                    if len({s.cost for s in line}) > 1
                ),
                x_name="compute per image, times the base's",
                y_name="top-1",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=describe_returns(shapes),
    )


def gains_per_doubling(shape: ScaledModel, base: ScaledModel) -> list[float]:
    """Return each seed's gain on the base per doubling of compute."""
    doublings = math.log2(shape.cost)
    return [(mine - before) / doublings for mine, before in zip(shape.scores, base.scores, strict=False)]


def format_gain(gains: Sequence[float]) -> str:
    return format_points(estimate_difference(gains, [0.0] * len(gains)))


def select_comparable(shapes: Sequence[ScaledModel]) -> dict[str, ScaledModel]:
    """Return, for every dimension that costs compute, the model nearest to the compute that all of them reach.

    Gains shrink as compute grows, so models of different compute are not comparable.
    """
    costly: dict[str, list[ScaledModel]] = {}
    for shape in shapes:
        if shape.dimension != BASE and shape.cost >= MIN_COST_RATIO:
            costly.setdefault(shape.dimension, []).append(shape)
    reached = min((max(shape.cost for shape in models) for models in costly.values()), default=1.0)
    return {name: min(models, key=lambda shape: abs(math.log(shape.cost / reached))) for name, models in costly.items()}


def formulate_finding(shapes: Sequence[ScaledModel], n_images: int | None) -> tuple[str, Agreement]:
    """Rank dimensions at about the same compute by gain per doubling, and compare depth with width as in the paper."""
    base, top = shapes[0], select_comparable(shapes)
    gains = {name: gains_per_doubling(shape, base) for name, shape in top.items()}
    order = sorted(gains, key=lambda name: -fmean(gains[name]))
    first, last = order[0], order[-1]
    most, least = format_gain(gains[first]), format_gain(gains[last])
    spent = [f"{shape.cost:.2g}" for shape in sorted(top.values(), key=lambda shape: shape.cost)]
    at = spent[0] if spent[0] == spent[-1] else f"{spent[0]} to {spent[-1]}"
    ends = ("gains most", "least") if fmean(gains[first]) >= 0 else ("loses least", "most")
    ranked = f"for each doubling of compute, at {at} times the base's, {first} {ends[0]}, {most}, and {last} {ends[1]}, {least}"
    apart = estimate_difference(gains[DEPTH], gains[WIDTH])
    changes = {name: estimate_difference(shape.scores, base.scores, n_images) for name, shape in top.items()}
    if not any(change.is_clear and change.mean > 0 for change in changes.values()):
        worse = [f"{name} {format_points(change)}" for name, change in changes.items() if change.is_clear]
        if worse:
            harm = f"Nothing gains on the base at this scale, and scaling does harm: {', '.join(worse)}"
            return f"{harm}; {ranked}.", "disagrees"
        return f"No difference at this scale: nothing gains clearly on the base; {ranked}.", "no difference"
    if math.isnan(apart.low):
        few = f"too few seeds to tell depth from width, {format_points(apart)} apart"
        return f"Of what was scaled, {ranked}; {few}.", "unclear"
    if not apart.is_clear:
        return (
            f"Of what was scaled, {ranked}; depth and width do not differ clearly: {format_points(apart)}.",
            "unclear",
        )
    if apart.mean > 0:
        over = [name for name in gains if is_clearly_larger(gains[name], gains[DEPTH])]
        under = [name for name in gains if is_clearly_larger(gains[WIDTH], gains[name])]
        but = [f"{' and '.join(over)} more than depth"] if over else []
        but += [f"{' and '.join(under)} less than width"] if under else []
        more = f"depth gains more than width, by {format_points(apart)}" + (f", but {', '.join(but)}" if but else "")
        return f"Of what was scaled, {ranked}; {more}.", "unclear" if but else "agrees"
    return f"Of what was scaled, {ranked}; depth gains less than width: {format_points(apart)}.", "disagrees"


def is_clearly_larger(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return True if the first gain is clearly larger than the second."""
    difference = estimate_difference(first, second)
    return difference.is_clear and difference.mean > 0


def describe_returns(shapes: Sequence[ScaledModel]) -> tuple[str, ...]:
    """Return notes on the gain of each step in depth, and of smaller patches."""
    base = shapes[0]
    deep = [shape for shape in shapes if shape.dimension == DEPTH]
    notes = []
    if len(deep) > 1:
        first = estimate_difference(deep[0].scores, base.scores)
        more = estimate_difference(deep[-1].scores, deep[0].scores)
        notes.append(
            f"Depth: {format_points(first)} to {deep[0].value}, and {format_points(more)} from there to {deep[-1].value}."
        )
    finer = [shape for shape in shapes if shape.dimension == PATCH and shape.cost >= MIN_COST_RATIO]
    if finer:
        notes.append(
            f"Patches of {finer[-1].value}: {format_points(estimate_difference(finer[-1].scores, base.scores))} in a "
            "model as deep and as wide."
        )
    return tuple(notes)


STUDY = Study(
    name="shape",
    question="Which dimension of the model is best scaled: depth, width, MLP, heads, patch size, or everything?",
    reference="figure 8, appendix D.2",
    paper_finding=(
        "Depth gives the biggest improvements, clearly visible up to 64 layers with diminishing returns after 16; width seems to "
        "give the smallest changes; smaller patches give surprisingly robust improvements without new parameters; scaling "
        "everything in proportion gives robust improvements (5-shot on ImageNet, in a figure; no number is given)."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.2, "one core", seeds=1, steps=3, batch=32,
            sizes={
                "width": 16, "depth": 1, "heads": 2, "patch": 4, "depths": (2,), "widths": (32,), "mlps": (128,),
                "head_counts": (4,), "patches": (2,), "all": ((2, 24),),
            },
        ),
        # 16 tokens, width 64, depth 4: 900 images/s on an idle core, 2,800/s without training; others in proportion as
        # measured. 600 steps × 64 = 38,400 images, and validation and test cost as much as 6,000 more. Seconds for 1,000
        # images: base and heads 1.1 each, depth 2.2 and 4.6, width 1.7 and 2.4, MLP 1.6 and 2.4, patches 0.5 and 2.8,
        # everything 1.6 and 2.4: 25.5 for all 13. × 44.4 × (2 tuning runs + 3 seeds) = 5,660 s, and 65 × 8 s to start = 6,180 s;
        # two at a time 52 min.
        "laptop": StudyScale(
            "fashion-mnist", 52, "two cores", seeds=3, steps=600, batch=64, lrs=(1e-3, 3e-3),
            sizes={
                "width": 64, "depth": 4, "heads": 4, "patch": 7, "depths": (8, 16), "widths": (96, 128), "mlps": (512, 1024),
                "head_counts": (2, 8), "patches": (14, 4), "all": ((5, 80), (6, 96)),
            },
        ),
        # 16 tokens of CIFAR-10 at width 192 and depth 8, estimated with 30,000 images/s: 10,000 steps × 256 take 85 s, and
        # 30 s more. 13 models cost 38 times the base: 5 × (38 × 85 + 13 × 30) s = 302 min.
        "gpu": StudyScale(
            "cifar-10", 302, "one GPU", seeds=3, steps=10_000, batch=256, lrs=(3e-4, 1e-3),
            sizes={
                "width": 192, "depth": 8, "heads": 3, "patch": 8, "depths": (16, 32), "widths": (288, 384), "mlps": (1536, 3072),
                "head_counts": (6, 12), "patches": (16, 4), "all": ((10, 256), (12, 320)), "precision": "bf16", "warmup": 1_000,
            },
        ),
        # 49 patches of 32 pixels at B's width and 8 layers, with table 3's settings for ImageNet-21k. 30 epochs of 14 M:
        # 102,500 steps, 4 h, estimated with 30,000 images/s on eight GPUs. 14 models that cost 43 times the base in all, at
        # the paper's learning rate.
        "cluster": StudyScale(
            "imagenet-21k", 10_300, "8 GPUs", seeds=1, steps=102_500, batch=4096,
            sizes={
                "width": 768, "depth": 8, "heads": 12, "patch": 32, "depths": (16, 32, 64), "widths": (1152, 1536),
                "mlps": (6144, 12288), "head_counts": (6, 24), "patches": (16,), "all": ((10, 960), (12, 1152)), "image": 224,
                "dropout": 0.1, "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
)  # fmt: skip
