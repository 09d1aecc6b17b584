"""What a run writes down while it goes: `metrics.jsonl`, the same for every repetition, and `timing.jsonl`, which is not."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Listener = Callable[[Record], None]


class Journal:
    """Two files of one JSON object a line, and those who want to hear of each line."""

    def __init__(self, directory: Path | None, listeners: tuple[Listener, ...] = ()) -> None:
        """Without a directory nothing is written: that is how processes behave that do not lead."""
        self.directory, self.listeners = directory, listeners
        self.bytes = 0

    def begin(self, logged: int, step: int) -> None:
        """Goes on after `logged` bytes: what a killed run wrote behind its last checkpoint will be written again."""
        self.bytes = logged
        if self.directory is None:
            return
        metrics, timing = self.directory / "metrics.jsonl", self.directory / "timing.jsonl"
        metrics.touch()
        os.truncate(metrics, min(logged, metrics.stat().st_size))
        kept = [line for line in lines(timing) if line.get("step", 0) <= step]
        timing.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write(self, record: Record) -> None:
        """A line of metrics."""
        text = json.dumps({k: plain(v) for k, v in record.items()}, ensure_ascii=False, allow_nan=False) + "\n"
        self.bytes += len(text.encode())
        self._append("metrics.jsonl", text)
        for listener in self.listeners:
            listener(record)

    def time(self, record: Record) -> None:
        """A line of timing."""
        self._append("timing.jsonl", json.dumps(record) + "\n")
        for listener in self.listeners:
            listener({"kind": "timing"} | record)

    def tell(self, record: Record) -> None:
        """Something to be heard and not written."""
        for listener in self.listeners:
            listener(record)

    def _append(self, name: str, text: str) -> None:
        if self.directory is None:
            return
        try:
            with open(self.directory / name, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OSError(f"{self.directory / name} was not written: {error.strerror or error}") from error


def lines(path: Path) -> list[Record]:
    """The objects of a file of JSON lines; a last line that was cut off by a kill is left out."""
    found: list[Record] = []
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if isinstance(record, Mapping):
            found.append(dict(record))
    return found


def plain(value: Any) -> Any:
    """JSON has no infinity: such numbers are written as their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
