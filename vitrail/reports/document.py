"""HTML documents that need no network: head, content security policy, stained-glass window, sections, footer."""

import base64
import hashlib
import random
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vitrail
from vitrail.reports.html import Markup, h, isolate, join_markup
from vitrail.utils.files import atomic_write

PANE_COLUMNS, PANE_ROWS = 22, 3
WINDOW_WIDTH, WINDOW_HEIGHT = 1320, 132
COLOUR_WEIGHTS = (5, 5, 4, 1.5, 2, 1.5, 3, 0.8)  # mostly blue and ruby, as in Chartres; few light colours

PageSection = tuple[str, str, str, Iterable[Any]]  # id, name in the navigation, title, content


def render_window(seed: str) -> Markup:
    """Return the stained-glass window of a seed: uneven panes, neighbours in different colours where possible."""
    generator = random.Random(zlib.crc32(seed.encode("utf-8", "backslashreplace")))
    pane_width, pane_height = WINDOW_WIDTH / PANE_COLUMNS, WINDOW_HEIGHT / PANE_ROWS

    def corner(column: int, row: int) -> tuple[float, float]:
        dx = 0 if column in (0, PANE_COLUMNS) else generator.uniform(-0.34, 0.34)
        dy = 0 if row in (0, PANE_ROWS) else generator.uniform(-0.3, 0.3)
        return (column + dx) * pane_width, (row + dy) * pane_height

    corners = [[corner(column, row) for row in range(PANE_ROWS + 1)] for column in range(PANE_COLUMNS + 1)]
    panes, colours = [], {}
    for column in range(PANE_COLUMNS):
        for row in range(PANE_ROWS):
            a, b = corners[column][row], corners[column + 1][row]
            c, d = corners[column + 1][row + 1], corners[column][row + 1]
            shapes = [(a, b, c, d)]
            if generator.random() < 0.3:
                shapes = [(a, b, c), (a, c, d)] if generator.random() < 0.5 else [(a, b, d), (b, c, d)]
            for shape in shapes:
                near = {colours.get((column - 1, row)), colours.get((column, row - 1)), colours.get((column, row))}
                free = [k for k in range(len(COLOUR_WEIGHTS)) if k not in near]
                colour = generator.choices(free, [COLOUR_WEIGHTS[k] for k in free])[0]
                colours[column, row] = colour
                points = " ".join(f"{x:.0f},{y:.0f}" for x, y in shape)
                panes.append(h("polygon", points=points, class_=f"g{colour}"))
    box = {"viewBox": f"0 0 {WINDOW_WIDTH} {WINDOW_HEIGHT}", "preserveAspectRatio": "xMidYMid slice"}
    return h("svg", panes, class_="window", **box, aria_hidden="true")


@cache
def read_resource(package: str, name: str) -> str:
    """Return the text of a package's CSS or JavaScript file."""
    return (files(package) / name).read_text(encoding="utf-8").strip()


def wrap_document(title: str, body: Sequence[Markup | None], script: str, styles: Sequence[str] = ()) -> str:
    """Return a whole HTML page with the report style. Its policy allows no network access and no script but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    css = "\n".join([read_resource("vitrail.reports", "page.css"), *styles]).rstrip()
    head = [
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="generator", content=f"vitrail {vitrail.__version__}"),
        h("title", title),
        h("style", Markup(css)),
    ]
    page = h("html", h("head", join_markup(head, "\n")), Markup("\n"), h("body", join_markup(body, "\n")), lang="en")
    return f"<!doctype html>\n{page}\n"


def render_footer(note: str) -> Markup:
    """Return the footer: the version of vitrail and a note."""
    return h("footer", h("p", f"Written by vitrail {vitrail.__version__}. {note}"), class_="inside")


def render_document(
    title: str,
    seed: str,
    top: Sequence[Markup | None],
    sections: Sequence[PageSection],
    window_source: str = "the recipe",
    style: str = "",
) -> str:
    """Return a report page; sections without content are left out. `style` is CSS added to that of all reports."""
    parts = [(key, short, title, [part for part in content if part]) for key, short, title, content in sections]
    parts = [part for part in parts if part[3]]
    links = [h("a", short, href=f"#{key}") for key, short, *_ in parts]
    contents = [h("section", h("h2", title), content, id=key, aria_label=title) for key, _, title, content in parts]
    script = read_resource("vitrail.reports", "page.js")
    body = [
        h("a", "To the results", href="#main", class_="skip"),
        h("header", render_window(seed), h("div", top, class_="inside")),
        h("nav", h("div", links, class_="inside"), aria_label="Sections of this page"),
        h("main", contents, id="main", class_="inside"),
        render_footer(f"The window is drawn from {window_source}."),
        h("script", Markup(script)),
    ]
    return wrap_document(title, body, script, [style])


def render_heading(kicker: Iterable[Any], title: str, lead: Any) -> list[Markup | None]:
    """Return the top of a page: short facts, the title and the first paragraph."""
    facts = [h("span", isolate(fact)) for fact in kicker if fact]
    return [h("p", facts, class_="kicker"), h("h1", title), h("p", lead, class_="lead")]


def build_verdict_section(verdicts: Iterable[tuple[str, bool]], *notes: str) -> PageSection:
    """Return the section of paired tests: each a sentence, and whether the difference is significant."""
    items = [h("li", text, class_="beyond" if significant else "within") for text, significant in verdicts]
    content = [h("ul", items, class_="verdicts"), *(h("p", note, class_="note") for note in notes if note)]
    return "chance", "Significance", "Statistical significance of the differences", content if items else []


def write_html(text: str, path: Path) -> None:
    """Write a page atomically."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))
