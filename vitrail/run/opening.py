"""A trained model on its way to be used: where its weights lie, and how pictures are prepared for it."""

from pathlib import Path

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
