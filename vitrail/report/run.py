"""A run directory, read as far as it goes: a run that is under way or was cut short has a page too."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.evaluate.measures import measures, score_name
from vitrail.evaluate.verdicts import Verdicts, judge

SPLITS = ("test", "validation", "train")
FILES = ("run.json", "recipe.json", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Evaluation:
    """What the model said about every picture of a split."""

    split: str
    logits: np.ndarray  # [n, K]
    targets: np.ndarray  # [n], or [n, K] where a picture has several labels
    names: list[str]  # [n]; empty where they were not kept
    pictures: Mapping[int, Path | bytes]  # of some, small copies

    @property
    def several(self) -> bool:
        return self.targets.ndim == 2

    @cached_property
    def measures(self) -> dict[str, Any]:
        return measures(self.logits, self.targets)

    @cached_property
    def verdicts(self) -> Verdicts:
        return judge(self.logits, self.targets)

    def name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"picture {index}"


@dataclass(frozen=True)
class Run:
    """All that a run directory tells."""

    directory: Path
    about: dict[str, Any]  # run.json
    recipe: dict[str, Any] | None
    training: list[dict[str, Any]]  # of metrics.jsonl
    validation: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    summary: dict[str, Any] | None
    evaluations: dict[str, Evaluation]
    problems: list[str] = field(default_factory=list)  # what could not be read

    @property
    def name(self) -> str:
        return self.directory.resolve().name or str(self.directory)

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def pretraining(self) -> bool:
        """Whether it learnt without labels: judged by its signals, not by answers."""
        return self.about.get("task") == "pretraining"

    @property
    def method(self) -> str:
        """How it learnt without labels: mpp, mae or dino."""
        return str(self.about.get("method") or (self.summary or {}).get("method") or "")

    @property
    def collapse(self) -> dict[str, Any] | None:
        """The alarm that went off in it: cause, advice, step."""
        told = (self.summary or {}).get("collapse")
        return told if isinstance(told, dict) else None

    @property
    def several(self) -> bool:
        if self.evaluations:
            return next(iter(self.evaluations.values())).several
        return self.about.get("task") == "multi" or any("map" in row for row in self.validation)

    @property
    def score_name(self) -> str:
        return score_name(self.several)

    @property
    def split(self) -> str | None:
        """The split that the run is judged by."""
        told = (self.summary or {}).get("split")
        if isinstance(told, str):
            return told
        return next((split for split in SPLITS if split in self.evaluations), None)

    @property
    def evaluation(self) -> Evaluation | None:
        return self.evaluations.get(self.split or "")

    def measured(self, split: str) -> dict[str, Any]:
        """A split's measures: from the logits where they were kept, else as the run wrote them down."""
        summary = self.summary or {}
        written = summary.get(split) if isinstance(summary.get(split), dict) else None
        if written is None and split == self.split:
            written = {key: value for key, value in summary.items() if not isinstance(value, dict)}
        if split in self.evaluations:
            return (written or {}) | self.evaluations[split].measures
        return written or {}

    def labels(self, classes: int) -> list[str]:
        """A name for each of so many classes."""
        known = self.about.get("labels")
        told = [str(label) for label in known] if isinstance(known, list) else []
        return (told + [f"class {k}" for k in range(len(told), classes)])[:classes]

    def part(self, *path: str) -> Any:
        """A value of run.json, or None."""
        value: Any = self.about
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        return value


def read_run(directory: str | Path) -> Run:
    """Reads what is there. A directory that is no run is refused; a part that cannot be read is named in `problems`."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}: give a run, as vitrail train wrote it")
    if not any((directory / name).is_file() for name in FILES):
        raise ValueError(f"{directory} is not a run: it holds none of {', '.join(FILES)}")
    problems: list[str] = []
    metrics = _lines(directory / "metrics.jsonl", problems)
    about = _json(directory / "run.json", problems)
    return Run(
        directory,
        about or {},
        _json(directory / "recipe.json", problems),
        _by_step(row for row in metrics if row.get("kind") == "train"),
        _by_step(row for row in metrics if row.get("kind") == "validation"),
        _by_step(_lines(directory / "timing.jsonl", problems)),
        _json(directory / "summary.json", problems),
        _evaluations(directory / "evaluation", problems),
        problems,
    )


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return None
    if not isinstance(data, dict):
        problems.append(f"{path.name} could not be used: it holds no object")
        return None
    return data


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error}")
        return []
    rows, broken = [], 0
    for place, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif place < len(lines) - 1:  # a last line without its end is one that is being written
            broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} of {len(rows) + broken} lines are not readable and are left out")
    return rows


def _by_step(rows: Any) -> list[dict[str, Any]]:
    """In order; of a step that was done twice, the later."""
    found = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [found[step] for step in sorted(found)]


def _evaluations(directory: Path, problems: list[str]) -> dict[str, Evaluation]:
    found = {}
    for split in SPLITS:
        path = directory / f"{split}.npz"
        if not path.is_file():
            continue
        try:
            with np.load(path, allow_pickle=False) as file:
                logits, targets = file["logits"], file["targets"]
            found[split] = Evaluation(split, logits, targets, *_names(directory, split, len(logits), problems))
            _ = found[split].measures  # what does not fit, or is not finite, shows here
        except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            found.pop(split, None)
            problems.append(f"evaluation/{path.name} could not be used: {error}")
    return found


def _names(directory: Path, split: str, count: int, problems: list[str]) -> tuple[list[str], dict[int, Path]]:
    told = (_json(directory / f"{split}.json", problems) or {}).get("names")
    names = [str(name) for name in told] if isinstance(told, list) else []
    if names and len(names) != count:
        problems.append(f"evaluation/{split}.json names {len(names)} pictures of {count}: the names are left out")
        names = []
    pictures = {}
    for path in sorted((directory / "pictures").glob(f"{split}-*")):
        index = path.stem.rpartition("-")[2]
        if index.isdecimal() and int(index) < count:
            pictures[int(index)] = path
    return names, pictures
