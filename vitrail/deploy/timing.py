"""How long things take, measured in turns: a noisy machine is then equally unfair to all."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    runs: Mapping[str, Callable[[], Any]], rounds: int = 15, seconds: float = 10.0
) -> dict[str, list[float]]:
    """Seconds of each in each round, after one that is not counted; fewer rounds where they would take longer than `seconds`.

    The order turns by one every round.
    """
    names = list(runs)
    begin = time.perf_counter()
    for name in names:
        runs[name]()
    rounds = max(3, min(rounds, int(seconds / max(1e-9, time.perf_counter() - begin))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            runs[name]()
            found[name].append(time.perf_counter() - start)
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    """The middle of each."""
    return {name: statistics.median(times) for name, times in found.items()}
