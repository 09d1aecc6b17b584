"""`vitrail.train`: data in, a finished run directory out. What the command line calls, and what Python users call."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.loading import describe
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.distributed import Team, joined
from vitrail.engine.journal import Listener
from vitrail.engine.trackers import needed
from vitrail.recipe import Data, Facts, Machine, Recipe, read_recipe, with_settings
from vitrail.recipes import check_name, made
from vitrail.report import write_report
from vitrail.run.prepare import Prepared, prepare
from vitrail.run.record import read_json
from vitrail.run.running import Run

Progress = Callable[[str, int, int], None]


def train(
    data: str | Data | None = None,
    *,
    init: str | None = None,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    wishes: Mapping[str, Any] | None = None,
    machine: Machine = Machine(),  # noqa: B008 (a value)
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Trains, and gives the run directory and its summary.

    `data` is a folder, a file or a name; `init` a checkpoint to begin with; `recipe` a name, a recipe.json or a Recipe (by
    default `finetune` with a checkpoint and `scratch-small` without). `wishes` are what the recipe adapts to (`epochs`,
    `steps`, `batch_size`, `lr`, `model`, `size`), `settings` change the finished recipe in places (`optimizer.lr=3e-4`).
    """
    if isinstance(recipe, str):
        recipe = Path(recipe) if recipe.endswith(".json") else recipe
        if isinstance(recipe, str):
            check_name(recipe)
    given = read_recipe(recipe) if isinstance(recipe, Path) else recipe if isinstance(recipe, Recipe) else None
    if data is None and given is None:
        raise ValueError("what to train on? Give a folder, a file or a name: vitrail train digits")
    source = Data(data) if isinstance(data, str) else data if data is not None else given.data  # type: ignore[union-attr]
    for tracker in trackers:
        needed(tracker)  # before anything else is done
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes must agree on a directory: give --out RUN")
    with joined(machine.device, machine.parallel) as team:
        directory = Path(out) if out is not None else unused(source.where, given.name if given else recipe, init)
        if restarted(directory):
            return resumed(directory, machine, team, listeners, trackers, progress)
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(
                f"{directory} is there and not empty: give --out another name, or use --resume {directory}"
            )
        prepared = together(team, source, progress)
        facts = prepared.facts()
        if given is not None:
            chosen = replace(given, data=source, init=init or given.init)
            if chosen.model.classes != len(prepared.labels):
                raise ValueError(
                    f"the recipe is for {chosen.model.classes} classes and {source.where} has {len(prepared.labels)}: "
                    f"--set model.classes={len(prepared.labels)}, or use a named recipe"
                )
        else:
            asked = dict(wishes or {})
            chosen = named(str(recipe) if recipe else None, facts, source, init, asked)
            if team.device.type == "cuda" and asked.get("precision") is None:
                best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
                chosen = replace(chosen, precision=facts.choose("precision", best, "what this GPU is fast at"))
        chosen = with_settings(chosen, list(settings))
        run = Run(chosen, prepared, directory, machine, team, facts.chosen, listeners, trackers, progress)
        for line in announcement(chosen, prepared, facts, directory):
            run.tell(line)
        return finished(run, run.start())


def resume(
    directory: str | Path,
    *,
    machine: Machine = Machine(),  # noqa: B008 (a value)
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Goes on with a run that was stopped or killed, to the same weights that it would have had."""
    with joined(machine.device, machine.parallel) as team:
        return resumed(Path(directory), machine, team, listeners, trackers, progress)


def resumed(
    directory: Path,
    machine: Machine,
    team: Team,
    listeners: tuple[Listener, ...],
    trackers: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Path, dict[str, Any]]:
    if not (directory / "recipe.json").is_file():
        raise ValueError(f"{directory} holds no run: there is no recipe.json in it")
    if (directory / "summary.json").is_file():
        if team.leads:
            for listener in listeners:
                listener({"kind": "note", "text": f"{directory} is finished already"})
        return directory, read_json(directory / "summary.json")
    recipe = read_recipe(directory / "recipe.json")
    prepared = together(team, recipe.data, progress)
    run = Run(recipe, prepared, directory, machine, team, [], listeners, trackers, progress)
    return finished(run, run.resume())


def finished(run: Run, summary: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The report, once everything that it shows is written."""
    if run.team.leads:
        write_report(run.directory)
    return run.directory, summary


def named(name: str | None, facts: Facts, data: Data, init: str | None, wishes: dict[str, Any]) -> Recipe:
    """A named recipe for this data and this checkpoint."""
    if init is not None:
        with describe(init) as checkpoint:
            facts.init = checkpoint.contract.config
            pipeline = checkpoint.contract.preprocessing
            facts.init_preprocessing = pipeline if isinstance(pipeline, Preprocessing) else None
    facts.wishes = wishes
    name = name or ("scratch-small" if init is None else "finetune")
    recipe = made(name, facts, data)
    return replace(
        recipe, init=init, **{k: wishes[k] for k in ("seed", "tune", "precision") if wishes.get(k) is not None}
    )


def together(team: Team, data: Data, progress: Progress | None) -> Prepared:
    """Prepared data on every process: the first one's audit fills the cache that the others read."""
    if not team.leads:
        team.wait()
    prepared = prepare(data, progress if team.leads else None)
    if team.leads:
        team.wait()
    return prepared


def restarted(directory: Path) -> bool:
    """Whether torchrun started this again after a process died, and there is something to go on with."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (directory / "recipe.json").is_file()


def unused(where: str, recipe: Any, init: str | None) -> Path:
    """A name for the run that is not taken: runs/photos-finetune-1."""
    data = re.sub(r"[^\w.-]+", "-", Path(where).resolve().name if Path(where).exists() else where).strip("-.") or "data"
    kind = recipe if isinstance(recipe, str) else "scratch-small" if init is None else "finetune"
    number = 1
    while (place := Path("runs") / f"{data}-{kind}-{number}").exists():
        number += 1
    return place


def announcement(recipe: Recipe, prepared: Prepared, facts: Facts, directory: Path) -> list[str]:
    """What is about to happen, and why it was chosen."""
    parts = ", ".join(f"{len(p):,} {split}" for split, p in prepared.splits.items())
    lines = [f"{recipe.data.where}: {len(prepared.labels)} classes; {parts}"]
    lines += [f"  {note}" for note in (*prepared.dataset.notes, *prepared.warnings)]
    lines += [f"  {line}" for line in prepared.audit.summary() if not line.startswith("note")]
    if prepared.skipped:
        lines.append(f"  {len(prepared.skipped)} bad files are left out; they are named in {directory / 'run.json'}")
    lines.append(f"recipe {recipe.name}" + (f", beginning with {recipe.init}" if recipe.init else ""))
    return lines + [f"  {reason}" for reason in facts.chosen] + [f"run directory {directory}"]
