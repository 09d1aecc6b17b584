"""Precisions of matrix products: their names, what a processor multiplies natively, and the choice of the fastest by measurement.

PyTorch is imported by the functions, because the help of every command lists the names.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FLOAT_PRECISIONS = ("fp32", "bf16", "fp16")
PRECISIONS = ("auto", *FLOAT_PRECISIONS)  # of training and inference
EXPORT_PRECISIONS = (*FLOAT_PRECISIONS, "int8")  # of files
PACKED = "packed fp32"  # fp32 with packed weights, a candidate of inference

MIN_GAIN = 1.1  # speed-up that a lower precision must have
MEASURING_SECONDS = 1.0
MAX_ROUNDS = 5


@dataclass(frozen=True)
class PrecisionChoice:
    """A chosen precision and the reason."""

    precision: str  # one of FLOAT_PRECISIONS
    why: str = ""
    packed: bool = False  # weights in the layout of the processor's matrix products

    def __str__(self) -> str:
        return f"precision: {self.precision}{f' ({self.why})' if self.why else ''}"


def check_precision(precision: str, known: tuple[str, ...] = PRECISIONS) -> None:
    """Raise ValueError for an unknown precision."""
    if precision not in known:
        raise ValueError(f"unknown precision {precision!r}: use {', '.join(known)}")


def torch_dtype(precision: str) -> "torch.dtype":
    """Return PyTorch's type of a float precision."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def autocast(device_type: str, precision: str) -> AbstractContextManager[Any]:
    """Return the context that computes matrix products in a precision."""
    import torch

    return nullcontext() if precision == "fp32" else torch.autocast(device_type, torch_dtype(precision))


def multiplies_bf16(device: "torch.device") -> bool:
    """Return whether a processor multiplies bf16 natively; others emulate it, many times slower than fp32."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if not hasattr(torch.cpu, "get_capabilities"):  # before PyTorch 2.11
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def describe_tf32() -> str:
    """Return which fp32 products of a CUDA device are computed in TF32, with 10 bits of the fraction instead of 23."""
    import torch

    states = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    products, convolutions = ("on" if state else "off" for state in states)
    return f"TF32 {products} for fp32 matrix products, {convolutions} for convolutions"


def choose_cuda(device: "torch.device", name: str) -> PrecisionChoice:
    """Return the precision of a CUDA device: bf16 where it is native, else fp16."""
    native = multiplies_bf16(device)
    reason = f"{'native' if native else 'no native bf16'} on {name}; {describe_tf32()}"
    return PrecisionChoice("bf16" if native else "fp16", reason)


def measure_interleaved(
    runs: Mapping[str, Callable[[], Any]],
    seconds: float = MEASURING_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the least seconds of each function, called in turns until the time is used up; at least once after a warm-up."""
    start = clock()
    for run in runs.values():
        run()
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(MAX_ROUNDS):
        for name, run in runs.items():
            begin = clock()
            run()
            least[name] = min(least[name], clock() - begin)
        if clock() - start + sum(least.values()) > seconds:
            break
    return least


def choose_measured(seconds: Mapping[str, float], name: str) -> PrecisionChoice:
    """Return the fastest precision by the measured seconds of fp32, and of packed fp32 and bf16 where they can run.

    Packed weights must gain MIN_GAIN over fp32, and bf16 over the faster of both.
    """
    fp32 = seconds["fp32"]
    best, packed = fp32, seconds.get(PACKED, float("inf"))
    is_packed = packed * MIN_GAIN <= fp32
    best = packed if is_packed else fp32
    gains = {other: f"{fp32 / value:.1f} times as fast as fp32" for other, value in seconds.items()}
    if "bf16" in seconds and seconds["bf16"] * MIN_GAIN <= best:
        return PrecisionChoice("bf16", f"measured {gains['bf16']} on {name}", True)
    slow = f"; bf16 gains less than {MIN_GAIN:g} times" if "bf16" in seconds else "; no native bf16"
    if is_packed:
        times = gains[PACKED].replace("as fp32", "with packed weights")
        return PrecisionChoice("fp32", f"measured {times} on {name}{slow}", True)
    if "bf16" in seconds:
        return PrecisionChoice("fp32", f"bf16 measured {gains['bf16']} on {name}, less than {MIN_GAIN:g} times")
    return PrecisionChoice("fp32", f"{name} does not multiply bf16 natively")
