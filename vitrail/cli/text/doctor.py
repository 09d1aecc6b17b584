"""Terminal output of `vitrail doctor`: problems first, then the facts and the self-test."""

from vitrail.cli.check import colourise
from vitrail.doctor import summary
from vitrail.doctor.diagnosis import Diagnosis
from vitrail.doctor.packages import REQUIRED
from vitrail.utils.text import format_table

STATUS_COLOURS = {"ok": "note", "failed": "error", "timeout": "error", "stopped": "warning", "skipped": "dim"}


def format_diagnosis(facts: Diagnosis) -> list[str]:
    """Return all lines."""
    blocks = [[colourise("bold", f"vitrail doctor: {summary.format_headline(facts)}")], format_problems(facts)]
    blocks.append([colourise("bold", "Chosen for a run"), *format_rows(summary.describe_device(facts))])
    if facts["tests"]:
        blocks.append(format_tests(facts))
    blocks.append([colourise("bold", "Software"), *format_rows(summary.describe_software(facts))])
    extras = [summary.describe_extra(group) for group in facts["software"]["packages"] if group["name"] != REQUIRED]
    if extras:
        blocks.append(
            indent(format_table([("extra", "enables", "installed, or how to install it"), *extras], rules=(1,)))
        )
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


def format_rows(rows: summary.Rows) -> list[str]:
    """Return labels and values in two columns."""
    width = max((len(label) for label, _ in rows), default=0)
    return [f"  {label.ljust(width)}  {value}".rstrip() for label, value in rows]


def indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
