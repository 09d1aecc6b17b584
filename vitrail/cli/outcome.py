"""What came of a run, in the last lines that its command prints."""

from pathlib import Path
from typing import Any

from vitrail.cli.live import duration


def outcome(summary: dict[str, Any], directory: Path) -> str:
    """The result with its uncertainty, what it took, and where model and report are."""
    how = f"after {duration(summary['seconds'])} of training at {summary['images_per_second']:,.0f} images/s"
    said = without_labels(summary) if "method" in summary else with_labels(summary)
    return f"{said}, {how}\nmodel   {directory / 'model.safetensors'}\nreport  {directory / 'report.html'}"


def with_labels(summary: dict[str, Any]) -> str:
    """How often it is right."""
    name, value = ("mAP", summary["map"]) if "map" in summary else ("top-1", summary["top1"])
    low, high = summary.get("interval", (0.0, 1.0))
    return f"{name} {100 * value:.2f} % ({100 * low:.1f}–{100 * high:.1f}) on {summary['images']:,} {summary['split']} pictures"


def without_labels(summary: dict[str, Any]) -> str:
    """What its features are worth, as far as there are labels to tell."""
    if "knn" not in summary:
        near = f"cosine {summary['cosine']:.3f} with the teacher's features" if "cosine" in summary else None
        return f"{summary['method']}: {near or 'loss {loss:.4f}'.format(**summary)}, rank {summary['rank']:.1f}"
    low, high = summary["knn_interval"]
    return (
        f"{summary['method']}: nearest neighbours {100 * summary['knn']:.2f} % ({100 * low:.1f}–{100 * high:.1f}) on "
        f"{summary['images']:,} held-out pictures (raw pixels {100 * summary['knn_pixels']:.1f} %, "
        f"the untrained network {100 * summary['knn_random']:.1f} %)"
    )
