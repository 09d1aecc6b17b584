"""The page of a run that learnt without labels."""

from typing import TYPE_CHECKING, Any

from vitrail.report import facts, opening
from vitrail.report.markup import Markup, h
from vitrail.report.neighbours import found, neighbours
from vitrail.report.next_steps import advised, next_steps
from vitrail.report.reconstructions import reconstructions
from vitrail.report.run import Run
from vitrail.report.signals import signals
from vitrail.report.words import count, duration, is_number, number, percent

if TYPE_CHECKING:
    from vitrail.report.page import Part


def top(run: Run) -> list[Markup | None]:
    """The sentence, what was trained on what, the alarm where it went off, and the numbers to take away."""
    return [*opening.opening(run), alarm(run), tiles(run)]


def sections(run: Run) -> "list[Part]":
    """The parts of the page that the run has something for."""
    charts = signals(run)
    return [
        ("results", "Results", "What the features are worth", neighbours(run)),
        ("signals", "Signals", "How training went", [h("div", charts, class_="charts") if charts else None]),
        ("reconstructions", "Pictures", "What it makes of hidden pictures", reconstructions(run)),
        ("next", "Next", "What to do next", next_steps(run)),
        ("data", "Data", "The data", facts.data(run)),
        ("model", "Model", "The model", [facts.model(run)]),
        ("speed", "Speed", "Speed", facts.speed(run)),
        ("environment", "Machine", "Where it ran", [facts.environment(run)]),
        ("chosen", "Choices", "What was chosen, and why", [facts.chosen(run)]),
        ("recipe", "Recipe", "The recipe, and how to run it again", facts.recipe(run)),
    ]


def alarm(run: Run) -> Markup | None:
    """What went wrong, when, and what to change."""
    told = run.collapse
    if not told:
        return None
    stopped = (run.summary or {}).get("stopped") == "collapse"
    went = "training was stopped there" if stopped else "training went on all the same"
    cause, advice = str(told.get("cause") or ""), str(told.get("advice") or "")
    return h(
        "div",
        h("p", h("strong", f"It collapsed at step {count(told.get('step'))}"), f"; {went}."),
        h("p", h("b", "Why: "), f"{cause}.") if cause else None,
        h("p", h("b", "What to change: "), advised(advice), ".") if advice else None,
        class_="notice alarm",
        role="alert",
    )


def tiles(run: Run) -> Markup | None:
    """The few numbers to take away: of the end, else of the last look."""
    last: dict[str, Any] = (run.summary or {}) if run.finished else (run.validation[-1] if run.validation else {})
    values, labels = found(last), {"knn": "Right by nearest neighbours", "knn_pixels": "The same of raw pixels"}
    made = [
        opening.tile(label, percent(values[key][0]), *values[key]) for key, label in labels.items() if key in values
    ]
    numbers = [
        ("rank", "Effective rank", "of the differences"),
        ("spread", "Spread of the features", "0 alike, 1 everywhere"),
    ]
    if not made:
        numbers.insert(0, ("loss", "Loss", "the lower the better"))
    made += [
        opening.tile(label, number(last[key]), None, None, under)
        for key, label, under in numbers
        if is_number(last.get(key))
    ]
    if is_number(last.get("seconds")):
        speed = last.get("images_per_second")
        under = f"{number(speed)} pictures a second" if is_number(speed) else ""
        made.append(opening.tile("Time", duration(last["seconds"]), None, None, under))
    return h("div", made, class_="tiles") if made else None
