"""What is kept of a study in its study.json: its question, every result, the answer, and how it was computed."""

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.models.written import dataclass_from_json, to_json
from vitrail.run.environment import processor
from vitrail.run.record import write_json
from vitrail.studies.caution import cautious, limited
from vitrail.studies.study import Agreement, Answer, Result, Scale, Setting, Setup, Study
from vitrail.studies.sweep import Failed

FILE = "study.json"
VERDICTS: dict[Agreement, str] = {
    "agrees": "agrees with the paper",
    "disagrees": "disagrees with the paper",
    "no difference": "no difference at this scale",
    "unclear": "unclear at this scale",
}


@dataclass(frozen=True)
class Record:
    """A study as far as it is, for pages to be made of."""

    name: str
    question: str
    where: str
    found: str
    scale: str
    on: str  # what the scale is meant for
    data: str
    train: int  # pictures
    test: int | None
    classes: int
    trained: str  # models, steps, rates
    command: tuple[str, ...]
    machine: Mapping[str, Any]
    written: str  # when
    known: int  # runs that are planned by now
    results: tuple[Result, ...]
    failed: tuple[Failed, ...]
    answer: Answer | None
    why_not: str = ""  # there is no answer

    @property
    def finished(self) -> bool:
        """Whether every run that is planned has a result."""
        return len(self.results) >= self.known

    @property
    def seeds(self) -> list[Setting]:
        """Of what is reported."""
        return sorted({r.at["seed"] for r in self.results if r.phase == "final" and "seed" in r.at}, key=str)

    @property
    def seconds(self) -> float:
        """Of computing, all runs together."""
        return sum(result.seconds for result in self.results)


def answered(study: Study, setup: Setup, results: Sequence[Result]) -> tuple[Answer | None, str, int]:
    """The answer, or why there is none; and how many runs are planned by now.

    A study is asked once all that others depend on is there and every place of its grid has a result. What it cannot read
    while results are missing is no error; with all of them it is one.
    """
    cells = study.plan(setup, results)
    there = {_spot(result.phase, result.at) for result in results}
    missing = [cell for cell in cells if _spot(cell.phase, cell.at) not in there]
    covered = {family(result.at) for result in results if result.phase == "final"}
    first = [cell for cell in missing if cell.phase != "final" or family(cell.at) not in covered]
    if first or not covered:
        waiting = f", such as {in_words(family(first[0].at))}" if first and family(first[0].at) else ""
        return None, f"{len(missing)} of {len(cells)} planned runs are missing{waiting}", len(cells)
    try:
        seeds = Counter(family(result.at) for result in results if result.phase == "final")
        answer = cautious(study.read(results, setup.scale), min(seeds.values()))
        return limited(answer, scale_of(study, setup)), "", len(cells)
    except (KeyError, ValueError) as error:
        if not missing:
            raise
        return None, f"{len(missing)} of {len(cells)} planned runs are missing ({error})", len(cells)


def family(at: Mapping[str, Setting]) -> tuple[tuple[str, Setting], ...]:
    """A place of the grid without what is tuned and repeated there."""
    return tuple((name, value) for name, value in at.items() if name not in ("rate", "seed"))


def in_words(place: Sequence[tuple[str, Setting]]) -> str:
    """positions 2-D, pictures 500."""
    return ", ".join(f"{name} {value}" for name, value in place)


def numbers_from(rows: Sequence[Sequence[str]]) -> int:
    """The column of a table from which on all are of numbers: they are aligned right. The first is of names."""
    width = len(rows[0]) if rows else 1

    def counts(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] not in ("", "–")]
        return all(any(letter.isdigit() for letter in cell) for cell in cells)

    return next((column for column in range(1, width) if all(map(counts, range(column, width)))), width)


def _spot(phase: str, at: Mapping[str, Setting]) -> tuple[Any, ...]:
    return phase, *sorted(at.items())


def recorded(
    study: Study, setup: Setup, results: Sequence[Result], failed: Sequence[Failed], settings: Sequence[str] = ()
) -> Record:
    """The record of a study by now."""
    answer, why_not, known = answered(study, setup, results)
    pictures = [r.numbers["pictures"] for r in results if isinstance(r.numbers.get("pictures"), int)]
    return Record(
        name=study.name,
        question=study.question,
        where=study.where,
        found=study.found,
        scale=scale_of(study, setup),
        on=setup.scale.on,
        data=setup.data.where,
        train=setup.facts.images,
        test=min(pictures, default=None),
        classes=setup.facts.classes,
        trained=what_is_trained(setup.scale),
        command=command_of(study, setup, settings),
        machine=machine(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        known=max(known, len(results)),
        results=tuple(results),
        failed=tuple(failed),
        answer=answer,
        why_not=why_not,
    )


def scale_of(study: Study, setup: Setup) -> str:
    """The name of a scale, whatever number of seeds was asked for."""
    same = (name for name, each in study.scales.items() if replace(each, seeds=setup.scale.seeds) == setup.scale)
    return next(same, "its own")


def what_is_trained(scale: Scale) -> str:
    """800 steps of 64 pictures; rates 0.001, 0.003; width 64, depth 4 …, as the scale has it."""

    def words(value: Any) -> str:
        if isinstance(value, Mapping):
            return "(" + ", ".join(f"{name} {words(part)}" for name, part in value.items()) + ")"
        if isinstance(value, (list, tuple)):
            return " ".join(map(words, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value)

    rates = ", ".join(f"{rate:g}" for rate in scale.rates)
    sizes = ", ".join(f"{name.replace('_', ' ')} {words(value)}" for name, value in scale.sizes.items())
    return f"{scale.steps:,} steps of {scale.batch:,} pictures; learning rate {rates}; {sizes}"


def command_of(study: Study, setup: Setup, settings: Sequence[str] = ()) -> tuple[str, ...]:
    """What runs the study like this."""
    name = scale_of(study, setup)
    usual = study.scales.get(name, setup.scale)
    command = ["vitrail", "paper", "run", study.name, "--scale", name]
    if setup.data.where != usual.data:
        command += ["--data", setup.data.where]
        if setup.data.fractions:
            command += ["--split", ",".join(f"{part:g}" for part in setup.data.fractions)]
    if setup.init is not None:
        command += ["--init", setup.init]
    if setup.scale.seeds != usual.seeds:
        command += ["--seeds", str(setup.scale.seeds)]
    return tuple(command + [word for setting in settings for word in ("--set", setting)])


def machine() -> dict[str, Any]:
    """What this process runs on."""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "GPU": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vitrail": vitrail.__version__,
    }


def write_record(record: Record, directory: Path) -> None:
    """study.json, all of it or nothing."""
    about: dict[str, Any] = {
        "study": record.name,
        "question": record.question,
        "where": record.where,
        "found": record.found,
        "scale": record.scale,
        "on": record.on,
        "data": record.data,
        "pictures": {"train": record.train, "test": record.test},
        "classes": record.classes,
        "trained": record.trained,
        "command": list(record.command),
        "seeds": record.seeds,
        "seconds": round(record.seconds, 1),
        "machine": dict(record.machine),
        "written": record.written,
        "finished": record.finished,
        "runs": {"known": record.known, "finished": len(record.results), "failed": len(record.failed)},
        "answer": to_json(record.answer) if record.answer else None,
        "why_not": record.why_not,
        "failed": [{"name": f.name, "at": dict(f.at), "phase": f.phase, "line": f.line} for f in record.failed],
        "results": [
            {"at": dict(r.at), "phase": r.phase, "numbers": dict(r.numbers), "seconds": r.seconds, "run": r.run}
            for r in record.results
        ],
    }
    write_json(directory / FILE, _kept(about))


def read_record(directory: Path) -> Record:
    """The study that was written to a directory."""
    path = directory / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {FILE}: vitrail paper show {directory} writes it")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        answer = data["answer"]
        return Record(
            **{name: data[name] for name in ("question", "where", "found", "scale", "on", "data", "classes")},
            **{name: data[name] for name in ("machine", "written", "why_not")},
            name=data["study"],
            train=data["pictures"]["train"],
            test=data["pictures"]["test"],
            trained=data.get("trained", ""),
            command=tuple(data["command"]),
            known=data["runs"]["known"],
            results=tuple(Result(**result) for result in data["results"]),
            failed=tuple(Failed(**failed) for failed in data["failed"]),
            answer=None if answer is None else dataclass_from_json(_numbers(answer), Answer, "answer"),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): vitrail paper show {directory} writes it again") from None


def _kept(value: Any) -> Any:
    """The same for JSON, which knows no infinities (they are null) and no halves of characters."""
    if isinstance(value, Mapping):
        return {_kept(str(key)): _kept(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_kept(part) for part in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of JSON, with what was null in charts as the number that is none."""
    for chart in answer["charts"]:
        for series in chart["series"]:
            for name in ("y", "low", "high"):
                series[name] = [math.nan if value is None else value for value in series[name]]
            series["maps"] = [
                [[math.nan if value is None else value for value in row] for row in each] for each in series["maps"]
            ]
    return answer
