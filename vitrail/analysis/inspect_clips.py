"""Inspection of a model of clips on videos: a strip of frames with attention over time for each, and a page of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail import __version__
from vitrail.analysis.clips import ClipTrace, trace_clip
from vitrail.analysis.figures.clips import draw_clip
from vitrail.analysis.inputs import make_no_images_error, sample_evenly
from vitrail.analysis.inspect import make_folder_names
from vitrail.analysis.output import OutputFolder
from vitrail.analysis.page.clips import pack_clip, render_clips_page
from vitrail.analysis.page.page import ImagePanel
from vitrail.analysis.results import space_evenly
from vitrail.data.decode import IMAGE_ERRORS, format_image_error, name_image_errors
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.predict.inputs import ImageInputs
from vitrail.inference import top_classes
from vitrail.models.base import Model
from vitrail.tasks.numbers import is_regression
from vitrail.utils.progress import ProgressCallback

TOP_CLASSES = 5


@dataclass(frozen=True)
class ClipInspector:
    """A model of clips with the options of an inspection."""

    model: Model
    preprocessing: Preprocessing
    name: str
    layers: Sequence[int] | None = None  # from 1; None for all
    is_sigmoid: bool = False

    def trace(self, pixels: Tensor) -> ClipTrace:
        """Return the attention of a clip, uint8 [C, T, H, W]."""
        return trace_clip(self.model, self.preprocessing, pixels, self.layers)

    def list_predictions(self, trace: ClipTrace) -> list[dict[str, Any]]:
        """Return the most probable classes, or the numbers of a regression model; none for features."""
        labels, classes = self.model.labels, self.model.config.classes
        if classes is None:
            return []
        names = labels or tuple(map(str, range(classes)))
        if is_regression(self.model):
            return [{"name": name, "value": float(value)} for name, value in zip(names, trace.outputs, strict=True)]
        found = top_classes(trace.outputs, self.is_sigmoid, min(TOP_CLASSES, classes))
        return [{"class": index, "name": names[index], "probability": score} for index, score in found]


def describe_prediction(predicted: Sequence[dict[str, Any]]) -> str:
    """Return the first prediction in words."""
    if not predicted:
        return ""
    first = predicted[0]
    return (
        f"{first['name']} {first['value']:.4g}" if "value" in first else f"{first['name']}, {first['probability']:.0%}"
    )


def list_shares(trace: ClipTrace) -> dict[str, list[float]]:
    """Return the share of the attention that each time step gets, by layer; of divided attention, that over time."""
    maps = trace.find_maps("time" if "time" in trace.kinds else "attention")
    return {str(each.layer): each.steps.round(6).tolist() for each in maps}


@dataclass(frozen=True)
class ClipInspection:
    """The files that were written, a record of each video, and the reasons of those skipped."""

    files: list[str]
    videos: list[dict[str, Any]]
    skipped: list[str]


def inspect_videos(
    inspector: ClipInspector, inputs: ImageInputs, out: Path, limit: int, on_progress: ProgressCallback | None = None
) -> ClipInspection:
    """Write a strip and the arrays of up to `limit` of the videos, evenly spaced, and a page."""
    folder = OutputFolder(out)
    chosen = [inputs.name(index) for index in space_evenly(len(inputs), limit)]
    indices = sample_evenly(range(len(inputs)), limit)
    videos, skipped, panels = list[dict[str, Any]](), list[str](), list[ImagePanel]()
    metadata = {"vitrail": __version__, "model": inspector.name, "views": ["attention"]}
    try:
        folder.write_record(metadata)
        for number, (index, name) in enumerate(zip(indices, make_folder_names(list(map(Path, chosen))), strict=True)):
            if on_progress:
                on_progress("videos", number, len(indices))
            path = inputs.name(index)
            try:
                with name_image_errors(path), inputs.open(index) as video:
                    pixels = inspector.preprocessing.to_pixels(video)
            except IMAGE_ERRORS as error:
                skipped.append(f"{path}: {format_image_error(error, path)}")
                continue
            trace = inspector.trace(pixels)
            predicted = inspector.list_predictions(trace)
            words = describe_prediction(predicted)
            png = draw_clip(trace, Path(path).name, inspector.name, words, inspector.layers)
            folder.write_file(f"{name}/attention.png", png)
            folder.save_arrays(f"{name}/arrays.npz", trace.to_arrays())
            panels.append(ImagePanel(pack_clip(trace, Path(path).name, words, predicted), [f"{name}/attention.png"]))
            files = ["attention.png", "arrays.npz"]
            found = {"video": path, "folder": name, "files": files, "predicted": predicted}
            videos.append(found | {"steps": list_shares(trace)})
            folder.write_record(metadata)
        if not videos:
            raise make_no_images_error(skipped)
        size = (*inspector.model.config.input_size[:1], *inspector.preprocessing.size)
        page = render_clips_page(inspector.name, inspector.model, panels, size)
        folder.write_file("index.html", page.encode("utf-8"))
        folder.write_record(metadata, finished=True)
    except BaseException:
        folder.discard_if_empty()
        raise
    return ClipInspection(sorted(folder.written), videos, skipped)
