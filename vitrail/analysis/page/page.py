"""Interactive page of an inspection: attention, rollout, relevance and tokens of the images, and figures of the model."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitrail.analysis.page.data import encode_base64
from vitrail.analysis.results import PositionMaps, PrincipalFilters
from vitrail.models.base import TokenModel
from vitrail.nn.position import FixedPositionEmbedding, Learned2DTable, PositionEmbedding
from vitrail.reports.colours import HEAT_CMAP, NORM_CMAP, SIMILARITY_CMAP, colour_table
from vitrail.reports.document import read_resource, render_footer, render_window, wrap_document
from vitrail.reports.html import Markup, h, isolate, join_markup
from vitrail.utils.text import format_image_count

HELP = "Point at a patch to see the attention of each head from there. Click selects it, arrow keys move it, Escape deselects it."

# Title and caption of the figures of one image that are embedded in the page.
IMAGE_CAPTIONS = {
    "heads": (
        "Differences between heads",
        "Entropy of the attention of each head, spectrum of the token maps of each layer, and similarity of the heads of a "
        "layer: 1 if two attend to the same tokens.",
    ),
    "patches": (
        "Patch embedding",
        "Equation 1 of the paper: the image is cut into patches, each is projected to a token, and position embeddings are "
        "added. Tokens are drawn by their first three principal components.",
    ),
}
POSITION_MAP_NOTE = "Each small map is one position: the cosine similarity of its embedding with all others. "


@dataclass(frozen=True)
class ImagePanel:
    """One image on the page: its data, the files beside the page, and the embedded figures."""

    data: dict[str, Any]
    files: Sequence[str] = ()
    figures: Mapping[str, str] = field(default_factory=dict)  # data URI by view


@dataclass(frozen=True)
class ModelFigure:
    """Figure of the model itself; without a PNG there is only the caption."""

    view: str
    title: str
    caption: str
    png: bytes | None


def render_inspection_page(
    model: str, vit: TokenModel, panels: Sequence[ImagePanel], figures: Sequence[ModelFigure]
) -> str:
    """Return the page of a model, its images and its own figures."""
    script = "\n".join(read_resource("vitrail.analysis.page", name) for name in ("maps.js", "page.js"))
    contents = [_render_explorer(panels) if panels else None, _render_model_figures(figures)]
    body = [
        h("a", "To the image", href="#explore", class_="skip"),
        h("header", render_window(model), h("div", _render_opening(model, vit, panels), class_="inside")),
        h("main", contents, class_="inside", id="main"),
        render_footer("The arrays behind every map are beside this page, as .npz files."),
        _render_data(vit, panels) if panels else None,
        h("script", Markup(script)) if panels else None,
    ]
    return wrap_document(f"Attention of {model}", body, script, [read_resource("vitrail.analysis.page", "page.css")])


def _render_opening(model: str, vit: TokenModel, panels: Sequence[ImagePanel]) -> list[Markup]:
    size, config, count = vit.config.size, vit.config, len(panels)
    facts = [
        f"{size.depth} layers of {size.heads} heads",
        f"patches of {config.embed.stride}×{config.embed.stride} pixels",
        f"{config.image_size[1]}×{config.image_size[0]} pixels",
        *([format_image_count(count)] if count else []),
    ]
    return [
        h("p", [h("span", fact) for fact in facts], class_="kicker"),
        h("h1", "Attention of ", isolate(model)),
        h("p", HELP, class_="lead") if any("between" in panel.data for panel in panels) else Markup(""),
    ]


def _render_explorer(panels: Sequence[ImagePanel]) -> Markup:
    return h(
        "section",
        h("h2", "Explore", class_="unseen"),
        _render_chooser(panels) if len(panels) > 1 else None,
        h("div", _render_tabs(), class_="tabs", role="tablist", aria_label="View"),
        h(
            "div",
            h(
                "div",
                h(
                    "div",
                    h(
                        "canvas",
                        id="stage",
                        tabindex="0",
                        role="application",
                        aria_label="The image with the map over it: arrow keys move the patch, Escape deselects it",
                        aria_describedby="told",
                    ),
                    class_="frame-of-stage",
                ),
                h(
                    "div",
                    h("span", "0", id="least"),
                    h("canvas", id="key", aria_hidden="true"),
                    h("span", id="most"),
                    class_="scale",
                ),
                h("p", id="told", class_="told", role="status", aria_live="polite"),
                class_="stage",
            ),
            h("div", _render_controls(), class_="panel", id="panel", role="tabpanel", aria_labelledby="tab-attention"),
            class_="explorer",
        ),
        [
            _render_image_figure(view, *caption)
            for view, caption in IMAGE_CAPTIONS.items()
            if any(view in panel.figures for panel in panels)
        ],
        h("p", id="files", class_="note"),
        h("noscript", h("p", "This page needs JavaScript; the PNG figures beside it show the same.")),
        id="explore",
        aria_label="Explore",
    )


def _render_tabs() -> list[Markup]:
    names = (("attention", "Attention"), ("rollout", "Rollout"), ("relevance", "Relevance"), ("tokens", "Tokens"))
    return [
        h(
            "button",
            word,
            type="button",
            role="tab",
            id=f"tab-{key}",
            data_tab=key,
            aria_controls="panel",
            aria_selected="false",
        )
        for key, word in names
    ]


def _render_chooser(panels: Sequence[ImagePanel]) -> Markup:
    choices = [
        h(
            "label",
            h("input", type="radio", name="picture", value=str(number), checked=number == 0),
            h("img", src=panel.data["thumb"], alt=""),
            h("span", isolate(panel.data["name"])),
        )
        for number, panel in enumerate(panels)
    ]
    return h("div", choices, class_="chooser", role="radiogroup", aria_label="Image")


def _render_slider(key: str, word: str, **attributes: Any) -> Markup:
    return h(
        "label",
        h("span", word),
        h("input", type="range", id=key, step="1", **attributes),
        h("output", id=f"{key}-said", for_=key),
        class_="slider",
        data_for=key,
    )


def _render_controls() -> list[Markup]:
    return [
        h("p", h("b", id="said"), h("span", id="file"), class_="verdict"),
        h("p", id="reading", class_="reading"),
        h(
            "div",
            h("button", "Class token", type="button", id="whole", aria_pressed="true"),
            h("button", "A patch", type="button", id="patch", aria_pressed="false"),
            class_="switch",
            id="from",
            role="group",
            aria_label="Query",
        ),
        h(
            "div",
            [
                h("button", word, type="button", data_kind=key, aria_pressed="false")
                for key, word in (("colours", "Components"), ("norms", "Norm"), ("similar", "Similarity"))
            ],
            class_="switch",
            id="kinds",
            role="group",
            aria_label="Token map",
        ),
        h(
            "div",
            _render_slider("layer", "Layer", min="1", max="1", value="1"),
            _render_slider("head", "Head", min="0", max="1", value="0"),
            _render_slider("strength", "Map", min="0", max="100", value="100"),
            class_="sliders",
        ),
        h("dl", id="odds", class_="odds", aria_label="Predictions"),
        h("div", id="heads", class_="heads", role="group", aria_label="Heads of this layer"),
        h(
            "details",
            h("summary", "All layers and heads"),
            h("div", h("canvas", id="all", role="img", aria_label="A map per head, a column per layer"), class_="all"),
            h(
                "p",
                "A column per layer, a row per head, each map scaled to its own maximum. Click one to see it above.",
                class_="note",
            ),
            open=True,
            id="every",
        ),
        h("p", id="coarse", class_="note"),
    ]


def _render_image_figure(view: str, title: str, words: str) -> Markup:
    """Return a figure of the selected image; the script sets its source."""
    return h(
        "div",
        h("h2", title),
        h("p", words),
        h("figure", h("img", alt=title), class_="paper"),
        class_="of-picture",
        data_view=view,
        hidden=True,
    )


def _render_model_figures(figures: Sequence[ModelFigure]) -> list[Markup]:
    sections = []
    for figure in figures:
        image, title = None, figure.title
        if figure.png is not None:
            source = f"data:image/png;base64,{base64.b64encode(figure.png).decode('ascii')}"
            image = h("figure", h("img", src=source, alt=title), class_="paper")
        sections.append(h("section", h("h2", title), h("p", figure.caption), image, id=figure.view, aria_label=title))
    return sections


def _render_data(vit: TokenModel, panels: Sequence[ImagePanel]) -> Markup:
    """Return the JSON data of the script: one block for all images, and one per image, parsed when it is selected."""
    shared = {
        "layers": vit.config.size.depth,
        "heads": vit.config.size.heads,
        "maps": {
            kind: encode_base64(colour_table(cmap))
            for kind, cmap in (("heat", HEAT_CMAP), ("like", SIMILARITY_CMAP), ("length", NORM_CMAP))
        },
    }
    blocks = [h("script", _embed_json(shared), type="application/json", id="shared")]
    for number, panel in enumerate(panels):
        data = {key: value for key, value in panel.data.items() if key != "thumb"}
        data |= {"files": list(panel.files), "figures": dict(panel.figures)}
        blocks.append(h("script", _embed_json(data), type="application/json", id=f"picture-{number}"))
    return join_markup(blocks, "\n")


def _embed_json(value: Any) -> Markup:
    """Return JSON that cannot close its script element, whatever names are in it."""
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))


def make_distance_figure(png: bytes) -> ModelFigure:
    """Return figure 7 (right)."""
    caption = (
        "Each dot is a head: the mean distance in pixels between a query patch and the patches it attends to. Low dots are "
        "local, like convolutions; high dots are global. Trained models have both kinds in the first layers and mostly "
        "global heads in later ones. Figure 7 (right) of the paper."
    )
    return ModelFigure("distance", "Mean attention distance", caption, png)


def make_positions_figure(positions: PositionMaps, position: PositionEmbedding, png: bytes | None) -> ModelFigure:
    """Return figure 7 (centre), or its equivalent for other position embeddings."""
    return ModelFigure("positions", "Position embedding", _caption_positions(positions, position), png)


def _caption_positions(maps: PositionMaps, position: PositionEmbedding) -> str:
    match maps.kind:
        case "added" if isinstance(position, FixedPositionEmbedding):
            return f"{POSITION_MAP_NOTE}The embeddings are fixed sines and cosines, not learned."
        case "added" if isinstance(position, Learned2DTable):
            return (
                f"{POSITION_MAP_NOTE}The embeddings are learned, one vector per row and one per column: the row and column of "
                "a patch are given, the similarity of rows and of columns is learned."
            )
        case "added":
            return (
                f"{POSITION_MAP_NOTE}The embeddings are learned without information on the grid: similarity of neighbours, "
                "rows and columns is learned from the data. Figure 7 (centre) of the paper."
            )
        case "bias":
            return (
                "Each small map is the learned bias that one head adds to its attention scores, by offset in rows and columns; "
                "the centre is the patch itself. Violet increases attention, orange decreases it."
            )
        case "rotary":
            return (
                "Queries and keys are rotated by the position of their patch (RoPE). The map is the mean cosine between the "
                "rotations of two patches, by offset in rows and columns; it is fixed, not learned."
            )
    return "The model has no position embedding: its attention sees the patches as a set."


def make_filters_figure(filters: PrincipalFilters, png: bytes) -> ModelFigure:
    """Return figure 7 (left)."""
    if filters.source == "patch projection":
        caption = (
            "Principal components of the filters that project the pixels of a patch to a token, the largest first. In trained "
            "models they resemble basis functions: blobs, edges and waves of many directions. Figure 7 (left) of the paper."
        )
    else:
        height, width = filters.tiles.shape[1:3]
        caption = (
            f"Principal components of the filters of the {filters.source}, {height}×{width} pixels, the largest first. More "
            "layers follow before the tokens, so a filter is smaller than a patch; figure 7 (left) of the paper shows those "
            "of a patch projection."
        )
    return ModelFigure("filters", "Patch embedding filters", caption, png)
