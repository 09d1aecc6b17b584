"""Report page of an evaluation: one or several models on a dataset, without their runs."""

import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from vitrail.reports import facts, predictions, summary
from vitrail.reports.document import PageSection, build_verdict_section, render_document, render_heading
from vitrail.reports.html import Markup, h, isolate, join_markup
from vitrail.reports.masks import Colour, format_colour
from vitrail.reports.run import Evaluated, EvaluatedSplit
from vitrail.reports.sections import build_target_sections
from vitrail.utils import text
from vitrail.utils.scores import find_score


@dataclass(frozen=True)
class EvaluationReport:
    """Contents of the page. Of several models, the first is evaluated and the others are the references."""

    names: list[str]
    date: str
    evaluation: Evaluated
    labels: list[str]
    metrics: list[dict[str, Any]]
    models: list[dict[str, Any]]
    speeds: list[dict[str, Any]]
    data: dict[str, Any]
    unreadable: dict[str, str]
    environment: dict[str, Any]
    comparisons: list[tuple[str, bool]]  # sentence, and whether the difference is significant
    caution: str = ""  # note on multiple comparisons
    command: tuple[str, ...] = ()
    palette: tuple[Colour, ...] | None = None  # of the classes of masks

    @property
    def media(self) -> str:
        """Return what the samples are: image or video."""
        return self.evaluation.media


def format_evaluation_headline(report: EvaluationReport) -> str:
    """Return "deit_tiny on samples: top-1 accuracy 81.0 % (75.0–85.8) on 200 images"."""
    data = PurePath(report.data["where"]).name or report.data["where"]
    score = find_score(report.metrics[0])
    return f"{report.names[0]} on {data}: {summary.format_result(report.metrics[0], score, report.media)}"


def render_evaluation_page(report: EvaluationReport) -> str:
    """Return the page."""
    title = format_evaluation_headline(report)
    kicker = ("evaluation", report.names[0], text.format_datetime(report.date))
    heading = render_heading(kicker, title, render_evaluation_lead(report))
    top = [*heading, render_skipped_notice(report), render_evaluation_tiles(report)]
    note = summary.render_interval_note(find_score(report.metrics[0]), report.media)
    columns = dict(zip(report.names if len(report.names) > 1 else ["value"], report.metrics, strict=True))
    sections: list[PageSection] = [
        (
            "results",
            "Results",
            "Results",
            [summary.render_metric_table(columns, "Metrics of each model", report.media), note],
        ),
        build_verdict_section(report.comparisons, report.caution),
        *build_result_sections(report),
        ("data", "Data", "Data", render_evaluation_data(report)),
        ("model", "Model", "Model" if len(report.models) == 1 else "Models", render_models(report)),
        ("environment", "Environment", "Environment", [facts.render_definitions(report.environment)]),
        ("command", "Command", "Command", [facts.render_code(shlex.join(report.command)) if report.command else None]),
    ]
    seed = " ".join(model["sha256"] for model in report.models)
    return render_document(title, seed, top, sections, "the model’s checksum")


def build_result_sections(report: EvaluationReport) -> list[PageSection]:
    """Return the sections on the predictions of the first model."""
    evaluation = report.evaluation
    if not isinstance(evaluation, EvaluatedSplit):
        return build_target_sections(evaluation, report.labels, list(map(format_colour, report.palette or ())))
    return [
        predictions.build_mistakes_section(evaluation, report.labels),
        *predictions.build_class_sections(evaluation, report.labels, "Per-class results"),
        ("calibration", "Calibration", "Calibration", predictions.render_calibration(evaluation)),
    ]


def render_evaluation_lead(report: EvaluationReport) -> Markup:
    """Return sentences on the model, the data and the classes."""
    model, data = report.models[0], report.data
    height, width = model["image_size"]
    present, outputs = data["classes_present"], model["classes"]
    of_model = f" of the model’s {text.format_count(outputs)}" if present < outputs else ""
    classes = f"{text.format_count(present)}{of_model} classes"
    classes = f"predicting {', '.join(report.labels)}" if data.get("targets") else f"of {classes}"
    split = "all of" if data["split"] == "all" else f"the {data['split']} split of"
    size = f" with {text.format_large_number(model['parameters'])} parameters, at {height}×{width} pixels."
    count = f": {text.format_image_count(report.metrics[0]['images'], report.media)} {classes}."
    parts = [isolate(model["name"]), size, f" Evaluated on {split} ", isolate(data["where"]), count]
    if present < outputs:
        parts.append(" Predictions are limited to these." if data["only_present"] else " All classes can be predicted.")
    return join_markup(parts)


def render_skipped_notice(report: EvaluationReport) -> Markup | None:
    """Return the notice on skipped files, or None."""
    if not report.unreadable:
        return None
    files = f"{len(report.unreadable):,} file{'s' * (len(report.unreadable) != 1)}"
    return h("p", h("strong", f"{files} skipped."), " They are listed below and not counted.", class_="notice")


def render_evaluation_tiles(report: EvaluationReport) -> Markup | None:
    """Return the tiles of the most important metrics and of the throughput."""
    speed, score = report.speeds[0], find_score(report.metrics[0])
    tiles = summary.render_metric_tiles(report.metrics[0], score)
    throughput = f"{text.format_number(speed['images_per_second'])}{text.NO_BREAK_SPACE}/{text.NO_BREAK_SPACE}s"
    duration = f"with preprocessing, in {text.format_duration(speed['seconds'])}"
    return summary.render_tiles(
        *tiles, summary.render_tile(f"{report.media.capitalize()}s per second", throughput, None, None, duration)
    )


def render_evaluation_data(report: EvaluationReport) -> list[Markup | None]:
    """Return source, class matching, notes and skipped files of the data."""
    data = report.data
    entries = [{"path": path, "detail": reason} for path, reason in report.unreadable.items()]
    source = h("code", isolate(data["where"]))
    return [
        h(
            "p",
            "Read from ",
            source,
            f" ({data['kind']}); {'targets' if data.get('targets') else 'classes'} matched {data['classes_matched']}.",
        ),
        *(h("p", note, class_="note") for note in data["notes"]),
        facts.render_skipped_files(entries, "evaluation.json"),
    ]


def render_models(report: EvaluationReport) -> list[Markup | None]:
    """Return the description of each model with its checksum and throughput."""
    parts: list[Markup | None] = []
    for name, model, speed in zip(report.names, report.models, report.speeds, strict=True):
        if len(report.models) > 1:
            parts.append(h("h3", isolate(name)))
        definitions = {key.replace("sha256", "SHA-256"): value for key, value in model.items()} | {
            "image_size": "×".join(map(str, model["image_size"])),
            "parameters": text.format_count(model["parameters"]),
            "classes": text.format_count(model["classes"]),
            f"{report.media}s/s": text.format_number(speed["images_per_second"]),
            f"{report.media}s/s, model only": text.format_number(speed["model_images_per_second"]),
        }
        parts.append(facts.render_definitions(definitions))
    return parts
