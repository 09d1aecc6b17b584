"""The page of an evaluation: a model's file judged on pictures, without the run that made it."""

import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from vitrail.report import classes, facts, mistakes, opening
from vitrail.report.markup import Markup, h, join, name
from vitrail.report.page import Part, document
from vitrail.report.reliability import calibration
from vitrail.report.run import Evaluation
from vitrail.report.words import SPACE, count, duration, large, number, percent, pictures, span, when


@dataclass(frozen=True)
class Told:
    """All that the page shows. Of several models the first is judged, the others are what it is held against."""

    names: list[str]
    when: str
    evaluation: Evaluation
    labels: list[str]
    measures: list[dict[str, Any]]
    models: list[dict[str, Any]]
    speeds: list[dict[str, Any]]
    data: dict[str, Any]
    unreadable: dict[str, str]
    environment: dict[str, Any]
    verdicts: list[tuple[str, bool]]  # in words, and whether beyond chance
    caution: str = ""  # of several comparisons
    command: tuple[str, ...] = ()


def headline(told: Told) -> str:
    """ "deit_tiny on samples: 81.0 % of 200 pictures right (75.0–85.8)"."""
    found, data = told.measures[0], PurePath(told.data["where"]).name or told.data["where"]
    within = f" ({span(found['interval'])})"
    of = pictures(found["images"])
    if told.evaluation.several:
        return f"{told.names[0]} on {data}: mAP {percent(found['map'])} on {of}{within}"
    return f"{told.names[0]} on {data}: {percent(found['top1'])} of {of} right{within}"


def page(told: Told) -> str:
    """The page."""
    title, evaluation = headline(told), told.evaluation
    top = [
        h("p", [h("span", name(text)) for text in ("evaluation", told.names[0], when(told.when))], class_="kicker"),
        h("h1", title),
        h("p", lead(told), class_="lead"),
        left_out(told),
        tiles(told),
    ]
    parts: list[Part] = [
        ("results", "Results", "Results", [measured(told), opening.how_intervals(evaluation.several)]),
    ]
    if told.verdicts:
        caution = h("p", told.caution, class_="note") if told.caution else None
        parts.append(("chance", "Chance", "More than chance?", [verdicts(told), caution]))
    parts.append(("mistakes", "Mistakes", "The surest mistakes", mistakes.mistakes(evaluation, told.labels)))
    parts.append(("classes", "Classes", "Class by class", classes.classes(evaluation, told.labels)))
    if not evaluation.several and len(told.labels) > 1:
        parts.append(("confusion", "Confusion", "What is taken for what", classes.confusion(evaluation, told.labels)))
    parts += [
        ("calibration", "Calibration", "Can its sureness be trusted?", calibration(evaluation)),
        ("data", "Data", "The data", data(told)),
        ("model", "Model", "The model" if len(told.models) == 1 else "The models", models(told)),
        ("environment", "Machine", "Where it ran", [facts.definitions(told.environment)]),
        ("command", "Command", "How it was asked for", [command(told)]),
    ]
    seed = " ".join(model["sha256"] for model in told.models)
    return document(title, seed, top, parts, "the model’s checksum")


def lead(told: Told) -> Markup:
    """What was judged on what, in a few sentences."""
    model, where = told.models[0], told.data
    height, width = model["image_size"]
    present, outputs = where["classes_present"], model["classes"]
    some = (
        f"{count(present)} of the model’s {count(outputs)} classes"
        if present < outputs
        else f"{count(present)} classes"
    )
    which = "everything in" if where["split"] == "all" else f"the {where['split']} split of"
    sentences = [
        join([name(model["name"]), f" with {large(model['parameters'])} parameters, on pictures of {height}×{width}."]),
        join(["Judged on ", which, " ", name(where["where"]), f": {pictures(told.measures[0]['images'])} of {some}."]),
    ]
    if present < outputs:
        over = "Only these are answers" if where["only_present"] else "All of its classes are possible answers"
        sentences.append(Markup(f"{over}."))
    return join(sentences, " ")


def left_out(told: Told) -> Markup | None:
    """A word on what the numbers are not over, where there is such a thing."""
    if not told.unreadable:
        return None
    files = f"{count(len(told.unreadable))} file" + ("" if len(told.unreadable) == 1 else "s")
    return h(
        "p", h("strong", f"{files} left out."), " They are named below, and no number counts them.", class_="notice"
    )


def tiles(told: Told) -> Markup:
    """The few numbers to take away."""
    speed, score = told.speeds[0], "map" if told.evaluation.several else "top1"
    made = opening.measured_tiles(told.measures[0], score)
    rate = f"{number(speed['images_per_second'])}{SPACE}/{SPACE}s"
    made.append(opening.tile("Pictures, prepared and judged", rate, None, None, f"in {duration(speed['seconds'])}"))
    return h("div", made, class_="tiles")


def measured(told: Told) -> Markup:
    """Every measure, in a column for each model."""
    names = told.names if len(told.names) > 1 else ["value"]
    columns = dict(zip(names, told.measures, strict=True))
    return opening.measures_of(columns, "Measures of each model")


def verdicts(told: Told) -> Markup:
    """Whether the model differs from the others."""
    items = [h("li", said, class_="beyond" if beyond else "within") for said, beyond in told.verdicts]
    return h("ul", items, class_="verdicts")


def data(told: Told) -> list[Markup | None]:
    """Where the pictures come from, and which were left out."""
    where = told.data
    entries = [{"path": path, "detail": why} for path, why in told.unreadable.items()]
    return [
        h(
            "p",
            "Read from ",
            h("code", name(where["where"])),
            f" ({where['kind']}); classes matched {where['classes_matched']}.",
        ),
        *(h("p", note, class_="note") for note in where["notes"]),
        facts.skipped(entries, "evaluation.json"),
    ]


def models(told: Told) -> list[Markup | None]:
    """What the models are, with their checksums."""
    made: list[Markup | None] = []
    for called, model, speed in zip(told.names, told.models, told.speeds, strict=True):
        if len(told.models) > 1:
            made.append(h("h3", name(called)))
        known = {key.replace("sha256", "SHA-256"): value for key, value in model.items()}
        known |= {"image_size": "×".join(map(str, model["image_size"])), "parameters": count(model["parameters"])}
        known |= {
            "classes": count(model["classes"]),
            "pictures a second": number(speed["images_per_second"]),
            "the model alone": f"{number(speed['model_images_per_second'])} a second",
        }
        made.append(facts.definitions(known))
    return made


def command(told: Told) -> Markup | None:
    """How it was asked for."""
    if not told.command:
        return None
    return h("pre", h("code", shlex.join(told.command)), tabindex="0")
