"""Mean attention distance by layer in a Vision Transformer and in a hybrid (figures 7 and 11).

    vitrail paper run attention-distance --scale laptop --model deit-tiny

Both models are trained on the same images, each at its best learning rate, and measured on validation images. Distances are
relative to that of a head with uniform attention, so that grids can be compared: 1 is uniform. A head at 0.9 or more is called
global, one at 0.5 or less local; the first third of the layers is called low, the last third high.

The result disagrees with the paper if distance falls with depth, or clearly grows by less than 0.05; if most seeds have no global
or no local head in the low layers; or if the hybrid's low layers attend clearly nearer than the ViT's.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.profile import measure_distances, uniform_distance
from vitrail.checkpoints.load import load
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model
from vitrail.models.hybrid import Hybrid
from vitrail.studies import base, intervals
from vitrail.studies.base import HYBRID, VIT
from vitrail.studies.intervals import Difference, Estimate, Scores, format_estimate, format_signed
from vitrail.studies.study import Answer, Cell, Chart, Finding, Results, Series, Study, StudyScale, StudySetup
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import prepare_data

MIN_GLOBAL_DISTANCE, MAX_LOCAL_DISTANCE = 0.9, 0.5  # relative to uniform attention
MIN_GROWTH = 0.05  # relative to uniform attention
MEASURED_IMAGES, BATCH_SIZE = 128, 32
LIMITS = (
    "Grids are small, so even neighbouring patches are far apart. Heads of an untrained model attend uniformly, so heads that "
    "learned little count as global. The paper measures ViT-L, trained on far more images."
)
NOTE = (
    f"It would disagree with the paper if distance grew by less than {MIN_GROWTH:g} or fell, if most seeds had no global or "
    "no local head in the ViT's low layers, or if the hybrid's low layers looked clearly nearer."
)

GIVEN_NOTE = "Given models were trained elsewhere, on other data and for longer; the finding does not depend on them."


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of both models, each with its own tuning."""
    pure, sizes = base.configure_study_vit(setup), setup.scale.sizes
    hybrid = Hybrid(tuple(sizes["stages"]), sizes.get("map_patch", 1) * base.patch_factor(setup))
    if hybrid.stride != pure.embed.stride:
        pixels = f"{hybrid.stride} pixels per token and the ViT {pure.embed.stride}"
        raise ValueError(f"a hybrid of stages {sizes['stages']} has {pixels}: use other stages")
    models = {VIT: pure, HYBRID: base.configure_study_vit(setup, embed=hybrid)}
    return base.plan_models(setup, results, [({"model": name}, model) for name, model in models.items()])


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the mean attention distance of every head, `[L][H]`, relative to uniform attention."""
    if cell.phase != "final":
        return {}
    return measure_model(load(run / "model.safetensors"), cell.recipe.data, cell.recipe.preprocessing)


def measure_given(model: Model, data: Data) -> dict[str, Any]:
    """Return the same of a trained model, on images with its own preprocessing."""
    preprocessing = model.preprocessing if isinstance(model.preprocessing, Preprocessing) else None
    default = Preprocessing(model.config.image_size, model.config.image_size)
    return measure_model(model, data, preprocessing or default)


def measure_model(model: Model, data: Data, preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the mean attention distance of every head of a model, `[L][H]`, relative to uniform attention."""
    tokens = model.require_tokens("the study of attention distance")
    distances = measure_distances(tokens, load_images(data, preprocessing))
    even = uniform_distance(tokens.config.shape.grid, tokens.embed.stride)
    relative = np.round(distances.mean / even, 4).tolist()
    return {"distance": relative, "evenly": round(even, 3), "looked at": distances.pictures}


def load_images(data: Data, preprocessing: Preprocessing) -> list[Tensor]:
    """Return evenly spaced validation images, preprocessed, in batches."""
    validation = prepare_data(data).splits["validation"]
    chosen = np.linspace(0, len(validation) - 1, min(MEASURED_IMAGES, len(validation))).round().astype(int)
    images = []
    for index in chosen:
        with validation.open(int(index)) as image:
            images.append(preprocessing(image))
    return list(torch.stack(images).split(BATCH_SIZE))


def split_thirds(depth: int) -> tuple[slice, slice]:
    """Return the first and the last third of the layers, at least one layer each."""
    third = max(1, math.floor(depth / 3 + 0.5))
    return slice(0, third), slice(depth - third, depth)


@dataclass(frozen=True)
class HeadDistances:
    """Attention distances of the heads of one model, for each seed."""

    distances: np.ndarray  # [seeds, L, H]

    def select_third(self, which: int) -> np.ndarray:
        """Return the distances in the low (0) or the high (1) layers."""
        return self.distances[:, split_thirds(self.distances.shape[1])[which]]

    def mean_distance(self, which: int) -> list[float]:
        """Return the mean distance in the low (0) or the high (1) layers for each seed."""
        return self.select_third(which).mean((1, 2)).tolist()

    @property
    def growth(self) -> Estimate:
        """Return the mean distance of the high layers minus that of the low ones."""
        thirds = zip(self.mean_distance(0), self.mean_distance(1), strict=True)
        return intervals.estimate_mean([high - low for low, high in thirds])

    @property
    def global_heads(self) -> list[int]:
        """Return the number of global heads in the low layers."""
        return (self.select_third(0) >= MIN_GLOBAL_DISTANCE).sum((1, 2)).tolist()

    @property
    def local_heads(self) -> list[int]:
        """Return the number of local heads in the low layers."""
        return (self.select_third(0) <= MAX_LOCAL_DISTANCE).sum((1, 2)).tolist()

    def series_by_head(self, name: str) -> Series:
        """Return a point for each head of each layer, mean over seeds. Heads are unordered, so they are matched by distance."""
        nearest = np.sort(self.distances, 2).mean(0)  # [L, H]
        layers = np.repeat(np.arange(1, len(nearest) + 1), nearest.shape[1])
        return Series(name, tuple(map(float, layers)), tuple(map(float, nearest.reshape(-1))))

    def series_by_layer(self, name: str) -> Series:
        """Return the mean over a layer's heads."""
        layers = self.distances.mean(2).T.tolist()  # [L, seeds]
        return intervals.build_series(name, dict(enumerate(layers, start=1)), None)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    by_model: dict[str, list[Any]] = {VIT: [], HYBRID: []}
    for result in sorted(results, key=lambda result: int(str(result.at.get("seed", 0)))):
        if result.phase == "final" and "distance" in result.numbers:
            by_model[str(result.at["model"])].append(result.numbers["distance"])
    if missing := [name for name, runs in by_model.items() if not runs]:
        return base.incomplete_answer(missing, LIMITS)
    tests, trained = Scores(results, "model"), {name: HeadDistances(np.array(runs)) for name, runs in by_model.items()}
    given = [result for result in results if result.phase == "given"]
    models = trained | {f"{r.at['model']} (given)": HeadDistances(np.array([r.numbers["distance"]])) for r in given}
    low_heads = {name: heads.select_third(0).size for name, heads in models.items()}
    hybrid, vit = (models[name].mean_distance(0) for name in (HYBRID, VIT))
    unit = "relative to uniform attention"
    by_head = tuple(heads.series_by_head(name) for name, heads in models.items())
    by_layer = tuple(heads.series_by_layer(name) for name, heads in models.items())
    return Answer(
        *formulate_finding(trained[VIT], intervals.estimate_difference(hybrid, vit)),
        columns=("model", "test", "low layers", "high layers", "growth", "global low heads", "local low heads"),
        rows=tuple(
            (
                name,
                tests.format(name),
                *(format_estimate(intervals.estimate_mean(heads.mean_distance(third))) for third in (0, 1)),
                format_estimate(heads.growth),
                *(f"{sum(counts)} of {low_heads[name]}" for counts in (heads.global_heads, heads.local_heads)),
            )
            for name, heads in models.items()
        ),
        charts=(
            Chart("Mean attention distance of every head", "dots", by_head, "layer", unit, percent=False),
            Chart("By depth: the mean over heads and seeds", "lines", by_layer, "layer", unit, percent=False),
        ),
        limits=LIMITS,
        notes=(NOTE, *([GIVEN_NOTE] if given else [])),
    )


def formulate_finding(vit: HeadDistances, hybrid_difference: Difference) -> Finding:
    """Test four claims: distance grows with depth, some low heads are global, others local, and the hybrid is less local."""
    growth, apart = vit.growth, format_signed(hybrid_difference)
    depth = "grows" if growth.low > 0 else "falls" if growth.high < 0 else "does not clearly change"
    kinds = f"{fmean(vit.global_heads):.1f} attend globally and {fmean(vit.local_heads):.1f} locally"
    some = f"of the {vit.select_third(0)[0].size} heads in its low layers {kinds} on average over seeds"
    hybrid = f"between its low layers and the hybrid's there is no clear difference at this scale ({apart})"
    if hybrid_difference.is_clear:
        hybrid = f"the hybrid's low layers look {'farther' if hybrid_difference.mean > 0 else 'nearer'} ({apart})"
    change = f"{format_estimate(growth)} from low to high layers"
    sentence = f"In the ViT attention distance {depth} with depth ({change}), {some}, and {hybrid}."
    if math.isnan(growth.low) or math.isnan(hybrid_difference.low):  # one or two seeds have no interval
        return sentence, "unclear"
    lacks_kind = any(2 * counts.count(0) > len(counts) for counts in (vit.global_heads, vit.local_heads))
    if growth.high < MIN_GROWTH or lacks_kind or hybrid_difference.is_loss:
        return sentence, "disagrees"
    return sentence, "agrees" if growth.low > 0 and hybrid_difference.is_clear else "unclear"


STUDY = Study(
    name="attention-distance",
    question="How far do heads attend in each layer, and does a ResNet stem change it?",
    reference="figures 7 and 11, section 4.5",
    paper_finding=(
        "Attention distance increases with depth; some heads attend to most of the image already in the lowest layers, others "
        "are consistently local there, and that locality is less pronounced in hybrids (shown in figures; no number is given)."
    ),
    scales={
        "test": base.on_one_core(sizes=base.vit_sizes(16, 3, 2, 4, image=16, stages=(1,))),
        # 64 tokens at width 64, depth 6: 175 images/s on a core; with one stage of a ResNet in front about 125. 800 steps ×
        # 128 = 102,400 images: 585 s and 820 s, and 30 s to evaluate. Two tuning runs and three seeds each: 5 × 615 s + 5 ×
        # 850 s. On two cores: 61 min.
        "laptop": base.on_two_cores(minutes=61, batch=128, lrs=(5e-4, 1.5e-3), sizes=base.vit_sizes(
            64, 6, 4, 4, stages=(1,))),
        # Ti/16 at 224², 1,500 images/s with bf16, and R50+Ti/16 at 700: 30,000 steps × 256 = 1.4 h and 3 h, five of each.
        "gpu": base.on_gpu(data="imagenet", minutes=1_330, steps=30_000, lrs=(5e-4, 1e-3), sizes=base.vit_sizes(
            192, 12, 3, 16, image=224, stages=(3, 4, 9), precision="bf16", warmup=3_000)),
        # L/16 and R50+L/16 on ImageNet-21k for 30 epochs in batches of 4,096, 102,500 steps, table 3: 2,500 and 2,000
        # images/s on eight GPUs, 47 and 58 h each, three seeds, one learning rate.
        "cluster": base.on_cluster(minutes=18_900, seeds=3, sizes={**base.L16, "stages": (3, 4, 9)}),
    },
    plan=plan, interpret=interpret_results, measure=measure, measure_given=measure_given,
)  # fmt: skip
