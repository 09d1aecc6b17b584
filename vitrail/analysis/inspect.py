"""Inspection of a model on some images: a directory of figures, arrays and one page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.analysis import extract_filters, extract_positions, find_patch, measure_distances, to_arrays, trace_image
from vitrail.analysis.distance import MAX_CELLS
from vitrail.analysis.figures.heads import draw_distance
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.figures.registry import IMAGE_VIEWS, MODEL_VIEWS, VIEWS, plan_figures, required_traces
from vitrail.analysis.figures.weights import draw_filters, draw_positions
from vitrail.analysis.inputs import (
    ProgressCallback,
    UnusableImageError,
    ignore_progress,
    iter_image_batches,
    load_image_file,
    make_folder_names,
    make_no_images_error,
    prepare_image,
    sample_evenly,
)
from vitrail.analysis.output import OutputFolder
from vitrail.analysis.page.captions import (
    IMAGE_CAPTIONS,
    ModelFigure,
    make_distance_figure,
    make_filters_figure,
    make_positions_figure,
)
from vitrail.analysis.page.data import choose_cells, encode_figure, pack_image
from vitrail.analysis.page.page import ImagePanel, render_inspection_page
from vitrail.analysis.results import AttentionDistances, PositionMaps, PrincipalFilters
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import TokenModel
from vitrail.nn.embed import PatchEmbedding
from vitrail.nn.shape import Grid
from vitrail.reports.html import clean_text

DISTANCE_IMAGES = 128  # as in figure 7 (right)
FILTER_COUNT = 28  # as in figure 7 (left)


@dataclass(frozen=True)
class ModelInspector:
    """Model with its preprocessing and the options of an inspection."""

    model: TokenModel
    preprocessing: Preprocessing
    name: str
    views: Sequence[str] = VIEWS
    layers: Sequence[int] | None = None  # from 1; None for all
    at: tuple[int, int] | None = None  # x and y in pixels of the preprocessed image
    target: int | None = None
    components: int = FILTER_COUNT  # principal filters

    def __post_init__(self) -> None:
        depth = len(self.model.blocks)
        for layer in self.layers or ():
            if not 1 <= layer <= depth:
                raise ValueError(f"layer must be 1 to {depth}, got {layer}")
        if self.at is not None:
            (x, y), (height, width) = self.at, self.preprocessing.size
            if not (0 <= x < width and 0 <= y < height):
                raise ValueError(f"--at must be 0,0 to {width - 1},{height - 1} of the preprocessed image, got {x},{y}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def grid(self) -> Grid:
        """Return the grid of patches at the preprocessing size."""
        height, width = (side // self.model.embed.stride for side in self.preprocessing.size)
        return height, width

    def view_image(
        self,
        path: Path,
        on_progress: ProgressCallback | None = None,
        views: Sequence[str] | None = None,
        max_cells: int = MAX_CELLS,
    ) -> ImageView:
        """Trace one file; attention between patches is on a grid of at most `max_cells` cells."""
        image, pixels = prepare_image(path, self.preprocessing)
        trace = trace_image(
            self.model,
            image[None].to(self.device),
            at=None if self.at is None else find_patch(self.model, *self.at, size=self.preprocessing.size),
            target=self.target,
            max_cells=max_cells,
            views=required_traces(self.views) if views is None else views,
            on_progress=on_progress,
        )
        recipe = self.model.card.get("recipe")
        objective = recipe.get("objective") if isinstance(recipe, dict) else None
        return ImageView(
            path.name,
            pixels,
            trace,
            self.model.labels,
            self.name,
            channels=self.model.embed.channels,
            is_linear_embedding=isinstance(self.model.embed, PatchEmbedding),
            is_sigmoid=isinstance(objective, dict) and objective.get("loss") == "sigmoid",
        )

    def measure_distances(
        self, files: Sequence[Path], on_skip: Callable[[str], None], on_progress: ProgressCallback = ignore_progress
    ) -> AttentionDistances:
        """Return the mean attention distance over the readable files; `on_skip` gets the reasons of the others."""

        def load_pixels(index: int) -> torch.Tensor:
            return self.preprocessing.to_pixels(load_image_file(files[index]))

        patches, report = self.grid[0] * self.grid[1], partial(on_progress, "measuring distances")
        batches = iter_image_batches(load_pixels, len(files), self.preprocessing, patches, self.device, on_skip, report)
        return measure_distances(self.model, batches)

    def extract_positions(self) -> PositionMaps:
        """Return the position maps on the grid of the preprocessing size."""
        return extract_positions(self.model, self.grid)

    def extract_filters(self) -> PrincipalFilters:
        return extract_filters(self.model, self.components)


@dataclass
class InspectionResult:
    """Files written by an inspection, and the skipped images."""

    directory: Path
    images: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def add_skipped(self, problem: str) -> None:
        """Add the reason of an unreadable image, once."""
        if problem not in self.skipped:
            self.skipped.append(problem)


def inspect_images(
    inspector: ModelInspector,
    files: Sequence[Path],
    out: Path,
    limit: int,
    on_progress: ProgressCallback = ignore_progress,
    on_layer_progress: ProgressCallback = ignore_progress,
) -> InspectionResult:
    """Trace up to `limit` of the files, evenly spaced, and measure distances over up to max(128, `limit`) of them.

    `on_progress` gets the number of finished images, `on_layer_progress` that of the layers of one image.
    """
    folder = OutputFolder(out)
    try:
        return _write_inspection(inspector, files, folder, limit, on_progress, on_layer_progress)
    except BaseException:
        folder.discard_if_empty()
        raise


def _write_inspection(
    inspector: ModelInspector,
    files: Sequence[Path],
    folder: OutputFolder,
    limit: int,
    on_progress: ProgressCallback,
    on_layer_progress: ProgressCallback,
) -> InspectionResult:
    """Write everything into the folder."""
    chosen = sample_evenly(files, limit)
    written = InspectionResult(folder.path)
    metadata = {"vitrail": __version__, "model": inspector.name, "views": list(inspector.views)}
    folder.write_record(metadata)
    panels: list[ImagePanel] = []
    size = inspector.model.config.size
    cells = choose_cells(len(chosen), size.depth, size.heads, inspector.grid)
    if any(view in IMAGE_VIEWS for view in inspector.views):
        for number, (path, name) in enumerate(zip(chosen, make_folder_names(chosen), strict=True)):
            on_progress("images", number, len(chosen))
            try:
                report = partial(_report_layers, on_layer_progress, path.name)
                view = inspector.view_image(path, report, max_cells=cells)
            except UnusableImageError as problem:
                written.add_skipped(str(problem))
                continue
            figures = plan_figures(view, inspector.views, inspector.layers)
            on_page: dict[str, str] = {}
            for file, draw in figures.items():
                png = draw()
                folder.write_file(f"{name}/{file}", png)
                if (key := file.removesuffix(".png")) in IMAGE_CAPTIONS:
                    on_page[key] = encode_figure(png)
            folder.save_arrays(f"{name}/arrays.npz", {**to_arrays(view.trace), "picture": view.pixels})
            panels.append(ImagePanel(pack_image(view), [f"{name}/{file}" for file in figures], on_page))
            written.images.append(view_to_dict(view, path, name, list(figures)))
            folder.write_record(metadata)
        on_progress("images", len(chosen), len(chosen))
        if not panels:
            raise make_no_images_error(written.skipped)
    models = _write_model_figures(inspector, select_distance_files(files, limit), folder, written, on_progress)
    page = render_inspection_page(inspector.name, inspector.model, panels, models)
    folder.write_file("index.html", page.encode("utf-8"))
    folder.write_record(metadata, finished=True)
    written.files = sorted(folder.written)
    return written


def select_distance_files(files: Sequence[Path], limit: int) -> list[Path]:
    """Return the files for attention distances: 128 as in the paper, or `limit` if more."""
    return sample_evenly(files, max(DISTANCE_IMAGES, limit))


def view_to_dict(shown: ImageView, path: Path, folder: str, files: list[str]) -> dict[str, Any]:
    """Return the record of one image for JSON."""
    record: dict[str, Any] = {
        "picture": str(path),
        "folder": folder,
        "files": [*files, "arrays.npz"],
        "predicted": [{"class": k, "name": name, "probability": p} for k, name, p in shown.top_predictions(5)],
    }
    if shown.trace.at is not None:
        record["patch"] = {"row": shown.trace.at[0], "column": shown.trace.at[1]}
    if shown.trace.target is not None:
        record["target"] = {"class": shown.trace.target, "name": shown.label(shown.trace.target)}
    return record


def _report_layers(on_layer_progress: ProgressCallback, name: str, _: str, done: int, total: int) -> None:
    """Report the finished layers under the name of the image."""
    on_layer_progress(clean_text(name), done, total)


def _write_model_figures(
    inspector: ModelInspector,
    files: list[Path],
    folder: OutputFolder,
    written: InspectionResult,
    on_progress: ProgressCallback,
) -> list[ModelFigure]:
    """Write the figures of the model itself, and all their arrays in one file."""
    if not any(view in MODEL_VIEWS for view in inspector.views):
        return []
    results: dict[str, AttentionDistances | PositionMaps | PrincipalFilters] = {}
    figures: list[ModelFigure] = []
    if "distance" in inspector.views:
        results["distance"] = distances = inspector.measure_distances(files, written.add_skipped, on_progress)
        figures.append(make_distance_figure(draw_distance(distances, inspector.name, inspector.model.embed.stride)))
    if "positions" in inspector.views:
        results["positions"] = maps = inspector.extract_positions()
        figures.append(make_positions_figure(maps, inspector.model.position, draw_positions(maps, inspector.name)))
    if "filters" in inspector.views:
        results["filters"] = filters = inspector.extract_filters()
        figures.append(make_filters_figure(filters, draw_filters(filters, inspector.name)))
    arrays = {f"{view}.{key}": value for view, result in results.items() for key, value in to_arrays(result).items()}
    folder.save_arrays("model.npz", arrays)
    for figure in figures:
        if figure.png is not None:
            folder.write_file(f"{figure.view}.png", figure.png)
    return figures
