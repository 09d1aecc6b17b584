"""Whether a run that learns without labels has collapsed, and why it likely did: a pure function of its validations.

A collapse is a state from which nothing more is learnt: every picture gets the same answer, or none gets any, or all features
are the same. The numbers that show it also look bad in the first steps of a healthy run, whose network is fresh, so each is
held against where the run began and must stay bad without recovering. A single odd validation is not enough.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

IN_A_ROW = 3  # validations that must agree
NOTHING = 0.01  # of log K: what the teacher's answers tell of their pictures, when that is as good as nothing
UNIFORM = 0.97  # undecidedness from which on there is no answer, rather than the same one
FEW = 0.15  # of the directions, or of the spread, that the run began with
RECOVERING = 1.25  # times the lowest so far: from here it is on its way up
STUCK = 0.01  # of the loss: falling by less than that over the validations in question


@dataclass(frozen=True)
class Collapse:
    """What happened, what to change (with the option that does it), and at which step it was seen."""

    cause: str
    advice: str
    step: int


def collapse(history: Sequence[Record], method: str, lr: float | None = None) -> Collapse | None:
    """The alarm after the last of these validations, or None.

    The first record is from before the first step. A record has `step`, `loss`, `spread` and `rank`, and with a teacher
    `teacher_entropy` and `teacher_diversity`; what is not finite may be written as text. `lr` is the run's, for the advice.
    """
    if len(history) < 2:
        return None
    last = history[-1]
    if not all(finite(last.get(key)) for key in ("loss", "spread", "rank")):
        return broken(history, lr)
    if len(history) <= IN_A_ROW:  # the first, and as many as must agree
        return None
    for found in (silent, flat) if "teacher_entropy" in last else (flat,):
        told = found(history, lr)
        if told is not None:
            return told
    return None
