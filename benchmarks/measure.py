"""Interleaved measurement: all contestants take turns in one process, so that noise affects them equally."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"

# A CPU build of PyTorch lacks two operators that torchvision's import registers gradients for: name them first.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def interleave(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, at_least: float = 0.0
) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round, for `rounds` rounds or, if they are fast, `at_least` seconds.

    All run twice first, unmeasured; the order rotates by one every round.
    """
    names = list(contestants)
    for name in names:
        contestants[name]()
    begin = time.perf_counter()
    for name in names:
        contestants[name]()
    rounds = max(rounds, int(at_least / (time.perf_counter() - begin)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def ceiling() -> float:
    """Return the multiply-adds per second of a large matrix product, the current upper bound of this machine."""
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    seconds = interleave({"mm": lambda: torch.mm(a, b)}, 9)["mm"]
    return 1536**3 / min(seconds)


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(name: str, rows: Any) -> Path:
    """Write the rows with the machine as JSON and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return path
