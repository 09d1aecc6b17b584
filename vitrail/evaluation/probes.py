"""Probe the features of a frozen model on a dataset: k-NN, linear and few-shot classifiers."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.metrics import compute_metrics, score_name
from vitrail.metrics.knn import NEIGHBOURS, TEMPERATURE, predict_knn
from vitrail.metrics.linear import DRAWS, SHOTS, LinearProbe, evaluate_few_shot, fit_linear_probe
from vitrail.models.sizes import closest
from vitrail.training.distributed import pick_device
from vitrail.training.features import Features, extract_features, hash_model
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import Prepared, audit_and_split, load_data
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class ProbeSettings:
    """Options of the probes."""

    neighbours: int = NEIGHBOURS
    temperature: float = TEMPERATURE
    shots: tuple[int, ...] = SHOTS
    draws: int = DRAWS
    seed: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """Result of one probe."""

    key: tuple[str, ...]  # name of the probe, and of its row if it has several
    description: str  # of its settings
    score: float  # top-1; mAP for multi-label data
    interval: tuple[float, float] | None
    seconds: float  # without the computation of features
    parameters: int  # fitted
    details: dict[str, Any] = field(default_factory=dict)
    spread: str = ""  # origin of the interval, or the reason why there is none
    notes: tuple[str, ...] = ()
    fitted: LinearProbe | None = None  # of a linear probe

    @property
    def probe(self) -> str:
        return self.key[0]


def probe_knn(train: Features, test: Features, classes: int, settings: ProbeSettings) -> Iterator[ProbeResult]:
    """Yield the result of a k-NN classifier."""
    start = time.monotonic()
    k = min(settings.neighbours, len(train.values))
    logits = predict_knn(train.values, train.targets, test.values, classes, k, settings.temperature)
    small = 1e-12  # keeps the logarithm finite
    negative = np.log1p(small - logits.clip(max=1.0)) if train.targets.ndim == 2 else 0.0
    logits += small
    np.log(logits, out=logits)  # in place, to save memory
    logits -= negative
    score, interval, details = score_logits(logits, test.targets)
    details |= {"neighbours": k, "temperature": settings.temperature}
    yield ProbeResult(("knn",), f"k {k}", score, interval, time.monotonic() - start, 0, details)


def probe_linear(train: Features, test: Features, classes: int, settings: ProbeSettings) -> Iterator[ProbeResult]:
    """Yield the result of a linear classifier."""
    start = time.monotonic()
    fitted = fit_linear_probe(train.values, train.targets, test.values, classes, seed=settings.seed)
    score, interval, details = score_logits(fitted.logits, test.targets)
    details |= {"c": fitted.c, "tried": {f"{c:g}": value for c, value in fitted.score_by_c.items()}}
    key, about, seconds = ("linear",), f"C {fitted.c:g}", time.monotonic() - start
    yield ProbeResult(
        key, about, score, interval, seconds, fitted.parameters, details, notes=fitted.notes, fitted=fitted
    )


def probe_few_shot(train: Features, test: Features, classes: int, settings: ProbeSettings) -> Iterator[ProbeResult]:
    """Yield the result of a linear classifier for each number of shots."""
    draws, seed = settings.draws, settings.seed
    for shots in settings.shots:
        start = time.monotonic()
        result = evaluate_few_shot(train.values, train.targets, test.values, test.targets, classes, shots, draws, seed)
        scarce = f", all samples of {len(result.scarce_classes)} smaller classes" if result.scarce_classes else ""
        details = {"shots": shots, "draws": len(result.accuracies), "accuracies": list(result.accuracies)}
        details |= {"pictures": result.images, "scarce_classes": len(result.scarce_classes)}
        spread = "one draw" if result.interval is None else f"over {len(result.accuracies)} draws"
        spread = "none: every sample is drawn" if result.images == len(train.values) else spread
        key, about, seconds = ("few-shot", str(shots)), f"{shots} per class{scarce}", time.monotonic() - start
        parameters = classes * (train.values.shape[1] + 1)
        yield ProbeResult(key, about, result.mean, result.interval, seconds, parameters, details, spread)


PROBES = {"knn": probe_knn, "linear": probe_linear, "few-shot": probe_few_shot}
SINGLE_LABEL_PROBES = ("few-shot",)


def score_logits(logits: np.ndarray, targets: np.ndarray) -> tuple[float, tuple[float, float], dict[str, Any]]:
    """Return score, interval and further metrics of logits."""
    metrics = compute_metrics(logits, targets)
    score = metrics[score_name(targets.ndim == 2)]
    low, high = metrics["interval"]
    return score, (low, high), {name: metrics[name] for name in ("top5", "balanced_accuracy") if name in metrics}


@dataclass(frozen=True)
class ProbeReport:
    """Results of the probes, with the model and the data."""

    model: str
    data: str
    split: str
    measure: str  # "top1" or "map"
    classes: int
    train: int
    images: int
    width: int  # of the features
    seconds: float  # for the features
    n_computed: int  # images whose features were not in the cache
    results: tuple[ProbeResult, ...]
    unreadable: dict[str, str]  # name and reason
    notes: tuple[str, ...] = ()
    media: str = "image"  # what the samples are

    @property
    def cached(self) -> bool:
        return not self.n_computed

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, with each row under its key; a single row also at the top level."""
        probes: dict[str, Any] = {}
        for row in self.results:
            probe, *rest = row.key
            values = self.result_as_dict(row)
            probes[probe] = probes.get(probe, {}) | {rest[0]: values} if rest else values
        return {
            **{name: getattr(self, name) for name in ("model", "data", "split", "classes", "train")},
            "n": self.images,
            **(self.result_as_dict(self.results[0]) if len(self.results) == 1 else {}),
            "features": {"width": self.width, "seconds": round(self.seconds, 3), "cached": self.cached},
            "probes": probes,
            "unreadable": self.unreadable,
            "notes": list(self.notes),
        }

    def result_as_dict(self, result: ProbeResult) -> dict[str, Any]:
        """Return one row for JSON."""
        return {
            self.measure: result.score,
            "interval": result.interval and list(result.interval),
            "n": self.images,
            "seconds": round(result.seconds, 3),
            "parameters": result.parameters,
            **result.details,
            **({"notes": list(result.notes)} if result.notes else {}),
        }


def probe(
    model: str,
    data: Data,
    probes: Sequence[str] = tuple(PROBES),
    settings: ProbeSettings = ProbeSettings(),  # noqa: B008
    *,
    device: str = "auto",
    workers: int | None = None,
    cache: bool = True,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    size: tuple[int, int] | None = None,
    prepared: Prepared | None = None,
    progress: ProgressCallback | None = None,
) -> ProbeReport:
    """Compute the features of a model without its head, and fit and evaluate the probes.

    Probes are fitted on the training split and evaluated on the test split, or on validation if there is no test split.
    """
    check_probe_names(probes)
    prepared = prepared or prepare_for_probes(data, progress)
    prepared.require_classes("a probe")
    multilabel, classes = prepared.train.is_multi_label, len(prepared.labels)
    if multilabel and (unsupported := [name for name in probes if name in SINGLE_LABEL_PROBES]):
        others = " or ".join(name for name in PROBES if name not in SINGLE_LABEL_PROBES)
        raise ValueError(f"{unsupported[0]} does not support multi-label data: use {others}")
    opened = open_checkpoint(model, output_kind="features", size=size, assume=assume, take=take)
    network, preprocessing = opened.model, opened.contract.preprocessing
    assert network is not None
    split = "test" if "test" in prepared.splits else "validation"
    identity = hash_model(network, preprocessing) if cache else None
    extract = partial(extract_features, network, preprocessing, identity=identity, device=pick_device(device))
    splits = (prepared.splits[name] for name in ("train", split))
    train, test = (extract(images, workers=workers, cache=cache, progress=progress) for images in splits)
    rows = [row for name in probes for row in PROBES[name](train, test, classes, settings)]
    skipped = dict(prepared.skipped) | train.unreadable | test.unreadable
    return ProbeReport(
        model=model,
        data=data.where,
        split=split,
        measure=score_name(multilabel),
        classes=classes,
        train=len(train.values),
        images=len(test.values),
        width=train.values.shape[1],
        seconds=train.seconds + test.seconds,
        n_computed=train.n_computed + test.n_computed,
        results=tuple(rows),
        unreadable=skipped,
        notes=(*prepared.dataset.notes, *prepared.warnings, *train.notes, *test.notes),
        media=prepared.train.media,
    )


def prepare_for_probes(data: Data, progress: ProgressCallback | None = None) -> Prepared:
    """Prepare data with a test or validation split; training data is split only if there is neither."""
    dataset = load_data(data, data.fractions or TRAIN_ONLY_FRACTIONS, progress)
    if data.fractions is None and not {"test", "validation"} & set(dataset.splits):
        dataset = load_data(data, None, progress)
    prepared = audit_and_split(data, dataset, progress)
    if not {"test", "validation"} & set(prepared.splits):
        raise ValueError(f"{data.where} has no test {prepared.train.media}s: add a test folder, or more per class")
    return prepared


def check_probe_names(probes: Sequence[str]) -> None:
    """Raise ValueError for unknown probes."""
    for name in probes:
        if name not in PROBES:
            raise ValueError(f"unknown probe {name!r}: {closest(name, list(PROBES))}")
    if not probes:
        raise ValueError(f"no probe given: use {', '.join(PROBES)}")
