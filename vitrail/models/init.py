"""Weight initialisation after the published references.

| scheme | after | what it does |
|---|---|---|
| `vit`  | google-research/vision_transformer, big_vision | patches and convolutions LeCun normal; q, k, v, out and MLP Xavier uniform; MLP biases N(0, 1e-6²); positions N(0, 0.02²); class token zero; head zero |
| `deit` | facebookresearch/deit, timm | every linear weight, token, position and the head truncated N(0, 0.02²); biases zero; patches and convolutions uniform ±1/√fan-in, biases too, as a convolution's default |

In both: LayerNorm and GroupNorm start as the identity, LayerScale at its given value, registers at N(0, 1e-6²) (DINOv2),
relative positions, and those of MViT v1, at truncated N(0, 0.02²) (BEiT, Swin, MViT), the norms at the end of branches (Swin
v2) at zero and its scale at 10, the attention pool's probe Xavier uniform (big_vision), the classifier of pixels at
N(0, 0.01²) (mmsegmentation), positions in time and the projection after attention over time at zero (TimeSformer, whose first
layer is an exception). Transposed convolutions and recurrent networks have PyTorch's own initial values.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.models.text import PairLogits, TextEncoder
from vitrail.nn.attention import MSA
from vitrail.nn.block import DividedBlock, LayerScale, ResPostNormBlock
from vitrail.nn.decoder import Decoder
from vitrail.nn.embed import Embedding, PrefixTokens
from vitrail.nn.head import DistilledHead, NormHead, SimilarityHead, TanhHead
from vitrail.nn.mlp import MLP, GatedMLP
from vitrail.nn.multiscale import PooledAttention, SeparatePositions
from vitrail.nn.pool import AttentionPool
from vitrail.nn.position import (
    FactorisedTable,
    Learned1DTable,
    Learned2DTable,
    RelativeEmbedding1D,
    RelativePositionBias,
)
from vitrail.nn.window import CosineWindowAttention, CosineWindowBlock, WindowAttention

SCHEMES = ("vit", "deit")

M = TypeVar("M", bound=nn.Module)


def build_and_fill(build: Callable[[], M], fill: Callable[[M], None]) -> M:
    """Return a module whose weights are written once: built on the meta device, allocated, then filled.

    Under `torch.device("meta")` the module is not allocated, which is used to count costs.
    """
    target = torch.get_default_device()
    if target.type == "meta":
        return build()
    with torch.device("meta"):
        module = build()
    module.to_empty(device=target)
    fill(module)
    return module


@torch.no_grad()
def initialise(model: nn.Module, scheme: str) -> None:
    """Fill every parameter and buffer of a model, each kind of module after its reference."""
    assert scheme in SCHEMES, scheme
    linear = nn.init.xavier_uniform_ if scheme == "vit" else _truncated
    head = nn.init.zeros_ if scheme == "vit" else _truncated
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        elif isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.reset_parameters()
            if scheme == "vit":
                _lecun(module.weight, module.weight[0].numel())
                _bias(module)
        elif isinstance(module, (nn.ConvTranspose2d, nn.RNNBase, nn.RNNCellBase)):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):  # unless a case below is more precise
            linear(module.weight)
            _bias(module)
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.weight, module.initial)
        elif isinstance(module, (Learned1DTable, Learned2DTable)):
            for weight in module.parameters(recurse=False):
                (nn.init.normal_ if scheme == "vit" else _truncated)(weight, std=0.02)
        elif isinstance(module, FactorisedTable):
            (nn.init.normal_ if scheme == "vit" else _truncated)(module.space_weight, std=0.02)
            nn.init.zeros_(module.time_weight)
        elif isinstance(module, (RelativePositionBias, RelativeEmbedding1D, SeparatePositions)):
            for weight in module.parameters(recurse=False):
                _truncated(weight)
        elif isinstance(module, PrefixTokens):
            if module.outputs is not None:
                (nn.init.zeros_ if scheme == "vit" else _truncated)(module.outputs)
            if module.registers is not None:
                nn.init.normal_(module.registers, std=1e-6)

    for module in model.modules():
        if isinstance(module, Embedding):
            projection = getattr(module, "projection", None)
            if isinstance(projection, nn.Linear):
                if scheme == "vit":
                    _lecun(projection.weight, projection.in_features)
                else:
                    projection.reset_parameters()  # the same values as a convolution's
        elif isinstance(module, MSA) and scheme == "vit":
            for part in module.qkv.weight.chunk(3):  # three D×D matrices to Xavier, not one of 3D×D
                nn.init.xavier_uniform_(part)
        elif isinstance(module, (MLP, GatedMLP)) and scheme == "vit":
            for fc in (module.fc1, module.fc2):
                nn.init.normal_(fc.bias, std=1e-6)
            if isinstance(module, GatedMLP):
                for part in module.fc1.weight.chunk(2):
                    nn.init.xavier_uniform_(part)
        elif isinstance(module, (CosineWindowBlock, ResPostNormBlock)):  # every layer starts as the identity
            for norm in (module.norm1, module.norm2):
                nn.init.zeros_(norm.weight)
        elif isinstance(module, DividedBlock):
            nn.init.zeros_(module.time_projection.weight)
        elif isinstance(module, CosineWindowAttention):
            nn.init.constant_(module.log_scale, math.log(10.0))
            nn.init.zeros_(module.q_bias)
            nn.init.zeros_(module.v_bias)
        elif isinstance(module, WindowAttention):
            _truncated(module.offsets)
        elif isinstance(module, PooledAttention):
            for table in module.offsets:
                _truncated(table)
        elif isinstance(module, AttentionPool):
            nn.init.xavier_uniform_(module.probe[0])
            for part in module.kv.weight.chunk(2):
                linear(part)
        elif isinstance(module, TanhHead) and isinstance(module.pre_logits, nn.Linear):
            _lecun(module.pre_logits.weight, module.pre_logits.in_features)
            if isinstance(module.linear, nn.Linear):
                head(module.linear.weight)
        elif isinstance(module, SimilarityHead | NormHead) and isinstance(module.linear, nn.Linear):
            head(module.linear.weight)
        elif isinstance(module, (Decoder, TextEncoder, PairLogits)):
            module.reset_parameters()
        elif isinstance(module, DistilledHead):
            head(module.label.weight)
            head(module.teacher.weight)

    last = getattr(model, "head", None)
    if isinstance(last, nn.Linear):
        head(last.weight)


def _truncated(weight: Tensor, std: float = 0.02) -> None:
    nn.init.trunc_normal_(weight, std=std)


def _lecun(weight: Tensor, fan_in: int) -> None:
    """Fill from a normal distribution of variance 1/fan_in, truncated at two deviations and widened to that variance."""
    std = math.sqrt(1 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _bias(module: nn.Linear | nn.Conv2d | nn.Conv3d) -> None:
    if module.bias is not None:
        nn.init.zeros_(module.bias)
