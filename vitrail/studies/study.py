"""What a study is: a question of the paper, a plan of runs that may answer it, and how the answer is read from their numbers.

A study is a value; its module has it as `STUDY`. All that it does is pure: `plan` names the runs that are known by now, given the
results of those that are finished, and `read` makes the answer of the results. So a study can be killed at any time, shared by
any number of runners, and tested on results that were made up.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.models.written import to_json
from vitrail.recipe import Data, Facts, Recipe

Setting = str | int | float | bool | None
Agreement = Literal["agrees", "disagrees", "no difference", "unclear"]
LATER = ("classes", "examples")  # fields of the data that came later: unused, they rename no cell that was run before
DIVIDED = (0.8, 0.1, 0.1)  # of pictures that lie there undivided: a study chooses on some and reports on others


@dataclass(frozen=True)
class Cell:
    """One run of a study. `at` says where in the grid it lies: {"positions": "2-D", "rate": 0.001, "seed": 0}.

    Cells of the phase "tune" are compared on validation pictures, to choose. Cells of the phase "base" make a model that others
    start from. Those of "final" are what the study reports, and only they see the test pictures.
    """

    at: Mapping[str, Setting]
    recipe: Recipe
    phase: Literal["tune", "base", "final"] = "final"

    @property
    def name(self) -> str:
        """Of its directory: readable, and another one for another recipe."""
        words = "-".join(f"{value}" for value in self.at.values())
        plain = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in words)[:80]
        recipe = to_json(self.recipe)
        recipe["data"] = {n: v for n, v in recipe["data"].items() if n not in LATER or v is not None}
        written = json.dumps([self.phase, dict(self.at), recipe], sort_keys=True)
        return f"{self.phase}-{plain}-{hashlib.sha256(written.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Result:
    """A finished cell: its numbers as `measure` gave them, and what it took."""

    at: Mapping[str, Setting]
    phase: str
    numbers: Mapping[str, Any]  # "validation" and "test" are top-1, 0 to 1; others as the study names them
    seconds: float
    run: str = ""  # the run directory, within the study's


@dataclass(frozen=True)
class Scale:
    """How large a study is run. Everything that a plan needs to know besides the data's facts."""

    data: str  # the name of the data it is meant for; --data gives other
    minutes: float  # about how long it takes in all on what `on` says
    on: str  # "two cores", "one GPU", "8 GPUs"
    seeds: int = 1
    steps: int = 100  # of one run, or what the study makes of it
    batch: int = 64
    rates: tuple[float, ...] = (1e-3,)  # learning rates that are tried, the same number for every family
    sizes: Mapping[str, Any] = field(default_factory=dict)  # whatever else the study scales: width, depth, counts
    measured: bool = False  # whether `minutes` was measured, not reckoned


@dataclass(frozen=True)
class Setup:
    """What a plan is made for."""

    scale: Scale
    data: Data
    facts: Facts  # of the data: classes, channels, side, number of training pictures
    place: Path  # the study's directory, in which runs lie
    init: str | None = None  # a model that the user gives to a study that begins with one


@dataclass(frozen=True)
class Chart:
    """One plot as a value: the report and the pages of the documentation draw it."""

    title: str
    kind: Literal["lines", "bars", "dots", "maps"]
    series: tuple["Series", ...]
    x_name: str = ""
    y_name: str = ""
    x_log: bool = False
    percent: bool = True  # whether y is an accuracy, 0 to 1


@dataclass(frozen=True)
class Series:
    """Points of one family with their intervals (y, low, high); with `maps`, small pictures of numbers in rows and columns."""

    label: str
    x: tuple[float | str, ...] = ()
    y: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    maps: tuple[tuple[tuple[float, ...], ...], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the numbers say. Every sentence is computed from them."""

    finding: str  # one sentence
    agreement: Agreement  # with the paper
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # a table with intervals, as text
    charts: tuple[Chart, ...]
    limits: str  # what this scale cannot show
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question of the paper as a program."""

    name: str
    question: str
    where: str  # in the paper: "table 8, appendix D.4"
    found: str  # what the authors found, in a sentence, with their numbers
    scales: Mapping[str, Scale]  # "test", "laptop", "gpu", "cluster"
    plan: Callable[[Setup, Sequence[Result]], list[Cell]]
    read: Callable[[Sequence[Result], Scale], Answer]
    measure: Callable[[Cell, Path], dict[str, Any]] | None = None  # besides "validation" and "test", of a finished run
    look: Callable[[Data], Facts | None] | None = None  # facts of data that is not one data set; None for what is
    takes_init: bool = False  # whether the user may give the model that it begins with
