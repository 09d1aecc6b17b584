"""The Vision Transformer inside of what one is given: compiled, wrapped for several processes, or as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vitrail.models.bit import BiT
from vitrail.models.vit import ViT


def vit_in(model: nn.Module) -> ViT:
    """The one ViT in this module."""
    found = [module for module in model.modules() if isinstance(module, ViT)]
    if len(found) == 1:
        return found[0]
    if any(isinstance(module, BiT) for module in model.modules()):
        raise ValueError("a ResNet has no attention to look at: give a Vision Transformer or a hybrid")
    raise ValueError(f"{type(model).__name__} holds {len(found)} Vision Transformers: give the one to look at")


def whole_vit_in(model: nn.Module) -> ViT:
    """The ViT, which must have all of its weights here."""
    vit = vit_in(model)
    if any(hasattr(parameter, "full_tensor") for parameter in vit.parameters()):  # a DTensor
        raise ValueError(
            "this model's weights are spread over processes: load the saved model to look at it, "
            "or use record_attention, which works on sharded models"
        )
    return vit


def chosen(vit: ViT, layers: list[int]) -> list[int]:
    """Layers counted from 1 to L, as `ViT.features` does; negative ones from the end."""
    depth = len(vit.blocks)
    for layer in layers:
        if layer == 0 or not -depth <= layer <= depth:
            raise ValueError(f"layer {layer} of {depth}: use 1 to {depth}, or -1 for the last")
    return sorted({layer + depth + 1 if layer < 0 else layer for layer in layers})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; then each module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
