"""The interface of a task: how the outputs of a model are judged, stored and drawn, given what a target is.

Runs ask the task, not its name; evaluations and reports choose their classes for it by name, each in one table
(`EVALUATIONS` in `evaluation/evaluate.py`, `EVALUATED` in `reports/run.py`). An image's output is first reduced to one row of
numbers, from which all metrics are computed: logits of a classifier stay, a map of logits becomes counts of pixels. So outputs
that are too large to keep are judged batch by batch, on any number of processes. A new task is a file beside this one and a line
in `__init__.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitrail.data.dataset import Images, TargetKind
from vitrail.data.preprocessing import Preprocessing, convert_image
from vitrail.data.sound import Sound, draw_spectrogram
from vitrail.data.video import Video, read_clip
from vitrail.tasks.comparison import OutputComparison, TargetStatistics

THUMBNAIL_SIDE = 192  # pixels, of the longer side; of a video that of each frame
STRIP_FRAMES, STRIP_GAP = 4, 4  # of a video; pixels between them
JPEG_QUALITY = 88
Sums = dict[str, np.ndarray]  # over images, by name
Predict = Callable[[int], Tensor]  # the output of the model for an image of the split, without the batch dimension


class Task(ABC):
    """A kind of target, as a value."""

    name: ClassVar[TargetKind]  # as recipes, run.json and model files store it
    title: ClassVar[str]  # of its targets, for messages
    noun: ClassVar[str] = "classes"  # of the outputs of a model, each
    outputs: ClassVar[str] = "classes of images"  # that a model predicts
    recipe: ClassVar[str | None] = None  # the recipe that learns it; None for the recipes of classes
    score: ClassVar[str]  # the metric that a run maximises
    validation_metrics: ClassVar[tuple[str, ...]]  # logged at every validation, where they are measured
    min_outputs: ClassVar[int] = 2  # of a model, that can learn something
    has_image_classes: ClassVar[bool] = False  # whether images can be drawn by their class
    alternative: ClassVar[str] = (
        "vitrail train"  # the command to use in place of a probe, which needs classes of images
    )
    calibrates: ClassVar[bool] = False  # whether a temperature is fitted to the rows, which are logits
    has_maps: ClassVar[bool] = False  # whether an output is a map [K, H, W], too large to keep of many images

    def fit_preprocessing(self, preprocessing: Preprocessing) -> Preprocessing:
        """Return the preprocessing with which a model predicts; raise ValueError if it cannot with this one."""
        return preprocessing

    def check_preprocessing(self, preprocessing: Preprocessing) -> None:  # noqa: B027
        """Raise ValueError for preprocessing after which the outputs cannot be compared with the targets."""

    def check_splits(self, splits: Mapping[str, Images], where: str) -> None:  # noqa: B027
        """Raise ValueError for targets that cannot be learnt or judged, before anything is trained."""

    def describe_targets(self, images: Images) -> str:
        """Return the targets in words, for the first line of a run; "" to count classes."""
        return ""

    def describe_split(self, images: Images) -> dict[str, Any]:
        """Return what run.json says about the targets of a split, besides its classes."""
        return {}

    def describe_outputs(self, train: Images) -> dict[str, Any]:
        """Return what the card of a model file says about its outputs, besides their names."""
        return {}

    @abstractmethod
    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        """Return a row for each image of a batch, [B, R], with all that its metrics need; may raise UnreadableTarget."""

    def separate_sums(self, rows: np.ndarray, images: Images) -> tuple[np.ndarray, Sums]:
        """Return the columns of rows [B, R] that are kept of every image, and the sums over images of the others."""
        return rows, {}

    @abstractmethod
    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        """Return name and value of every metric, ready for JSON, of the kept columns [n, R] of these images."""

    def keep_outputs(self, outputs: np.ndarray) -> Any:
        """Return what is kept of the outputs of a batch until they are compared with those of another model."""
        return outputs

    def join_outputs(self, parts: Sequence[Any]) -> Any:
        """Return what is kept of several batches as one."""
        return np.concatenate(parts)

    @abstractmethod
    def compare_outputs(
        self, first: Any, second: Any, targets: np.ndarray | None = None, statistics: TargetStatistics | None = None
    ) -> OutputComparison:
        """Compare what is kept of the outputs of two models, on targets if there are any."""

    @abstractmethod
    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        """Return what `evaluation/SPLIT.npz` of a run holds besides the sums."""

    @abstractmethod
    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        """Return the indices of at most `count` images whose outputs are the worst, the worst first."""

    def draw_example(self, images: Images, index: int, predict: Predict) -> bytes:
        """Return a small JPEG that shows an image, and its output if that can be drawn."""
        return encode_jpeg(open_thumbnail(images, index))


class UnreadableTarget(ValueError):
    """The target of an image cannot be read."""

    def __init__(self, index: int, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.index, self.name, self.reason = index, name, reason


def reduce_batch(
    task: Task, outputs: Tensor, images: Images, indices: np.ndarray, unreadable: dict[str, str]
) -> tuple[np.ndarray, np.ndarray, Sums]:
    """Return the images of a batch whose targets can be read, their rows and sums; `unreadable` gets the others' names."""
    while True:
        try:
            return indices, *task.separate_sums(task.reduce_outputs(outputs, images, indices), images)
        except UnreadableTarget as error:
            unreadable[error.name] = error.reason
            kept = indices != error.index
            outputs, indices = outputs[torch.from_numpy(kept)], indices[kept]


def add_sums(first: Sums, second: Sums) -> Sums:
    """Return the sums over the images of both; one may be empty."""
    return first | {name: first[name] + array if name in first else array for name, array in second.items()}


def open_thumbnail(images: Images, index: int, side: int = THUMBNAIL_SIDE) -> Image.Image:
    """Return a small upright copy of an image in RGB, or of a video frames side by side, from its first to its last.

    Of a sound it is its spectrogram.
    """
    with images.open(index) as opened:
        if isinstance(opened, Sound):
            return shrink_image(draw_spectrogram(opened), side)
        if not isinstance(opened, Video):
            return shrink_image(opened, side)
        sizes: list[tuple[int, int]] = []  # frames of a folder may differ in size: all get that of the first

        def shrink(frame: Image.Image) -> Tensor:  # [3, h, w]
            thumbnail = shrink_image(frame, side)
            sizes.append(thumbnail.size)
            return torch.from_numpy(np.array(thumbnail.resize(sizes[0]))).permute(2, 0, 1)

        strip = read_clip(opened, 1, lambda n: np.linspace(0, n - 1, STRIP_FRAMES).round().astype(np.int64), shrink)
    row = F.pad(strip, (0, STRIP_GAP), value=128).permute(2, 1, 3, 0).flatten(1, 2)  # [3, T, h, w] to [h, T·w, 3]
    return Image.fromarray(row[:, :-STRIP_GAP].contiguous().numpy())


def shrink_image(image: Image.Image, side: int) -> Image.Image:
    """Return a small upright copy of an image in RGB."""
    thumbnail = convert_image(ImageOps.exif_transpose(image), 3)
    thumbnail.thumbnail((side, side))
    return thumbnail


def encode_jpeg(image: Image.Image) -> bytes:
    """Return an image as the bytes of a JPEG file."""
    file = BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
