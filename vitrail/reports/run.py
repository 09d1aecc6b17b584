"""Reader of run directories. Unfinished and interrupted runs are read as far as their files go."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Required, TypedDict

import numpy as np

from vitrail.metrics import compute_metrics, score_name
from vitrail.metrics.accuracy import ClassPredictions, predict_classes
from vitrail.metrics.paired import PairedTest, compare_correct, compare_map
from vitrail.metrics.regression import compare_regression, summarise_regression
from vitrail.metrics.retrieval import list_first, rank_pairs, summarise_retrieval
from vitrail.metrics.segmentation import compare_masks, compute_mask_metrics, sum_pixels
from vitrail.utils.json import Finite, parse_json, remove_invalid
from vitrail.utils.scores import find_score

SPLIT_ORDER = ("test", "validation", "train")
RUN_FILES = ("run.json", "recipe.json", "metrics.jsonl", "summary.json")


Number = float | Literal["nan", "inf", "-inf"]  # JSON has no names for numbers that are not finite


class SplitRecord(TypedDict, total=False):
    """A split of the data in run.json."""

    images: int
    classes: dict[str, int]  # images of each


class DataRecord(TypedDict, total=False):
    """The data in run.json."""

    colours: list[str]  # of the classes of masks
    where: str
    kind: str
    media: str  # image or video; absent in runs of earlier versions
    fingerprint: str | None
    splits: Required[dict[str, SplitRecord]]
    skipped: list[dict[str, str]]
    notes: list[str]
    fingerprints: Required[dict[str, str]]


class ModelRecord(TypedDict, total=False):
    """The model in run.json."""

    name: str
    parameters: int
    trained: int
    init: str | None
    image_size: list[int]


class TeacherRecord(TypedDict, total=False):
    """The teacher in run.json."""

    where: str
    content: str
    parameters: int


class MethodTextRecord(TypedDict, total=False):
    """Fields of `MethodText` in run.json."""

    name: Required[str]
    loss_note: str
    reconstruction_note: str


@dataclass(frozen=True)
class MethodText:
    """Name of a pretraining method, and how to read its loss and its reconstructions. Its objective has it, runs store it."""

    name: str
    loss_note: str = ""
    reconstruction_note: str = ""


class RunRecord(TypedDict, total=False):
    """The values of run.json that are used again."""

    command: list[str]
    started: str
    recipe_name: str
    recipe: dict[str, Any]
    task: str
    method: str
    method_text: MethodTextRecord
    labels: Required[list[str]]
    data: Required[DataRecord]
    model: ModelRecord
    teacher: TeacherRecord
    environment: dict[str, Any]
    machine: Required[dict[str, Any]]
    id: str
    chosen: list[str]


class ScoreRecord(TypedDict, total=False):
    """Metrics of a split in summary.json."""

    images: Required[int]
    top1: float
    miou: float


class CollapseRecord(TypedDict, total=False):
    """The alarm of pretraining in summary.json."""

    cause: str
    advice: str
    step: int


class BaselineRecord(TypedDict, total=False):
    """The comparison of features with a baseline in summary.json."""

    finding: Required[str]
    difference: Required[Finite]
    interval: Required[tuple[float, float]]
    p_value: Finite


class VerdictRecord(TypedDict, total=False):
    """The verdict of pretraining in summary.json."""

    baselines: dict[str, BaselineRecord]
    reason: str
    suggestions: list[str]


class SummaryRecord(TypedDict, total=False):
    """The values of summary.json that are used again."""

    seconds: Required[Finite]
    steps: Required[int]
    images_per_second: Required[Finite]
    media: str
    stopped: Required[str]
    weights: str
    validation_score: str
    last_validation: Number | None
    best_validation: Number | None
    best_step: int
    split: str
    images: int
    top1: float
    map: float
    miou: float
    r2: float | None
    interval: tuple[float, float]
    validation: ScoreRecord
    test: ScoreRecord
    method: str
    loss: Number
    rank: Number
    cosine: Number
    knn: Number
    knn_interval: tuple[float, float]
    knn_pixels: Number
    knn_random: Number
    collapse: CollapseRecord
    verdict: VerdictRecord
    converged: bool
    recipe_steps: int


class LogRecord(TypedDict, total=False):
    """A line of metrics.jsonl or timing.jsonl."""

    kind: str
    step: int
    epoch: Finite


@dataclass(frozen=True)
class EvaluatedSplit:
    """Logits and targets of every image of a split."""

    arrays: ClassVar[tuple[str, ...]] = ("logits", "targets")  # as a run stores them

    split: str
    logits: np.ndarray  # [n, K]
    targets: np.ndarray  # [n], or [n, K] for multi-label data
    names: list[str]  # [n]; empty if they were not stored
    images: Mapping[int, Path | bytes]  # small copies of some images, by index
    media: str = "image"  # what the samples are

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def n_classes(self) -> int:
        return self.logits.shape[1]

    @property
    def is_multilabel(self) -> bool:
        return self.targets.ndim == 2

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return compute_metrics(self.logits, self.targets)

    @cached_property
    def predictions(self) -> ClassPredictions:
        return predict_classes(self.logits, self.targets)

    def image_name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"{self.media} {index}"

    def compare(self, other: "EvaluatedSplit", order: np.ndarray) -> PairedTest | str:
        """Return the paired test with another model, whose images are those at `order`, or the reason why there is none."""
        if not np.array_equal(self.targets, other.targets[order]):
            return "their labels differ"
        if self.is_multilabel:
            return compare_map(self.logits, other.logits[order], self.targets)
        return compare_correct(self.predictions.correct, other.predictions.correct[order])


@dataclass(frozen=True)
class EvaluatedMasks:
    """Counts of the pixels of every image of a split."""

    arrays: ClassVar[tuple[str, ...]] = ("pixels", "boundary", "confusion")

    split: str
    pixels: np.ndarray  # [n, 3, K]: hit, true and predicted
    boundary: np.ndarray | None  # [n, K, 2]
    confusion: np.ndarray  # [K, K], of all images
    names: list[str]  # [n]; empty if they were not stored
    images: Mapping[int, Path | bytes]  # true and predicted masks of some images, by index
    media: str = "image"  # what the samples are

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def n_classes(self) -> int:
        return self.pixels.shape[2]

    @property
    def is_multilabel(self) -> bool:
        return False

    @cached_property
    def metrics(self) -> dict[str, Any]:
        metrics = compute_mask_metrics(self.pixels, boundary=self.boundary)
        return metrics | {"interval": metrics.get("miou_interval")}

    def image_name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"{self.media} {index}"

    def compare(self, other: "EvaluatedMasks", order: np.ndarray) -> PairedTest | str:
        """Return the paired test with another model, whose images are those at `order`, or the reason why there is none."""
        if not np.array_equal(self.pixels[:, 1], other.pixels[order, 1]):
            return "their images have different masks"
        return compare_masks(self.pixels, other.pixels[order])


@dataclass(frozen=True)
class EvaluatedNumbers:
    """Predicted and true numbers of every image of a split."""

    arrays: ClassVar[tuple[str, ...]] = ("predictions", "numbers")

    split: str
    predicted: np.ndarray  # [n, M]
    targets: np.ndarray  # [n, M]
    names: list[str]  # [n]; empty if they were not stored
    images: Mapping[int, Path | bytes]  # small copies of some images, by index
    media: str = "image"  # what the samples are

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def n_classes(self) -> int:
        """Return the number of targets."""
        return self.predicted.shape[1]

    @property
    def is_multilabel(self) -> bool:
        return False

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return summarise_regression(self.predicted, self.targets)

    def image_name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"{self.media} {index}"

    def compare(self, other: "EvaluatedNumbers", order: np.ndarray) -> PairedTest | str:
        """Return the paired test with another model, whose images are those at `order`, or the reason why there is none."""
        if not np.array_equal(self.targets, other.targets[order]):
            return "their numbers differ"
        return compare_regression(self.predicted, other.predicted[order], self.targets)


@dataclass(frozen=True)
class EvaluatedCaptions:
    """Features of every image and its caption of a split, as unit vectors."""

    arrays: ClassVar[tuple[str, ...]] = ("image_features", "text_features", "items", "captions", "texts")

    split: str
    image_features: np.ndarray  # [n, F]
    text_features: np.ndarray  # [n, F]
    items: np.ndarray  # [n]: equal for one image with several captions
    captions: np.ndarray  # [n]: equal for equal captions
    texts: np.ndarray  # [n]: the captions, cut to some length
    names: list[str]  # [n]; empty if they were not stored
    images: Mapping[int, Path | bytes]  # small copies of some images, by index
    media: str = "image"  # what the samples are

    def __len__(self) -> int:
        return len(self.items)

    @property
    def n_classes(self) -> int:
        """Return the number of targets of an image."""
        return 1

    @property
    def is_multilabel(self) -> bool:
        return False

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return summarise_retrieval(self.image_features, self.text_features, self.items, self.captions)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Return the rank of the best caption of each different image, in the order of their first pairs, [I]."""
        return rank_pairs(self.image_features, self.text_features, self.items, self.captions)[0]

    def find_best_text(self, index: int) -> str:
        """Return the caption that is most similar to an image."""
        first, _ = list_first(self.captions)
        return str(self.texts[first[int((self.text_features[first] @ self.image_features[index]).argmax())]])

    def image_name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"image {index}"

    def compare(self, other: "EvaluatedCaptions", order: np.ndarray) -> PairedTest | str:
        """Return the paired test of recall at 1, or the reason why there is none."""
        if not np.array_equal(self.texts, other.texts[order]) or not np.array_equal(order, np.arange(len(order))):
            return "their images have different captions"
        return compare_correct(self.ranks == 0, other.ranks == 0)


Evaluated = EvaluatedSplit | EvaluatedMasks | EvaluatedNumbers | EvaluatedCaptions
EVALUATED: tuple[type[Evaluated], ...] = (EvaluatedSplit, EvaluatedMasks, EvaluatedNumbers, EvaluatedCaptions)
TASK_SCORES = {
    "masks": "miou",
    "numbers": "r2",
    "captions": "image_to_text_1",
}  # of tasks with one score; for others it depends on their metrics


@dataclass(frozen=True)
class RunDirectory:
    """Contents of a run directory."""

    directory: Path
    metadata: dict[str, Any]  # run.json
    recipe: dict[str, Any] | None
    training: list[dict[str, Any]]  # of metrics.jsonl
    validation: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    summary: dict[str, Any] | None
    evaluations: dict[str, Evaluated]
    problems: list[str] = field(default_factory=list)  # files that could not be read

    @property
    def name(self) -> str:
        return self.directory.resolve().name or str(self.directory)

    @property
    def media(self) -> str:
        """Return what the samples are: image or video."""
        return self.get("data", "media") or "image"

    @property
    def is_finished(self) -> bool:
        return self.summary is not None

    @property
    def is_pretraining(self) -> bool:
        """Return whether the run is self-supervised, so that it has signals instead of predictions."""
        return self.metadata.get("task") == "pretraining"

    @property
    def method(self) -> str:
        """Return the self-supervised method: mpp, mae, dino or features."""
        return str(self.metadata.get("method") or (self.summary or {}).get("method") or "")

    @property
    def collapse(self) -> dict[str, Any] | None:
        """Return the detected collapse (cause, advice, step), or None."""
        collapse = (self.summary or {}).get("collapse")
        return collapse if isinstance(collapse, dict) else None

    @property
    def is_multilabel(self) -> bool:
        if self.evaluations:
            return next(iter(self.evaluations.values())).is_multilabel
        return self.metadata.get("task") == "multi" or any("map" in row for row in self.validation)

    @property
    def score_name(self) -> str:
        if (score := TASK_SCORES.get(str(self.metadata.get("task")))) is not None:
            return score
        if self.evaluations:
            return find_score(next(iter(self.evaluations.values())).metrics)
        return score_name(self.is_multilabel)

    @property
    def split(self) -> str | None:
        """Return the split of the run's score."""
        split = (self.summary or {}).get("split")
        if isinstance(split, str):
            return split
        return next((split for split in SPLIT_ORDER if split in self.evaluations), None)

    @property
    def evaluation(self) -> Evaluated | None:
        return self.evaluations.get(self.split or "")

    def split_metrics(self, split: str) -> dict[str, Any]:
        """Return the metrics of a split: from its logits if they were stored, else from summary.json."""
        summary = self.summary or {}
        written = summary.get(split) if isinstance(summary.get(split), dict) else None
        if written is None and split == self.split:
            written = {key: value for key, value in summary.items() if not isinstance(value, dict)}
        if split in self.evaluations:
            return (written or {}) | self.evaluations[split].metrics
        return written or {}

    def class_names(self, classes: int) -> list[str]:
        """Return a name for each class."""
        labels = self.metadata.get("labels")
        names = [str(label) for label in labels] if isinstance(labels, list) else []
        return (names + [f"class {k}" for k in range(len(names), classes)])[:classes]

    def get(self, *path: str) -> Any:
        """Return a value of run.json, or None."""
        value: Any = self.metadata
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        return value


def read_run(directory: str | Path) -> RunDirectory:
    """Read a run directory. Files that cannot be read are named in `problems`; a directory without run files is an error."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}; give a run directory of vitrail train or pretrain")
    if not any((directory / name).is_file() for name in RUN_FILES):
        raise ValueError(f"{directory} is not a run directory: it has none of {', '.join(RUN_FILES)}")
    problems: list[str] = []
    metadata = _read_json(directory / "run.json", problems, RunRecord) or {}
    media = (metadata.get("data") or {}).get("media") or "image"
    metrics = _read_jsonl(directory / "metrics.jsonl", problems)
    return RunDirectory(
        directory,
        metadata,
        _read_json(directory / "recipe.json", problems),
        _sort_by_step(row for row in metrics if row.get("kind") == "train"),
        _sort_by_step(row for row in metrics if row.get("kind") == "validation"),
        _sort_by_step(_read_jsonl(directory / "timing.jsonl", problems)),
        _read_json(directory / "summary.json", problems, SummaryRecord),
        _load_evaluations(directory / "evaluation", problems, media),
        problems,
    )


def _read_json(path: Path, problems: list[str], kind: Any = None) -> dict[str, Any] | None:
    """Return the object in a file, without values of another type than `kind`, a TypedDict, gives them."""
    if not path.is_file():
        return None
    try:
        data = parse_json(path.read_bytes())
        if isinstance(data, dict):
            invalid = remove_invalid(data, kind, path.name) if kind else []
            problems += [f"{problem}: it is not used" for problem in invalid]
            return data
        problems.append(f"{path.name} could not be used: it is not a JSON object")
    except (ValueError, OSError) as error:
        problems.append(f"{path.name} could not be read: {error}")
    return None


def _read_jsonl(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error}")
        return []
    rows = [_parse_row(line) for line in lines if line.strip()]
    valid = [row for row in (*rows, _parse_row(last)) if row is not None]  # an incomplete last line is being written
    if broken := rows.count(None):
        problems.append(f"{path.name}: {broken} of {len(valid) + broken} lines are invalid and are skipped")
    return valid


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and not remove_invalid(row, LogRecord, "") else None


def _sort_by_step(rows: Any) -> list[dict[str, Any]]:
    """Return the rows in order of their steps; the last row of a step wins."""
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def _load_evaluations(directory: Path, problems: list[str], media: str) -> dict[str, Evaluated]:
    evaluations: dict[str, Evaluated] = {}
    for split in SPLIT_ORDER:
        path = directory / f"{split}.npz"
        if not path.is_file():
            continue
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if "confusions" in arrays:  # as written before only the sum of the matrices was stored
                confusions = arrays["confusions"]
                arrays |= {"pixels": sum_pixels(confusions), "confusion": confusions.sum(0)}
            kind: Any = next((kind for kind in EVALUATED if kind.arrays[0] in arrays), EvaluatedSplit)
            stored = [arrays[name] for name in kind.arrays]
            evaluation = kind(split, *stored, *_load_names(directory, split, len(stored[0]), problems), media)
            _ = evaluation.metrics  # raises if shapes do not match or logits are not finite
            evaluations[split] = evaluation
        except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            problems.append(f"evaluation/{path.name} could not be used: {error}")
    return evaluations


def _load_names(directory: Path, split: str, count: int, problems: list[str]) -> tuple[list[str], dict[int, Path]]:
    stored = (_read_json(directory / f"{split}.json", problems) or {}).get("names")
    names = [str(name) for name in stored] if isinstance(stored, list) else []
    if names and len(names) != count:
        problems.append(f"evaluation/{split}.json has {len(names)} names for {count} samples: names are not used")
        names = []
    images = {}
    for path in sorted((directory / "pictures").glob(f"{split}-*")):
        index = path.stem.rpartition("-")[2]
        if index.isdecimal() and int(index) < count:
            images[int(index)] = path
    return names, images


class Absent:
    """Placeholder for a field that a recipe does not have."""

    def __repr__(self) -> str:
        return "–"


ABSENT = Absent()


def find_differences(values: list[Any], path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields that differ by path, `optimizer.lr`, with their values. Objects of different types are not descended."""
    if all(values_equal(value, values[0]) for value in values):
        return
    if all(isinstance(value, dict) for value in values) and len({str(value.get("type")) for value in values}) == 1:
        for key in dict.fromkeys(key for value in values for key in value):
            inner = f"{path}.{key}" if path else str(key)
            yield from find_differences([value.get(key, ABSENT) for value in values], inner)
        return
    equally_long = all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1
    if equally_long and any(isinstance(part, (dict, list)) for value in values for part in value):
        for index, parts in enumerate(zip(*values, strict=True)):
            yield from find_differences(list(parts), f"{path}[{index}]")
    else:
        yield path, values


def values_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; 1 equals 1.0, but not true."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(values_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(values_equal, a, b))
    return isinstance(a, bool) is isinstance(b, bool) and a == b


def format_value(value: Any) -> str:
    """Return a value on one line: AdamW(lr=0.0003, clip=1.0)."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}={format_value(part)}" for key, part in value.items() if key != "type")
        return f"{value.get('type', '')}({inner})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return {None: "none", True: "yes", False: "no"}[value] if isinstance(value, bool | None) else str(value)
