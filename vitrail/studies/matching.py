"""Compute-matched models of three families: a ResNet given by the scale, a hybrid and a ViT whose widths match its cost.

Cost is the number of multiply-adds per image, counted on the models (`vitrail describe`). ResNets have few widths and Vision
Transformers many, so the ResNet sets the target.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.flops import count
from vitrail.models.hybrid import Hybrid
from vitrail.models.registry import configure
from vitrail.studies.base import choose_image_size, configure_study_vit, count_macs, has_small_images, patch_factor
from vitrail.studies.study import Cell, CellResult, StudySetup

RESNET, HYBRID, VIT = "ResNet", "hybrid", "ViT"
FAMILIES = (RESNET, HYBRID, VIT)
MAX_COST_DIFFERENCE = 0.1  # relative to the ResNet's cost
TestScores = Mapping[str, Mapping[int, Sequence[float]]]  # family -> size of the model or training set -> one per seed


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


def match_cost(
    setup: StudySetup, bit: Mapping[str, Any], hybrid: Mapping[str, Any], depth: int | None = None
) -> dict[str, ModelConfig]:
    """Return a ResNet, a hybrid and a ViT of about the same multiply-adds per image at the same image size.

    The hybrid is left out if no width matches: its ResNet alone may cost more than the target.
    """
    trunk = Hybrid(tuple(hybrid["stages"]), hybrid["patch"] * patch_factor(setup))
    patch = setup.scale.sizes["patch"] * patch_factor(setup)
    step = math.lcm(patch, trunk.stride)
    target = configure_resnet(setup, bit, step)
    heads, size = setup.scale.sizes["heads"], target.image_size
    deep = {} if depth is None else {"depth": depth}

    def pure(width: int) -> TokenConfig:
        return configure_study_vit(setup, width=width, image_size=size, **deep)

    def mixed(width: int) -> TokenConfig:
        return configure_study_vit(setup, width=width, image_size=size, embed=trunk, **deep)

    cost = count_macs(target)
    others = {HYBRID: find_nearest_width(cost, mixed, heads), VIT: find_nearest_width(cost, pure, heads)}
    near = {
        name: model for name, model in others.items() if abs(count_macs(model) - cost) <= MAX_COST_DIFFERENCE * cost
    }
    if VIT not in near:
        raise ValueError(
            f"no ViT width matches the ResNet's {cost / 1e6:,.1f} M multiply-adds per image (nearest "
            f"{count_macs(others[VIT]) / 1e6:,.1f} M): use other data, or another scale"
        )
    return {RESNET: target, **near}


def find_nearest_width(cost: int, build: Callable[[int], TokenConfig], step: int) -> TokenConfig:
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


def size_range(tests: TestScores, *families: str) -> tuple[int, int] | None:
    """Return the smallest and the largest size that all these families have; None if there are fewer than two."""
    shared = sorted(set.intersection(*(set(tests.get(family, {})) for family in families)))
    return (shared[0], shared[-1]) if len(shared) > 1 else None


def measure_cost(cell: Cell, run: Path) -> dict[str, Any]:
    """Return parameters and multiply-adds of a final run's model; {} for other phases."""
    if cell.phase != "final":
        return {}
    cost = count(cell.recipe.model)
    return {"parameters": cost.params, "macs": cost.macs}


def describe_parameters(results: Sequence[CellResult]) -> tuple[str, ...]:
    """Return notes with parameters and cost of the largest model of each family; parameters are not matched."""
    known = sorted((r for r in results if "macs" in r.numbers), key=lambda result: result.numbers["macs"])
    models = {str(result.at["family"]): result.numbers for result in known}
    if not models:
        return ()
    largest = "" if len({result.numbers["macs"] for result in known}) == len(models) else ", of the largest"
    sizes = [
        f"{family} {models[family]['parameters'] / 1e6:.2f} M parameters for {models[family]['macs'] / 1e6:,.1f} M multiply-adds "
        "per image"
        for family in FAMILIES
        if family in models
    ]
    absent = f"The hybrid is left out: none costs within {100 * MAX_COST_DIFFERENCE:.0f} % of the others."
    return (
        f"Compute per image is matched to within {100 * MAX_COST_DIFFERENCE:.0f} %; parameters are "
        f"not{largest}: {'; '.join(sizes)}.",
        *(() if HYBRID in models else (absent,)),
    )
