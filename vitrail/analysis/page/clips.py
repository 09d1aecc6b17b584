"""Interactive page of a model of clips: attention over each time step, with a slider over time."""

from typing import Any

from vitrail.analysis.clips import ClipTrace, MapKind
from vitrail.analysis.figures.image_view import to_rgb
from vitrail.analysis.figures.overlay import MAP_STRENGTH
from vitrail.analysis.page.data import THUMBNAIL_SIZE, encode_image, encode_rows
from vitrail.analysis.page.page import ImagePanel, render_chooser, render_shared_data, render_slider
from vitrail.models.base import Model
from vitrail.reports.document import read_resource, render_footer, render_window, wrap_document
from vitrail.reports.html import Markup, clean_text, h, isolate

HELP = (
    "Move through the clip with the slider, the arrow keys or the frames below it. The scale of a map is that of the whole "
    "clip, so time steps can be compared."
)
KINDS: dict[MapKind, tuple[str, str]] = {
    "attention": ("Attention", "What the {reader} attends to, over all time steps together."),
    "time": (
        "Over time",
        "Each patch attends only to the patches at the same place in the other time steps. The map shows how much of that goes "
        "to this time step, at every place: the mean over the time steps that it comes from.",
    ),
    "space": (
        "Over space",
        "Inside each time step: what the {reader} attends to there. The time steps are read separately and weigh the same.",
    ),
}


def pack_clip(trace: ClipTrace, name: str, words: str, predicted: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all data of one clip for the page, ready for JSON."""
    frames = [to_rgb(frame) for frame in trace.frames]
    return {
        "name": clean_text(name),
        "words": clean_text(words),
        "thumb": encode_image(frames[len(frames) // 2], THUMBNAIL_SIZE),
        "frames": [encode_image(frame) for frame in frames],
        "numbers": list(trace.numbers),
        "layers": list(trace.layers),
        "maps": {
            kind: [
                {"grid": list(each.values.shape[1:])} | encode_rows(each.values.reshape(len(each.values), -1))
                for each in trace.find_maps(kind)
            ]
            for kind in trace.kinds
        },
        "readings": {kind: KINDS[kind][1].format(reader=trace.reader) for kind in trace.kinds},
        "predictions": [
            {"name": clean_text(each["name"]), "score": round(each["probability"], 4)}
            for each in predicted
            if "probability" in each
        ],
    }


def render_clips_page(name: str, model: Model, panels: list[ImagePanel], size: tuple[int, ...]) -> str:
    """Return the page of a model of clips of this size, (frames, height, width), and its videos."""
    script = "\n".join(read_resource("vitrail.analysis.page", part) for part in ("maps.js", "explorer.js", "clips.js"))
    frames, height, width = size
    count = len(panels)
    facts = [
        model.config.describe(),
        f"{model.config.depth} layers",
        f"clips of {frames} frames of {width}×{height} pixels",
        f"{count} video{'s' * (count != 1)}",
    ]
    opening = [
        h("p", [h("span", fact) for fact in facts], class_="kicker"),
        h("h1", "Attention of ", isolate(name), " over time"),
        h("p", HELP, class_="lead"),
    ]
    kinds: list[MapKind] = [kind for kind in KINDS if any(kind in panel.data["maps"] for panel in panels)]
    body = [
        h("a", "To the clip", href="#explore", class_="skip"),
        h("header", render_window(name), h("div", opening, class_="inside")),
        h("main", _render_explorer(panels, kinds), class_="inside", id="main"),
        render_footer("The arrays behind every map are beside this page, as .npz files."),
        render_shared_data({}, panels),
        h("script", Markup(script)),
    ]
    title = f"Attention of {name} over time"
    return wrap_document(title, body, script, [read_resource("vitrail.analysis.page", "page.css")])


def _render_explorer(panels: list[ImagePanel], kinds: list[MapKind]) -> Markup:
    keys = "The frame with the map over it: left and right arrow keys move through time"
    canvas = h("canvas", id="stage", tabindex="0", role="application", aria_label=keys, aria_describedby="caption")
    scale = h("span", "0", id="least"), h("canvas", id="key", aria_hidden="true"), h("span", id="most")
    time = h("div", render_slider("step", "Time", min="1", max="1", value="1"), class_="sliders", id="time")
    stage = (
        h("div", canvas, class_="frame-of-stage"),
        time,
        h("div", id="strip", class_="timeline", role="group", aria_label="Time steps"),
        h("p", "Under each time step: its share of the attention.", class_="note"),
        h("div", scale, class_="scale"),
        h("p", id="caption", class_="caption", role="status", aria_live="polite"),
    )
    buttons = [h("button", KINDS[kind][0], type="button", data_kind=kind, aria_pressed="false") for kind in kinds]
    sliders = (
        render_slider("layer", "Layer", min="1", max="1", value="1"),
        render_slider("head", "Head", min="0", max="1", value="0"),
        render_slider("strength", "Map", min="0", max="100", value=f"{100 * MAP_STRENGTH:.0f}"),
    )
    table = h("canvas", id="all", role="img", aria_label="A map per time step, a row per layer")
    note = "A row per layer, a column per time step, each row scaled to its own maximum. Click a map to see it above."
    panel = (
        h("p", h("b", id="prediction"), h("span", id="file"), class_="verdict"),
        h("div", buttons, class_="switch", id="kinds", role="group", aria_label="Attention", hidden=len(kinds) < 2),
        h("p", id="reading", class_="reading"),
        h("div", sliders, class_="sliders"),
        h("dl", id="scores", class_="scores", aria_label="Predictions"),
        h("details", h("summary", "All layers"), h("div", table, class_="all"), h("p", note, class_="note"), open=True),
    )
    return h(
        "section",
        h("h2", "Explore", class_="unseen"),
        render_chooser(panels, "Video") if len(panels) > 1 else None,
        h("div", h("div", stage, class_="stage"), h("div", panel, class_="panel"), class_="explorer"),
        h("p", id="files", class_="note"),
        h("noscript", h("p", "This page needs JavaScript; the PNG figures beside it show the same.")),
        id="explore",
        aria_label="Explore",
    )
