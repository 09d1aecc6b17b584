"""`vitrail.predict`: predictions of a model, classes, masks or numbers, for many images, in order, computed on all cores."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from vitrail.deploy.predict import parallel
from vitrail.deploy.predict.formats import PredictionRow
from vitrail.deploy.predict.inputs import NOUNS, ImageInputs, collect_images
from vitrail.deploy.predict.parallel import (
    BatchOutput,
    BatchSizeTuner,
    ClipInference,
    ImageInference,
    ParallelInference,
    RowInference,
)
from vitrail.deploy.runtimes.base import BATCH_SECONDS, DeployedModel, ModelContract, OutputKind, Runtime
from vitrail.deploy.runtimes.masks import MaskInference, MaskOptions, MaskOutput, class_colours
from vitrail.deploy.runtimes.open import ask_media, clone_runtime, open_deployed_model, with_class_names
from vitrail.deploy.runtimes.panoptic import (
    THRESHOLDS,
    PanopticInference,
    PanopticOptions,
    PanopticOutput,
    build_reader,
    read_things,
)
from vitrail.deploy.runtimes.select import MessageCallback
from vitrail.inference import top_classes
from vitrail.models.base import Model
from vitrail.utils.devices import available_cores, keep_freed_memory, pick_device
from vitrail.utils.progress import ProgressCallback

MAX_LANES = 16  # threads; more would wait for the GIL
MAX_BATCH_BYTES = 2**31  # of the batches of all threads, on a CPU
MAX_OVERLAY_BATCH = 4  # images that are kept at their own size
ACTIVATION_FACTOR = 24  # memory of an image inside a model, relative to its input


RUN_OPTIONS = (
    "batch_size",
    "workers",
    "names",
    "inference",
    "flip",
    "scales",
    "panoptic",
    "stuff",
    *THRESHOLDS,
)  # of an inference, not of opening the model


class InferenceKeywords(TypedDict, total=False):
    """Fields of `InferenceOptions` as keywords of `vitrail.predict` and `vitrail.embed`."""

    runtime: str
    device: str
    precision: str
    merge: int
    size: tuple[int, int] | None
    batch_size: int | None
    workers: int | None
    assume: Mapping[str, Any] | None
    take: str | None
    batch_timeout: float
    tolerance: float | None
    inference: str
    flip: bool
    scales: tuple[float, ...]
    panoptic: bool
    stuff: str | Sequence[str] | None
    score_threshold: float
    mask_threshold: float
    overlap_threshold: float


@dataclass(frozen=True)
class InferenceOptions:
    """Runtime, device and batch size of an inference."""

    runtime: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    merge: int = 0
    size: tuple[int, int] | None = None
    batch_size: int | None = None  # None: tuned while running
    workers: int | None = None  # None: one per core
    assume: Mapping[str, Any] | None = None
    take: str | None = None
    batch_timeout: float = BATCH_SECONDS
    tolerance: float | None = None  # points of accuracy that an int8 export may lose, for the runtime "auto"
    names: str | None = None  # file of class names for a model without them, or "imagenet"
    inference: str = "whole"  # of masks: whole or sliding
    flip: bool = False  # of masks: average with the mirror image
    scales: tuple[float, ...] = (1.0,)  # of masks, with inference="sliding"
    panoptic: bool = False  # of EoMT: segments instead of masks
    stuff: str | Sequence[str] | None = None  # of segments: the classes without objects [those of the model file]
    score_threshold: float = PanopticOptions.score_threshold
    mask_threshold: float = PanopticOptions.mask_threshold
    overlap_threshold: float = PanopticOptions.overlap_threshold

    def __post_init__(self) -> None:
        masks, segments = self.masks(), self.segments()  # checked
        if self.panoptic and masks != MaskOptions():
            raise ValueError(f"{find_changed(masks)}= is for semantic masks: leave it out with panoptic=")
        if not self.panoptic and (self.stuff is not None or segments != PanopticOptions()):
            raise ValueError(f"{'stuff' if self.stuff is not None else find_changed(segments)}= needs panoptic=")
        for option, value in (("batch_size=", self.batch_size), ("workers=", self.workers)):
            if value is not None and value < 1:
                raise ValueError(f"{option} must be >= 1, got {value}")
        if not self.batch_timeout > 0:
            raise ValueError(f"batch_timeout= must be > 0, got {self.batch_timeout:g}")

    def masks(self) -> MaskOptions:
        """Return the options of the inference of masks."""
        return MaskOptions(self.inference, self.flip, tuple(self.scales))

    def segments(self) -> PanopticOptions:
        """Return the thresholds of segments."""
        return PanopticOptions(self.score_threshold, self.mask_threshold, self.overlap_threshold)

    def opening(self) -> dict[str, Any]:
        """Return the options of `open_deployed_model`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in RUN_OPTIONS}


def find_changed(options: MaskOptions | PanopticOptions) -> str:
    """Return the first option that differs from its default."""
    default = type(options)()
    return next(field.name for field in fields(options) if getattr(options, field.name) != getattr(default, field.name))


def predict(
    model: str | os.PathLike[str] | Model,
    images: Any,
    *,
    top: int = 1,
    limit: int | None = None,
    options: InferenceOptions | None = None,
    **keywords: Unpack[InferenceKeywords],
) -> Iterator[PredictionRow]:
    """Yield a row for each image, in order: `path`, `label`, `score`, `predictions` (the `top` classes), or `error`.

    The rows of a segmentation model have a `mask`, uint8 [H, W], whose values are indices of `labels`, and the `shares` of its
    classes. `inference="sliding"` computes it from windows, `flip=True` and `scales=(1, 1.25)` from several views. With
    `panoptic=True`, the rows of an EoMT model have `segments` and `segment_ids`, int32 [H, W], instead of a mask. The rows of a
    regression model have `values`, pairs of a target's name and a number.

    `model` is a checkpoint, a run, `hf://owner/name`, an exported file, or a model that `vitrail.load` returned. `images` are
    files, folders, patterns, lists, tar shards or tables; a PIL image, an array [H, W, C], a tensor [C, H, W], or a list of
    them; a dataset. For a model of clips they are videos: files, folders of frames, arrays [T, H, W, C]; the probabilities of
    all views of a video are averaged. Keywords are fields of `InferenceOptions`: `device="cuda"`, `batch_size=16`,
    `size=(288, 288)`.
    """
    return infer_rows(model, images, "logits", top, limit, options, keywords)


def embed(
    model: str | os.PathLike[str] | Model,
    images: Any,
    *,
    limit: int | None = None,
    options: InferenceOptions | None = None,
    **keywords: Unpack[InferenceKeywords],
) -> Iterator[PredictionRow]:
    """Yield a row for each image, in order: `path` and `features`, a vector; or `error`. Arguments are as for `predict`."""
    return infer_rows(model, images, "features", 1, limit, options, keywords)


def infer_rows(
    model: str | os.PathLike[str] | Model,
    images: Any,
    output_kind: OutputKind,
    top: int,
    limit: int | None,
    options: InferenceOptions | None,
    keywords: InferenceKeywords,
) -> Iterator[PredictionRow]:
    """Yield the predictions or features of images; the arguments are checked before the first row is asked for."""
    for name, value in (("top", top), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}= must be >= 1, got {value}")
    if unknown := sorted(set(keywords) - {field.name for field in fields(InferenceOptions)}):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: InferenceOptions lists the known ones")
    chosen = replace(options or InferenceOptions(), **keywords)
    inputs = collect_images(images, ask_media=ask_media(model, chosen.assume, chosen.take))
    count = len(inputs) if limit is None else min(limit, len(inputs))
    if chosen.panoptic and output_kind == "features":
        raise ValueError("panoptic= is for vitrail.predict: leave it out")
    pool = open_pool(model, "queries" if chosen.panoptic else output_kind, chosen, count)
    check_input_media(pool.deployed, inputs)
    if output_kind == "logits" and top > 1:
        check_ranked(pool.deployed)
    return predict_rows(pool, inputs, 0, count, top)


def check_input_media(deployed: DeployedModel, inputs: ImageInputs) -> None:
    """Raise ValueError for images, videos or sounds given to a model that takes others."""
    contract = deployed.contract
    if inputs.media != contract.media:
        takes, found = contract.describe_inputs(), NOUNS[inputs.media]
        remedy = f"give {contract.media}s, or another model"
        raise ValueError(f"{deployed.name} takes {takes}, and {inputs.name(0)} is {found}: {remedy}")


def check_ranked(deployed: DeployedModel) -> None:
    """Raise ValueError for a model whose outputs are no classes of images, of which the most probable are listed."""
    task = deployed.contract.task
    if not task.has_image_classes:
        raise ValueError(f"top= is for classes of images, and {deployed.name} predicts {task.outputs}: leave it out")


@dataclass(frozen=True)
class RuntimePool:
    """An open model with one runtime per thread; the runtimes may be one shared object."""

    deployed: DeployedModel
    runtimes: tuple[Runtime, ...]
    batch_size: BatchSizeTuner
    masks: MaskInference | PanopticInference | None = None  # None for classes and features

    @property
    def inference(self) -> ImageInference:
        contract = self.deployed.contract
        if contract.media == "video":
            return ClipInference(
                contract.preprocessing, None if self.deployed.output_kind == "features" else contract.activation
            )
        return self.masks or RowInference(contract.preprocessing)


def device_type(runtime: Runtime) -> str:
    """Return the type of a runtime's device, such as cpu or cuda."""
    device: torch.device | None = getattr(runtime, "device", None)
    return "cpu" if device is None else device.type


def open_pool(
    where: str | os.PathLike[str] | Model,
    output_kind: OutputKind,
    options: InferenceOptions,
    count: int,
    report: MessageCallback | None = None,
) -> RuntimePool:
    """Open a model for `count` images; on a CPU, with one single-threaded runtime per core."""
    lanes = max(1, min(options.workers or min(available_cores(), MAX_LANES), count))
    threads = 1 if pick_device(options.device).type != "cpu" else max(1, available_cores() // lanes)
    more = {"output_kind": output_kind, "threads": threads, "report": report, "n_images": count}
    deployed = with_class_names(open_deployed_model(where, **options.opening(), **more), options.names)
    masks = choose_mask_inference(deployed, options)
    if (
        options.panoptic
        and options.stuff is None
        and deployed.model is not None
        and read_things(deployed.model) is None
    ):
        note = "the model file does not say which classes are stuff: all count as things"
        deployed = replace(deployed, notes=(*deployed.notes, note))
    device = device_type(deployed.runtime)
    limit = max_cpu_batch_size(deployed.contract, lanes) if device == "cpu" else parallel.MAX_BATCH_SIZE.get(device, 64)
    tuner = BatchSizeTuner(parallel.INITIAL_BATCH_SIZE.get(device, 8), limit)
    if options.batch_size is not None:
        tuner = BatchSizeTuner(options.batch_size, options.batch_size, fixed=True)
    if device != "cpu":
        return RuntimePool(deployed, (deployed.runtime,) * lanes, tuner, masks)
    keep_freed_memory()
    clones = (clone_runtime(deployed, threads) for _ in range(lanes - 1))
    return RuntimePool(deployed, (deployed.runtime, *clones), tuner, masks)


def choose_mask_inference(
    deployed: DeployedModel, options: InferenceOptions
) -> MaskInference | PanopticInference | None:
    """Return the inference of a segmentation model; None for another, which must not be given options of masks."""
    contract, given = deployed.contract, options.masks()
    if deployed.output_kind == "queries":
        return PanopticInference(contract.preprocessing, build_reader(deployed, options.segments(), options.stuff))
    if contract.task.has_maps:
        return MaskInference(contract.preprocessing, given, len(contract.labels or ()))
    if given != MaskOptions():
        name = find_changed(given)
        raise ValueError(f"{name}= is for segmentation models, and {deployed.name} predicts no masks: leave it out")
    return None


def with_overlays(pool: RuntimePool) -> RuntimePool:
    """Return a pool of a segmentation model whose rows have overlays too."""
    assert pool.masks is not None
    colours = class_colours(pool.deployed.contract)
    pool.batch_size.limit_size(MAX_OVERLAY_BATCH)
    return replace(pool, masks=replace(pool.masks, overlay_colours=colours))


def predict_rows(
    pool: RuntimePool,
    inputs: ImageInputs,
    start: int,
    stop: int,
    top: int = 1,
    progress: ProgressCallback | None = None,
) -> Iterator[PredictionRow]:
    """Yield the rows of the images from `start` to `stop`, in order."""
    contract, output_kind = pool.deployed.contract, pool.deployed.output_kind
    stage = "embedding" if output_kind == "features" else "predicting"
    lanes = pool.runtimes[: max(1, stop - start)]
    for batch in ParallelInference(inputs, start, stop, pool.inference, lanes, pool.batch_size):
        yield from to_rows(batch, contract, output_kind, top)
        if progress:
            progress(stage, batch.start + len(batch.names), stop)


def max_cpu_batch_size(contract: ModelContract, lanes: int) -> int:
    """Return the largest batch size tried on a CPU."""
    pipeline = contract.preprocessing
    outputs = 3 * len(contract.labels or ()) if contract.task.has_maps else 0  # logits, and copies of them
    frames = 1 if pipeline.clip is None else pipeline.clip.frames
    image_bytes = 4 * frames * pipeline.size[0] * pipeline.size[1] * (pipeline.channels * ACTIVATION_FACTOR + outputs)
    return max(1, min(parallel.MAX_BATCH_SIZE["cpu"], MAX_BATCH_BYTES // (image_bytes * lanes)))


def to_rows(batch: BatchOutput, contract: ModelContract, output_kind: OutputKind, top: int) -> Iterator[PredictionRow]:
    """Yield the rows of a batch."""
    for index, (name, values) in enumerate(zip(batch.names, batch.values, strict=True)):
        if values is None:
            yield PredictionRow(name, error=batch.errors[index], index=batch.start + index)
        elif isinstance(values, MaskOutput):
            labels, number = contract.labels or (), batch.start + index
            yield PredictionRow(name, mask=values.mask, labels=labels, overlay=values.overlay, index=number)
        elif isinstance(values, PanopticOutput):
            facts = {"segments": values.segments, "segment_ids": values.ids, "labels": contract.labels or ()}
            yield PredictionRow(name, **facts, overlay=values.overlay, index=batch.start + index)
        elif output_kind == "features":
            yield PredictionRow(name, features=values)
        elif contract.targets is not None:
            yield PredictionRow(name, values=tuple(zip(contract.targets, map(float, values), strict=True)))
        else:
            yield PredictionRow(name, top_predictions(values, contract, top))


def top_predictions(logits: np.ndarray, contract: ModelContract, top: int) -> tuple[tuple[str, float], ...]:
    """Return the `top` classes of logits [K] with their probabilities."""
    assert contract.labels is not None
    return tuple((contract.labels[index], score) for index, score in top_classes(logits, contract.several, top))
