"""Checkpoints of a run: everything that a bit-exact resume needs.

A checkpoint is a directory `step-00001200`: tensors in the format of `torch.distributed.checkpoint` (each process writes its
own part, any number of processes reads them), `progress.json` and `checksums.json`. It is written under a temporary name and
renamed when all of it is on the disk, so it is complete or absent.
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.optim import Optimizer

from vitrail.training.distributed import Team
from vitrail.training.schedule import WeightAverage
from vitrail.utils.files import MIN_FREE_BYTES, DiskFullError, disk_full_error, is_disk_full
from vitrail.utils.json import read_json_file, untyped_from_json

PARTIAL_SUFFIX = ".partial"
INTACT = "earlier checkpoints are intact"


@dataclass
class Progress:
    """The state of a run besides its tensors."""

    step: int = 0  # finished steps
    best: float | None = None  # the best validation score so far
    best_step: int = 0
    since_best: int = 0  # validations since then
    last: float | None = None  # the score of the last validation
    nonfinite: int = 0  # skipped steps
    loss: float = 0.0  # summed since the last line of the log
    losses: int = 0  # number of summed losses
    logged: int = 0  # bytes of metrics.jsonl up to this step
    seconds: float = 0.0  # of training
    images: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    scale: dict[str, float] | None = None  # of the loss, in float16


class CheckpointReader(FileSystemReader):
    """PyTorch's reader with a restricted unpickler for its metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise ValueError("its metadata has another type")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler of names, shapes and offsets of tensors that refuses every other class."""

    allowed: ClassVar[dict[str, str]] = {
        "torch": "Size",
        "torch.serialization": "_get_layout",
        "pathlib": "PosixPath WindowsPath",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.metadata": "ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    }

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in self.allowed.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"unexpected class {module}.{name}")


def collect_tensors(
    loss_module: nn.Module, optimizers: list[Optimizer], average: WeightAverage | None
) -> dict[str, Tensor]:
    """Return every tensor of a run by name: weights and buffers, their EMA, and the state of the optimisers."""
    names: dict[Any, str] = {parameter: name for name, parameter in loss_module.named_parameters()}
    tensors = {f"weights.{name}": tensor for name, tensor in loss_module.state_dict().items()}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.tensors.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            present = {key: value for key, value in state.items() if value is not None}
            tensors |= {f"optimizer.{names[parameter]}:{key}": value for key, value in present.items()}
    return tensors


class Checkpoints:
    """The last few checkpoints of a run."""

    def __init__(self, directory: Path, team: Team, keep: int = 2) -> None:
        self.directory, self.team, self.keep = directory, team, keep

    def save(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """Write a checkpoint and remove old ones. A full disk leaves earlier checkpoints intact."""
        final = self.directory / f"step-{progress.step:08d}"
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        nbytes, full = sum(tensor.nbytes for tensor in tensors.values()), None
        if self.team.is_main:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.glob(f"*{PARTIAL_SUFFIX}"):  # left by a killed process
                shutil.rmtree(stale, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free
            full = disk_full_error(final, nbytes, free) if free < nbytes else None
        full = self.team.broadcast_object(full)  # the other processes wait here
        if full is not None:
            raise DiskFullError(f"{full}; {INTACT}")
        try:
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            with warnings.catch_warnings(action="ignore"):  # about running without a process group
                write_shards(detached, storage_writer=FileSystemWriter(partial), no_dist=self.team.world_size == 1)
            if self.team.is_main:
                (partial / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
                sums = {file.name: hash_file(file) for file in sorted(partial.iterdir())}
                (partial / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
                for file in partial.iterdir():
                    fsync(file)
                fsync(partial)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                fsync(self.directory)
                for old in self.steps()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            free, cause = shutil.disk_usage(self.directory).free, find_cause(error)
            if self.team.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            if is_disk_full(cause) or free < MIN_FREE_BYTES:
                raise DiskFullError(f"{disk_full_error(final, nbytes, free)}; {INTACT}") from error
            reason = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).strip().splitlines()[-1]
            where = f"cannot write the checkpoint of step {progress.step} to {self.directory}"
            raise OSError(f"{where}: {reason}; {INTACT}") from error
        self.team.barrier()
        return final

    def steps(self) -> list[Path]:
        """Return the existing checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.glob("step-*") if path.suffix != PARTIAL_SUFFIX)

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """Return the newest intact checkpoint, and a message for each newer damaged one."""
        complaints: list[str] = []
        for path in reversed(self.steps()):
            problem = find_damage(path)
            if problem is None:
                return path, complaints
            complaints.append(f"{path} is damaged ({problem}): using the one before")
        return None, complaints

    def remove_after(self, step: int) -> None:
        """Remove checkpoints after a step: they are damaged."""
        for path in self.steps():
            if path.name > f"step-{step:08d}":
                shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(
    path: Path, loss_module: nn.Module, optimizers: list[Optimizer], average: WeightAverage | None, team: Team
) -> Progress:
    """Load an intact checkpoint into a loss module, its optimisers and its EMA; return the progress."""
    reader = CheckpointReader(path)
    stored = reader.read_metadata().state_dict_metadata
    named = dict(loss_module.named_parameters())
    home = {parameter: owner for owner in optimizers for group in owner.param_groups for parameter in group["params"]}
    for name, entry in stored.items():
        if name.startswith("optimizer."):
            owner, _, key = name.removeprefix("optimizer.").rpartition(":")
            parameter = named.get(owner)
            if parameter is None or parameter not in home or not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{path} trains {owner}, which this run does not train: was the recipe changed?")
            like, dtype = entry.size == parameter.shape, entry.properties.dtype
            small = torch.empty(entry.size, dtype=dtype, device=parameter.device)  # the number of steps
            home[parameter].state[parameter][key] = torch.empty_like(parameter, dtype=dtype) if like else small
    wanted = collect_tensors(loss_module, optimizers, average)
    if set(wanted) != set(stored):
        differ = sorted(set(wanted) ^ set(stored))
        some = ", ".join(differ[:3])
        raise ValueError(f"{path} belongs to another model or recipe: {len(differ)} tensors differ, e.g. {some}")
    detached = {name: tensor.detach() for name, tensor in wanted.items()}
    with warnings.catch_warnings(action="ignore"):
        read_shards(detached, storage_reader=CheckpointReader(path), no_dist=team.world_size == 1)
    return read_progress(path)


def find_damage(path: Path) -> str | None:
    """Return the damage of a checkpoint; None if every byte matches its checksum."""
    try:
        sums = read_json_file(path / "checksums.json", dict[str, str])
        there = {file.name for file in path.iterdir()} - {"checksums.json"}
        if set(sums) != there or not {".metadata", "progress.json"} <= there:
            return "its files do not match its list of checksums"
        for name, expected in sums.items():
            if hash_file(path / name) != expected:
                return f"{name} does not match its checksum"
        CheckpointReader(path).read_metadata()
        read_progress(path)
    except (OSError, ValueError, TypeError, pickle.UnpicklingError) as error:
        return str(error)
    return None


def read_progress(path: Path) -> Progress:
    """Read progress.json of a checkpoint."""
    data = read_json_file(path / "progress.json", dict[str, Any])
    progress = untyped_from_json(data, Progress, "progress.json")
    if path.name.removesuffix(PARTIAL_SUFFIX) != f"step-{progress.step:08d}":
        raise ValueError(f"progress.json is of step {progress.step}")
    return progress


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_cause(error: BaseException) -> BaseException:
    """Return the innermost error: PyTorch wraps those of its workers."""
    failures = getattr(error, "failures", None)
    return find_cause(next(iter(failures.values()))[0]) if failures else error
