"""Processes that predict one set of images: the share of each, and under torchrun the precision that the first one chooses."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from vitrail.deploy.runtimes import precision
from vitrail.utils.json import dataclass_from_json, to_json
from vitrail.utils.precision import PrecisionChoice

CHOICES_KEY = "vitrail predict: precisions"
MAX_PARTS = 100_000
WAIT = timedelta(minutes=30)  # for the first process, which may have to download or export the model


@dataclass(frozen=True)
class ProcessShare:
    """Rank and number of processes, as set by torchrun or --part."""

    rank: int = 0
    world: int = 1

    def index_range(self, count: int) -> tuple[int, int]:
        """Return the range of its images; concatenated by rank, the ranges are in order."""
        return count * self.rank // self.world, count * (self.rank + 1) // self.world

    def largest(self, count: int) -> int:
        """Return the number of images of the largest share."""
        return -(-count // self.world)


def process_share(environment: Mapping[str, str] = os.environ, part: str | None = None) -> ProcessShare:
    """Return the share of this process from RANK and WORLD_SIZE, or from a part such as "3/8"."""
    try:
        share = ProcessShare(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    except ValueError:
        share = ProcessShare(0, 0)
    if not 0 <= share.rank < share.world:
        values = " and ".join(f"{name}={environment.get(name)}" for name in ("RANK", "WORLD_SIZE"))
        raise ValueError(f"invalid {values}: RANK must be in 0 … WORLD_SIZE - 1, as torchrun sets them")
    if part is None:
        return share
    if share.world > 1:
        raise ValueError(f"--part {part} divides the images, and so does torchrun: use one of them")
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part {part} must be K/N with 1 <= K <= N, such as 3/8")
    if int(found[2]) > MAX_PARTS:
        raise ValueError(f"--part {part} has more than {MAX_PARTS:,} parts: use fewer")
    return ProcessShare(int(found[1]) - 1, int(found[2]))


def is_restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has started this process again after a failure."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def share_choices(share: ProcessShare) -> Iterator[None]:
    """Let the first process of torchrun choose precisions by measurement; the others wait for it and take its choices.

    Without torchrun, processes may start at any time, and each chooses for itself.
    """
    if share.world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=WAIT))
    if share.rank:
        for key, choice in json.loads(store.get(CHOICES_KEY)).items():
            precision.CHOICES[key] = dataclass_from_json(choice, PrecisionChoice, "precision")
        yield
        return
    try:
        yield
    finally:  # after an error too: the other processes wait for the choices
        store.set(CHOICES_KEY, json.dumps({key: to_json(choice) for key, choice in precision.CHOICES.items()}))
