"""A class for each pixel: semantic segmentation.

B images, K classes, logits of h×w pixels, masks of H×W.
"""

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
    compute_mask_metrics,
    count_boundary,
    count_confusion,
    find_worst_images,
    sum_pixels,
)
from vitrail.reports.masks import choose_colours, format_colour, overlay_mask
from vitrail.tasks.base import Predict, Sums, Task, UnreadableTarget, encode_jpeg, open_thumbnail

EXAMPLE_SIDE = 240  # pixels, of the longer side of an overlay
RESIZED_VALUES = 2**24  # logits at the size of a mask that are in memory at once: 64 MB


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
