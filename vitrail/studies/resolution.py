"""Fine-tuning at a higher resolution than pre-training, with and without 2-D interpolation of positions (section 3.2).

    vitrail paper run resolution --scale laptop

A model is pre-trained on downsized images. It is then fine-tuned at that size, and at full size with the same patch size, so that
more positions are needed. They are interpolated in 2-D, as in the paper; interpolated in 1-D along the row-major sequence; or
reinitialised. Other weights, steps and the number of learning rates are the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints.load import load, save
from vitrail.models.base import TokenModel
from vitrail.models.registry import build_from
from vitrail.studies.base import build_recipe, configure_study_vit, find_missing, incomplete_answer, plan_tuned
from vitrail.studies.intervals import (
    Difference,
    build_series,
    count_test_images,
    estimate_difference,
    find_lr,
    format_accuracy,
    format_difference,
    format_points,
    group_values,
)
from vitrail.studies.study import Agreement, Answer, Cell, CellResult, Chart, GridPoint, Study, StudyScale, StudySetup
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
    "Pre-training and fine-tuning use the same images and classes, so the head is kept and only the resolution "
    "changes; the paper "
    "fine-tunes on other data. A step at the larger size costs more, which is not compensated."
)


def image_sizes(setup: StudySetup) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the pre-training size, about half in whole patches and at least two per side, and the fine-tuning size."""
    model = configure_study_vit(setup)
    patch = model.embed.stride
    height, width = (max(2, math.floor(side / patch / 2 + 0.5)) * patch for side in model.image_size)
    return (height, width), model.image_size


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return a pre-training cell for each seed and, once all are finished, the fine-tuning cells of four methods."""
    low, high = image_sizes(setup)
    if low == high:
        raise ValueError(
            f"{setup.data.where} gives images of {high[0]}×{high[1]} in patches of "
            f"{configure_study_vit(setup).embed.stride}: too few patches "
            "to halve, use data with larger images"
        )
    scale, seeds = setup.scale, range(setup.scale.seeds)
    base_model = configure_study_vit(setup, image_size=low)
    base_rate, base_steps = scale.sizes["base_rate"], scale.sizes["base_steps"]
    cells = [
        Cell(
            {"size": f"{low[0]}×{low[1]}", "height": high[0], "width": high[1], "seed": seed},
            build_recipe(
                setup,
                base_model,
                base_rate,
                seed,
                steps=base_steps,
                batch_size=scale.sizes.get("base_batch", scale.batch),
            ),
            "base",
        )
        for seed in seeds
    ]
    bases = {result.at["seed"]: result for result in results if result.phase == "base"}
    if set(bases) != set(seeds):
        return cells

    def tuning(point: GridPoint, lr: float, seed: int) -> Recipe:
        method = str(point["positions"])
        recipe = build_recipe(
            setup, configure_study_vit(setup, image_size=low if method == SAME_SIZE else high), lr, seed
        )
        return replace(
            recipe,
            init=str(setup.directory / bases[seed].run / f"{INIT_FILES[method]}.safetensors"),
            optimizer=SGD(lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0),  # table 4
            schedule=Cosine(warmup=max(1, scale.steps // 20)),
        )

    return cells + plan_tuned(setup, results, [{"positions": method} for method in INIT_FILES], tuning)


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Write the two other initial weights of fine-tuning beside a pre-trained model. Return no numbers."""
    if cell.phase == "base":
        model = load(run / "model.safetensors").tokens_for("the study of resolution")
        size = int(str(cell.at["height"])), int(str(cell.at["width"]))
        seed = int(str(cell.at["seed"]))
        for method, table in (
            (READING_ORDER, resize_in_reading_order(model, size)),
            (REINITIALISED, reinitialise_positions(model, size, seed)),
        ):
            larger = build_from(replace(model.config, image_size=size))
            larger.load_state_dict(model.state_dict() | {"position.weight": table})
            pipeline = cell.recipe.preprocessing.with_size(size)
            save(larger, run / f"{INIT_FILES[method]}.safetensors", labels=model.labels, preprocessing=pipeline)
    return {}


def resize_in_reading_order(model: TokenModel, size: tuple[int, int]) -> Tensor:
    """Return the positions interpolated in 1-D along the row-major sequence of patches."""
    table = model.state_dict()["position.weight"]  # [1, covered+N, D]
    patches = model.config.shape.patches
    covered = table.shape[1] - patches
    wanted = replace(model.config, image_size=size).shape.patches
    stretched = F.interpolate(table[:, covered:].transpose(1, 2), wanted, mode="linear", align_corners=False)
    return torch.cat((table[:, :covered], stretched.transpose(1, 2)), 1)


def reinitialise_positions(model: TokenModel, size: tuple[int, int], seed: int) -> Tensor:
    """Return the positions of an untrained model. The class token's position is kept, as in interpolation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = build_from(replace(model.config, image_size=size)).state_dict()["position.weight"]
    table = model.state_dict()["position.weight"]
    covered = table.shape[1] - model.config.shape.patches
    return torch.cat((table[:, :covered], fresh[:, covered:]), 1)


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    tests, n_images = group_values(results, "positions"), count_test_images(results)
    if missing := find_missing(tests, INIT_FILES):
        return incomplete_answer(missing, LIMITS)
    against = {
        method: estimate_difference(tests[INTERPOLATED_2D,], tests[method,], n_images)
        for method in (SAME_SIZE, REINITIALISED, READING_ORDER)
    }
    finding, agreement = formulate_finding(against)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("fine-tuned at", "rate", "test", "2-D interpolation is better by"),
        rows=tuple(
            (
                method,
                find_lr(results, {"positions": method}),
                format_accuracy(tests[method,], n_images),
                format_difference(against[method]) if method in against else "",
            )
            for method in INIT_FILES
        ),
        charts=(
            Chart(
                "Fine-tuned at the size of pre-training, and at a larger one with three kinds of positions",
                "dots",
                (build_series("test", {method: tests[method,] for method in INIT_FILES}, n_images),),
                y_name="top-1 on test images",
            ),
        ),
        limits=LIMITS,
    )


def formulate_finding(against: Mapping[str, Difference]) -> tuple[str, Agreement]:
    """Report the gain of the larger size, and of 2-D interpolation at that size."""
    size, anew, order = against[SAME_SIZE], against[REINITIALISED], against[READING_ORDER]
    sentence = (
        f"Fine-tuning at the larger size brings {format_change(size)}; there 2-D interpolation brings "
        f"{format_change(anew)} against "
        f"reinitialised positions, and {format_change(order)} against reading order"
    )
    if any(gain.is_clear and gain.mean < 0 for gain in (size, anew)):
        return f"{sentence}.", "disagrees"
    if size.is_clear and anew.is_clear:
        return f"{sentence}.", "agrees"
    if size.is_clear or anew.is_clear:
        return f"{sentence}.", "unclear"
    return f"{sentence}: no difference at this scale.", "no difference"


def format_change(change: Difference) -> str:
    """Return a difference in points, with "perhaps" if it is not clear."""
    return format_points(change) if change.is_clear else f"perhaps {format_points(change)}"


STUDY = Study(
    name="resolution",
    question="Is it better to fine-tune at a higher resolution, and do positions have to be interpolated in two dimensions?",
    reference="section 3.2",
    paper_finding=(
        "It is often beneficial to fine-tune at higher resolution than pre-training; the pre-trained position embeddings are "
        "2-D interpolated by their place in the image (no number is given for leaving that out)."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.3, "one core", seeds=1, steps=4, batch=32, lrs=(0.03,),
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2, "base_rate": 1e-3, "base_steps": 8},
        ),
        # Width 64, depth 4: 900 images/s of 16 patches on a core, 350 of 49. Pre-training 3,000 steps × 128: 430 s, and 10 s
        # to evaluate, × 3 seeds = 1,320 s. Fine-tuning 500 steps × 128, three tuning runs and three seeds: at the same size 6
        # × 85 s = 510 s, at the larger one 3 methods × 6 × 210 s = 3,780 s. On two cores: 47 min.
        "laptop": StudyScale(
            "fashion-mnist", 47, "two cores", seeds=3, steps=500, batch=128, lrs=(0.01, 0.03, 0.1),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4, "base_rate": 1e-3, "base_steps": 3_000},
        ),
        # S/16 from 192² (patches are whole) to 384²: pre-training 50,000 steps × 512 at 2,000 images/s: 3.6 h; fine-tuning
        # 5,000 steps × 512 at 450: 1.6 h, six runs of each of four methods (a quarter of that at the same size). 3 × 3.6 + 18 ×
        # 1.6 + 6 × 0.4 h.
        "gpu": StudyScale(
            "imagenet", 2_500, "one GPU", seeds=3, steps=5_000, batch=512, lrs=(0.003, 0.01, 0.03),
            sizes={
                "width": 384, "depth": 12, "heads": 6, "patch": 16, "image": 384, "base_rate": 1e-3,
                "base_steps": 50_000, "precision": "bf16",
            },
        ),
        # B/16 on ImageNet for 300 epochs at batch 4,096 with 3e-3, table 3; then 20,000 steps of 512 at 384², table 4. 10,000
        # images/s on eight GPUs at 192²: 10.7 h a model; 1.1 h each fine-tuning at 2,500 images/s. 3 × 10.7 + 21 × 1.1 +
        # 7 × 0.3 h.
        "cluster": StudyScale(
            "imagenet", 3_450, "8 GPUs", seeds=3, steps=20_000, batch=512, lrs=(0.003, 0.01, 0.03, 0.06),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 384, "dropout": 0.1,
                "weight_decay": 0.3, "base_rate": 3e-3, "base_steps": 93_600, "base_batch": 4096, "precision": "bf16",
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
    measure=measure,
)  # fmt: skip
