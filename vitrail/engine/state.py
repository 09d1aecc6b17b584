"""Checkpoints of a run: everything that a run needs to go on as if nothing had happened.

A checkpoint is a directory `step-00001200`: tensors in the form of `torch.distributed.checkpoint` (each process writes its
own part, any number of processes reads them), `progress.json` and `checksums.json`. It is written beside its place and renamed
when all of it is on the disk, so it is there whole or not at all.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.optim import Optimizer

from vitrail.engine.distributed import Team
from vitrail.engine.ema import Average

PARTIAL = ".partial"
STEP = re.compile(r"step-\d{8}")


@dataclass
class Progress:
    """Where a run stands, besides its tensors."""

    step: int = 0  # steps that are done
    best: float | None = None  # the validation score that is the best so far
    best_step: int = 0
    since_best: int = 0  # validations without a better one
    nonfinite: int = 0  # steps that were skipped
    loss: float = 0.0  # the sum since the last line of the log
    losses: int = 0  # how many it is the sum of
    logged: int = 0  # bytes of the log that belong to these steps
    seconds: float = 0.0  # of training
    images: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    scale: dict[str, float] | None = None  # of the loss, in float16


class Reader(FileSystemReader):
    """PyTorch's reader, whose table of contents is a pickle: here it may hold what such tables hold and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = Contents(file).load()
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise ValueError("its table of contents is something else")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Contents(pickle.Unpickler):
    """Reads the names, shapes and places of tensors; refuses every other kind of object."""

    needed = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
        | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
        | {
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
                *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
            )
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in self.needed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def tensors_of(task: nn.Module, optimizers: list[Optimizer], average: Average | None) -> dict[str, Tensor]:
    """Every tensor of a run by name: weights and buffers, their average, and what the optimisers remember of each."""
    names: dict[Any, str] = {parameter: name for name, parameter in task.named_parameters()}
    found = {f"weights.{name}": tensor for name, tensor in task.state_dict().items()}
    if average is not None:
        found |= {f"average.{name}": tensor for name, tensor in average.tensors.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"optimizer.{names[parameter]}:{key}": value for key, value in state.items() if value is not None}
    return found


class Checkpoints:
    """The last few checkpoints of a run."""

    def __init__(self, directory: Path, team: Team, keep: int = 2) -> None:
        self.directory, self.team, self.keep = directory, team, keep

    def save(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """Writes one, and removes those that are no longer kept. A disk that is full leaves the ones before as they are."""
        final = self.directory / f"step-{progress.step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        if self.team.leads:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.glob(f"*{PARTIAL}"):  # a killed process may have left one
                shutil.rmtree(stale, ignore_errors=True)
        self.team.wait()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it runs without a process group is meant
                write_shards(
                    {name: tensor.detach() for name, tensor in tensors.items()},
                    storage_writer=FileSystemWriter(partial),
                    no_dist=self.team.world == 1,
                )
            if self.team.leads:
                (partial / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
                sums = {file.name: digest(file) for file in sorted(partial.iterdir())}
                (partial / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
                for file in partial.iterdir():
                    sync(file)
                sync(partial)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                sync(self.directory)
                for old in self.steps()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except (Exception, CheckpointException) as error:  # PyTorch's own is not an Exception
            if self.team.leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {progress.step} was not written to {self.directory}: {root(error)}; "
                "what was there before is intact"
            ) from error
        self.team.wait()
        return final

    def steps(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(
            p for p in self.directory.iterdir() if p.name.startswith("step-") and not p.name.endswith(PARTIAL)
        )

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a line for each newer one that is not."""
        complaints: list[str] = []
        for path in reversed(self.steps()):
            problem = damage(path)
            if problem is None:
                return path, complaints
            complaints.append(f"{path} is damaged ({problem}): falling back to the one before")
        return None, complaints

    def forget_after(self, step: int) -> None:
        """Removes what is newer than the checkpoint that a run goes on from: it was found damaged."""
        for path in self.steps():
            if path.name > f"step-{step:08d}":
                shutil.rmtree(path, ignore_errors=True)


def load(path: Path, task: nn.Module, optimizers: list[Optimizer], average: Average | None, team: Team) -> Progress:
    """Fills a task, its optimisers and its average from a checkpoint that is whole."""
    reader = Reader(path)
    stored = reader.read_metadata().state_dict_metadata
    named = dict(task.named_parameters())
    home = {
        parameter: optimizer for optimizer in optimizers for g in optimizer.param_groups for parameter in g["params"]
    }
    for name, entry in stored.items():
        if name.startswith("optimizer."):
            owner, _, key = name.removeprefix("optimizer.").rpartition(":")
            parameter = named.get(owner)
            if parameter is None or parameter not in home or not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{path} remembers {owner}, which this run does not train: was its recipe changed?")
            like = entry.size == parameter.shape
            dtype = entry.properties.dtype
            # PyTorch's fused optimisers count their steps on the device, others on the CPU.
            place = parameter.device if home[parameter].defaults.get("fused") else torch.device("cpu")
            small = torch.empty(entry.size, dtype=dtype, device=place)
            home[parameter].state[parameter][key] = torch.empty_like(parameter, dtype=dtype) if like else small
    wanted = tensors_of(task, optimizers, average)
    if set(wanted) != set(stored):
        differ = sorted(set(wanted) ^ set(stored))
        raise ValueError(
            f"{path} is of another model or recipe: {len(differ)} tensors differ, {', '.join(differ[:3])} among them"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_shards({n: t.detach() for n, t in wanted.items()}, storage_reader=Reader(path), no_dist=team.world == 1)
    return progress_in(path)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if every byte is as it was written."""
    try:
        sums = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
        there = {file.name for file in path.iterdir()} - {"checksums.json"}
        if not isinstance(sums, dict) or set(sums) != there or not {".metadata", "progress.json"} <= there:
            return "its files are not those of its checksums"
        for name, expected in sums.items():
            if digest(path / name) != expected:
                return f"{name} is not what was written"
        Reader(path).read_metadata()
        progress_in(path)
    except (OSError, ValueError, TypeError, pickle.UnpicklingError) as error:
        return str(error)
    return None


def progress_in(path: Path) -> Progress:
    """The small table of a checkpoint."""
    return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def root(error: BaseException) -> str:
    """What an error comes down to, on one line: PyTorch wraps those of its workers."""
    failures = getattr(error, "failures", None)
    if failures:
        return root(next(iter(failures.values()))[0])
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[-1]
