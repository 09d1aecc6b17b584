"""Studies of the paper: each module holds one question, a grid of training runs, and the interpretation of their results."""

from importlib import import_module
from typing import TYPE_CHECKING

from vitrail.models.sizes import closest

if TYPE_CHECKING:
    from vitrail.studies.study import Study

STUDY_NAMES = (
    "data-size",
    "compute",
    "positions",
    "position-maps",
    "shape",
    "head",
    "resnet-optimizer",
    "resolution",
    "masked-patches",
    "original-transformer",
    "ancestors",
    "attention-distance",
    "transfer",
    "regularisation",
)


def load_study(name: str) -> "Study":
    """Return a study by name. Its module, and PyTorch, is imported only here."""
    if name not in STUDY_NAMES:
        raise ValueError(f"unknown study {name!r}: {closest(name, list(STUDY_NAMES))}")
    return import_module(f"vitrail.studies.{name.replace('-', '_')}").STUDY
