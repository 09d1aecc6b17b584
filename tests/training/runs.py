"""Small runs through the command line, and everything that they leave behind as tensors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as read_shards

from tests import forked
from vitrail.training.checkpointing import CheckpointReader

SMALL = ("--batch-size", "32", "--set", "model.size.depth=2", "--set", "ema=EMA", "--set", "model.stochastic_depth=0.1")


def environment(tmp: Path) -> dict[str, str]:
    """One thread for each process, and a cache of their own."""
    return os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp / "cache"), "VITRAIL_TRACEBACK": ""}


def command(*arguments: str, verb: str = "train") -> list[str]:
    return [sys.executable, "-m", "vitrail", verb, *arguments]


def train(tmp: Path, *arguments: str, verb: str = "train", **extra: str) -> subprocess.CompletedProcess[str]:
    """`vitrail train` to its end."""
    return forked.run(verb, *arguments, cwd=tmp, env=environment(tmp) | extra)


def trained(tmp: Path, *arguments: str, verb: str = "train", **extra: str) -> subprocess.CompletedProcess[str]:
    """The same where it must succeed."""
    done = train(tmp, *arguments, verb=verb, **extra)
    assert done.returncode == 0, done.stderr
    return done


def interrupted(
    tmp: Path, run: Path, number: signal.Signals, at_step: int, *arguments: str, verb: str = "train"
) -> int:
    """A run that gets a signal once it has a checkpoint of this step; gives its exit code."""
    process = subprocess.Popen(
        command(*arguments, verb=verb), cwd=tmp, env=environment(tmp), stderr=subprocess.PIPE, text=True
    )
    begin = time.monotonic()
    while newest(run) < at_step:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() - begin < 120
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def newest(run: Path) -> int:
    found = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return max(found, default=0)


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint: weights, average, optimiser."""
    stored: dict[str, Any] = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    read_shards(found, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    return found


def last(run: Path) -> dict[str, Tensor]:
    return tensors(run / "checkpoints" / f"step-{newest(run):08d}")


def assert_same(run: Path, other: Path) -> None:
    """Weights, average, optimiser and log are equal, bit for bit."""
    ours, theirs = last(run), last(other)
    assert set(ours) == set(theirs)
    assert any(name.startswith("average.") for name in ours)
    assert any(name.startswith("optimizer.") for name in ours)
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differ
    assert (run / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())
