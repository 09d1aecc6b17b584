"""int8 exports that `--runtime auto` may use: recorded when they are verified, chosen within the user's tolerance if faster."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vitrail.deploy.runtimes.base import DeployedModel, ModelContract
from vitrail.deploy.runtimes.exported import open_exported_file
from vitrail.deploy.runtimes.precision import CheckedRuntime, is_short, time_runtimes
from vitrail.deploy.runtimes.select import compute_checksum, export_cache, export_parts
from vitrail.utils.files import atomic_write, make_directories
from vitrail.utils.json import dataclass_from_json, to_json
from vitrail.utils.precision import MIN_GAIN, PrecisionChoice


@dataclass(frozen=True)
class Int8Export:
    """A verified int8 file of a model."""

    file: str
    checksums: tuple[str, ...]  # SHA-256 of its parts
    points: float  # of accuracy that it loses, or per cent of changed predictions where labels were unknown
    measure: str  # accuracy, mAP or predictions
    images: int  # that it was verified on
    merge: int
    size: tuple[int, int]

    def is_intact(self) -> bool:
        """Return whether the file is the one that was verified."""
        try:
            return self.checksums == hash_parts(Path(self.file))
        except OSError:
            return False

    def describe_loss(self) -> str:
        """Return the loss as a phrase."""
        change = "changed" if self.measure == "predictions" else "lost"
        return f"{self.points:.2f} points of {self.measure} {change} on {self.images:,} images"


def hash_parts(path: Path) -> tuple[str, ...]:
    return tuple(compute_checksum(part) for part in export_parts(path))


def record_path(contract: ModelContract) -> Path:
    """Return the file that lists the verified int8 exports of a model."""
    return export_cache() / f"int8-{contract.checksum[:32]}.json"


def record_export(path: Path, contract: ModelContract, points: float, measure: str, images: int) -> None:
    """Record a verified int8 file; one at the same path is replaced. Without a writable cache, `auto` will not know it."""
    path = path.resolve()
    export = Int8Export(
        str(path), hash_parts(path), points, measure, images, contract.merge, contract.preprocessing.size
    )
    others = [other for other in read_exports(contract) if other.file != export.file]
    with suppress(OSError):
        make_directories(record_path(contract).parent)
        with atomic_write(record_path(contract)) as file:
            file.write(json.dumps([to_json(item) for item in (*others, export)]).encode())


def read_exports(contract: ModelContract) -> list[Int8Export]:
    """Return the recorded int8 exports of a model; none if the record is missing or invalid."""
    try:
        stored = json.loads(record_path(contract).read_text(encoding="utf-8"))
        return [dataclass_from_json(item, Int8Export, "int8 export") for item in stored]
    except (OSError, ValueError, TypeError):
        return []


def find_export(contract: ModelContract, tolerance: float) -> Int8Export | None:
    """Return the intact int8 export of a model that loses least, at most so many points."""
    fits = [
        export
        for export in read_exports(contract)
        if export.points <= tolerance and (export.merge, export.size) == (contract.merge, contract.preprocessing.size)
    ]
    return next((export for export in sorted(fits, key=lambda export: export.points) if export.is_intact()), None)


def with_int8(deployed: DeployedModel, tolerance: float, threads: int | None, n_images: int | None) -> DeployedModel:
    """Return a model with the runtime of its int8 export if the tolerance allows it and it is measured to be faster."""
    contract = deployed.contract
    if not contract.checksum or is_short(contract, n_images):
        return deployed
    export = find_export(contract, tolerance)
    if export is None:
        note = f"no int8 export within --tolerance {tolerance:g}: write one with vitrail export --int8 --verify DATA"
        return replace(deployed, notes=(*deployed.notes, note))
    path, before = Path(export.file), deployed.runtime
    now = before.lower if isinstance(before, CheckedRuntime) else before
    lower = open_exported_file(path, deployed.output_kind, threads, deployed.batch_timeout)[0]
    seconds = time_runtimes({"fp32": now, "int8": lower}, contract)  # the first is what runs without it
    gain = f"{seconds['fp32'] / seconds['int8']:.1f} times as fast as {deployed.contract.precision} on {now.name}"
    if seconds["int8"] * MIN_GAIN > seconds["fp32"]:
        return replace(deployed, notes=(*deployed.notes, f"{path.name} is not used: int8 measured {gain}"))
    why = f"measured {gain}; {export.describe_loss()}, tolerance {tolerance:g}"
    contract = replace(contract, precision="int8")
    return replace(deployed, contract=contract, runtime=lower, file=export.file, choice=PrecisionChoice("int8", why))
