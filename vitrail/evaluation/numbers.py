"""Results of a regression model on images with numbers, as metrics, JSON and CSV."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from vitrail.data.dataset import Images
from vitrail.data.labels import LabelMap
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.evaluation.class_mapping import ClassMatching
from vitrail.evaluation.result import MAX_EXAMPLES, ModelEvaluation, TextTable, shorten_name, shorten_path
from vitrail.metrics.paired import PairedTest
from vitrail.metrics.regression import compare_regression, find_largest_errors
from vitrail.reports.run import EvaluatedNumbers
from vitrail.utils import scores, text


class NumberEvaluation(ModelEvaluation):
    """A regression model, the images, and its predictions."""

    @classmethod
    def match(cls, deployed: DeployedModel, images: Images, class_map: Any, names: str | None) -> ClassMatching:
        """Match the targets of the data to the outputs by name; raise ValueError with the difference."""
        cls.refuse_class_map(deployed, class_map)
        labels = cls.map_images(deployed, images).classes
        return ClassMatching(np.arange(len(labels)), labels, "by name")

    @classmethod
    def map_images(cls, deployed: DeployedModel, images: Images) -> Images:
        try:
            return LabelMap(deployed.contract.labels or ()).apply(images).images
        except ValueError as error:
            raise ValueError(f"{deployed.name}: {error}") from None

    @classmethod
    def verification_targets(cls, deployed: DeployedModel, images: Images, class_map: Any) -> np.ndarray | None:
        cls.refuse_class_map(deployed, class_map)
        return cls.map_images(deployed, images).targets

    @property
    def columns(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return np.arange(len(self.matching.labels))

    @cached_property
    def evaluation(self) -> EvaluatedNumbers:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the predicted and true numbers of the readable images."""
        is_read = self.outputs.is_read
        images = self.map_images(self.deployed, self.selection.images).select(is_read)
        names = [images.name(index) for index in range(len(images))]
        split, predicted = self.selection.split_label, self.outputs.logits[is_read]
        return EvaluatedNumbers(split, predicted, images.targets, names, {}, self.selection.images.media)

    @cached_property
    def measures(self) -> dict[str, Any]:
        return self.evaluation.metrics

    def metric_dict(self) -> dict[str, Any]:
        return self.measures

    @cached_property
    def mistakes(self) -> np.ndarray:
        """Return the indices of the images with the largest errors."""
        return find_largest_errors(self.evaluation.predicted, self.evaluation.targets, MAX_EXAMPLES)

    def data_dict(self) -> dict[str, Any]:
        return super().data_dict() | {"targets": self.labels}

    def target_rows(self) -> list[dict[str, Any]]:
        """Return a row for each target, with its errors."""
        metrics, rows = self.measures, []
        for k, label in enumerate(self.labels):
            row: dict[str, Any] = {"target": label}
            for name in ("mae", "rmse", "r2"):
                row[name] = metrics[f"target_{name}"][k]
                row[f"{name}_interval"] = (metrics.get(f"target_{name}_interval") or {k: None})[k]
            values = self.evaluation.targets[:, k]
            rows.append(row | {"mean": float(values.mean()), "std": float(values.std())})
        return rows

    def detail_dict(self) -> dict[str, Any]:
        return {"per_target": self.target_rows()}

    def mistake_rows(self) -> list[dict[str, Any]]:
        """Return a row for each of the images with the largest errors."""
        evaluation, rows = self.evaluation, []
        for index in self.mistakes.tolist():
            pairs = ((evaluation.targets, "numbers"), (evaluation.predicted, "predicted"))
            values = {name: dict(zip(self.labels, map(float, array[index]), strict=True)) for array, name in pairs}
            rows.append({"path": evaluation.image_name(index), **values})
        return rows

    def compare(self, other: ModelEvaluation) -> PairedTest:
        """Test the difference of R² on the images that both could read; the targets of both are the same."""
        both = self.outputs.is_read & other.outputs.is_read
        order = [list(other.labels).index(label) for label in self.labels]
        targets = self.map_images(self.deployed, self.selection.images).targets[both]
        return compare_regression(self.outputs.logits[both], other.outputs.logits[both][:, order], targets)

    def prediction_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each image the true and predicted number and the error of each target."""
        yield ["path", *(f"{prefix}{label}" for label in self.labels for prefix in ("", "predicted ", "error "))]
        evaluation = self.evaluation
        for index, name in enumerate(evaluation.names):
            pairs = zip(evaluation.targets[index].tolist(), evaluation.predicted[index].tolist(), strict=True)
            cells = [f"{cell:.9g}" for true, predicted in pairs for cell in (true, predicted, predicted - true)]
            yield [name, *cells]

    def weakest_table(self, limit: int) -> TextTable | None:
        """Return the errors of each target; of a single one, they are in the table of metrics."""
        if len(self.labels) < 2:
            return None
        rows = [["targets", "MAE", "95 %", "RMSE", "95 %", "R²", "95 %"]]
        for row in self.target_rows():
            cells = [shorten_name(row["target"])]
            for name in ("mae", "rmse"):
                ends = row[f"{name}_interval"]
                cells += [text.format_number(row[name], 4), "–".join(text.format_number(end, 4) for end in ends or ())]
            ends = scores.format_score_interval("r2", row["r2_interval"])
            rows.append([*cells, scores.format_score("r2", row["r2"]), ends])
        return TextTable(rows, tuple(range(1, 7)))

    def worst_table(self, limit: int) -> TextTable | None:
        """Return the images with the largest errors."""
        where = self.selection.where
        root = os.path.dirname(where) if os.path.isfile(where) else where  # a table names files beside it
        several = len(self.labels) > 1
        rows = [["largest errors", *([""] if several else []), "predicted", "true"]]
        for row in self.mistake_rows()[:limit]:
            for k, label in enumerate(self.labels):
                path = shorten_path(row["path"], root) if not k else ""
                values = (text.format_number(row[name][label], 4) for name in ("predicted", "numbers"))
                rows.append([path, *([shorten_name(label)] if several else []), *values])
        return TextTable(rows, (len(rows[0]) - 2, len(rows[0]) - 1))
