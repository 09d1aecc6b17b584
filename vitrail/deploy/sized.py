"""A file for pictures of any size: opened for another than its own, and held against the model at others.

B pictures, h×w the grid of patches.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.deploy.gate import AtSize, compare
from vitrail.deploy.generated import generated
from vitrail.deploy.runtime import Contract, Runtime
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import from_json, to_json
from vitrail.nn.embed import divide

FEW = 4  # pictures of each size
STEP = 8  # pixels, for ResNets, which have no patches
LEAST = 2  # patches a side, from which on positions are resampled inside the graph


def at_size(path: Path, contract: Contract, size: tuple[int, int]) -> Contract:
    """What the file promises for pictures of this size."""
    if size == contract.preprocessing.size:
        return contract
    if not contract.any_size:
        own = "{}×{}".format(*contract.preprocessing.size)
        raise ValueError(
            f"{path} is exported, and --size is settled in it, {own}: leave it out, or export the model with --dynamic-size"
        )
    config = from_json(contract.config)
    if isinstance(config, ViTConfig) and min(divide(size, config.embed.stride)) < LEAST:
        raise ValueError(f"--size {size[0]}×{size[1]}: {path} takes pictures from {LEAST} patches a side on")
    changed = to_json(replace(config, image_size=size))
    return replace(contract, preprocessing=contract.preprocessing.at(size), config=changed)


def other_sizes(model: ViT | BiT, size: tuple[int, int]) -> list[tuple[int, int]]:
    """One smaller and one larger, neither as wide as high: a graph that mistakes one side for the other is found out."""
    stride = model.embed.stride if isinstance(model, ViT) else STEP
    h, w = (max(LEAST, side // stride) for side in size)
    smaller = max(LEAST, h // 2), max(LEAST, 2 * w // 3)
    larger = h + max(1, h // 4), w + max(2, w // 3)
    return [(stride * h, stride * w) for h, w in (smaller, larger)]


def beside_at_others(
    model: ViT | BiT, contract: Contract, first: Runtime, second: Runtime, told: Callable[[str, int, int], None] | None
) -> tuple[AtSize, ...]:
    """The model and the file on generated pictures of other sizes."""
    what, found = "features" if model.config.classes is None else "logits", []
    sizes = other_sizes(model, contract.preprocessing.size)
    for number, size in enumerate(sizes, start=1):
        pixels = generated(contract.preprocessing.at(size), FEW)
        found.append(AtSize(size, compare(first(pixels), second(pixels), several=contract.several, what=what)))
        if told:
            told("other sizes", number, len(sizes))
    return tuple(found)
