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
from vitrail.data.preprocessing import Preprocessing
from vitrail.metrics.segmentation import compute_mask_metrics, count_boundary, count_confusion, find_worst_images
from vitrail.reports.masks import choose_colours, format_colour, overlay_mask
from vitrail.tasks.base import Predict, Task, encode_jpeg, open_thumbnail

EXAMPLE_SIDE = 240  # pixels, of the longer side of an overlay
RESIZED_VALUES = 2**24  # logits at the size of a mask that are in memory at once: 64 MB


class Masks(Task):
    """One class per pixel; rows are the confusion matrix and the boundary counts of each image, [n, K * K + 2 * K]."""

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
        rows = [np.zeros((0, classes**2 + 2 * classes), np.int64)]
        for logits, index in zip(outputs, indices.tolist(), strict=True):
            target = images.read_mask(index)
            predicted = predict_mask(logits, (target.shape[0], target.shape[1]))
            counts = (count(predicted, target, classes) for count in (count_confusion, count_boundary))
            rows.append(np.concatenate([array.ravel() for array in counts])[None])
        return np.concatenate(rows)

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        confusions, boundary = split_rows(rows, len(images.classes))
        metrics = compute_mask_metrics(confusions, boundary=boundary, intervals=intervals)
        return metrics | ({"interval": metrics["miou_interval"]} if "miou_interval" in metrics else {})

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        return dict(zip(("confusions", "boundary"), split_rows(rows, len(images.classes)), strict=True))

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
    """Return the confusion matrices [n, K, K] and the boundary counts [n, K, 2] of rows."""
    confusions, boundary = rows[:, : classes**2], rows[:, classes**2 :]
    return confusions.reshape(-1, classes, classes), boundary.reshape(-1, classes, 2)
