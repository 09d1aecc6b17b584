"""Verdict of a self-supervised run: are its features better than a baseline's, and what to try where they are not.

Both are pure functions: of a paired test on the same held-out images, and of facts about the run. Each suggestion names the
option of `vitrail pretrain` that follows it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.metrics.collapse import advise_lower_lr
from vitrail.metrics.paired import PairedTest

Finding = Literal["better", "no clear difference", "worse"]

FEW_EPOCHS = 20  # below this a run is short, however many images there are: DINO on CIFAR-10 was measured with 24.5
FEW_IMAGES = 2_000  # training images; below this, recipes choose a narrow model and a small batch too
FULL_LENGTH = 0.95  # of the recipe's epochs
FEATURES_FOR_TUNING = ("mae", "mpp")  # methods of images whose features are to be fine-tuned, as published


@dataclass(frozen=True)
class RunFacts:
    """Everything about a run that decides what to try."""

    method: str
    images: int  # training images
    epochs: float  # that were trained
    steps: int | None = None  # that were trained, where the length was given in steps
    recipe_epochs: float | None = None  # of the method's recipe for this data
    falling: bool = False  # whether the loss had not stopped falling
    patience: int | None = None  # of a run that stopped early
    stem: bool = False  # whether images are small, their patches plain, and the method takes a convolutional stem
    initialised: bool = False  # from a checkpoint
    lr: float | None = None
    collapse: tuple[str, str] | None = None  # cause and advice of the alarm
    media: str = "image"


def judge_difference(test: PairedTest) -> Finding:
    """Return what the 95 % interval of a difference shows: the score of the second model minus that of the first."""
    low, high = test.interval
    return "better" if low > 0 else "worse" if high < 0 else "no clear difference"


def describe_difference(test: PairedTest) -> dict[str, Any]:
    """Return a difference with its interval and the finding, for summary.json."""
    return {
        "finding": judge_difference(test),
        "difference": test.difference,
        "interval": list(test.interval),
        "p_value": test.p_value,
    }


def suggest_changes(findings: Collection[Finding], facts: RunFacts) -> list[str]:
    """Return what to try, the most promising first; nothing where the features are better than every baseline.

    After a collapse that is the alarm's advice. Without findings, because k-NN could not be measured, it is only a longer run.
    """
    if facts.collapse is not None:
        return [": ".join(facts.collapse)]
    if findings and set(findings) == {"better"}:
        return []
    longer = suggest_length(facts)
    if not findings:
        return longer
    suggestions = list(longer)
    if facts.stem:
        suggestions.append("use a convolutional stem, as the images are small (--set model.embed=ConvStem)")
    if facts.images < FEW_IMAGES and not facts.initialised:
        few = f"{facts.images:,} training {facts.media}s are few"
        suggestions.append(f"use more {facts.media}s or start from trained weights (--init FILE): {few}")
    if "worse" in findings and not suggestions:
        suggestions.append(f"the learning rate may be too high: {advise_lower_lr(facts.lr)}")
    if not suggestions and facts.method in FEATURES_FOR_TUNING:
        suggestions.append("use --method dino, whose features need no fine-tuning, or fine-tune these features")
    return suggestions


def suggest_length(facts: RunFacts) -> list[str]:
    """Return the suggestion of a longer run, or of more patience, where a fact of the run speaks for it."""
    if facts.patience is not None:
        return [f"stop later (--patience {2 * facts.patience}, now {facts.patience})"] if facts.falling else []
    recipe = facts.recipe_epochs
    if recipe is not None and facts.epochs < FULL_LENGTH * recipe:
        target, reasons = recipe, ["that is the recipe's length for this data"]
    elif facts.falling:
        target, reasons = max(FEW_EPOCHS, 2 * facts.epochs), []
    elif facts.epochs < FEW_EPOCHS:
        target, reasons = FEW_EPOCHS, []
    else:
        return []
    if facts.steps is None:
        length = f"--epochs {target:.4g}, now {facts.epochs:.3g}"
    else:
        steps = round(facts.steps * target / facts.epochs)
        length = f"--steps {steps}, now {facts.steps}"
    reasons += ["the loss was still falling"] if facts.falling else []
    return [f"train longer ({length})" + (f": {' and '.join(reasons)}" if reasons else "")]
