"""Inspection of a model on some images: a directory of figures, arrays and one page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vitrail import __version__, analysis
from vitrail.analysis import inputs
from vitrail.analysis.figures.attention import draw_attention, draw_relevance, draw_rollout
from vitrail.analysis.figures.heads import draw_distance, draw_heads
from vitrail.analysis.figures.image_view import ImageView, to_rgb
from vitrail.analysis.figures.tokens import draw_patches, draw_tokens
from vitrail.analysis.figures.weights import draw_filters, draw_positions
from vitrail.analysis.figures.windows import StagedView
from vitrail.analysis.heads import MAX_CELLS
from vitrail.analysis.output import RECORD_FILE, OutputFolder
from vitrail.analysis.page import page
from vitrail.analysis.page.data import choose_cells, encode_figure, pack_image
from vitrail.analysis.results import AttentionDistances, ModelView, PositionMaps
from vitrail.analysis.sounds import SoundAxes, draw_input, find_axes, flip_trace
from vitrail.data.sources.files import printable_path
from vitrail.nn.embed import PatchEmbedding
from vitrail.reports.html import clean_text
from vitrail.tasks.numbers import is_regression
from vitrail.utils.progress import ProgressCallback

# Views of one image, each with the views of `trace_image` that it needs.
IMAGE_VIEWS = {
    "attention": ("attention", "between", "distance"),
    "rollout": ("rollout", "relevance"),
    "tokens": ("colours", "similar", "norms"),
    "heads": ("entropy", "alike", "spectrum"),
    "patches": ("embedded", "positions"),
}
MODEL_VIEWS = ("distance", "positions", "filters")
VIEWS = ("attention", "rollout", "distance", "positions", "filters", "tokens", "heads", "patches")
DISTANCE_IMAGES = 128  # as in figure 7 (right)
FILTER_COUNT = 28  # as in figure 7 (left)


@dataclass(frozen=True)
class ModelInspector(inputs.InspectedModel):
    """Model with the options of an inspection."""

    DEFAULT_TERMINAL_VIEW: ClassVar[str] = "rollout"

    views: Sequence[str] = VIEWS
    layers: Sequence[int] | None = None  # from 1; None for all
    at: tuple[float, float] | None = None  # x and y in pixels of the preprocessed image; seconds and Hz of a sound
    target: int | None = None
    components: int = FILTER_COUNT  # principal filters

    def __post_init__(self) -> None:
        depth = self.model.config.depth
        for layer in self.layers or ():
            if not 1 <= layer <= depth:
                raise ValueError(f"layer must be 1 to {depth}, got {layer}")
        if self.at is not None and self.preprocessing.sound is None:
            (x, y), (height, width) = self.at, self.preprocessing.size
            if not (0 <= x < width and 0 <= y < height):
                raise ValueError(
                    f"--at must be 0,0 to {width - 1},{height - 1} of the preprocessed image, got {x:g},{y:g}"
                )
            if x % 1 or y % 1:
                raise ValueError(f"--at must be a whole pixel of the preprocessed image, got {x:g},{y:g}")

    @property
    def patch(self) -> int:
        """Return the side of a patch in pixels."""
        return self.model.embed.stride

    def choose_detail(self, images: int) -> int:
        """Return the cells of attention between patches that keep a page of so many images below its maximal size."""
        size = self.model.config.size
        return choose_cells(images, size.depth, size.heads, self.grid)

    def view_image(
        self,
        path: Path,
        on_progress: ProgressCallback | None = None,
        views: Sequence[str] | None = None,  # None for those of the inspection
        detail: int = MAX_CELLS,
    ) -> ImageView:
        """Trace one file; attention between patches is on a grid of at most `detail` cells."""
        pixels, axes, at = *self.load_pixels(path), None
        if self.at is not None and axes is None:
            x, y = self.at
            at = analysis.find_patch(self.model, int(x), int(y), size=self.preprocessing.size)
        elif self.at is not None and axes is not None:
            try:
                row, column = axes.find_cell(*self.at, self.grid)
            except ValueError as error:
                raise inputs.UnusableImageError(f"{clean_text(path.name)}: {error}") from None
            at = (self.grid[0] - 1 - row, column)
        trace = analysis.trace_image(
            self.model,
            self.preprocessing.normalise(pixels)[None].to(self.device),
            at=at,
            target=self.target,
            max_cells=detail,
            views=self.list_trace_views(self.views if views is None else views),
            on_progress=on_progress,
        )
        return ImageView(
            path.name,
            to_rgb(pixels.numpy()) if axes is None else draw_input(pixels[0].numpy(), axes),
            trace if axes is None else flip_trace(trace),
            self.model.labels,
            self.name,
            channels=self.model.embed.channels,
            is_linear_embedding=isinstance(self.model.embed, PatchEmbedding),
            is_sigmoid=self.is_sigmoid,
            has_numbers=is_regression(self.model),
            axes=axes,
        )

    def load_pixels(self, path: Path) -> tuple[Tensor, SoundAxes | None]:
        """Return the pixels of an image file, uint8 [C, H, W], or the spectrogram of a sound, float32, with its axes."""
        features = self.preprocessing.sound
        if features is None:
            return self.preprocessing.to_pixels(inputs.load_image_file(path)), None
        with inputs.load_sound_file(path) as sound, inputs.report_unusable(path):
            overlap = getattr(self.model.config.embed, "overlap", 0)
            axes = find_axes(sound.count_frames(features), self.preprocessing, self.grid, self.patch, overlap)
            return self.preprocessing.to_pixels(sound), axes

    @property
    def is_sigmoid(self) -> bool:
        """Return whether the model predicts several labels."""
        recipe = self.model.card.get("recipe")
        objective = recipe.get("objective") if isinstance(recipe, dict) else None
        return isinstance(objective, dict) and objective.get("loss") == "sigmoid"

    def list_trace_views(self, views: Sequence[str]) -> list[str]:
        """Return the views of `trace_image` that these views need."""
        return [
            name for view in views for name in (("relevance",) if view == "relevance" else IMAGE_VIEWS.get(view, ()))
        ]

    def plan_figures(self, view: ImageView) -> dict[str, Callable[[], bytes]]:
        """Return a drawing function per file name for the figures of one image."""
        return plan_figures(view, self.views, self.layers)

    def to_arrays(self, view: ImageView) -> dict[str, np.ndarray]:
        """Return the arrays of one image by name."""
        return analysis.to_arrays(view.trace)

    def pack_image(self, view: ImageView) -> dict[str, Any]:
        """Return the data of one image for the page."""
        return pack_image(view)

    def describe_positions(self, values: PositionMaps, png: bytes | None) -> page.ModelFigure:
        """Return the figure of the position embedding with its caption."""
        return page.make_positions_figure(values, self.model.position, png)

    def render_page(self, panels: list[page.ImagePanel], figures: list[page.ModelFigure]) -> str:
        """Return the page of the inspection."""
        return page.render_inspection_page(self.name, self.model, panels, figures)

    def view_model(
        self, view: str, files: Sequence[Path], skipped: list[str], on_progress: ProgressCallback | None = None
    ) -> ModelView:
        """Return a view of MODEL_VIEWS; distances over the readable files, `skipped` gets the reasons of the others."""
        if view == "positions":
            return analysis.extract_positions(self.model, self.grid)
        if view == "filters":
            return analysis.extract_filters(self.model, self.components)
        images = inputs.make_images(inputs.CheckedFiles.from_paths(map(str, files), self.preprocessing.media))
        batches = self.iter_batches(images, [], skipped, "measuring distances", on_progress)
        return analysis.measure_distances(self.model, batches)


@dataclass
class Inspection:
    """An inspection: its output folder, the images drawn and the reasons of those skipped."""

    inspector: ModelInspector
    folder: OutputFolder
    on_progress: ProgressCallback | None = None  # gets the number of finished images
    on_layer_progress: ProgressCallback | None = None  # that of the layers of one image
    images: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def write_record(self, finished: bool = False) -> None:
        """Write the record of the files so far."""
        views = list(self.inspector.views)
        self.folder.write_record({"vitrail": __version__, "model": self.inspector.name, "views": views}, finished)

    def write_images(self, paths: list[Path]) -> list[page.ImagePanel]:
        """Write figures and arrays of each image, and return its part of the page."""
        detail = self.inspector.choose_detail(len(paths))
        panels: list[page.ImagePanel] = []
        for number, (path, name) in enumerate(zip(paths, make_folder_names(paths), strict=True)):
            if self.on_progress:
                self.on_progress("images", number, len(paths))

            def report_layers(_: str, done: int, total: int, name: str = clean_text(path.name)) -> None:
                if self.on_layer_progress:
                    self.on_layer_progress(name, done, total)

            try:
                view = self.inspector.view_image(path, report_layers, detail=detail)
            except inputs.UnusableImageError as problem:
                self.skipped.append(str(problem))
                continue
            drawings = self.inspector.plan_figures(view)
            figures = {file: draw() for file, draw in drawings.items()}
            for file, png in figures.items():
                self.folder.write_file(f"{name}/{file}", png)
            arrays = {**self.inspector.to_arrays(view), "picture": view.pixels, **list_edges(view)}
            self.folder.save_arrays(f"{name}/arrays.npz", arrays)
            shown = [key for key in page.IMAGE_CAPTIONS if f"{key}.png" in figures]
            on_page = {key: encode_figure(figures[f"{key}.png"]) for key in shown}
            panels.append(
                page.ImagePanel(self.inspector.pack_image(view), [f"{name}/{file}" for file in figures], on_page)
            )
            self.images.append(view_to_dict(view, path, name, list(figures)))
            self.write_record()
        if self.on_progress:
            self.on_progress("images", len(paths), len(paths))
        if not panels:
            raise inputs.make_no_images_error(self.skipped, self.inspector.preprocessing.media)
        return panels

    def write_model_figures(self, files: list[Path]) -> list[page.ModelFigure]:
        """Write the figures of the model itself, and all their arrays in one file."""
        arrays, figures = {}, []
        for view in MODEL_VIEWS:
            if view not in self.inspector.views:
                continue
            values = self.inspector.view_model(view, files, self.skipped, self.on_progress)
            arrays |= {f"{view}.{key}": array for key, array in analysis.to_arrays(values).items()}
            if isinstance(values, AttentionDistances):
                png = draw_distance(values, self.inspector.name, self.inspector.patch)
                figure = page.ModelFigure("distance", "Mean attention distance", page.DISTANCE_CAPTION, png)
            elif isinstance(values, PositionMaps):
                figure = self.inspector.describe_positions(values, draw_positions(values, self.inspector.name))
            else:
                figure = page.make_filters_figure(values, draw_filters(values, self.inspector.name))
            figures.append(figure)
            if figure.png is not None:
                self.folder.write_file(f"{view}.png", figure.png)
        if arrays:
            self.folder.save_arrays("model.npz", arrays)
        return figures


def inspect_images(
    inspector: ModelInspector,
    files: Sequence[Path],
    out: Path,
    limit: int,
    on_progress: ProgressCallback | None = None,
    on_layer_progress: ProgressCallback | None = None,
) -> Inspection:
    """Trace up to `limit` of the files, evenly spaced, and measure distances over up to max(128, `limit`) of them."""
    inspection = Inspection(inspector, OutputFolder(out), on_progress, on_layer_progress)
    try:
        inspection.write_record()
        panels: list[page.ImagePanel] = []
        if any(view in IMAGE_VIEWS for view in inspector.views):
            panels = inspection.write_images(inputs.sample_evenly(files, limit))
        figures = inspection.write_model_figures(select_distance_files(files, limit))
        html = inspector.render_page(panels, figures)
        inspection.folder.write_file("index.html", html.encode("utf-8"))
        inspection.write_record(finished=True)
    except BaseException:
        inspection.folder.discard_if_empty()
        raise
    inspection.skipped = list(dict.fromkeys(inspection.skipped))
    return inspection


def select_distance_files(files: Sequence[Path], limit: int) -> list[Path]:
    """Return the files for attention distances: 128 as in the paper, or `limit` if more."""
    return inputs.sample_evenly(files, max(DISTANCE_IMAGES, limit))


def plan_figures(
    view: ImageView, views: Sequence[str], layers: Sequence[int] | None = None
) -> dict[str, Callable[[], bytes]]:
    """Return a drawing function per file name for the figures of one image that its trace has data for."""
    trace = view.trace
    figures = (
        ("attention", trace.attention, "attention.png", lambda: draw_attention(view, layers)),
        ("attention", trace.attention_at, "attention-at.png", lambda: draw_attention(view, layers, at=True)),
        ("rollout", trace.rollout, "rollout.png", lambda: draw_rollout(view)),
        ("rollout", trace.relevance, "relevance.png", lambda: draw_relevance(view)),
        ("tokens", trace.norms, "tokens.png", lambda: draw_tokens(view, layers)),
        ("heads", trace.entropy, "heads.png", lambda: draw_heads(view)),
        ("patches", trace.embedded, "patches.png", lambda: draw_patches(view)),
    )
    return {file: draw for name, values, file, draw in figures if name in views and values is not None}


def make_folder_names(paths: list[Path]) -> list[str]:
    """Return a unique folder name for each image, its file name with a number where needed."""
    taken = {"index.html", "model.npz", RECORD_FILE, *(f"{view}.png" for view in MODEL_VIEWS)}
    names = []
    for path in paths:
        plain = "".join(c if c.isalnum() or c in "-_. ()" else "_" for c in printable_path(path.stem))[:80]
        plain = plain.strip(" .") or "image"
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names


def list_edges(view: ImageView) -> dict[str, np.ndarray]:
    """Return the frequencies and times between the rows and columns of the maps of a sound; nothing for an image."""
    if view.axes is None:
        return {}
    (h, w), axes = view.trace.grid, view.axes
    hertz, seconds = [axes.hertz_at(k / h) for k in range(h + 1)], [axes.seconds_at(k / w) for k in range(w + 1)]
    return {"hertz": np.array(hertz, np.float32), "seconds": np.array(seconds, np.float32)}


def view_to_dict(view: ImageView, path: Path, folder: str, files: list[str]) -> dict[str, Any]:
    """Return the record of one image for JSON."""
    record: dict[str, Any] = {
        "picture": str(path),
        "folder": folder,
        "files": [*files, "arrays.npz"],
        "predicted": [{"class": k, "name": name, "probability": p} for k, name, p in view.top_predictions(5)],
    }
    if view.has_numbers and view.trace.logits is not None:
        record["values"] = {view.label(k): float(value) for k, value in enumerate(view.trace.logits)}
    if view.trace.at is not None:
        record["patch"] = {"row": view.trace.at[0], "column": view.trace.at[1]}
        record["patch"] |= {} if view.axes is None else {"where": view.patch_text}
    if isinstance(view, StagedView) and view.staged.pixel is not None:
        record["pixel"] = list(view.staged.pixel)
    if view.trace.target is not None:
        record["target"] = {"class": view.trace.target, "name": view.label(view.trace.target)}
    return record
