"""Inspection of models whose layers have grids of their own: the same files and page, with attention inside windows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitrail import analysis
from vitrail.analysis import inputs
from vitrail.analysis.figures.heads import draw_staged_heads
from vitrail.analysis.figures.image_view import ImageView, to_rgb
from vitrail.analysis.figures.tokens import draw_patches
from vitrail.analysis.figures.windows import StagedView, draw_staged_tokens, draw_windows
from vitrail.analysis.inspect import VIEWS, ModelInspector
from vitrail.analysis.page import page
from vitrail.analysis.page.data import IMAGE_RESERVE_CHARACTERS, MAX_PAGE_CHARACTERS
from vitrail.analysis.page.stages import pack_staged_image, render_staged_page
from vitrail.analysis.record import require_attention
from vitrail.analysis.results import ImageTrace, ModelView, PositionMaps
from vitrail.analysis.stages import (
    MAX_WEIGHTS,
    extract_stage_positions,
    measure_stage_distances,
    stack_heads,
    staged_arrays,
    trace_stages,
)
from vitrail.models.base import Model, refuse
from vitrail.nn.shape import Grid
from vitrail.tasks.numbers import is_regression
from vitrail.utils.progress import ProgressCallback

# Views of one image, each with the views of `trace_stages` that it needs.
STAGED_IMAGE_VIEWS = {
    "attention": ("attention",),
    "tokens": ("colours", "similar", "norms"),
    "heads": ("attention",),
    "patches": ("embedded",),
}
UNSUPPORTED_VIEWS = (
    "rollout",
    "relevance",
)  # they follow tokens that attend to all others, from the last layer to the first


def choose_inspector(
    model: Model, views: Sequence[str] | None, others: Sequence[str] = ()
) -> tuple[Callable[..., ModelInspector], tuple[str, ...]]:
    """Return the inspector of a model's family and the views to draw; raise Unsupported for a view that it lacks.

    `views` are those of the user, None for all; `others` are checked too.
    """
    sounds = getattr(model.preprocessing, "sound", None) is not None
    if sounds and not model.config.has_tokens:
        raise refuse(model.config, "inspecting a model of sounds", "use a Vision Transformer")
    if model.config.has_tokens:
        return ModelInspector, tuple(views or VIEWS)
    require_attention(model)
    for view in (*(views or ()), *others):
        if view in UNSUPPORTED_VIEWS:
            raise refuse(model.config, f"the view {view}", "use attention or tokens")
    return StagedInspector, tuple(views or (view for view in VIEWS if view not in UNSUPPORTED_VIEWS))


@dataclass(frozen=True)
class StagedInspector(ModelInspector):
    """Model with stages or windows, and the options of an inspection."""

    DEFAULT_TERMINAL_VIEW: ClassVar[str] = "attention"
    POSITION_CAPTION: ClassVar[str] = (
        "Each small map is the learned bias that one head adds to its attention scores, by offset in rows and columns inside a "
        "window; the centre is the cell itself. Orange increases attention, violet decreases it. A row per layer; later stages "
        "have more heads, and their cells cover more pixels."
    )

    if TYPE_CHECKING:
        model: Model  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None:
            raise refuse(self.model.config, "--target", "relevance needs patch tokens that attend to all others")

    @property
    def grid(self) -> Grid:
        return self.model.attention_layers(self.preprocessing.size)[0].queries.grid

    @property
    def patch(self) -> int:
        return self.model.attention_layers(self.preprocessing.size)[0].queries.stride

    def choose_detail(self, images: int) -> int:
        """Return the attention weights of an image that keep a page of so many images below its maximal size."""
        return max(1, min(MAX_WEIGHTS, int((MAX_PAGE_CHARACTERS / images - IMAGE_RESERVE_CHARACTERS) * 2 / 3)))

    def view_image(
        self,
        path: Path,
        on_progress: ProgressCallback | None = None,
        views: Sequence[str] | None = None,
        detail: int = MAX_WEIGHTS,
    ) -> ImageView:
        """Trace one file; `detail` is the number of attention weights that are kept."""
        pixels = self.preprocessing.to_pixels(inputs.load_image_file(path))
        at = None if self.at is None else (int(self.at[0]), int(self.at[1]))
        names = self.list_trace_views(self.views if views is None else views)
        image = self.preprocessing.normalise(pixels)[None].to(self.device)
        staged = trace_stages(self.model, image, at=at, views=names, max_weights=detail)
        if on_progress is not None:
            on_progress("layers", self.model.config.depth, self.model.config.depth)
        entropy = stack_heads(layer.entropy for layer in staged.layers) if staged.layers else None
        trace = ImageTrace(
            self.grid, self.patch, 0, "", logits=staged.logits, embedded=staged.embedded, entropy=entropy
        )
        return StagedView(
            path.name,
            to_rgb(pixels.numpy()),
            trace,
            self.model.labels,
            self.name,
            channels=self.model.config.channels,
            is_sigmoid=self.is_sigmoid,
            has_numbers=is_regression(self.model),
            staged=staged,
        )

    def list_trace_views(self, views: Sequence[str]) -> list[str]:
        return [name for view in views for name in STAGED_IMAGE_VIEWS.get(view, ())]

    def view_model(
        self, view: str, files: Sequence[Path], skipped: list[str], on_progress: ProgressCallback | None = None
    ) -> ModelView:
        if view == "positions":
            return extract_stage_positions(self.model)
        if view == "filters":
            return analysis.extract_filters(self.model, self.components)
        images = inputs.make_images(inputs.CheckedFiles.from_paths(map(str, files)))
        batches = self.iter_batches(images, [], skipped, "measuring distances", on_progress)
        return measure_stage_distances(self.model, batches)

    def plan_figures(self, view: ImageView) -> dict[str, Callable[[], bytes]]:
        assert isinstance(view, StagedView)
        trace, layers = view.staged, self.layers
        figures = (
            ("attention", bool(trace.layers), "attention.png", lambda: draw_windows(view, layers)),
            ("attention", trace.pixel is not None, "attention-at.png", lambda: draw_windows(view, layers, at=True)),
            ("tokens", trace.norms is not None, "tokens.png", lambda: draw_staged_tokens(view, layers)),
            ("heads", bool(trace.layers), "heads.png", lambda: draw_staged_heads(view, trace)),
            ("patches", trace.embedded is not None, "patches.png", lambda: draw_patches(view)),
        )
        return {file: draw for name, has_values, file, draw in figures if name in self.views and has_values}

    def to_arrays(self, view: ImageView) -> dict[str, np.ndarray]:
        assert isinstance(view, StagedView)
        return staged_arrays(view.staged)

    def pack_image(self, view: ImageView) -> dict[str, Any]:
        assert isinstance(view, StagedView)
        return pack_staged_image(view)

    def describe_positions(self, values: PositionMaps, png: bytes | None) -> page.ModelFigure:
        caption = self.POSITION_CAPTION if values.bias is not None else page.POSITION_CAPTIONS[values.kind]
        return page.ModelFigure("positions", "Position embedding", caption, png)

    def render_page(self, panels: list[page.ImagePanel], figures: list[page.ModelFigure]) -> str:
        return render_staged_page(self.name, self.model, panels, figures)
