"""Copies of modules for inference on a CPU: weights packed once in oneDNN's layout, in fp32 or bf16.

`nn.Linear` rearranges its weights in every call, or multiplies them as they are. A packed copy does that once and computes
GELU inside the matrix product (docs/benchmarks.md has the gain).
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.nn.attention import KeylessBiasLinear
from vitrail.nn.decoder import Decoder, MapDecoder
from vitrail.nn.linear import LinearLayer
from vitrail.nn.mlp import MLP

OUTPUT_MODULES = ("pool", "norm", "head")  # after the last layer: they stay in fp32
PACKED_TYPES = (nn.Linear, LinearLayer, KeylessBiasLinear)  # others, such as LoRA's, compute their weights


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this type on this processor."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operators, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and operators._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, followed by GELU if `gelu` is its approximation."""

    def __init__(self, linear: nn.Linear, gelu: str | None = None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)
        bias = linear.full_bias() if isinstance(linear, KeylessBiasLinear) else linear.bias
        self.bias = None if bias is None else bias.detach()
        self.operation = ("none", [], "") if gelu is None else ("gelu", [], gelu)
        self.plain: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Return the weight as `nn.Linear` has it, for modules that read it."""
        plain = self.packed.to_dense() if self.plain is None else self.plain
        self.plain = plain
        return plain

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, *self.operation)


def pack_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model for inference in this type; what follows the last layer computes and returns fp32."""
    outputs = [child for name, child in iterate_children(module) if is_output(name, child)]
    kept = {id(tensor) for output in outputs for tensor in (*output.parameters(), *output.buffers())}
    tensors: dict[int, Any] = {}  # deepcopy takes these in place of copies
    for tensor in (*module.parameters(), *module.buffers()):
        casts = id(tensor) not in kept and tensor.is_floating_point()
        value = tensor.detach().to(dtype) if casts else tensor.detach()
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    packed = copy.deepcopy(module, tensors).eval()
    outputs = [child for name, child in iterate_children(packed) if is_output(name, child)]
    for output in outputs:
        output.register_forward_pre_hook(cast_inputs)
    pack_children(packed, {id(output) for output in outputs})
    return packed


def is_output(name: str, module: nn.Module) -> bool:
    """Return whether a part of a model follows its last layer; a decoder that does not read maps runs layers on its tokens."""
    return name in OUTPUT_MODULES and (isinstance(module, MapDecoder) or not isinstance(module, Decoder))


def iterate_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model by name, also of one inside a wrapper, such as that of token merging."""
    for name, child in module.named_children():
        yield name, child
        if name == "vit":
            yield from child.named_children()


def cast_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a module in fp32; a decoder takes a list of feature maps."""
    return tuple(map(cast_input, inputs))


def cast_input(value: Any) -> Any:
    if isinstance(value, list):
        return [cast_input(each) for each in value]
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def pack_children(module: nn.Module, skipped: set[int]) -> None:
    """Replace the linear layers below a module."""
    for name, child in module.named_children():
        if id(child) in skipped:
            continue
        if not isinstance(child, nn.Linear) or type(child) not in PACKED_TYPES:
            pack_children(child, skipped)
        elif name == "fc1" and isinstance(module, MLP) and type(module.activation) is nn.GELU:
            module.fc1 = PackedLinear(child, module.activation.approximate)  # type: ignore[assignment]
            module.activation = nn.Identity()
        else:
            setattr(module, name, PackedLinear(child))
