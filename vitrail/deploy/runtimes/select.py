"""Export a checkpoint once to the user's cache directory, and for `--runtime auto` choose the fastest runtime.

The installed runtimes are measured once per model and machine.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail.checkpoints.load import compute_checksum
from vitrail.deploy import SUFFIXES
from vitrail.deploy.runtimes.base import DeployedModel, OutputKind, Runtime, random_pixels
from vitrail.deploy.runtimes.exported import convert_to_openvino, open_exported_file
from vitrail.utils.files import atomic_write, cache_directory, make_directories, stage_output
from vitrail.utils.json import to_json

MAX_RELATIVE_DIFFERENCE = 1e-3  # relative to max(1, the largest absolute output)
REQUIRED_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
MIN_IMAGES_FOR_EXPORT = 50  # fewer are done before another runtime has opened its file
MIN_IMAGES_TO_MEASURE = 5000  # from here on, exporting and measuring may pay
BATCH_SIZE, ROUNDS = 4, 3
MessageCallback = Callable[[str], None]


def select_runtime(
    deployed: DeployedModel,
    threads: int | None = None,
    n_images: int | None = None,
    report: MessageCallback | None = None,
    torch_runtime: Runtime | None = None,  # of the model in its fastest precision; None for fp32
    hint: str | None = None,  # the precision in which OpenVINO computes the fp32 file
) -> tuple[str, str]:
    """Return the runtime for a model opened with PyTorch in fp32, and a note for the user or an empty string."""
    if n_images is not None and n_images < MIN_IMAGES_FOR_EXPORT:
        return "torch", ""
    installed = [name for name, needs in REQUIRED_PACKAGES.items() if all(map(find_spec, needs))]
    if not installed:
        return "torch", "torch: no other runtime is installed (pip install 'vitrail[onnx,openvino]')"
    path = export_cache() / f"{cache_key(deployed, machine_identity(), installed, threads, hint)}.json"
    if known := read_selection(path):
        return known
    if n_images is not None and n_images < MIN_IMAGES_TO_MEASURE:
        return "torch", f"torch: not compared with {' and '.join(installed)} for only {n_images:,} images"
    seconds, failed, is_repeatable = measure_runtimes(deployed, installed, threads, report, torch_runtime, hint)
    best = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.1f}" for name in sorted(seconds, key=lambda name: seconds[name]))
    why = f"{best}: the fastest here, in milliseconds per image and thread: {times}{failed}"
    if is_repeatable:
        with suppress(OSError), atomic_write(path) as file:  # if it cannot be stored, it is measured again
            file.write(json.dumps({"runtime": best, "why": why}).encode())
    return best, why


def measure_runtimes(
    deployed: DeployedModel,
    installed: list[str],
    threads: int | None,
    report: MessageCallback | None,
    torch_runtime: Runtime | None = None,
    hint: str | None = None,
) -> tuple[dict[str, float], str, bool]:
    """Return the seconds per image of each runtime, measured in turns, the failures as text, and whether they will repeat."""
    runtimes: dict[str, Runtime] = {"torch": torch_runtime or deployed.runtime}
    failed, is_repeatable = "", True
    for name in installed:
        try:
            file = get_or_export(deployed, name, report)
            runtimes[name] = open_exported_file(file, deployed.output_kind, threads, precision=hint)[0]
        except (ValueError, OSError) as error:
            failed += f"; {name} failed: {error}"
            is_repeatable = is_repeatable and not isinstance(
                error, OSError
            )  # a full disk or a missing file may be mended
    pixels = random_pixels(deployed.contract.preprocessing, BATCH_SIZE)
    seconds = dict.fromkeys(runtimes, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, runtime in runtimes.items():
            start = time.perf_counter()
            runtime(pixels)
            if turn:  # the first round is warm-up
                seconds[name] = min(seconds[name], (time.perf_counter() - start) / BATCH_SIZE)
    return seconds, failed, is_repeatable


def read_selection(path: Path) -> tuple[str, str] | None:
    """Return the stored selection, or None if there is none or it is invalid."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        is_known = stored["runtime"] in ("torch", *REQUIRED_PACKAGES)
        return (str(stored["runtime"]), str(stored["why"])) if is_known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def machine_identity() -> list[str]:
    """Return what the fastest runtime depends on besides the model."""
    versions = []
    for package in ("torch", "onnx", "onnxscript", "onnxruntime", "openvino"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return [platform.node(), platform.machine(), str(os.cpu_count()), *versions]


def cache_key(deployed: DeployedModel, *more: Any) -> str:
    """Return a cache key of a model's weights, options and the vitrail version."""
    contract = deployed.contract
    parts = [vitrail.__version__, contract.checksum, contract.config, to_json(contract.preprocessing), contract.labels]
    parts += [contract.merge, contract.several, *more]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def export_cache() -> Path:
    """Return the directory of exported files and runtime measurements."""
    return cache_directory() / "exported"


def get_or_export(deployed: DeployedModel, target: str, report: MessageCallback | None = None) -> Path:
    """Return the exported file of a model, written and compared with PyTorch if it does not exist yet."""
    from vitrail.deploy.export.export import export

    path = export_cache() / cache_key(deployed) / f"model{SUFFIXES[target]}"
    if is_intact(path):
        return path
    if report:
        report(f"exporting {deployed.name} for {target} (once): {path}")
    assert deployed.model is not None
    make_directories(path.parent)
    onnx_path, uint8 = path.with_suffix(".onnx"), deployed.contract.media != "sound"
    if target == "openvino" and is_intact(onnx_path):  # the slow part is done
        with stage_output(path) as staged:
            convert_to_openvino(onnx_path, deployed.contract, "uint8" if uint8 else "float", staged)
    else:
        export(deployed.model, deployed.contract, path, target=target, uint8=uint8, merge=deployed.contract.merge)
    try:
        check_same_outputs(deployed, path, target)
    except ValueError:
        path.unlink(missing_ok=True)
        raise
    with atomic_write(checksum_path(path)) as file:
        file.write(json.dumps({part.name: compute_checksum(part) for part in export_parts(path)}).encode())
    return path


def export_parts(path: Path) -> list[Path]:
    """Return the files of an export."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256.json")


def is_intact(path: Path) -> bool:
    """Return whether every byte of a cached export is as it was written."""
    try:
        recorded = json.loads(checksum_path(path).read_text(encoding="utf-8"))
        return recorded == {part.name: compute_checksum(part) for part in export_parts(path)}
    except (OSError, ValueError):
        return False


def check_same_outputs(deployed: DeployedModel, path: Path, target: str) -> None:
    """Raise ValueError if the outputs of the file differ from the model's."""
    output_kind: OutputKind = "features" if deployed.contract.labels is None else "logits"
    pixels = random_pixels(deployed.contract.preprocessing, 2)
    expected, outputs = deployed.runtime(pixels), open_exported_file(path, output_kind)[0](pixels)
    difference = float(np.abs(expected - outputs).max())
    scale = max(1.0, float(np.abs(expected).max()))
    if (statistics := deployed.contract.statistics) is not None and output_kind == "logits":
        scale = max(min(statistics.std), float(np.abs(expected).max()))  # numbers may be much smaller than 1
    if not difference <= MAX_RELATIVE_DIFFERENCE * scale:
        raise ValueError(f"{target} outputs of {deployed.name} differ by {difference:.2g}: use runtime='torch'")
