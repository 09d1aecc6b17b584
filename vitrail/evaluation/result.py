"""Results of one model on a dataset, as metrics, JSON, CSV and tables for the terminal.

`ModelEvaluation` is that of classes, and the base of those of other tasks: `evaluate.py` has the table of them.
"""

import csv
import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.checkpoints.load import build_meta_model
from vitrail.data.class_names import find_output_names
from vitrail.data.dataset import Images
from vitrail.data.labels import drop_placeholder_labels
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.precision import current_precision, describe_precision
from vitrail.evaluation.class_mapping import ClassMatching, match_classes, read_class_map
from vitrail.evaluation.loading import ModelOutputs
from vitrail.evaluation.selection import SelectedData
from vitrail.inference import probabilities, rank_classes
from vitrail.metrics import accuracy, find_confident_mistakes, find_worst_label, multilabel
from vitrail.metrics.calibration import compute_reliability
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.paired import PairedTest, compare_correct, compare_map
from vitrail.models.registry import config_from_json
from vitrail.reports.html import clean_text
from vitrail.reports.masks import Colour
from vitrail.reports.run import EvaluatedSplit
from vitrail.tasks.base import encode_jpeg, open_thumbnail
from vitrail.tasks.classes import summarise_logits
from vitrail.training.runs.record import fingerprint_split
from vitrail.training.runs.supervised import MAX_EXAMPLES
from vitrail.utils import text
from vitrail.utils.files import atomic_write

MAX_CONFUSION_CLASSES = 100  # with more classes, only the most confused pairs are written
MAX_CONFUSED_PAIRS = 20
TOP_K = 5
ROWS_PER_BLOCK = 1024
MAX_NAME_WIDTH = 36  # of a class name in the terminal


@dataclass(frozen=True)
class TextTable:
    """A table for the terminal."""

    rows: list[list[str]]  # the first is the heading
    right: tuple[int, ...] = ()  # columns that are aligned to the right


@dataclass(frozen=True)
class ModelEvaluation:
    """A model, the images, and its outputs for them."""

    deployed: DeployedModel
    selection: SelectedData
    matching: ClassMatching
    outputs: ModelOutputs
    only_present: bool = False
    environment: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def refuse_class_map(cls, deployed: DeployedModel, class_map: Any) -> None:
        """Raise ValueError for a mapping of classes, which only classes of images have."""
        if class_map is not None:
            predicts = deployed.contract.task.outputs
            raise ValueError(f"class_map= is for classes, and {deployed.name} predicts {predicts}: leave it out")

    @classmethod
    def match(
        cls,
        deployed: DeployedModel,
        images: Images,
        class_map: str | os.PathLike[str] | None,
        names: str | None,
    ) -> ClassMatching:
        """Match the data's classes to the model's outputs; errors name the model.

        A model without class names gets those of the file `names`, if it lists them all.
        """
        assert deployed.contract.labels is not None
        outputs, labels = len(deployed.contract.labels), deployed.class_names
        if names is not None and drop_placeholder_labels(labels) is None:
            labels = find_output_names(names, outputs) or labels
        try:
            if class_map is None or str(class_map) == "index":
                return match_classes(images, labels, outputs, None if class_map is None else "index")
            mapped = read_class_map(os.fspath(class_map), drop_placeholder_labels(labels), outputs)
            return match_classes(images, labels, outputs, mapped)
        except ValueError as error:
            raise ValueError(f"{deployed.name}: {error}") from None

    @classmethod
    def map_images(cls, deployed: DeployedModel, images: Images) -> Images:
        """Return the images with targets as the task compares them with the model's outputs."""
        return images

    @classmethod
    def verification_targets(cls, deployed: DeployedModel, images: Images, class_map: Any) -> np.ndarray | None:
        """Return the targets of images on which an export is verified; None for a model without classes."""
        assert deployed.model is not None
        outputs, labels = deployed.model.config.classes, deployed.model.labels
        if outputs is None:
            return None
        if class_map is not None and class_map != "index":
            class_map = read_class_map(class_map, labels, outputs)
        return match_classes(images, labels, outputs, class_map).map_targets(images)

    @cached_property
    def columns(self) -> np.ndarray:
        """Return the evaluated outputs: all, or the classes present in the data."""
        return self.matching.present if self.only_present else np.arange(self.outputs.logits.shape[1])

    @property
    def labels(self) -> list[str]:
        return [self.matching.labels[column] for column in self.columns]

    @property
    def palette(self) -> tuple[Colour, ...] | None:
        """Return the colours of the labels, if outputs are drawn in colours."""
        return None

    @cached_property
    def evaluation(self) -> EvaluatedSplit:
        """Return logits and targets of the readable images, over the evaluated outputs."""
        is_read, columns = self.outputs.is_read, self.columns
        images = self.selection.images.select(is_read)
        targets = self.matching.map_targets(images)
        targets = targets[:, columns] if targets.ndim == 2 else np.searchsorted(columns, targets)
        names = [images.name(index) for index in range(len(images))]
        logits = self.outputs.logits if is_read.all() else self.outputs.logits[is_read]  # avoids a copy of all
        logits = logits[:, columns] if self.only_present else logits
        return EvaluatedSplit(self.selection.split_label, logits, targets, names, {}, self.selection.images.media)

    @cached_property
    def measures(self) -> dict[str, Any]:
        """Return all metrics, as training writes them."""
        return summarise_logits(self.evaluation.logits, self.evaluation.targets)

    @property
    def unreadable(self) -> dict[str, str]:
        """Return skipped and unreadable images with their reasons."""
        return self.selection.skipped | self.outputs.unreadable

    @cached_property
    def mistakes(self) -> np.ndarray:
        """Return the indices of the most confident errors."""
        return find_confident_mistakes(self.evaluation.logits, self.evaluation.targets, MAX_EXAMPLES)

    def load_mistake_images(self) -> dict[int, bytes]:
        """Return thumbnails of the most confident errors by index, without files removed meanwhile."""
        images, thumbnails = self.selection.images.select(self.outputs.is_read), {}
        for index in self.mistakes.tolist():
            try:
                thumbnails[index] = encode_jpeg(open_thumbnail(images, index))
            except (OSError, ValueError):  # removed meanwhile: the card shows no image
                continue
        return thumbnails

    def class_rows(self) -> list[dict[str, Any]]:
        """Return a row for each class present in the data, in the order of the outputs."""
        evaluation = self.evaluation
        if evaluation.is_multilabel:
            metrics = multilabel.compute_label_metrics(evaluation.logits, evaluation.targets)
        else:
            metrics = accuracy.compute_class_metrics(evaluation.predictions)
        rates = [name for name in ("recall", "precision", "f1", "average_precision") if name in metrics]
        rows = []
        for k in np.flatnonzero(metrics["support"] > 0).tolist():
            support, correct = int(metrics["support"][k]), int(metrics["right"][k])
            row = {"class": self.labels[k], "index": int(self.columns[k]), "n": support, "right": correct}
            row |= {"said": int(metrics["said"][k]), "interval": list(wilson_interval(correct, support))}
            rows.append(row | {name: nan_to_none(metrics[name][k]) for name in rates})
        return rows

    def mistake_rows(self) -> list[dict[str, Any]]:
        """Return a row for each of the most confident errors."""
        evaluation, rows = self.evaluation, []
        for index in self.mistakes.tolist():
            row: dict[str, Any] = {"path": evaluation.image_name(index)}
            if evaluation.is_multilabel:
                worst, probability = find_worst_label(evaluation.logits[index], evaluation.targets[index])
                labels = [self.labels[k] for k in np.flatnonzero(evaluation.targets[index])]
                row |= {"labels": labels, "about": self.labels[worst], "probability": probability}
            else:
                predictions = evaluation.predictions
                true, predicted = int(predictions.targets[index]), int(predictions.predicted[index])
                row |= {"label": self.labels[true], "predicted": self.labels[predicted]}
                row |= {"probability": float(predictions.confidence[index])}
            rows.append(row)
        return rows

    def confusion_dict(self) -> dict[str, Any]:
        """Return the most confused pairs, and the confusion matrix if there are few classes."""
        if self.evaluation.is_multilabel:
            return {}
        predictions, labels = self.evaluation.predictions, self.labels
        pairs = accuracy.find_confused_pairs(predictions, MAX_CONFUSED_PAIRS)
        confused = [{"label": labels[true], "predicted": labels[wrong], "n": n} for true, wrong, n in pairs]
        confusion: dict[str, Any] = {"confused": confused}
        if predictions.classes <= MAX_CONFUSION_CLASSES:
            confusion["confusion"] = {"labels": labels, "matrix": accuracy.confusion_matrix(predictions).tolist()}
        return confusion

    def reliability_rows(self) -> list[dict[str, Any]]:
        """Return the bins of the reliability diagram."""
        evaluation = self.evaluation
        if evaluation.is_multilabel:
            scores = probabilities(evaluation.logits, multilabel=True)
            bins = compute_reliability(scores.ravel(), (evaluation.targets > 0).ravel())
        else:
            bins = compute_reliability(evaluation.predictions.confidence, evaluation.predictions.correct)
        edges = [{"low": bin.low, "high": bin.high, "n": bin.count} for bin in bins]
        rates = [{"sure": nan_to_none(bin.confidence), "right": nan_to_none(bin.accuracy)} for bin in bins]
        return [edge | rate for edge, rate in zip(edges, rates, strict=True)]

    def model_dict(self) -> dict[str, Any]:
        """Return the description of the model."""
        deployed, contract = self.deployed, self.deployed.contract
        model, pipeline = deployed.model, contract.preprocessing
        model = build_meta_model(config_from_json(contract.config)) if model is None else model
        is_plain = deployed.file is None and set(deployed.notes) <= {
            *describe_precision(deployed)
        }  # PyTorch, not chosen
        return {
            "name": model.config.describe(),
            "file": deployed.where,
            "sha256": contract.checksum,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "classes": len(self.matching.labels),
            "image_size": list(pipeline.size),
            "preprocessing": pipeline.describe(),
            **({} if is_plain else {"runtime": deployed.runtime.name}),
        }

    def speed_dict(self) -> dict[str, Any]:
        """Return images per second, with and without preprocessing."""
        count, outputs = int(self.outputs.is_read.sum()), self.outputs
        whole, model = (count / max(1e-9, seconds) for seconds in (outputs.seconds, outputs.model_seconds))
        speeds = {"images_per_second": whole, "model_images_per_second": model, "seconds": round(outputs.seconds, 3)}
        return speeds | {"precision": current_precision(self.deployed)}

    def data_dict(self) -> dict[str, Any]:
        """Return the description of the data."""
        images = self.selection.images
        return {
            "where": self.selection.where,
            "kind": self.selection.kind,
            "split": self.selection.split,
            "images": len(images),
            "media": images.media,
            "classes_present": len(self.matching.present),
            "classes_matched": self.matching.method,
            "only_present": self.only_present,
            "notes": list(self.selection.notes),
            "fingerprint": fingerprint_split(images, self.selection.mask_digests),
        }

    def metric_dict(self) -> dict[str, Any]:
        """Return all metrics for JSON, some of them under a second, shorter name."""
        metrics, evaluation = self.measures, self.evaluation
        more = {} if "top5" in metrics else top_k_accuracy(evaluation.logits, evaluation.targets, 5)
        return {**metrics, **more, "ece": metrics["calibration_error"], "reliability": self.reliability_rows()}

    def as_dict(self) -> dict[str, Any]:
        """Return all results for JSON."""
        return {
            **self.metric_dict(),
            "n": self.measures["images"],
            "split": self.selection.split,
            "task": self.selection.images.target_kind,
            "throughput": self.speed_dict(),
            "model": self.model_dict(),
            "data": self.data_dict(),
            **self.detail_dict(),
            "mistakes": self.mistake_rows(),
            "unreadable": self.unreadable,
            "environment": self.environment,
        }

    def detail_dict(self) -> dict[str, Any]:
        """Return the results of each output for JSON."""
        return {"per_class": self.class_rows(), **self.confusion_dict()}

    def compare(self, other: "ModelEvaluation") -> PairedTest:
        """Return the paired test with another model, on the images that both could read."""
        both = self.outputs.is_read & other.outputs.is_read
        if not self.evaluation.is_multilabel:
            one, two = (item.evaluation.predictions.correct[both[item.outputs.is_read]] for item in (self, other))
            return compare_correct(one, two)
        # Classes of the data that map to one output of both models count as one class, as in the metrics.
        used = np.flatnonzero(self.matching.indices >= 0)
        outputs = np.stack([item.matching.indices[used] for item in (self, other)])
        joint, column = np.unique(outputs, axis=1, return_inverse=True)
        labels, targets = self.selection.images.targets[both], np.zeros((int(both.sum()), joint.shape[1]), np.uint8)
        for data_class, joint_class in zip(used, column.ravel(), strict=True):
            targets[:, joint_class] |= labels[:, data_class]
        one, two = (item.outputs.logits[both][:, columns] for item, columns in zip((self, other), joint, strict=True))
        return compare_map(one, two, targets)

    def prediction_rows(self) -> Iterator[list[object]]:
        """Yield the header of predictions.csv, then a row for each readable image."""
        return iter_prediction_rows(self)

    def weakest_table(self, limit: int) -> TextTable | None:
        """Return the classes with the lowest recall or average precision."""
        multilabel = self.evaluation.is_multilabel
        key, title = ("average_precision", "average precision") if multilabel else ("recall", "recall")
        found = [row for row in self.class_rows() if row[key] is not None and (multilabel or row["right"] < row["n"])]
        found.sort(key=lambda row: (row[key], -row["n"]))
        if not found or len(self.matching.present) < 2:
            return None
        rows = [["weakest classes", title, *([] if multilabel else ["95 %"]), f"{self.selection.images.media}s"]]
        for row in found[:limit]:
            interval = [] if multilabel else [text.format_interval(row["interval"], 0)]
            name, score = shorten_name(row["class"]), text.format_percent(row[key])
            rows.append([name, score, *interval, text.format_count(row["n"])])
        return TextTable(rows, tuple(range(1, len(rows[0]))))

    def worst_table(self, limit: int) -> TextTable | None:
        """Return the wrong predictions with the highest probability."""
        rows = [["most confident errors", "", ""]]
        for row in self.mistake_rows()[:limit]:
            path = shorten_path(row["path"], self.selection.where)
            if "labels" in row:
                label, name = ", ".join(row["labels"]) or "none", row["about"]
                kind = "predicted" if name not in row["labels"] else "missed"
            else:
                label, name, kind = row["label"], row["predicted"], "predicted"
            prediction = f"{kind} {shorten_name(name)}, {text.format_percent(row['probability'])}"
            rows.append([path, prediction, f"label {shorten_name(label)}"])
        return TextTable(rows) if len(rows) > 1 else None


def shorten_path(path: str, root: str) -> str:
    """Return a path relative to the dataset."""
    return clean_text(path.removeprefix(root.rstrip("/") + "/"))


def shorten_name(name: str) -> str:
    """Return a class name cut to `MAX_NAME_WIDTH`."""
    shown = clean_text(name)
    return shown if len(shown) <= MAX_NAME_WIDTH else shown[: MAX_NAME_WIDTH - 1] + "…"


def top_k_accuracy(logits: np.ndarray, targets: np.ndarray, count: int) -> dict[str, Any]:
    """Return top-k accuracy: the fraction of images with a true label among the `count` largest logits."""
    first = rank_classes(logits, count)
    correct = targets[:, None] == first if targets.ndim == 1 else np.take_along_axis(targets, first, 1) > 0
    hits = int(correct.any(1).sum())
    return {f"top{count}": hits / len(logits), f"top{count}_interval": list(wilson_interval(hits, len(logits)))}


def nan_to_none(value: Any) -> float | None:
    """Return a float, or None for NaN."""
    return None if math.isnan(value) else float(value)


def write_predictions(evaluation: ModelEvaluation, path: Path) -> None:
    """Write a CSV row for each readable image."""
    with atomic_write(path) as file:
        stream = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        csv.writer(stream).writerows(evaluation.prediction_rows())
        stream.detach()  # flushes, and leaves the file open


def iter_prediction_rows(result: ModelEvaluation) -> Iterator[list[object]]:
    """Yield the header, then for each image the label, prediction, probability, and the top classes."""
    evaluation, labels = result.evaluation, result.labels
    first = min(TOP_K, len(labels))
    last = "rank" if not evaluation.is_multilabel else "wrong_labels"
    top_columns = [name for rank in range(1, first + 1) for name in (f"top{rank}", f"probability{rank}")]
    yield ["path", "label", "predicted", "probability", "right", last, *top_columns]
    for start in range(0, len(evaluation.logits), ROWS_PER_BLOCK):
        logits = evaluation.logits[start : start + ROWS_PER_BLOCK].astype(np.float64)
        scores = probabilities(logits, evaluation.is_multilabel)
        order = rank_classes(logits, first)
        for row, (score, classes) in enumerate(zip(scores, order.tolist(), strict=True)):
            index = start + row
            best = [cell for k in classes for cell in (labels[k], format_probability(score[k]))]
            if evaluation.is_multilabel:
                true, predicted = evaluation.targets[index] > 0, logits[row] >= 0
                wrong = int((true != predicted).sum())
                cells = ["|".join(labels[k] for k in np.flatnonzero(mask)) for mask in (true, predicted)]
                cells += [format_probability(score[classes[0]]), int(not wrong), wrong]
            else:
                results = evaluation.predictions
                true, predicted = int(results.targets[index]), int(results.predicted[index])
                cells = [labels[true], labels[predicted], format_probability(score[predicted])]
                cells += [int(true == predicted), int(results.rank[index]) + 1]
            yield [evaluation.image_name(index), *cells, *best]


def format_probability(probability: float) -> str:
    """Format with six significant digits."""
    return f"{probability:.6g}"
