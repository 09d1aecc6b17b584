"""HTML building with escaping: every value that is not `Markup` is written as text."""

import html
from collections.abc import Iterable
from typing import Any

VOID_ELEMENTS = {"br", "hr", "img", "input", "meta", "path", "rect", "line", "polygon"}


class Markup(str):
    """Text that is HTML already; other values are escaped."""

    __slots__ = ()


def clean_text(value: Any) -> str:
    """Return text without control characters and lone surrogates (of undecodable file names)."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c >= " " and c != "\x7f" else {"\n": "⏎", "\t": " "}.get(c, "�") for c in text)


def escape(value: Any) -> Markup:
    """Return a value as escaped text; markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean_text(value)))


def h(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element. `class_` is the attribute class; None and False omit an attribute, True writes it without a value."""
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(clean_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID_ELEMENTS:
        return Markup(f"<{name}{attribute_text}/>")
    return Markup(f"<{name}{attribute_text}>{join_markup(children)}</{name}>")


def join_markup(children: Iterable[Any], separator: str = "") -> Markup:
    """Return the children joined; lists are flattened, None and False are skipped."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, str) or not isinstance(child, Iterable):
            parts.append(escape(child))
        else:
            parts.append(join_markup(child, separator))
    return Markup(separator.join(parts))


def isolate(text: Any, **attributes: Any) -> Markup:
    """Return a name in a bdi element, so that right-to-left text does not reorder its surroundings."""
    return h("bdi", text, **attributes)


def render_table(
    head: list[Any],
    rows: list[list[Any]],
    *,
    caption: str,
    numeric_from: int | None = None,
    sortable: bool = False,
    fit: bool = False,
) -> Markup:
    """Return a table in a box that scrolls if it is too wide. Cells from column `numeric_from` on are right-aligned.

    `fit` makes it no wider than its content. A cell may be a pair of the shown value and the sort key.
    """
    first = len(head) if numeric_from is None else numeric_from

    def cell(value: Any, column: int) -> Markup:
        shown, key = value if isinstance(value, tuple) else (value, None)
        if column == 0:
            return h("th", shown, scope="row", data_by=key)
        return h("td", shown, class_="n" if column >= first else None, data_by=key)

    heads = [h("th", value, scope="col", class_="n" if column >= first else None) for column, value in enumerate(head)]
    body = [h("tr", [cell(value, column) for column, value in enumerate(row)]) for row in rows]
    parts = [h("caption", caption, class_="unseen"), h("thead", h("tr", heads)), h("tbody", body)]
    table = h("table", parts, class_="sortable" if sortable else None)
    return h("div", table, class_="wide fit" if fit else "wide", tabindex="0", role="region", aria_label=caption)
