"""How much a frozen model's features know of a dataset: the features of both splits are computed once, and probed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.data.sources.parts import UNDIVIDED
from vitrail.engine.distributed import pick_device
from vitrail.evaluate import score_name
from vitrail.evaluation.opening import open_model
from vitrail.evaluation.probes import KINDS, Row, Settings
from vitrail.models.sizes import closest
from vitrail.recipe import Data
from vitrail.run.features import Progress, content_of_model, features
from vitrail.run.prepare import Prepared, audited, found


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
        """For machines: each row under its key; a single one also at the top."""
        probes: dict[str, Any] = {}
        for row in self.rows:
            *outer, last = row.key
            place = probes
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = self.told(row)
        return {
            "model": self.model,
            "data": self.data,
            "split": self.split,
            "classes": self.classes,
            "train": self.train,
            "n": self.images,
            **(self.told(self.rows[0]) if len(self.rows) == 1 else {}),
            "features": {"width": self.width, "seconds": round(self.seconds, 3), "cached": self.cached},
            "probes": probes,
            "unreadable": self.unreadable,
            "notes": list(self.notes),
        }

    def told(self, row: Row) -> dict[str, Any]:
        """A row for machines."""
        return {
            self.measure: row.score,
            "interval": row.interval and list(row.interval),
            "n": self.images,
            "seconds": round(row.seconds, 3),
            "parameters": row.parameters,
            **row.details,
            **({"notes": list(row.notes)} if row.notes else {}),
        }


def probe(
    model: str,
    data: Data,
    probes: Sequence[str] = tuple(KINDS),
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
    check_known(probes)
    prepared = prepared or to_probe(data, progress)
    several, classes = prepared.train.several, len(prepared.labels)
    if several:
        check_several(probes)
    opened = open_model(model, size=size, assume=assume, take=take, classes=None)
    split = "test" if "test" in prepared.splits else "validation"
    identity = content_of_model(opened.model, opened.preprocessing) if cache else None
    place = pick_device(device)
    train, judged = (
        features(
            opened.model,
            opened.preprocessing,
            prepared.splits[name],
            identity=identity,
            device=place,
            workers=workers,
            cache=cache,
            progress=progress,
        )
        for name in ("train", split)
    )
    rows = [row for name in probes for row in KINDS[name].rows(train, judged, classes, settings)]
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


def to_probe(data: Data, progress: Progress | None = None) -> Prepared:
    """Data with a split to judge on; only where it has none, it is divided: a probe fits all training pictures there are."""
    dataset = found(data, data.fractions or UNDIVIDED, progress)
    if data.fractions is None and not {"test", "validation"} & set(dataset.splits):
        dataset = found(data, None, progress)
    prepared = audited(data, dataset, progress)
    if not {"test", "validation"} & set(prepared.splits):
        raise ValueError(
            f"{data.where} has no picture to judge on: add a test folder, or more than one picture for each class"
        )
    return prepared


def check_known(probes: Sequence[str]) -> None:
    """Refuses what is no probe."""
    for name in probes:
        if name not in KINDS:
            raise ValueError(f"unknown probe {name!r}: {closest(name, list(KINDS))}")
    if not probes:
        raise ValueError(f"no probe: use {', '.join(KINDS)}")


def check_several(probes: Sequence[str]) -> None:
    """Refuses probes that cannot judge several labels."""
    for name in probes:
        if not KINDS[name].several:
            able = " or ".join(other for other, kind in KINDS.items() if kind.several)
            raise ValueError(f"{name} is for pictures with one label each: use --probe {able}")
