"""The models that are served, by name: opened, tried, and exchanged for newer ones while requests go on."""

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Deployed, Gives, Runtime
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import from_json
from vitrail.serve.batching import Batcher
from vitrail.serve.limits import Refused
from vitrail.serve.opening import Opening

log = logging.getLogger("vitrail.serve")


Line = Callable[[str, Sequence[Runtime], Preprocessing], Batcher]


@dataclass(frozen=True)
class Named:
    """A model to serve: what clients call it, and where it lies on this machine."""

    name: str
    where: str


def named(given: Sequence[str]) -> list[Named]:
    """`name=where`, or `where` alone, which is called like its file or directory."""
    found = []
    for text in given:
        name, equals, where = text.partition("=")
        if not equals or "/" in name or "\\" in name:
            name, where = "", text
        if not where:
            raise ValueError(f"{text!r}: write NAME=MODEL, with a file, a directory, a run or hf://owner/name")
        found.append(Named(name or usual(where), where))
    for each in found:
        if sum(other.name == each.name for other in found) > 1:
            raise ValueError(f"two models are called {each.name!r}: write NAME={each.where} to call one otherwise")
        if not each.name.isprintable() or len(each.name) > 100:
            raise ValueError(f"{each.name!r} as a model's name: use up to 100 letters, digits, - and _")
    return found


def usual(where: str) -> str:
    """What a model is called by itself: a file's name without its ending, a directory's or a repository's name."""
    last = where.rstrip("/").replace("\\", "/").rpartition("/")[2] or where
    stem, dot, ending = last.rpartition(".")
    if last in ("model.safetensors", "best.safetensors"):
        return usual(where.rstrip("/")[: -len(last)].rstrip("/")) or stem
    return stem if dot and stem and ending.isalnum() and not ending.isdigit() else last


class Served:
    """One model, the lines before it, and what clients may know of it."""

    def __init__(self, called: Named, opening: Opening, line: Line, workers: int) -> None:
        self.name, self.where, self.opening = called.name, called.where, opening
        self.line, self.workers = line, workers
        self.deployed = opening.first(called.where)
        self.contract = self.deployed.contract
        self.config = from_json(self.contract.config) if self.contract.config else None
        model = self.deployed.model
        self.vit = apart(model) if isinstance(model, ViT) else None  # to look into
        self.batchers: dict[Gives, Batcher] = {}
        self.adding = threading.Lock()
        self.start(self.deployed)

    @property
    def predicts(self) -> bool:
        return self.deployed.gives == "logits"

    def start(self, deployed: Deployed) -> None:
        """Tries a model, and puts a line before it."""
        tried(self.where, deployed.runtime, self.contract.preprocessing)
        runtimes = [deployed.runtime, *(self.opening.another(deployed) for _ in range(self.workers - 1))]
        self.batchers[deployed.gives] = self.line(self.name, runtimes, self.contract.preprocessing)

    def ready(self, gives: Gives) -> Batcher | None:
        """The line for these numbers, if it is open already."""
        return self.batchers.get(gives)

    def add(self, gives: Gives) -> None:
        """Opens the model once more for other numbers; takes as long as that takes."""
        with self.adding:
            if gives in self.batchers:
                return
            other = self.opening.for_(self.where, gives, self.deployed.runtime.name)
            if other.contract.checksum != self.contract.checksum:
                raise Refused(409, f"the file of {self.name!r} has changed since it was opened: reload it first")
            self.start(other)

    def facts(self) -> dict[str, Any]:
        """What GET /models says of it."""
        config = self.config
        vit = config if isinstance(config, ViTConfig) else None
        return {
            "name": self.name,
            "labels": None if self.contract.labels is None else list(self.contract.labels),
            "size": list(self.contract.preprocessing.size),
            "grid": list(vit.shape.grid) if vit else None,
            "layers": vit.size.depth if vit else 0,
            "heads": vit.size.heads if vit else 0,
            "prefix": vit.prefix.count if vit else 0,
            "attention": self.sees,
            "several": self.contract.several,
            "runtime": self.deployed.runtime.name,
            "merge": self.contract.merge,
        }

    @property
    def sees(self) -> bool:
        """Whether there is attention to look at: in a Vision Transformer, and not in a file that was exported from one."""
        return self.vit is not None

    def close(self) -> None:
        """Answers what it was asked, and ends."""
        for batcher in self.batchers.values():
            batcher.close()


def apart(vit: ViT) -> ViT:
    """The same model with layers of its own and the same weights in memory: looking watches layers while they run."""
    vit.eval()
    weights: dict[int, Any] = {id(tensor): tensor for tensor in (*vit.parameters(), *vit.buffers())}
    return copy.deepcopy(vit, weights)


def tried(where: str, runtime: Runtime, preprocessing: Preprocessing) -> None:
    """Asks a model once, before clients do: about a grey picture."""
    grey = np.full((1, preprocessing.channels, *preprocessing.size), 128, np.uint8)
    found = runtime(grey)
    if found.ndim != 2 or len(found) != 1 or not np.isfinite(found).all():
        raise ValueError(f"{where} gives numbers that are not finite, or none, for a grey picture: it is not served")


class Models:
    """All that are served. The first is asked where a client names none."""

    def __init__(self, models: Sequence[Named], opening: Opening, line: Line, workers: int = 1) -> None:
        self.opening, self.line, self.workers = opening, line, workers
        self.wanted = {model.name: model for model in models}
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="opening")
        self.served = {model.name: self.opened(model) for model in models}

    def opened(self, model: Named) -> Served:
        """Opens and tries one."""
        return Served(model, self.opening, self.line, self.workers)

    def get(self, name: str | None) -> Served:
        """The model of this name, or the first."""
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise Refused(404, f"no model is called {name[:100]!r}: there is {', '.join(self.served)}")
        return self.served[name]

    async def line_of(self, name: str | None, gives: Gives) -> tuple[Served, Batcher]:
        """A model and its open line. Whoever asks it does so before the event loop goes on, so that it is not closed between."""
        loop = asyncio.get_running_loop()
        while True:
            served = self.get(name)
            if (batcher := served.ready(gives)) is not None:
                return served, batcher
            try:
                await loop.run_in_executor(self.pool, served.add, gives)
            except (ValueError, OSError) as error:
                log.error("%s cannot be opened for %s: %s", served.name, gives, error)
                raise Refused(409, f"{served.name!r} cannot give {gives} here; the log says why") from None

    async def reload(self, name: str) -> None:
        """Opens a model anew and lets it take over once it has answered; one that fails leaves the old one where it is."""
        loop = asyncio.get_running_loop()
        fresh = await loop.run_in_executor(self.pool, self.opened, self.wanted[name])
        old, self.served[name] = self.served[name], fresh
        old.close()

    def facts(self) -> list[dict[str, Any]]:
        """What GET /models says."""
        return [served.facts() | {"default": number == 0} for number, served in enumerate(self.served.values())]

    def close(self) -> None:
        """Ends all lines, when nobody asks any more."""
        for served in self.served.values():
            served.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
