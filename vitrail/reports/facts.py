"""Report sections on a run's data, model, speed, environment, automatic choices and recipe."""

import json
import shlex
from typing import Any

from vitrail.reports.charts.lines import ChartLine, extract_points, render_barred, render_line_chart
from vitrail.reports.document import PageSection
from vitrail.reports.html import Markup, escape, h, isolate, join_markup, render_table
from vitrail.reports.run import RunDirectory, format_value
from vitrail.utils.text import format_count, format_number, is_number

MAX_SKIPPED_SHOWN = 200


def build_fact_sections(run: RunDirectory) -> list[PageSection]:
    """Return the sections that every run has."""
    return [
        ("data", "Data", "Data", render_data(run)),
        ("model", "Model", "Model", [render_model(run)]),
        ("speed", "Speed", "Speed", render_speed(run)),
        ("environment", "Environment", "Environment", [render_environment(run)]),
        ("chosen", "Choices", "Automatic choices and their reasons", [render_choices(run)]),
        ("recipe", "Recipe", "Recipe and command", render_recipe(run)),
    ]


def render_data(run: RunDirectory) -> list[Markup | None]:
    """Return the source, splits, classes and skipped files of the data."""
    data, parts = run.get("data") or {}, []
    source, kind = data.get("where"), data.get("kind")
    if source:
        parts.append(h("p", "Read from ", h("code", isolate(source)), f" ({kind})." if kind else "."))
    splits = {key: split for key, split in (data.get("splits") or {}).items() if isinstance(split, dict)}
    rows = [_split_row(key, split) for key, split in splits.items()]
    if any("targets" in split for split in splits.values()):
        parts.append(_render_numbers(splits, run.media))
    elif rows:
        head = ["split", f"{run.media}s", "classes", "smallest class", "largest class"]
        parts.append(
            render_table(head, rows, caption=f"{run.media.capitalize()}s and classes of each split", numeric_from=1)
        )
    parts += [h("p", note, class_="note") for note in data.get("notes") or []]
    return [*parts, _render_class_balance(splits, run.media), render_skipped_files(data.get("skipped") or [])]


def _render_numbers(splits: dict[str, dict[str, Any]], media: str) -> Markup:
    """Return a table of the range, the mean and the standard deviation of each target in each split."""
    columns, rows = ("smallest", "largest", "mean", "std"), []
    for key, split in splits.items():
        targets = split.get("targets")
        for name, found in (targets if isinstance(targets, dict) else {}).items():
            values = [format_number(found.get(column), 4) if isinstance(found, dict) else "–" for column in columns]
            rows.append([isolate(name), key, format_count(split.get("images")), *values])
    head = ["target", "split", f"{media}s", *columns]
    return render_table(head, rows, caption="Numbers of each target and split", numeric_from=2)


def _split_row(key: str, split: dict[str, Any]) -> list[Any]:
    counts = {label: n for label, n in (split.get("classes") or {}).items() if is_number(n)}
    if not counts:
        return [key, format_count(split.get("images")), "–", "–", "–"]
    least, most = min(counts, key=lambda label: counts[label]), max(counts, key=lambda label: counts[label])
    ends = [join_markup([f"{counts[label]:,} (", isolate(label), ")"]) for label in (least, most)]
    return [key, format_count(split.get("images")), format_count(len(counts)), *ends]


def _render_class_balance(splits: dict[str, dict[str, Any]], media: str) -> Markup | None:
    """Return a table of the samples of each class in each split, with bars."""
    counts = {key: split.get("classes") or {} for key, split in splits.items()}
    labels = list(dict.fromkeys(label for split in counts.values() for label in split))
    if not labels:
        return None
    first = next(iter(counts))
    labels.sort(key=lambda label: -(counts[first].get(label) or 0))
    largest = {key: max([1, *(n for n in split.values() if is_number(n))]) for key, split in counts.items()}
    rows = []
    for label in labels:
        row: list[Any] = [(isolate(label), label)]
        for colour, (key, split) in enumerate(counts.items(), start=1):
            n = split.get(label) or 0
            row.append((render_barred(n / largest[key], format_count(n), colour), n))
        rows.append(row)
    title = f"{media.capitalize()}s of each class"
    table = render_table(["class", *counts], rows, caption=title, numeric_from=1, sortable=True)
    return h("details", h("summary", title), table, open=len(labels) <= 12)


def render_skipped_files(files: list[Any], full_list: str = "run.json") -> Markup | None:
    """Return the table of skipped files with the reason of each."""
    entries = [entry for entry in files if isinstance(entry, dict)]
    if not entries:
        return h("p", "No file was skipped.")
    shown = entries[:MAX_SKIPPED_SHOWN]
    rows = [[h("code", isolate(entry.get("path", "?"))), entry.get("detail", "")] for entry in shown]
    more = len(entries) - len(rows)
    return h(
        "details",
        h("summary", f"{len(entries):,} file{'' if len(entries) == 1 else 's'} skipped"),
        render_table(["file", "reason"], rows, caption="Skipped files and reasons"),
        h("p", f"… and {more:,} more, in {full_list}.") if more else None,
        open=len(entries) <= 8,
    )


def render_speed(run: RunDirectory) -> list[Markup | None]:
    """Return the throughput over the run."""
    lines = [ChartLine(f"{run.media}s/s", extract_points(run.timing, "step", "images_per_second"), 3)]
    chart = render_line_chart(f"{run.media.capitalize()}s per second", lines, x_label="step", format_x=format_count)
    overall = (run.summary or {}).get("images_per_second")
    mean = f"{format_number(overall)} {run.media}s/s over the whole run." if is_number(overall) else ""
    return [h("p", mean) if mean else None, chart]


def render_environment(run: RunDirectory) -> Markup | None:
    """Return versions and hardware."""
    environment = run.get("environment")
    return render_definitions({"vitrail": run.get("vitrail")} | (environment if isinstance(environment, dict) else {}))


def render_definitions(facts: dict[str, Any]) -> Markup | None:
    """Return a definition list; empty values are left out."""
    shown = {str(key).replace("_", " "): format_value(value) for key, value in facts.items() if value not in (None, "")}
    items = [h("div", h("dt", key), h("dd", isolate(value))) for key, value in shown.items()]
    return h("dl", items) if items else None


def render_choices(run: RunDirectory) -> Markup | None:
    """Return the settings that were adapted to the data and the machine, with reasons."""
    choices = run.get("chosen")
    if not isinstance(choices, list) or not choices:
        return None
    items = []
    for line in choices:
        setting, colon, reason = str(line).partition(": ")
        items.append(h("li", h("b", setting), f": {reason}") if colon else h("li", line))
    return h("ul", items, class_="chosen")


def render_recipe(run: RunDirectory) -> list[Markup | None]:
    """Return the resolved recipe and the command of the run."""
    command = run.get("command")
    parts: list[Markup | None] = []
    if isinstance(command, list) and command:
        parts = [h("p", "Command of this run:"), render_code(shlex.join(str(part) for part in command))]
    if run.recipe is None:
        return parts
    text = json.dumps(run.recipe, indent=2, ensure_ascii=False)
    lines = Markup("\n".join(escape(line) for line in text.split("\n")))  # escape() would replace line breaks
    return [
        *parts,
        h("p", "recipe.json in the run directory holds every setting; pass it to --recipe to repeat the run."),
        h("details", h("summary", "Full recipe"), render_code(lines)),
    ]


def render_code(text: str) -> Markup:
    """Return a block of code that can be scrolled with the keyboard."""
    return h("pre", h("code", text), tabindex="0")


def render_model(run: RunDirectory) -> Markup | None:
    """Return the description of the model."""
    model = run.get("model")
    if not isinstance(model, dict):
        return None
    facts: dict[str, Any] = {}
    for key, value in model.items():
        if key == "image_size" and isinstance(value, list):
            facts[key] = "×".join(map(str, value))
        elif key == "init":
            facts["initialised from"] = value or "random weights"
        else:
            facts[key] = format_count(value) if is_number(value) else value
    teacher, size = run.get("teacher", "where"), run.get("teacher", "parameters")
    if teacher:
        facts["teacher"] = f"{teacher}, {format_count(size)} parameters" if is_number(size) else teacher
    return render_definitions(facts)
