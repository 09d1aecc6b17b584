"""`--runtime auto`: measure the installed runtimes once per model and machine, and choose the fastest."""

import importlib.metadata
import json
import os
import platform
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from vitrail.deploy.runtimes.base import DeployedModel, Runtime
from vitrail.deploy.runtimes.files import (
    Report,
    cache_key,
    export_cache,
    export_cached,
    open_exported_file,
    random_pixels,
)
from vitrail.utils.files import atomic_write

REQUIRED_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
MIN_IMAGES_FOR_EXPORT = 50  # fewer are done before another runtime has opened its file
MIN_IMAGES_TO_MEASURE = 5000  # from here on, exporting and measuring may pay
BATCH_SIZE, ROUNDS = 4, 3


def select_runtime(
    deployed: DeployedModel, threads: int | None = None, n_images: int | None = None, report: Report | None = None
) -> tuple[str, str]:
    """Return the runtime for a model opened with PyTorch, and a note for the user or an empty string."""
    if n_images is not None and n_images < MIN_IMAGES_FOR_EXPORT:
        return "torch", ""
    installed = [name for name, needs in REQUIRED_PACKAGES.items() if all(map(find_spec, needs))]
    if not installed:
        return "torch", "torch: no other runtime is installed (pip install 'vitrail[onnx,openvino]')"
    path = export_cache() / f"{cache_key(deployed, machine_identity(), installed, threads)}.json"
    if known := read_selection(path):
        return known
    if n_images is not None and n_images < MIN_IMAGES_TO_MEASURE:
        return "torch", f"torch: not compared with {' and '.join(installed)} for only {n_images:,} images"
    seconds, failed = measure_runtimes(deployed, installed, threads, report)
    best = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * time:.1f}" for name, time in sorted(seconds.items(), key=lambda item: item[1]))
    why = f"{best}: the fastest here, in milliseconds per image and thread: {times}{failed}"
    with suppress(OSError), atomic_write(path) as file:  # if it cannot be stored, it is measured again
        file.write(json.dumps({"runtime": best, "why": why}).encode())
    return best, why


def measure_runtimes(
    deployed: DeployedModel, installed: list[str], threads: int | None, report: Report | None
) -> tuple[dict[str, float], str]:
    """Return the seconds per image of each runtime, measured in turns, and the failures as text."""
    running: dict[str, Runtime] = {"torch": deployed.runtime}
    failed = ""
    for name in installed:
        try:
            running[name] = open_exported_file(export_cached(deployed, name, report), deployed.output_kind, threads)[0]
        except (ValueError, OSError) as error:
            failed += f"; {name} failed: {error}"
    pixels = random_pixels(deployed.contract, BATCH_SIZE)
    seconds = dict.fromkeys(running, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, runtime in running.items():
            start = time.perf_counter()
            runtime(pixels)
            if turn:  # the first round is warm-up
                seconds[name] = min(seconds[name], (time.perf_counter() - start) / BATCH_SIZE)
    return seconds, failed


def read_selection(path: Path) -> tuple[str, str] | None:
    """Return the stored selection, or None if there is none or it is invalid."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return (
            (str(stored["runtime"]), str(stored["why"])) if stored["runtime"] in ("torch", *REQUIRED_PACKAGES) else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def machine_identity() -> list[str]:
    """Return what the fastest runtime depends on besides the model."""
    versions = []
    for package in ("torch", "onnxruntime", "openvino"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return [platform.node(), platform.machine(), str(os.cpu_count()), *versions]
