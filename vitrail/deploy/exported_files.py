"""Files for other runtimes: opened by their endings, and made of checkpoints in the user's cache directory, once for each."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail.deploy.runtime import Contract, Deployed, Gives, Runtime
from vitrail.models.written import to_json

ENDINGS = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}  # and what runs them
TOLERANCE = 1e-3  # of logits, or of the largest where they are larger than 1
Tell = Callable[[str], None]


def is_exported(where: str | Path) -> bool:
    """Whether this is a file for a runtime, by its name."""
    return Path(where).suffix.lower() in ENDINGS and not str(where).startswith("hf://")


def open_file(path: Path, gives: Gives, threads: int | None) -> tuple[Runtime, Contract]:
    """What runs an exported file, and what stands in it."""
    match path.suffix.lower():
        case ".onnx":
            from vitrail.deploy.onnx_runtime import open_onnx

            return open_onnx(path, gives, threads)
        case ".xml":
            from vitrail.deploy.openvino_runtime import open_openvino

            return open_openvino(path, gives, threads)
        case _:
            from vitrail.deploy.exported_torch import open_exported

            return open_exported(path, gives, threads)


def key_of(deployed: Deployed, *more: Any) -> str:
    """A name for what was made of a model: other weights, options or versions are another name."""
    contract = deployed.contract
    told = [vitrail.__version__, contract.checksum, contract.config, to_json(contract.preprocessing), contract.labels]
    told += [contract.merge, contract.several, *more]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def kept() -> Path:
    """Where exported files and what was measured of them lie."""
    from vitrail.data.audit.cache import (
        directory,
    )  # not before it is needed: who asks for one picture does not wait for it

    return directory() / "exported"


def exported(deployed: Deployed, to: str, tell: Tell | None = None) -> Path:
    """The file of a whole model for a runtime, made now if it is not there, and held against PyTorch's answers."""
    from vitrail.deploy.export import export

    ending = next(ending for ending, runtime in ENDINGS.items() if runtime == to)
    place = kept() / key_of(deployed)
    path = place / f"model{ending}"
    if path.is_file():
        return path
    if tell:
        tell(f"exporting {deployed.name} for {to}, once: {path}")
    assert deployed.model is not None
    place.mkdir(parents=True, exist_ok=True)
    through = path.with_suffix(".onnx")
    if to == "openvino" and through.is_file():  # which took the most time to make
        from vitrail.deploy.export import neighbour
        from vitrail.deploy.openvino_runtime import from_onnx, write_openvino

        with neighbour(path) as beside:
            write_openvino(from_onnx(through), deployed.contract, "uint8", beside)
    else:
        export(deployed.model, deployed.contract, path, to=to, uint8=True, merge=deployed.contract.merge)
    try:
        compare(deployed, path, to)
    except ValueError:
        path.unlink(missing_ok=True)
        raise
    return path


def compare(deployed: Deployed, path: Path, to: str) -> None:
    """Refuses a file whose answers are not the model's."""
    gives: Gives = "features" if deployed.contract.labels is None else "logits"
    running, _ = open_file(path, gives, None)
    pixels = some_pixels(deployed.contract, 2)
    ours, theirs = deployed.runtime(pixels), running(pixels)
    apart = float(np.abs(ours - theirs).max())
    if not apart <= TOLERANCE * max(1.0, float(np.abs(ours).max())):
        raise ValueError(f"{to} gives other answers for {deployed.name}, by {apart:.2g}: use --runtime torch")


def some_pixels(contract: Contract, count: int) -> np.ndarray:
    """Pictures of chance, the same ones every time: uint8 [B, C, H, W]."""
    pipeline = contract.preprocessing
    shape = (count, pipeline.channels, *pipeline.size)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
