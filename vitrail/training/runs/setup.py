"""Inputs of a run, and the values that follow from them: batch size, augmentation, class weights, data loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.tokenizer import encode_texts
from vitrail.data.transforms.pipeline import Pipeline, TrainPipeline
from vitrail.data.transforms.user import BoundTransform, UserFunction, bind_transforms, check_transform
from vitrail.data.worker_pool import log
from vitrail.training.distributed import Team
from vitrail.training.logging import Listener, connect_tracker
from vitrail.training.recipe import Machine, Recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.record import read_run_record, write_json
from vitrail.utils.json import to_json
from vitrail.utils.progress import ProgressCallback

MAX_CLASS_WEIGHT = 100.0


@dataclass
class RunSetup:
    """A recipe, its prepared data, the run directory and the machine."""

    recipe: Recipe
    prepared: Prepared
    directory: Path
    machine: Machine
    team: Team
    chosen: list[str] = field(default_factory=list)
    listeners: tuple[Listener, ...] = ()
    trackers: tuple[str, ...] = ()
    progress: ProgressCallback | None = None
    functions: Sequence[UserFunction] = ()  # of the user, that the recipe's augmentation calls

    def note(self, text: str) -> None:
        """Send a line of text to the listeners of the main process."""
        if self.team.is_main:
            for listener in self.listeners:
                listener({"kind": "note", "text": text})

    def record_listeners(self) -> tuple[Listener, ...]:
        """Return the listeners of every record, trackers included; none on processes other than the main one."""
        if not self.team.is_main:
            return ()
        settings, identity = to_json(self.recipe), read_run_record(self.directory).get("id", self.directory.name)
        trackers = (connect_tracker(name, self.directory, identity, settings) for name in self.trackers)
        return (*self.listeners, *trackers)

    def write_summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json on the main process while the others wait; return the summary."""
        if self.team.is_main:
            write_json(self.directory / "summary.json", summary)
        self.team.barrier()
        return summary

    def batch_size(self) -> int:
        """Return the images of a step over all processes: the recipe's, or all images where there are fewer."""
        train = self.prepared.train
        asked, world, count = self.recipe.batch_size, self.team.world_size, len(train)
        if count < world:
            raise ValueError(f"{count} training {train.media}s for {world} processes: use fewer processes")
        batch = asked if asked <= count else max(world, count // world * world)
        if batch % world:
            raise ValueError(f"batch size {batch} must be divisible by the number of processes, {world}")
        if self.recipe.objective.mixes_pairs and batch < 2:
            raise ValueError(f"mixing needs pairs: use batch_size=2 or more, got {batch}, or turn mixing off")
        if self.recipe.objective.mixes_pairs and world > 1 and batch // world % 2:
            raise ValueError(f"mixing needs pairs: a batch of {batch} gives each of {world} processes an odd number")
        return batch

    def class_weights(self) -> Tensor | None:
        """Return loss weights [K], inverse to the images or pixels of each class and 1 on average over them, or None.

        Of masks they are at most 100, and 0 for a class in none: the pixels of classes differ by orders of magnitude.
        """
        if self.recipe.data.balance != "weights":
            return None
        train = self.prepared.train
        found = torch.from_numpy(self.prepared.count_targets())
        counts = found.float().clamp(min=1)
        if train.is_multi_label:  # positives and negatives of a class weigh the same
            return ((len(train) - counts) / counts).clamp(1, MAX_CLASS_WEIGHT)
        if train.masks is not None:
            present = found > 0
            return (found.sum() / present.sum() / counts).clamp(max=MAX_CLASS_WEIGHT) * present
        return counts.sum() / len(counts) / counts

    def token_targets(self) -> np.ndarray | None:
        """Return the token ids of the captions of the training images, int32 [n, T]; None for other targets."""
        images, tokenizer = self.prepared.train, self.prepared.tokenizer
        if images.captions is None or tokenizer is None:
            return None
        used, position = np.unique(images.targets, return_inverse=True)
        return encode_texts(tokenizer, [images.captions[number] for number in used.tolist()])[position.ravel()]

    def augmentation(self) -> Pipeline:
        """Return the pipeline that turns an image into a row of a training batch."""
        recipe, pipeline = self.recipe, self.recipe.preprocessing
        if recipe.views is not None:
            return recipe.views.build_pipeline(recipe.augment, pipeline.size, pipeline.channels, pipeline.turn)
        steps, masks = bind_transforms(recipe.augment, self.functions), self.prepared.train.masks is not None
        return TrainPipeline(
            steps, pipeline.size, pipeline.channels, pipeline.turn, masks, pipeline.clip, pipeline.sound
        )

    def check_functions(self) -> None:
        """Raise ValueError unless the recipe's augmentation has exactly the functions given, and they work."""
        pipeline = self.augmentation() if self.recipe.views is None else None
        steps = pipeline.steps if isinstance(pipeline, TrainPipeline) else ()
        bound = [step for step in steps if isinstance(step, BoundTransform)]
        if self.functions and not bound:
            raise ValueError("the augmentation calls no function of yours: leave out augment")
        if bound and self.recipe.objective.teacher_output == "maps":
            raise ValueError("augment= moves pixels in an unknown way, and token labels must follow: leave it out")
        for step in bound:
            check_transform(step, self.recipe.preprocessing.size, self.recipe.preprocessing.channels)

    def normalise(self, pixels: Tensor) -> Any:
        """Return the uint8 pixels of a batch as the task takes them."""
        views, pipeline = self.recipe.views, self.recipe.preprocessing
        if views is None:
            return pipeline.normalise(pixels)
        return tuple(
            pipeline.normalise(crops.flatten(0, 1)).unflatten(0, crops.shape[:2])
            for crops in views.split_crops(pixels, pipeline.size, pipeline.channels)
        )


class RunLoaders:
    """The data loaders of a run, made on first use and closed together."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.loaders: dict[str, Loader] = {}

    def training(self) -> Loader:
        """Return the loader of augmented training images, in a new order every epoch."""
        recipe, train = self.setup.recipe, self.setup.prepared.train
        batch = self.setup.batch_size()
        if batch != recipe.batch_size:
            why = f"there are {len(train)} training {train.media}s"
            self.setup.note(f"batch size {batch} instead of {recipe.batch_size}: {why}")
        return self._add(
            "training",
            train,
            self.setup.augmentation(),
            batch_size=batch,
            accumulate=recipe.accumulate,
            weights="balanced" if recipe.data.balance == "sampling" else None,
            epochs=-(-recipe.total_steps(len(train) // batch) // (len(train) // batch)),
            targets=self.setup.token_targets(),
            progress=self._report_decoding,
            fallback=False,  # the run stops after a checkpoint, to be resumed with fewer workers
        )

    def split(self, name: str) -> Loader:
        """Return the loader of a whole split, in order, preprocessed as for evaluation; masks are judged at their own size."""
        return self.evaluation(name, replace(self.setup.prepared.splits[name], masks=None))

    def evaluation(self, name: str, images: Images) -> Loader:
        """Return the loader of these images, in order, preprocessed as for evaluation."""
        size = min(256, max(16, self.setup.recipe.batch_size)) * self.setup.team.world_size
        pipeline = self.setup.recipe.preprocessing
        return self._add(name, images, pipeline, batch_size=size, progress=self._report_decoding)

    def augmented(self, name: str, images: Images) -> Loader:
        """Return a loader of one epoch of these images, augmented as in training."""
        world = self.setup.team.world_size
        size = max(world, min(self.setup.recipe.batch_size, len(images)) // world * world)
        return self._add(name, images, self.setup.augmentation(), batch_size=size, epochs=1)

    def close(self) -> None:
        """Stop the worker processes of all loaders."""
        for loader in self.loaders.values():
            loader.close()
        self.loaders = {}

    def _add(
        self, name: str, images: Images, pipeline: Pipeline, targets: np.ndarray | None = None, **options: Any
    ) -> Loader:
        if name not in self.loaders:
            team, options["seed"] = self.setup.team, self.setup.recipe.seed
            options |= {"rank": team.rank, "world_size": team.world_size, "workers": self._workers(images)}
            options["report"] = self.setup.note if team.is_main else log.warning
            self.loaders[name] = Loader(images, targets, pipeline, **options)
        return self.loaders[name]

    def _workers(self, images: Images) -> int:
        """Return the number of loading processes: 0 for arrays in memory, few beside a model on the same cores."""
        machine, team = self.setup.machine, self.setup.team
        if machine.workers is not None:
            return machine.workers
        if isinstance(images.store, ArrayStore):
            return 0
        cores = (os.cpu_count() or 1) // team.world_size
        return max(1, min(8, cores if team.device.type == "cuda" else cores // 2))

    def _report_decoding(self, done: int, total: int) -> None:
        if self.setup.progress is not None and self.setup.team.is_main:
            self.setup.progress("decoding", done, total)
