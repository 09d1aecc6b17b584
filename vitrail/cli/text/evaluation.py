"""Terminal output of `vitrail evaluate`: metrics, weakest classes, confident errors, skipped files, probes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vitrail.reports.html import clean_text
from vitrail.reports.summary import format_metrics
from vitrail.utils import text

if TYPE_CHECKING:
    from vitrail.evaluation.evaluate import EvaluationResult
    from vitrail.evaluation.probes import ProbeReport
    from vitrail.evaluation.result import ModelEvaluation

MAX_CLASSES = MAX_MISTAKES = MAX_SKIPPED = 5  # lines shown
MAX_NAME_WIDTH = 36  # of a class name


def format_probes(report: "ProbeReport") -> list[str]:
    """Return a heading, the table of the probes and the unreadable images."""
    origin = "from the cache" if report.cached else f"computed in {report.seconds:,.1f} s"
    lines = [
        f"{report.model} on {report.data}: {report.classes} classes, {report.train:,} training images, "
        f"evaluated on {report.images:,} {report.split} images",
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
        format_weakest_classes(first),
        format_confident_mistakes(first),
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
    lines[0] += text.format_image_count(first.measures["images"])
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


def format_weakest_classes(evaluation: "ModelEvaluation") -> list[str]:
    """Return the classes with the lowest recall, average precision or IoU."""
    if evaluation.selection.images.target_kind == "masks":
        ranked = sorted(evaluation.class_rows(), key=lambda row: row["iou"])[:MAX_CLASSES]
        cells = [
            [shorten_name(row["class"]), text.format_percent(row["iou"]), text.format_count(row["pixels"])]
            for row in ranked
        ]
        return text.format_table([["weakest classes", "IoU", "pixels"], *cells], right=(1, 2))
    multilabel = evaluation.evaluation.is_multilabel
    key, title = ("average_precision", "average precision") if multilabel else ("recall", "recall")
    rows = [row for row in evaluation.class_rows() if row[key] is not None and (multilabel or row["right"] < row["n"])]
    rows.sort(key=lambda row: (row[key], -row["n"]))
    if not rows or len(evaluation.matching.present) < 2:
        return []
    table = [["weakest classes", title, *([] if multilabel else ["95 %"]), "images"]]
    for row in rows[:MAX_CLASSES]:
        interval = [] if multilabel else [text.format_interval(row["interval"], 0)]
        name, score = shorten_name(row["class"]), text.format_percent(row[key])
        table.append([name, score, *interval, text.format_count(row["n"])])
    return text.format_table(table, right=range(1, len(table[0])))


def format_confident_mistakes(evaluation: "ModelEvaluation") -> list[str]:
    """Return the wrong predictions with the highest probability, or the masks with the lowest mean IoU."""
    if evaluation.selection.images.target_kind == "masks":
        where = evaluation.selection.where
        worst = evaluation.mistake_rows()[:MAX_MISTAKES]
        cells = [[shorten_path(row["path"], where), text.format_percent(row["miou"])] for row in worst]
        return text.format_table([["worst images", "mean IoU"], *cells], right=(1,))
    rows = [["most confident errors", "", ""]]
    for row in evaluation.mistake_rows()[:MAX_MISTAKES]:
        path = shorten_path(row["path"], evaluation.selection.where)
        if "labels" in row:
            label, name = ", ".join(row["labels"]) or "none", row["about"]
            kind = "predicted" if name not in row["labels"] else "missed"
        else:
            label, name, kind = row["label"], row["predicted"], "predicted"
        prediction = f"{kind} {shorten_name(name)}, {text.format_percent(row['probability'])}"
        rows.append([path, prediction, f"label {shorten_name(label)}"])
    return text.format_table(rows) if len(rows) > 1 else []


def format_unreadable(unreadable: Mapping[str, str], root: str, all_listed: str) -> list[str]:
    """Return the unreadable files, which no metric counts, with the reason of each."""
    files = list(unreadable.items())
    if not files:
        return []
    lines = [f"{len(files):,} file{'s' * (len(files) != 1)} left out"]
    lines += [f"  {shorten_path(path, root)}: {clean_text(reason)}" for path, reason in files[:MAX_SKIPPED]]
    more = len(files) - MAX_SKIPPED
    return lines + ([f"  … and {more:,} more{all_listed}"] if more > 0 else [])


def format_speeds(result: "EvaluationResult") -> list[str]:
    """Return the images per second of each model."""
    lines = []
    for name, evaluation in zip(result.names, result.evaluations, strict=True):
        speed = evaluation.speed_dict()
        prefix = f"{clean_text(name)}: " if len(result.evaluations) > 1 else ""
        whole, alone = (text.format_number(speed[key]) for key in ("images_per_second", "model_images_per_second"))
        lines.append(f"{prefix}{whole} images/s with preprocessing; the model alone {alone}, in {speed['precision']}")
    return lines


def shorten_path(path: str, root: str) -> str:
    """Return a path relative to the dataset."""
    return clean_text(path.removeprefix(root.rstrip("/") + "/"))


def shorten_name(name: str) -> str:
    """Return a class name cut to `MAX_NAME_WIDTH`."""
    shown = clean_text(name)
    return shown if len(shown) <= MAX_NAME_WIDTH else shown[: MAX_NAME_WIDTH - 1] + "…"
