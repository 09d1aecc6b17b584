"""A line on standard error for what takes longer than two seconds, where somebody is looking."""

import sys
import time
from collections.abc import Callable


def progress(doing: str) -> Callable[[int, int], None]:
    """Called with bytes done and bytes in all; silent for the first two seconds, and where there is no terminal."""
    begin = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not sys.stderr.isatty() or now - begin < 2 or (now - last < 0.1 and done < total):
            return
        last = now
        end = "\r\033[K" if done >= total else ""
        print(f"\r{doing} {100 * done // max(1, total)} % of {total / 2**20:,.0f} MB{end}", end="", file=sys.stderr)
        sys.stderr.flush()

    return show


def counted(of: str = "pictures") -> Callable[[str, int, int], None]:
    """The same for things that are counted: called with what is being done, how many are done, and how many there are.

    Where it is not known how many there are (0), or where bytes are downloaded, only what is known is shown.
    """
    begin = last = time.monotonic()
    started: dict[str, float] = {}

    def show(doing: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        first = started.setdefault(doing, now)
        over = bool(total) and done >= total
        if not sys.stderr.isatty() or now - begin < 2 or (now - last < 0.1 and not over):
            return
        last = now
        if doing.startswith("downloading"):
            text = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MB" if total else f"{done / 2**20:,.0f} MB"
        elif total:
            rate = done / max(0.1, now - first)
            text = f"{done:,} of {total:,} {of}, {rate:,.0f}/s, {(total - done) / max(1e-9, rate):,.0f} s left"
        else:
            text = f"{done:,} {of}"
        end = "\r\033[K" if over else ""
        print(f"\r\033[K{doing}: {text}{end}", end="", file=sys.stderr)
        sys.stderr.flush()

    return show


def cleared() -> None:
    """Takes away a line that nobody finished, before something else is printed."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
