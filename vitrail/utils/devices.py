"""Device selection, without the distributed setup, transfers that do not wait, and the CPU allocator's settings.

PyTorch is imported by the functions: `vitrail doctor` names the processor where PyTorch does not import.
"""

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

from vitrail.utils.slurm import count_task_cores


def pick_device(name: str) -> "torch.device":
    """Return the named device; `auto` is the first available of cuda, mps and cpu. Raise ValueError for others."""
    import torch

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device='cuda': PyTorch finds no CUDA device; use device='cpu'")
        return torch.device(name if ":" in name else f"cuda:{local}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device='mps': this machine has no Metal device; use device='cpu'")
    if kind not in ("cpu", "mps"):
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda or mps")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda or mps") from None


def send_to_device(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """Return a tensor of the host on the device. CUDA copies from pinned memory, for which the host does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lru_cache(maxsize=64)
def constant_tensor(values: tuple[float, ...], device: "torch.device") -> "Tensor":
    """Return constants on the device, sent once: sending them in each step would wait for the device."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def synchronise(device: "torch.device") -> None:
    """Wait until the device has finished, to measure time."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def processor_name() -> str:
    """Return the name of the processor."""
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: "torch.device") -> str:
    """Return the name of a device's processor."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else str(device)


def count_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """Return this process's share of the cores, if torchrun or `srun` started several processes on this machine."""
    if (cores := count_task_cores()) is not None:
        return max(1, min(cores, count_cores()))
    return max(1, count_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def default_workers(device_type: str) -> int:
    """Return the number of processes that prepare images, 1 to 8: half of the cores if the model runs on them too."""
    cores = available_cores()
    return max(1, min(8, cores if device_type == "cuda" else cores // 2))


M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # glibc's parameters of mallopt
MALLOC_THRESHOLD_BYTES = 2**30


def keep_freed_memory() -> None:
    """Set glibc's allocator to keep freed memory; do nothing with other C libraries.

    A training step on a CPU frees its activations, megabytes each, and allocates as many again. By default glibc returns
    them to the system each time, and every page is cleared again: 10 to 25 % of a small model's step.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MALLOC_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, MALLOC_THRESHOLD_BYTES)
