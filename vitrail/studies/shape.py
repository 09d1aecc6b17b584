"""Accuracy gained per compute by scaling depth, width, MLP, heads, patch size or everything (figure 8, appendix D.2).

    vitrail paper run shape --scale laptop

One base model, and models that differ from it in one dimension, or in depth and width together. Compute is counted on the models
(`vitrail describe`), relative to the base. The learning rate of each model is tuned with the same number of runs.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from vitrail.models.base import TokenConfig
from vitrail.studies import base
from vitrail.studies.intervals import NO_VALUE, Scores, estimate_difference, format_points
from vitrail.studies.study import Answer, Cell, Finding, GridPoint, Results, Study, StudyScale, StudySetup

BASE, DEPTH, WIDTH, MLP, HEADS, PATCH, ALL = "base", "depth", "width", "MLP", "heads", "patch size", "everything"
DIMENSIONS = (DEPTH, WIDTH, MLP, HEADS, PATCH, ALL)
LIMITS = (
    "A small base and short training on few images: larger models are not trained for longer, so what a dimension gives after "
    "many epochs is not seen. The paper goes up to 64 layers, and scores 5-shot accuracy on ImageNet."
)
MIN_COST_RATIO = 1.2  # smallest compute relative to the base for which a gain per doubling is computed


class ScaledModel(NamedTuple):
    """Grid point of a model: what was scaled, to which value, and its compute relative to the base."""

    dimension: str
    value: str
    cost: float


def list_models(setup: StudySetup) -> list[tuple[GridPoint, TokenConfig]]:
    """Return the grid point and the configuration of each model, the base first."""
    sizes = setup.scale.sizes
    ratio = sizes["width"] // sizes["heads"]
    changes: list[tuple[str, str, dict[str, Any]]] = [
        (BASE, f"{sizes['depth']} layers of {sizes['width']}", {}),
        *((DEPTH, f"{n} layers", {"depth": n}) for n in sizes["depths"]),
        *((WIDTH, f"{n} wide", {"width": n, "mlp_width": 4 * sizes["width"]}) for n in sizes["widths"]),
        *((MLP, f"{n}", {"mlp_width": n}) for n in sizes["mlps"]),
        *((HEADS, f"{n}", {"heads": n}) for n in sizes["head_counts"]),
        *((PATCH, f"{n} pixels", {"patch": n}) for n in sizes["patches"]),
        *((ALL, f"{n} layers of {w}", {"depth": n, "width": w, "heads": w // ratio}) for n, w in sizes["all"]),
    ]
    models = [(name, value, base.configure_study_vit(setup, **change)) for name, value, change in changes]
    cost = base.count_macs(models[0][2])
    return [
        ({"dimension": name, "value": value, "compute": round(base.count_macs(model) / cost, 3)}, model)
        for name, value, model in models
    ]


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every model, each with its own tuning."""
    return base.plan_models(setup, results, list_models(setup))


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    known = Scores(results, "dimension", "value", "compute")
    order = (BASE, *DIMENSIONS)
    models = sorted((ScaledModel(*point) for point in known), key=lambda model: (order.index(model[0]), model.cost))
    tests = Scores(results, "dimension", "value", "compute", order=models)
    there = [*(model.dimension for model in models if model.dimension == BASE), *select_comparable(tests)]
    if missing := [name for name in (BASE, DEPTH, WIDTH) if name not in there]:
        return base.incomplete_answer(missing, LIMITS)
    by_cost = sorted(models, key=lambda model: model.cost)
    lines = {name: {model: model.cost for model in by_cost if model.dimension in (BASE, name)} for name in DIMENSIONS}
    lines = {name: line for name, line in lines.items() if len(set(line.values())) > 1}
    title = "Test accuracy against compute relative to the base"
    return Answer(
        *formulate_finding(tests),
        columns=("scaled", "to", "compute", "learning rate", "test", "more than the base", "per doubling"),
        rows=tuple(
            (
                model.dimension,
                model.value,
                f"×{model.cost:.2g}",
                *tests.format_row(model, models[0]),
                format_gain(gains_per_doubling(tests, model)) if model.cost >= MIN_COST_RATIO else NO_VALUE,
            )
            for model in models
        ),
        charts=(tests.lines(title, lines, "compute per image, times the base's"),),
        limits=LIMITS,
        notes=describe_returns(tests),
    )


def gains_per_doubling(tests: Scores, model: ScaledModel) -> list[float]:
    """Return each seed's gain on the base, the first model, per doubling of compute."""
    doublings, baseline = math.log2(model.cost), tests[next(iter(tests))]
    return [(mine - before) / doublings for mine, before in zip(tests[model], baseline, strict=False)]


def format_gain(gains: Sequence[float]) -> str:
    return format_points(estimate_difference(gains, [0.0] * len(gains)))


def select_comparable(models: Iterable[ScaledModel]) -> dict[str, ScaledModel]:
    """Return, for every dimension that costs compute, the model nearest to the compute that all of them reach.

    Gains shrink as compute grows, so models of different compute are not comparable.
    """
    costly: dict[str, list[ScaledModel]] = {}
    for model in models:
        if model.dimension != BASE and model.cost >= MIN_COST_RATIO:
            costly.setdefault(model.dimension, []).append(model)
    reached = min((max(model.cost for model in group) for group in costly.values()), default=1.0)
    return {name: min(group, key=lambda model: abs(math.log(model.cost / reached))) for name, group in costly.items()}


def formulate_finding(tests: Scores) -> Finding:
    """Rank dimensions at about the same compute by gain per doubling, and compare depth with width as in the paper."""
    baseline, top = next(iter(tests)), select_comparable(tests)
    gains = {name: gains_per_doubling(tests, model) for name, model in top.items()}
    order = sorted(gains, key=lambda name: -fmean(gains[name]))
    first, last = order[0], order[-1]
    most, least = format_gain(gains[first]), format_gain(gains[last])
    spent = [f"{cost:.2g}" for cost in sorted(model.cost for model in top.values())]
    at = spent[0] if spent[0] == spent[-1] else f"{spent[0]} to {spent[-1]}"
    ends = ("gains most", "least") if fmean(gains[first]) >= 0 else ("loses least", "most")
    ranked = f"for each doubling of compute, at {at} times the base's, {first} {ends[0]}, {most}, and {last} {ends[1]}, {least}"
    changes = {name: tests.subtract(model, baseline) for name, model in top.items()}
    if not any(change.is_gain for change in changes.values()):
        worse = [f"{name} {format_points(change)}" for name, change in changes.items() if change.is_clear]
        if worse:
            harm = f"Nothing gains on the base at this scale, and scaling does harm: {', '.join(worse)}"
            return f"{harm}; {ranked}.", "disagrees"
        return f"No difference at this scale: nothing gains clearly on the base; {ranked}.", "no difference"
    apart = estimate_difference(gains[DEPTH], gains[WIDTH])
    by, scaled = format_points(apart), f"Of what was scaled, {ranked}"
    if math.isnan(apart.low):
        return f"{scaled}; too few seeds to tell depth from width, {by} apart.", "unclear"
    if not apart.is_clear:
        return f"{scaled}; depth and width do not differ clearly: {by}.", "unclear"
    if apart.is_loss:
        return f"{scaled}; depth gains less than width: {by}.", "disagrees"
    over = [name for name in gains if estimate_difference(gains[name], gains[DEPTH]).is_gain]
    under = [name for name in gains if estimate_difference(gains[WIDTH], gains[name]).is_gain]
    but = [f"{' and '.join(over)} more than depth"] if over else []
    but += [f"{' and '.join(under)} less than width"] if under else []
    more = f"depth gains more than width, by {by}" + (f", but {', '.join(but)}" if but else "")
    return f"{scaled}; {more}.", "unclear" if but else "agrees"


def describe_returns(tests: Scores) -> tuple[str, ...]:
    """Return notes on the gain of each step in depth, and of smaller patches."""

    def step(model: ScaledModel, before: ScaledModel) -> str:
        return format_points(estimate_difference(tests[model], tests[before]))

    baseline, *others = tests
    notes = []
    deep = [model for model in others if model.dimension == DEPTH]
    if len(deep) > 1:
        more = f"{step(deep[-1], deep[0])} from there to {deep[-1].value}"
        notes.append(f"Depth: {step(deep[0], baseline)} to {deep[0].value}, and {more}.")
    finer = [model for model in others if model.dimension == PATCH and model.cost >= MIN_COST_RATIO]
    if finer:
        notes.append(f"Patches of {finer[-1].value}: {step(finer[-1], baseline)} in a model as deep and as wide.")
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
        "test": base.on_one_core(seeds=1, steps=3, sizes=base.vit_sizes(
            16, 1, 2, 4, depths=(2,), widths=(32,), mlps=(128,), head_counts=(4,), patches=(2,), all=((2, 24),))),
        # 16 tokens, width 64, depth 4: 900 images/s on an idle core, 2,800/s without training; others in proportion as measured.
        # 600 steps × 64 = 38,400 images, and validation and test cost as much as 6,000 more. Seconds for 1,000 images: base and
        # heads 1.1 each, depth 2.2 and 4.6, width 1.7 and 2.4, MLP 1.6 and 2.4, patches 0.5 and 2.8, everything 1.6 and 2.4: 25.5
        # for all 13. × 44.4 × (2 tuning runs + 3 seeds) = 5,660 s, and 65 × 8 s to start = 6,180 s; two at a time 52 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=52, steps=600, lrs=(1e-3, 3e-3), sizes=base.vit_sizes(
            64, 4, 4, 7, depths=(8, 16), widths=(96, 128), mlps=(512, 1024), head_counts=(2, 8), patches=(14, 4),
            all=((5, 80), (6, 96)))),
        # 16 tokens of CIFAR-10 at width 192 and depth 8, estimated with 30,000 images/s: 10,000 steps × 256 take 85 s, and
        # 30 s more. 13 models cost 38 times the base: 5 × (38 × 85 + 13 × 30) s = 302 min.
        "gpu": base.on_gpu(minutes=302, lrs=(3e-4, 1e-3), sizes=base.vit_sizes(
            192, 8, 3, 8, depths=(16, 32), widths=(288, 384), mlps=(1536, 3072), head_counts=(6, 12), patches=(16, 4),
            all=((10, 256), (12, 320)), precision="bf16", warmup=1_000)),
        # 49 patches of 32 pixels at B's width and 8 layers, with table 3's settings for ImageNet-21k. 30 epochs of 14 M:
        # 102,500 steps, 4 h, estimated with 30,000 images/s on eight GPUs. 14 models that cost 43 times the base in all, at
        # the paper's learning rate.
        "cluster": base.on_cluster(minutes=10_300, sizes=base.vit_sizes(
            768, 8, 12, 32, depths=(16, 32, 64), widths=(1152, 1536), mlps=(6144, 12288), head_counts=(6, 24),
            patches=(16,), all=((10, 960), (12, 1152)), **base.TABLE_3)),
    },
    plan=plan, interpret=interpret_results,
)  # fmt: skip
