"""Suppression of what a library of C prints to standard error, without losing what others write there meanwhile."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


class StderrFilter:
    """Drops lines with these beginnings from standard error during its blocks, of all threads; other lines come at their end."""

    def __init__(self, *beginnings: str) -> None:
        self.beginnings = tuple(text.encode() for text in beginnings)
        self.lock, self.depth = threading.Lock(), 0
        self.original, self.kept = -1, None

    original: int  # a copy of the descriptor of standard error, while it is replaced
    kept: IO[bytes] | None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Filter standard error during the block. Blocks of several threads may overlap."""
        with self.lock:
            if not self.depth:
                self._begin()
            self.depth += 1
        try:
            yield
        finally:
            with self.lock:
                self.depth -= 1
                if not self.depth:
                    self._end()

    def _begin(self) -> None:
        try:
            self.original = os.dup(2)
        except OSError:  # standard error is closed
            self.original = -1
            return
        self.kept = tempfile.TemporaryFile()  # noqa: SIM115
        os.dup2(self.kept.fileno(), 2)

    def _end(self) -> None:
        if self.original < 0 or self.kept is None:
            return
        os.dup2(self.original, 2)
        os.close(self.original)
        with self.kept as file:
            file.seek(0)
            others = b"".join(line for line in file if line.strip() and not line.startswith(self.beginnings))
        self.original, self.kept = -1, None
        if others:
            os.write(2, others)
