"""Interactive page of an inspection: attention, rollout, relevance and tokens of the images, and figures of the model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitrail.analysis.figures.overlay import MAP_STRENGTH
from vitrail.analysis.page.data import encode_base64, encode_data_uri
from vitrail.analysis.results import PositionMaps, PrincipalFilters
from vitrail.models.base import TokenModel
from vitrail.nn.position import FixedPositionEmbedding, Learned1DTable, Learned2DTable, PositionEmbedding
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
DISTANCE_CAPTION = (
    "Each dot is a head: the mean distance in pixels between a query patch and the patches it attends to. Low dots are local, "
    "like convolutions; high dots are global. Trained models have both kinds in the first layers and mostly global heads in "
    "later ones. Figure 7 (right) of the paper."
)
POSITION_MAP_NOTE = "Each small map is one position: the cosine similarity of its embedding with all others. "
POSITION_CAPTIONS = {
    "fixed": f"{POSITION_MAP_NOTE}The embeddings are fixed sines and cosines, not learned.",
    "learned2d": f"{POSITION_MAP_NOTE}The embeddings are learned, one vector per row and one per column: the row and column of "
    "a patch are given, the similarity of rows and of columns is learned.",
    "learned1d": f"{POSITION_MAP_NOTE}The embeddings are learned without information on the grid: similarity of neighbours, rows "
    "and columns is learned from the data. Figure 7 (centre) of the paper.",
    "added": f"{POSITION_MAP_NOTE}The embeddings are added to the tokens.",
    "bias": "Each small map is the learned bias that one head adds to its attention scores, by offset in rows and columns; the "
    "centre is the patch itself. Orange increases attention, violet decreases it.",
    "rotary": "Queries and keys are rotated by the position of their patch (RoPE). The map is the mean cosine between the "
    "rotations of two patches, by offset in rows and columns; it is fixed, not learned.",
    "query": "The bias of attention is the product of the query with a learned vector for the offset of two patches, in "
    "reading order or along rows and columns. It depends on the image: the attention maps include it.",
    "none": "The model has no position embedding: its attention sees the patches as a set.",
}
FILTER_CAPTION = (
    "Principal components of the filters that project the pixels of a patch to a token, the largest first. In trained models "
    "they resemble basis functions: blobs, edges and waves of many directions. Figure 7 (left) of the paper."
)
STEM_FILTER_CAPTION = (
    "Principal components of the filters of the {source}, {size} pixels, the largest first. More layers follow before the "
    "tokens, so a filter is smaller than a patch; figure 7 (left) of the paper shows those of a patch projection."
)


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


def render_inspection_page(model: str, vit: TokenModel, panels: list[ImagePanel], figures: list[ModelFigure]) -> str:
    """Return the page of a model, its images and its own figures."""
    script = "\n".join(read_resource("vitrail.analysis.page", name) for name in ("maps.js", "explorer.js", "page.js"))
    contents = [render_explorer(panels) if panels else None, render_model_figures(figures)]
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
    sound = getattr(vit.preprocessing, "sound", None)
    patch = config.embed.stride + getattr(config.embed, "overlap", 0)
    facts = [
        f"{size.depth} layers of {size.heads} heads",
        f"patches of {patch}×{patch} pixels",
        f"{config.image_size[1]}×{config.image_size[0]} pixels" if sound is None else sound.describe(),
        *([format_image_count(count, "image" if sound is None else "sound")] if count else []),
    ]
    return [
        h("p", [h("span", fact) for fact in facts], class_="kicker"),
        h("h1", "Attention of ", isolate(model)),
        h("p", HELP, class_="lead") if any("between" in panel.data for panel in panels) else Markup(""),
    ]


def render_explorer(panels: Sequence[ImagePanel]) -> Markup:
    keys = "The image with the map over it: arrow keys move the patch, Escape deselects it"
    canvas = h("canvas", id="stage", tabindex="0", role="application", aria_label=keys, aria_describedby="caption")
    scale = h("span", "0", id="least"), h("canvas", id="key", aria_hidden="true"), h("span", id="most")
    stage = (
        h("div", canvas, class_="frame-of-stage"),
        h("div", scale, class_="scale"),
        h("p", id="caption", class_="caption", role="status", aria_live="polite"),
    )
    tab, state = {"type": "button", "role": "tab"}, {"aria_controls": "panel", "aria_selected": "false"}
    tabs = [
        h("button", name.capitalize(), **tab, id=f"tab-{name}", data_tab=name, **state)
        for name in ("attention", "rollout", "relevance", "tokens")
    ]
    panel = {"class_": "panel", "id": "panel", "role": "tabpanel", "aria_labelledby": "tab-attention"}
    figures = [
        _render_image_figure(view, *caption)
        for view, caption in IMAGE_CAPTIONS.items()
        if any(view in panel.figures for panel in panels)
    ]
    return h(
        "section",
        h("h2", "Explore", class_="unseen"),
        render_chooser(panels) if len(panels) > 1 else None,
        h("div", tabs, class_="tabs", role="tablist", aria_label="View"),
        h("div", h("div", stage, class_="stage"), h("div", _render_controls(), **panel), class_="explorer"),
        figures,
        h("p", id="files", class_="note"),
        h("noscript", h("p", "This page needs JavaScript; the PNG figures beside it show the same.")),
        id="explore",
        aria_label="Explore",
    )


def render_chooser(panels: Sequence[ImagePanel], label: str = "Image") -> Markup:
    """Return the choice of one of the panels by its thumbnail."""
    choices = [
        h(
            "label",
            h("input", type="radio", name="image", value=str(number), checked=number == 0),
            h("img", src=panel.data["thumb"], alt=""),
            h("span", isolate(panel.data["name"])),
        )
        for number, panel in enumerate(panels)
    ]
    return h("div", choices, class_="chooser", role="radiogroup", aria_label=label)


def render_slider(key: str, label: str, **attributes: Any) -> Markup:
    """Return a slider with its label and the text of its value, which the script writes."""
    slider = h("input", type="range", id=key, step="1", **attributes)
    output = h("output", id=f"{key}-value", for_=key)
    return h("label", h("span", label), slider, output, class_="slider", data_for=key)


def _render_controls() -> list[Markup]:
    queries = (("whole", "Class token", "true"), ("patch", "A patch", "false"))
    kinds = (("colours", "Components"), ("norms", "Norm"), ("similar", "Similarity"))
    query_buttons = [h("button", label, type="button", id=key, aria_pressed=on) for key, label, on in queries]
    kind_buttons = [h("button", label, type="button", data_kind=key, aria_pressed="false") for key, label in kinds]
    sliders = (
        render_slider("layer", "Layer", min="1", max="1", value="1"),
        render_slider("head", "Head", min="0", max="1", value="0"),
        render_slider("strength", "Map", min="0", max="100", value=f"{100 * MAP_STRENGTH:.0f}"),
    )
    all_maps = h("canvas", id="all", role="img", aria_label="A map per head, a column per layer")
    note = "A column per layer, a row per head, each map scaled to its own maximum. Click one to see it above."
    details = h("summary", "All layers and heads"), h("div", all_maps, class_="all"), h("p", note, class_="note")
    return [
        h("p", h("b", id="prediction"), h("span", id="file"), class_="verdict"),
        h("p", id="reading", class_="reading"),
        h("div", query_buttons, class_="switch", id="from", role="group", aria_label="Query"),
        h("div", kind_buttons, class_="switch", id="kinds", role="group", aria_label="Token map"),
        h("div", sliders, class_="sliders"),
        h("dl", id="scores", class_="scores", aria_label="Predictions"),
        h("div", id="heads", class_="heads", role="group", aria_label="Heads of this layer"),
        h("details", details, open=True, id="every"),
        h("p", id="coarse", class_="note"),
    ]


def _render_image_figure(view: str, title: str, caption: str) -> Markup:
    """Return a figure of the selected image; the script sets its source."""
    figure = h("figure", h("img", alt=title), class_="paper")
    return h("div", h("h2", title), h("p", caption), figure, class_="of-image", data_view=view, hidden=True)


def render_model_figures(figures: Sequence[ModelFigure]) -> list[Markup]:
    sections = []
    for figure in figures:
        image, title = None, figure.title
        if figure.png is not None:
            image = h("figure", h("img", src=encode_data_uri(figure.png), alt=title), class_="paper")
        sections.append(h("section", h("h2", title), h("p", figure.caption), image, id=figure.view, aria_label=title))
    return sections


def _render_data(vit: TokenModel, panels: Sequence[ImagePanel]) -> Markup:
    """Return the JSON data of the script: one block for all images, and one per image, parsed when it is selected."""
    return render_shared_data({"layers": vit.config.size.depth, "heads": vit.config.size.heads}, panels)


def render_shared_data(facts: dict[str, Any], panels: Sequence[ImagePanel]) -> Markup:
    """Return these facts with the colour maps, and the data of every image."""
    cmaps = {"heat": HEAT_CMAP, "like": SIMILARITY_CMAP, "length": NORM_CMAP}
    shared = facts | {"maps": {kind: encode_base64(colour_table(cmap)) for kind, cmap in cmaps.items()}}
    blocks = [h("script", embed_json(shared), type="application/json", id="shared")]
    for number, panel in enumerate(panels):
        data = {key: value for key, value in panel.data.items() if key != "thumb"}
        data |= {"files": list(panel.files), "figures": dict(panel.figures)}
        blocks.append(h("script", embed_json(data), type="application/json", id=f"image-{number}"))
    return join_markup(blocks, "\n")


def embed_json(value: Any) -> Markup:
    """Return JSON that cannot close its script element, whatever names are in it."""
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))


def make_positions_figure(positions: PositionMaps, position: PositionEmbedding, png: bytes | None) -> ModelFigure:
    """Return figure 7 (centre), or its equivalent for other position embeddings."""
    tables = {"fixed": FixedPositionEmbedding, "learned1d": Learned1DTable, "learned2d": Learned2DTable}
    kind = next((name for name, table in tables.items() if isinstance(position, table)), positions.kind)
    return ModelFigure("positions", "Position embedding", POSITION_CAPTIONS[kind], png)


def make_filters_figure(filters: PrincipalFilters, png: bytes) -> ModelFigure:
    """Return figure 7 (left)."""
    caption = FILTER_CAPTION
    if filters.source != "patch projection":
        height, width = filters.tiles.shape[1:3]
        caption = STEM_FILTER_CAPTION.format(source=filters.source, size=f"{height}×{width}")
    return ModelFigure("filters", "Patch embedding filters", caption, png)
