"""Linear layers whose products oneDNN computes where that is faster than MKL.

PyTorch computes float32 products on x86 with MKL, which uses 256-bit instructions on AMD processors. oneDNN, which PyTorch
uses for bfloat16 and for convolutions, has 512-bit ones for AMD as well: the same product in float32 takes less than half of
the time (docs/benchmarks.md). Weights, gradients and precision are the same; only the order of additions differs.

M rows, K inputs, N outputs.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_MULTIPLY_ADDS = 2**20  # of a product: for smaller ones the call costs more than oneDNN saves


@cache
def prefers_onednn() -> bool:
    """Return True on AMD processors with AVX-512, if PyTorch has the operators."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(
        torch.ops.aten, "mkldnn_linear_backward_weights"
    ):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    name = cpuinfo.read_text()[:200] if cpuinfo.is_file() else platform.processor()
    return "AuthenticAMD" in name


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ + bias by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(torch.autograd.Function):
    """x [..., K], weight [N, K] and bias [N] to x weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        g, rows = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])  # [M, N], [M, K]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # with create_graph: these operations have derivatives of their own
            dx, dw, db = g @ weight, g.t() @ rows, g.sum(0)
        else:
            dx = multiply(g, weight.t(), None) if needs_x else None
            dw = db = None
            if needs_weight:
                blocked = torch.ops.aten.mkldnn_linear_backward_weights(
                    g.to_mkldnn(), rows.to_mkldnn(), weight, needs_bias
                )
                dw, db = (part.to_dense() if part.is_mkldnn else part for part in blocked)
            elif needs_bias:
                db = g.sum(0)
        return (
            dx.view_as(x) if needs_x and dx is not None else None,
            dw if needs_weight else None,
            db if needs_bias and ctx.biased else None,
        )


class LinearLayer(nn.Linear):
    """`nn.Linear`, computed by oneDNN where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias, computed by oneDNN where that is faster: float32 on AMD processors, eager."""
    if x.device.type != "cpu" or not is_onednn_faster(x, weight):
        return F.linear(x, weight, bias)
    biased = bias is not None and bias.requires_grad
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or biased):
        return OneDNNLinear.apply(x, weight, bias)  # type: ignore[return-value] (untyped in PyTorch)
    return multiply(x, weight, bias)


def is_onednn_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes x weightᵀ faster, and nothing observes or transforms PyTorch's own operation."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and x.dtype == weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= MIN_MULTIPLY_ADDS
        and prefers_onednn()
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()  # such as FlopCounterMode
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )
