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
    from vitrail.labelling.convert import convert_labels
    from vitrail.labelling.decisions import apply_labels
    from vitrail.labelling.next_images import choose_images_to_label
    from vitrail.labelling.propose import propose_labels
    from vitrail.labelling.suspects import find_label_errors
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
    "apply_labels": "vitrail.labelling.decisions",
    "build": "vitrail.models.registry",
    "build_from": "vitrail.models.registry",
    "check": "vitrail.data.audit",
    "choose_images_to_label": "vitrail.labelling.next_images",
    "configure": "vitrail.models.registry",
    "convert_labels": "vitrail.labelling.convert",
    "embed": "vitrail.deploy.predict.predict",
    "evaluate": "vitrail.evaluation.evaluate",
    "find_label_errors": "vitrail.labelling.suspects",
    "load": "vitrail.checkpoints.load",
    "load_shared": "vitrail.checkpoints.shared",
    "load_towers": "vitrail.checkpoints.load",
    "predict": "vitrail.deploy.predict.predict",
    "pretrain": "vitrail.training.train",
    "propose_labels": "vitrail.labelling.propose",
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
    "apply_labels",
    "build",
    "build_from",
    "check",
    "choose_images_to_label",
    "configure",
    "convert_labels",
    "embed",
    "evaluate",
    "find_label_errors",
    "load",
    "load_shared",
    "load_towers",
    "predict",
    "pretrain",
    "propose_labels",
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
