"""`vitrail.predict`: predictions of a model for many images, in order, computed on all cores."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from vitrail.deploy.predict import parallel
from vitrail.deploy.predict.formats import PredictionRow
from vitrail.deploy.predict.inputs import ImageInputs, collect_inputs
from vitrail.deploy.predict.parallel import BatchOutput, BatchSizeTuner, ParallelInference
from vitrail.deploy.runtimes.base import BATCH_SECONDS, DeployedModel, ModelContract, OutputKind, Runtime
from vitrail.deploy.runtimes.open import clone_runtime, open_deployed_model, with_class_names
from vitrail.deploy.runtimes.select import MessageCallback
from vitrail.inference import TorchRuntime, top_classes
from vitrail.utils.devices import available_cores, keep_freed_memory, pick_device
from vitrail.utils.progress import ProgressCallback

MAX_LANES = 16  # threads; more would wait for the GIL
MAX_BATCH_BYTES = 2**31  # of the batches of all threads, on a CPU
ACTIVATION_FACTOR = 24  # memory of an image inside a model, relative to its input


RUN_OPTIONS = ("batch_size", "workers", "names")  # of an inference, not of opening the model


@dataclass(frozen=True)
class InferenceOptions:
    """Runtime, device and batch size of an inference."""

    runtime: str = "auto"
    device: str = "auto"
    precision: str = "fp32"
    merge: int = 0
    size: tuple[int, int] | None = None
    batch_size: int | None = None  # None: tuned while running
    workers: int | None = None  # None: one per core
    assume: Mapping[str, Any] | None = None
    take: str | None = None
    batch_timeout: float = BATCH_SECONDS
    names: str | None = None  # file of class names for a model without them, or "imagenet"

    def __post_init__(self) -> None:
        for option, value in (("--batch-size", self.batch_size), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise ValueError(f"{option} must be >= 1, got {value}")
        if not self.batch_timeout > 0:
            raise ValueError(f"--batch-timeout must be > 0, got {self.batch_timeout:g}")

    def opening(self) -> dict[str, Any]:
        """Return the options of `open_deployed_model`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in RUN_OPTIONS}


def predict(
    model: str | os.PathLike[str],
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    top: int = 1,
    limit: int | None = None,
    options: InferenceOptions = InferenceOptions(),  # noqa: B008
) -> Iterator[PredictionRow]:
    """Yield a row for each image, in order: `path`, `label`, `score`, `predictions` (the `top` classes), or `error`.

    `model` is a checkpoint, a run, `hf://owner/name` or an exported file; `paths` are files, folders, patterns, lists, tar
    shards or tables.
    """
    inputs = collect_inputs([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    count = len(inputs) if limit is None else min(limit, len(inputs))
    return predict_rows(open_pool(os.fspath(model), "logits", options, count), inputs, 0, count, top)


@dataclass(frozen=True)
class RuntimePool:
    """An open model with one runtime per thread; the runtimes may be one shared object."""

    deployed: DeployedModel
    runtimes: tuple[Runtime, ...]
    batch_size: BatchSizeTuner


def device_type(runtime: Runtime) -> str:
    """Return the type of a runtime's device, such as cpu or cuda."""
    return runtime.device.type if isinstance(runtime, TorchRuntime) else "cpu"


def open_pool(
    where: str,
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
    device = device_type(deployed.runtime)
    limit = max_cpu_batch_size(deployed.contract, lanes) if device == "cpu" else parallel.MAX_BATCH_SIZE.get(device, 64)
    tuner = BatchSizeTuner(parallel.INITIAL_BATCH_SIZE.get(device, 8), limit)
    if options.batch_size is not None:
        tuner = BatchSizeTuner(options.batch_size, options.batch_size, fixed=True)
    if device != "cpu":
        return RuntimePool(deployed, (deployed.runtime,) * lanes, tuner)
    keep_freed_memory()
    clones = (clone_runtime(deployed, threads) for _ in range(lanes - 1))
    return RuntimePool(deployed, (deployed.runtime, *clones), tuner)


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
    stage = "predicting" if output_kind == "logits" else "embedding"
    lanes = pool.runtimes[: max(1, stop - start)]
    for batch in ParallelInference(inputs, start, stop, contract.preprocessing, lanes, pool.batch_size):
        yield from to_rows(batch, contract, output_kind, top)
        if progress:
            progress(stage, batch.start + len(batch.names), stop)


def max_cpu_batch_size(contract: ModelContract, lanes: int) -> int:
    """Return the largest batch size tried on a CPU."""
    pipeline = contract.preprocessing
    image_bytes = 4 * pipeline.channels * pipeline.size[0] * pipeline.size[1] * ACTIVATION_FACTOR
    return max(1, min(parallel.MAX_BATCH_SIZE["cpu"], MAX_BATCH_BYTES // (image_bytes * lanes)))


def to_rows(batch: BatchOutput, contract: ModelContract, output_kind: OutputKind, top: int) -> Iterator[PredictionRow]:
    """Yield the rows of a batch."""
    for index, (name, values) in enumerate(zip(batch.names, batch.values, strict=True)):
        if values is None:
            yield PredictionRow(name, error=batch.errors[index])
        elif output_kind == "features":
            yield PredictionRow(name, features=values)
        else:
            yield PredictionRow(name, top_predictions(values, contract, top))


def top_predictions(logits: np.ndarray, contract: ModelContract, top: int) -> tuple[tuple[str, float], ...]:
    """Return the `top` classes of logits [K] with their probabilities."""
    assert contract.labels is not None
    return tuple((contract.labels[index], score) for index, score in top_classes(logits, contract.several, top))
