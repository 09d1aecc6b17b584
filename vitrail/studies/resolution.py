"""Fine-tuning at a higher resolution than pre-training, with and without 2-D interpolation of positions (section 3.2).

    vitrail paper run resolution --scale laptop

A model is pre-trained on downsized images. It is then fine-tuned at that size, and at full size with the same patch size, so that
more positions are needed. They are interpolated in 2-D, as in the paper; interpolated in 1-D along the row-major sequence; or
reinitialised. Other weights, steps and the number of learning rates are the same.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints.load import load, save
from vitrail.models.base import TokenModel
from vitrail.models.registry import build_from
from vitrail.studies import base
from vitrail.studies.intervals import NO_VALUE, Difference, Scores, format_points
from vitrail.studies.study import Answer, Cell, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.training.optim import SGD
from vitrail.training.recipe import Recipe
from vitrail.training.schedule import Cosine

SAME_SIZE, INTERPOLATED_2D = "the same size", "larger, 2-D"
READING_ORDER, REINITIALISED = "larger, reading order", "larger, anew"
INIT_FILES = {  # initial weights, in the run of the base model
    SAME_SIZE: "model",
    INTERPOLATED_2D: "model",
    READING_ORDER: "reading-order",
    REINITIALISED: "anew",
}
LIMITS = (
    "Pre-training and fine-tuning use the same images and classes, so the head is kept and only the resolution changes; the "
    "paper fine-tunes on other data. A step at the larger size costs more, which is not compensated."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return a pre-training cell for each seed and, once all are finished, the fine-tuning cells of four methods."""
    scale, sizes, seeds = setup.scale, setup.scale.sizes, range(setup.scale.seeds)
    large = base.configure_study_vit(setup)
    patch, (height, width) = large.embed.stride, large.image_size
    # The pre-training size is about half, in whole patches and at least two per side.
    low_height, low_width = (max(2, math.floor(side / patch / 2 + 0.5)) * patch for side in large.image_size)
    if (low_height, low_width) == large.image_size:
        images = f"{setup.data.where} gives images of {height}×{width} in patches of {patch}"
        raise ValueError(f"{images}: too few patches to halve, use data with larger images")
    small = base.configure_study_vit(setup, image_size=(low_height, low_width))
    changes = {"steps": sizes["base_steps"], "batch_size": sizes.get("base_batch", scale.batch)}
    cells = []
    for seed in seeds:
        at = {"size": f"{low_height}×{low_width}", "height": height, "width": width, "seed": seed}
        cells.append(Cell(at, base.build_recipe(setup, small, sizes["base_rate"], seed, **changes), "base"))
    bases = {result.at["seed"]: result for result in results if result.phase == "base"}
    if set(bases) != set(seeds):
        return cells

    def tuning(point: GridPoint, lr: float, seed: int) -> Recipe:
        method = str(point["positions"])
        return base.build_recipe(
            setup,
            small if method == SAME_SIZE else large,
            lr,
            seed,
            init=str(setup.directory / bases[seed].run / f"{INIT_FILES[method]}.safetensors"),
            optimizer=SGD(lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0),  # table 4
            schedule=Cosine(warmup=max(1, scale.steps // 20)),
        )

    return cells + base.plan_tuned(setup, results, [{"positions": method} for method in INIT_FILES], tuning)


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Write the two other initial weights of fine-tuning beside a pre-trained model. Return no numbers."""
    if cell.phase == "base":
        model = load(run / "model.safetensors").require_tokens("the study of resolution")
        height, width, seed = (int(str(cell.at[name])) for name in ("height", "width", "seed"))
        for method, table in (
            (READING_ORDER, resize_in_reading_order(model, (height, width))),
            (REINITIALISED, reinitialise_positions(model, (height, width), seed)),
        ):
            larger = build_from(replace(model.config, image_size=(height, width)))
            larger.load_state_dict(model.state_dict() | {"position.weight": table})
            pipeline = cell.recipe.preprocessing.with_size((height, width))
            save(larger, run / f"{INIT_FILES[method]}.safetensors", labels=model.labels, preprocessing=pipeline)
    return {}


def split_positions(model: TokenModel) -> tuple[Tensor, Tensor]:
    """Return the positions of the class token, [1, covered, D], and of the patches, [1, N, D]."""
    table = model.state_dict()["position.weight"]
    covered = table.shape[1] - model.config.shape.patches
    return table[:, :covered], table[:, covered:]


def resize_in_reading_order(model: TokenModel, size: tuple[int, int]) -> Tensor:
    """Return the positions interpolated in 1-D along the row-major sequence of patches."""
    token, patches = split_positions(model)
    wanted = replace(model.config, image_size=size).shape.patches
    stretched = F.interpolate(patches.transpose(1, 2), wanted, mode="linear", align_corners=False)
    return torch.cat((token, stretched.transpose(1, 2)), 1)


def reinitialise_positions(model: TokenModel, size: tuple[int, int], seed: int) -> Tensor:
    """Return the positions of an untrained model. The class token's position is kept, as in interpolation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = build_from(replace(model.config, image_size=size)).require_tokens("the study of resolution")
    return torch.cat((split_positions(model)[0], split_positions(fresh)[1]), 1)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests = Scores(results, "positions", order=INIT_FILES)
    if missing := tests.find_missing(INIT_FILES):
        return base.incomplete_answer(missing, LIMITS)
    gains = {method: change.negated for method, change in tests.compare(INTERPOLATED_2D).items()}
    shown = {method: format_points(gain) for method, gain in gains.items()}
    title = "Fine-tuned at the size of pre-training, and at a larger one with three kinds of positions"
    return Answer(
        *formulate_finding(gains),
        columns=("fine-tuned at", "learning rate", "test", "2-D interpolation is better by"),
        rows=tuple(
            (method, tests.format_lr(method), tests.format(method), shown.get(method, NO_VALUE)) for method in tests
        ),
        charts=(tests.dots(title, y_name="top-1 on test images"),),
        limits=LIMITS,
    )


def formulate_finding(gains: Mapping[str, Difference]) -> Finding:
    """Report the gain of the larger size, and of 2-D interpolation at that size."""
    by = {method: ("" if gain.is_clear else "perhaps ") + format_points(gain) for method, gain in gains.items()}
    there = f"{by[REINITIALISED]} against reinitialised positions, and {by[READING_ORDER]} against reading order"
    sentence = f"Fine-tuning at the larger size brings {by[SAME_SIZE]}; there 2-D interpolation brings {there}"
    claimed = (gains[SAME_SIZE], gains[REINITIALISED])
    if any(gain.is_loss for gain in claimed):
        return f"{sentence}.", "disagrees"
    if any(gain.is_clear for gain in claimed):
        return f"{sentence}.", "agrees" if all(gain.is_clear for gain in claimed) else "unclear"
    return f"{sentence}: no difference at this scale.", "no difference"


STUDY = Study(
    name="resolution",
    question="Is it better to fine-tune at a higher resolution, and do positions have to be interpolated in two dimensions?",
    reference="section 3.2",
    paper_finding=(
        "It is often beneficial to fine-tune at higher resolution than pre-training; the pre-trained position embeddings are "
        "2-D interpolated by their place in the image (no number is given for leaving that out)."
    ),
    scales={
        "test": base.on_one_core(minutes=0.3, seeds=1, lrs=(0.03,), sizes=base.vit_sizes(
            16, 1, 2, 2, base_rate=1e-3, base_steps=8)),
        # Width 64, depth 4: 900 images/s of 16 patches on a core, 350 of 49. Pre-training 3,000 steps × 128: 430 s, and 10 s
        # to evaluate, × 3 seeds = 1,320 s. Fine-tuning 500 steps × 128, three tuning runs and three seeds: at the same size 6
        # × 85 s = 510 s, at the larger one 3 methods × 6 × 210 s = 3,780 s. On two cores: 47 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=47, steps=500, batch=128, lrs=(0.01, 0.03, 0.1),
            sizes=base.vit_sizes(64, 4, 4, 4, base_rate=1e-3, base_steps=3_000)),
        # S/16 from 192² (patches are whole) to 384²: pre-training 50,000 steps × 512 at 2,000 images/s: 3.6 h; fine-tuning
        # 5,000 steps × 512 at 450: 1.6 h, six runs of each of four methods (a quarter of that at the same size). 3 × 3.6 + 18 ×
        # 1.6 + 6 × 0.4 h.
        "gpu": base.on_gpu(data="imagenet", minutes=2_500, steps=5_000, batch=512, lrs=(0.003, 0.01, 0.03),
            sizes=base.vit_sizes(384, 12, 6, 16, image=384, base_rate=1e-3, base_steps=50_000, precision="bf16")),
        # B/16 on ImageNet for 300 epochs at batch 4,096 with 3e-3, table 3; then 20,000 steps of 512 at 384², table 4. 10,000
        # images/s on eight GPUs at 192²: 10.7 h a model; 1.1 h each fine-tuning at 2,500 images/s. 3 × 10.7 + 21 × 1.1 +
        # 7 × 0.3 h.
        "cluster": base.on_cluster(
            data="imagenet", minutes=3_450, seeds=3, steps=20_000, batch=512, lrs=(0.003, 0.01, 0.03, 0.06),
            sizes=base.vit_sizes(768, 12, 12, 16, image=384, dropout=0.1, weight_decay=0.3, base_rate=3e-3,
            base_steps=93_600, base_batch=4096, precision="bf16")),
    },
    plan=plan, interpret=interpret_results, measure=measure,
)  # fmt: skip
