"""The top of a run's page: the sentence, what was trained on what, and the numbers that count."""

from collections.abc import Iterable
from typing import Any

from vitrail.report.charts import bar
from vitrail.report.headline import data_name, headline
from vitrail.report.markup import Markup, h, join, name, table
from vitrail.report.run import Run
from vitrail.report.words import SPACE, count, duration, is_interval, is_number, large, number, percent, span, when

MEASURES = {  # in words, and whether it is a share
    "top1": ("Right (top-1)", True),
    "map": ("Mean average precision (mAP)", True),
    "top5": ("Right among the first five (top-5)", True),
    "balanced_accuracy": ("Right, every class counting the same", True),
    "f1": ("F1, mean over classes", True),
    "micro_f1": ("F1 over all labels", True),
    "calibration_error": ("Calibration error", True),
    "loss": ("Cross-entropy", False),
}
SURELY = "The surest answer is one of the labels"  # top-1, with several labels to a picture


def opening(run: Run) -> list[Markup | None]:
    """Kicker, headline, what was done, warnings."""
    begun = run.part("started")
    kicker = [text for text in (run.part("recipe_name"), run.name, when(begun) if begun else None) if text]
    return [
        h("p", [h("span", name(text)) for text in kicker], class_="kicker"),
        h("h1", headline(run)),
        h("p", told(run), class_="lead"),
        _state(run),
        _problems(run),
    ]


def told(run: Run) -> Markup:
    """What was trained on what, in a few sentences."""
    model, sentences = run.part("model") or {}, []
    if model.get("name"):
        size = model.get("image_size")
        seen = f" on pictures of {size[0]}×{size[1]}" if isinstance(size, list) and len(size) == 2 else ""
        weights = f" with {large(model.get('parameters'))} parameters" if model.get("parameters") else ""
        begin = [", begun from ", name(model["init"])] if model.get("init") else [", begun from random weights"]
        sentences.append(join([name(model["name"]), weights, seen, begin, "."]))
    splits = run.part("data", "splits")
    if isinstance(splits, dict) and splits:
        parts = [f"{count((split or {}).get('images'))} for {_purpose(key)}" for key, split in splits.items()]
        labels = run.part("labels")
        kinds = f", in {len(labels):,} classes" if isinstance(labels, list) and labels else ""
        if kinds and run.pretraining:
            kinds += ", which only judging looked at"
        task = ", several labels to a picture" if run.several else ""
        sentences.append(join(["Pictures of ", name(data_name(run)), f": {' and '.join(parts)}{kinds}{task}."]))
    summary = run.summary or {}
    if summary.get("steps"):
        early = {"early": ", stopped early as it no longer improved", "collapse": ", stopped as it collapsed"}.get(
            str(summary.get("stopped")), ""
        )
        kept = {"ema": ", the averaged weights (EMA) kept", "best": ", the best weights kept"}.get(
            str(summary.get("weights")), ""
        )
        sentences.append(f"{count(summary['steps'])} steps in {duration(summary.get('seconds'))}{early}{kept}.")
    return join(sentences, " ")


def _purpose(split: str) -> str:
    return {"train": "training", "test": "the test"}.get(split, split)


def _state(run: Run) -> Markup | None:
    if run.finished:
        return None
    rows = run.training or run.validation
    far = f" up to step {count(rows[-1]['step'])}" if rows else ""
    return h("p", h("strong", "This run has not finished."), f" The page shows what it wrote{far}.", class_="notice")


def _problems(run: Run) -> Markup | None:
    problems = list(run.problems)
    if run.summary and run.evaluation:
        written, found = run.summary.get(run.score_name), run.evaluation.measures[run.score_name]
        if is_number(written) and abs(float(written or 0) - found) > 5e-4:
            problems.append(
                f"summary.json says {percent(written, 2)}, the kept logits give {percent(found, 2)}: the latter is shown"
            )
    if not problems:
        return None
    return h(
        "div",
        h("strong", "Not all of the run could be read."),
        h("ul", [h("li", p) for p in problems]),
        class_="notice",
    )


def tiles(run: Run) -> Markup | None:
    """The few numbers to take away."""
    measured, summary = run.measured(run.split or ""), run.summary or {}
    made = []
    made += measured_tiles(measured, run.score_name)
    if is_number(summary.get("seconds")):
        speed = summary.get("images_per_second")
        under = f"{number(speed)} pictures a second" if is_number(speed) else ""
        made.append(tile("Time", duration(summary["seconds"]), None, None, under))
    return h("div", made, class_="tiles") if made else None


def measured_tiles(measured: dict[str, Any], score: str) -> list[Markup]:
    """The measures that count most, the score first."""
    made = []
    for key in (score, "top5", "balanced_accuracy", "micro_f1", "calibration_error"):
        if is_number(measured.get(key)):
            bar_of = measured[key] if key != "calibration_error" else None  # of which the less the better
            made.append(tile(MEASURES[key][0], percent(measured[key]), bar_of, interval_of(measured, key)))
    return made


def interval_of(measured: dict[str, Any], key: str) -> Any:
    """A measure's interval, if it has one. `interval` is that of the score, which is mAP with several labels to a picture."""
    score = "map" if "map" in measured else "top1"
    return measured.get("interval" if key == score else f"{key}_interval")


def tile(label: str, shown: str, share: float | None, interval: Any, under: str = "") -> Markup:
    """One number with its name, and its interval or what else to know of it."""
    within = (float(interval[0]), float(interval[1])) if is_interval(interval) else None
    below: list[Any] = [under] if under else []
    if within:
        below = [f"95{SPACE}%: {span(within)}"]
    return h(
        "div",
        h("p", label, class_="what"),
        h("p", shown, class_="value"),
        bar(share, 1, within) if share is not None else None,
        h("p", below, class_="under") if below else None,
        class_="tile",
    )


def numbers(run: Run) -> Markup | None:
    """Every measure of every split that was evaluated, with its interval."""
    splits = [split for split in ("validation", "test", "train") if _has_score(run, split)]
    if not splits:
        return None
    return measures_of({split: run.measured(split) for split in splits}, "Measures of each split")


def measures_of(found: dict[str, dict[str, Any]], caption: str) -> Markup:
    """Measures, each with its interval, in a column for each name."""
    rows: list[list[Any]] = [["Pictures", *_spread([count(each.get("images")), ""] for each in found.values())]]
    for key, (label, share) in MEASURES.items():
        if any(is_number(each.get(key)) for each in found.values()):
            label = SURELY if key == "top1" and any("map" in each for each in found.values()) else label
            rows.append([label, *_spread(_measure(each, key, share) for each in found.values())])
    head = ["", *_spread([name(each), f"95{SPACE}%"] for each in found)]
    return table(head, rows, caption=caption, numbers=1, fit=True)


def _spread(pairs: Iterable[list[Any]]) -> list[Any]:
    return [cell for pair in pairs for cell in pair]


def _has_score(run: Run, split: str) -> bool:
    return is_number(run.measured(split).get(run.score_name))


def _measure(measured: dict[str, Any], key: str, share: bool) -> list[Any]:
    value, interval = measured.get(key), interval_of(measured, key)
    shown = percent(value, 2 if key == "calibration_error" else 1) if share else number(value, 4)
    return [h("b", shown), h("span", interval_shown(interval, share), class_="quiet")]


def interval_shown(interval: Any, share: bool) -> str:
    """In per cent for shares, else as numbers."""
    if share or not is_interval(interval):
        return span(interval)
    return "–".join(number(end) for end in interval)


def how_intervals(several: bool) -> Markup:
    """Where the intervals come from."""
    how = (
        "The 95 % intervals: Wilson’s for shares of pictures, and for means over classes with as many pictures as tell as much; "
        "for cross-entropy and calibration error a bootstrap over pictures."
    )
    if several:
        how = (
            "The 95 % intervals: Wilson’s for how often the surest answer is right; for all others a bootstrap over pictures, "
            "which is somewhat narrow where few pictures have a label."
        )
    few = " Of few pictures, chance alone makes a calibration error: the true one is rather in the lower half."
    return h("p", how + few, class_="note")
