"""`run.json`: what a run is, written before its first step. And what has to be the same when it goes on."""

import hashlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import vitrail
from vitrail.checkpoints.files.atomic import atomic
from vitrail.data.pictures import Pictures
from vitrail.engine.distributed import Team
from vitrail.models.vit import ViT
from vitrail.models.written import to_json
from vitrail.recipe import Machine, Recipe, method_of
from vitrail.run.environment import environment
from vitrail.run.prepare import Prepared


def record(
    recipe: Recipe, prepared: Prepared, machine: Machine, team: Team, model: Any, chosen: list[str]
) -> dict[str, Any]:
    """Everything worth knowing of a run before it begins."""
    labels = prepared.labels.names
    method = method_of(recipe)
    return {
        "vitrail": vitrail.__version__,
        "command": ["vitrail", *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe_name": recipe.name,
        "task": "pretraining" if method else "multi" if prepared.train.several else "single",
        **({"method": method} if method else {}),
        "labels": list(labels) if prepared.labelled or not method else [],
        "data": {
            "where": recipe.data.where,
            "path": place(recipe.data.where),
            "kind": prepared.dataset.kind,
            "splits": {
                split: {"images": len(p), "classes": dict(zip(labels, p.counts().tolist(), strict=True))}
                for split, p in prepared.splits.items()
            },
            "skipped": [{"path": path, "detail": detail} for path, detail in prepared.skipped],
            "notes": [*prepared.dataset.notes, *prepared.warnings],
            "fingerprints": fingerprints(prepared.splits),
        },
        "model": {
            "name": named(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "init": recipe.init,
            "image_size": list(recipe.model.image_size),
            "channels": recipe.model.channels,
            "preprocessing": recipe.preprocessing.in_words(),
        },
        "environment": environment(team, recipe.precision) | {"compile": machine.compile},
        "machine": to_json(machine),
        "id": uuid4().hex,
        "chosen": chosen,
    }


def place(where: str) -> str | None:
    """Where data lies, whatever directory one stands in; nothing for a name."""
    path = os.path.expanduser(where)
    return os.path.realpath(path) if os.path.exists(path) else None


def named(model: Any) -> str:
    """A model in a word or two: its published name, or its measures."""
    if not isinstance(model, ViT):
        return f"ResNet of {sum(model.config.stages)} blocks"
    from vitrail.models.sizes import SIZES

    config, patch = model.config, model.config.embed.stride
    for name, size in SIZES.items():
        if (size.depth, size.width, size.mlp, size.heads) == (
            config.size.depth,
            config.size.width,
            config.size.mlp,
            config.size.heads,
        ):
            return f"{name}/{patch}"
    return f"ViT of width {config.size.width}, depth {config.size.depth}, patch {patch}"


def fingerprints(splits: dict[str, Pictures]) -> dict[str, str]:
    """What tells whether splits are those that a run began with."""
    return {split: fingerprint(pictures) for split, pictures in splits.items()}


def fingerprint(pictures: Pictures) -> str:
    """The names and labels of a split in their order, in short."""
    found = hashlib.sha256(pictures.targets.tobytes())
    for index in range(len(pictures)):
        found.update(pictures.name(index).encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


def same(directory: Path, prepared: Prepared) -> None:
    """Refuses to go on with other data than a run began with."""
    before = read_json(directory / "run.json")
    if not isinstance(before.get("labels"), list) or not isinstance(before.get("data", {}).get("fingerprints"), dict):
        raise ValueError(f"{directory / 'run.json'} is not what this version writes")
    was, now = before["labels"], list(prepared.labels.names)
    if was != now and (was or prepared.labelled):
        gone, new = sorted(set(was) - set(now)), sorted(set(now) - set(was))
        raise ValueError(
            f"{directory} was begun with other classes: {', '.join(gone) or 'none'} are gone, "
            f"{', '.join(new) or 'none'} are new. Bring them back, or begin a new run"
        )
    now_is = fingerprints(prepared.splits)
    for split in {**before["data"]["fingerprints"], **now_is}:
        if before["data"]["fingerprints"].get(split) != now_is.get(split):
            count = before["data"]["splits"].get(split, {"images": 0})["images"]
            there = len(prepared.splits[split]) if split in prepared.splits else 0
            raise ValueError(
                f"{directory} was begun with {count:,} {split} pictures and there are {there:,} now, or other ones: "
                "bring the same back, or begin a new run"
            )


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.parent} is no run that can be read: {path.name}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no table")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """All of it or nothing."""
    with atomic(path) as file:
        file.write((json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())
