"""Preprocessed image with its trace and predictions, and how it is drawn beside the maps."""

from dataclasses import dataclass

import numpy as np

from vitrail.analysis.figures.overlay import outline_patch, resize_image
from vitrail.analysis.figures.sheet import Sheet, shorten_name
from vitrail.analysis.results import ImageTrace
from vitrail.analysis.sounds import SoundAxes
from vitrail.inference import top_classes

ClassProbability = tuple[int, str, float]  # class index, name, probability


@dataclass(frozen=True)
class ImageView:
    """One image to draw."""

    name: str
    pixels: np.ndarray  # uint8 [H, W, 3]: resized and cropped, not normalised
    trace: ImageTrace
    labels: tuple[str, ...] | None = None  # of the model's classes
    model: str = ""  # name of the model
    channels: int = 3  # of the model input
    is_linear_embedding: bool = True  # patches are projected by one matrix, not by convolutions
    is_sigmoid: bool = False  # multi-label model: probabilities do not sum to 1
    has_numbers: bool = False  # regression model: outputs are numbers, not logits
    axes: SoundAxes | None = None  # of a spectrogram

    @property
    def noun(self) -> str:
        """Return what the model takes: an image or a spectrogram."""
        return "image" if self.axes is None else "spectrogram"

    def label(self, index: int) -> str:
        """Return the name of a class, or its number."""
        return self.labels[index] if self.labels and index < len(self.labels) else f"class {index}"

    def top_predictions(self, count: int = 3) -> list[ClassProbability]:
        """Return the most probable classes in order; none for a model without classes."""
        if self.trace.logits is None or self.has_numbers:
            return []
        return [(k, self.label(k), p) for k, p in top_classes(self.trace.logits, self.is_sigmoid, count)]

    @property
    def prediction_text(self) -> str:
        """Return the predicted class with its probability, or the predicted numbers."""
        if self.has_numbers and self.trace.logits is not None:
            return ", ".join(f"{self.label(k)} {value:.4g}" for k, value in enumerate(self.trace.logits))
        return "".join(f"{name}, {100 * p:.0f} %" for _, name, p in self.top_predictions(1))

    @property
    def patch_box(self) -> tuple[float, float, float, float] | None:
        """Return left, top, width and height of the selected patch as fractions of the image."""
        if self.trace.at is None:
            return None
        (row, column), (h, w) = self.trace.at, self.trace.grid
        return column / w, row / h, 1 / w, 1 / h

    @property
    def patch_text(self) -> str:
        """Return the selected patch in words: its row and column, or its time and frequency in a sound."""
        assert self.trace.at is not None
        row, column = self.trace.at
        if self.axes is not None:
            return self.axes.describe_cell(row, column, self.trace.grid)
        return f"row {row + 1}, column {column + 1}"

    def fit_width(self, width: int) -> tuple[int, int]:
        """Return height and width in pixels of the image at this width."""
        return max(1, round(width * self.pixels.shape[0] / self.pixels.shape[1])), width


def to_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return uint8 [C, H, W] as [H, W, 3]: the first 3 of 3 or 4 channels, else the mean over channels in grey."""
    if pixels.shape[0] in (3, 4):
        return np.ascontiguousarray(pixels[:3].transpose(1, 2, 0))
    grey = pixels[0] if pixels.shape[0] == 1 else pixels.mean(0).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)


IMAGE_WIDTH = 2.1  # inches
IMAGE_PIXELS = 460  # across


def draw_side_image(sheet: Sheet, left: float, top: float, view: ImageView, mark: bool = False) -> float:
    """Draw the image with its name and prediction; return its end in inches from the top."""
    height, width = view.pixels.shape[:2]
    scale = min(1.0, 1.25 * width / height)  # tall images are narrower
    size = (round(IMAGE_PIXELS * scale * height / width), round(IMAGE_PIXELS * scale))
    pixels = outline_patch(resize_image(view.pixels, size), view.patch_box if mark else None)
    height = sheet.draw_image(left, top, IMAGE_WIDTH * scale, pixels)
    end = top + height + draw_axes(sheet, left, top, IMAGE_WIDTH * scale, height, view)
    sheet.draw_text(left, end + 0.1, shorten_name(view.name), size=7.4)
    sheet.draw_label(left, end + 0.27, shorten_name(view.prediction_text), size=7.4)
    return end + 0.5


AXIS_HEIGHT = 0.24  # inches, of the times below a spectrogram


def draw_axes(
    sheet: Sheet, left: float, top: float, width: float, height: float, view: ImageView, hertz: bool = True
) -> float:
    """Write frequencies beside a spectrogram and times below it; return the height of these, 0 for an image."""
    if view.axes is None:
        return 0.0
    style = {"size": 5.6, "baseline": "center"}
    for place, text in view.axes.hertz_ticks if hertz else ():
        sheet.draw_label(left - 0.05, top + place * height, text, align="right", **style)
    if hertz:
        sheet.draw_label(left - 0.05, top - 0.07, "Hz", align="right", **style)
    for place, text in view.axes.second_ticks:
        sheet.draw_label(left + place * width, top + height + 0.08, f"{text} s", align="center", **style)
    return AXIS_HEIGHT - 0.08


def describe_input(view: ImageView) -> tuple[str, str]:
    """Return the model and the image size, for the line under a title."""
    if view.axes is not None:
        return shorten_name(view.model, 48), view.axes.describe()
    height, width = view.pixels.shape[:2]
    return shorten_name(view.model, 48), f"{width}×{height} pixels"
