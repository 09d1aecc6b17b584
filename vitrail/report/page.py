"""A run's page as a whole."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vitrail
from vitrail.checkpoints.files.atomic import atomic
from vitrail.report import classes, curves, facts, mistakes, opening, pretraining
from vitrail.report.headline import headline, what
from vitrail.report.markup import Markup, h, join
from vitrail.report.reliability import calibration
from vitrail.report.run import Run, read_run
from vitrail.report.window import window


def write_report(run_directory: str | Path) -> Path:
    """Reads a run and writes its page, report.html, into it. Gives the page's path."""
    run = read_run(run_directory)
    path = run.directory / "report.html"
    write_page(page(run), path)
    return path


def write_page(text: str, path: Path) -> None:
    """The page on the disk, whole or not at all."""
    with atomic(path) as file:
        file.write(text.encode("utf-8"))


def page(run: Run) -> str:
    """The page of one run."""
    seed = json.dumps(run.recipe, sort_keys=True) if run.recipe else what(run)
    if run.pretraining:
        return document(headline(run), seed, pretraining.top(run), pretraining.sections(run))
    return document(headline(run), seed, [*opening.opening(run), opening.tiles(run)], sections(run))


Part = tuple[str, str, str, Iterable[Any]]  # its id, its name in the list of parts, its title, what it holds


def sections(run: Run) -> list[Part]:
    """The parts of the page that the run has something for."""
    evaluation = run.evaluation
    told = f"on {evaluation.split}" if evaluation else ""
    parts: list[Part] = [
        (
            "results",
            "Results",
            "Results",
            [opening.numbers(run), opening.how_intervals(run.several) if evaluation else None],
        ),
        ("curves", "Training", "How training went", [_charts(curves.curves(run))]),
    ]
    if evaluation:
        labels = run.labels(evaluation.logits.shape[1])
        parts.append(("classes", "Classes", f"Class by class, {told}", classes.classes(evaluation, labels)))
        if not evaluation.several and evaluation.logits.shape[1] > 1:
            parts.append(("confusion", "Confusion", "What is taken for what", classes.confusion(evaluation, labels)))
    shown = mistakes.chosen(run)
    if shown:
        parts.append(
            ("mistakes", "Mistakes", "The surest mistakes", mistakes.mistakes(shown, run.labels(shown.logits.shape[1])))
        )
    if evaluation:
        parts.append(("calibration", "Calibration", "Can its sureness be trusted?", calibration(evaluation)))
    return [
        *parts,
        ("data", "Data", "The data", facts.data(run)),
        ("model", "Model", "The model", [facts.model(run)]),
        ("speed", "Speed", "Speed", facts.speed(run)),
        ("environment", "Machine", "Where it ran", [facts.environment(run)]),
        ("chosen", "Choices", "What was chosen, and why", [facts.chosen(run)]),
        ("recipe", "Recipe", "The recipe, and how to run it again", facts.recipe(run)),
    ]


def _charts(charts: list[Markup]) -> Markup | None:
    return h("div", charts, class_="charts") if charts else None


def document(
    title: str,
    seed: str,
    top: Sequence[Markup | None],
    parts: list[Part],
    drawn_from: str = "the recipe",
    style: str = "",  # besides what all pages have
) -> str:
    """A whole page: nothing in it asks the network for anything, and no script but ours can run."""
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = [
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="generator", content=f"vitrail {vitrail.__version__}"),
        h("title", title),
        h("style", Markup(f"{_resource('page.css')}\n{style}".rstrip())),
    ]
    found = [(key, short, title, [part for part in content if part]) for key, short, title, content in parts]
    found = [part for part in found if part[3]]
    links = [h("a", short, href=f"#{key}") for key, short, *_ in found]
    body = [
        h("a", "To the results", href="#main", class_="skip"),
        h("header", window(seed), h("div", top, class_="inside")),
        h("nav", h("div", links, class_="inside"), aria_label="Parts of this page"),
        h(
            "main",
            [h("section", h("h2", title), content, id=key, aria_label=title) for key, _, title, content in found],
            id="main",
            class_="inside",
        ),
        h(
            "footer",
            h(
                "p",
                f"Written by vitrail {vitrail.__version__}. The window is drawn from {drawn_from}.",
            ),
            class_="inside",
        ),
        h("script", Markup(script)),
    ]
    whole = h("html", h("head", join(head, "\n")), Markup("\n"), h("body", join(body, "\n")), lang="en")
    return f"<!doctype html>\n{whole}\n"


@cache
def _resource(name: str) -> str:
    return (files("vitrail.report") / name).read_text(encoding="utf-8").strip()
