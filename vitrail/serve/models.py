"""Served models by name: opening, testing, reloading without downtime, and conversion of logits to predictions."""

import asyncio
import copy
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sound import import_soundfile
from vitrail.data.video import import_av
from vitrail.deploy.export.comparison import choose_batch_size
from vitrail.deploy.runtimes.base import DeployedModel, OutputKind, Runtime
from vitrail.deploy.runtimes.masks import class_colours
from vitrail.deploy.runtimes.open import clone_runtime, open_deployed_model, with_class_names
from vitrail.deploy.runtimes.panoptic import PanopticOptions, PanopticReader, build_reader
from vitrail.deploy.runtimes.precision import current_precision
from vitrail.inference import compute_views, top_classes
from vitrail.models.base import TokenConfig, TokenModel
from vitrail.models.registry import config_from_json
from vitrail.reports.masks import format_colour
from vitrail.serve.batching import Batcher
from vitrail.serve.limits import RequestRefused
from vitrail.serve.texts import open_text_tower

SLOT_BYTES = 2**20  # of a decoded video that take a slot of the queue


@dataclass(frozen=True)
class ModelOpener:
    """Opens models with fixed options."""

    threads: int | None = None  # of each runtime
    options: Mapping[str, Any] = field(default_factory=dict)  # of `vitrail.deploy.runtimes.open.open_deployed_model`
    names: str | None = None  # file of class names for models without them

    def open_any(self, where: str) -> DeployedModel:
        """Open a model for logits, or for features if it has no classifier."""
        try:
            return self.open_model(where, "logits")
        except ValueError:
            try:
                model = self.open_model(where, "features")
            except ValueError:
                model = None
            if model is None or model.contract.labels is not None:
                raise
            return model

    def open_model(self, where: str, output_kind: OutputKind, runtime: str | None = None) -> DeployedModel:
        """Open a model for an output kind, with a given runtime or the configured one."""
        chosen = {} if runtime is None else {"runtime": runtime, "tolerance": None}
        options = {**self.options, **chosen}
        deployed = open_deployed_model(where, output_kind=output_kind, threads=self.threads, **options)
        needs_names = output_kind != "features" and deployed.class_names is None
        return with_class_names(deployed, self.names) if needs_names else deployed

    def clone_runtime(self, deployed: DeployedModel) -> Runtime:
        """Return another instance of a model's runtime for another thread."""
        return clone_runtime(deployed, self.threads)


log = logging.getLogger("vitrail.serve")


BatcherFactory = Callable[[str, Sequence[Runtime], Preprocessing], Batcher]


@dataclass(frozen=True)
class ModelSource:
    """A model to serve: its public name and its location."""

    name: str
    where: str


def parse_model_sources(texts: Sequence[str]) -> list[ModelSource]:
    """Parse `NAME=MODEL` or `MODEL`, which is named after its file or directory."""
    sources = []
    for text in texts:
        name, equals, where = text.partition("=")
        if not equals or "/" in name or "\\" in name:
            name, where = "", text
        if not where:
            raise ValueError(
                f"invalid model {text!r}: use NAME=MODEL with a file, a directory, a run or hf://owner/name"
            )
        sources.append(ModelSource(name or default_name(where), where))
    for source in sources:
        if sum(other.name == source.name for other in sources) > 1:
            raise ValueError(f"two models are named {source.name!r}: rename one with NAME={source.where}")
        if not source.name.isprintable() or len(source.name) > 100:
            raise ValueError(f"invalid model name {source.name!r}: use up to 100 letters, digits, - and _")
    return sources


def default_name(where: str) -> str:
    """Return the default name of a model: its file name without suffix, or its directory or repository name."""
    last = where.rstrip("/").replace("\\", "/").rpartition("/")[2] or where
    stem, dot, ending = last.rpartition(".")
    if last in ("model.safetensors", "best.safetensors"):
        return default_name(where.rstrip("/")[: -len(last)].rstrip("/")) or stem
    return stem if dot and stem and ending.isalnum() and not ending.isdigit() else last


class ServedModel:
    """A served model with its batchers and its public description."""

    def __init__(self, source: ModelSource, opener: ModelOpener, make_batcher: BatcherFactory, workers: int) -> None:
        self.name, self.where, self.opener = source.name, source.where, opener
        self.make_batcher, self.workers = make_batcher, workers
        self.deployed = opener.open_any(source.where)
        self.contract = self.deployed.contract
        self.config = config_from_json(self.contract.config) if self.contract.config else None
        model = self.deployed.model
        is_clip = self.contract.media == "video"
        self.vit = copy_sharing_weights(model) if isinstance(model, TokenModel) and not is_clip else None  # for maps
        self.texts = None  # the text tower, of a model that has one and no classes of its own
        if self.deployed.output_kind == "features":
            self.texts = open_text_tower(source.where, opener.options.get("assume"), opener.options.get("take"))
        self.batchers: dict[OutputKind, Batcher] = {}
        self.lock = threading.Lock()
        self.start(self.deployed)

    @property
    def slots(self) -> int:
        """Return the slots of the queue that an input takes: one for an image, one for each MiB of a decoded video or sound."""
        if self.contract.media == "image":
            return 1
        preprocessing = self.contract.preprocessing
        return max(1, math.prod(preprocessing.row_shape) * preprocessing.dtype.itemsize // SLOT_BYTES)

    @property
    def has_classes(self) -> bool:
        return self.deployed.output_kind == "logits" and self.contract.task.has_image_classes

    @property
    def has_masks(self) -> bool:
        return self.deployed.output_kind == "logits" and self.contract.task.has_maps

    @property
    def has_queries(self) -> bool:
        """Return whether the model predicts panoptic segments; an exported file does not."""
        return self.has_masks and self.deployed.model is not None and self.deployed.model.config.has_queries

    def build_reader(self, options: PanopticOptions) -> PanopticReader:
        """Return what finds the segments in the outputs of the kind "queries"."""
        return build_reader(self.deployed, options)

    @property
    def has_numbers(self) -> bool:
        return self.deployed.output_kind == "logits" and self.contract.targets is not None

    def start(self, deployed: DeployedModel) -> None:
        """Test a model and start its batcher."""
        if self.contract.media == "video":
            import_av()  # raises if it is not installed
        if self.contract.media == "sound":
            import_soundfile()
        check_runs(self.where, deployed.runtime, self.contract.preprocessing)
        runtimes = [deployed.runtime, *(self.opener.clone_runtime(deployed) for _ in range(self.workers - 1))]
        if self.contract.media == "video":
            activation = None if deployed.output_kind == "features" else self.contract.activation
            runtimes = [ViewRuntime(runtime, activation) for runtime in runtimes]
        batcher = self.make_batcher(self.name, runtimes, self.contract.preprocessing)
        batcher.max_batch_size = min(batcher.max_batch_size, choose_batch_size(deployed.contract))
        self.batchers[deployed.output_kind] = batcher

    def add_output(self, output_kind: OutputKind) -> None:
        """Open the model for another output kind. This may take seconds."""
        with self.lock:
            if output_kind in self.batchers:
                return
            runtime = "torch" if output_kind == "queries" else self.deployed.runtime.name
            other = self.opener.open_model(self.where, output_kind, runtime)
            if other.contract.checksum != self.contract.checksum:
                raise RequestRefused(409, f"the file of {self.name!r} has changed: reload the model first")
            self.start(other)

    def describe(self) -> dict[str, Any]:
        """Return its entry of GET /models."""
        config, clip, sound = self.config, self.contract.preprocessing.clip, self.contract.preprocessing.sound
        vit = config if isinstance(config, TokenConfig) else None
        return {
            "name": self.name,
            "labels": None if self.contract.labels is None else list(self.contract.labels),
            "size": list(self.contract.preprocessing.size),
            "clip": None if clip is None else {"frames": clip.frames, "stride": clip.stride, "views": clip.views},
            "sound": None
            if sound is None
            else {"rate": sound.sample_rate, "seconds": sound.seconds(self.contract.preprocessing.size[1])},
            "grid": list(vit.shape.grid) if vit else None,
            "layers": vit.size.depth if vit else 0,
            "heads": vit.size.heads if vit else 0,
            "prefix": vit.prefix.count if vit else 0,
            "attention": self.vit is not None,  # exported files have none
            "several": self.contract.several,
            "masks": self.has_masks,
            "panoptic": self.has_queries,
            "numbers": self.has_numbers,
            "colours": list(map(format_colour, class_colours(self.contract))) if self.has_masks else None,
            "texts": self.texts is not None,
            "runtime": self.deployed.runtime.name,
            "precision": current_precision(self.deployed),
            "merge": self.contract.merge,
        }

    def close(self) -> None:
        """Finish queued images and stop."""
        for batcher in self.batchers.values():
            batcher.close()


class ViewRuntime:
    """A runtime of a model of clips that takes all views of videos, uint8 [B, V, C, T, H, W], and averages their outputs."""

    def __init__(self, runtime: Runtime, activation: str | None) -> None:
        """Average outputs as `average_views` does with this activation."""
        self.name, self.runtime, self.activation = runtime.name, runtime, activation

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        return compute_views(self.runtime, pixels, self.activation)


def copy_sharing_weights(vit: TokenModel) -> TokenModel:
    """Return a copy that shares the weights but not the layers, so that hooks do not affect predictions."""
    vit.eval()
    weights: dict[int, Any] = {id(tensor): tensor for tensor in (*vit.parameters(), *vit.buffers())}
    return copy.deepcopy(vit, weights)


def check_runs(where: str, runtime: Runtime, preprocessing: Preprocessing) -> None:
    """Run a model once on a grey image or a silent sound; raise ValueError if its output is invalid."""
    grey = np.full((1, *preprocessing.shape), 128, np.uint8)
    if preprocessing.sound is not None:
        grey = np.full((1, *preprocessing.shape), preprocessing.mean[0], np.float32)
    output = runtime(grey)
    if output.ndim not in (2, 3, 4) or len(output) != 1 or not np.isfinite(output).all():
        raise ValueError(
            f"{where} has an empty or non-finite output for a plain {preprocessing.media}: check the model"
        )


class ServedModels:
    """All served models. The first is the default."""

    def __init__(
        self, sources: Sequence[ModelSource], opener: ModelOpener, make_batcher: BatcherFactory, workers: int = 1
    ) -> None:
        self.opener, self.make_batcher, self.workers = opener, make_batcher, workers
        self.sources = {model.name: model for model in sources}
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="opening")
        self.served: dict[str, ServedModel] = {}

    def open_all(self) -> None:
        """Open and test all models. Until then, `get` refuses."""
        self.served = {name: self.open_served(source) for name, source in self.sources.items()}

    def open_served(self, model: ModelSource) -> ServedModel:
        """Open and test a model."""
        return ServedModel(model, self.opener, self.make_batcher, self.workers)

    def get(self, name: str | None) -> ServedModel:
        """Return a model by name, the first for None."""
        if not self.served:
            raise RequestRefused(503, "the models are loading: try again in 5 s", 5)
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise RequestRefused(404, f"unknown model {name[:100]!r}: available are {', '.join(self.served)}")
        return self.served[name]

    async def get_batcher(self, name: str | None, output_kind: OutputKind) -> tuple[ServedModel, Batcher]:
        """Return a model and its batcher. Submit before the next await, so that a reload cannot close it in between."""
        loop = asyncio.get_running_loop()
        while True:
            served = self.get(name)
            if (batcher := served.batchers.get(output_kind)) is not None:
                return served, batcher
            try:
                await loop.run_in_executor(self.pool, served.add_output, output_kind)
            except (ValueError, OSError) as error:
                log.error("cannot open %s for %s: %s", served.name, output_kind, error)
                message = f"{served.name!r} cannot compute {output_kind}: see the server log"
                raise RequestRefused(409, message) from None

    async def reload(self, name: str) -> None:
        """Open and test a new version of a model, then replace the old one. On failure the old one stays."""
        loop = asyncio.get_running_loop()
        fresh = await loop.run_in_executor(self.pool, self.open_served, self.sources[name])
        old, self.served[name] = self.served[name], fresh
        old.close()

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of GET /models."""
        self.get(None)
        return [served.describe() | {"default": number == 0} for number, served in enumerate(self.served.values())]

    def find_stuck(self, seconds: float) -> list[str]:
        """Fail batches that run for longer than this; return the models whose workers are all in such a batch."""
        stuck = []
        for model in self.served.values():
            failed = [batcher.fail_overdue(seconds) for batcher in model.batchers.values()]
            stuck += [model.name] if any(failed) else []
        return stuck

    def close(self) -> None:
        """Stop all batchers. Call it when no request is left."""
        for served in self.served.values():
            served.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def top_predictions(
    logits: np.ndarray, labels: tuple[str, ...] | None, multilabel: bool, top: int
) -> list[dict[str, Any]]:
    """Return the `top` classes of logits [K] with their probabilities, in the order of `vitrail predict`."""
    return [
        {"label": labels[index] if labels else str(index), "score": float(f"{score:.7g}")}
        for index, score in top_classes(logits, multilabel, top)
    ]


def name_values(outputs: np.ndarray, labels: tuple[str, ...] | None) -> dict[str, float]:
    """Return the outputs [M] of a regression model by the names of its targets."""
    return {name: float(f"{value:.7g}") for name, value in zip(labels or (), outputs.tolist(), strict=True)}
