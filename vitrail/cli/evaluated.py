"""An evaluation as people read it in a terminal: the numbers, the weakest classes, the surest mistakes, what was left out."""

from typing import TYPE_CHECKING, Any

from vitrail.report.markup import plain
from vitrail.report.opening import MEASURES, SURELY, interval_of, interval_shown
from vitrail.report.words import count, is_number, number, percent, pictures, span

if TYPE_CHECKING:
    from vitrail.evaluation.evaluating import Evaluated
    from vitrail.evaluation.judged import Judged

WEAKEST = SUREST = 5
NAMED = 5  # files that were left out
MOST_WIDTH = 36  # of a class's name


def text(evaluated: "Evaluated") -> str:
    """The whole of it."""
    first = evaluated.judged[0]
    blocks = [about(evaluated), measures(evaluated), weakest(first), surest(first), left_out(first), speeds(evaluated)]
    if evaluated.pairs:
        blocks.insert(2, evaluated.verdicts + ([evaluated.caution] if evaluated.caution else []))
    return "\n\n".join("\n".join(block) for block in blocks if block).replace("\u00a0", " ")


def about(evaluated: "Evaluated") -> list[str]:
    """What was judged on what, and what is to be known of it."""
    first = evaluated.judged[0]
    chosen, matching = first.chosen, first.matching
    which = "all" if chosen.split == "all" else f"the {chosen.split} split"
    lines = [f"{' and '.join(map(plain, evaluated.names))} on {plain(chosen.where)}, {which}: "]
    lines[0] += pictures(first.measures["images"])
    for name, each in zip(evaluated.names, evaluated.judged, strict=True):
        present, outputs = len(each.matching.present), len(each.matching.labels)
        who = f"{plain(name)}: " if len(evaluated.judged) > 1 else ""
        if present < outputs:
            over = "only these are possible answers" if first.only_present else "all are possible answers"
            lines.append(f"  {who}{present:,} of {outputs:,} classes present; {over}")
        lines += [f"  {who}{plain(note)}" for note in each.opened.notes]
    lines += [f"  classes matched {plain(matching.how)}"] if matching.how != "by name" else []
    return lines + [f"  {plain(note)}" for note in chosen.notes]


def measures(evaluated: "Evaluated") -> list[str]:
    """A table with a pair of columns for each model: the number, and its interval."""
    found = [judged.measures for judged in evaluated.judged]
    names = [plain(name) for name in evaluated.names] if len(found) > 1 else [""]
    rows = [["", *(cell for name in names for cell in (name, "95 %"))]]
    for key, (label, share) in MEASURES.items():
        if any(is_number(each.get(key)) for each in found):
            pairs = [(shown(each.get(key), share), interval_shown(interval_of(each, key), share)) for each in found]
            cells = [cell for pair in pairs for cell in pair]
            label = SURELY if key == "top1" and "map" in found[0] else label
            rows.append([label, *cells])
    return aligned(rows, right=set(range(1, len(rows[0]))))


def shown(value: Any, share: bool) -> str:
    return percent(value) if share else number(value, 4)


def weakest(judged: "Judged") -> list[str]:
    """The classes that came out worst."""
    several = judged.evaluation.several
    key, called = ("average_precision", "average precision") if several else ("recall", "right")
    rows = [row for row in judged.per_class() if row[key] is not None and (several or row["right"] < row["n"])]
    rows.sort(key=lambda row: (row[key], -row["n"]))
    if not rows or len(judged.matching.present) < 2:
        return []
    made = [["weakest classes", called, *([] if several else ["95 %"]), "pictures"]]
    for row in rows[:WEAKEST]:
        within = [] if several else [span(row["interval"], 0)]
        made.append([brief(row["class"]), percent(row[key]), *within, count(row["n"])])
    return aligned(made, right=set(range(1, len(made[0]))))


def surest(judged: "Judged") -> list[str]:
    """Where it was wrong and sure of it."""
    rows = [["surest mistakes", "", ""]]
    for row in judged.surest()[:SUREST]:
        path = shortened(row["path"], judged.chosen.where)
        if "labels" in row:
            held = ", ".join(row["labels"]) or "none"
            said = "said" if row["about"] not in row["labels"] else "missed"
            rows.append([path, f"{said} {brief(row['about'])}, {percent(row['probability'])}", f"is {brief(held)}"])
        else:
            said = f"said {brief(row['predicted'])}, {percent(row['probability'])}"
            rows.append([path, said, f"is {brief(row['label'])}"])
    return aligned(rows, right=set()) if len(rows) > 1 else []


def left_out(judged: "Judged") -> list[str]:
    """Files that no number counts."""
    bad = list(judged.unreadable.items())
    if not bad:
        return []
    files = f"{len(bad):,} file" + ("" if len(bad) == 1 else "s")
    lines = [f"{files} left out"]
    lines += [f"  {shortened(path, judged.chosen.where)}: {plain(why)}" for path, why in bad[:NAMED]]
    return lines + ([f"  … and {len(bad) - NAMED:,} more, in evaluation.json with --out"] if len(bad) > NAMED else [])


def speeds(evaluated: "Evaluated") -> list[str]:
    """Pictures a second."""
    lines = []
    for name, judged in zip(evaluated.names, evaluated.judged, strict=True):
        speed = judged.speed()
        who = f"{plain(name)}: " if len(evaluated.judged) > 1 else ""
        alone = number(speed["model_images_per_second"])
        lines.append(
            f"{who}{number(speed['images_per_second'])} pictures/s with their preparation; the model alone {alone}"
        )
    return lines


def shortened(path: str, where: str) -> str:
    """A path without what all have in common."""
    return plain(path.removeprefix(where.rstrip("/") + "/"))


def brief(name: str) -> str:
    """A class's name that leaves room for others."""
    shown = plain(name)
    return shown if len(shown) <= MOST_WIDTH else shown[: MOST_WIDTH - 1] + "…"


def aligned(rows: list[list[str]], right: set[int]) -> list[str]:
    """Columns under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
