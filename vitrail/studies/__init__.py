"""The paper's studies as commands: each module is one question, a grid of recipes, and how the answer is read."""

from importlib import import_module
from typing import TYPE_CHECKING

from vitrail.models.sizes import closest

if TYPE_CHECKING:
    from vitrail.studies.study import Study

NAMES = (
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
    "attention-distance",
    "transfer",
    "regularisation",
)


def study_named(name: str) -> "Study":
    """A study by its name; its module, and PyTorch with it, is imported only then. (`vitrail.studies.study` is a module.)"""
    if name not in NAMES:
        raise ValueError(f"unknown study {name!r}: {closest(name, list(NAMES))}")
    return import_module(f"vitrail.studies.{name.replace('-', '_')}").STUDY
