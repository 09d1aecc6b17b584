"""`--runtime auto`: which of the installed runtimes is the quickest for a model on this machine, measured once."""

import importlib.metadata
import json
import os
import platform
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from vitrail.checkpoints.files.atomic import atomic
from vitrail.deploy.exported_files import Tell, exported, kept, key_of, open_file, some_pixels
from vitrail.deploy.runtime import Deployed, Runtime

NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
FEW = 50  # pictures that are answered before another runtime has opened its file
ENOUGH = 5000  # pictures from which on exporting and measuring may pay
BATCH, ROUNDS = 4, 3


def chosen(
    deployed: Deployed, threads: int | None = None, pictures: int | None = None, tell: Tell | None = None
) -> tuple[str, str]:
    """The runtime for a model that PyTorch runs now, and why, in a line where there is something to say."""
    if pictures is not None and pictures < FEW:
        return "torch", ""
    installed = [name for name, needs in NEEDS.items() if all(map(find_spec, needs))]
    if not installed:
        return "torch", "torch: no other runtime is installed (pip install 'vitrail[onnx,openvino]')"
    place = kept() / f"{key_of(deployed, machine(), installed, threads)}.json"
    if known := remembered(place):
        return known
    if pictures is not None and pictures < ENOUGH:
        return "torch", f"torch: not measured against {' and '.join(installed)}, for {pictures:,} pictures alone"
    seconds, failed = measured(deployed, installed, threads, tell)
    best = min(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1e3 * taken:.1f}" for name, taken in sorted(seconds.items(), key=lambda each: each[1]))
    why = f"{best}: the quickest here, in milliseconds a picture and thread: {told}{failed}"
    with suppress(OSError), atomic(place) as file:  # where it cannot be kept, it is measured again
        file.write(json.dumps({"runtime": best, "why": why}).encode())
    return best, why


def measured(
    deployed: Deployed, installed: list[str], threads: int | None, tell: Tell | None
) -> tuple[dict[str, float], str]:
    """Seconds a picture of each, in turns; and what could not take part."""
    running: dict[str, Runtime] = {"torch": deployed.runtime}
    failed = ""
    for name in installed:
        try:
            running[name] = open_file(exported(deployed, name, tell), deployed.gives, threads)[0]
        except (ValueError, OSError) as error:
            failed += f"; {name} cannot: {error}"
    pixels = some_pixels(deployed.contract, BATCH)
    seconds = dict.fromkeys(running, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, runtime in running.items():
            began = time.perf_counter()
            runtime(pixels)
            if turn:  # the first time, things are made ready
                seconds[name] = min(seconds[name], (time.perf_counter() - began) / BATCH)
    return seconds, failed


def remembered(place: Path) -> tuple[str, str] | None:
    """What was found out before; nothing, where that cannot be read."""
    try:
        told = json.loads(place.read_text(encoding="utf-8"))
        return (str(told["runtime"]), str(told["why"])) if told["runtime"] in ("torch", *NEEDS) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def machine() -> list[str]:
    """What the answer depends on besides the model."""
    versions = []
    for package in ("torch", "onnxruntime", "openvino"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return [platform.node(), platform.machine(), str(os.cpu_count()), *versions]
