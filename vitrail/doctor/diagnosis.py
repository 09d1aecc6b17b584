"""The diagnosis as a value: everything that `vitrail doctor --json` prints, with its types.

`SCHEMA` grows when a field changes its meaning or is removed; fields may be added without that.
"""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import vitrail
from vitrail.doctor.packages import describe_packages, describe_python
from vitrail.doctor.probe import run_probe
from vitrail.utils import environment as machine
from vitrail.utils.files import cache_directory
from vitrail.utils.privacy import Redactor, select_variables

SCHEMA = 1
SHARED_MEMORY = Path("/dev/shm")


class Problem(TypedDict):
    """Something that is wrong, and one line that says what to do. `name` is stable, for scripts."""

    name: str
    severity: Literal["error", "warning", "note"]
    text: str
    remedy: str


class Package(TypedDict):
    """A package: its version, the versions that are supported, and whether both agree."""

    name: str
    version: str | None
    supported: str
    status: Literal["ok", "missing", "unsupported"]


class PackageGroup(TypedDict):
    """The packages of an extra, what it enables, and the command that installs what is missing."""

    name: str
    enables: str
    packages: list[Package]
    install: str | None


class Software(TypedDict):
    """Versions. `torch` is what PyTorch says of itself: its keys depend on what it could tell."""

    vitrail: str
    python: dict[str, str]
    torch: dict[str, Any]
    packages: list[PackageGroup]


class Machine(TypedDict):
    """Operating system, processor, memory in bytes, and the GPUs that the system has, whatever PyTorch says."""

    system: dict[str, str | None]
    processor: dict[str, Any]
    load: float | None  # processes that ran in the last minute, before the self-test
    memory: dict[str, int | None]
    gpus: list[dict[str, Any]]
    cuda: str | None  # the newest version that the driver supports
    limits: dict[str, int | None]


class Folder(TypedDict):
    """A folder that vitrail or a library writes to. Bytes; `complete` is False if there are at least so many."""

    name: str
    path: str
    bytes: int
    files: int
    complete: bool
    writable: bool
    total: int | None  # of the file system
    free: int | None


class StepResult(TypedDict):
    """The result of a step of the self-test. `values` has its numbers, `detail` a sentence of them."""

    name: str
    title: str
    status: Literal["ok", "failed", "timeout", "skipped", "stopped"]
    seconds: float
    detail: str
    values: dict[str, Any]


class Diagnosis(TypedDict):
    """Everything that is known."""

    schema: int
    created: str  # UTC
    ok: bool
    problems: list[Problem]
    software: Software
    machine: Machine
    device: dict[str, str | None]  # of --device auto, with the precision of --precision auto and the reason
    storage: list[Folder]
    shared_memory: dict[str, int | None] | None
    environment: dict[str, str]
    processes: int  # that torchrun or srun started together
    tests: list[StepResult]
    seconds: NotRequired[float]


def collect_facts(environment: Mapping[str, str] = os.environ, probe: Mapping[str, Any] | None = None) -> Diagnosis:
    """Return everything but problems and tests. `probe` replaces the process that imports PyTorch."""
    start, load = time.monotonic(), machine.read_load()
    gpus, cuda = machine.list_gpus()
    torch = dict(run_probe() if probe is None else probe)
    group = machine.find_group(environment)
    choice = {name: torch.pop(name, None) for name in ("device", "precision", "precision_reason")}
    return Diagnosis(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ok=True,
        problems=[],
        software={
            "vitrail": vitrail.__version__,
            "python": describe_python(),
            "torch": torch,
            "packages": describe_packages(),  # type: ignore[typeddict-item]
        },
        machine={
            "system": machine.describe_system(),
            "processor": machine.describe_processor(),
            "load": load,
            "memory": machine.describe_memory(),
            "gpus": gpus,
            "cuda": cuda,
            "limits": machine.describe_limits(),
        },
        device={"name": choice["device"], "precision": choice["precision"], "reason": choice["precision_reason"]},
        storage=list_folders(environment),
        shared_memory=machine.measure_disk(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        environment=select_variables(environment),
        processes=int(group["WORLD_SIZE"]) if group else 1,
        tests=[],
        seconds=round(time.monotonic() - start, 1),
    )


def list_folders(environment: Mapping[str, str] = os.environ) -> list[Folder]:
    """Return the folders of caches, data and temporary files, with their sizes and the free space."""
    import tempfile

    cache = cache_directory()
    hub = environment.get("HF_HOME") or (
        Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    folders = {"vitrail's cache": cache}
    if data := environment.get("VITRAIL_DATA"):
        folders["downloaded datasets (VITRAIL_DATA)"] = Path(data).expanduser()
    if models := environment.get("VITRAIL_MODELS"):
        folders["weights (VITRAIL_MODELS)"] = Path(models).expanduser()
    folders["Hugging Face Hub"] = Path(environment.get("HF_HUB_CACHE") or Path(hub) / "hub")
    folders["working directory"] = Path.cwd()
    folders["temporary files"] = Path(tempfile.gettempdir())
    return [describe_folder(name, path) for name, path in folders.items()]


def describe_folder(name: str, path: Path) -> Folder:
    """Return the size of a folder and the space on its disk. What others write to is not counted."""
    counted = name not in ("working directory", "temporary files") and path.is_dir()
    size = machine.measure_folder(path) if counted else {"bytes": 0, "files": 0, "complete": not path.is_dir()}
    disk = machine.measure_disk(path)
    facts = {"name": name, "path": str(path), "writable": machine.is_writable(path)} | size | disk
    return Folder(**facts)  # type: ignore[typeddict-item]


def redact(diagnosis: Diagnosis, redactor: Redactor | None = None) -> Diagnosis:
    """Return the diagnosis without what is private."""
    return (redactor or Redactor()).clean(diagnosis)
