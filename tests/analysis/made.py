"""Small models whose attention is known, or whose every weight matters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.parity.peers import spread
from tests.variants import SMALL, VIT_SLOTS
from vitrail.models.vit import ViT
from vitrail.nn import attention

SHARED = Path(__file__).parents[3] / "shared"
DEIT = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
SAMPLES = SHARED / "data" / "imagenet-samples"
with_real_files = pytest.mark.skipif(
    not (DEIT.exists() and SAMPLES.exists()), reason="DeiT-Ti and photographs are not beside this checkout (../shared)"
)


def shaken(slot: str = "paper", **settings: Any) -> ViT:
    """A small model of this slot in which nothing is zero or one."""
    model = spread(vitrail.build(**{**SMALL, **VIT_SLOTS[slot], **settings}), 0.1).eval()
    assert isinstance(model, ViT)
    return model


def uniform(**settings: Any) -> ViT:
    """A model that attends to every token alike, because queries and keys are zero."""
    model = shaken(**settings)
    with torch.no_grad():
        for block in model.blocks:
            width = block.msa.qkv.weight.shape[0] // 3
            block.msa.qkv.weight[: 2 * width] = 0
            block.msa.qkv.bias[: 2 * width] = 0
    return model


def resnet() -> nn.Module:
    """A model without attention, and without memory."""
    with torch.device("meta"):
        return vitrail.build("BiT-R50x1")


def pictures(model: ViT, count: int = 1) -> Tensor:
    return torch.randn(count, model.config.channels, *model.config.image_size)


@contextmanager
def materialised() -> Iterator[list[Tensor]]:
    """Attention as the textbook has it, in place of the fused kernel: each layer's matrix is stored, and its gradient kept."""
    stored: list[Tensor] = []

    def plain(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, scale: None = None
    ) -> Tensor:
        assert (dropout_p, scale) == (0, None)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        matrix = torch.softmax(scores if attn_mask is None else scores + attn_mask, -1)
        if matrix.requires_grad:
            matrix.retain_grad()
        stored.append(matrix)
        return matrix @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.F, "scaled_dot_product_attention", plain)
        yield stored
