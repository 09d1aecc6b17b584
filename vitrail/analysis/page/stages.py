"""Interactive page of a model whose layers have grids of their own: attention inside windows, tokens of every layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.analysis.figures.windows import StagedView
from vitrail.analysis.page.data import THUMBNAIL_SIZE, encode_base64, encode_image, encode_offset_rows, encode_rows
from vitrail.analysis.page.page import (
    ImagePanel,
    ModelFigure,
    render_explorer,
    render_model_figures,
    render_shared_data,
)
from vitrail.analysis.stages import LayerTrace, StagedTrace
from vitrail.models.base import Model
from vitrail.reports.document import read_resource, render_footer, render_window, wrap_document
from vitrail.reports.html import Markup, clean_text, h, isolate
from vitrail.utils.text import format_image_count

HELP = (
    "Point at a position to see the attention from there, in every head of the layer. Click selects it, arrow keys move it, "
    "Escape deselects it."
)


def pack_staged_image(view: StagedView) -> dict[str, Any]:
    """Return all data of one image for the page, ready for JSON."""
    trace = view.staged
    stride = trace.strides[0]
    return {
        "name": clean_text(view.name),
        "image": encode_image(view.pixels),
        "thumb": encode_image(view.pixels, THUMBNAIL_SIZE),
        "grid": [side // stride for side in trace.size],
        "stride": stride,
        "at": None if trace.pixel is None else list(trace.pixel),
        "predictions": [{"name": clean_text(name), "score": round(p, 4)} for _, name, p in view.top_predictions(5)],
        "layers": [pack_layer(layer) for layer in trace.layers],
        "tokens": None if trace.norms is None else [pack_tokens(trace, layer) for layer in range(len(trace.norms))],
    }


def pack_layer(layer: LayerTrace) -> dict[str, Any]:
    """Return the attention of one layer for the page."""
    integers = {name: getattr(layer, name) for name in ("windows", "key_windows", "query_cells", "key_cells")}
    return {
        "grid": list(layer.grid),
        "stride": layer.stride,
        "key_grid": list(layer.key_grid),
        "key_stride": layer.key_stride,
        "count": int(layer.windows.max()) + 1,
        "queries": layer.query_cells.shape[1],
        "keys": layer.key_cells.shape[1],
        **{name: encode_base64(values.astype(np.int32)) for name, values in integers.items()},
        "attention": None if layer.attention is None else encode_rows(layer.attention),
        "received": encode_rows(layer.received.reshape(len(layer.received), -1)),
        "distance": [round(float(value), 1) for value in layer.distance],
    }


def pack_tokens(trace: StagedTrace, layer: int) -> dict[str, Any]:
    """Return the token maps after one layer for the page."""
    assert trace.norms is not None
    packed: dict[str, Any] = {"grid": list(trace.norms[layer].shape), "stride": trace.strides[layer]}
    if trace.colours is not None:
        packed["colours"] = encode_base64((trace.colours[layer].clip(0, 1) * 255).round().astype(np.uint8))
    for name in ("norms", "similar"):
        if (maps := getattr(trace, name)) is not None:
            packed[name] = encode_offset_rows(maps[layer].reshape(1, -1))
    return packed


def render_staged_page(name: str, model: Model, panels: list[ImagePanel], figures: Sequence[ModelFigure]) -> str:
    """Return the page of a model, its images and its own figures."""
    script = "\n".join(read_resource("vitrail.analysis.page", part) for part in ("maps.js", "explorer.js", "stages.js"))
    config = model.config
    facts = [
        config.describe(),
        f"{config.depth} layers",
        f"{config.image_size[1]}×{config.image_size[0]} pixels",
        *([format_image_count(len(panels))] if panels else []),
    ]
    opening = [
        h("p", [h("span", fact) for fact in facts], class_="kicker"),
        h("h1", "Attention of ", isolate(name)),
        h("p", HELP, class_="lead") if any(panel.data["layers"] for panel in panels) else Markup(""),
    ]
    body = [
        h("a", "To the image", href="#explore", class_="skip"),
        h("header", render_window(name), h("div", opening, class_="inside")),
        h(
            "main",
            [render_explorer(panels) if panels else None, render_model_figures(figures)],
            class_="inside",
            id="main",
        ),
        render_footer("The arrays behind every map are beside this page, as .npz files."),
        render_shared_data({"layers": config.depth}, panels) if panels else None,
        h("script", Markup(script)) if panels else None,
    ]
    return wrap_document(f"Attention of {name}", body, script, [read_resource("vitrail.analysis.page", "page.css")])
