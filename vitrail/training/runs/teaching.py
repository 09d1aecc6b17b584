"""The teacher of a run: loading and checking it, matching its classes to the data's, caching its outputs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.load import find_weights, load, require_preprocessing
from vitrail.data.cache import ScoreMapFile, ScoreMaps, compute_image_key
from vitrail.data.clip import describe_samples
from vitrail.data.dataset import Images
from vitrail.data.labels import drop_placeholder_labels, format_names, normalise_class_name
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import PIL_MODES
from vitrail.data.transforms.pipeline import read_image_size
from vitrail.inference import run_batches
from vitrail.models.base import Model
from vitrail.models.sizes import closest
from vitrail.objectives.distillation import join_targets
from vitrail.objectives.registry import DISTILLATION
from vitrail.objectives.teacher import Teacher, map_shape, top_scores
from vitrail.training.features import extract_features, hash_model
from vitrail.training.recipe import Recipe
from vitrail.training.recipe import Teacher as TeacherSettings
from vitrail.training.runs.record import read_run_record
from vitrail.training.runs.setup import RunSetup
from vitrail.utils.files import cache_directory
from vitrail.utils.progress import ProgressCallback

BATCH_SIZE = 64
MAP_VERSION = 2  # increased when the computation of score maps changes
FIX_CLASSES = "fine-tune it on this data first, or use distil='features'"


class RunTeacher:
    """The loaded teacher of a run, with a checksum of its content."""

    def __init__(self, setup: RunSetup) -> None:
        recipe, name = setup.recipe, type(setup.recipe.objective).__name__
        if recipe.teacher is None:
            raise ValueError(f"the objective {name} needs a teacher: give teacher=MODEL")
        if recipe.objective.teacher_output is None:
            raise ValueError(
                f"the objective {name} uses no teacher: settings=['objective=Distillation'], or ['teacher=none']"
            )
        self.setup, self.settings = setup, recipe.teacher
        self.teacher = load_teacher(self.settings, recipe, setup.prepared.labels.names)
        self.weights_hash = hash_model(self.teacher.model, self.teacher.preprocessing)
        # Class names too: they decide which output belongs to which class of the student.
        names = json.dumps(self.teacher.model.labels)
        self.content = hashlib.sha256(f"{self.weights_hash} {names}".encode()).hexdigest()
        if self.teacher.order is not None:
            setup.note(f"{self.settings.where} has the same classes in another order: its outputs are reordered")
        recipe.objective.check_teacher(recipe.model, self.teacher, setup.prepared.train.is_multi_label)

    def describe(self) -> dict[str, Any]:
        """Return the teacher's entry in run.json."""
        return {
            "where": self.settings.where,
            "content": self.content,
            "parameters": sum(p.numel() for p in self.teacher.model.parameters()),
            "preprocessing": self.teacher.preprocessing.describe(),
        }

    def check_resumed(self) -> None:
        """Raise ValueError unless the run directory was started with this teacher."""
        directory, where = self.setup.directory, self.settings.where
        before = read_run_record(directory).get("teacher", {})
        if before.get("content") != self.content:
            raise ValueError(f"{where} is another teacher than {directory} started with: restore it, or start anew")

    def attach_outputs(self, loader: Loader) -> None:
        """Give the training loader the teacher's cached outputs as targets, where the recipe caches them."""
        if not self.settings.cached:
            return
        team = self.setup.team
        if not team.is_main:
            team.barrier()  # the main process computes them, the others read them from the cache
        if self.setup.recipe.objective.teacher_output == "maps":
            loader.maps = self.compute_maps()
        else:
            labels = None if self.setup.recipe.model.classes is None else self.setup.prepared.train.targets
            loader.targets = torch.from_numpy(join_targets(labels, self.compute_outputs()))
        if team.is_main:
            team.barrier()

    def compute_outputs(self) -> np.ndarray:
        """Return logits [n, K] or features [n, F] of all training images, from the cache where they are."""
        setup, teacher, train = self.setup, self.teacher, self.setup.prepared.train
        device, kind = setup.team.device, str(setup.recipe.objective.teacher_output)
        model = teacher.model.to(device)
        outputs = extract_features(
            model.embed_images if kind == "features" else model,
            teacher.preprocessing,
            train,
            identity=self.weights_hash,
            kind=f"teacher's {kind}",
            device=device,
            workers=setup.machine.workers,
            progress=setup.progress if setup.team.is_main else None,
        )
        if unreadable := outputs.unreadable:
            name, why = next(iter(unreadable.items()))
            raise OSError(
                f"{len(unreadable)} training {train.media}s are unreadable for the teacher, first {name} ({why})"
            )
        for note in outputs.notes:
            setup.note(note)
        how = "from the cache" if outputs.cached else f"computed in {outputs.seconds:.1f} seconds"
        if 0 < outputs.n_computed < len(train):
            how = f"{outputs.n_computed:,} computed, the others from the cache"
        setup.note(f"the teacher's {kind} for {len(train):,} {train.media}s: {how}")
        values = outputs.values
        return values if kind == "features" else teacher.reorder_classes(torch.from_numpy(values)).numpy()

    def compute_maps(self) -> ScoreMaps:
        """Return the score maps of all training images, from the cache where they are."""
        setup, teacher, train = self.setup, self.teacher, self.setup.prepared.train
        device, top, turn = setup.team.device, setup.recipe.objective.map_classes, setup.recipe.preprocessing.turn
        teacher.model.to(device)
        order = None if teacher.order is None else teacher.order.tolist()
        key = hashlib.sha256(
            f"{MAP_VERSION} {self.weights_hash} {order} {top} {turn} {device.type}".encode()
        ).hexdigest()
        path = cache_directory() / "maps" / f"{key[:40]}.maps"
        progress = setup.progress if setup.team.is_main else None
        new = compute_score_maps(teacher, path, train, top, turn, device, setup.machine.workers, progress)
        how = f"{new:,} computed{', the others from the cache' if new < len(train) else ''}"
        setup.note(f"the teacher's score maps of {len(train):,} images: {how}")
        return open_score_maps(teacher, path, train, top)


def with_teacher(recipe: Recipe, teacher: TeacherSettings, how: str | None = None) -> Recipe:
    """Return a recipe with this teacher and the objective that --distil `how` names; fields that both objectives have stay."""
    before = recipe.objective
    if how is None and before.teacher_output is not None:
        return replace(recipe, teacher=teacher)
    if how is not None and how not in DISTILLATION:
        raise ValueError(f"unknown way to learn from a teacher {how!r}: {closest(how, list(DISTILLATION))}")
    objective = DISTILLATION[how or "hard"]
    shared = {f.name for f in fields(objective)} & {f.name for f in fields(before)} - set(objective.own_fields)
    changes: dict[str, Any] = {name: getattr(before, name) for name in shared}
    return replace(recipe, teacher=teacher, objective=replace(objective, **changes))


def load_teacher(settings: TeacherSettings, recipe: Recipe, labels: Sequence[str]) -> Teacher:
    """Load a teacher, with its logits in the order of these labels."""
    channels = recipe.preprocessing.channels
    if channels not in PIL_MODES:
        raise ValueError(f"a student of {channels} channels cannot have a teacher: use 1, 3 or 4 channels")
    # Not memory-mapped: the alignment of a file's pages differs from that of memory, and sums could differ in the last bit.
    try:
        model = load(find_weights(settings.where), mmap=False)
    except FileNotFoundError:
        raise ValueError(f"teacher {settings.where} not found: restore it, or start a new run") from None
    pipeline = require_preprocessing(settings.where, model)
    if pipeline.frames != recipe.preprocessing.frames:
        taught, seen = describe_samples(recipe.preprocessing.frames), describe_samples(pipeline.frames)
        raise ValueError(f"the teacher {settings.where} takes {seen}, and the student {taught}: they must be the same")
    by_class = recipe.objective.teacher_output != "features"
    return Teacher(model, pipeline, match_classes(settings, model, labels) if by_class else None)


def match_classes(settings: TeacherSettings, model: Model, labels: Sequence[str]) -> list[int] | None:
    """Return the teacher's output index of each label, None where the order is the same; raise ValueError for other classes."""
    where, outputs, ours = settings.where, model.config.classes, [normalise_class_name(label) for label in labels]
    if outputs is None:
        raise ValueError(f"{where} has no classifier: use distil='features'")
    names = drop_placeholder_labels(model.labels)
    if names is None and outputs != len(ours):
        raise ValueError(f"{where} has {outputs:,} classes and the data {len(ours):,}: {FIX_CLASSES}")
    if names is None:
        if not settings.same_classes:
            raise ValueError(
                f"{where} has no names for its {outputs:,} classes: if they are {format_names(ours, limit=3)} in this order, "
                "use settings=['teacher.same_classes=true'], otherwise distil='features'"
            )
        return None
    if sorted(names) != sorted(ours):
        missing, extra = [n for n in ours if n not in names], [n for n in names if n not in ours]
        parts = [f"lacks {format_names(missing, limit=3)}"] if missing else []
        parts += [f"has {format_names(extra, limit=3)} in addition"] if extra else []
        difference = " and ".join(parts) or "has a name twice"
        raise ValueError(f"{where} has other classes than the data: it {difference}; {FIX_CLASSES}")
    order = [names.index(name) for name in ours]
    return None if order == list(range(len(order))) else order


def compute_score_maps(
    teacher: Teacher,
    path: Path,
    images: Images,
    top: int,
    turn: bool,
    device: torch.device,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> int:
    """Compute the score maps that the file lacks, append them batch by batch, and return their number.

    The teacher sees the whole image, squashed to its input size, so that every crop has a region on the map.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot cache the teacher's score maps in {path.parent}: {error.strerror or error}") from error
    shape = map_shape(teacher, top)
    file = ScoreMapFile(path, shape)
    missing = file.find_missing(images)
    if not len(missing):
        return 0
    # Keys are computed before the images are read: a file that changes meanwhile gets another key.
    keys = [compute_image_key(images, index) for index in missing.tolist()]
    size = teacher.preprocessing.size
    pipeline = replace(teacher.preprocessing, fit="squash", resize=size, turn=turn)

    def forward(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        samples = pipeline.normalise(torch.from_numpy(pixels).to(device, non_blocking=True))
        logits = teacher.dense_logits(samples, pipeline.mean, pipeline.std)
        if not logits.isfinite().all():
            raise ValueError("the teacher's score maps are not finite: check its file")
        classes, scores = top_scores(logits, shape.top)
        return classes.cpu().numpy(), scores.cpu().numpy()

    done, options = 0, {"workers": workers, "progress": progress, "stage": "score maps of the teacher"}
    for batch in run_batches(
        forward, images.select(missing), pipeline, {}, batch_size=BATCH_SIZE, device=device, **options
    ):
        (classes, scores), indices = batch.outputs, missing[batch.indices].tolist()
        sizes = [read_image_size(images, index, turn) for index in indices]
        file.append([keys[index] for index in batch.indices.tolist()], size=sizes, classes=classes, scores=scores)
        done += len(indices)
    return done


def open_score_maps(teacher: Teacher, path: Path, images: Images, top: int) -> ScoreMaps:
    """Return the maps of these images from the file that `compute_score_maps` filled."""
    return ScoreMapFile(path, map_shape(teacher, top)).load_maps(images)
