"""Open exported files by their suffix, and export checkpoints once to the user's cache directory."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail.deploy import RUNTIME_SUFFIXES
from vitrail.deploy.runtimes.base import DeployedModel, ModelContract, OutputKind, Runtime
from vitrail.utils.json import to_json

MAX_RELATIVE_DIFFERENCE = 1e-3  # relative to max(1, the largest absolute output)
Report = Callable[[str], None]


def is_exported(where: str | Path) -> bool:
    """Return True if the name is that of an exported file."""
    return Path(where).suffix.lower() in RUNTIME_SUFFIXES and not str(where).startswith("hf://")


def open_exported_file(path: Path, output_kind: OutputKind, threads: int | None) -> tuple[Runtime, ModelContract]:
    """Return the runtime of an exported file and its contract."""
    match path.suffix.lower():
        case ".onnx":
            from vitrail.deploy.runtimes.onnx import open_onnx

            return open_onnx(path, output_kind, threads)
        case ".xml":
            from vitrail.deploy.runtimes.openvino import open_openvino

            return open_openvino(path, output_kind, threads)
        case _:
            from vitrail.deploy.export.torch_program import open_program

            return open_program(path, output_kind, threads)


def cache_key(deployed: DeployedModel, *more: Any) -> str:
    """Return a cache key of a model's weights, options and the vitrail version."""
    contract = deployed.contract
    parts = [vitrail.__version__, contract.checksum, contract.config, to_json(contract.preprocessing), contract.labels]
    parts += [contract.merge, contract.several, *more]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def export_cache() -> Path:
    """Return the directory of exported files and runtime measurements."""
    from vitrail.utils.files import cache_directory  # imported late: a single prediction does not need it

    return cache_directory() / "exported"


def export_cached(deployed: DeployedModel, target: str, report: Report | None = None) -> Path:
    """Return the exported file of a model, written and compared with PyTorch if it does not exist yet."""
    from vitrail.deploy.export.export import export

    suffix = next(suffix for suffix, runtime in RUNTIME_SUFFIXES.items() if runtime == target)
    directory = export_cache() / cache_key(deployed)
    path = directory / f"model{suffix}"
    if path.is_file():
        return path
    if report:
        report(f"exporting {deployed.name} for {target} (once): {path}")
    assert deployed.model is not None
    directory.mkdir(parents=True, exist_ok=True)
    onnx_path = path.with_suffix(".onnx")
    if target == "openvino" and onnx_path.is_file():  # the slow part is done
        from vitrail.deploy.export.export import stage_file
        from vitrail.deploy.runtimes.openvino import read_onnx_model, write_openvino

        with stage_file(path) as staged:
            write_openvino(read_onnx_model(onnx_path), deployed.contract, "uint8", staged)
    else:
        export(deployed.model, deployed.contract, path, target=target, uint8=True, merge=deployed.contract.merge)
    try:
        check_same_outputs(deployed, path, target)
    except ValueError:
        path.unlink(missing_ok=True)
        raise
    return path


def check_same_outputs(deployed: DeployedModel, path: Path, target: str) -> None:
    """Raise ValueError if the outputs of the file differ from the model's."""
    output_kind: OutputKind = "features" if deployed.contract.labels is None else "logits"
    exported, _ = open_exported_file(path, output_kind, None)
    pixels = random_pixels(deployed.contract, 2)
    expected, outputs = deployed.runtime(pixels), exported(pixels)
    difference = float(np.abs(expected - outputs).max())
    if not difference <= MAX_RELATIVE_DIFFERENCE * max(1.0, float(np.abs(expected).max())):
        raise ValueError(f"{target} outputs of {deployed.name} differ by {difference:.2g}: use --runtime torch")


def random_pixels(contract: ModelContract, count: int) -> np.ndarray:
    """Return random pixels with a fixed seed, uint8 [B, C, H, W]."""
    shape = (count, contract.preprocessing.channels, *contract.preprocessing.size)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
