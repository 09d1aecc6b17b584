"""Which layer a parameter belongs to, and whether weight decay is meant for it: what optimisers ask of a model."""

import re

from torch import Tensor

from vitrail.models.bit import BiT
from vitrail.models.vit import ViT

BLOCK = re.compile(r"blocks\.(\d+)\.")
STAGE = re.compile(r"stages\.(\d+)\.(\d+)\.")


def depth_of(model: ViT | BiT) -> int:
    """Layers between what takes the image and the head."""
    return len(model.blocks) if isinstance(model, ViT) else sum(model.config.stages)


def layer_of(model: ViT | BiT, name: str) -> int:
    """0 for what stands before the first layer, 1 to L for the layers, L + 1 for what follows the last."""
    if isinstance(model, ViT):
        found = BLOCK.match(name)
        before = name.startswith(("embed.", "prefix.", "position.", "token_norm."))
        place = int(found[1]) if found else None
    else:
        found = STAGE.match(name)
        before = name.startswith("root.")
        place = sum(model.config.stages[: int(found[1])]) + int(found[2]) if found else None
    if place is not None:
        return place + 1
    return 0 if before else depth_of(model) + 1


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices and filters: not for norms, biases and scales, positions, tokens and probes."""
    token = name.startswith(("position.", "prefix.")) or name.endswith(("probe", "mask_token"))
    return parameter.ndim >= 2 and not token
