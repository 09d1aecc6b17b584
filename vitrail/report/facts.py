"""The rest of a run's page: its data, its speed, where it ran, what was chosen, and how to run it again."""

import json
import shlex
from typing import Any

from vitrail.report.charts import Line, bar, line_chart, of_rows
from vitrail.report.differences import brief
from vitrail.report.markup import Markup, escape, h, join, name, table
from vitrail.report.run import Run
from vitrail.report.words import count, is_number, number

MOST_BARS = 40
MOST_SKIPPED = 200


def data(run: Run) -> list[Markup | None]:
    """Splits, classes, what was left out and why."""
    told, made = run.part("data") or {}, []
    where, kind = told.get("where"), told.get("kind")
    if where:
        made.append(h("p", "Read from ", h("code", name(where)), f" ({kind})." if kind else "."))
    splits = {key: split for key, split in (told.get("splits") or {}).items() if isinstance(split, dict)}
    rows = [_split(key, split) for key, split in splits.items()]
    if rows:
        head = ["split", "pictures", "classes", "smallest class", "largest class"]
        made.append(table(head, rows, caption="Pictures and classes of each split", numbers=1))
    made += [h("p", note, class_="note") for note in told.get("notes") or []]
    made.append(_balance(run, splits))
    made.append(skipped(told.get("skipped") or []))
    return made


def _split(key: str, split: dict[str, Any]) -> list[Any]:
    counts = {label: n for label, n in (split.get("classes") or {}).items() if is_number(n)}
    if not counts:
        return [key, count(split.get("images")), "–", "–", "–"]
    least, most = min(counts, key=lambda label: counts[label]), max(counts, key=lambda label: counts[label])
    ends = [join([f"{counts[label]:,} (", name(label), ")"]) for label in (least, most)]
    return [key, count(split.get("images")), count(len(counts)), *ends]


def _balance(run: Run, splits: dict[str, dict[str, Any]]) -> Markup | None:
    """Pictures of each class in each split, with bars."""
    counts = {key: split.get("classes") or {} for key, split in splits.items()}
    labels = list(dict.fromkeys(label for split in counts.values() for label in split))
    if not labels:
        return None
    first = next(iter(counts))
    labels.sort(key=lambda label: -(counts[first].get(label) or 0))
    most = {key: max([1, *(n for n in split.values() if is_number(n))]) for key, split in counts.items()}
    rows = []
    for label in labels:
        row: list[Any] = [(name(label), label)]
        for colour, (key, split) in enumerate(counts.items(), start=1):
            n = split.get(label) or 0
            row.append((h("span", bar(n / most[key], colour), h("span", count(n)), class_="barred"), n))
        rows.append(row)
    made = table(["class", *counts], rows, caption="Pictures of each class", numbers=1, sortable=True)
    return h("details", h("summary", "Pictures of each class"), made, open=len(labels) <= 12)


def skipped(files: list[Any], all_in: str = "run.json") -> Markup | None:
    """Files that were left out, each with the reason."""
    entries = [entry for entry in files if isinstance(entry, dict)]
    if not entries:
        return h("p", "No file was left out.")
    rows = [[h("code", name(entry.get("path", "?"))), entry.get("detail", "")] for entry in entries[:MOST_SKIPPED]]
    more = len(entries) - len(rows)
    return h(
        "details",
        h("summary", f"{len(entries):,} file{'' if len(entries) == 1 else 's'} left out"),
        table(["file", "why"], rows, caption="Files left out, and why"),
        h("p", f"… and {more:,} more, in {all_in}.") if more else None,
        open=len(entries) <= 8,
    )


def speed(run: Run) -> list[Markup | None]:
    """Pictures a second over the run."""
    points = of_rows(run.timing, "step", "images_per_second")
    chart = line_chart("Pictures a second", [Line("pictures a second", points, 3)], x_name="step", x_value=count)
    overall = (run.summary or {}).get("images_per_second")
    told = f"{number(overall)} pictures a second over the whole run." if is_number(overall) else ""
    return [h("p", told) if told else None, chart]


def environment(run: Run) -> Markup | None:
    """Where it ran."""
    told = run.part("environment")
    facts: dict[str, Any] = dict(told) if isinstance(told, dict) else {}
    if run.part("vitrail"):
        facts = {"vitrail": run.part("vitrail")} | facts
    return definitions(facts)


def definitions(facts: dict[str, Any]) -> Markup | None:
    """Terms and what they are; what says nothing is left out."""
    told = {
        str(key).replace("_", " "): brief(value) for key, value in facts.items() if value is not None and value != ""
    }
    if not told:
        return None
    return h("dl", [h("div", h("dt", key), h("dd", name(value))) for key, value in told.items()])


def chosen(run: Run) -> Markup | None:
    """What was adapted to the data and the machine, with the reason."""
    told = run.part("chosen")
    if not isinstance(told, list) or not told:
        return None
    items = []
    for line in told:
        what, colon, why = str(line).partition(": ")
        items.append(h("li", h("b", what), f": {why}") if colon else h("li", line))
    return h("ul", items, class_="chosen")


def recipe(run: Run) -> list[Markup | None]:
    """The resolved recipe, and the command that repeats the run."""
    command = run.part("command")
    again = None
    if isinstance(command, list) and command:
        again = h(
            "div",
            h("p", "The command of this run:"),
            h("pre", h("code", shlex.join(str(part) for part in command)), tabindex="0"),
        )
    if run.recipe is None:
        return [again]
    text = json.dumps(run.recipe, indent=2, ensure_ascii=False)
    shown = Markup("\n".join(escape(line) for line in text.split("\n")))  # escape shows a line's end, here it is one
    return [
        again,
        h("p", "recipe.json in the run’s directory holds every choice, and can be run again as it is."),
        h("details", h("summary", "The whole recipe"), h("pre", h("code", shown), tabindex="0")),
    ]


def model(run: Run) -> Markup | None:
    """What the model takes and is."""
    told = run.part("model")
    if not isinstance(told, dict):
        return None
    facts: dict[str, Any] = {}
    for key, value in told.items():
        if key == "image_size" and isinstance(value, list):
            facts[key] = "×".join(map(str, value))
        elif key == "init":
            facts["begun from"] = value or "random weights"
        elif is_number(value):
            facts[key] = count(value)
        elif value is not None:
            facts[key] = value
    teacher, size = run.part("teacher", "where"), run.part("teacher", "parameters")
    if teacher:
        facts["taught by"] = f"{teacher}, {count(size)} parameters" if is_number(size) else teacher
    return definitions(facts)
