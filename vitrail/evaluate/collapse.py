"""Whether a run that learns without labels has collapsed, and why it likely did: a pure function of its validations.

A collapse is a state from which nothing more is learnt: every picture gets the same answer, or none gets any, or all features
are alike. In a healthy run the same numbers get worse too in its first steps, before they get better. So features are held
against where the run began, several validations must agree, and a run that is on its way up is left alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Record = Mapping[str, Any]
SIGNALS = ("loss", "spread", "rank", "teacher_entropy", "teacher_diversity")

# Beside them, what tiny runs on CIFAR-10 and digits had: the healthy ones at their worst, then those that collapsed when the
# alarm went off. Their histories are in tests/evaluate/histories.py.
IN_A_ROW = 3  # validations that must agree
AT_FIRST = 6  # of a run that told nothing to begin with, as fresh networks may
SAME = 0.2  # diversity below which answers are one answer: 0.59, 0.17
NOTHING = 0.001  # diversity less undecidedness, what answers tell of their pictures: 0.0024, 0.0008 and falling
LITTLE = 0.01  # of the same, where the features lie closer as well: 0.04, 0.0077
NO_CHOICE = 0.97  # undecidedness from which on there is no answer, rather than the same one: 0.99, 0.1
LITTLE_SPREAD = 0.15  # of the spread at the beginning: 0.12 (with a rank of 0.9), 0.13; with a teacher 0.16, 0.09
FEW_DIRECTIONS = 0.35  # of the rank at the beginning, without a teacher: 0.33 (with a spread of 0.5), 0.26
FEWER_DIRECTIONS = 0.6  # of it, with one: 0.74, 0.46
COOL = 0.04  # the teacher's temperature, from which on it is not to blame
RECOVERING = 1.25  # times the lowest of late: on its way up
ROUNDING = 1e-4  # differences below it say nothing
STUCK = 0.01  # of the loss: a run that gained less, since its first steps or of late, learns nothing but a mean

ALIKE = "all features became alike, and the loss stays where guessing a mean leaves it: the learning rate is too high"
ALIKE_TAUGHT = "all features became alike: the learning rate is too high"
BROKEN = "the numbers are no longer finite: the learning rate is too high"
ONE_ANSWER = "every picture gets the same answer: nothing takes away what the teacher’s answers have in common"
SLOW_CENTRE = "every picture gets the same answer: the centre of the teacher’s answers follows them too slowly"
ONE_ANSWER_FAST = "every picture gets the same answer, though answers are centred: the learning rate is too high"
NO_ANSWER = "no picture gets an answer, as the teacher finds all equally likely: its temperature is too high"
NO_ANSWER_CLOSE = (
    "no picture gets an answer, as the features of all pictures lie too close together for the heads to see"
)
NO_ANSWER_FAST = "no picture gets an answer, as the features lie too close together: the learning rate is too high"


@dataclass(frozen=True)
class Collapse:
    """What happened, what to change (with the option that does it), and at which step it was seen."""

    cause: str
    advice: str
    step: int


def collapse(
    history: Sequence[Record],
    method: str,
    lr: float | None = None,
    objective: Mapping[str, Any] | None = None,
) -> Collapse | None:
    """The alarm after the last of these validations, or None.

    The first record is of before the first step. Each has `step`, `loss`, `spread` and `rank`, and of DINO also
    `teacher_entropy` and `teacher_diversity`; a number that is not finite may be written as text. `lr` and the fields of the
    `objective` make the cause surer and the advice exact: what is set well is not blamed.
    """
    if len(history) < 2:
        return None
    last, seen = history[-1], history[1:]
    if any(not_finite(last.get(key)) for key in SIGNALS):
        return Collapse(BROKEN, slower(lr), int(last["step"]))
    if any(math.isinf(number(history[0], key)) for key in ("spread", "rank")):
        return None  # there is nothing to hold the others against
    told = silent(history[0], seen, objective or {}) if method == "dino" else None
    if told is None and method == "dino" and alike(history[0], seen):
        told = ALIKE_TAUGHT, ""
    if told is None and method != "dino" and lost(history[0], seen):
        told = ALIKE, ""
    return Collapse(told[0], told[1] or slower(lr), int(last["step"])) if told else None


def silent(start: Record, seen: Sequence[Record], objective: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a teacher's answers no longer tell one picture from another, and what to set; an empty advice is the rate's."""
    last, recent = seen[-1], seen[-IN_A_ROW:]
    closer = median(map(rank, recent)) < FEWER_DIRECTIONS * rank(start) or median(
        map(spread, recent)
    ) < LITTLE_SPREAD * spread(start)
    undecided = entropy(start) > 0.99  # before any step: only a temperature does that
    times = IN_A_ROW if undecided or telling(start) >= LITTLE else AT_FIRST
    nothing = low(seen, telling, LITTLE if closer else NOTHING, times)
    if not (nothing or low(seen, diversity, min(SAME, diversity(start)))):
        return None
    if entropy(last) < NO_CHOICE and diversity(last) < diversity(start):
        centre = objective.get("centre", ...)
        if centre is None or centre is ...:
            return ONE_ANSWER, "centre them, --set objective.centre=0.9"
        if centre > 0.95:
            return SLOW_CENTRE, "let it follow faster, --set objective.centre=0.9"
        return ONE_ANSWER_FAST, ""
    temperature = objective.get("teacher_temperature")
    if closer or (temperature is not None and temperature <= COOL):
        if "standardise" in objective and objective["standardise"] is None:
            return NO_ANSWER_CLOSE, "show them what differs, --set objective.standardise=0.9"
        return NO_ANSWER_FAST, ""
    return NO_ANSWER, f"sharpen its answers, --set objective.teacher_temperature={COOL}"


def alike(start: Record, seen: Sequence[Record]) -> bool:
    """Whether the features have lost almost all of their spread, and most of their directions."""
    return fewer(start, seen) and low(seen, spread, LITTLE_SPREAD * spread(start))


def lost(start: Record, seen: Sequence[Record]) -> bool:
    """The same of a run that has no teacher, and whose loss falls no longer: then no spread is on its way up.

    Where the rate is far too high, features are thrown about from step to step: the middle one of a few validations counts.
    """
    recent = seen[-IN_A_ROW:]
    close = len(recent) == IN_A_ROW and median(map(spread, recent)) < LITTLE_SPREAD * spread(start)
    return close and fewer(start, seen) and stuck(seen)


def fewer(start: Record, seen: Sequence[Record]) -> bool:
    """Whether most directions are gone."""
    return all(rank(row) < FEW_DIRECTIONS * rank(start) for row in seen[-IN_A_ROW:])


def low(seen: Sequence[Record], value: Callable[[Record], float], below: float, times: int = IN_A_ROW) -> bool:
    """Whether a number was this low in so many validations, up to the last, and is not on its way up."""
    values = [value(row) for row in seen[-2 * times :]]
    recent = values[-times:]
    return len(recent) == times and max(recent) < below and recent[-1] <= RECOVERING * min(values) + ROUNDING


def stuck(seen: Sequence[Record]) -> bool:
    """Whether the loss is no better than after the first steps, in which a mean is learnt, or falls no longer."""
    # Where the rate is so high that even a mean takes long to learn, the first steps leave more than a mean's loss.
    before = min(number(seen[0], "loss"), number(seen[-IN_A_ROW:][0], "loss"))
    return number(seen[-1], "loss") > (1 - STUCK) * before


def entropy(row: Record) -> float:
    return number(row, "teacher_entropy")


def diversity(row: Record) -> float:
    return number(row, "teacher_diversity")


def telling(row: Record) -> float:
    """What an answer tells of its picture: their mutual information, as a share of log K."""
    return diversity(row) - entropy(row)


def spread(row: Record) -> float:
    return number(row, "spread")


def rank(row: Record) -> float:
    return number(row, "rank")


def number(row: Record, key: str) -> float:
    """A value as a number; what is not finite, or was not measured, counts as high."""
    value = row.get(key)
    return math.inf if value is None or not_finite(value) else float(value)


def not_finite(value: Any) -> bool:
    """Whether it is a number that is none, also one that a journal wrote as text; what was not measured is not."""
    return value is not None and not math.isfinite(float(value))


def slower(lr: float | None) -> str:
    """A third of the learning rate."""
    return f"use a third of it, --lr {lr / 3:.2g}" if lr else "use a third of it, --lr LR"
