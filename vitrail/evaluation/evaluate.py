"""Evaluate one or several models on a dataset, and test whether they differ."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vitrail.data.dataset import Dataset, Images, TargetKind
from vitrail.data.transforms.pipeline import check_pipeline_media
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.open import with_fastest_precision
from vitrail.deploy.runtimes.precision import current_precision, describe_precision
from vitrail.evaluation.class_mapping import ClassMatching
from vitrail.evaluation.loading import (
    ComputeOptions,
    compute_rows,
    open_for_evaluation,
    read_training_data,
    with_views,
)
from vitrail.evaluation.masks import MaskEvaluation
from vitrail.evaluation.numbers import NumberEvaluation
from vitrail.evaluation.result import ModelEvaluation, write_predictions
from vitrail.evaluation.selection import EvaluationData, select_images
from vitrail.inference import BATCH_SIZE
from vitrail.models.base import Model
from vitrail.reports.compare import PairComparison, format_multiple_testing_note, format_pair_verdict, pair_to_dict
from vitrail.reports.document import write_html
from vitrail.reports.evaluation import EvaluationReport, render_evaluation_page
from vitrail.tasks import task_of
from vitrail.training.distributed import Team
from vitrail.training.runs.record import describe_environment
from vitrail.utils.devices import pick_device
from vitrail.utils.files import atomic_write
from vitrail.utils.progress import ProgressCallback

RECORD_FILE = "evaluation.json"
EVALUATIONS: dict[TargetKind, type[ModelEvaluation]] = {
    "single": ModelEvaluation,
    "multi": ModelEvaluation,
    "masks": MaskEvaluation,
    "numbers": NumberEvaluation,
}


@dataclass(frozen=True)
class EvaluationResult:
    """Evaluations of a model and its baselines, with paired comparisons."""

    evaluations: list[ModelEvaluation]  # the model first
    names: list[str]  # unique, for display
    pairs: list[PairComparison] = field(default_factory=list)  # the model and each of the others
    command: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[str]:
        """Return a sentence per comparison: whether the difference is significant."""
        return [format_pair_verdict(pair, self.names) for pair in self.pairs]

    @property
    def caution(self) -> str:
        """Return a note on multiple testing."""
        return format_multiple_testing_note(len(self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """Return all results for JSON: the model's at the top level, the others' in `against`."""
        first, *others = [evaluation.as_dict() for evaluation in self.evaluations]
        pairs = zip(self.pairs, self.verdicts, strict=True)
        compared = [pair_to_dict(pair, self.names) | {"verdict": verdict} for pair, verdict in pairs]
        more = {"against": others, "comparisons": compared, "caution": self.caution or None}
        return first | (more if others else {})

    def write(self, out: Path) -> list[Path]:
        """Write predictions.csv, evaluation.json and report.html to a directory, the report last."""
        out.mkdir(parents=True, exist_ok=True)
        files = [out / "predictions.csv"]
        files += [out / f"predictions-{number}.csv" for number in range(2, len(self.evaluations) + 1)]
        with atomic_write(out / RECORD_FILE) as file:  # first: it identifies an incomplete directory
            text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False)
            file.write((text + "\n").encode("utf-8", "backslashreplace"))
        for evaluation, path in zip(self.evaluations, files, strict=True):
            write_predictions(evaluation, path)
        files += [out / RECORD_FILE, out / "report.html"]
        write_html(render_evaluation_page(self.report_data()), files[-1])
        return files

    def report_data(self) -> EvaluationReport:
        """Return the content of the report."""
        first = self.evaluations[0]
        root = first.selection.where.rstrip("/") + "/"
        names = [name.removeprefix(root) for name in first.evaluation.names]
        pairs = zip(self.pairs, self.verdicts, strict=True)
        return EvaluationReport(
            names=self.names,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            evaluation=replace(first.evaluation, names=names, images=first.load_mistake_images()),
            labels=first.labels,
            metrics=[evaluation.measures for evaluation in self.evaluations],
            models=[evaluation.model_dict() for evaluation in self.evaluations],
            speeds=[evaluation.speed_dict() for evaluation in self.evaluations],
            data=first.data_dict(),
            unreadable=first.unreadable,
            environment=first.environment,
            comparisons=[(verdict, pair.is_significant) for pair, verdict in pairs],
            caution=self.caution,
            command=self.command,
            palette=first.palette,
        )


def is_evaluation(directory: Path) -> bool:
    """Return True if a directory holds an evaluation."""
    try:
        record = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    expected = {"n", "split", "model", "data"}
    return isinstance(record, dict) and expected <= set(record) and bool({"per_class", "per_target"} & set(record))


def evaluate(
    model: str | os.PathLike[str] | Model,
    data: Any = None,
    *,
    against: Sequence[str | os.PathLike[str] | Model] = (),
    split: str | None = None,
    limit: int | None = None,
    task: Literal["auto", "single", "multi"] = "auto",
    quarantine: str | None = None,
    label_from: str | None = None,
    names: str | None = None,
    ignore: tuple[int, ...] | None = None,
    class_map: str | os.PathLike[str] | None = None,
    only_present: bool = False,
    size: tuple[int, int] | None = None,
    clips: int | None = None,
    crops: int | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    runtime: str = "torch",
    merge: int = 0,
    device: str = "auto",
    batch_size: int = BATCH_SIZE,
    workers: int | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    command: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Evaluate a model on a dataset, and compare it with other models on the same images.

    `model` is a file, a directory, a run, `hf://owner/name` or a loaded model; `data` anything that `vitrail.train` takes.
    Without data, the model's own test images, else its validation images, are used, as its training split them.
    `split` is train, validation or test (default: test, else validation, else all images); `limit` a number of images, evenly
    spaced; `label_from`, `names` and `ignore` are as for `load_dataset`, where `ignore` is by default that of the models'
    training; `quarantine` is a list of images to leave out.
    Of a video, a model of clips sees so many `clips`, evenly spaced, each cropped at so many places (`crops`), and their
    probabilities are averaged; by default one clip and one crop, unless its preprocessing says otherwise.
    `precision` is fp32, bf16, fp16, or "auto": the fastest by measurement, compared with fp32 on the first images.
    `runtime` and `merge` apply to `model` alone, so that it can be compared with itself without them. `class_map` is a file that
    maps class names, or "index" if the data's classes are the model's indices.
    """
    asked = (split, task, quarantine, limit, label_from, names, ignore)
    request = data if isinstance(data, EvaluationData) else EvaluationData(data, *asked)
    compute = ComputeOptions(pick_device(device), batch_size, workers, precision)
    first = open_for_evaluation(model, compute, size=size, assume=assume, take=take, runtime=runtime, merge=merge)
    models = [first, *(open_for_evaluation(where, compute, size=size) for where in against)]
    if clips is not None or crops is not None:
        models = [with_views(item, clips, crops) for item in models]
    for item in models:
        if item.contract.labels is None:
            raise ValueError(f"{item.where} has no classifier: use vitrail.evaluation.probes.probe")

    kinds = {EVALUATIONS[item.contract.target_kind] for item in models}
    if len(kinds) > 1:
        raise ValueError(
            f"{models[0].name} predicts other targets than a model of against=: compare models of one task"
        )
    kind, task_of_model = kinds.pop(), models[0].contract.task
    if only_present and not task_of_model.has_image_classes:
        raise ValueError(
            f"only_present= is for classes, and {models[0].name} predicts {task_of_model.outputs}: omit it"
        )
    if not isinstance(request.where, Dataset):
        request = replace(request, targets=models[0].contract.targets)

    def match_all(images: Images) -> list[ClassMatching]:
        check_target_kind(models[0], images)
        return [kind.match(item, images, class_map, request.names) for item in models]

    titles = make_names_unique([item.name for item in models])
    trained = {title: read_training_data(item) for title, item in zip(titles, models, strict=True)}
    selection = select_images(request, trained, progress, match_all, models)
    matchings = match_all(selection.images)
    if only_present and not selection.images.is_multi_label and min(len(item.present) for item in matchings) < 2:
        raise ValueError("only_present= leaves a single class, so accuracy is always 1: omit it")
    if precision == "auto":
        models = [with_fastest_precision(item, len(selection.images)) for item in models]
    evaluations = []
    for item, found in zip(models, matchings, strict=True):
        outputs = compute_rows(item, kind.map_images(item, selection.images), compute, progress)
        item = replace(item, notes=(*item.notes, *describe_precision(item)))
        machine = describe_environment(Team(0, 1, compute.device), current_precision(item))
        machine |= {"batch size": compute.batch_size}
        evaluations.append(kind(item, selection, found, outputs, only_present, machine))
    pairs = [compare_pair(evaluations, index) for index in range(1, len(evaluations))]
    return EvaluationResult(evaluations, titles, pairs, tuple(command))


def check_target_kind(deployed: DeployedModel, images: Images) -> None:
    """Raise ValueError if the data has other targets than the model predicts, or images in place of videos or the reverse."""
    predicts, has = deployed.contract.task.outputs, task_of(images).outputs
    if predicts != has:
        raise ValueError(f"{deployed.name} predicts {predicts}, and the data has {has}: give other data")
    check_pipeline_media(deployed.contract.preprocessing, images.media)


def compare_pair(evaluations: list[ModelEvaluation], index: int) -> PairComparison:
    """Compare the first model with another on the images that both could read."""
    first = evaluations[0]
    return PairComparison(0, index, first.selection.split_label, first.compare(evaluations[index]))


def make_names_unique(names: list[str]) -> list[str]:
    """Return the names, with a number added to duplicates."""
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]
