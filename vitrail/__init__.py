"""vitrail: Vision Transformers, from the paper to deployment.

`import vitrail` is fast: PyTorch is imported on the first use of a name below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitrail.checkpoints.card import push
    from vitrail.checkpoints.load import load, load_towers, save
    from vitrail.checkpoints.shared import load_shared, save_shared
    from vitrail.data.audit import check
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.deploy.predict.predict import embed, predict
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.models.base import Model, ModelConfig
    from vitrail.models.registry import build, build_from, configure
    from vitrail.models.shared_encoder import SharedEncoder
    from vitrail.prompts import zero_shot
    from vitrail.training.estimator import VitrailClassifier
    from vitrail.training.self_training import self_train
    from vitrail.training.train import pretrain, resume, train

_MODULES = {
    "Model": "vitrail.models.base",
    "ModelConfig": "vitrail.models.base",
    "Preprocessing": "vitrail.data.preprocessing",
    "SharedEncoder": "vitrail.models.shared_encoder",
    "VitrailClassifier": "vitrail.training.estimator",
    "build": "vitrail.models.registry",
    "build_from": "vitrail.models.registry",
    "check": "vitrail.data.audit",
    "configure": "vitrail.models.registry",
    "embed": "vitrail.deploy.predict.predict",
    "evaluate": "vitrail.evaluation.evaluate",
    "load": "vitrail.checkpoints.load",
    "load_shared": "vitrail.checkpoints.shared",
    "load_towers": "vitrail.checkpoints.load",
    "predict": "vitrail.deploy.predict.predict",
    "pretrain": "vitrail.training.train",
    "push": "vitrail.checkpoints.card",
    "resume": "vitrail.training.train",
    "save": "vitrail.checkpoints.load",
    "save_shared": "vitrail.checkpoints.shared",
    "self_train": "vitrail.training.self_training",
    "train": "vitrail.training.train",
    "zero_shot": "vitrail.prompts",
}

__all__ = [
    "Model",
    "ModelConfig",
    "Preprocessing",
    "SharedEncoder",
    "VitrailClassifier",
    "__version__",
    "build",
    "build_from",
    "check",
    "configure",
    "embed",
    "evaluate",
    "load",
    "load_shared",
    "load_towers",
    "predict",
    "pretrain",
    "push",
    "resume",
    "save",
    "save_shared",
    "self_train",
    "train",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
