"""How much a frozen model's features know of a dataset: nearest neighbours, a linear classifier, a few pictures of each class."""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.checkpoints.loading import load
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.distributed import pick_device
from vitrail.evaluate import measures, score_name
from vitrail.evaluate.few_shot import DRAWS, SHOTS, few_shot
from vitrail.evaluate.knn import NEIGHBOURS, TEMPERATURE, knn
from vitrail.evaluate.linear_probe import linear_probe
from vitrail.evaluation.features import Features, Progress, checksum, features
from vitrail.evaluation.opening import weights_of
from vitrail.evaluation.probe_table import table
from vitrail.models.sizes import closest
from vitrail.recipe import Data
from vitrail.run.prepare import Prepared, prepare

PROBES = ("knn", "linear", "few-shot")


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

    probe: str  # one of PROBES
    about: str  # what it was told, or chose
    score: float  # top-1; mAP with several labels
    interval: tuple[float, float] | None
    seconds: float  # without those of the features
    parameters: int  # that were fitted
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Probed:
    """What the probes found, and on what."""

    model: str
    data: str
    split: str
    measure: str  # "top1" or "map"
    classes: int
    train: int
    images: int
    width: int  # of the features
    seconds: float  # to compute the features, or to find them again
    cached: bool
    rows: tuple[Row, ...]
    unreadable: dict[str, str]  # name and reason, of what was left out
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For machines: each row under its probe's name, few-shot by its shots; a single one also at the top."""
        rows: dict[str, Any] = {}
        for row in self.rows:
            told = {
                self.measure: row.score,
                "interval": row.interval and list(row.interval),
                "n": self.images,
                "seconds": round(row.seconds, 3),
                "parameters": row.parameters,
                **row.details,
            }
            if row.probe == "few-shot":
                rows.setdefault(row.probe, {})[str(row.details["shots"])] = told
            else:
                rows[row.probe] = told
        only = rows[self.rows[0].probe] if len(self.rows) == 1 and self.rows[0].probe != "few-shot" else {}
        return {
            "model": self.model,
            "data": self.data,
            "split": self.split,
            "classes": self.classes,
            "train": self.train,
            "n": self.images,
            **only,
            "features": {"width": self.width, "seconds": round(self.seconds, 3), "cached": self.cached},
            "probes": rows,
            "unreadable": self.unreadable,
            "notes": list(self.notes),
        }


def probe(
    model: str,
    data: Data,
    probes: Sequence[str] = PROBES,
    settings: Settings = Settings(),  # noqa: B008 (a value)
    *,
    device: str = "auto",
    workers: int | None = None,
    cache: bool = True,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    size: tuple[int, int] | None = None,
    prepared: Prepared | None = None,
    progress: Progress | None = None,
) -> Probed:
    """Loads the model without its head, computes the features of both splits or finds them, and probes them.

    They are fitted to the training split and judged on the test split, or on validation where there is no test split.
    """
    check_probes(probes)
    prepared = prepared or prepare(data, progress)
    if prepared.train.several and "few-shot" in probes:
        raise ValueError("few-shot is for pictures with one label each: use --probe knn or linear")
    body = load(weights_of(model), classes=None, assume=assume, take=take, image_size=size, mapped=False)
    pipeline = body.preprocessing
    if not isinstance(pipeline, Preprocessing):
        pipeline = Preprocessing(body.config.image_size, body.config.image_size).with_channels(body.config.channels)
    if size is not None and pipeline.size != size:
        pipeline = pipeline.at(size)
    split = "test" if "test" in prepared.splits else "validation"
    identity = checksum(body, pipeline) if cache else None
    place = pick_device(device)
    train, judged = (
        features(
            body,
            pipeline,
            prepared.splits[name],
            identity=identity,
            device=place,
            workers=workers,
            cache=cache,
            progress=progress,
        )
        for name in ("train", split)
    )
    several, classes = prepared.train.several, len(prepared.labels)
    rows = [row for name in probes for row in KINDS[name](train, judged, classes, settings)]
    skipped = dict(prepared.skipped) | train.unreadable | judged.unreadable
    return Probed(
        model=model,
        data=data.where,
        split=split,
        measure=score_name(several),
        classes=classes,
        train=len(train.values),
        images=len(judged.values),
        width=train.values.shape[1],
        seconds=train.seconds + judged.seconds,
        cached=train.cached and judged.cached,
        rows=tuple(rows),
        unreadable=skipped,
        notes=(*prepared.dataset.notes, *prepared.warnings, *train.notes, *judged.notes),
    )


def check_probes(probes: Sequence[str]) -> None:
    """Refuses what is no probe."""
    for name in probes:
        if name not in PROBES:
            raise ValueError(f"unknown probe {name!r}: {closest(name, list(PROBES))}")
    if not probes:
        raise ValueError(f"no probe: use {', '.join(PROBES)}")


def by_neighbours(train: Features, judged: Features, classes: int, settings: Settings) -> list[Row]:
    began = time.monotonic()
    k = min(settings.neighbours, len(train.values))
    votes = knn(train.values, train.targets, judged.values, classes, k, settings.temperature)
    several = train.targets.ndim == 2
    small = 1e-12  # no class is out of the question
    logits = np.log(votes + small) - (np.log1p(small - votes.clip(max=1.0)) if several else 0.0)
    score, interval, details = found(logits, judged.targets)
    details |= {"neighbours": k, "temperature": settings.temperature}
    return [Row("knn", f"k {k}", score, interval, time.monotonic() - began, 0, details)]


def by_line(train: Features, judged: Features, classes: int, settings: Settings) -> list[Row]:
    began = time.monotonic()
    fitted = linear_probe(train.values, train.targets, judged.values, classes, seed=settings.seed)
    score, interval, details = found(fitted.logits, judged.targets)
    details |= {"c": fitted.c, "tried": {f"{c:g}": value for c, value in fitted.tried.items()}}
    details |= {"notes": list(fitted.notes)} if fitted.notes else {}
    parameters = classes * (train.values.shape[1] + 1)
    return [Row("linear", f"C {fitted.c:g}", score, interval, time.monotonic() - began, parameters, details)]


def by_few(train: Features, judged: Features, classes: int, settings: Settings) -> list[Row]:
    rows = []
    for shots in settings.shots:
        began = time.monotonic()
        [one] = few_shot(
            train.values,
            train.targets,
            judged.values,
            judged.targets,
            classes,
            [shots],
            settings.draws,
            settings.seed,
        )
        scarce = f", all of the {len(one.scarce)} classes that have fewer" if one.scarce else ""
        about = f"{shots} of each class{scarce}"
        details = {
            "shots": shots,
            "draws": settings.draws,
            "accuracies": list(one.accuracies),
            "pictures": one.pictures,
            "scarce_classes": len(one.scarce),
        }
        parameters = classes * (train.values.shape[1] + 1)
        rows.append(Row("few-shot", about, one.mean, one.interval, time.monotonic() - began, parameters, details))
    return rows


KINDS: dict[str, Callable[[Features, Features, int, Settings], list[Row]]] = {
    "knn": by_neighbours,
    "linear": by_line,
    "few-shot": by_few,
}


def found(logits: np.ndarray, targets: np.ndarray) -> tuple[float, tuple[float, float], dict[str, Any]]:
    """Score, interval and what else is worth telling."""
    told = measures(logits, targets)
    score = told[score_name(targets.ndim == 2)]
    low, high = told["interval"]
    return score, (low, high), {name: told[name] for name in ("top5", "balanced_accuracy") if name in told}


def run_probe(
    options: argparse.Namespace, progress: Progress | None = None, assume: Mapping[str, Any] | None = None
) -> int:
    """`vitrail evaluate MODEL DATA --probe …`: probes, and prints the table or, with --json, everything."""
    told = {name: getattr(options, name) for name in ("neighbours", "temperature", "shots", "draws", "seed")}
    settings = Settings(**{name: value for name, value in told.items() if value is not None})
    probed = probe(
        options.model,
        Data(options.data, task=options.task, quarantine=options.quarantine),
        options.probe,
        settings,
        device=options.device,
        workers=options.workers,
        cache=not options.no_cache,
        assume=assume,
        take=options.take,
        size=options.size,
        progress=progress,
    )
    if options.json:
        print(json.dumps(probed.as_dict(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(table(probed)))
    return 0
