"""Terminal output of `vitrail evaluate`: metrics, weakest classes, confident errors, skipped files, probes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vitrail.reports.html import clean_text
from vitrail.reports.summary import format_metrics
from vitrail.utils import text

if TYPE_CHECKING:
    from vitrail.evaluation.evaluate import EvaluationResult
    from vitrail.evaluation.probes import ProbeReport
    from vitrail.evaluation.result import TextTable

MAX_ROWS = MAX_SKIPPED = 5  # lines shown


def format_probes(report: "ProbeReport") -> list[str]:
    """Return a heading, the table of the probes and the unreadable images."""
    origin = "from the cache" if report.cached else f"computed in {report.seconds:,.1f} s"
    lines = [
        f"{report.model} on {report.data}: {report.classes} classes, {report.train:,} training {report.media}s, "
        f"evaluated on {report.images:,} {report.split} {report.media}s",
        f"features of {report.width:,} values, {origin}",
    ]
    lines += [f"  {note}" for note in report.notes]
    metric = "Top-1 accuracy" if report.measure == "top1" else "mAP"
    rows = [("probe", "", metric, "95 % interval", "seconds")]
    for row in report.results:
        interval = " ".join(filter(None, (text.format_interval(row.interval), row.spread)))
        rows.append((row.probe, row.description, f"{100 * row.score:.2f} %", interval, f"{row.seconds:.1f}"))
    lines += text.format_table(rows, right=(2, 4))
    for row in report.results:
        lines += [f"{row.probe}: {note}" for note in row.notes]
    return lines + format_unreadable(report.unreadable, "", "; --json lists them all")


def format_evaluation(result: "EvaluationResult") -> str:
    """Return the complete output."""
    first = result.evaluations[0]
    blocks = [
        format_header(result),
        format_metric_table(result),
        format_lines(first.weakest_table(MAX_ROWS)),
        format_lines(first.worst_table(MAX_ROWS)),
        format_unreadable(first.unreadable, first.selection.where, ", in evaluation.json with --out"),
        format_speeds(result),
    ]
    if result.pairs:
        blocks.insert(2, result.verdicts + ([result.caution] if result.caution else []))
    return "\n\n".join("\n".join(block) for block in blocks if block).replace("\u00a0", " ")


def format_header(result: "EvaluationResult") -> list[str]:
    """Return the models, the data and the notes on both."""
    first = result.evaluations[0]
    selection, matching = first.selection, first.matching
    split = "all" if selection.split == "all" else f"the {selection.split} split"
    lines = [f"{' and '.join(map(clean_text, result.names))} on {clean_text(selection.where)}, {split}: "]
    lines[0] += text.format_image_count(first.measures["images"], selection.images.media)
    for name, evaluation in zip(result.names, result.evaluations, strict=True):
        present, outputs = len(evaluation.matching.present), len(evaluation.matching.labels)
        prefix = f"{clean_text(name)}: " if len(result.evaluations) > 1 else ""
        if present < outputs:
            scope = "predictions restricted to these" if first.only_present else "predictions over all"
            lines.append(f"  {prefix}{present:,} of {outputs:,} classes present; {scope}")
        lines += [f"  {prefix}{clean_text(note)}" for note in evaluation.deployed.notes]
    lines += [f"  classes matched {clean_text(matching.method)}"] if matching.method != "by name" else []
    return lines + [f"  {clean_text(note)}" for note in selection.notes]


def format_metric_table(result: "EvaluationResult") -> list[str]:
    """Return a table with two columns per model: the metric and its interval."""
    names = [clean_text(name) for name in result.names] if len(result.names) > 1 else [""]
    rows = [["", *(cell for name in names for cell in (name, "95 %"))]]
    for label, pairs in format_metrics([evaluation.measures for evaluation in result.evaluations]):
        rows.append([label, *(cell for pair in pairs for cell in pair)])
    lines = [text.format_calibration(evaluation.measures) for evaluation in result.evaluations]
    lines = [f"{name}: {line}" if name else line for name, line in zip(names, lines, strict=True) if line]
    return [*text.format_table(rows, right=range(1, len(rows[0]))), *lines]


def format_lines(table: "TextTable | None") -> list[str]:
    """Return a table as lines."""
    return [] if table is None else text.format_table(table.rows, right=table.right)


def format_unreadable(unreadable: Mapping[str, str], root: str, all_listed: str) -> list[str]:
    """Return the unreadable files, which no metric counts, with the reason of each."""
    files = list(unreadable.items())
    if not files:
        return []
    lines = [f"{len(files):,} file{'s' * (len(files) != 1)} left out"]
    prefix = root.rstrip("/") + "/"
    lines += [
        f"  {clean_text(path.removeprefix(prefix))}: {clean_text(reason)}" for path, reason in files[:MAX_SKIPPED]
    ]
    more = len(files) - MAX_SKIPPED
    return lines + ([f"  … and {more:,} more{all_listed}"] if more > 0 else [])


def format_speeds(result: "EvaluationResult") -> list[str]:
    """Return the images per second of each model."""
    lines = []
    for name, evaluation in zip(result.names, result.evaluations, strict=True):
        speed = evaluation.speed_dict()
        prefix = f"{clean_text(name)}: " if len(result.evaluations) > 1 else ""
        whole, alone = (text.format_number(speed[key]) for key in ("images_per_second", "model_images_per_second"))
        media = evaluation.selection.images.media
        lines.append(f"{prefix}{whole} {media}s/s with preprocessing; the model alone {alone}, in {speed['precision']}")
    return lines
