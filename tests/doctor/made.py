"""Facts of a machine without problems, and steps of a self-test that succeed, fail, crash or never end."""

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

from vitrail.doctor.diagnosis import Diagnosis
from vitrail.doctor.selftest import Step
from vitrail.doctor.worker import Context

GB = 2**30
PROBE: dict[str, Any] = {
    "version": "2.13.0+cpu",
    "build": "CPU",
    "location": "/opt/python/site-packages/torch",
    "threads": 4,
    "interop_threads": 4,
    "cpu_capability": "AVX2",
    "onednn": True,
    "mkl": True,
    "openmp": True,
    "gpus": [],
    "mps": False,
    "device": "cpu",
    "precision": "fp32",
    "precision_reason": "made",
    "torchvision_error": None,
}
FACTS: dict[str, Any] = {
    "schema": 1,
    "created": "2026-01-02T03:04:05+00:00",
    "ok": True,
    "problems": [],
    "software": {
        "vitrail": "0.1.0",
        "python": {"version": "3.12.1", "implementation": "CPython", "supported": ">=3.11", "status": "ok"},
        "torch": {name: value for name, value in PROBE.items() if not name.startswith(("device", "precision"))},
        "packages": [
            {
                "name": "required",
                "enables": "every command",
                "packages": [
                    {"name": "torch", "version": "2.13.0+cpu", "supported": ">=2.7", "status": "ok"},
                    {"name": "numpy", "version": "2.4.0", "supported": ">=1.26", "status": "ok"},
                ],
                "install": None,
            },
            {
                "name": "wandb",
                "enables": "vitrail train --log wandb",
                "packages": [{"name": "wandb", "version": None, "supported": ">=0.17", "status": "missing"}],
                "install": "pip install 'vitrail[wandb]'",
            },
        ],
    },
    "machine": {
        "system": {"name": "Linux", "kernel": "6", "machine": "x86_64", "libc": "glibc 2.36", "container": None},
        "processor": {
            "model": "a processor",
            "cores": 4,
            "physical_cores": 4,
            "affinity": 4,
            "quota": None,
            "usable_cores": 4,
            "simd": ["avx2"],
        },
        "load": 0.5,
        "memory": {"total": 16 * GB, "available": 12 * GB, "limit": None, "swap": 0},
        "gpus": [],
        "cuda": None,
        "limits": {"open_files": 4096, "open_files_hard": 8192, "processes": None, "address_space": None},
    },
    "device": {"name": "cpu", "precision": "fp32", "reason": "made"},
    "storage": [
        {
            "name": "vitrail's cache",
            "path": "/home/someone/.cache/vitrail",
            "bytes": 10,
            "files": 1,
            "complete": True,
            "writable": True,
            "total": 100 * GB,
            "free": 50 * GB,
        }
    ],
    "shared_memory": {"total": 8 * GB, "free": 8 * GB},
    "environment": {},
    "processes": 1,
    "tests": [],
}
NVIDIA = {"vendor": "NVIDIA", "name": "NVIDIA A100", "memory": 40 * GB, "free": 39 * GB, "driver": "550.54"}
SEEN = {"name": "NVIDIA A100", "memory": 40 * GB, "capability": "8.0"}


def make_facts() -> Diagnosis:
    return copy.deepcopy(FACTS)  # type: ignore[return-value]


def succeed(context: Context) -> tuple[str, dict[str, Any]]:
    context.report("succeeding")
    print("what a library prints is no answer")
    return f"process {os.getpid()}", {"pid": os.getpid()}


def fail(_: Context) -> tuple[str, dict[str, Any]]:
    raise ValueError("two words\nand a second line")


def crash(_: Context) -> tuple[str, dict[str, Any]]:
    os.write(2, b"last words\n")
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("unreachable")


def hang(context: Context) -> tuple[str, dict[str, Any]]:
    (context.folder / "pid").write_text(str(os.getpid()))
    context.report(str(context.folder))
    time.sleep(600)
    raise AssertionError("unreachable")


def show_environment(_: Context) -> tuple[str, dict[str, Any]]:
    names = ("RANK", "WORLD_SIZE", "XDG_CACHE_HOME")
    return "", {name: os.environ.get(name) for name in names}


def steps(*names: str, seconds: float = 60.0) -> dict[str, Step]:
    return {name: Step(f"to {name}", f"tests.doctor.made:{name}", seconds) for name in names}


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
