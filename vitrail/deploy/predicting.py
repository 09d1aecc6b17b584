"""`vitrail.predict`: what a model says of many pictures, in their order, made on all cores."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.sources.parts import Progress
from vitrail.deploy.feeding import Lanes, Made
from vitrail.deploy.inputs import Inputs, gathered
from vitrail.deploy.opening import another, opened
from vitrail.deploy.pace import FIRST, MOST, Pace
from vitrail.deploy.rows import Row
from vitrail.deploy.runtime import Contract, Deployed, Gives, Runtime
from vitrail.deploy.torch_runtime import TorchRuntime
from vitrail.engine.devices import pick_device
from vitrail.engine.heap import keep_memory

LANES = 16  # more in one process would wait for Python; more processes do not
ROOM = 2**31  # bytes that batches may take on a CPU, all lanes together
SWELL = 24  # times the bytes of its input that a picture takes inside a model, about


@dataclass(frozen=True)
class How:
    """How answers are computed; the same answers, more or less quickly."""

    runtime: str = "auto"
    device: str = "auto"
    precision: str = "fp32"
    merge: int = 0
    size: tuple[int, int] | None = None
    batch_size: int | None = None  # None for what turns out to be quick
    workers: int | None = None  # None for as many as there are cores
    assume: Mapping[str, Any] | None = None
    take: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size}: at least 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1")


def predict(
    model: str | os.PathLike[str],
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    top: int = 1,
    limit: int | None = None,
    how: How = How(),  # noqa: B008 (a value)
) -> Iterator[Row]:
    """A row for each picture, in order: `path`, `label`, `score`, `answers` (the surest `top`), or `error`.

    `model` is a checkpoint, a run, `hf://owner/name` or an exported file; `paths` are files, folders, patterns, lists, tar
    shards or tables. Rows come as they are made, and nothing is kept.
    """
    inputs = gathered([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    count = len(inputs) if limit is None else min(limit, len(inputs))
    return Answering(ready(os.fspath(model), "logits", how, count), inputs, how, top).rows(0, count)


@dataclass(frozen=True)
class Ready:
    """A model that is open as often as it is needed: a runtime for each lane, or one that they share."""

    deployed: Deployed
    lanes: tuple[Runtime, ...]

    @property
    def kind(self) -> str:
        """Of the device."""
        return self.lanes[0].device.type if isinstance(self.lanes[0], TorchRuntime) else "cpu"


def ready(where: str, gives: Gives, how: How, count: int, tell: Callable[[str], None] | None = None) -> Ready:
    """A model for so many pictures. On a CPU it has a lane for each core, with a thread each."""
    lanes = max(1, min(how.workers or min(ours(), LANES), count))
    threads = 1 if pick_device(how.device).type != "cpu" else max(1, ours() // lanes)
    deployed = opened(
        where,
        runtime=how.runtime,
        device=how.device,
        gives=gives,
        merge=how.merge,
        size=how.size,
        assume=how.assume,
        take=how.take,
        threads=threads,
        tell=tell,
        precision=how.precision,
        pictures=count,
    )
    if isinstance(deployed.runtime, TorchRuntime) and deployed.runtime.device.type != "cpu":
        return Ready(deployed, (deployed.runtime,) * lanes)
    keep_memory()
    return Ready(deployed, (deployed.runtime, *(another(deployed, threads) for _ in range(lanes - 1))))


class Answering:
    """A model and pictures on their way to rows."""

    def __init__(self, ready: Ready, inputs: Inputs, how: How, top: int = 1) -> None:
        self.deployed, self.lanes, self.inputs, self.top = ready.deployed, ready.lanes, inputs, top
        most = fitting(self.deployed.contract, len(ready.lanes)) if ready.kind == "cpu" else MOST.get(ready.kind, 64)
        first, fixed = how.batch_size or FIRST.get(ready.kind, 8), how.batch_size is not None
        self.pace = Pace(first, first if fixed else most, fixed)

    def rows(self, start: int, stop: int, progress: Progress | None = None) -> Iterator[Row]:
        """The rows of these pictures, in order."""
        contract, gives = self.deployed.contract, self.deployed.gives
        lanes = self.lanes[: max(1, stop - start)]
        for made in Lanes(self.inputs, start, stop, contract.preprocessing, lanes, self.pace):
            yield from told(made, contract, gives, self.top)
            if progress:
                progress("predicting" if gives == "logits" else "embedding", made.start + len(made.names), stop)


def ours() -> int:
    """The cores of this process, where several share a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def fitting(contract: Contract, lanes: int) -> int:
    """The largest batch that is tried on a CPU."""
    pipeline = contract.preprocessing
    picture = 4 * pipeline.channels * pipeline.size[0] * pipeline.size[1] * SWELL
    return max(1, min(MOST["cpu"], ROOM // (picture * lanes)))


def told(made: Made, contract: Contract, gives: Gives, top: int) -> Iterator[Row]:
    """A batch as rows."""
    for place, (name, values) in enumerate(zip(made.names, made.values, strict=True)):
        if values is None:
            yield Row(name, error=made.errors[place])
        elif gives == "features":
            yield Row(name, features=values)
        else:
            yield Row(name, answers=surest(values, contract, top))


def surest(logits: np.ndarray, contract: Contract, top: int) -> tuple[tuple[str, float], ...]:
    """The surest answers, with their probabilities: over all classes, or of each by itself where several may be right."""
    assert contract.labels is not None
    values = logits.astype(np.float64)
    if contract.several:
        scores = 1 / (1 + np.exp(-np.clip(values, -500, 500)))
    else:
        scores = np.exp(values - values.max())
        scores /= scores.sum()
    first = np.argsort(-values, kind="stable")[:top]
    return tuple((contract.labels[place], float(scores[place])) for place in first.tolist())
