"""Models of three families that cost the same: a ResNet as the scale names it, and the widths that match it.

What a picture costs is counted on the models themselves (`vitrail describe`), so nothing is guessed. ResNets come in few widths
and Vision Transformers in many, so the ResNet says what the others may cost.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.models.bit import BiTConfig
from vitrail.models.cost import count
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViTConfig
from vitrail.studies.base import image_size, is_small, larger, macs, vit
from vitrail.studies.study import Cell, Result, Setup

RESNET, HYBRID, VIT = "ResNet", "hybrid", "ViT"
FAMILIES = (RESNET, HYBRID, VIT)
NEAR = 0.1  # of the ResNet's cost: what counts as the same
Tests = Mapping[
    str, Mapping[int, Sequence[float]]
]  # by family and size, of models or of the training set; of each seed


def resnet(setup: Setup, bit: Mapping[str, Any], step: int) -> BiTConfig:
    """A BiT by its stages, factor and root; photographs have the large root, whatever the scale was made for."""
    return BiTConfig(
        stages=tuple(bit["stages"]),
        factor=bit["factor"],
        root=bit.get("root", "large") if is_small(setup) else "large",
        channels=setup.facts.channels,
        classes=setup.facts.classes,
        image_size=image_size(setup, step),
    )


def matched(
    setup: Setup, bit: Mapping[str, Any], hybrid: Mapping[str, Any], depth: int | None = None
) -> dict[str, ViTConfig | BiTConfig]:
    """A ResNet, a hybrid and a Vision Transformer that cost about the same for a picture, at the same size of pictures.

    A family of which no width comes near is left out: a hybrid's ResNet alone may cost more than all of the other.
    """
    trunk = Hybrid(tuple(hybrid["stages"]), hybrid["patch"] * larger(setup))
    patch = setup.scale.sizes["patch"] * larger(setup)
    step = math.lcm(patch, trunk.stride)
    target = resnet(setup, bit, step)
    heads, size = setup.scale.sizes["heads"], target.image_size
    deep = {} if depth is None else {"depth": depth}

    def pure(width: int) -> ViTConfig:
        return vit(setup, width=width, image_size=size, **deep)

    def mixed(width: int) -> ViTConfig:
        return vit(setup, width=width, image_size=size, embed=trunk, **deep)

    cost = macs(target)
    others = {HYBRID: nearest(cost, mixed, heads), VIT: nearest(cost, pure, heads)}
    near = {name: model for name, model in others.items() if abs(macs(model) - cost) <= NEAR * cost}
    if VIT not in near:
        raise ValueError(
            f"no width of a ViT costs as much as the ResNet on these pictures ({macs(others[VIT]) / 1e6:,.1f} M multiply-adds "
            f"a picture, and {cost / 1e6:,.1f} M): use other data, or another scale"
        )
    return {RESNET: target, **near}


def nearest(cost: int, build: Callable[[int], ViTConfig], step: int) -> ViTConfig:
    """The model whose cost of a picture is nearest, of all widths that are a multiple of `step`.

    Matrices grow with the square of the width and attention with the width, so three widths tell the cost of all.
    """
    one, two, three = (macs(build(each * step)) for each in (1, 2, 3))
    square = (three - 2 * two + one) / 2
    slope = two - one - 3 * square
    rest = one - square - slope - cost
    wanted = (math.sqrt(max(0.0, slope * slope - 4 * square * rest)) - slope) / (2 * square)
    near = [build(max(1, each) * step) for each in (math.floor(wanted), math.ceil(wanted))]
    return min(near, key=lambda model: abs(macs(model) - cost))


def ends(tests: Tests, *families: str) -> tuple[int, int] | None:
    """The smallest and the largest size that these families have."""
    shared = sorted(set.intersection(*(set(tests.get(family, {})) for family in families)))
    return (shared[0], shared[-1]) if len(shared) > 1 else None


def weighed(cell: Cell, run: Path) -> dict[str, Any]:
    """What a model has and costs, of a final run."""
    if cell.phase != "final":
        return {}
    found = count(cell.recipe.model)
    return {"parameters": found.params, "macs": found.macs}


def unmatched(results: Sequence[Result]) -> tuple[str, ...]:
    """That parameters are not what is matched, with the costliest model of each family."""
    known = sorted((r for r in results if "macs" in r.numbers), key=lambda result: result.numbers["macs"])
    models = {str(result.at["family"]): result.numbers for result in known}
    if not models:
        return ()
    largest = "" if len({result.numbers["macs"] for result in known}) == len(models) else ", of the largest"
    told = [
        f"{family} {models[family]['parameters'] / 1e6:.2f} M parameters for {models[family]['macs'] / 1e6:,.1f} M multiply-adds "
        "a picture"
        for family in FAMILIES
        if family in models
    ]
    left_out = () if HYBRID in models else (f"No hybrid costs within {100 * NEAR:.0f} % of these: there is none.",)
    return (
        f"Compute of a picture is matched to {100 * NEAR:.0f} % or better, and parameters are not{largest}: {'; '.join(told)}.",
        *left_out,
    )
