"""A run with a teacher: it is loaded, held against the student, and asked once beforehand where that is wished."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.loading import load
from vitrail.data.labels import listed, named, normal
from vitrail.data.loader import Loader
from vitrail.data.maps import Maps
from vitrail.data.preprocessing import MODES
from vitrail.models.bit import BiT
from vitrail.models.sizes import closest
from vitrail.models.vit import ViT
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.score_map import map_shape
from vitrail.objectives.task import Task
from vitrail.objectives.teacher import Teacher, vectors
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.objectives.told import rows
from vitrail.recipe import Recipe, TaughtSlot
from vitrail.recipe import Teacher as Wanted
from vitrail.run.features import content_of_model, once
from vitrail.run.opening import pipeline_of, weights_of
from vitrail.run.record import read_json
from vitrail.run.running import Run
from vitrail.run.score_maps import compute, place_of, score_maps
from vitrail.run.supervised import Supervised

KINDS: dict[str, TaughtSlot] = {  # what --distil stands for
    "hard": Distillation(kind="hard"),
    "soft": Distillation(kind="soft"),
    "features": FeatureDistillation(),
    "tokens": TokenLabelling(),
}
OTHERWISE = "fine-tune it on this data first, or learn from its features with --distil features"


class WithTeacher(Run):
    """What a run has that is taught, whatever it learns: a teacher who is engaged before anything begins, and asked."""

    def start(self) -> dict[str, Any]:
        self.engage()
        return super().start()

    def resume(self) -> dict[str, Any]:
        self.engage()
        before = read_json(self.directory / "run.json").get("teacher")
        if not isinstance(before, dict) or before.get("content") != self.content:
            raise ValueError(
                f"{self.where} is another teacher than {self.directory} was begun with: bring the same back, or begin a new run"
            )
        return super().resume()

    def engage(self) -> None:
        """Loads the teacher, or refuses it before anything begins."""
        wanted = taught_by(self.recipe)
        self.where = wanted.where
        self.teacher = engaged(wanted, self.recipe, self.prepared.labels.names)
        # Its names count too: they decide which of its answers is which of the student's classes.
        names = json.dumps(self.teacher.model.labels)
        whole = content_of_model(self.teacher.model, self.teacher.preprocessing)
        self.weights_content, self.content = whole, hashlib.sha256(f"{whole} {names}".encode()).hexdigest()
        if self.teacher.order is not None:
            self.tell(f"{self.where} has the same classes in another order: its answers are put in the data's")

    def about(self) -> dict[str, Any]:
        model = self.teacher.model
        return super().about() | {
            "teacher": {
                "where": self.where,
                "content": self.content,
                "parameters": sum(p.numel() for p in model.parameters()),
                "preprocessing": self.teacher.preprocessing.in_words(),
            }
        }

    def begun(self) -> ViT | BiT:
        model = super().begun()
        self.task(model, 0)  # what an objective refuses, it refuses before anything is written
        return model

    def taught(self, model: ViT | BiT, weights: Tensor | None = None) -> Task:
        """The student with its objective and its teacher."""
        recipe, objective = self.recipe, self.recipe.objective
        assert isinstance(objective, TaughtSlot)
        return objective.build(model, weights, self.teacher, recipe.preprocessing, taught_by(recipe).cached)

    def training_loader(self) -> Loader:
        """As without a teacher, or with what was asked beforehand about each picture."""
        loader = super().training_loader()
        if not taught_by(self.recipe).cached:
            return loader
        if not self.team.leads:
            self.team.wait()  # the first process asks, and the others find what was said in the cache
        self.told(loader)
        if self.team.leads:
            self.team.wait()
        return loader

    def told(self, loader: Loader) -> None:
        """Puts what the teacher said of each picture beside its label, or in its place where labels are not learnt."""
        labels = None if self.recipe.model.classes is None else self.prepared.train.targets
        loader.targets = torch.from_numpy(rows(labels, self.said()))

    def said(self) -> np.ndarray:
        """What the teacher says of each training picture as it is, [n, K] or [n, F]: asked once, and kept on the disk."""
        teacher, train, device = self.teacher, self.prepared.train, self.team.device
        model, of_features = teacher.model.to(device), isinstance(self.recipe.objective, FeatureDistillation)
        began = time.monotonic()
        found = once(
            (lambda images: vectors(model, images)) if of_features else model,
            teacher.preprocessing,
            train,
            self.weights_content,
            "teacher's features" if of_features else "teacher's answers",
            device,
            self.machine.workers,
            progress=self.progress if self.team.leads else None,
        )
        if found.unreadable:
            name, why = next(iter(found.unreadable.items()))
            raise OSError(f"the teacher could not see {len(found.unreadable)} training pictures, {name} first ({why})")
        for note in found.notes:
            self.tell(note)
        how = "from the cache" if found.cached else f"asked once, in {time.monotonic() - began:.1f} seconds"
        if 0 < found.asked < len(train):
            how = f"{found.asked:,} asked for, the others from the cache"
        self.tell(f"the teacher's {'features' if of_features else 'answers'} for {len(train):,} pictures: {how}")
        return found.values if of_features else teacher.sorted(torch.from_numpy(found.values)).numpy()


class Taught(WithTeacher, Supervised):
    """A student that learns labels, and what a teacher says of the same pictures."""

    def engage(self) -> None:
        super().engage()
        if isinstance(self.objective, TokenLabelling):
            if self.prepared.train.several:
                raise ValueError("token labels are for pictures with one label each: use --distil soft")
            self.objective.check(self.recipe.model, map_shape(self.teacher, self.objective.top))

    def task(self, model: ViT | BiT, steps: int) -> Task:
        return self.taught(model, self.class_weights())

    def told(self, loader: Loader) -> None:
        if isinstance(self.objective, TokenLabelling):
            loader.maps = self.mapped(self.objective.top)
        else:
            super().told(loader)

    def mapped(self, top: int) -> Maps:
        """What the teacher says at every place of each training picture: asked once, and kept on the disk."""
        teacher, train, device = self.teacher, self.prepared.train, self.team.device
        teacher.model.to(device)
        turn = self.recipe.preprocessing.turn
        place = place_of(teacher, self.weights_content, top, turn, device)
        progress = self.progress if self.team.leads else None
        new = compute(teacher, place, train, top, turn, device, self.machine.workers, progress)
        self.tell(f"the teacher's score maps of {len(train):,} pictures: {new:,} asked for, the others from the cache")
        return score_maps(teacher, place, train, top)


def is_taught(recipe: Recipe) -> bool:
    """Whether a recipe is for a run with a teacher, or means to be."""
    return recipe.teacher is not None or isinstance(recipe.objective, TaughtSlot)


def with_teacher(recipe: Recipe, teacher: Wanted, how: str | None = None) -> Recipe:
    """A recipe with this teacher, who is asked `how`; what is asked of the labels stays."""
    before = recipe.objective
    if how is None and isinstance(before, TaughtSlot):
        return replace(recipe, teacher=teacher)
    if how is not None and how not in KINDS:
        raise ValueError(f"unknown way to learn from a teacher {how!r}: {closest(how, list(KINDS))}")
    kind = KINDS[how or "hard"]
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(before)} - {"kind"}
    if isinstance(kind, TokenLabelling):
        shared -= {"mixup", "cutmix", "patch_dropout"}  # it mixes patches in its own way, and asks all of them
    return replace(recipe, teacher=teacher, objective=replace(kind, **{n: getattr(before, n) for n in shared}))


def taught_by(recipe: Recipe) -> Wanted:
    """The teacher of a recipe whose objective asks one."""
    name = type(recipe.objective).__name__
    if recipe.teacher is None:
        raise ValueError(f"the objective {name} learns from a teacher: give --teacher MODEL")
    if not isinstance(recipe.objective, TaughtSlot):
        raise ValueError(f"the objective {name} does not ask a teacher: set objective=Distillation, or teacher=none")
    return recipe.teacher


def engaged(wanted: Wanted, recipe: Recipe, labels: Sequence[str]) -> Teacher:
    """The teacher that is wanted, with its answers in the order of these labels."""
    channels = recipe.preprocessing.channels
    if channels not in MODES:
        raise ValueError(f"a student of {channels} channels: a teacher can be shown pictures of 1, 3 or 4")
    # Not mapped: pages of a file are aligned otherwise than memory, and sums could differ in their last bit.
    try:
        model = load(weights_of(wanted.where), mapped=False)
    except FileNotFoundError:
        raise ValueError(f"the teacher {wanted.where} is not there: bring it back, or begin a new run") from None
    pipeline = pipeline_of(wanted.where, model)
    order = None
    if not isinstance(recipe.objective, FeatureDistillation):
        order = order_of(wanted, model, labels)
    return Teacher(model, pipeline, order)


def order_of(wanted: Wanted, model: ViT | BiT, labels: Sequence[str]) -> list[int] | None:
    """The place of each label among a teacher's outputs, None where they are in order; other classes are refused."""
    where, outputs, ours = wanted.where, model.config.classes, [normal(label) for label in labels]
    if outputs is None:
        raise ValueError(f"{where} ends in features and has no classes to teach: use --distil features")
    names = named(model.labels)
    if names is None and outputs != len(ours):
        raise ValueError(f"{where} has {outputs:,} classes and the data {len(ours):,}: {OTHERWISE}")
    if names is None:
        if not wanted.same_classes:
            raise ValueError(
                f"{where} has no names for its {outputs:,} classes: if they are the data's in order ({listed(ours, most=3)}), "
                "say so with --set teacher.same_classes=true, otherwise use --distil features"
            )
        return None
    if sorted(names) != sorted(ours):
        lacks, more = [n for n in ours if n not in names], [n for n in names if n not in ours]
        parts = [f"does not know {listed(lacks, most=3)}"] if lacks else []
        parts += [f"has {listed(more, most=3)} besides"] if more else []
        raise ValueError(
            f"{where} has other classes than the data: it {' and '.join(parts) or 'has a name twice'}; {OTHERWISE}"
        )
    order = [names.index(name) for name in ours]
    return None if order == list(range(len(order))) else order
