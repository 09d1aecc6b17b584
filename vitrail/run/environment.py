"""What a run was computed on."""

import os
import platform
from pathlib import Path

import torch

from vitrail.engine.distributed import Team


def environment(team: Team, precision: str) -> dict[str, object]:
    """Versions, machine and devices, for the run's record."""
    device = torch.cuda.get_device_name(team.device) if team.device.type == "cuda" else str(team.device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "processes": team.world,
        "parallel": team.parallel if team.world > 1 else None,
        "precision": precision,
    }


def processor() -> str:
    """The processor's name, where the system tells."""
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
