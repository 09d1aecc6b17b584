"""How far heads look, by layer, in a Vision Transformer and in a hybrid (figures 7 and 11).

    vitrail paper run attention-distance --scale laptop

Both are trained on the same pictures, each at the rate that validates best, and looked at on pictures that they did not learn
from. Mean attention distances are given as a share of what a head has that looks at all patches evenly, so that grids can be
compared: 1 is "everywhere". A head at 0.9 or more is called global here, one at 0.5 or less local; the lowest third of the
layers is called low, the highest third high.

It disagrees with the paper if distance falls with depth, or surely grows by less than 0.05; if there is no global head in the low
layers, or no local one, in most seeds; or if the hybrid's low layers look clearly nearer than the ViT's.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.distance import centres, distances
from vitrail.checkpoints.loading import load
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViT
from vitrail.nn.shape import Grid
from vitrail.recipe import Recipe
from vitrail.run.prepare import prepare
from vitrail.studies.accuracies import judged_on, series, told
from vitrail.studies.base import larger, recipe, vit
from vitrail.studies.intervals import Difference, Estimate, difference, estimate, grouped
from vitrail.studies.quantities import number, signed
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Series, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import lacking, too_early

PURE, HYBRID = "ViT", "hybrid"
GLOBAL, LOCAL = 0.9, 0.5  # of the distance of a head that looks everywhere evenly
LITTLE = 0.05  # of that distance: what grows by less than this does not grow
LOOKED_AT, AT_ONCE = 128, 32  # pictures, and how many of them in a batch
LIMITS = (
    "Grids are small here, so even the nearest patches are not near; heads of an untrained model look everywhere evenly, so "
    "heads that learnt little count as global. The paper looks at ViT-L, trained on far more pictures."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """The two models, each at its best rate."""
    pure = vit(setup)
    stages = setup.scale.sizes["stages"]
    hybrid = Hybrid(tuple(stages), setup.scale.sizes.get("map_patch", 1) * larger(setup))
    if hybrid.stride != pure.embed.stride:
        raise ValueError(
            f"a hybrid of stages {stages} has {hybrid.stride} pixels to a token and the ViT {pure.embed.stride}: use other stages"
        )
    models = {PURE: pure, HYBRID: vit(setup, embed=hybrid)}

    def training(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, models[str(place["model"])], rate, seed)

    return tuned(setup, results, [{"model": name} for name in models], training)


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Mean attention distances of every head, [L][H], over validation pictures."""
    if cell.phase != "final":
        return {}
    model = load(run / "model.safetensors")
    assert isinstance(model, ViT)
    seen = distances(model, looked_at(cell.recipe))
    even = evenly(model.config.shape.grid, model.embed.stride)
    return {"distance": np.round(seen.mean / even, 4).tolist(), "evenly": round(even, 3), "looked at": seen.pictures}


def looked_at(recipe: Recipe) -> list[Tensor]:
    """Validation pictures of a recipe as its model takes them, spread over their order, in batches."""
    pictures = prepare(recipe.data).splits["validation"]
    chosen = np.linspace(0, len(pictures) - 1, min(LOOKED_AT, len(pictures))).round().astype(int)
    pipeline: Preprocessing = recipe.preprocessing
    made = []
    for index in chosen:
        with pictures.open(int(index)) as picture:
            made.append(pipeline(picture))
    return list(torch.stack(made).split(AT_ONCE))


def evenly(grid: Grid, stride: int) -> float:
    """The mean distance of a head that looks at all patches alike."""
    places = centres(grid, stride, torch.device("cpu"))
    return float(torch.cdist(places, places).mean())


def thirds(depth: int) -> tuple[slice, slice]:
    """The lowest and the highest third of the layers, at least one each."""
    third = max(1, math.floor(depth / 3 + 0.5))
    return slice(0, third), slice(depth - third, depth)


class Heads:
    """What the heads of one trained model are like."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.distance = np.array(numbers["distance"])  # [L, H]
        low, high = thirds(len(self.distance))
        self.low, self.high = self.distance[low], self.distance[high]

    @property
    def growth(self) -> float:
        """From the low layers to the high ones."""
        return float(self.high.mean() - self.low.mean())

    @property
    def kinds(self) -> tuple[int, int]:
        """How many heads of the low layers are global, and how many local."""
        return int((self.low >= GLOBAL).sum()), int((self.low <= LOCAL).sum())


def read(results: Sequence[Result], scale: Scale) -> Answer:
    there: dict[str, list[Heads]] = {}
    for result in sorted(results, key=lambda each: int(str(each.at.get("seed", 0)))):
        if result.phase == "final" and "distance" in result.numbers:
            there.setdefault(str(result.at["model"]), []).append(Heads(result.numbers))
    if missing := lacking([(name,) for name in there], (PURE, HYBRID)):
        return too_early(missing, LIMITS)
    tests, pictures = grouped(results, "model"), judged_on(results)
    growth = {name: estimate([heads.growth for heads in there[name]]) for name in (PURE, HYBRID)}
    nearer = difference([float(h.low.mean()) for h in there[HYBRID]], [float(h.low.mean()) for h in there[PURE]])
    everywhere, local = ([int(n) for n in counts] for counts in zip(*(h.kinds for h in there[PURE]), strict=True))
    finding, agreement = found(growth[PURE], everywhere, local, there[PURE][0].low.size, nearer)
    rows = tuple(
        (
            name,
            told(tests.get((name,)), pictures),
            number(estimate([float(h.low.mean()) for h in there[name]])),
            number(estimate([float(h.high.mean()) for h in there[name]])),
            number(growth[name]),
            share([heads.low for heads in there[name]], lambda low: low >= GLOBAL),
            share([heads.low for heads in there[name]], lambda low: low <= LOCAL),
        )
        for name in (PURE, HYBRID)
    )
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("model", "test", "low layers", "high layers", "growth", "global low heads", "local low heads"),
        rows=rows,
        charts=(
            Chart(
                "Mean attention distance of every head",
                "dots",
                tuple(by_head(name, there[name]) for name in (PURE, HYBRID)),
                "layer",
                "of a head that looks everywhere evenly",
                percent=False,
            ),
            Chart(
                "By depth: the mean over heads and seeds",
                "lines",
                tuple(by_layer(name, there[name]) for name in (PURE, HYBRID)),
                "layer",
                "of a head that looks everywhere evenly",
                percent=False,
            ),
        ),
        limits=LIMITS,
        notes=(
            f"It would disagree with the paper if distance grew by less than {LITTLE:g} or fell, if most seeds had no global or "
            "no local head in the ViT's low layers, or if the hybrid's low layers looked clearly nearer.",
        ),
    )


def found(
    growth: Estimate, everywhere: Sequence[int], local: Sequence[int], heads: int, nearer: Difference
) -> tuple[str, Agreement]:
    """Four claims: distance grows with depth, some low heads are global, others local, and the hybrid's low layers are less so.

    `everywhere` and `local` are numbers of heads, by seed.
    """
    grows, falls, little = growth.low > 0, growth.high < 0, growth.high < LITTLE
    depth = "grows" if grows else "falls" if falls else "does not clearly change"
    some = (
        f"of the {heads} heads in its low layers {fmean(everywhere):.1f} attend globally and {fmean(local):.1f} locally on "
        "average over seeds"
    )
    if nearer.clear:
        hybrid = f"the hybrid's low layers look {'farther' if nearer.mean > 0 else 'nearer'} ({signed(nearer)})"
    else:
        hybrid = (
            f"between its low layers and the hybrid's there is no clear difference at this scale ({signed(nearer)})"
        )
    change = f"{number(growth)} from low to high layers"
    sentence = f"In the ViT attention distance {depth} with depth ({change}), {some}, and {hybrid}."
    if math.isnan(growth.low) or math.isnan(nearer.low):  # of one or two seeds nobody can say how much is chance
        return sentence, "unclear"
    lacking_kind = any(2 * sum(count == 0 for count in counts) > len(counts) for counts in (everywhere, local))
    if little or lacking_kind or (nearer.clear and nearer.mean < 0):
        return sentence, "disagrees"
    return sentence, "agrees" if grows and nearer.clear else "unclear"


def share(layers: Sequence[np.ndarray], which: Any) -> str:
    """How many heads of how many, over the seeds."""
    return f"{sum(int(which(low).sum()) for low in layers)} of {sum(low.size for low in layers)}"


def by_head(name: str, models: Sequence[Heads]) -> Series:
    """A point for each head of each layer. Heads have no order of their own, so the nearest of one seed goes with the nearest of
    the others: points are means over seeds."""
    nearest = np.mean([np.sort(heads.distance, 1) for heads in models], 0)  # [L, H]
    layers = np.repeat(np.arange(1, len(nearest) + 1), nearest.shape[1])
    return Series(name, tuple(map(float, layers)), tuple(map(float, nearest.reshape(-1))))


def by_layer(name: str, models: Sequence[Heads]) -> Series:
    """The mean over a layer's heads."""
    layers = range(len(models[0].distance))
    return series(
        name, {layer + 1: [float(heads.distance[layer].mean()) for heads in models] for layer in layers}, None
    )


STUDY = Study(
    name="attention-distance",
    question="How far do heads look, layer by layer, and does a ResNet in front change it?",
    where="figures 7 and 11, section 4.5",
    found=(
        "Attention distance increases with depth; some heads attend to most of the image already in the lowest layers, others "
        "are consistently local there, and that locality is less pronounced in hybrids (shown in figures; no number is given)."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 3, "heads": 2, "patch": 4, "image": 16, "stages": (1,)},
        ),
        # 64 tokens at width 64, depth 6: 175 pictures/s on a core; with one stage of a ResNet in front about 125. 800 steps ×
        # 128 = 102,400 pictures: 585 s and 820 s, and 30 s to judge. Two tries and three seeds each: 5 × 615 s + 5 × 850 s.
        # On two cores: 61 min.
        "laptop": Scale(
            "cifar-10", 61, "two cores", seeds=3, steps=800, batch=128, rates=(5e-4, 1.5e-3),
            sizes={"width": 64, "depth": 6, "heads": 4, "patch": 4, "stages": (1,)},
        ),
        # Ti/16 at 224², 1,500 pictures/s with bf16, and R50+Ti/16 at 700: 30,000 steps × 256 = 1.4 h and 3 h, five of each.
        "gpu": Scale(
            "imagenet", 1_330, "one GPU", seeds=3, steps=30_000, batch=256, rates=(5e-4, 1e-3),
            sizes={
                "width": 192, "depth": 12, "heads": 3, "patch": 16, "image": 224, "stages": (3, 4, 9),
                "precision": "bf16", "warmup": 3_000,
            },
        ),
        # L/16 and R50+L/16 on ImageNet-21k for 30 epochs in batches of 4,096, 102,500 steps, table 3: 2,500 and 2,000
        # pictures/s on eight GPUs, 47 and 58 h each, three seeds, one rate.
        "cluster": Scale(
            "imagenet-21k", 18_900, "8 GPUs", seeds=3, steps=102_500, batch=4096, rates=(1e-3,),
            sizes={
                "width": 1024, "depth": 24, "heads": 16, "patch": 16, "image": 224, "stages": (3, 4, 9),
                "dropout": 0.1, "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
    measure=measure,
)  # fmt: skip
