"""Self-training: a teacher labels images without labels, a student learns these too, and becomes the next teacher.

After "Self-training with Noisy Student improves ImageNet classification" (Xie et al. 2020). Each round is a run of its own: its
recipe names the unlabelled images and the file of their predicted labels, so it can be resumed, repeated and compared as any
other. Rounds share a directory; `self_training.json` in it holds the plan, so that the whole can be resumed.
"""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.checkpoints.load import load
from vitrail.data.audit import UNUSABLE_KINDS, audit_dataset
from vitrail.data.dataset import Dataset, Images
from vitrail.data.labels import drop_placeholder_labels
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.remote.urls import refuse_credentials
from vitrail.data.sources.splits import UNLABELLED
from vitrail.inference import TorchRuntime, probabilities, run_batches
from vitrail.metrics.intervals import wilson_interval
from vitrail.models.base import Model
from vitrail.reports.self_training import Round, SelfTrainingRecord, write_self_training_report
from vitrail.tasks import task_of
from vitrail.training.distributed import count_processes
from vitrail.training.recipe import Data, Machine
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.pseudo_labels import (
    PseudoLabels,
    load_unlabelled,
    read_pseudo_labels,
    select_pseudo_labels,
    write_pseudo_labels,
)
from vitrail.training.runs.record import read_summary, write_json
from vitrail.training.train import Connected, choose_directory, optional_path, resume, train
from vitrail.utils.devices import pick_device
from vitrail.utils.files import stage_output
from vitrail.utils.json import read_json_file, to_json
from vitrail.utils.scores import find_score

PLAN_FILE, RECORD_FILE = "self_training.json", "rounds.json"
REPEATED_KINDS = ("leak", "near-leak")  # unlabelled images that are labelled ones, or nearly


@dataclass(frozen=True)
class Plan:
    """Everything that determines the rounds besides the machine."""

    data: Data
    unlabelled: str
    teacher: str | None = None  # of the first round; None: a model trained on the labels alone
    init: str | None = None
    recipe: str | None = None
    rounds: int = 2
    threshold: float = 0.8
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options of `vitrail.train`
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be >= 1, got {self.rounds}")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, got {self.threshold:g}")


def self_train(
    data: str | os.PathLike[str] | Data,
    unlabelled: str | os.PathLike[str],
    *,
    teacher: str | os.PathLike[str] | None = None,
    init: str | os.PathLike[str] | None = None,
    recipe: str | None = None,
    rounds: int = 2,
    threshold: float = 0.8,
    settings: Sequence[str] = (),
    minutes: float | None = None,
    out: str | os.PathLike[str] | None = None,
    machine: Machine = Machine(),  # noqa: B008
    connected: Connected | None = None,
    **overrides: Any,
) -> tuple[Path, dict[str, Any]]:
    """Train with few labels and many unlabelled images; return the directory and the summary of the best round.

    `data` has the labels and `unlabelled` the other images, both a path or a name. `teacher` is a trained model with the classes
    of the data; without one, the first teacher is trained on the labels alone. In each of `rounds` the teacher labels the
    unlabelled images, those of at least `threshold` confidence are learnt beside the labelled ones, about equally many of each
    class, and the student is the teacher of the next round. `init`, `recipe` (by default `self-training` with `init`),
    `settings` and `overrides` (model, size, epochs, lr …) are those of `vitrail.train`. The best model on validation images
    is kept.
    """
    if count_processes() > 1:
        raise ValueError("self-training runs in one process: use torchrun or srun with the recipe.json of a round")
    given = Data(os.fspath(data)) if isinstance(data, str | os.PathLike) else data
    refuse_credentials(given.where, unlabelled)
    if given.task not in ("auto", "single") or given.targets:
        raise ValueError("self-training needs one class per image: leave out task= and targets=")
    plan = Plan(
        given,
        os.fspath(unlabelled),
        optional_path(teacher),
        optional_path(init),
        recipe,
        rounds,
        threshold,
        {name: value for name, value in overrides.items() if value is not None},
        tuple(settings),
    )
    directory = choose_directory(given.where, "self-training") if out is None else Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty: give another name as out=, or resume it")
    training = SelfTraining(directory, plan, machine, connected or no_listeners(), set_end(minutes))
    training.read_data()  # raises before anything is written
    directory.parent.mkdir(parents=True, exist_ok=True)
    with stage_output(directory) as staged:
        staged.mkdir()
        write_json(staged / PLAN_FILE, to_json(plan))
    return training.run()


def resume_self_training(
    directory: str | os.PathLike[str],
    *,
    machine: Machine = Machine(),  # noqa: B008
    connected: Connected | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Continue the rounds of a directory; finished ones are kept."""
    directory = Path(directory)
    plan = read_json_file(directory / PLAN_FILE, Plan)
    return SelfTraining(directory, plan, machine, connected or no_listeners(), None).run()


def is_self_training(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds the rounds of self-training."""
    return os.path.isfile(os.path.join(directory, PLAN_FILE))


def no_listeners() -> Connected:
    return Connected(listeners=(), trackers=(), progress=None)


def set_end(minutes: float | None) -> float | None:
    """Return the time by `time.monotonic()` at which rounds of so many minutes should end."""
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be > 0, got {minutes:g}")
    return time.monotonic() + 60 * minutes


class SelfTraining:
    """The rounds of one directory."""

    def __init__(self, directory: Path, plan: Plan, machine: Machine, connected: Connected, end: float | None) -> None:
        self.directory, self.plan, self.machine, self.connected, self.end = directory, plan, machine, connected, end
        self.device = pick_device(machine.device)
        self.prepared: Prepared | None = None
        self.unlabelled: Images | None = None

    def note(self, text: str) -> None:
        """Report a line."""
        for listener in self.connected["listeners"]:
            listener({"kind": "note", "text": text})

    def read_data(self) -> tuple[Prepared, Images]:
        """Return the labelled images, and the unlabelled ones that are not among them."""
        if self.prepared is None or self.unlabelled is None:
            progress = self.connected["progress"]
            prepared = prepare_data(self.plan.data, progress)
            prepared.require_classes("self-training")
            if task_of(prepared.train).name != "single":
                raise ValueError(f"self-training needs one class per image, {self.plan.data.where} has several")
            self.prepared = prepared
            self.unlabelled = self.exclude_labelled(load_unlabelled(self.plan.unlabelled, progress), prepared)
        return self.prepared, self.unlabelled

    def exclude_labelled(self, images: Images, prepared: Prepared) -> Images:
        """Return the unlabelled images without unreadable ones and without those that are, or resemble, labelled ones."""
        named = {UNLABELLED: images, **prepared.splits}  # of copies, the one in the last split is kept
        splits = {name: without_labels(split, name, images.classes) for name, split in named.items()}
        audit = audit_dataset(Dataset(self.plan.unlabelled, "folder", splits), progress=self.connected["progress"])
        found = audit.select_findings((*UNUSABLE_KINDS, *REPEATED_KINDS))
        excluded = sorted({f.location[1] for f in found if f.location is not None and f.location[0] == UNLABELLED})
        kept = images.select(np.delete(np.arange(len(images)), np.array(excluded, dtype=np.int64)))
        if excluded:
            self.note(
                f"{len(excluded):,} of {len(images):,} unlabelled images are left out: labelled already, or unreadable"
            )
        if not len(kept):
            raise ValueError(f"{self.plan.unlabelled} has no image that is not among the labelled ones: give others")
        return kept

    def run(self) -> tuple[Path, dict[str, Any]]:
        """Train round after round; return the directory and the summary of the best one."""
        plan, rounds = self.plan, list[Round]()
        prepared, images = self.read_data()
        classes = prepared.labels.names
        if plan.teacher is None:
            self.note("round 0: the labels alone")
            run = self.train_round(0)
            rounds.append(self.describe_run(0, run))
            teacher = str(run / "model.safetensors")
        else:
            teacher = plan.teacher
            rounds.append(self.evaluate_teacher(prepared))
        for number in range(1, plan.rounds + 1):
            taken = self.label_images(number, teacher, images, classes)
            self.note(f"round {number}: {describe_taken(taken, images, plan.threshold)}")
            run = self.train_round(number)
            rounds.append(self.describe_run(number, run, taken, images, classes))
            teacher = str(run / "model.safetensors")
        return self.finish(rounds, len(images))

    def train_round(self, number: int) -> Path:
        """Train or resume a round, unless it is finished; return its run directory."""
        plan, run = self.plan, self.directory / f"round-{number}"
        if (run / "summary.json").is_file():
            return run
        if (run / "recipe.json").is_file():
            resume(run, **self.connected)
            return run
        data, recipe = plan.data, plan.recipe
        if number:
            labels = str(self.pseudo_label_file(number))
            data = replace(data, unlabelled=plan.unlabelled, pseudo_labels=labels)
            recipe = recipe or ("self-training" if plan.init else None)
        left = None
        if self.end is not None:
            last = plan.rounds + 1
            left = max(1e-3, (self.end - time.monotonic()) / 60 / (last - number))
        train(
            data,
            init=plan.init,
            recipe=recipe,
            settings=plan.settings,
            minutes=left,
            out=run,
            machine=self.machine,
            **plan.overrides,
            **self.connected,
        )
        return run

    def predict(self, model: Model, images: Images, stage: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the readable images, and the probabilities [N, K] that a model gives to its classes."""
        preprocessing = model.preprocessing
        if not isinstance(preprocessing, Preprocessing):
            raise ValueError(f"the teacher {self.plan.teacher} has no preprocessing: save it with vitrail.save")
        runtime = TorchRuntime(model.to(self.device).eval(), preprocessing, device=self.device)
        averaged = preprocessing.clip is not None and preprocessing.clip.views > 1  # over views: probabilities already
        batches = list(
            run_batches(
                runtime,
                images,
                preprocessing,
                {},
                device=self.device,
                progress=self.connected["progress"],
                stage=stage,
                max_unreadable=len(images),
                activation="softmax",
            )
        )
        outputs = np.concatenate([batch.outputs for batch in batches])
        indices = np.concatenate([batch.indices for batch in batches])
        return indices, outputs if averaged else probabilities(outputs, multilabel=False)

    def load_teacher(self, path: str, classes: Sequence[str]) -> tuple[Model, np.ndarray]:
        """Return a teacher, and for each class of the data the number of its output."""
        model = load(path)
        labels = drop_placeholder_labels(model.labels)
        if labels is None:
            raise ValueError(
                f"the teacher {path} has no class names: use a model that vitrail trained, or name its classes"
            )
        if missing := [name for name in classes if name not in labels]:
            raise ValueError(
                f"the teacher {path} does not predict {missing[0]!r}: use one with the classes of the data"
            )
        return model, np.array([labels.index(name) for name in classes])

    def label_images(self, number: int, teacher: str, images: Images, classes: tuple[str, ...]) -> PseudoLabels:
        """Return the images that the teacher labels with enough confidence, from the file of the round if it is there."""
        file, threshold = self.pseudo_label_file(number), self.plan.threshold
        if file.is_file():
            return read_pseudo_labels(file, images, classes)
        model, outputs = self.load_teacher(teacher, classes)
        indices, predicted = self.predict(model, images, "predicting labels")
        taken = select_pseudo_labels(indices, predicted[:, outputs], threshold)
        if not len(taken):
            most = f"the highest is {predicted.max():.2f}" if len(predicted) else "no image can be read"
            raise ValueError(f"no prediction has a confidence of {threshold:g} ({most}): use a lower threshold")
        write_pseudo_labels(file, taken, images, classes)
        return taken

    def pseudo_label_file(self, number: int) -> Path:
        return self.directory / f"pseudo-labels-{number}.csv"

    def evaluate_teacher(self, prepared: Prepared) -> Round:
        """Return the accuracy of the given teacher on the held-out images."""
        assert self.plan.teacher is not None
        model, outputs = self.load_teacher(self.plan.teacher, prepared.labels.names)
        scores: dict[str, Any] = {}
        for split in ("validation", "test"):
            if split in prepared.splits:
                images = prepared.splits[split]
                indices, predicted = self.predict(model, images, f"evaluating the teacher, {split}")
                correct = int((predicted[:, outputs].argmax(1) == images.targets[indices]).sum())
                interval = list(wilson_interval(correct, len(indices)))
                scores[split] = {"top1": correct / len(indices), "interval": interval, "images": len(indices)}
        return Round(0, self.plan.teacher, scores)

    def describe_run(
        self,
        number: int,
        run: Path,
        taken: PseudoLabels | None = None,
        images: Images | None = None,
        classes: tuple[str, ...] = (),
    ) -> Round:
        """Return what the report says about a finished round."""
        summary = read_summary(run)
        scores = {split: summary[split] for split in ("validation", "test") if isinstance(summary.get(split), Mapping)}
        if taken is None or images is None:
            return Round(number, run.name, scores)
        per_class = dict(zip(classes, np.bincount(taken.targets, minlength=len(classes)).tolist(), strict=True))
        correct = count_correct(taken, images, classes)
        return Round(number, run.name, scores, len(taken), int(taken.copies.sum()), per_class, correct)

    def finish(self, rounds: list[Round], n_images: int) -> tuple[Path, dict[str, Any]]:
        """Keep the best model, write summary and report; return the directory and the summary."""
        plan = self.plan
        trained = [one for one in rounds if (self.directory / one.name / "summary.json").is_file()]
        best = max(
            trained, key=lambda one: (one.scores["validation"][find_score(one.scores["validation"])], -one.number)
        )
        run = self.directory / best.name
        labelled = len(self.read_data()[0].train)
        record = SelfTrainingRecord(
            plan.data.where, plan.unlabelled, labelled, n_images, plan.threshold, best.name, tuple(rounds)
        )
        write_json(self.directory / RECORD_FILE, asdict(record))
        with stage_output(self.directory / "model.safetensors") as staged:
            shutil.copyfile(run / "model.safetensors", staged)
        write_self_training_report(self.directory, record)
        summary = read_summary(run) | {"self_training": asdict(record)}
        write_json(self.directory / "summary.json", to_json(summary))
        return self.directory, summary


def without_labels(images: Images, split: str, classes: tuple[str, ...]) -> Images:
    """Return images that all have the first of these classes, so that only their pixels are compared."""
    return replace(images, targets=np.zeros(len(images), dtype=np.int64), classes=classes[:1], split=split)


def count_correct(taken: PseudoLabels, images: Images, classes: tuple[str, ...]) -> int | None:
    """Return how many pseudo-labels are right, where the unlabelled images stand in folders of the same classes."""
    if not set(images.classes) & set(classes):
        return None
    true = np.array(images.classes, dtype=object)[images.targets[taken.indices]]
    return int((np.array(classes, dtype=object)[taken.targets] == true).sum())


def describe_taken(taken: PseudoLabels, images: Images, threshold: float) -> str:
    """Return how many images are learnt with a predicted label, in words."""
    return f"{len(taken):,} of {len(images):,} unlabelled images have a confidence of at least {threshold:g} and are learnt"
