"""Fine-tuning at a higher resolution than pre-training, with and without positions interpolated in two dimensions (section
3.2).

    vitrail paper run resolution --scale laptop

A model is pre-trained on small versions of the pictures. It is then fine-tuned at that size, and at the whole size with the
patch kept, so that there are more patches than positions. Three ways to get the missing ones: interpolated in two dimensions,
as in the paper; interpolated along the reading order, which knows nothing of rows; and begun anew. The same weights
otherwise, the same number of steps, the same number of rates tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints.loading import load, save
from vitrail.engine.optim import SGD
from vitrail.engine.schedule import Cosine
from vitrail.models.vit import ViT, build_vit
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe, vit
from vitrail.studies.intervals import Difference, difference, grouped, points
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import lacking, too_early

SAME, GRID, ORDER, ANEW = "the same size", "larger, 2-D", "larger, reading order", "larger, anew"
FILES = {SAME: "model", GRID: "model", ORDER: "reading-order", ANEW: "anew"}  # what each begins with, in the base's run

LIMITS = (
    "Pre-training and fine-tuning use the same pictures and classes, so the head is kept and what is gained is the "
    "resolution alone; the paper fine-tunes on other data. A step at the larger size costs more, and that is not made up for."
)


def sides(setup: Setup) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size of fine-tuning, and about half of it in whole patches, at least two each way."""
    model = vit(setup)
    patch = model.embed.stride
    height, width = (max(2, math.floor(side / patch / 2 + 0.5)) * patch for side in model.image_size)
    return (height, width), model.image_size


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """A pre-trained model for each seed; once all are there, the fine-tuning in four ways."""
    low, high = sides(setup)
    if low == high:
        raise ValueError(
            f"{setup.data.where} gives pictures of {high[0]}×{high[1]} in patches of {vit(setup).embed.stride}: too few patches "
            "to halve, use data with larger pictures"
        )
    scale, seeds = setup.scale, range(setup.scale.seeds)
    base_model = vit(setup, image_size=low)
    base_rate, base_steps = scale.sizes["base_rate"], scale.sizes["base_steps"]
    cells = [
        Cell(
            {"size": f"{low[0]}×{low[1]}", "height": high[0], "width": high[1], "seed": seed},
            recipe(
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

    def tuning(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        way = str(place["positions"])
        made = recipe(setup, vit(setup, image_size=low if way == SAME else high), rate, seed)
        return replace(
            made,
            init=str(setup.place / bases[seed].run / f"{FILES[way]}.safetensors"),
            optimizer=SGD(lr=rate, momentum=0.9, weight_decay=0.0, clip=1.0),  # table 4
            schedule=Cosine(warmup=max(1, scale.steps // 20)),
        )

    return cells + tuned(setup, results, [{"positions": way} for way in FILES], tuning)


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Of a pre-trained model the two others that fine-tuning may begin with are written beside it. They are no numbers."""
    if cell.phase == "base":
        model = load(run / "model.safetensors")
        assert isinstance(model, ViT)
        size = int(str(cell.at["height"])), int(str(cell.at["width"]))
        seed = int(str(cell.at["seed"]))
        for way, table in ((ORDER, in_order(model, size)), (ANEW, begun(model, size, seed))):
            larger = build_vit(replace(model.config, image_size=size))
            larger.load_state_dict(model.state_dict() | {"position.weight": table})
            pipeline = cell.recipe.preprocessing.at(size)
            save(larger, run / f"{FILES[way]}.safetensors", labels=model.labels, preprocessing=pipeline)
    return {}


def in_order(model: ViT, size: tuple[int, int]) -> Tensor:
    """The positions stretched along the sequence of patches as it is read, as if pictures had one dimension."""
    table = model.state_dict()["position.weight"]  # [1, covered+N, D]
    patches = model.config.shape.patches
    covered = table.shape[1] - patches
    wanted = replace(model.config, image_size=size).shape.patches
    stretched = F.interpolate(table[:, covered:].transpose(1, 2), wanted, mode="linear", align_corners=False)
    return torch.cat((table[:, :covered], stretched.transpose(1, 2)), 1)


def begun(model: ViT, size: tuple[int, int], seed: int) -> Tensor:
    """Positions as an untrained model has them; the class token's is kept, as it is when others are interpolated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = build_vit(replace(model.config, image_size=size)).state_dict()["position.weight"]
    table = model.state_dict()["position.weight"]
    covered = table.shape[1] - model.config.shape.patches
    return torch.cat((table[:, :covered], fresh[:, covered:]), 1)


def read(results: Sequence[Result], scale: Scale) -> Answer:
    tests, pictures = grouped(results, "positions"), judged_on(results)
    if missing := lacking(tests, FILES):
        return too_early(missing, LIMITS)
    against = {way: difference(tests[GRID,], tests[way,], pictures) for way in (SAME, ANEW, ORDER)}
    finding, agreement = found(against)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("fine-tuned at", "rate", "test", "2-D interpolation is better by"),
        rows=tuple(
            (
                way,
                rate_of(results, {"positions": way}),
                told(tests[way,], pictures),
                told_difference(against[way]) if way in against else "",
            )
            for way in FILES
        ),
        charts=(
            Chart(
                "Fine-tuned at the size of pre-training, and at a larger one with three kinds of positions",
                "dots",
                (series("test", {way: tests[way,] for way in FILES}, pictures),),
                y_name="top-1 on test pictures",
            ),
        ),
        limits=LIMITS,
    )


def found(against: Mapping[str, Difference]) -> tuple[str, Agreement]:
    """What the larger size brings, and what interpolation in two dimensions brings there."""
    size, anew, order = against[SAME], against[ANEW], against[ORDER]
    sentence = (
        f"Fine-tuning at the larger size brings {worth(size)}; there 2-D interpolation brings {worth(anew)} against positions "
        f"begun anew, and {worth(order)} against reading order"
    )
    if any(each.clear and each.mean < 0 for each in (size, anew)):
        return f"{sentence}.", "disagrees"
    if size.clear and anew.clear:
        return f"{sentence}.", "agrees"
    if size.clear or anew.clear:
        return f"{sentence}.", "unclear"
    return f"{sentence}: no difference at this scale.", "no difference"


def worth(change: Difference) -> str:
    """A difference in points; perhaps, where it may be chance."""
    return points(change) if change.clear else f"perhaps {points(change)}"


STUDY = Study(
    name="resolution",
    question="Is it better to fine-tune at a higher resolution, and do positions have to be interpolated in two dimensions?",
    where="section 3.2",
    found=(
        "It is often beneficial to fine-tune at higher resolution than pre-training; the pre-trained position embeddings are "
        "2-D interpolated by their place in the image (no number is given for leaving that out)."
    ),
    scales={
        "test": Scale(
            "digits", 0.3, "one core", seeds=1, steps=4, batch=32, rates=(0.03,),
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2, "base_rate": 1e-3, "base_steps": 8},
        ),
        # Width 64, depth 4: 900 pictures/s of 16 patches on a core, 350 of 49. Pre-training 3,000 steps × 128: 430 s, and 10
        # s to judge, × 3 seeds = 1,320 s. Fine-tuning 500 steps × 128, three tries and three seeds: at the same size 6 × 85 s
        # = 510 s, at the larger one 3 ways × 6 × 210 s = 3,780 s. On two cores: 47 min.
        "laptop": Scale(
            "fashion-mnist", 47, "two cores", seeds=3, steps=500, batch=128, rates=(0.01, 0.03, 0.1),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4, "base_rate": 1e-3, "base_steps": 3_000},
        ),
        # S/16 from 192² (patches are whole) to 384²: pre-training 50,000 steps × 512 at 2,000 pictures/s: 3.6 h; fine-tuning
        # 5,000 steps × 512 at 450: 1.6 h, six runs of each of four ways (a quarter of that at the same size). 3 × 3.6 + 18 ×
        # 1.6 + 6 × 0.4 h.
        "gpu": Scale(
            "imagenet", 2_500, "one GPU", seeds=3, steps=5_000, batch=512, rates=(0.003, 0.01, 0.03),
            sizes={
                "width": 384, "depth": 12, "heads": 6, "patch": 16, "image": 384, "base_rate": 1e-3,
                "base_steps": 50_000, "precision": "bf16",
            },
        ),
        # B/16 on ImageNet for 300 epochs at batch 4,096 with 3e-3, table 3; then 20,000 steps of 512 at 384², table 4. 10,000
        # pictures/s on eight GPUs at 192²: 10.7 h a model; 1.1 h each fine-tuning at 2,500 pictures/s. 3 × 10.7 + 21 × 1.1 +
        # 7 × 0.3 h.
        "cluster": Scale(
            "imagenet", 3_450, "8 GPUs", seeds=3, steps=20_000, batch=512, rates=(0.003, 0.01, 0.03, 0.06),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 384, "dropout": 0.1,
                "weight_decay": 0.3, "base_rate": 3e-3, "base_steps": 93_600, "base_batch": 4096, "precision": "bf16",
            },
        ),
    },
    plan=plan,
    read=read,
    measure=measure,
)  # fmt: skip
