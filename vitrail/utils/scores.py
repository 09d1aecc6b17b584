"""Names of metrics, and how their values are shown: the one table of reports and of the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.utils.text import format_interval, format_percent, is_interval, is_number


@dataclass(frozen=True)
class Metric:
    """A metric, as it is shown. A run can be selected by one that has a title."""

    label: str  # in tables
    is_share: bool = True  # a fraction of 1, shown in per cent
    has_tile: bool = False  # at the top of a report, after the score
    has_bar: bool = True  # in its tile, from 0 to 1
    title: str = ""  # of a score
    phrase: str = ""  # the same within a sentence
    short: str = ""  # the same in a narrow line


METRICS = {  # in the order of tables
    "miou": Metric("Mean intersection over union (mIoU)", title="Mean IoU", phrase="mean IoU", short="mean IoU"),
    "top1": Metric("Top-1 accuracy", title="Top-1 accuracy", phrase="top-1 accuracy", short="top-1"),
    "map": Metric("Mean average precision (mAP)", title="mAP", phrase="mAP", short="mAP"),
    "top5": Metric("Top-5 accuracy", has_tile=True),
    "balanced_accuracy": Metric("Balanced accuracy", has_tile=True),
    "f1": Metric("F1, mean over classes (macro)"),
    "micro_f1": Metric("F1 over all labels (micro)", has_tile=True),
    "calibration_error": Metric("Expected calibration error", has_tile=True, has_bar=False),
    "pixel_accuracy": Metric("Pixel accuracy", has_tile=True),
    "mean_class_accuracy": Metric("Pixel accuracy, mean over classes"),
    "dice": Metric("Dice coefficient, mean over classes"),
    "boundary_iou": Metric("Boundary IoU, mean over classes", has_tile=True),
    "r2": Metric("Coefficient of determination (R²)", is_share=False, title="R²", phrase="R²", short="R²"),
    "mae": Metric("Mean absolute error (MAE)", is_share=False, has_tile=True, has_bar=False),
    "rmse": Metric("Root mean squared error (RMSE)", is_share=False, has_tile=True, has_bar=False),
    "image_to_text_1": Metric(
        "Recall at 1, image to text",
        title="Image-to-text recall at 1",
        phrase="image-to-text recall at 1",
        short="image→text",
    ),
    "image_to_text_5": Metric("Recall at 5, image to text", has_tile=True),
    "text_to_image_1": Metric("Recall at 1, text to image", has_tile=True),
    "text_to_image_5": Metric("Recall at 5, text to image", has_tile=True),
    "loss": Metric("Cross-entropy", is_share=False, has_bar=False),
}
SCORES = ("miou", "map", "r2", "image_to_text_1", "top1")  # that a run is selected by, the most specific first


def find_score(metrics: Mapping[str, Any]) -> str:
    """Return the name of the metric that a run with these metrics is selected by."""
    undefined = "r2" if "rmse" in metrics or "target_rmse" in metrics else "top1"
    return next((name for name in SCORES if metrics.get(name) is not None), undefined)


def is_share(name: str) -> bool:
    """Return whether a score is a fraction of images or pixels, and so a percentage."""
    return name not in METRICS or METRICS[name].is_share


def format_score(name: str, value: Any, digits: int = 1) -> str:
    """Return a score as a percentage, or as a number where it is none: 0.912."""
    if is_share(name):
        return format_percent(value, digits)
    return f"{value:.{digits + 2}f}" if is_number(value) else "–"


def format_score_interval(name: str, interval: Any, digits: int = 1) -> str:
    """Return the interval of a score: 83.5–90.5 in per cent, or 0.88 to 0.93."""
    if is_share(name) or not is_interval(interval):
        return format_interval(interval, digits)
    return " to ".join(f"{end:.{digits + 2}f}" for end in interval)
