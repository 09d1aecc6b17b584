"""Run a command of vitrail in a process of its own, and measure its peak memory."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests import forked


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    out: str
    err: str
    peak_mb: float  # of resident memory

    def assert_refused(self, *words: str) -> None:
        """Assert a failure with one error line that holds the words, and no traceback."""
        assert self.code in (1, 2), (self.code, self.out, self.err)
        assert "Traceback" not in self.err + self.out, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("vitrail ")]
        assert len(lines) == 1, self.err
        for word in words:
            assert word in lines[0], lines[0]


def run_forked(*arguments: str | Path, cwd: Path | None = None) -> Finished:
    """Run a command in a process that has imported everything already; its memory is not measured."""
    done = forked.run(*map(str, arguments), cwd=cwd)
    return Finished(done.returncode, done.stdout, done.stderr, 0.0)


def run_vitrail(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
) -> Finished:
    """Run `python -m vitrail` with the arguments; raise TimeoutExpired if it does not end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "vitrail", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        peak = _wait(process, timeout)
        out.seek(0)
        err.seek(0)
        return Finished(process.returncode, out.read(), err.read(), peak)


def _wait(process: subprocess.Popen, timeout: float) -> float:
    """Wait for the process and return its peak memory in MB.

    `ru_maxrss` would count this process too, whose memory the child shares until it starts its own program.
    """
    peak, end = 0.0, time.monotonic() + timeout
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # it has ended in between
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) / 1024)
        if time.monotonic() > end:
            process.kill()
            process.wait()
            raise subprocess.TimeoutExpired(process.args, timeout)
        time.sleep(0.02)
    return peak
