"""The teacher of a run: loading and checking it, matching its classes to the data's, caching its outputs."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.load import find_weights, load, require_preprocessing
from vitrail.data.cache import ScoreMaps
from vitrail.data.labels import drop_placeholder_labels, format_names, normalise_class_name
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import PIL_MODES
from vitrail.models.base import Model
from vitrail.models.sizes import closest
from vitrail.objectives.distillation import join_targets
from vitrail.objectives.registry import DISTILLATION
from vitrail.objectives.teacher import Teacher
from vitrail.training.features import compute_cached, hash_model
from vitrail.training.recipe import Recipe
from vitrail.training.recipe import Teacher as TeacherSettings
from vitrail.training.runs.record import read_json
from vitrail.training.runs.score_maps import compute_score_maps, open_score_maps, score_map_path
from vitrail.training.runs.setup import RunSetup

FIX_CLASSES = "fine-tune it on this data first, or use --distil features"


class RunTeacher:
    """The loaded teacher of a run, with a checksum of its content."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup, self.settings = setup, require_teacher(setup.recipe)
        self.teacher = load_teacher(self.settings, setup.recipe, setup.prepared.labels.names)
        self.weights_hash = hash_model(self.teacher.model, self.teacher.preprocessing)
        # Class names too: they decide which output belongs to which class of the student.
        names = json.dumps(self.teacher.model.labels)
        self.content = hashlib.sha256(f"{self.weights_hash} {names}".encode()).hexdigest()
        if self.teacher.order is not None:
            setup.note(f"{self.settings.where} has the same classes in another order: its outputs are reordered")
        setup.recipe.objective.check_teacher(setup.recipe.model, self.teacher, setup.prepared.train.is_multi_label)

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
        before = read_json(directory / "run.json").get("teacher")
        if not isinstance(before, dict) or before.get("content") != self.content:
            raise ValueError(
                f"{where} is another teacher than {directory} started with: restore it, or start a new run"
            )

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
        model, start = teacher.model.to(device), time.monotonic()
        outputs = compute_cached(
            model.embed_images if kind == "features" else model,
            teacher.preprocessing,
            train,
            self.weights_hash,
            f"teacher's {kind}",
            device,
            setup.machine.workers,
            progress=setup.progress if setup.team.is_main else None,
        )
        if outputs.unreadable:
            name, why = next(iter(outputs.unreadable.items()))
            raise OSError(
                f"{len(outputs.unreadable)} training images are unreadable for the teacher, first {name} ({why})"
            )
        for note in outputs.notes:
            setup.note(note)
        how = "from the cache" if outputs.cached else f"computed in {time.monotonic() - start:.1f} seconds"
        if 0 < outputs.n_computed < len(train):
            how = f"{outputs.n_computed:,} computed, the others from the cache"
        setup.note(f"the teacher's {kind} for {len(train):,} images: {how}")
        return (
            outputs.values if kind == "features" else teacher.reorder_classes(torch.from_numpy(outputs.values)).numpy()
        )

    def compute_maps(self) -> ScoreMaps:
        """Return the score maps of all training images, from the cache where they are."""
        setup, teacher, train = self.setup, self.teacher, self.setup.prepared.train
        device, top, turn = setup.team.device, setup.recipe.objective.map_classes, setup.recipe.preprocessing.turn
        teacher.model.to(device)
        path = score_map_path(teacher, self.weights_hash, top, turn, device)
        progress = setup.progress if setup.team.is_main else None
        new = compute_score_maps(teacher, path, train, top, turn, device, setup.machine.workers, progress)
        setup.note(f"the teacher's score maps of {len(train):,} images: {new:,} computed, the others from the cache")
        return open_score_maps(teacher, path, train, top)


def uses_teacher(recipe: Recipe) -> bool:
    """Return whether a recipe names a teacher or has an objective that needs one."""
    return recipe.teacher is not None or recipe.objective.teacher_output is not None


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


def require_teacher(recipe: Recipe) -> TeacherSettings:
    """Return the teacher of a recipe, or raise ValueError where teacher and objective do not belong together."""
    name = type(recipe.objective).__name__
    if recipe.teacher is None:
        raise ValueError(f"the objective {name} needs a teacher: give --teacher MODEL")
    if recipe.objective.teacher_output is None:
        raise ValueError(f"the objective {name} uses no teacher: set objective=Distillation, or teacher=none")
    return recipe.teacher


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
    by_class = recipe.objective.teacher_output != "features"
    return Teacher(model, pipeline, match_classes(settings, model, labels) if by_class else None)


def match_classes(settings: TeacherSettings, model: Model, labels: Sequence[str]) -> list[int] | None:
    """Return the teacher's output index of each label, None where the order is the same; raise ValueError for other classes."""
    where, outputs, ours = settings.where, model.config.classes, [normalise_class_name(label) for label in labels]
    if outputs is None:
        raise ValueError(f"{where} has no classifier: use --distil features")
    names = drop_placeholder_labels(model.labels)
    if names is None and outputs != len(ours):
        raise ValueError(f"{where} has {outputs:,} classes and the data {len(ours):,}: {FIX_CLASSES}")
    if names is None:
        if not settings.same_classes:
            raise ValueError(
                f"{where} has no names for its {outputs:,} classes: if they are {format_names(ours, limit=3)} in this order, "
                "use --set teacher.same_classes=true, otherwise --distil features"
            )
        return None
    if sorted(names) != sorted(ours):
        missing, extra = [n for n in ours if n not in names], [n for n in names if n not in ours]
        parts = [f"lacks {format_names(missing, limit=3)}"] if missing else []
        parts += [f"has {format_names(extra, limit=3)} in addition"] if extra else []
        raise ValueError(
            f"{where} has other classes than the data: it {' and '.join(parts) or 'has a name twice'}; {FIX_CLASSES}"
        )
    order = [names.index(name) for name in ours]
    return None if order == list(range(len(order))) else order
