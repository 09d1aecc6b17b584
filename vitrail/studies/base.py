"""Shared building blocks of studies: the paper's model at the size of a scale, its recipe, tuning, matched models, few-shot.

A scale's `sizes` gives width, depth, heads and patch. Images of up to 64 pixels keep their size. Larger images are resized to
128² with patches four times as large, so the number of tokens is that of a small image. If `sizes` has `image`, every image is
resized to that side and patches are not enlarged (the larger scales).

Models of three families are matched by multiply-adds per image, counted on the models (`vitrail describe`). ResNets have few
widths and Vision Transformers many, so the ResNet of the scale sets the target.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import AugmentSlot, Fit, Flip, RandomResizedCrop
from vitrail.evaluation.probes import ProbeSettings, probe
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.flops import count
from vitrail.models.hybrid import Hybrid
from vitrail.models.registry import configure, configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.studies.study import NO_FINDING, Answer, Cell, GridPoint, Results, StudyScale, StudySetup
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Recipe
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.schedule import Linear

# The scales of studies, with the settings that most studies share.
on_one_core = partial(StudyScale, data="digits", minutes=0.2, hardware="one core", seeds=2, steps=4, batch=32)
on_two_cores = partial(StudyScale, data="cifar-10", hardware="two cores", seeds=3, steps=800, batch=64)
on_gpu = partial(StudyScale, data="cifar-10", hardware="one GPU", seeds=3, steps=10_000, batch=256)
on_cluster = partial(StudyScale, data="imagenet-21k", hardware="8 GPUs", steps=102_500, batch=4096)
SHOTS, DRAWS = 5, 5
MAX_WHOLE_SIDE, PHOTO_SIDE, PHOTO_PATCH_FACTOR = 64, 128, 4  # pixels, pixels, times
TRAINING_PASSES = 3  # forward, backward to the inputs, backward to the weights: the same number of multiply-adds each
RESNET, HYBRID, VIT = "ResNet", "hybrid", "ViT"
FAMILIES = (RESNET, HYBRID, VIT)
MAX_COST_DIFFERENCE = 0.1  # relative to the ResNet's cost
Config = TypeVar("Config", bound=ModelConfig)
MakeRecipe = Callable[[GridPoint, float, int], Recipe]  # of a grid point, a learning rate and a seed


def vit_sizes(width: int, depth: int, heads: int, patch: int, **others: Any) -> dict[str, Any]:
    """Return the sizes of a scale: those of its Vision Transformer, and others."""
    return {"width": width, "depth": depth, "heads": heads, "patch": patch, **others}


# Ti on CIFAR-10; B/16 and L/16 with the settings of table 3 for ImageNet-21k.
TI_CIFAR = vit_sizes(192, 12, 3, 4, precision="bf16", warmup=1_000)
TABLE_3 = {"image": 224, "dropout": 0.1, "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000}
B16, L16 = vit_sizes(768, 12, 12, 16, **TABLE_3), vit_sizes(1024, 24, 16, 16, **TABLE_3)


def measure_five_shot(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the 5-shot test accuracy of a final run's model, mean over five training subsets; {} for other phases."""
    return measure_five_shot_of(str(run / "model.safetensors"), cell)


def measure_five_shot_of(model: str, cell: Cell) -> dict[str, Any]:
    """Return the 5-shot accuracy of any model file on the data of a final run, e.g. of its initial weights."""
    if cell.phase != "final" or cell.recipe.data.task == "multi":
        return {}
    data = replace(cell.recipe.data, per_class=SHOTS * DRAWS, drawn=0, test=True)  # few images: features are cheap
    prepared = prepare_data(data)
    if prepared.train.is_multi_label:  # few-shot accuracy is defined for single labels
        return {}
    settings = ProbeSettings(shots=(SHOTS,), draws=DRAWS)
    report = probe(model, data, ["few-shot"], settings, cache=False, prepared=prepared)
    return {"five-shot": report.results[0].score}


def plan_tuned(setup: StudySetup, results: Results, points: Sequence[GridPoint], make_recipe: MakeRecipe) -> list[Cell]:
    """Return the tuning cells of every grid point, and the final cells of the points whose tuning cells are all finished.

    A tuning cell is {**point, "rate": lr, "seed": 0} in the phase "tune". A scale with one learning rate has none.
    """
    lrs = setup.scale.lrs
    tried = lrs if len(lrs) > 1 else ()
    tuning = [
        Cell({**point, "rate": lr, "seed": 0}, make_recipe(point, lr, 0), "tune") for point in points for lr in tried
    ]
    return tuning + [
        Cell({**point, "rate": best, "seed": seed}, make_recipe(point, best, seed))
        for point in points
        if (best := select_lr(point, lrs, results)) is not None
        for seed in range(setup.scale.seeds)
    ]


def select_lr(point: GridPoint, lrs: Sequence[float], results: Results, phase: str = "tune") -> float | None:
    """Return the learning rate with the best validation accuracy, the first of ties; None while a tuning run is missing."""
    if len(lrs) == 1:
        return lrs[0]
    scores: list[float] = []
    for lr in lrs:
        at = {**point, "rate": lr, "seed": 0}
        matches = [result for result in results if result.phase == phase and dict(result.at) == at]
        if not matches:
            return None
        score = float(matches[0].numbers["validation"])
        scores.append(-math.inf if math.isnan(score) else score)
    return lrs[scores.index(max(scores))]


def plan_models(setup: StudySetup, results: Results, models: Sequence[tuple[GridPoint, ModelConfig]]) -> list[Cell]:
    """Return the cells of models that differ in nothing else, each with its own tuning."""
    by_point = {tuple(point.values()): model for point, model in models}

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        return build_recipe(setup, by_point[tuple(point.values())], lr, seed)

    return plan_tuned(setup, results, [point for point, _ in models], make_recipe)


def has_small_images(setup: StudySetup) -> bool:
    """Return True if images keep their size."""
    return max(setup.facts.side) <= MAX_WHOLE_SIDE and not setup.facts.several_sizes


def patch_factor(setup: StudySetup) -> int:
    """Return the factor by which patches of this scale are enlarged for these images."""
    return 1 if "image" in setup.scale.sizes or has_small_images(setup) else PHOTO_PATCH_FACTOR


def choose_image_size(setup: StudySetup, multiple: int) -> tuple[int, int]:
    """Return the input size in pixels, rounded up to a multiple of `multiple`."""
    side = setup.scale.sizes.get("image", None if has_small_images(setup) else PHOTO_SIDE)
    height, width = setup.facts.side if side is None else (side, side)
    return math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple


def configure_study_vit(setup: StudySetup, **changes: Any) -> TokenConfig:
    """Return the paper's model at this scale: patches, class token, learned 1-D positions. `changes`: see `configure_tokens`."""
    sizes = setup.scale.sizes
    slots = {name: sizes[name] for name in ("width", "depth", "heads", "patch", "dropout") if name in sizes} | changes
    slots["patch"] *= patch_factor(setup)
    slots.setdefault("image_size", choose_image_size(setup, slots["patch"]))
    return configure_tokens(classes=setup.facts.classes, channels=setup.facts.channels, **slots)


def build_recipe(setup: StudySetup, model: ModelConfig, lr: float, seed: int, **changes: Any) -> Recipe:
    """Return the paper's training recipe: AdamW, warm-up, linear decay, gradients clipped to 1.

    `changes` are fields of the recipe. Validation runs once, at the end. `sizes` may give weight_decay, warmup (steps) and
    precision.
    """
    scale, size = setup.scale, model.image_size
    half = (0.5,) * setup.facts.channels
    interpolation = "bilinear" if has_small_images(setup) else "bicubic"
    steps = changes.get("steps", scale.steps)
    defaults: dict[str, Any] = {
        "name": "study",
        "data": setup.data,
        "model": model,
        "preprocessing": Preprocessing(size, size, interpolation=interpolation, mean=half, std=half, turn=True),
        "augment": choose_augmentation(setup, size),
        "objective": Classification(loss=setup.facts.loss),
        "optimizer": AdamW(lr=lr, weight_decay=scale.sizes.get("weight_decay", 0.1)),
        "schedule": Linear(warmup=scale.sizes.get("warmup", max(1, steps // 10))),
        "batch_size": scale.batch,
        "steps": steps,
        "precision": scale.sizes.get("precision", "fp32"),
        "validate_every": float(steps),  # in epochs: only at the end
        "seed": seed,
    }
    return Recipe(**(defaults | changes))


def choose_augmentation(setup: StudySetup, size: tuple[int, int]) -> tuple[AugmentSlot, ...]:
    """Return random crops and flips for large images, flips for small colour images, nothing for grey ones (digits)."""
    if not has_small_images(setup):
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    return (fit,) if setup.facts.channels == 1 else (fit, Flip())


@cache
def count_macs(model: ModelConfig) -> int:
    """Return the multiply-adds of one forward pass of one image, as `vitrail describe` counts them."""
    return count(model).macs


def count_training_macs(model: ModelConfig, n_images: int) -> int:
    """Return the multiply-adds of a training run over `n_images` images, repeats included."""
    return TRAINING_PASSES * n_images * count_macs(model)


def configure_resnet(setup: StudySetup, bit: Mapping[str, Any], multiple: int) -> ModelConfig:
    """Return a BiT ResNet with the given stages, factor and root. Large images always get the large root."""
    return configure(
        family="bit",
        stages=tuple(bit["stages"]),
        factor=bit["factor"],
        root=bit.get("root", "large") if has_small_images(setup) else "large",
        channels=setup.facts.channels,
        classes=setup.facts.classes,
        image_size=choose_image_size(setup, multiple),
    )


def match_cost(setup: StudySetup, bit: Mapping[str, Any], hybrid: Mapping[str, Any]) -> dict[str, ModelConfig]:
    """Return a ResNet, a hybrid and a ViT of about the same multiply-adds per image at the same image size.

    The hybrid is left out if no width matches: its ResNet alone may cost more than the target.
    """
    trunk = Hybrid(tuple(hybrid["stages"]), hybrid["patch"] * patch_factor(setup))
    patch = setup.scale.sizes["patch"] * patch_factor(setup)
    target = configure_resnet(setup, bit, math.lcm(patch, trunk.stride))
    cost = count_macs(target)

    def find_width(**embed: Any) -> TokenConfig:
        def build(width: int) -> TokenConfig:
            return configure_study_vit(setup, width=width, image_size=target.image_size, **embed)

        return find_nearest_width(cost, build, setup.scale.sizes["heads"])

    others = {HYBRID: find_width(embed=trunk), VIT: find_width()}
    near = {name: m for name, m in others.items() if abs(count_macs(m) - cost) <= MAX_COST_DIFFERENCE * cost}
    if VIT not in near:
        costs = f"{cost / 1e6:,.1f} M multiply-adds per image (nearest {count_macs(others[VIT]) / 1e6:,.1f} M)"
        raise ValueError(f"no ViT width matches the ResNet's {costs}: use other data, or another scale")
    return {RESNET: target, **near}


def find_nearest_width(cost: int, build: Callable[[int], Config], step: int) -> Config:
    """Return the model with the nearest cost among all widths that are multiples of `step`.

    The cost is a quadratic in the width (matrices quadratic, attention linear), so three widths determine it.
    """
    one, two, three = (count_macs(build(factor * step)) for factor in (1, 2, 3))
    square = (three - 2 * two + one) / 2
    slope = two - one - 3 * square
    rest = one - square - slope - cost
    wanted = (math.sqrt(max(0.0, slope * slope - 4 * square * rest)) - slope) / (2 * square)
    near = [build(max(1, factor) * step) for factor in (math.floor(wanted), math.ceil(wanted))]
    return min(near, key=lambda model: abs(count_macs(model) - cost))


def size_range(scores: Iterable[tuple[str, int]], *families: str) -> tuple[int, int] | None:
    """Return the smallest and the largest size that all these families have; None if there are fewer than two."""
    points = set(scores)  # family and size
    shared = sorted({size for _, size in points if all((family, size) in points for family in families)})
    return (shared[0], shared[-1]) if len(shared) > 1 else None


def measure_cost(cell: Cell, run: Path) -> dict[str, Any]:
    """Return parameters and multiply-adds of a final run's model; {} for other phases."""
    if cell.phase != "final":
        return {}
    cost = count(cell.recipe.model)
    return {"parameters": cost.params, "macs": cost.macs}


def describe_parameters(results: Results) -> tuple[str, ...]:
    """Return notes with parameters and cost of the largest model of each family; parameters are not matched."""
    known = sorted((r for r in results if "macs" in r.numbers), key=lambda result: result.numbers["macs"])
    models = {str(result.at["family"]): result.numbers for result in known}
    if not models:
        return ()
    largest = "" if len({result.numbers["macs"] for result in known}) == len(models) else ", of the largest"
    sizes = "; ".join(
        f"{family} {numbers['parameters'] / 1e6:.2f} M parameters for {numbers['macs'] / 1e6:,.1f} M multiply-adds per image"
        for family, numbers in sorted(models.items(), key=lambda item: FAMILIES.index(item[0]))
    )
    within = f"within {100 * MAX_COST_DIFFERENCE:.0f} %"
    matched = f"Compute per image is matched to {within}; parameters are not{largest}: {sizes}."
    absent = f"The hybrid is left out: none costs {within} of the others."
    return (matched,) if HYBRID in models else (matched, absent)


def incomplete_answer(missing: Sequence[str], limits: str) -> Answer:
    """Return the answer of a study whose required runs are missing."""
    return Answer(
        finding=f"{NO_FINDING}: no finished run of {'; '.join(missing)}.",
        agreement="unclear",
        columns=("missing",),
        rows=tuple((setting,) for setting in missing),
        charts=(),
        limits=limits,
    )
