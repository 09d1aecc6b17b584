"""Which device a user means, without the processes that may share it: what is asked for quickly is answered quickly."""

import os

import torch


def pick_device(name: str) -> torch.device:
    """`auto` takes what is there, in the order cuda, mps, cpu; a device that is not there is refused."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
        return torch.device(name if ":" in name else f"cuda:{local}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: this machine has no Metal device; use --device cpu")
    if kind not in ("cpu", "mps"):
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda or mps")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda or mps") from None
