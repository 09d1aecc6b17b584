"""The report page of a run."""

import json
from pathlib import Path

from vitrail.reports import curves, facts, predictions, pretraining, summary
from vitrail.reports.charts.lines import render_chart_grid
from vitrail.reports.document import PageSection, render_document, write_html
from vitrail.reports.run import EvaluatedSplit, RunDirectory, read_run
from vitrail.reports.sections import build_target_sections


def write_report(run_directory: str | Path) -> Path:
    """Read a run, write its page to report.html in the run directory, and return the path."""
    return write_run_page(read_run(run_directory))


def write_run_page(run: RunDirectory, path: Path | None = None) -> Path:
    """Write the page of a run and return its path [report.html in the run directory]."""
    path = path or run.directory / "report.html"
    write_html(render_run_page(run), path)
    return path


def render_run_page(run: RunDirectory) -> str:
    """Return the page of one run."""
    seed = json.dumps(run.recipe, sort_keys=True) if run.recipe else summary.describe_run(run)
    if run.is_pretraining:
        top, sections = pretraining.render_pretraining_top(run), pretraining.build_pretraining_sections(run)
    else:
        top, sections = [*summary.render_opening(run), summary.render_run_tiles(run)], build_sections(run)
    return render_document(summary.format_headline(run), seed, top, [*sections, *facts.build_fact_sections(run)])


def build_sections(run: RunDirectory) -> list[PageSection]:
    """Return the sections of a supervised run that it has data for."""
    evaluation, charts = run.evaluation, render_chart_grid(curves.render_training_charts(run))
    note = summary.render_interval_note(run.score_name, run.media) if evaluation else None
    sections: list[PageSection] = [
        ("results", "Results", "Results", [summary.render_metrics(run), note]),
        ("curves", "Training", "Training curves", [charts]),
    ]
    shown = predictions.select_evaluation(run)
    if shown is not None and not isinstance(shown, EvaluatedSplit):
        labels = run.class_names(shown.n_classes)
        return sections + build_target_sections(shown, labels, run.get("data", "colours"))
    if isinstance(evaluation, EvaluatedSplit):
        labels = run.class_names(evaluation.n_classes)
        sections += predictions.build_class_sections(evaluation, labels, f"Per-class results, {evaluation.split}")
    if shown is not None:
        sections.append(predictions.build_mistakes_section(shown, run.class_names(shown.n_classes)))
    if isinstance(evaluation, EvaluatedSplit):
        parts = predictions.render_calibration(evaluation, summary.format_run_temperature(run))
        sections.append(("calibration", "Calibration", "Calibration", parts))
    return sections
