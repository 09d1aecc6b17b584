"""Mean attention distance by layer in a Vision Transformer and in a hybrid (figures 7 and 11).

    vitrail paper run attention-distance --scale laptop

Both models are trained on the same images, each at its best learning rate, and measured on validation images. Distances are
relative to that of a head with uniform attention, so that grids can be compared: 1 is uniform. A head at 0.9 or more is called
global, one at 0.5 or less local; the first third of the layers is called low, the last third high.

The result disagrees with the paper if distance falls with depth, or clearly grows by less than 0.05; if most seeds have no global
or no local head in the low layers; or if the hybrid's low layers attend clearly nearer than the ViT's.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.heads import patch_centres
from vitrail.analysis.profile import measure_distances
from vitrail.checkpoints.load import load
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.hybrid import Hybrid
from vitrail.nn.shape import Grid
from vitrail.studies.base import (
    build_recipe,
    configure_study_vit,
    find_missing,
    incomplete_answer,
    patch_factor,
    plan_tuned,
)
from vitrail.studies.intervals import (
    Difference,
    Estimate,
    build_series,
    count_test_images,
    estimate_difference,
    estimate_mean,
    format_accuracy,
    format_estimate,
    format_signed,
    group_values,
)
from vitrail.studies.study import (
    Agreement,
    Answer,
    Cell,
    CellResult,
    Chart,
    GridPoint,
    Series,
    Study,
    StudyScale,
    StudySetup,
)
from vitrail.training.recipe import Recipe
from vitrail.training.runs.prepare import prepare_data

VIT, HYBRID = "ViT", "hybrid"
MIN_GLOBAL_DISTANCE, MAX_LOCAL_DISTANCE = 0.9, 0.5  # relative to uniform attention
MIN_GROWTH = 0.05  # relative to uniform attention
MEASURED_IMAGES, BATCH_SIZE = 128, 32
LIMITS = (
    "Grids are small, so even neighbouring patches are far apart. Heads of an untrained model attend uniformly, so heads that "
    "learned little count as global. The paper measures ViT-L, trained on far more images."
)


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return the cells of both models, each with its own tuning."""
    pure = configure_study_vit(setup)
    stages = setup.scale.sizes["stages"]
    hybrid = Hybrid(tuple(stages), setup.scale.sizes.get("map_patch", 1) * patch_factor(setup))
    if hybrid.stride != pure.embed.stride:
        raise ValueError(
            f"a hybrid of stages {stages} has {hybrid.stride} pixels per token and the ViT {pure.embed.stride}: use other stages"
        )
    models = {VIT: pure, HYBRID: configure_study_vit(setup, embed=hybrid)}

    def training(point: GridPoint, lr: float, seed: int) -> Recipe:
        return build_recipe(setup, models[str(point["model"])], lr, seed)

    return plan_tuned(setup, results, [{"model": name} for name in models], training)


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the mean attention distance of every head, [L][H], relative to uniform attention."""
    if cell.phase != "final":
        return {}
    model = load(run / "model.safetensors")
    model = model.tokens_for("the study of attention distance")
    distances = measure_distances(model, load_images(cell.recipe))
    even = uniform_distance(model.config.shape.grid, model.embed.stride)
    relative = np.round(distances.mean / even, 4).tolist()
    return {"distance": relative, "evenly": round(even, 3), "looked at": distances.pictures}


def load_images(recipe: Recipe) -> list[Tensor]:
    """Return evenly spaced validation images of a recipe, preprocessed, in batches."""
    validation = prepare_data(recipe.data).splits["validation"]
    chosen = np.linspace(0, len(validation) - 1, min(MEASURED_IMAGES, len(validation))).round().astype(int)
    pipeline: Preprocessing = recipe.preprocessing
    images = []
    for index in chosen:
        with validation.open(int(index)) as image:
            images.append(pipeline(image))
    return list(torch.stack(images).split(BATCH_SIZE))


def uniform_distance(grid: Grid, stride: int) -> float:
    """Return the mean attention distance of a head with uniform attention, in pixels."""
    centres = patch_centres(grid, stride, torch.device("cpu"))
    return float(torch.cdist(centres, centres).mean())


def split_thirds(depth: int) -> tuple[slice, slice]:
    """Return the first and the last third of the layers, at least one layer each."""
    third = max(1, math.floor(depth / 3 + 0.5))
    return slice(0, third), slice(depth - third, depth)


class HeadDistances:
    """Attention distances of the heads of one trained model."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.distance = np.array(numbers["distance"])  # [L, H]
        low, high = split_thirds(len(self.distance))
        self.low, self.high = self.distance[low], self.distance[high]

    @property
    def growth(self) -> float:
        """Return the mean distance of the high layers minus that of the low ones."""
        return float(self.high.mean() - self.low.mean())

    @property
    def count_kinds(self) -> tuple[int, int]:
        """Return the numbers of global and of local heads in the low layers."""
        return int((self.low >= MIN_GLOBAL_DISTANCE).sum()), int((self.low <= MAX_LOCAL_DISTANCE).sum())


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    there: dict[str, list[HeadDistances]] = {}
    for result in sorted(results, key=lambda result: int(str(result.at.get("seed", 0)))):
        if result.phase == "final" and "distance" in result.numbers:
            there.setdefault(str(result.at["model"]), []).append(HeadDistances(result.numbers))
    if missing := find_missing([(name,) for name in there], (VIT, HYBRID)):
        return incomplete_answer(missing, LIMITS)
    tests, n_images = group_values(results, "model"), count_test_images(results)
    growth = {name: estimate_mean([heads.growth for heads in there[name]]) for name in (VIT, HYBRID)}
    nearer = estimate_difference(
        [float(h.low.mean()) for h in there[HYBRID]], [float(h.low.mean()) for h in there[VIT]]
    )
    everywhere, local = ([int(n) for n in counts] for counts in zip(*(h.count_kinds for h in there[VIT]), strict=True))
    finding, agreement = formulate_finding(growth[VIT], everywhere, local, there[VIT][0].low.size, nearer)
    rows = tuple(
        (
            name,
            format_accuracy(tests.get((name,)), n_images),
            format_estimate(estimate_mean([float(h.low.mean()) for h in there[name]])),
            format_estimate(estimate_mean([float(h.high.mean()) for h in there[name]])),
            format_estimate(growth[name]),
            format_share([heads.low for heads in there[name]], lambda low: low >= MIN_GLOBAL_DISTANCE),
            format_share([heads.low for heads in there[name]], lambda low: low <= MAX_LOCAL_DISTANCE),
        )
        for name in (VIT, HYBRID)
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
                tuple(series_by_head(name, there[name]) for name in (VIT, HYBRID)),
                "layer",
                "relative to uniform attention",
                percent=False,
            ),
            Chart(
                "By depth: the mean over heads and seeds",
                "lines",
                tuple(series_by_layer(name, there[name]) for name in (VIT, HYBRID)),
                "layer",
                "relative to uniform attention",
                percent=False,
            ),
        ),
        limits=LIMITS,
        notes=(
            f"It would disagree with the paper if distance grew by less than {MIN_GROWTH:g} or fell, if most seeds had "
            "no global or "
            "no local head in the ViT's low layers, or if the hybrid's low layers looked clearly nearer.",
        ),
    )


def formulate_finding(
    growth: Estimate, global_heads: Sequence[int], local_heads: Sequence[int], heads: int, hybrid_difference: Difference
) -> tuple[str, Agreement]:
    """Test four claims: distance grows with depth, some low heads are global, others local, and the hybrid is less local.

    `global_heads` and `local_heads` are numbers of heads, one per seed.
    """
    grows, falls, little = growth.low > 0, growth.high < 0, growth.high < MIN_GROWTH
    depth = "grows" if grows else "falls" if falls else "does not clearly change"
    some = (
        f"of the {heads} heads in its low layers {fmean(global_heads):.1f} attend globally and {fmean(local_heads):.1f} "
        "locally on "
        "average over seeds"
    )
    if hybrid_difference.is_clear:
        hybrid = (
            f"the hybrid's low layers look {'farther' if hybrid_difference.mean > 0 else 'nearer'} "
            f"({format_signed(hybrid_difference)})"
        )
    else:
        hybrid = (
            f"between its low layers and the hybrid's there is no clear difference at this scale "
            f"({format_signed(hybrid_difference)})"
        )
    change = f"{format_estimate(growth)} from low to high layers"
    sentence = f"In the ViT attention distance {depth} with depth ({change}), {some}, and {hybrid}."
    if math.isnan(growth.low) or math.isnan(hybrid_difference.low):  # one or two seeds have no interval
        return sentence, "unclear"
    lacking_kind = any(2 * sum(count == 0 for count in counts) > len(counts) for counts in (global_heads, local_heads))
    if little or lacking_kind or (hybrid_difference.is_clear and hybrid_difference.mean < 0):
        return sentence, "disagrees"
    return sentence, "agrees" if grows and hybrid_difference.is_clear else "unclear"


def format_share(layers: Sequence[np.ndarray], predicate: Any) -> str:
    """Return text such as "7 of 8" for the heads of all seeds."""
    return f"{sum(int(predicate(low).sum()) for low in layers)} of {sum(low.size for low in layers)}"


def series_by_head(name: str, models: Sequence[HeadDistances]) -> Series:
    """Return a point for each head of each layer, mean over seeds. Heads are unordered, so they are matched by distance."""
    nearest = np.mean([np.sort(heads.distance, 1) for heads in models], 0)  # [L, H]
    layers = np.repeat(np.arange(1, len(nearest) + 1), nearest.shape[1])
    return Series(name, tuple(map(float, layers)), tuple(map(float, nearest.reshape(-1))))


def series_by_layer(name: str, models: Sequence[HeadDistances]) -> Series:
    """Return the mean over a layer's heads."""
    layers = range(len(models[0].distance))
    return build_series(
        name, {layer + 1: [float(heads.distance[layer].mean()) for heads in models] for layer in layers}, None
    )


STUDY = Study(
    name="attention-distance",
    question="How far do heads attend in each layer, and does a ResNet stem change it?",
    reference="figures 7 and 11, section 4.5",
    paper_finding=(
        "Attention distance increases with depth; some heads attend to most of the image already in the lowest layers, others "
        "are consistently local there, and that locality is less pronounced in hybrids (shown in figures; no number is given)."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 3, "heads": 2, "patch": 4, "image": 16, "stages": (1,)},
        ),
        # 64 tokens at width 64, depth 6: 175 images/s on a core; with one stage of a ResNet in front about 125. 800 steps ×
        # 128 = 102,400 images: 585 s and 820 s, and 30 s to evaluate. Two tuning runs and three seeds each: 5 × 615 s + 5 ×
        # 850 s. On two cores: 61 min.
        "laptop": StudyScale(
            "cifar-10", 61, "two cores", seeds=3, steps=800, batch=128, lrs=(5e-4, 1.5e-3),
            sizes={"width": 64, "depth": 6, "heads": 4, "patch": 4, "stages": (1,)},
        ),
        # Ti/16 at 224², 1,500 images/s with bf16, and R50+Ti/16 at 700: 30,000 steps × 256 = 1.4 h and 3 h, five of each.
        "gpu": StudyScale(
            "imagenet", 1_330, "one GPU", seeds=3, steps=30_000, batch=256, lrs=(5e-4, 1e-3),
            sizes={
                "width": 192, "depth": 12, "heads": 3, "patch": 16, "image": 224, "stages": (3, 4, 9),
                "precision": "bf16", "warmup": 3_000,
            },
        ),
        # L/16 and R50+L/16 on ImageNet-21k for 30 epochs in batches of 4,096, 102,500 steps, table 3: 2,500 and 2,000
        # images/s on eight GPUs, 47 and 58 h each, three seeds, one learning rate.
        "cluster": StudyScale(
            "imagenet-21k", 18_900, "8 GPUs", seeds=3, steps=102_500, batch=4096, lrs=(1e-3,),
            sizes={
                "width": 1024, "depth": 24, "heads": 16, "patch": 16, "image": 224, "stages": (3, 4, 9),
                "dropout": 0.1, "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
    measure=measure,
)  # fmt: skip
