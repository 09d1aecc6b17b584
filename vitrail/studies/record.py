"""The record of a study in study.json: question, results, answer, and how they were computed."""

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.studies.intervals import MIN_SEEDS, TRAINING_NOISE
from vitrail.studies.study import NO_FINDING, Answer, CellResult, Setting, Study, StudyScale, StudySetup, format_point
from vitrail.studies.sweep import FailedCell
from vitrail.training.runs.record import write_json
from vitrail.utils.devices import processor_name
from vitrail.utils.json import read_json_file, to_json, untyped_from_json

RECORD_FILE = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """State of a study, from which its pages are rendered."""

    name: str
    question: str
    where: str
    found: str
    scale: str
    on: str  # hardware of the scale
    data: str
    train: int  # images
    test: int | None
    classes: int
    trained: str  # steps, learning rates, sizes
    command: tuple[str, ...]
    machine: Mapping[str, Any]
    written: str  # date and time
    known: int  # runs planned so far
    results: tuple[CellResult, ...]
    failed: tuple[FailedCell, ...]
    answer: Answer | None
    why_not: str = ""  # reason for a missing answer

    @property
    def is_finished(self) -> bool:
        """Return True if every planned run has a result."""
        return len(self.results) >= self.known

    @property
    def seeds(self) -> list[Setting]:
        """Return the seeds of final runs."""
        return sorted({r.at["seed"] for r in self.results if r.phase == "final" and "seed" in r.at}, key=str)

    @property
    def seconds(self) -> float:
        """Return the compute time of all runs."""
        return sum(result.seconds for result in self.results)


def compute_answer(study: Study, setup: StudySetup, results: Sequence[CellResult]) -> tuple[Answer | None, str, int]:
    """Return the answer or None, the reason for None, and the number of runs planned so far.

    Results are interpreted once all tuning and base runs are finished and every grid point has a final result. An error while
    interpreting is raised only if no result is missing.
    """
    cells = study.plan(setup, results)
    finished = [(result.phase, result.at) for result in results]
    missing = [cell for cell in cells if (cell.phase, cell.at) not in finished]
    covered = Counter(family_key(result.at) for result in results if result.phase == "final")
    first = [cell for cell in missing if cell.phase != "final" or family_key(cell.at) not in covered]
    state = f"{len(missing)} of {len(cells)} planned runs are missing"
    if first or not covered:
        waiting = format_point(dict(family_key(first[0].at))) if first else ""
        return None, f"{state}, such as {waiting}" if waiting else state, len(cells)
    try:
        answer = qualify_by_seeds(study.interpret((*results, *setup.given), setup.scale), min(covered.values()))
        return add_scale_limits(answer, scale_name(study, setup)), "", len(cells)
    except (KeyError, ValueError) as error:
        if not missing:
            raise
        return None, f"{state} ({error})", len(cells)


def qualify_by_seeds(answer: Answer, seeds: int) -> Answer:
    """Return the answer with a note on few seeds; "no difference" then becomes "unclear"."""
    if seeds >= MIN_SEEDS or answer.finding.startswith(NO_FINDING):
        return answer
    ignored = f"differences of {100 * TRAINING_NOISE:.0f} point or less are ignored as training noise"
    finding = f"{answer.finding.removesuffix('.')}; with {seeds} seed{'s' if seeds > 1 else ''}, {ignored}."
    agreement = "unclear" if answer.agreement == "no difference" else answer.agreement
    return replace(answer, finding=finding, agreement=agreement)


TEST_SCALE_LIMITS = "This scale only shows that the study runs: its few steps do not answer the question."
CLUSTER_SCALE_LIMITS = (
    "Models and training have the paper's size. The paper pre-trains on JFT, which is not public; ImageNet-21k replaces it. Most "
    "grid points have one run, at the paper's learning rate."
)


def add_scale_limits(answer: Answer, scale: str) -> Answer:
    """Return the answer with the limits of its scale. A study's own limits describe the small scales."""
    if scale == "test":
        return replace(answer, agreement="unclear", limits=f"{TEST_SCALE_LIMITS} {answer.limits}")
    return replace(answer, limits=CLUSTER_SCALE_LIMITS) if scale == "cluster" else answer


def family_key(point: Mapping[str, Setting]) -> tuple[tuple[str, Setting], ...]:
    """Return a grid point without learning rate and seed."""
    return tuple((name, value) for name, value in point.items() if name not in ("rate", "seed"))


def build_record(
    study: Study,
    setup: StudySetup,
    results: Sequence[CellResult],
    failed: Sequence[FailedCell],
    settings: Sequence[str] = (),
) -> StudyRecord:
    """Return the record of a study's current state."""
    answer, why_not, known = compute_answer(study, setup, results)
    test_counts = [r.numbers["pictures"] for r in results if isinstance(r.numbers.get("pictures"), int)]
    return StudyRecord(
        name=study.name,
        question=study.question,
        where=study.reference,
        found=study.paper_finding,
        scale=scale_name(study, setup),
        on=setup.scale.hardware,
        data=setup.data.where,
        train=setup.facts.images,
        test=min(test_counts, default=None),
        classes=setup.facts.classes,
        trained=describe_training(setup.scale),
        command=build_command(study, setup, settings),
        machine=describe_machine(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        known=max(known, len(results)),
        results=tuple(results),
        failed=tuple(failed),
        answer=answer,
        why_not=why_not,
    )


def scale_name(study: Study, setup: StudySetup) -> str:
    """Return the name of the setup's scale, ignoring the number of seeds."""
    same = (name for name, scale in study.scales.items() if replace(scale, seeds=setup.scale.seeds) == setup.scale)
    return next(same, "custom")


def describe_training(scale: StudyScale) -> str:
    """Return text such as "800 steps of 64 images; learning rate 0.001, 0.003; width 64, depth 4"."""

    def words(value: Any) -> str:
        if isinstance(value, Mapping):
            return "(" + ", ".join(f"{name} {words(part)}" for name, part in value.items()) + ")"
        if isinstance(value, (list, tuple)):
            return " ".join(map(words, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value)

    lrs = ", ".join(f"{lr:g}" for lr in scale.lrs)
    sizes = ", ".join(f"{name.replace('_', ' ')} {words(value)}" for name, value in scale.sizes.items())
    return f"{scale.steps:,} steps of {scale.batch:,} images; learning rate {lrs}; {sizes}"


def build_command(study: Study, setup: StudySetup, settings: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command line that runs the study with this setup."""
    name = scale_name(study, setup)
    usual = study.scales.get(name, setup.scale)
    command = ["vitrail", "paper", "run", study.name, "--scale", name]
    if setup.data.where != usual.data:
        command += ["--data", setup.data.where]
        if setup.data.fractions:
            command += ["--fractions", ",".join(f"{part:g}" for part in setup.data.fractions)]
    if setup.init is not None:
        command += ["--init", setup.init]
    if setup.scale.seeds != usual.seeds:
        command += ["--seeds", str(setup.scale.seeds)]
    return tuple(command + [word for setting in settings for word in ("--set", setting)])


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, GPUs and versions of this process."""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "GPU": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vitrail": vitrail.__version__,
    }


def write_record(record: StudyRecord, directory: Path) -> None:
    """Write study.json atomically."""
    about = {name: value for name, value in vars(record).items() if name not in ("name", "train", "test", "known")}
    about |= {
        "study": record.name,
        "pictures": {"train": record.train, "test": record.test},
        "seeds": record.seeds,
        "seconds": round(record.seconds, 1),
        "finished": record.is_finished,
        "runs": {"known": record.known, "finished": len(record.results), "failed": len(record.failed)},
        "answer": to_json(record.answer),
        "failed": [vars(failed) for failed in record.failed],
        "results": [vars(result) for result in record.results],
    }
    write_json(directory / RECORD_FILE, _to_json_safe(about))


def read_record(directory: Path) -> StudyRecord:
    """Return the record in a directory's study.json."""
    path = directory / RECORD_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {RECORD_FILE}: write it with vitrail paper show {directory}")
    try:
        data = read_json_file(path, dict[str, Any])
        answer = data["answer"]
        read = {field.name: data[field.name] for field in fields(StudyRecord) if field.name in data}
        read |= {
            "name": data["study"],
            "train": data["pictures"]["train"],
            "test": data["pictures"]["test"],
            "trained": data.get("trained", ""),
            "known": data["runs"]["known"],
            "results": [result | {"type": "CellResult"} for result in data["results"]],
            "failed": [failed | {"type": "FailedCell"} for failed in data["failed"]],
            "answer": None if answer is None else _restore_nan(answer),
        }
        return untyped_from_json(read, StudyRecord, "study")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path} ({error}): rewrite it with vitrail paper show {directory}") from None


def _to_json_safe(value: Any) -> Any:
    """Return a value for strict JSON: non-finite numbers become null, lone surrogates are escaped."""
    if isinstance(value, Mapping):
        return {_to_json_safe(str(key)): _to_json_safe(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_safe(part) for part in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _restore_nan(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer read from JSON with null in its charts replaced by NaN."""

    def restore(value: Any) -> Any:
        return [restore(part) for part in value] if isinstance(value, list) else math.nan if value is None else value

    for chart in answer["charts"]:
        for series in chart["series"]:
            series |= {name: restore(series[name]) for name in ("y", "low", "high", "maps")}
    return answer
