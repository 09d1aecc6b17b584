"""Progress and status lines on standard error."""

import shutil
import sys
import time
from collections.abc import Callable

CLEAR_LINE = "\r\033[K"


class ProgressLine:
    """A line that is overwritten, for terminals, from two seconds after the start and at most ten times a second."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def show(self, text: str, finished: bool) -> None:
        """Show a text; it is erased if the work has finished."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.start >= 2 and (now - self.last >= 0.1 or finished):
            self.last = now
            print(f"{CLEAR_LINE}{text}{CLEAR_LINE if finished else ''}", end="", file=sys.stderr, flush=True)


def byte_progress(stage: str) -> Callable[[int, int], None]:
    """Return a callback for bytes: called with (done, total), it prints a percentage."""
    line = ProgressLine()

    def show(done: int, total: int) -> None:
        line.show(f"{stage} {100 * done // max(1, total)} % of {total / 2**20:,.0f} MB", done >= total)

    return show


def count_progress(unit: str = "images") -> Callable[[str, int, int], None]:
    """Return a callback for counts: called with (stage, done, total), it prints count, speed and time left.

    A total of 0 means unknown. The counts of stages that begin with "downloading" are bytes.
    """
    line, started = ProgressLine(), dict[str, float]()

    def show(stage: str, done: int, total: int) -> None:
        seconds = time.monotonic() - started.setdefault(stage, time.monotonic())
        if stage.startswith("downloading"):
            text = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MB" if total else f"{done / 2**20:,.0f} MB"
        elif total:
            speed = done / max(0.1, seconds)
            text = f"{done:,} of {total:,} {unit}, {speed:,.0f}/s, {(total - done) / max(1e-9, speed):,.0f} s left"
        else:
            text = f"{done:,} {unit}"
        line.show(f"{stage}: {text}", bool(total) and done >= total)

    return show


def clear_progress() -> None:
    """Erase an unfinished progress line."""
    if sys.stderr.isatty():
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


class StatusDisplay:
    """Lines that stay on the screen, and below them status lines that are overwritten."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        self.n_lines = 0  # status lines to overwrite
        self.last_shown = time.monotonic()

    def show_status(self, *lines: str) -> None:
        """Show the status lines, on a terminal in place of the earlier ones."""
        self.last_shown = time.monotonic()
        if self.terminal:
            self.clear()
            width = shutil.get_terminal_size().columns
            self.write("".join(f"{line[: width - 1]}\n" for line in lines))
            self.n_lines = len(lines)
        else:
            self.write("  ".join(lines) + "\n")

    def print_line(self, line: str) -> None:
        """Print a line that stays on the screen."""
        self.clear()
        self.write(f"{line}\n")

    def clear(self) -> None:
        """Erase the status lines."""
        if self.n_lines:
            self.write(f"\033[{self.n_lines}A\033[J")
            self.n_lines = 0

    def write(self, text: str) -> None:
        """Write to standard error; if the pipe is closed, the run continues without output."""
        if self.quiet:
            return
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except BrokenPipeError:
            self.quiet = True


def format_clock(seconds: float) -> str:
    """Return seconds as 1:05, 12:00 or 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
