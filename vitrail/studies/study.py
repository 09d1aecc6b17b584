"""Data types of a study: its cells, results, scales, setup, charts and answer.

A study is a value, `STUDY` in its module, and its functions are pure. `plan` returns all runs known so far, given the finished
results; `interpret` turns results into an answer. So a study can be killed at any time, shared by several runners, and tested on
constructed results.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from vitrail.models.base import Model
from vitrail.models.sizes import closest
from vitrail.reports.charts.canvas import Chart as Chart
from vitrail.reports.charts.canvas import Series as Series
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.utils.json import Finite, to_json

Setting = str | int | float | bool | None
GridPoint = Mapping[str, Setting]  # settings without learning rate and seed: {"positions": "2-D"}
Agreement = Literal["agrees", "disagrees", "no difference", "unclear"]
AGREEMENT_LABELS: dict[Agreement, str] = {
    "agrees": "agrees with the paper",
    "disagrees": "disagrees with the paper",
    "no difference": "no difference at this scale",
    "unclear": "unclear at this scale",
}
Finding = tuple[str, Agreement]  # a sentence and its verdict
# Added later: left out of cell names while unused, so old names stay.
OPTIONAL_DATA_FIELDS = ("classes", "examples", "unlabelled", "pseudo_labels")
DEFAULT_FRACTIONS = (0.8, 0.1, 0.1)  # train, validation, test of data without splits
NO_FINDING = "No finding yet"


def format_point(point: Mapping[str, Setting]) -> str:
    """Return text such as "positions 2-D, images 500"."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


@dataclass(frozen=True)
class Cell:
    """One run of a study. `at` is its point in the grid: {"positions": "2-D", "rate": 0.001, "seed": 0}.

    Phase "tune" selects hyper-parameters on validation images, "base" trains a model that other cells start from, and "final" is
    reported; only "final" cells see test images.
    """

    at: Mapping[str, Setting]
    recipe: Recipe
    phase: Literal["tune", "base", "final"] = "final"

    @property
    def name(self) -> str:
        """Return its directory name: readable, with a hash of the recipe."""
        words = "-".join(f"{value}" for value in self.at.values())
        plain = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in words)[:80]
        recipe = to_json(self.recipe)
        recipe["data"] = {n: v for n, v in recipe["data"].items() if n not in OPTIONAL_DATA_FIELDS or v is not None}
        written = json.dumps([self.phase, dict(self.at), recipe], sort_keys=True)
        return f"{self.phase}-{plain}-{hashlib.sha256(written.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class CellResult:
    """A finished cell with its numbers and its duration."""

    at: Mapping[str, Setting]
    phase: str  # "tune", "base", "final", or "given" for a model that the study did not train
    numbers: Mapping[str, Any]  # "validation" and "test" are top-1, 0 to 1; others as the study names them
    seconds: float
    run: str = ""  # the run directory, within the study's


Results = Sequence[CellResult]
Numbers = TypedDict(
    "Numbers",
    {
        "steps": int,
        "stopped": str,
        "diverged": str,
        "validation": float,
        "test": Finite,
        "pictures": int,  # test images
        "five-shot": Finite,
        "parameters": Finite,
        "macs": Finite,
        "milliseconds": Finite,
        "training milliseconds": Finite,
        "distance": list[list[float]],
        "evenly": float,
        "place": float,
        "lines": float,
        "similarity": list[list[list[list[float]]]],
    },
    total=False,
)


@dataclass(frozen=True)
class StudyScale:
    """Size of a study: everything a plan needs besides the facts of the data."""

    data: str  # name of the default data; --data overrides it
    minutes: float  # approximate total time on `hardware`
    hardware: str  # "two cores", "one GPU", "8 GPUs"
    seeds: int = 1
    steps: int = 100  # of one run
    batch: int = 64
    lrs: tuple[float, ...] = (1e-3,)  # learning rates that are tried, the same number for every family
    sizes: Mapping[str, Any] = field(default_factory=dict)  # further sizes of the study: width, depth, counts
    is_measured: bool = False  # True if `minutes` was measured, not estimated


@dataclass(frozen=True)
class StudySetup:
    """Input of a plan: scale, data and directory."""

    scale: StudyScale
    data: Data
    facts: Facts  # of the data: classes, channels, side, number of training images
    directory: Path  # of the study; holds the runs
    init: str | None = None  # the user's checkpoint, if the study takes one
    given: "tuple[CellResult, ...]" = ()  # of trained models that the user gave, to be shown beside those of the study


@dataclass(frozen=True)
class Answer:
    """Interpretation of the results. Every sentence is computed from the numbers."""

    finding: str  # one sentence
    agreement: Agreement  # with the paper
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # a table with intervals, as text
    charts: tuple[Chart, ...]
    limits: str  # of this scale
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question of the paper, the plan of its runs and the interpretation of their results."""

    name: str
    question: str
    reference: str  # in the paper: "table 8, appendix D.4"
    paper_finding: str  # one sentence with the authors' numbers
    scales: Mapping[str, StudyScale]  # "test", "laptop", "gpu", "cluster"
    plan: Callable[[StudySetup, Results], list[Cell]]
    interpret: Callable[[Results, StudyScale], Answer]
    measure: Callable[[Cell, Path], dict[str, Any]] | None = None  # further numbers of a finished run
    inspect_data: Callable[[Data], Facts | None] | None = None  # facts of a directory of datasets; None for one dataset
    takes_init: bool = False  # True if --init may give the initial model
    measure_given: Callable[[Model, Data], dict[str, Any]] | None = None  # the numbers of a trained model, for --model

    def get_scale(self, name: str) -> StudyScale:
        """Return a scale by name."""
        if name not in self.scales:
            raise ValueError(f"{self.name} has no scale {name!r}: {closest(name, list(self.scales))}")
        return self.scales[name]
