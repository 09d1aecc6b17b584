"""HTML in which nothing that comes from outside can be anything but text."""

import html
from collections.abc import Iterable
from typing import Any

EMPTY = {"br", "hr", "img", "input", "meta", "path", "rect", "line", "polygon"}


class Markup(str):
    """Text that is HTML already. Everything else is escaped on its way in."""

    __slots__ = ()


def plain(value: Any) -> str:
    """Text without what no page can show: control characters, and halves of characters from undecodable file names."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c >= " " and c != "\x7f" else {"\n": "⏎", "\t": " "}.get(c, "�") for c in text)


def escape(value: Any) -> Markup:
    """A value as text; what is markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(plain(value)))


def h(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` is the attribute class; None and False leave an attribute out, True gives it without a value."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(plain(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in EMPTY:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Any], between: str = "") -> Markup:
    """Children one after another; lists are opened, None is nothing."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, str) or not isinstance(child, Iterable):
            parts.append(escape(child))
        else:
            parts.append(join(child, between))
    return Markup(between.join(parts))


def name(text: Any, **attributes: Any) -> Markup:
    """A class, a file, a run: set apart, so that writing from right to left does not turn its surroundings round."""
    return h("bdi", text, **attributes)


def table(
    head: list[Any],
    rows: list[list[Any]],
    *,
    caption: str,
    numbers: int | None = None,
    sortable: bool = False,
    fit: bool = False,
) -> Markup:
    """A table in a box of its own that scrolls when it is wide. From column `numbers` on, cells are aligned right.

    With `fit` it is no wider than it needs. A cell may be a pair of what is shown and what it is sorted by.
    """
    first = len(head) if numbers is None else numbers

    def cell(value: Any, column: int) -> Markup:
        kind = "n" if column >= first else None
        shown, by = value if isinstance(value, tuple) else (value, None)
        if column == 0:
            return h("th", shown, scope="row", data_by=by)
        return h("td", shown, class_=kind, data_by=by)

    heads = [h("th", value, scope="col", class_="n" if column >= first else None) for column, value in enumerate(head)]
    body = [h("tr", [cell(value, column) for column, value in enumerate(row)]) for row in rows]
    made = h(
        "table",
        h("caption", caption, class_="unseen"),
        h("thead", h("tr", heads)),
        h("tbody", body),
        class_="sortable" if sortable else None,
    )
    return h("div", made, class_="wide fit" if fit else "wide", tabindex="0", role="region", aria_label=caption)
