"""One cell: its run from the first step or from where it stood, and its numbers."""

import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitrail.engine.journal import Listener
from vitrail.pretraining import pretrain
from vitrail.recipe import Machine, Recipe, method_of
from vitrail.studies.claims import Claim, Lost
from vitrail.studies.study import Cell, Study
from vitrail.training import resume, train

Progress = Callable[[str, int, int], None]
LARGE = ("checkpoints", "best.safetensors", "pretraining.safetensors")  # what nobody needs once a cell is finished


def run_at(home: Path, claim: Claim) -> Path:
    """Where the owner of a claim works: run, where it is finished, or else what an earlier owner left, by a name of our own.

    An owner who lost and does not know it yet has no directory of that name any more, and can write nothing.
    """
    if (home / "run").is_dir():
        return home / "run"
    mine = home / f"run-{claim.number}"
    left = sorted(home.glob("run-*"), key=lambda path: int(path.name.removeprefix("run-")))
    if left:
        os.replace(left[-1], mine)
        (mine / ".lock").unlink(missing_ok=True)  # whoever held it has lost
    return mine


def compute(
    recipe: Recipe, directory: Path, machine: Machine, listeners: tuple[Listener, ...], progress: Progress | None
) -> dict[str, Any]:
    """The run to its end, from where it stands; gives its summary."""
    if (directory / "recipe.json").is_file():
        changes = {f.name: getattr(machine, f.name) for f in fields(machine)}
        return resume(directory, changes=changes, listeners=listeners, progress=progress)[1]
    begin = pretrain if method_of(recipe) else train
    return begin(recipe=recipe, out=directory, machine=machine, listeners=listeners, progress=progress)[1]


def numbers(study: Study, cell: Cell, directory: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What a finished run is worth: "validation" and "test", on so many test "pictures", and what the study adds.

    Without labels "validation" is how often neighbours' vote is right, where there are labels to ask for.
    """
    found: dict[str, Any] = {"steps": summary["steps"], "stopped": summary["stopped"]}
    if method_of(cell.recipe):
        found |= {"validation": summary["knn"]} if "knn" in summary else {}
    else:
        found |= {split: summary[split]["top1"] for split in ("validation", "test") if split in summary}
        found |= {"pictures": summary["test"]["images"]} if "test" in summary else {}
    return found | (study.measure(cell, directory) if study.measure is not None else {})


def settle(home: Path, directory: Path, claim: Claim) -> None:
    """A finished run without what is large takes its name; only the owner can do that."""
    for name in LARGE:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    claim.check_now()
    if directory != home / "run" and directory.is_dir():
        try:
            os.rename(directory, home / "run")
        except OSError:
            if (home / "run").is_dir():  # another owner was quicker
                raise Lost from None
            raise
    for left in (*home.glob("run-*"), *home.glob(".run-*.partial")):
        shutil.rmtree(left, ignore_errors=True)  # of owners that were killed at a bad moment
