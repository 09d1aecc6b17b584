"""`vitrail.train`: data in, a finished run directory out. What the command line calls, and what Python users call."""

import math
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
from vitrail.models.sizes import closest
from vitrail.models.written import dataclass_from_json
from vitrail.recipe import Data, Facts, Machine, Recipe, read_recipe, with_settings
from vitrail.recipes import check_name, made
from vitrail.report import write_report
from vitrail.run.prepare import Prepared, prepare
from vitrail.run.record import read_json
from vitrail.run.running import Run
from vitrail.run.supervised import Supervised

Progress = Callable[[str, int, int], None]
WISHES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # that a named recipe adapts to
WITHIN = ("width", "depth", "patch_dropout")  # that some adapt to
ALWAYS = ("seed", "tune", "precision")  # that every recipe takes
FROM_CHECKPOINT = ("finetune", "paper-finetune")


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
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: give --out the name of a directory")
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(
                f"{directory} is there and not empty: give --out another name, or use --resume {directory}"
            )
        prepared = together(team, source, progress)
        facts = prepared.facts()
        if given is not None:
            if asked := [name for name, wish in (wishes or {}).items() if wish is not None]:
                option = f"--{asked[0].replace('_', '-')}"
                raise ValueError(f"{option} is for named recipes: this one is finished, change it with --set")
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
        run = Supervised(chosen, prepared, directory, machine, team, facts.chosen, listeners, trackers, progress)
        for line in announcement(chosen, prepared, facts, directory):
            run.tell(line)
        return finished(run, run.start())


def resume(
    directory: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Goes on with a run that was stopped or killed, to the same weights that it would have had.

    It is computed on what it began on; `changes` are fields of `Machine` that are to be others: {"workers": 2}.
    """
    directory = Path(directory)
    for tracker in trackers:
        needed(tracker)
    machine = replace(begun_on(directory), **(changes or {}))
    with joined(machine.device, machine.parallel) as team:
        return resumed(directory, machine, team, listeners, trackers, progress)


def begun_on(directory: Path) -> Machine:
    """What a run began on."""
    if not (directory / "recipe.json").is_file():
        raise ValueError(f"{directory} holds no run: there is no recipe.json in it")
    return dataclass_from_json(
        read_json(directory / "run.json").get("machine"), Machine, f"{directory / 'run.json'}: machine"
    )


def resumed(
    directory: Path,
    machine: Machine,
    team: Team,
    listeners: tuple[Listener, ...],
    trackers: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Path, dict[str, Any]]:
    if (directory / "summary.json").is_file():
        if team.leads:
            for listener in listeners:
                listener({"kind": "note", "text": f"{directory} is finished already"})
            if not (directory / "report.html").is_file():  # it was killed at the very end
                write_report(directory)
        return directory, read_json(directory / "summary.json")
    recipe = read_recipe(directory / "recipe.json")
    prepared = together(team, recipe.data, progress)
    run = Supervised(recipe, prepared, directory, machine, team, [], listeners, trackers, progress)
    return finished(run, run.resume())


def finished(run: Run, summary: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The report, once everything that it shows is written."""
    if run.team.leads:
        write_report(run.directory)
    return run.directory, summary


def named(name: str | None, facts: Facts, data: Data, init: str | None, wishes: dict[str, Any]) -> Recipe:
    """A named recipe for this data and this checkpoint."""
    name = name or ("scratch-small" if init is None else "finetune")
    if unknown := sorted(set(wishes) - {*WISHES, *ALWAYS, *WITHIN}):
        raise ValueError(f"nobody knows what to do with {unknown[0]}: {closest(unknown[0], [*WISHES, *ALWAYS])}")
    for wish in ("epochs", "steps", "batch_size", "lr"):
        if wishes.get(wish) is not None and not 0 < wishes[wish] < math.inf:
            raise ValueError(f"{wish.replace('_', ' ')} of {wishes[wish]}: it is above 0")
    if wishes.get("epochs") is not None and wishes.get("steps") is not None:
        raise ValueError("epochs and steps both say how long to train: give one of them")
    if init is not None and name not in FROM_CHECKPOINT:
        raise ValueError(f"the recipe {name} makes its own model: leave out --init, or use --recipe finetune")
    if init is not None:
        with describe(init) as checkpoint:
            facts.init = checkpoint.contract.config
            pipeline = checkpoint.contract.preprocessing
            facts.init_preprocessing = pipeline if isinstance(pipeline, Preprocessing) else None
    facts.wishes = wishes
    recipe = made(name, facts, data)
    if wishes.get("lr") is not None and "lr" not in facts.heard:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=facts.choose("lr", None, "")))
    deaf = [wish for wish in (*WISHES, *WITHIN) if wishes.get(wish) is not None and wish not in facts.heard]
    if deaf:
        raise ValueError(
            f"--{deaf[0].replace('_', '-')} means nothing to the recipe {name}: leave it out, or use --set"
        )
    return replace(recipe, init=init, **{k: wishes[k] for k in ALWAYS if wishes.get(k) is not None})


def together(team: Team, data: Data, progress: Progress | None) -> Prepared:
    """Prepared data on every process: the first one's audit fills the cache that the others read."""
    prepared: Prepared | None = None
    problem = None
    if team.leads:
        try:
            prepared = prepare(data, progress)
        except (ValueError, OSError) as error:
            problem = error
    failed = team.said_by_first(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise SystemExit(2)  # the first process says why
    return prepared or prepare(data)


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
