"""Type of the callback that reports progress."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]  # the stage, items done, items in total
