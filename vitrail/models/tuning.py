"""How much of a trained model is trained again: its head, its last layers, low-rank additions (LoRA), or all of it."""

import re

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.models.bit import BiT
from vitrail.models.layers import depth_of, layer_of
from vitrail.models.vit import ViT

HOW = re.compile(r"full|head|last-(?P<last>[1-9]\d*)|lora(?:-(?P<rank>[1-9]\d*))?")


class LowRank(nn.Module):
    """W + BA: a matrix that stays as it is, and a trained difference of a small rank (Hu et al. 2021). Nothing at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(weight.new_empty(rank, columns))
        self.b = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.normal_(self.a, std=columns**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def check_tune(how: str) -> None:
    """Refuses what `tune` would not know."""
    if not HOW.fullmatch(how):
        raise ValueError(f"unknown way to tune {how!r}: use full, head, last-N (last-4), lora or lora-R (lora-8)")


def tune(model: ViT | BiT, how: str) -> None:
    """Freezes what is not to be trained; `lora` (of rank 8 unless it says `lora-16`) adds to every matrix of the layers."""
    check_tune(how)
    found = HOW.fullmatch(how)
    assert found is not None
    if how == "full":
        return
    top = depth_of(model) + 1
    last = int(found["last"]) if found["last"] else 0
    if last > depth_of(model):
        raise ValueError(f"--tune {how}: the model has {depth_of(model)} layers")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head.") or (last > 0 and layer_of(model, name) > top - 1 - last)
    if how.startswith("lora"):
        if not isinstance(model, ViT):
            raise ValueError("lora adds to a Transformer's matrices: use head, last-N or full for a ResNet")
        for module in list(model.blocks.modules()):
            if isinstance(module, nn.Linear):
                parametrize.register_parametrization(module, "weight", LowRank(module.weight, int(found["rank"] or 8)))


@torch.no_grad()
def merged(model: nn.Module) -> None:
    """Low-rank additions become part of the matrices: what is saved is a plain model."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
