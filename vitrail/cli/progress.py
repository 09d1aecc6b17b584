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
