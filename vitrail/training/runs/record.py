"""`run.json`: the description of a run, written before its first step and checked when it is resumed."""

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

import vitrail
from vitrail.data.dataset import Images
from vitrail.data.remote.urls import redact_all
from vitrail.data.sources.detect import resolve_source
from vitrail.reports.masks import format_colour
from vitrail.reports.run import RunRecord, SummaryRecord, find_differences, format_value
from vitrail.tasks import task_of
from vitrail.training.distributed import Team
from vitrail.training.recipe import Machine, Recipe, method_of
from vitrail.training.runs.prepare import Prepared
from vitrail.utils.devices import device_name, processor_name
from vitrail.utils.files import atomic_write, remove_stale_partials, try_lock
from vitrail.utils.json import dataclass_from_json, read_json_file, to_json

SEEN_SECONDS = 20.0  # until a file of one host is seen by all


def describe_environment(team: Team, precision: str) -> dict[str, object]:
    """Return versions, processor and device."""
    device = device_name(team.device) if team.device.type == "cuda" else str(team.device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "processes": team.world_size,
        "parallel": team.parallel if team.world_size > 1 else None,
        **({"shard_size": team.shard_size} if team.shard_size is not None else {}),
        "precision": precision,
    }


@contextmanager
def lock_run(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, and remove what a killed process left in it.

    The system releases the lock when the process ends.
    """
    with open(directory / ".lock", "w") as file:
        try:
            try_lock(file)
        except BlockingIOError:
            raise ValueError(f"another process is training {directory}: wait for it, or stop it") from None
        except OSError:  # no locks here
            yield
            return
        remove_stale_partials(directory)
        for left in (directory / "checkpoints").glob("*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def check_shared(directory: Path, team: Team, seconds: float = SEEN_SECONDS) -> None:
    """Raise ValueError unless all processes have the same run directory: of a copy, checkpoints would lack parts."""
    token, mark = team.broadcast_object(uuid4().hex), directory / ".shared"
    if team.world_size == 1:
        return
    if team.is_main:
        mark.write_text(token)
    team.barrier()
    end = time.monotonic() + seconds  # a network file system may show a new file later
    while not (seen := mark.is_file() and mark.read_text() == token) and time.monotonic() < end:
        time.sleep(0.1)
    missing = team.any_process(not seen)[0]
    if team.is_main:
        mark.unlink()
    if missing:
        raise ValueError(f"not all processes see {directory}: use out=RUN on a file system that all hosts share")


def build_run_record(
    recipe: Recipe, prepared: Prepared, machine: Machine, team: Team, model: Any, chosen: list[str]
) -> dict[str, Any]:
    """Return the content of run.json."""
    labels = prepared.labels.names
    method = method_of(recipe)
    return {
        "vitrail": vitrail.__version__,
        "command": ["vitrail", *redact_all(sys.argv[1:])],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe_name": recipe.name,
        "recipe": to_json(recipe),
        "task": "pretraining" if method else prepared.train.target_kind,
        **({"method": method, "method_text": asdict(recipe.objective.report)} if method else {}),
        "labels": list(labels) if prepared.labelled or not method else [],
        "data": {
            "where": recipe.data.where,
            "path": absolute_path(recipe.data.where),
            "kind": prepared.dataset.kind,
            "media": prepared.train.media,
            "fingerprint": prepared.dataset.fingerprint,
            "splits": {
                split: {"images": len(images), "classes": prepared.count_images(split)}
                | task_of(images).describe_split(images)
                for split, images in prepared.splits.items()
            },
            **({"colours": list(map(format_colour, prepared.train.colours))} if prepared.train.colours else {}),
            "skipped": [{"path": path, "detail": detail} for path, detail in prepared.skipped],
            "notes": [*prepared.dataset.notes, *prepared.warnings],
            "fingerprints": fingerprint_splits(prepared),
        },
        "model": {
            "name": model.config.describe(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "init": recipe.init,
            "image_size": list(recipe.model.image_size),
            "channels": recipe.model.channels,
            "preprocessing": recipe.preprocessing.describe(),
        },
        "environment": describe_environment(team, recipe.precision) | {"compile": machine.compile},
        "machine": to_json(machine),
        "id": uuid4().hex,
        "chosen": chosen,
    }


def absolute_path(where: str) -> str | None:
    """Return the absolute path of data; None for a name."""
    return resolve_source(where)


def fingerprint_splits(prepared: Prepared) -> dict[str, str]:
    """Return the fingerprint of each split, with the content of its masks."""
    digests = prepared.audit.mask_digests
    return {split: fingerprint_split(images, digests) for split, images in prepared.splits.items()}


def fingerprint_split(images: Images, mask_digests: Mapping[int, np.ndarray] | None = None) -> str:
    """Return a hash of the names and labels of a split in their order; of masks, their names and the values of the classes; of
    captions, their text.

    With the digests of an audit, the hash is that of the masks' content too.
    """
    masks = images.masks is not None
    digest = hashlib.sha256(images.targets.tobytes())
    if images.captions is not None:
        for number in np.unique(images.targets).tolist():
            digest.update(f"{number} {images.captions[number]}\0".encode())
    if masks and mask_digests:
        digest.update(mask_digests[id(images.masks)][images.targets].tobytes())
    if images.mask_classes is not None:
        digest.update(images.mask_classes.tobytes())
    for index in range(len(images)):
        names = (images.name(index), images.mask_name(index)) if masks else (images.name(index),)
        digest.update("".join(f"{name}\0" for name in names).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_same_data(directory: Path, prepared: Prepared) -> None:
    """Raise ValueError unless the data is that of the run's start."""
    before = read_run_record(directory)
    was, now = before["labels"], list(prepared.labels.names)
    if was != now and (was or prepared.labelled):
        gone, new = sorted(set(was) - set(now)), sorted(set(now) - set(was))
        raise ValueError(
            f"{directory} started with other classes: {', '.join(gone) or 'none'} are missing, "
            f"{', '.join(new) or 'none'} are new. Restore them, or start a new run"
        )
    content = before["data"].get("fingerprint")
    if content is not None and content != prepared.dataset.fingerprint:
        where = before["data"].get("where")
        raise ValueError(
            f"{directory} started with other {prepared.train.media}s in {where}: give the same object, or start a new run"
        )
    now_is = fingerprint_splits(prepared)
    for split in {**before["data"]["fingerprints"], **now_is}:
        if before["data"]["fingerprints"].get(split) != now_is.get(split):
            count = before["data"]["splits"].get(split, {}).get("images", 0)
            there = len(prepared.splits[split]) if split in prepared.splits else 0
            raise ValueError(
                f"{directory} started with {count:,} {split} {prepared.train.media}s, now there are {there:,}, or others: "
                "restore them, or start a new run"
            )


def check_recipe(directory: Path, recipe: Recipe, accept: bool) -> list[str]:
    """Return the changes of a recipe since the start of its run, "steps: 6 → 8"; raise ValueError unless they are accepted.

    A run that an earlier version started has no recipe in run.json.
    """
    stored = read_run_record(directory).get("recipe")
    if stored is None:
        return []
    before = dataclass_from_json(stored, Recipe, f"{directory / 'run.json'}: recipe")
    pairs = find_differences([to_json(before), to_json(recipe)])
    changes = [f"{field}: {' → '.join(map(format_value, values))}" for field, values in pairs]
    if changes and not accept:
        where, listed = directory / "recipe.json", "; ".join(changes)
        raise ValueError(f"{where} changed since the start ({listed}): restore it, or use accept_changes=True")
    return changes


def store_recipe(directory: Path, recipe: Recipe) -> None:
    """Write a recipe with accepted changes to run.json, so that the next resume compares with it."""
    record = read_run_record(directory)
    if "recipe" in record and record["recipe"] != to_json(recipe):
        write_json(directory / "run.json", record | {"recipe": to_json(recipe)})


def read_run_record(directory: Path) -> dict[str, Any]:
    """Return run.json; raise ValueError for values of another type."""
    return read_json_file(directory / "run.json", RunRecord)


def read_summary(directory: Path) -> dict[str, Any]:
    """Return summary.json, with numbers for the names of those that are not finite."""
    data = read_json_file(directory / "summary.json", SummaryRecord)
    return {name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in data.items()}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())
