"""Terminal output of `vitrail doctor`: problems first, then the facts and the self-test."""

import shutil
import textwrap

from vitrail.cli.check import colourise
from vitrail.doctor import summary
from vitrail.doctor.diagnosis import Diagnosis
from vitrail.doctor.packages import REQUIRED
from vitrail.utils.text import format_table

STATUS_COLOURS = {"ok": "note", "failed": "error", "timeout": "error", "stopped": "warning", "skipped": "dim"}

MIN_WIDTH, MAX_WIDTH = 100, 120  # characters of a line


def format_diagnosis(facts: Diagnosis) -> list[str]:
    """Return all lines."""
    blocks = [[colourise("bold", f"vitrail doctor: {summary.format_headline(facts)}")], format_problems(facts)]
    blocks.append([colourise("bold", "Chosen for a run"), *format_rows(summary.describe_device(facts))])
    if facts["tests"]:
        blocks.append(format_tests(facts))
    blocks.append([colourise("bold", "Software"), *format_rows(summary.describe_software(facts))])
    extras = [summary.describe_extra(group) for group in facts["software"]["packages"] if group["name"] != REQUIRED]
    if extras:
        blocks.append(format_extras(extras))
    blocks.append([colourise("bold", "Machine"), *format_rows(summary.describe_machine(facts))])
    folders = [("folder", "path", "size", "free"), *map(summary.describe_storage, facts["storage"])]
    blocks.append([colourise("bold", "Storage"), *indent(format_table(folders, right=(2,), rules=(1,)))])
    variables = format_rows(list(facts["environment"].items())) or ["  none of those that matter"]
    blocks.append([colourise("bold", "Environment variables"), *variables])
    return [line for block in blocks if block for line in (*block, "")][:-1]


def format_problems(facts: Diagnosis) -> list[str]:
    """Return two lines for each problem: what is wrong, and the remedy."""
    lines = []
    for problem in facts["problems"]:
        lines.append(f"{colourise(problem['severity'], problem['severity'].ljust(8))} {problem['text']}")
        lines.append(f"         → {problem['remedy']}")
    return lines


def format_tests(facts: Diagnosis) -> list[str]:
    """Return a line for each step of the self-test."""
    rows = [(test["status"], test["name"], f"{test['seconds']:.1f} s", test["detail"]) for test in facts["tests"]]
    lines = indent(format_table(rows, right=(2,)))
    colours = [STATUS_COLOURS[test["status"]] for test in facts["tests"]]
    shown = [
        line.replace(test["status"], colourise(colour, test["status"]), 1)
        for line, colour, test in zip(lines, colours, facts["tests"], strict=True)
    ]
    return [colourise("bold", "Self-test"), *shown]


def format_extras(extras: list[tuple[str, str, str]]) -> list[str]:
    """Return the table of extras, long lists of versions wrapped."""
    left = indent(format_table([("extra", "enables"), *(extra[:2] for extra in extras)]))
    values = ["installed, or how to install it", *(extra[2] for extra in extras)]
    lines = wrap_rows(list(zip(left, values, strict=True)))
    return [lines[0], "  " + "─" * (max(map(len, lines)) - 2), *lines[1:]]


def format_rows(rows: summary.Rows) -> list[str]:
    """Return labels and values in two columns."""
    return wrap_rows([(f"  {label}", value) for label, value in rows])


def wrap_rows(rows: list[tuple[str, str]]) -> list[str]:
    """Return two columns, the second wrapped to the width of the terminal."""
    start = max((len(label) for label, _ in rows), default=0) + 2
    width = max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns - 1))
    lines = []
    for label, value in rows:
        parts = textwrap.wrap(value, max(30, width - start), break_long_words=False, break_on_hyphens=False) or [""]
        labels = (label, *[""] * (len(parts) - 1))
        lines += [f"{first.ljust(start)}{part}".rstrip() for first, part in zip(labels, parts, strict=True)]
    return lines


def indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
