"""What frozen features are worth to their nearest neighbours, beside what needs no training."""

from typing import Any

from vitrail.evaluate.intervals import wilson
from vitrail.report.charts import bar
from vitrail.report.markup import Markup, h, table
from vitrail.report.run import Run
from vitrail.report.words import is_interval, is_number, percent, pictures, span

KINDS = {"knn": "these features", "knn_random": "the untrained network", "knn_pixels": "raw pixels"}


def found(summary: dict[str, Any]) -> dict[str, tuple[float, tuple[float, float] | None]]:
    """What was measured, each with its interval: as written, else Wilson's for so many pictures."""
    images, made = summary.get("images"), {}
    for key in KINDS:
        value, within = summary.get(key), summary.get(f"{key}_interval")
        if not is_number(value):
            continue
        if is_interval(within):
            made[key] = (value, (within[0], within[1]))
        elif is_number(images) and images >= 1 and 0 <= value <= 1:
            made[key] = (value, wilson(value * images, images))
        else:
            made[key] = (value, None)
    return made


def neighbours(run: Run) -> list[Markup | None]:
    """A table with bars, and what it comes to in a sentence."""
    summary = run.summary or {}
    values = found(summary)
    if "knn" not in values:
        return []
    rows = [
        [
            KINDS[key],
            h("span", bar(value, 1 if key == "knn" else 2, within), h("span", percent(value)), class_="barred"),
            span(within) or "–",
        ]
        for key, (value, within) in values.items()
    ]
    images = summary.get("images")
    of = f" Judged on {pictures(images)} of the {run.split} split." if isinstance(images, int) else ""
    how = (
        "Each picture is given the class that its nearest training pictures vote for; nothing is trained for that. "
        "Wilson’s 95 % intervals."
    )
    return [
        h("p", verdict(values)) if len(values) > 1 else None,
        table(
            ["nearest neighbours of", "right", f"95{chr(160)}%"],
            rows,
            caption="Right by nearest neighbours",
            numbers=1,
            fit=True,
        ),
        h("p", how + of, class_="note"),
    ]


def verdict(values: dict[str, tuple[float, tuple[float, float] | None]]) -> str:
    """How far the learnt features are ahead, and whether that may be chance."""
    ours, within = values["knn"]
    parts, doubtful = [], []
    for key in ("knn_pixels", "knn_random"):
        if key in values:
            theirs, other = values[key]
            points = 100 * (ours - theirs)
            parts.append(f"{abs(points):.1f} points {'above' if points >= 0 else 'below'} {KINDS[key]}")
            if within and other and within[0] <= other[1] and other[0] <= within[1]:
                doubtful.append(KINDS[key])
    chance = f" The intervals overlap with that of {' and '.join(doubtful)}: it may be chance." if doubtful else ""
    return f"The features are {' and '.join(parts)}.{chance}"
