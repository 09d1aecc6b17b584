"""vitrail: Vision Transformers, from the paper to a model that ships.

`import vitrail` is quick: PyTorch is imported when a model is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitrail.checkpoints.loading import load, save
    from vitrail.checkpoints.push import push
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.deploy.predicting import predict
    from vitrail.models.build import build, build_from, configure
    from vitrail.models.vit import ViT, ViTConfig
    from vitrail.pretraining import pretrain
    from vitrail.training import resume, train

_HOMES = {
    "Preprocessing": "vitrail.data.preprocessing",
    "load": "vitrail.checkpoints.loading",
    "predict": "vitrail.deploy.predicting",
    "pretrain": "vitrail.pretraining",
    "push": "vitrail.checkpoints.push",
    "resume": "vitrail.training",
    "save": "vitrail.checkpoints.loading",
    "train": "vitrail.training",
    "build": "vitrail.models.build",
    "build_from": "vitrail.models.build",
    "configure": "vitrail.models.build",
    "ViT": "vitrail.models.vit",
    "ViTConfig": "vitrail.models.vit",
}

__all__ = [
    "Preprocessing",
    "ViT",
    "ViTConfig",
    "__version__",
    "build",
    "build_from",
    "configure",
    "load",
    "predict",
    "pretrain",
    "push",
    "resume",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
