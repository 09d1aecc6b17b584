"""Training alarm of self-supervised runs: four named conditions, each a pure function of the validations.

- Divergence: the validation loss is not finite, or it is clearly above its start and does not fall.
- Output collapse (DINO): the teacher's outputs hold no information about the image.
- Feature collapse: rank or spread of the features is a small fraction of the untrained model's.
- Worse than untrained: the k-NN accuracy is below the untrained model's, beyond the confidence intervals of both.

A healthy run may get worse at first. So a condition must hold in AGREEMENT consecutive validations, the last three conditions
skip the first WARM_UP validations, and a signal that recovers raises no alarm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.metrics.intervals import wilson_interval

Record = Mapping[str, Any]
Settings = Mapping[str, Any]
History = Sequence[Record]
Finding = tuple[str, str] | None  # cause and advice; None if a condition does not hold
SIGNALS = ("loss", "spread", "rank", "teacher_entropy", "teacher_diversity")

DIVERGENCE = "divergence"
OUTPUT_COLLAPSE = "output collapse"
FEATURE_COLLAPSE = "feature collapse"
WORSE_THAN_UNTRAINED = "worse than untrained"

AGREEMENT = 3  # consecutive validations in which a condition must hold
WARM_UP = 3  # validations after the start in which only divergence is checked
RECOVERY = 0.25  # of a threshold: a signal that rose by this much within 2 * AGREEMENT validations recovers

# Fractions of the untrained model's value, or of log K. Recorded runs are in tests/metrics/histories.py: beside each number
# are the worst value of a healthy run and the value at which a collapsed one has to be found.
DIVERGED = 1.5  # times the larger of the first loss and log K: 1.0 (1.3 of the first loss), 2.0
LOW_RANK = 0.25  # with a spread that fell too: 0.33, 0.24
LOW_SPREAD = 0.05  # 0.12, 0.04
NO_INFORMATION = 0.001  # mutual information of output and image, over log K: 0.0023, 0.0005
FEW_OUTPUTS = 0.2  # entropy of the mean output, over log K: 0.59, 0.15
LOSS_FALLS = 0.01  # of the loss within AGREEMENT validations: a model with a fixed target is still training

# Which cause of an output collapse is named, not whether there is one.
UNIFORM = 0.95  # entropy of an output, over log K, from which on it is uniform: 0.9996, against 0.52
CLOSE = 0.1  # of the untrained model's spread, below which the learning rate is to blame: 0.07, against 0.16
SLOW = 0.95  # momentum of DINO's centre above which it follows too slowly
SHARP = 0.04  # teacher temperature up to which it is not to blame

LEARNING_RATE = "the learning rate is too high"
NOT_FINITE = f"the validation signals are not finite: {LEARNING_RATE}"
DIVERGED_LOSS = f"the validation loss diverged: {LEARNING_RATE}"
COLLAPSED_FEATURES = f"the features of all images became alike: {LEARNING_RATE}"
BELOW_UNTRAINED = "the k-NN accuracy is below the untrained model's: the learning rate is likely too high"
NO_CENTRE = "every image gets the same output: the teacher's outputs are not centred"
SLOW_CENTRE = "every image gets the same output: the centre of the teacher's outputs follows them too slowly"
SAME_OUTPUT = f"every image gets the same output though outputs are centred: {LEARNING_RATE}"
HIGH_TEMPERATURE = "every image gets a uniform output: the teacher's temperature is too high"
CLOSE_FEATURES = "every image gets a uniform output: the features are too close together for the heads"
UNIFORM_OUTPUT = f"every image gets a uniform output: {LEARNING_RATE}"


@dataclass(frozen=True)
class Collapse:
    """The condition that holds, its likely cause, what to change (with the option that does it), and the step."""

    condition: str
    cause: str
    advice: str
    step: int


def detect_collapse(
    history: History,
    method: str,
    *,
    lr: float | None = None,
    objective: Settings | None = None,
    images: int | None = None,
    untrained: bool = True,
) -> Collapse | None:
    """Return the first condition that holds after the last of these validations, or None.

    The first record is of before the first step. Each has `step`, `loss`, `spread` and `rank`, with labels `knn`, and of DINO
    `teacher_entropy` and `teacher_diversity`; a number that is not finite may be written as text. `lr` and the fields of the
    `objective` make cause and advice exact: a setting that is fine is not blamed. `images` is the number of validation images
    that `knn` was measured on; without it `knn` has no interval and is not used. A run that starts from trained weights is
    not `untrained`: its features may rightly get worse for k-NN.
    """
    if len(history) < 2:
        return None
    start, later = history[0], history[1:]
    settings = objective or {}
    condition, found = DIVERGENCE, detect_divergence(start, later, method, settings, lr)
    if found is None and len(later) >= WARM_UP + AGREEMENT:
        if method == "dino":
            condition, found = OUTPUT_COLLAPSE, detect_output_collapse(start, later, settings, lr)
        if found is None:
            condition, found = FEATURE_COLLAPSE, detect_feature_collapse(start, later, method == "dino", lr, images)
        if found is None and untrained:
            condition, found = WORSE_THAN_UNTRAINED, detect_worse_than_untrained(start, later, lr, images)
    return Collapse(condition, *found, int(later[-1]["step"])) if found else None


def detect_divergence(start: Record, later: History, method: str, settings: Settings, lr: float | None) -> Finding:
    """Detect signals that are not finite, at once, or a loss above DIVERGED times its start that does not fall.

    DINO's loss is a cross-entropy that a healthy run may move up to log K, the loss of a uniform output: where that is
    larger than the first loss, it is the reference. Without K, the objective's `out`, there is none.
    """
    if any(is_not_finite(later[-1].get(key)) for key in SIGNALS):
        return NOT_FINITE, advise_lower_lr(lr)
    reference = read_number(start, "loss")
    if method == "dino":
        reference = max(reference, math.log(settings["out"]) if "out" in settings else math.inf)
    above = [-read_number(record, "loss") for record in later]
    # A loss may be negative or 0 for an objective of one's own: then there is no such thing as 1.5 times of it.
    if 0 < reference < math.inf and stays_below(above, -DIVERGED * reference):
        return DIVERGED_LOSS, advise_lower_lr(lr)
    return None


def detect_output_collapse(start: Record, later: History, settings: Settings, lr: float | None) -> Finding:
    """Detect outputs of DINO's teacher that hold no information about the image, and name the setting to change.

    `teacher_entropy` is the mean entropy of an output and `teacher_diversity` the entropy of the mean output, both over log K.
    Their difference is the mutual information of output and image.
    """
    diversity = [read_number(record, "teacher_diversity") for record in later]
    entropy = [read_number(record, "teacher_entropy", -math.inf) for record in later]
    information = [whole - part for whole, part in zip(diversity, entropy, strict=True)]
    if not (stays_below(information, NO_INFORMATION) or stays_below(diversity, FEW_OUTPUTS)):
        return None
    if entropy[-1] < UNIFORM:
        centre = settings.get("centre")
        if centre is None:
            return NO_CENTRE, "centre them, --set objective.centre=0.9"
        if centre > SLOW:
            return SLOW_CENTRE, "lower its momentum, --set objective.centre=0.9"
        return SAME_OUTPUT, advise_lower_lr(lr)
    close = read_number(later[-1], "spread") < CLOSE * read_number(start, "spread", math.nan)
    temperature = settings.get("teacher_temperature")
    if close or (temperature is not None and temperature <= SHARP):
        if "standardise" in settings and settings["standardise"] is None:
            return CLOSE_FEATURES, "standardise them, --set objective.standardise=0.9"
        return UNIFORM_OUTPUT, advise_lower_lr(lr)
    return HIGH_TEMPERATURE, f"lower it, --set objective.teacher_temperature={SHARP}"


def detect_feature_collapse(start: Record, later: History, dino: bool, lr: float | None, images: int | None) -> Finding:
    """Detect features whose spread is below LOW_SPREAD, or whose rank is below LOW_RANK, of the untrained model's.

    Fewer directions alone are no collapse where features spread further in them, as DINO's do. A model with a fixed target
    whose loss still falls is training, and features with a better k-NN accuracy than the untrained model's are not collapsed.
    """
    first_spread, first_rank = (read_number(start, key, math.nan) for key in ("spread", "rank"))
    spread, rank = ([read_number(record, key) for record in later] for key in ("spread", "rank"))
    closer = all(value <= first_spread for value in spread[-AGREEMENT:])
    if not (stays_below(spread, LOW_SPREAD * first_spread) or (closer and stays_below(rank, LOW_RANK * first_rank))):
        return None
    loss = [read_number(record, "loss") for record in later[-AGREEMENT:]]
    if not dino and loss[-1] < (1 - LOSS_FALLS) * loss[0]:
        return None
    ours, theirs = read_interval(later[-1], images), read_interval(start, images)
    if ours and theirs and ours[0] > theirs[1]:
        return None
    return COLLAPSED_FEATURES, advise_lower_lr(lr)


def detect_worse_than_untrained(start: Record, later: History, lr: float | None, images: int | None) -> Finding:
    """Detect a k-NN accuracy whose 95 % interval lies below that of the untrained model, and that does not rise again."""
    untrained = read_interval(start, images)
    recent = [read_interval(record, images) for record in later[-2 * AGREEMENT :]]
    if untrained is None or any(interval is None for interval in recent):
        return None
    highs = [high for _, high in filter(None, recent)]
    rises = read_number(later[-1], "knn") > min(highs)  # beyond the interval of the lowest
    if rises or max(highs[-AGREEMENT:]) >= untrained[0]:
        return None
    return BELOW_UNTRAINED, advise_lower_lr(lr)


def stays_below(values: Sequence[float], threshold: float) -> bool:
    """Return whether the last AGREEMENT values are all below the threshold and the last one does not recover.

    It recovers where it is RECOVERY of the threshold above the lowest of the last 2 * AGREEMENT values.
    """
    recent = values[-AGREEMENT:]
    if len(recent) < AGREEMENT or not max(recent) < threshold:
        return False
    return recent[-1] - min(values[-2 * AGREEMENT :]) <= RECOVERY * abs(threshold)


def read_number(record: Record, key: str, missing: float = math.inf) -> float:
    """Return a signal as a number; `missing` where it is not finite or was not measured."""
    value = record.get(key)
    return missing if value is None or is_not_finite(value) else float(value)


def read_interval(record: Record, images: int | None) -> tuple[float, float] | None:
    """Return the 95 % interval of the k-NN accuracy, or None where there is none."""
    accuracy = read_number(record, "knn")
    return wilson_interval(accuracy * images, images) if images and math.isfinite(accuracy) else None


def is_not_finite(value: Any) -> bool:
    """Return whether a value is NaN or infinite, also where a journal wrote it as text; a missing value is neither."""
    return value is not None and not math.isfinite(float(value))


def advise_lower_lr(lr: float | None) -> str:
    """Return the advice to use a third of the learning rate."""
    return f"lower it to a third, --lr {lr / 3:.2g}" if lr else "lower it to a third, --lr LR"
