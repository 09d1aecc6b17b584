"""The findings of an audit as people read them: the splits, then each kind with its count, some paths, and what to do."""

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.data.audit import Audit, Finding
    from vitrail.data.pictures import Pictures

COLOURS = {"error": "\033[1;31m", "warning": "\033[33m", "note": "\033[36m"}
OTHER = {"bold": "\033[1m", "dim": "\033[2m"}
PLAIN = "\033[0m"
INSET = " " * 10


def text(found: "Audit", examples: int) -> str:
    """The whole page."""
    from vitrail.data.audit import KINDS

    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    lines = [*splits(found), *map(printable, found.dataset.notes)]
    for kind in found.counts:  # as they come: the gravest first
        inside = found.of([kind])
        severity = inside[0].severity
        severity = painted(severity, severity) + " " * (8 - len(severity))
        lines += ["", f"{severity}{len(inside):>7,}  {painted('bold', kind)}: {KINDS[kind].title}"]
        for each in inside[:examples]:
            lines += example(each, found.dataset.where, width)
        if len(inside) > examples > 0:
            lines.append(painted("dim", f"{INSET}… and {len(inside) - examples:,} more"))
        lines.append(f"{INSET}→ {KINDS[kind].remedy}")
    return "\n".join([*lines, "", verdict(found)])


def splits(found: "Audit") -> list[str]:
    """The splits as a table."""
    pictures = found.dataset.splits
    total, classes = sum(map(len, pictures.values())), {name for each in pictures.values() for name in each.classes}
    head = f"{printable(found.dataset.where)}: {amount(total, 'picture')} of {amount(len(classes), 'class', 'classes')}"
    rows = [("split", "pictures", "classes", "smallest class", "largest class")]
    rows += [(split, f"{len(each):,}", f"{len(each.classes):,}", *ends(each)) for split, each in pictures.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < column < 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [painted("bold", head), "", lines[0], "─" * max(map(len, lines)), *lines[1:]]


def ends(pictures: "Pictures") -> tuple[str, str]:
    """The smallest and the largest class with their counts."""
    counts = pictures.counts()
    if not len(counts):
        return "–", "–"
    if counts.min() == counts.max():
        return f"all: {counts[0]:,}", ""
    least, most = (f"{printable(pictures.classes[k])[:24]}: {counts[k]:,}" for k in (counts.argmin(), counts.argmax()))
    return least, most


def example(each: "Finding", where: str, width: int) -> list[str]:
    """One path with its detail: beside it, or below where it is too long for the line."""
    path, detail = (printable(value.replace(where.rstrip("/") + "/", "")) for value in (each.path, each.detail))
    if len(INSET) + len(path) + 2 + len(detail) <= width:
        return [f"{INSET}{path}  {painted('dim', detail)}"]
    inset = INSET + "    "
    wrapped = textwrap.wrap(detail, max(20, width - len(inset)), break_long_words=False, break_on_hyphens=False)
    return [f"{INSET}{path}", *(inset + painted("dim", line) for line in wrapped)]


def verdict(found: "Audit") -> str:
    """The last line."""
    totals = {severity: sum(each.severity == severity for each in found.findings) for severity in COLOURS}
    said = [amount(totals[severity], severity) for severity in COLOURS if totals[severity]]
    if not found.ok:
        return painted("error", f"{', '.join(said)}: mend the errors before training.")
    if not said:
        return "Nothing found: ready to train on."
    return f"{', '.join(said)}: nothing that would hurt."


def amount(count: int, one: str, many: str | None = None) -> str:
    """1 picture, 2,000 pictures."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def printable(value: str) -> str:
    """A name on one line, whatever it holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def painted(colour: str, value: str) -> str:
    """Colour, where somebody is looking."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return value
    return (COLOURS | OTHER)[colour] + value + PLAIN
