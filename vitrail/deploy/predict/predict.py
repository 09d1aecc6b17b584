"""`vitrail.predict`: predictions of a model for many images, in order, computed on all cores."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.deploy.predict.formats import PredictionRow
from vitrail.deploy.predict.inputs import ImageInputs, collect_inputs
from vitrail.deploy.predict.parallel import (
    INITIAL_BATCH_SIZE,
    MAX_BATCH_SIZE,
    BatchOutput,
    BatchSizeTuner,
    ParallelInference,
)
from vitrail.deploy.runtimes.base import DeployedModel, ModelContract, OutputKind, Runtime
from vitrail.deploy.runtimes.open import clone_runtime, open_deployed_model
from vitrail.inference import TorchRuntime, top_classes
from vitrail.utils.devices import available_cores, keep_freed_memory, pick_device
from vitrail.utils.progress import ProgressCallback

MAX_LANES = 16  # threads; more would wait for the GIL
MAX_BATCH_BYTES = 2**31  # of the batches of all threads, on a CPU
ACTIVATION_FACTOR = 24  # memory of an image inside a model, relative to its input


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

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"--batch-size must be >= 1, got {self.batch_size}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be >= 1, got {self.workers}")


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
    return Predictor(open_pool(os.fspath(model), "logits", options, count), inputs, options, top).predict_rows(0, count)


@dataclass(frozen=True)
class RuntimePool:
    """An open model with one runtime per thread; the runtimes may be one shared object."""

    deployed: DeployedModel
    runtimes: tuple[Runtime, ...]

    @property
    def device_type(self) -> str:
        """Return the type of the device, such as cpu or cuda."""
        return self.runtimes[0].device.type if isinstance(self.runtimes[0], TorchRuntime) else "cpu"


def open_pool(
    where: str,
    output_kind: OutputKind,
    options: InferenceOptions,
    count: int,
    report: Callable[[str], None] | None = None,
) -> RuntimePool:
    """Open a model for `count` images; on a CPU, with one single-threaded runtime per core."""
    lanes = max(1, min(options.workers or min(available_cores(), MAX_LANES), count))
    threads = 1 if pick_device(options.device).type != "cpu" else max(1, available_cores() // lanes)
    deployed = open_deployed_model(
        where,
        runtime=options.runtime,
        device=options.device,
        output_kind=output_kind,
        merge=options.merge,
        size=options.size,
        assume=options.assume,
        take=options.take,
        threads=threads,
        report=report,
        precision=options.precision,
        n_images=count,
    )
    if isinstance(deployed.runtime, TorchRuntime) and deployed.runtime.device.type != "cpu":
        return RuntimePool(deployed, (deployed.runtime,) * lanes)
    keep_freed_memory()
    return RuntimePool(deployed, (deployed.runtime, *(clone_runtime(deployed, threads) for _ in range(lanes - 1))))


class Predictor:
    """A model with the images to predict."""

    def __init__(self, pool: RuntimePool, inputs: ImageInputs, options: InferenceOptions, top: int = 1) -> None:
        self.deployed, self.runtimes, self.inputs, self.top = pool.deployed, pool.runtimes, inputs, top
        max_batch_size = (
            max_cpu_batch_size(self.deployed.contract, len(pool.runtimes))
            if pool.device_type == "cpu"
            else MAX_BATCH_SIZE.get(pool.device_type, 64)
        )
        first, fixed = options.batch_size or INITIAL_BATCH_SIZE.get(pool.device_type, 8), options.batch_size is not None
        self.batch_size = BatchSizeTuner(first, first if fixed else max_batch_size, fixed)

    def predict_rows(self, start: int, stop: int, progress: ProgressCallback | None = None) -> Iterator[PredictionRow]:
        """Yield the rows of these images, in order."""
        contract, output_kind = self.deployed.contract, self.deployed.output_kind
        lanes = self.runtimes[: max(1, stop - start)]
        for batch in ParallelInference(self.inputs, start, stop, contract.preprocessing, lanes, self.batch_size):
            yield from to_rows(batch, contract, output_kind, self.top)
            if progress:
                stage = "predicting" if output_kind == "logits" else "embedding"
                progress(stage, batch.start + len(batch.names), stop)


def max_cpu_batch_size(contract: ModelContract, lanes: int) -> int:
    """Return the largest batch size tried on a CPU."""
    pipeline = contract.preprocessing
    image_bytes = 4 * pipeline.channels * pipeline.size[0] * pipeline.size[1] * ACTIVATION_FACTOR
    return max(1, min(MAX_BATCH_SIZE["cpu"], MAX_BATCH_BYTES // (image_bytes * lanes)))


def to_rows(batch: BatchOutput, contract: ModelContract, output_kind: OutputKind, top: int) -> Iterator[PredictionRow]:
    """Yield the rows of a batch."""
    for index, (name, values) in enumerate(zip(batch.names, batch.values, strict=True)):
        if values is None:
            yield PredictionRow(name, error=batch.errors[index])
        elif output_kind == "features":
            yield PredictionRow(name, features=values)
        else:
            yield PredictionRow(name, predictions=top_predictions(values, contract, top))


def top_predictions(logits: np.ndarray, contract: ModelContract, top: int) -> tuple[tuple[str, float], ...]:
    """Return the `top` classes of logits [K] with their probabilities."""
    assert contract.labels is not None
    return tuple((contract.labels[index], score) for index, score in top_classes(logits, contract.several, top))
