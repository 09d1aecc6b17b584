"""Results of a segmentation model on images with masks, as metrics, JSON and CSV."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.labels import LabelMap, format_names
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.masks import class_colours
from vitrail.evaluation.class_mapping import ClassMatching
from vitrail.evaluation.result import (
    MAX_EXAMPLES,
    ModelEvaluation,
    TextTable,
    nan_to_none,
    shorten_name,
    shorten_path,
)
from vitrail.metrics.paired import PairedTest
from vitrail.metrics.segmentation import (
    compare_masks,
    compute_image_iou,
    compute_iou,
    divide,
    find_worst_images,
)
from vitrail.reports.masks import Colour
from vitrail.reports.run import EvaluatedMasks
from vitrail.tasks import task_of
from vitrail.tasks.masks import split_rows
from vitrail.utils import text


def map_masks(deployed: DeployedModel, images: Images) -> Images:
    """Return the images with masks of the model's classes, matched by name; without names, by index."""
    outputs, labels = len(deployed.contract.labels or ()), deployed.class_names or images.classes
    if len(labels) != outputs:
        raise ValueError(f"{deployed.name} has {outputs} classes without names, and the data {len(images.classes)}")
    known = LabelMap(tuple(labels))
    if new := [name for name in images.classes if name not in labels]:
        names = format_names(new, known.format_unknown)
        raise ValueError(
            f"{deployed.name} was not trained on the classes {names}: name them as in training, or add their values to ignore="
        )
    mapped = known.apply(images, allow_mismatch=True).images  # a class may be missing: it does not count
    return replace(mapped, colours=class_colours(deployed.contract))


def reorder_classes(pixels: np.ndarray, labels: Sequence[str], order: Sequence[str]) -> np.ndarray:
    """Return counts [n, 3, K] of these labels in another order of classes, with zeros for those that are new."""
    ordered = np.zeros((*pixels.shape[:2], len(order)), pixels.dtype)
    ordered[..., [order.index(label) for label in labels]] = pixels
    return ordered


class MaskEvaluation(ModelEvaluation):
    """A segmentation model, the images, and the counts of its pixels."""

    @classmethod
    def match(cls, deployed: DeployedModel, images: Images, class_map: Any, names: str | None) -> ClassMatching:
        """Match the classes of the data to the outputs by name; raise ValueError where they differ."""
        cls.refuse_class_map(deployed, class_map)
        labels = map_masks(deployed, images).classes
        return ClassMatching(np.array([labels.index(name) for name in images.classes]), labels, "by name")

    @classmethod
    def map_images(cls, deployed: DeployedModel, images: Images) -> Images:
        return map_masks(deployed, images)

    @classmethod
    def verification_targets(cls, deployed: DeployedModel, images: Images, class_map: Any) -> np.ndarray | None:
        """Return the masks at the size of the model, [n, H, W]."""
        cls.refuse_class_map(deployed, class_map)
        mapped, preprocessing = map_masks(deployed, images), deployed.contract.preprocessing
        return np.stack([preprocessing.to_mask(mapped.read_mask(index)).numpy() for index in range(len(mapped))])

    @property
    def columns(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return np.arange(len(self.matching.labels))

    @cached_property
    def evaluation(self) -> EvaluatedMasks:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the counts of the readable images."""
        images = self.selection.images.select(self.outputs.is_read)
        pixels, boundary = split_rows(self.outputs.logits[self.outputs.is_read], len(self.labels))
        names = [images.name(index) for index in range(len(images))]
        return EvaluatedMasks(self.selection.split_label, pixels, boundary, self.outputs.sums["confusion"], names, {})

    @property
    def palette(self) -> tuple[Colour, ...]:
        return class_colours(self.deployed.contract)

    @cached_property
    def measures(self) -> dict[str, Any]:
        return self.evaluation.metrics

    def metric_dict(self) -> dict[str, Any]:
        return self.measures

    @cached_property
    def mistakes(self) -> np.ndarray:
        """Return the indices of the images with the lowest mean IoU."""
        return find_worst_images(self.evaluation.pixels, MAX_EXAMPLES)

    def load_mistake_images(self) -> dict[int, bytes]:
        """Return the true and the predicted masks of these images by index, without files removed meanwhile."""
        images = map_masks(self.deployed, self.selection.images).select(self.outputs.is_read)
        pipeline, drawn = self.deployed.contract.preprocessing, {}

        def predict(index: int) -> Tensor:
            with images.open(index) as image:
                pixels = pipeline.to_pixels(image)
            return torch.from_numpy(self.deployed.runtime(pixels[None].numpy()))[0]

        for index in self.mistakes.tolist():
            try:
                drawn[index] = task_of(images).draw_example(images, index, predict)
            except (OSError, ValueError):  # removed meanwhile: the card shows no image
                continue
        return drawn

    def class_rows(self) -> list[dict[str, Any]]:
        """Return a row for each class that occurs, in the order of the outputs."""
        pixels = self.evaluation.pixels.sum(0)
        hits, true, predicted = pixels
        iou, recall, precision = compute_iou(pixels), divide(hits, true), divide(hits, predicted)
        return [
            {
                "class": self.labels[k],
                "index": k,
                "pixels": int(true[k]),
                "iou": float(iou[k]),
                "recall": nan_to_none(recall[k]),
                "precision": nan_to_none(precision[k]),
            }
            for k in np.flatnonzero(~np.isnan(iou)).tolist()
        ]

    def mistake_rows(self) -> list[dict[str, Any]]:
        """Return a row for each of the images with the lowest mean IoU."""
        scores = compute_image_iou(self.evaluation.pixels)
        return [{"path": self.evaluation.image_name(i), "miou": float(scores[i])} for i in self.mistakes.tolist()]

    def confusion_dict(self) -> dict[str, Any]:
        return {"confusion": {"labels": self.labels, "matrix": self.evaluation.confusion.tolist()}}

    def compare(self, other: ModelEvaluation) -> PairedTest:
        """Test the difference of mIoU on the images that both could read, over the classes of both models by name."""
        both = self.outputs.is_read & other.outputs.is_read
        classes = list(dict.fromkeys((*self.labels, *other.labels)))
        one, two = (
            reorder_classes(split_rows(item.outputs.logits[both], len(item.labels))[0], item.labels, classes)
            for item in (self, other)
        )
        return compare_masks(one, two)

    def prediction_rows(self) -> Iterator[list[object]]:
        """Yield the header, then for each image its mean IoU, pixel accuracy and the IoU of each class."""
        evaluation = self.evaluation
        scores, by_class = compute_image_iou(evaluation.pixels), compute_iou(evaluation.pixels)
        hits, totals = evaluation.pixels[:, 0].sum(1), evaluation.pixels[:, 1].sum(1)
        accuracy = divide(hits, totals)
        yield ["path", "miou", "pixel_accuracy", "pixels", *(f"iou {label}" for label in self.labels)]
        for index, name in enumerate(evaluation.names):
            cells = (scores[index], accuracy[index], *by_class[index])
            shares = ["" if np.isnan(value) else f"{value:.6g}" for value in cells]
            yield [name, *shares[:2], int(totals[index]), *shares[2:]]

    def weakest_table(self, limit: int) -> TextTable | None:
        """Return the classes with the lowest IoU."""
        rows = [["weakest classes", "IoU", "pixels"]]
        for row in sorted(self.class_rows(), key=lambda row: row["iou"])[:limit]:
            rows.append([shorten_name(row["class"]), text.format_percent(row["iou"]), text.format_count(row["pixels"])])
        return TextTable(rows, (1, 2))

    def worst_table(self, limit: int) -> TextTable | None:
        """Return the images with the lowest mean IoU."""
        where, worst = self.selection.where, self.mistake_rows()[:limit]
        cells = [[shorten_path(row["path"], where), text.format_percent(row["miou"])] for row in worst]
        return TextTable([["worst images", "mean IoU"], *cells], (1,))
