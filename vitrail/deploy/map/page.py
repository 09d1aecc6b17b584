"""The page of a map: one HTML file with the points, columns and thumbnails in it, and the code that draws them."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.deploy.map.atlas import Atlas
from vitrail.deploy.map.columns import Column
from vitrail.deploy.map.features import MapPoints
from vitrail.deploy.map.projection import Projection
from vitrail.reports.colours import CLASS_COLOURS, RAMP_NAME, RAMP_PARTS, colour_table
from vitrail.reports.document import (
    read_resource,
    render_footer,
    render_heading,
    render_window,
    wrap_document,
)
from vitrail.reports.html import Markup, clean_text, h, isolate
from vitrail.utils.colours import format_colour
from vitrail.utils.text import format_image_count, format_percent

PACKAGE, SCRIPTS = "vitrail.deploy.map", ("data.js", "draw.js", "view.js", "panel.js")
MAX_LABELLED_CLASSES = 30  # whose names are on the map from the beginning
REST_COLOURS = {"light": "#a7a3ae", "dark": "#666170"}  # of values without a colour
MARK_COLOURS = {"light": "#c4630a", "dark": "#f3a952"}  # of a class under the pointer
KEYS = (
    ("Wheel, pinch, + and −", "zoom; 0 shows everything"),
    ("Drag, arrow keys", "move the map"),
    ("Click, Enter", "open a point: with Enter the one nearest to the cross in the middle"),
    ("Shift and an arrow key", "go to the nearest point in that direction"),
    ("Shift with the rectangle or lasso", "add to the selection"),
    ("Esc", "empty the selection, then close the point"),
)


@dataclass(frozen=True)
class MapPage:
    """Contents of the page."""

    title: str
    file: str  # name of the page without suffix, for exported files
    points: MapPoints
    projection: Projection
    columns: Sequence[Column]
    colour: int  # the column that colours the map at first, or -1
    atlas: Atlas
    neighbours: np.ndarray  # int32 [n, k], -1 for none
    cosines: np.ndarray  # float32 [n, k]
    width: int  # values of a vector
    notes: Sequence[str] = ()


def render_map_page(page: MapPage) -> str:
    """Return the HTML."""
    style = read_resource(PACKAGE, "map.css")
    script = "\n".join(read_resource(PACKAGE, name) for name in SCRIPTS)
    kicker = ("map", page.projection.name, page.points.source)
    body = [
        h("a", "To the map", href="#main", class_="skip"),
        h(
            "header",
            render_window(page.points.source + page.title),
            h("div", render_heading(kicker, page.title, describe_map(page)), class_="inside"),
        ),
        h("main", render_tools(page), render_stage(page), render_reading(page), id="main", class_="inside"),
        render_footer("The window is drawn from the names of the map."),
        *render_data(page),
        h("script", Markup(script)),
    ]
    return wrap_document(page.title, body, script, [style])


def describe_map(page: MapPage) -> str:
    """Return the first paragraph: what the points are, and how far the map can be trusted."""
    media = page.points.media
    near = f"{media.capitalize()}s that the model sees as similar lie near each other."
    if page.projection.explained is None:
        name = page.projection.name
        return f"{near} Distances between groups that are far apart, and the sizes of groups, mean nothing in {name}."
    share = format_percent(sum(page.projection.explained))
    return f"{near} The two axes hold {share} of the variance of the vectors: the rest is not on the map."


def render_tools(page: MapPage) -> Markup:
    """Return the row above the map: colours, search, tools and zoom."""
    options = [
        h("option", column.name, value=number, selected=number == page.colour)
        for number, column in enumerate(page.columns)
    ]
    options += [h("option", "one colour", value=-1, selected=page.colour < 0)]
    tools = [
        h("label", h("input", type="radio", name="map-tool", value=value, checked=value == "pan"), h("span", name))
        for value, name in (("pan", "Move"), ("rectangle", "Rectangle"), ("lasso", "Lasso"))
    ]
    zoom = [
        h("button", sign, type="button", id=f"map-{key}", aria_label=label, title=label)
        for key, sign, label in (("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("fit", "Fit", "Show everything"))
    ]
    labelled = is_labelled(page)
    switches = [
        h("label", h("input", type="checkbox", id="map-thumbnails", checked=True), "Thumbnails when zoomed in")
        if page.atlas.sheets
        else h("input", type="checkbox", id="map-thumbnails", hidden=True, aria_label="Thumbnails"),
        h("label", h("input", type="checkbox", id="map-labels", checked=labelled), "Names of classes"),
    ]
    search = h(
        "div",
        h("label", "Find", for_="map-search"),
        h(
            "input",
            type="search",
            id="map-search",
            placeholder="part of a path",
            autocomplete="off",
            spellcheck="false",
        ),
        h("ul", id="map-results", hidden=True),
        class_="map-find",
    )
    colour = h(
        "div", h("label", "Colour by", for_="map-colour"), h("select", options, id="map-colour"), class_="map-by"
    )
    return h(
        "div",
        colour,
        search,
        h("div", tools, class_="segments", role="radiogroup", aria_label="What dragging does"),
        h("div", zoom, class_="segments"),
        h("div", switches, class_="switches"),
        class_="map-tools",
    )


def is_labelled(page: MapPage) -> bool:
    """Return True if the names of the classes fit on the map."""
    column = page.columns[page.colour] if page.colour >= 0 else None
    return column is not None and 2 <= len(column.labels) <= MAX_LABELLED_CLASSES


def render_stage(page: MapPage) -> Markup:
    """Return the map and the panel beside it."""
    media = page.points.media
    label = f"Map of {format_image_count(len(page.points), media)}. Arrow keys move it, plus and minus zoom, Enter opens a point."
    tip = h(
        "div",
        h("canvas", id="map-tip-image"),
        h("bdi", id="map-tip-name"),
        h("span", id="map-tip-value"),
        id="map-tip",
        hidden=True,
        aria_hidden="true",
    )
    stage = h(
        "div",
        h("canvas", id="map-points-canvas"),
        h("canvas", id="map-over-canvas"),
        tip,
        id="map-stage",
        tabindex="0",
        role="application",
        aria_roledescription="map",
        aria_label=label,
    )
    legend = h(
        "section",
        h("h2", "Colours"),
        h("p", id="map-legend-note", class_="note"),
        h(
            "input",
            type="search",
            id="map-legend-filter",
            placeholder="filter",
            aria_label="Filter the legend",
            hidden=True,
        ),
        h("div", id="map-legend"),
        h(
            "div",
            h("button", "All", type="button", id="map-all"),
            h("button", "None", type="button", id="map-none"),
            id="map-legend-tools",
            class_="buttons",
        ),
        h("p", h("output", id="map-counts"), class_="note"),
    )
    selection = h(
        "section",
        h("h2", "Selection"),
        h("p", h("output", id="map-selected")),
        h(
            "div",
            h("button", "Export CSV", type="button", id="map-export"),
            h("button", "Select shown", type="button", id="map-select-shown"),
            h("button", "Clear", type="button", id="map-clear"),
            class_="buttons",
        ),
    )
    point = h(
        "section",
        h("h2", media.capitalize()),
        h(
            "p",
            f"Click a point to see its {media}, its values and its nearest {media}s.",
            id="map-point-empty",
            class_="note",
        ),
        h(
            "div",
            h("canvas", id="map-point-image"),
            h("p", h("bdi", id="map-point-name"), class_="name"),
            h("p", h("bdi", id="map-point-path"), class_="file"),
            h("dl", id="map-point-values"),
            h("h3", "Nearest by cosine", id="map-near-title"),
            h("p", "Not computed for this point.", id="map-near-none", class_="note", hidden=True),
            h("ol", id="map-near"),
            id="map-point",
            hidden=True,
        ),
        aria_live="polite",
    )
    return h("div", stage, h("aside", legend, selection, point, id="map-panel"), class_="map")


def render_reading(page: MapPage) -> Markup:
    """Return the section below the map: how it was made, what it does not show, and the keys."""
    points, projection = page.points, page.projection
    count = format_image_count(len(points), points.media)
    drawn = f"{count} of {points.total:,}, evenly spaced" if points.total > len(points) else count
    made = f"{drawn}, with {page.width:,} values each, from {points.source}, scaled to length 1"
    facts = [("Vectors", made), ("Projection", describe_projection(projection))]
    if points.unreadable:
        facts.append(("Left out", f"{format_image_count(points.unreadable, points.media)} without a vector"))
    if projection.explained is not None:
        first, second = (format_percent(share) for share in projection.explained)
        facts.append(("Explained variance", f"{first} by the horizontal axis, {second} by the vertical one"))
    n_near = int((page.neighbours[:, 0] >= 0).sum()) if page.neighbours.size else 0
    if n_near:
        among = "all points" if n_near == len(points) else f"{n_near:,} of the points, evenly spaced"
        facts.append(
            ("Neighbours", f"the {page.neighbours.shape[1]} nearest by cosine of the whole vectors, for {among}")
        )
    thumbnails = "none"
    if page.atlas.sheets:
        sizes = f"{page.atlas.size} pixels at most, {page.atlas.nbytes / 2**20:,.1f} MiB"
        thumbnails = f"of {page.atlas.count:,} {points.media}s, {sizes}"
    facts.append(("Thumbnails", thumbnails))
    caveat = (
        f"{projection.name} keeps neighbourhoods, not distances: do not read the distance between two groups, the size of "
        "a group or empty space globally. Another seed gives another map. Compare it with PCA, and trust the nearest images "
        "by cosine."
        if not projection.is_linear
        else "PCA shows the vectors from one side: points that are far apart on the map are far apart, points that lie on each "
        "other may differ in what the map does not show. The nearest images by cosine compare the whole vectors."
    )
    keys = [h("div", h("dt", keys), h("dd", does)) for keys, does in KEYS]
    definitions = [h("div", h("dt", name), h("dd", isolate(text))) for name, text in facts]
    return h(
        "section",
        h("h2", "Reading this map"),
        h("p", caveat, class_="notice"),
        *(h("p", note, class_="note") for note in page.notes),
        h("dl", definitions),
        h("details", h("summary", "Mouse, fingers and keys"), h("dl", keys)),
    )


def describe_projection(projection: Projection) -> str:
    """Return "t-SNE (perplexity 30, seed 0)"."""
    values = ", ".join(
        str(value) if key == "solver" else f"{key} {value}" for key, value in projection.parameters.items()
    )
    return f"{projection.name} ({values})"


# --- the data ---


def render_data(page: MapPage) -> Iterator[Markup]:
    """Yield the elements that hold the data: JSON, and base64 of arrays and sheets."""
    names = [clean_text(name) for name in page.points.names]
    first, last = min(names), max(names)  # whatever these two share, all share
    same = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    prefix = first[: first.rfind("/", 0, same) + 1]
    meta = {
        "count": len(names),
        "file": page.file,
        "media": page.points.media,
        "prefix": prefix,
        "names": [name[len(prefix) :] for name in names],
        "columns": [describe_column(column) for column in page.columns],
        "colour": page.colour,
        "label_map": is_labelled(page),
        "neighbours": page.neighbours.shape[1],
        "cell": page.atlas.size,
        "per_row": page.atlas.per_row,
        "sheets": len(page.atlas.sheets),
        "sheet_kind": page.atlas.kind,
        "smooth": int(page.atlas.shapes.max(initial=0))
        >= min(32, page.atlas.size),  # else pixels are shown as they are
        "palettes": build_palettes(),
    }
    text = json.dumps(meta, separators=(",", ":")).replace("<", "\\u003c")
    yield h("script", Markup(text), type="application/json", id="data-meta")
    arrays = {
        "points": page.projection.points.astype("<f4"),
        "cells": page.atlas.cells.astype("<i4"),
        "shapes": page.atlas.shapes,
        "near": page.neighbours.astype("<i4"),
        "cosines": page.cosines.astype("<f4"),
    }
    for number, column in enumerate(page.columns):
        values = column.codes.astype("<u2") if column.codes is not None else column.numbers
        arrays[f"column-{number}"] = np.asarray(values, dtype=None if column.codes is not None else "<f4")
    for key, array in arrays.items():
        yield render_bytes(f"data-{key}", np.ascontiguousarray(array).tobytes())
    for number, sheet in enumerate(page.atlas.sheets):
        yield render_bytes(f"data-sheet-{number}", sheet)


def render_bytes(key: str, data: bytes) -> Markup:
    """Return an element with bytes as base64, which no browser runs or shows."""
    return h("script", Markup(base64.b64encode(data).decode("ascii")), type="text/plain", id=key)


def describe_column(column: Column) -> dict[str, Any]:
    """Return the name of a column, and its texts if it has any."""
    labels = [clean_text(label) for label in column.labels]
    return {"name": clean_text(column.name), "labels": labels if column.codes is not None else None}


def build_palettes() -> dict[str, Any]:
    """Return the colours of classes and numbers for both themes."""
    table = colour_table(RAMP_NAME)
    palettes = {}
    for theme, (low, high) in RAMP_PARTS.items():
        rows = np.linspace(low * 255, high * 255, 256).round().astype(int)
        ramp = [format_colour(table[row].tolist()) for row in rows]
        palettes[theme] = {"classes": CLASS_COLOURS[theme], "ramp": ramp}
        palettes[theme] |= {"rest": REST_COLOURS[theme], "mark": MARK_COLOURS[theme]}
    return palettes
