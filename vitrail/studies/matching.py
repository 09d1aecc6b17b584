"""Models of three families that cost the same: a ResNet as the scale names it, and the widths that match it.

What a picture costs is counted on the models themselves (`vitrail describe`), so nothing is guessed. ResNets come in few widths
and Vision Transformers in many, so the ResNet says what the others may cost.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViTConfig
from vitrail.studies.base import image_size, is_small, larger, macs, vit
from vitrail.studies.study import Setup

RESNET, HYBRID, VIT = "ResNet", "hybrid", "ViT"


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
    """A ResNet, a hybrid and a Vision Transformer that cost about the same for a picture, at the same size of pictures."""
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
    return {RESNET: target, HYBRID: nearest(cost, mixed, heads), VIT: nearest(cost, pure, heads)}


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
