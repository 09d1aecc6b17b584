"""The table of objectives: the one place that lists them. A recipe's objective is one of `ObjectiveSlot`."""

from typing import get_args

from vitrail.objectives.base import Objective
from vitrail.objectives.classification import Classification
from vitrail.objectives.contrastive import Contrastive
from vitrail.objectives.dino import DINO
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.mae import MAE
from vitrail.objectives.mask_matching import MaskMatching
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.regression import Regression
from vitrail.objectives.segmentation import Segmentation
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.objectives.videomae import VideoMAE

ObjectiveSlot = (
    Classification
    | Distillation
    | FeatureDistillation
    | TokenLabelling
    | Segmentation
    | MaskMatching
    | Regression
    | MaskedPatches
    | MAE
    | VideoMAE
    | DINO
    | Contrastive
)
OBJECTIVES: dict[str, type[Objective]] = {kind.__name__: kind for kind in get_args(ObjectiveSlot)}
# By --method, and by --distil.
PRETRAINING: dict[str, type[Objective]] = {kind.method: kind for kind in OBJECTIVES.values() if kind.method}
CONTRASTIVE: dict[str, ObjectiveSlot] = {
    "clip": Contrastive("softmax"),
    "siglip": Contrastive("sigmoid"),
}  # by --objective
DISTILLATION: dict[str, ObjectiveSlot] = {
    "hard": Distillation(kind="hard"),
    "soft": Distillation(kind="soft"),
    "features": FeatureDistillation(),
    "tokens": TokenLabelling(),
}
