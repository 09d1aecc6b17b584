"""Progress lines on standard error, for terminals, after the first two seconds."""

import sys
import time
from collections.abc import Callable


def byte_progress(stage: str) -> Callable[[int, int], None]:
    """Return a callback for bytes: called with (done, total), it prints a percentage."""
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not sys.stderr.isatty() or now - start < 2 or (now - last < 0.1 and done < total):
            return
        last = now
        end = "\r\033[K" if done >= total else ""
        print(f"\r{stage} {100 * done // max(1, total)} % of {total / 2**20:,.0f} MB{end}", end="", file=sys.stderr)
        sys.stderr.flush()

    return show


def count_progress(unit: str = "images") -> Callable[[str, int, int], None]:
    """Return a callback for counts: called with (stage, done, total), it prints count, speed and time left.

    A total of 0 means unknown. The counts of stages that begin with "downloading" are bytes.
    """
    start = last = time.monotonic()
    started: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        stage_start = started.setdefault(stage, now)
        finished = bool(total) and done >= total
        if not sys.stderr.isatty() or now - start < 2 or (now - last < 0.1 and not finished):
            return
        last = now
        if stage.startswith("downloading"):
            text = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MB" if total else f"{done / 2**20:,.0f} MB"
        elif total:
            speed = done / max(0.1, now - stage_start)
            text = f"{done:,} of {total:,} {unit}, {speed:,.0f}/s, {(total - done) / max(1e-9, speed):,.0f} s left"
        else:
            text = f"{done:,} {unit}"
        end = "\r\033[K" if finished else ""
        print(f"\r\033[K{stage}: {text}{end}", end="", file=sys.stderr)
        sys.stderr.flush()

    return show


def clear_progress() -> None:
    """Erase an unfinished progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
