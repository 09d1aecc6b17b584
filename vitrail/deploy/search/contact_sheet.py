"""Contact sheet: a self-contained HTML page of query images and their nearest neighbours."""

import base64
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from vitrail.data.decode import IMAGE_ERRORS, name_image_errors
from vitrail.data.sources.files import printable_path
from vitrail.deploy.search.index import SearchIndex
from vitrail.deploy.search.search import OPENERS, Neighbour, SearchResult, path_media
from vitrail.deploy.search.thumbnails import draw_still, shrink_image
from vitrail.reports.charts.lines import render_bar
from vitrail.reports.document import PageSection, render_document, write_html
from vitrail.reports.html import Markup, h, isolate, join_markup
from vitrail.utils.text import format_image_count

QUERY_SIZE, NEIGHBOUR_SIZE = 720, 320  # longer side, in pixels
MAX_TEXT = 80  # characters of a query in headings
MAX_PIXELATED_SIZE = 48  # pixels; smaller images are enlarged without smoothing


def write_sheet(index: SearchIndex, results: list[SearchResult], method: str, path: Path) -> None:
    """Write the sheet atomically."""
    write_html(build_sheet(index, results, method), path)


def build_sheet(index: SearchIndex, results: list[SearchResult], method: str) -> str:
    """Return the HTML of one or several queries with their neighbours."""
    first = name_query(results[0])
    several = len(results) > 1
    title = f"Nearest to {len(results)} queries" if several else f"Nearest to {first}"
    kicker = ("search", index.model.name, printable_path(index.folder.name))
    count = format_image_count(len(index.images), index.media)
    lead = f"The nearest of {count} by the cosine of {index.model.name} features, {method}."
    heading = [
        h("p", [h("span", isolate(text)) for text in kicker], class_="kicker"),
        h("h1", "Nearest to ", f"{len(results)} queries" if several else isolate(first)),
        h("p", lead, class_="lead"),
    ]
    top = heading if several else [h("div", h("div", heading), query_figure(results[0]), class_="beside-it")]
    parts: list[PageSection] = []
    for number, result in enumerate(results, 1):
        name = name_query(result)
        cards = [neighbour_card(rank, item) for rank, item in enumerate(result.neighbours, 1)]
        content = [query_figure(result) if several else None, h("div", cards, class_="cards near")]
        parts.append((f"query-{number}", name, f"Nearest to {name}" if several else f"Nearest {index.media}s", content))
    style = (files("vitrail.deploy.search") / "contact_sheet.css").read_text(encoding="utf-8").strip()
    single = "" if several else "\nnav { display: none; }"  # one section needs no navigation
    return render_document(title, index.model.checksum + first, top, parts, "the model and the image", style + single)


def name_query(result: SearchResult) -> str:
    """Return the file name of a query image, or the beginning of a text."""
    if isinstance(result.query, Path):
        return printable_path(result.query.name)
    return result.query[:MAX_TEXT] + "…" * (len(result.query) > MAX_TEXT)


def query_figure(result: SearchResult) -> Markup | None:
    """Return the query image; None for a text, which the heading has."""
    if isinstance(result.query, str):
        return None
    return h("div", embed_image(result.query, QUERY_SIZE, True), class_="asked")


def neighbour_card(rank: int, neighbour: Neighbour) -> Markup:
    """Return a neighbour with its cosine and path."""
    folder, _, file = neighbour.relative_path.rpartition("/")
    cosine = [h("span", f"{rank}"), render_bar(neighbour.cosine), h("b", f"{neighbour.cosine:.3f}")]
    path = [join_markup([isolate(folder), " / "]) if folder else None, h("b", isolate(file))]
    caption = h("figcaption", h("p", cosine, class_="nearness"), h("p", path, class_="file"))
    frame = h("div", embed_image(neighbour.path, NEIGHBOUR_SIZE), class_="frame")
    return h("figure", frame, caption, class_="card")


def embed_image(path: Path, size: int, large: bool = False) -> Markup:
    """Return an embedded thumbnail, or the reason why there is none."""
    label = printable_path(path.name)
    try:
        data, kind, pixelated = make_thumbnail(path, size)
    except IMAGE_ERRORS as error:
        missing = not path.exists()
        return h("span", "file missing" if missing else "unreadable", class_="lacking", title=f"{error}")
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    alt = f"The image {label}" if large else label
    return h("img", src=source, alt=alt, class_="few-pixels" if pixelated else None)


def make_thumbnail(path: Path, size: int) -> tuple[bytes, str, bool]:
    """Return the bytes of an upright thumbnail, its format, and True if it is shown with visible pixels."""
    label = printable_path(str(path))
    with name_image_errors(label), OPENERS[path_media(path)](str(path), label) as item, draw_still(item) as image:
        flat, buffer = shrink_image(image, size), BytesIO()
        pixelated = max(flat.size) <= MAX_PIXELATED_SIZE
        kind = "png" if pixelated else "jpeg"
        flat.save(buffer, kind.upper(), quality=84)  # a PNG has no quality
    return buffer.getvalue(), kind, pixelated
