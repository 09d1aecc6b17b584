"""Logs of a run: `metrics.jsonl`, identical in every repetition, `timing.jsonl`, and external trackers."""

import json
import math
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.utils.json import parse_json
from vitrail.utils.text import is_number

Record = dict[str, Any]
Listener = Callable[[Record], None]
LogNumbers = Callable[[int, dict[str, float]], None]  # of a step


class MetricsLog:
    """The two log files, and the listeners that get each record."""

    def __init__(self, directory: Path | None, listeners: tuple[Listener, ...] = ()) -> None:
        """Log to a directory; None writes nothing, as on all processes but the main one."""
        self.directory, self.listeners = directory, listeners
        self.bytes = 0

    def truncate(self, logged: int, step: int) -> None:
        """Truncate the logs to a checkpoint: what a killed run wrote after it will be written again."""
        self.bytes = logged
        if self.directory is None:
            return
        metrics, timing = self.directory / "metrics.jsonl", self.directory / "timing.jsonl"
        metrics.touch()
        os.truncate(metrics, min(logged, metrics.stat().st_size))
        kept = [line for line in read_json_lines(timing) if is_number(line.get("step")) and line["step"] <= step]
        timing.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record to metrics.jsonl."""
        text = json.dumps({k: finite_or_name(v) for k, v in record.items()}, ensure_ascii=False, allow_nan=False) + "\n"
        self.bytes += len(text.encode())
        self._append("metrics.jsonl", text)
        self.notify(record)

    def write_timing(self, record: Record, **estimates: float) -> None:
        """Append a record to timing.jsonl; listeners get estimates with it."""
        self._append("timing.jsonl", json.dumps(record) + "\n")
        self.notify({"kind": "timing"} | record | estimates)

    def notify(self, record: Record) -> None:
        """Send a record to the listeners only."""
        for listener in self.listeners:
            listener(record)

    def _append(self, name: str, text: str) -> None:
        if self.directory is None:
            return
        try:
            with open(self.directory / name, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OSError(f"cannot write {self.directory / name}: {error.strerror or error}") from error


def read_json_lines(path: Path) -> list[Record]:
    """Return the objects of a JSON-lines file, without a truncated last line."""
    values: list[Record] = []
    if not path.is_file():
        return values
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            break
        if isinstance(record, Mapping):
            values.append(dict(record))
    return values


def finite_or_name(value: Any) -> Any:
    """Return a value, or the name of a number that is not finite, which JSON cannot hold."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def collect_numbers(record: Record) -> tuple[int, dict[str, float]]:
    """Return the step and the numbers of a record, under names like train/loss."""
    kind = record.get("kind", "train")
    values = {
        f"{kind}/{name}": float(value)
        for name, value in record.items()
        if name not in ("step", "kind") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return int(record.get("step", 0)), values


def log_to_tensorboard(directory: Path, identity: str, settings: dict[str, Any]) -> LogNumbers:
    writer = import_tracker("tensorboard").SummaryWriter(str(directory / "tensorboard"))
    writer.add_text("recipe", f"```\n{settings}\n```")

    def log(step: int, values: dict[str, float]) -> None:
        for label, value in values.items():
            writer.add_scalar(label, value, step)
        writer.flush()

    return log


def log_to_wandb(directory: Path, identity: str, settings: dict[str, Any]) -> LogNumbers:
    run = import_tracker("wandb").init(
        project="vitrail", name=directory.name, id=identity, resume="allow", dir=str(directory), config=settings
    )
    return lambda step, values: run.log(values | {"step": step})


def log_to_mlflow(directory: Path, identity: str, settings: dict[str, Any]) -> LogNumbers:
    module = import_tracker("mlflow")
    module.set_experiment("vitrail")
    known = module.search_runs(filter_string=f"tags.vitrail = '{identity}'", output_format="list")
    if known:  # the run is resumed
        module.start_run(run_id=known[0].info.run_id)
    else:
        module.start_run(run_name=directory.name, tags={"vitrail": identity})
        module.log_dict(settings, "recipe.json")
    return lambda step, values: module.log_metrics(values, step=step)


TRACKERS = {"tensorboard": log_to_tensorboard, "wandb": log_to_wandb, "mlflow": log_to_mlflow}


def connect_tracker(name: str, directory: Path, identity: str, settings: dict[str, Any]) -> Listener:
    """Return a listener that sends the numbers of each record to an external tracker."""
    log = TRACKERS[name](directory, identity, settings)

    def on_record(record: Record) -> None:
        step, values = collect_numbers(record)
        if values:
            log(step, values)

    return on_record


def import_tracker(extra: str) -> Any:
    """Return the module of a tracker, or raise ValueError with the extra to install."""
    try:
        return import_module("torch.utils.tensorboard" if extra == "tensorboard" else extra)
    except ImportError as error:
        raise ValueError(f"trackers={extra!r} needs the extra: pip install 'vitrail[{extra}]' ({error})") from None
