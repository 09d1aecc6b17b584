"""Terminal output of `vitrail check`: the splits, then each kind of finding with its count, examples and remedy."""

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from vitrail.utils.text import format_table

if TYPE_CHECKING:
    from vitrail.data.audit import Audit, Finding
    from vitrail.data.dataset import Images

COLOURS = {"error": "\033[1;31m", "warning": "\033[33m", "note": "\033[36m"}
STYLES = {"bold": "\033[1m", "dim": "\033[2m"}
RESET = "\033[0m"
INDENT = " " * 10


def format_audit(audit: "Audit", examples: int) -> str:
    """Return the complete output."""
    from vitrail.data.audit import FINDING_KINDS

    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    lines = [*format_splits(audit), *map(escape_unprintable, audit.dataset.notes)]
    for kind in audit.counts:  # most severe first
        findings = audit.select_findings([kind])
        severity = findings[0].severity
        severity = colourise(severity, severity) + " " * (8 - len(severity))
        lines += ["", f"{severity}{len(findings):>7,}  {colourise('bold', kind)}: {FINDING_KINDS[kind].title}"]
        for finding in findings[:examples]:
            lines += format_example(finding, audit.dataset.source, width)
        if len(findings) > examples > 0:
            lines.append(colourise("dim", f"{INDENT}… and {len(findings) - examples:,} more"))
        lines.append(f"{INDENT}→ {FINDING_KINDS[kind].remedy}")
    return "\n".join([*lines, "", format_verdict(audit)])


def format_splits(audit: "Audit") -> list[str]:
    """Return the splits as a table."""
    splits = audit.dataset.splits
    n_images, n_classes = (
        sum(map(len, splits.values())),
        len({name for split in splits.values() for name in split.classes}),
    )
    heading = f"{escape_unprintable(audit.dataset.source)}: {format_amount(n_images, 'image')}, "
    heading += format_amount(n_classes, "class", "classes")
    rows = [("split", "images", "classes", "smallest class", "largest class")]
    rows += [
        (name, f"{len(split):,}", f"{len(split.classes):,}", *describe_class_range(split))
        for name, split in splits.items()
    ]
    return [colourise("bold", heading), "", *format_table(rows, right=(1, 2), rules=(1,))]


def describe_class_range(images: "Images") -> tuple[str, str]:
    """Return the smallest and the largest class with their counts."""
    counts = images.count_classes()
    if not len(counts):
        return "–", "–"
    if counts.min() == counts.max():
        return f"all: {counts[0]:,}", ""
    smallest, largest = (
        f"{escape_unprintable(images.classes[k])[:24]}: {counts[k]:,}" for k in (counts.argmin(), counts.argmax())
    )
    return smallest, largest


def format_example(finding: "Finding", source: str, width: int) -> list[str]:
    """Return a path with its detail on the same line, or below if the line is too long."""
    path, detail = (
        escape_unprintable(value.replace(source.rstrip("/") + "/", "")) for value in (finding.path, finding.detail)
    )
    if len(INDENT) + len(path) + 2 + len(detail) <= width:
        return [f"{INDENT}{path}  {colourise('dim', detail)}"]
    inset = INDENT + "    "
    wrapped = textwrap.wrap(detail, max(20, width - len(inset)), break_long_words=False, break_on_hyphens=False)
    return [f"{INDENT}{path}", *(inset + colourise("dim", line) for line in wrapped)]


def format_verdict(audit: "Audit") -> str:
    """Return the last line: the number of findings and the conclusion."""
    totals = {severity: sum(finding.severity == severity for finding in audit.findings) for severity in COLOURS}
    counts = [format_amount(totals[severity], severity) for severity in COLOURS if totals[severity]]
    if not audit.is_ok:
        return colourise("error", f"{', '.join(counts)}: fix the errors before training.")
    if not counts:
        return "No findings: ready to train."
    return f"{', '.join(counts)}: no errors, ready to train."


def format_amount(count: int, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: 1 image, 2,000 images."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def escape_unprintable(value: str) -> str:
    """Return a text with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def colourise(colour: str, value: str) -> str:
    """Return the text in a colour if standard output is a terminal that shows colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return value
    return (COLOURS | STYLES)[colour] + value + RESET
