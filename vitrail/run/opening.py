"""A trained model on its way to be used: where its weights lie, and how pictures are prepared for it."""

import hashlib
from pathlib import Path

from vitrail.checkpoints.files.opened import BY_SAFETY
from vitrail.checkpoints.files.source import read_json
from vitrail.checkpoints.loading import resolve
from vitrail.data.preprocessing import MODES, Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT

MODEL, BEST = "model.safetensors", "best.safetensors"


def weights_of(where: str | Path) -> Path:
    """Where the weights lie on this machine; of a run, its model."""
    path = resolve(where)
    if not (path / "run.json").is_file():
        return path
    if (path / MODEL).is_file():
        return path / MODEL
    best = f", or take {path / BEST}, its best so far" if (path / BEST).is_file() else ""
    raise ValueError(f"{where} is a run that has not finished: vitrail train --resume {where}{best}")


def pipeline_of(where: str | Path, model: ViT | BiT) -> Preprocessing:
    """How pictures are prepared for a model, which must say so, and for which there must be pictures."""
    pipeline = model.preprocessing
    if not isinstance(pipeline, Preprocessing):
        raise ValueError(
            f"{where} does not say how pictures are prepared for it: save it anew with vitrail.save(…, preprocessing=…)"
        )
    if pipeline.channels not in MODES:
        raise ValueError(
            f"{where} takes {pipeline.channels} channels, and pictures have 1, 3 or 4: "
            "load it in Python with vitrail.load and give it tensors"
        )
    return pipeline


def name_of(where: str, path: Path) -> str:
    """What to call a model: its file's name, or its directory's where the file is called as all are."""
    if where.startswith("hf://"):
        return where.removeprefix("hf://")
    path = path.resolve()
    return path.parent.name if path.name in BY_SAFETY else path.name if path.is_dir() else path.stem


def checksum(path: Path) -> str:
    """SHA-256 of the weights' bytes: of the file, or of its shards one after another."""
    if path.is_dir():
        path = next(path / name for name in BY_SAFETY if (path / name).is_file())
    files = [path]
    if path.name.endswith(".index.json"):
        files = [path.parent / name for name in sorted(set(read_json(path)["weight_map"].values()))]
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(2**22):
                found.update(part)
    return found.hexdigest()
