"""The probes of features: each is a function from features to rows, and an entry in KINDS."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.evaluate import measures, score_name
from vitrail.evaluate.few_shot import DRAWS, SHOTS, FewShot, few_shot
from vitrail.evaluate.knn import NEIGHBOURS, TEMPERATURE, knn
from vitrail.evaluate.linear_probe import linear_probe
from vitrail.run.features import Features


@dataclass(frozen=True)
class Settings:
    """What the probes can be told."""

    neighbours: int = NEIGHBOURS
    temperature: float = TEMPERATURE
    shots: tuple[int, ...] = SHOTS
    draws: int = DRAWS
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    key: tuple[str, ...]  # the probe's name, and which of its rows where there are several
    about: str  # what it was told, or chose
    score: float  # top-1; mAP with several labels
    interval: tuple[float, float] | None
    seconds: float  # without those of the features
    parameters: int  # that were fitted
    details: dict[str, Any] = field(default_factory=dict)
    spread: str = ""  # what the interval is over, or why there is none
    notes: tuple[str, ...] = ()

    @property
    def probe(self) -> str:
        return self.key[0]


@dataclass(frozen=True)
class Kind:
    """A probe, and what it is for."""

    rows: Callable[[Features, Features, int, Settings], Iterator[Row]]  # from training features, judged ones and K
    several: bool = True  # whether pictures may have several labels


def by_neighbours(train: Features, judged: Features, classes: int, settings: Settings) -> Iterator[Row]:
    began = time.monotonic()
    k = min(settings.neighbours, len(train.values))
    logits = knn(train.values, train.targets, judged.values, classes, k, settings.temperature)
    small = 1e-12  # no class is out of the question
    against = np.log1p(small - logits.clip(max=1.0)) if train.targets.ndim == 2 else 0.0
    logits += small
    np.log(logits, out=logits)  # in place: of many pictures and classes there is no second array
    logits -= against
    score, interval, details = scored(logits, judged.targets)
    details |= {"neighbours": k, "temperature": settings.temperature}
    yield Row(("knn",), f"k {k}", score, interval, time.monotonic() - began, 0, details)


def by_line(train: Features, judged: Features, classes: int, settings: Settings) -> Iterator[Row]:
    began = time.monotonic()
    fitted = linear_probe(train.values, train.targets, judged.values, classes, seed=settings.seed)
    score, interval, details = scored(fitted.logits, judged.targets)
    details |= {"c": fitted.c, "tried": {f"{c:g}": value for c, value in fitted.tried.items()}}
    seconds = time.monotonic() - began
    yield Row(("linear",), f"C {fitted.c:g}", score, interval, seconds, fitted.parameters, details, notes=fitted.notes)


def by_few(train: Features, judged: Features, classes: int, settings: Settings) -> Iterator[Row]:
    for shots in settings.shots:
        began = time.monotonic()
        one = few_shot(
            train.values,
            train.targets,
            judged.values,
            judged.targets,
            classes,
            shots,
            settings.draws,
            settings.seed,
        )
        scarce = f", all of the {len(one.scarce)} classes that have fewer" if one.scarce else ""
        details = {
            "shots": shots,
            "draws": len(one.accuracies),
            "accuracies": list(one.accuracies),
            "pictures": one.pictures,
            "scarce_classes": len(one.scarce),
        }
        yield Row(
            ("few-shot", str(shots)),
            f"{shots} of each class{scarce}",
            one.mean,
            one.interval,
            time.monotonic() - began,
            classes * (train.values.shape[1] + 1),
            details,
            spread_of(one, len(train.values)),
        )


def spread_of(one: FewShot, pictures: int) -> str:
    """What the interval of few shots is over, or why there is none."""
    if one.pictures == pictures:
        return "none: every picture is drawn"
    return "one draw" if one.interval is None else f"over {len(one.accuracies)} draws"


KINDS = {
    "knn": Kind(by_neighbours),
    "linear": Kind(by_line),
    "few-shot": Kind(by_few, several=False),
}


def scored(logits: np.ndarray, targets: np.ndarray) -> tuple[float, tuple[float, float], dict[str, Any]]:
    """Score, interval and what else is worth telling."""
    told = measures(logits, targets)
    score = told[score_name(targets.ndim == 2)]
    low, high = told["interval"]
    return score, (low, high), {name: told[name] for name in ("top5", "balanced_accuracy") if name in told}
