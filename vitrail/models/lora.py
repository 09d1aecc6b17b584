"""Partial fine-tuning: the head, the last layers, low-rank additions (LoRA), the text tower, or the whole model."""

import re

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.models.base import Model

TUNE_MODE = re.compile(r"full|head|text|last-(?P<last>[1-9]\d*)|lora(?:-(?P<rank>[1-9]\d*))?")


class LowRank(nn.Module):
    """W + BA: a frozen matrix plus a trained difference of low rank (Hu et al. 2021), zero at initialisation."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(weight.new_empty(rank, columns))
        self.b = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.normal_(self.a, std=columns**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def check_tune(mode: str) -> re.Match[str]:
    """Return the match of a tuning mode; raise ValueError for an unknown one."""
    match = TUNE_MODE.fullmatch(mode)
    if match is None:
        raise ValueError(
            f"unknown tuning mode {mode!r}: use full, head, last-N (last-4), lora, lora-R (lora-8) or text"
        )
    return match


def tune(model: Model, mode: str) -> None:
    """Freeze the parameters that are not trained; `lora` (rank 8, `lora-16` for another) adds to each matrix of the layers."""
    match = check_tune(mode)
    if mode == "full":
        return
    if (mode == "text") != (model.config.text_tower is not None):
        for_towers = (
            "has no text tower: use head, last-N or lora" if mode == "text" else "has a text tower: use full or text"
        )
        raise ValueError(f"tune={mode!r}: the model {for_towers}")
    if mode == "text":  # the image tower is locked (LiT, Zhai et al. 2022)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = parameter.requires_grad and not name.startswith("image.")
        return
    top = model.config.depth + 1
    last = int(match["last"]) if match["last"] else 0
    if last > model.config.depth:
        raise ValueError(f"tune={mode!r}: the model has {model.config.depth} layers")
    for name, parameter in model.named_parameters():
        is_tuned = name.startswith("head.") or (last > 0 and model.layer_index(name) > top - 1 - last)
        parameter.requires_grad = parameter.requires_grad and is_tuned  # what the model never reads stays frozen
    if mode.startswith("lora"):
        for module in model.lora_modules():
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, int(match["rank"] or 8)))


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the low-rank differences to their matrices, so that a plain model is saved."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
