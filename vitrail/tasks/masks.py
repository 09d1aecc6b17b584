"""A class for each pixel: semantic segmentation.

B images, K classes, logits of h×w pixels, masks of H×W.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Images, TargetKind
from vitrail.data.decode import IMAGE_ERRORS, format_image_error, name_image_errors
from vitrail.data.preprocessing import Preprocessing
from vitrail.metrics.segmentation import (
    compare_masks,
    compute_mask_metrics,
    count_boundary,
    count_confusion,
    find_worst_images,
    sum_pixels,
)
from vitrail.models.base import Model
from vitrail.reports.masks import choose_colours, format_colour, overlay_mask
from vitrail.tasks.base import Predict, Sums, Task, UnreadableTarget, encode_jpeg, open_thumbnail
from vitrail.tasks.comparison import OutputComparison, PairedScore, TargetStatistics, mean_confidence, read_interval

EXAMPLE_SIDE = 240  # pixels, of the longer side of an overlay
GRID_SIDE = 32  # pixels, at most, of the grid whose logits are compared
RESIZED_VALUES = 2**24  # logits at the size of a mask that are in memory at once: 64 MB


@dataclass(frozen=True)
class MaskOutputs:
    """Maps of logits, reduced to what is compared."""

    masks: np.ndarray  # uint8 [B, H, W]
    logits: np.ndarray  # float32 [B · P, K], of P pixels of a grid; NaN where an output of the batch is not finite


class Masks(Task):
    """One class per pixel. A row has the pixels of each class that are hit, true and predicted, those of its boundary, and the
    confusion matrix, of which only the sum is kept: 5 K numbers for an image, not K² + 5 K."""

    name: ClassVar[TargetKind] = "masks"
    title: ClassVar[str] = "masks"
    outputs: ClassVar[str] = "masks"
    recipe: ClassVar[str | None] = "segment"
    alternative: ClassVar[str] = "vitrail transfer"
    score: ClassVar[str] = "miou"
    validation_metrics: ClassVar[tuple[str, ...]] = ("miou", "pixel_accuracy")

    has_maps: ClassVar[bool] = True

    def fit_preprocessing(self, preprocessing: Preprocessing) -> Preprocessing:
        """Return the preprocessing with images turned upright, as masks are; raise ValueError if it crops."""
        check_whole_image(preprocessing)
        return replace(preprocessing, turn=True)

    def check_preprocessing(self, preprocessing: Preprocessing) -> None:
        """Raise ValueError unless the model sees the whole upright image: its logits are resized to the image's size."""
        check_whole_image(preprocessing)
        if not preprocessing.turn:
            raise ValueError("masks are those of upright images: preprocessing.turn must be True, got False")

    def describe_outputs(self, train: Images) -> dict[str, Any]:
        card: dict[str, Any] = {"ignore": [value for value, _ in train.ignored]}
        if train.colours is not None:
            card["colours"] = list(map(format_colour, train.colours))
        return card if train.things is None else card | {"things": list(train.things)}

    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        """Return the counts of each image, at the size of its mask."""
        classes = len(images.classes)
        rows = [np.zeros((0, 5 * classes + classes**2), np.int64)]
        for logits, index in zip(outputs, indices.tolist(), strict=True):
            target = read_target(images, index)
            predicted = predict_mask(logits, (target.shape[0], target.shape[1]))
            confusion = count_confusion(predicted, target, classes)
            counts = sum_pixels(confusion), count_boundary(predicted, target, classes), confusion
            rows.append(np.concatenate([array.ravel() for array in counts])[None])
        return np.concatenate(rows)

    def separate_sums(self, rows: np.ndarray, images: Images) -> tuple[np.ndarray, Sums]:
        """Return the pixels and boundaries of every image, and the sum of the confusion matrices, `confusion` [K, K]."""
        classes = len(images.classes)
        return rows[:, : 5 * classes].copy(), {"confusion": rows[:, 5 * classes :].sum(0).reshape(classes, classes)}

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        pixels, boundary = split_rows(rows, len(images.classes))
        metrics = compute_mask_metrics(pixels, boundary=boundary, intervals=intervals)
        return metrics | ({"interval": metrics["miou_interval"]} if "miou_interval" in metrics else {})

    def keep_outputs(self, outputs: np.ndarray) -> MaskOutputs:
        """Return the masks of maps of logits [B, K, H, W], and the logits of pixels on a grid."""
        height, width = outputs.shape[2:]
        grid = outputs[:, :, :: -(-height // GRID_SIDE), :: -(-width // GRID_SIDE)]
        logits = np.moveaxis(grid, 1, -1).reshape(-1, outputs.shape[1]).copy()
        if not np.isfinite(outputs).all():
            logits[:] = np.nan
        return MaskOutputs(outputs.argmax(1).astype(np.uint8), logits)

    def join_outputs(self, parts: Sequence[MaskOutputs]) -> MaskOutputs:
        return MaskOutputs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("masks", "logits")))

    def compare_outputs(
        self,
        first: MaskOutputs,
        second: MaskOutputs,
        targets: np.ndarray | None = None,
        statistics: TargetStatistics | None = None,
    ) -> OutputComparison:
        """Compare masks at every pixel, logits at the pixels of a grid, and mIoU."""
        if first.masks.shape != second.masks.shape or first.logits.shape != second.logits.shape:
            shapes = " and ".join(str([len(one.masks), *one.masks.shape[1:]]) for one in (first, second))
            raise ValueError(f"masks differ in shape: {shapes}")
        same, largest = float((first.masks == second.masks).mean()), float(np.abs(first.logits).max())
        if not np.isfinite(second.logits).all():
            return OutputComparison("logits", math.inf, largest, same, of_pixels=True)
        difference = float(np.abs(first.logits - second.logits).max())
        shift = mean_confidence(second.logits) - mean_confidence(first.logits)
        score = None if targets is None else score_masks(first, second, targets)
        return OutputComparison("logits", difference, largest, same, None, score, shift, of_pixels=True)

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        return dict(zip(("pixels", "boundary"), split_rows(rows, len(images.classes)), strict=True))

    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        """Return the images with the lowest mean IoU."""
        return find_worst_images(split_rows(rows, len(images.classes))[0], count)

    def draw_example(self, images: Images, index: int, predict: Predict) -> bytes:
        """Return the target on the left and the prediction on the right, over the image."""
        thumbnail = np.asarray(open_thumbnail(images, index, EXAMPLE_SIDE))
        height, width = thumbnail.shape[:2]
        target = Image.fromarray(images.read_mask(index)).resize((width, height), Image.Resampling.NEAREST)
        colours = images.colours or choose_colours(images.classes)
        masks = (np.asarray(target), predict_mask(predict(index), (height, width)))
        halves = [overlay_mask(thumbnail, mask, colours) for mask in masks]
        gap = np.full((height, 4, 3), 255, np.uint8)
        return encode_jpeg(Image.fromarray(np.concatenate((halves[0], gap, halves[1]), axis=1)))


def read_target(images: Images, index: int) -> np.ndarray:
    """Return the mask of an image at its own size; raise UnreadableTarget if it cannot be read."""
    name = images.mask_name(index)
    try:
        with name_image_errors(name):
            return images.read_mask(index)
    except IMAGE_ERRORS as error:
        raise UnreadableTarget(index, name, format_image_error(error, name)) from None


def check_whole_image(preprocessing: Preprocessing) -> None:
    """Raise ValueError for preprocessing that crops: the logits of a part of an image cannot be resized to all of it."""
    needed, size = "masks need the whole image: preprocessing", preprocessing.size
    if preprocessing.fit != "squash":
        raise ValueError(f"{needed}.fit must be 'squash', got {preprocessing.fit!r}")
    if preprocessing.resize != size:
        raise ValueError(f"{needed}.resize must be its size, {size}, got {preprocessing.resize}")


def predict_mask(logits: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Return the class of each pixel, uint8 [H, W], of logits [K, h, w] resized to this size.

    A few classes are resized at once, so that large images with many classes do not need K maps of their size.
    """
    best = torch.full(size, -torch.inf, device=logits.device)
    mask = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    step = max(1, RESIZED_VALUES // (size[0] * size[1]))
    for first in range(0, len(logits), step):
        part = logits[None, first : first + step].float()
        resized = F.interpolate(part, size=size, mode="bilinear", align_corners=False)[0]
        highest, index = resized.max(0)
        higher = highest > best  # of equal logits the first class wins, as in argmax
        mask[higher] = (index[higher] + first).to(torch.uint8)
        torch.maximum(best, highest, out=best)
    return mask.cpu().numpy()


def split_rows(rows: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [n, 3, K] of `sum_pixels` and the boundary counts [n, K, 2] of rows."""
    pixels, boundary = rows[:, : 3 * classes], rows[:, 3 * classes : 5 * classes]
    return pixels.reshape(-1, 3, classes), boundary.reshape(-1, classes, 2)


def score_masks(first: MaskOutputs, second: MaskOutputs, targets: np.ndarray) -> PairedScore:
    """Return the mIoU of both models on masks [B, H, W], and their paired difference."""
    classes = first.logits.shape[1]
    confusions = (
        np.stack([count_confusion(mask, target, classes) for mask, target in zip(one.masks, targets, strict=True)])
        for one in (first, second)
    )
    pixels = [sum_pixels(counts) for counts in confusions]
    one, two = (compute_mask_metrics(counts) for counts in pixels)
    paired = compare_masks(*pixels)
    intervals = read_interval(one.get("miou_interval")), read_interval(two.get("miou_interval"))
    return PairedScore("mIoU", one["miou"], two["miou"], *intervals, paired.difference, paired.interval)


def read_colours(model: Model) -> tuple[str, ...] | None:
    """Return the colours that a segmentation model stores for its classes; None if it has none."""
    colours = model.card.get("colours")
    if model.config.output_kind != "masks" or not isinstance(colours, list | tuple):
        return None
    if len(colours) != model.config.classes:  # of the classes before the head was replaced
        return None
    check_colours(colours)
    return tuple(colours)


def read_ignored(model: Model) -> tuple[int, ...] | None:
    """Return the values of masks that were ignored in a segmentation model's training; None if it does not state them.

    Files of earlier versions state those that were given, in their recipe.
    """
    values = model.card.get("ignore")
    if values is None:
        recipe = model.card.get("recipe")
        data = recipe.get("data") if isinstance(recipe, dict) else None
        values = data.get("ignore") if isinstance(data, dict) else None
    if model.config.output_kind != "masks" or not isinstance(values, list | tuple):
        return None
    check_ignored(values)
    return tuple(values)


def check_colours(colours: Iterable[object]) -> None:
    """Raise ValueError if one of the colours is not written as #rrggbb."""
    for colour in colours:
        if not isinstance(colour, str) or re.fullmatch("#[0-9a-fA-F]{6}", colour) is None:
            raise ValueError(f"a colour must be written as #rrggbb, got {colour!r}")


def check_ignored(values: Iterable[object]) -> None:
    """Raise ValueError if one of the ignored values of masks is not a whole number >= 0."""
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"an ignored value of masks must be a whole number >= 0, got {value!r}")
