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
from vitrail.recipe import (
    FEATURES,
    Data,
    Facts,
    Machine,
    PictureSlot,
    Recipe,
    Teacher,
    method_of,
    read_recipe,
    with_settings,
)
from vitrail.recipes import METHODS, check_name, made
from vitrail.report import write_report
from vitrail.run.imitation import Imitation
from vitrail.run.opening import weights_of
from vitrail.run.prepare import Prepared, prepare
from vitrail.run.pretraining import Pretraining
from vitrail.run.record import read_json
from vitrail.run.running import Run
from vitrail.run.supervised import Supervised
from vitrail.run.teaching import Taught, is_taught, with_teacher

Progress = Callable[[str, int, int], None]
WISHES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # that a named recipe adapts to
WITHIN = ("width", "depth", "patch_dropout", "distil")  # that some adapt to
ALWAYS = ("seed", "tune", "precision")  # that every recipe takes
FROM_CHECKPOINT = ("finetune", "paper-finetune", *METHODS)


def train(
    data: str | Data | None = None,
    *,
    init: str | None = None,
    teacher: str | None = None,
    distil: str | None = None,
    teacher_cache: bool = False,
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
    default `finetune` with a checkpoint, `distil` with a teacher and `scratch-small` without). `teacher` is a trained model to
    learn from, `distil` how (hard, soft, features, tokens), and with `teacher_cache` it is asked once about each picture.
    `wishes` are what the recipe adapts to (`epochs`, `steps`, `batch_size`, `lr`, `model`, `size`), `settings` change the
    finished recipe in places (`optimizer.lr=3e-4`).
    """
    if isinstance(recipe, str):
        recipe = Path(recipe) if recipe.endswith(".json") else recipe
        if isinstance(recipe, str):
            check_name(recipe)
    given = read_recipe(recipe) if isinstance(recipe, Path) else recipe if isinstance(recipe, Recipe) else None
    if given is not None and (method := method_of(given)):
        raise ValueError(f"the recipe learns without labels, by {method}: use vitrail pretrain --recipe")
    if data is None and given is None:
        raise ValueError("what to train on? Give a folder, a file or a name: vitrail train digits")
    source = Data(data) if isinstance(data, str) else data if data is not None else given.data  # type: ignore[union-attr]

    taught = wanted(teacher, distil, teacher_cache, given)
    usual = "finetune" if init else "distil" if taught else "scratch-small"
    name = recipe if isinstance(recipe, str) else usual

    def choose(prepared: Prepared, facts: Facts, team: Team) -> Recipe:
        if given is None:
            asked, facts.teacher = dict(wishes or {}), taught
            asked |= {"distil": distil} if distil and name == "distil" else {}
            chosen = suited(named(name, facts, source, init, asked), facts, team, asked)
            return chosen if taught is None or chosen.teacher else with_teacher(chosen, taught, distil)
        check_finished(wishes)
        chosen = replace(given, data=source, init=init or given.init)
        return chosen if taught is None else with_teacher(chosen, taught, distil)

    place = out if out is not None else unused(source.where, given.name if given else name)
    return begin(source, place, choose, out is not None, settings, machine, listeners, trackers, progress)


def begin(
    source: Data,
    out: str | Path,
    choose: Callable[[Prepared, Facts, Team], Recipe],
    told: bool,
    settings: Sequence[str],
    machine: Machine,
    listeners: tuple[Listener, ...],
    trackers: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Path, dict[str, Any]]:
    """A run from its first step, in a directory that was `told` or made up; goes on with it where torchrun started this again."""
    directory = Path(out)
    for tracker in trackers:
        needed(tracker)  # before anything else is done
    if not told and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes must agree on a directory: give --out RUN")
    with joined(machine.device, machine.parallel) as team:
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
        recipe = with_settings(choose(prepared, facts, team), list(settings))
        recipe.check()
        kind, classes = kind_of(recipe), recipe.model.classes
        if classes is not None and classes != len(prepared.labels):
            raise ValueError(
                f"the recipe is for {classes} classes and {source.where} has {len(prepared.labels)}: "
                f"--set model.classes={len(prepared.labels)}, or use a named recipe"
            )
        run = kind(recipe, prepared, directory, machine, team, facts.chosen, listeners, trackers, progress)
        for line in announcement(recipe, prepared, facts, directory):
            run.tell(line)
        return finished(run, run.start())


def suited(recipe: Recipe, facts: Facts, team: Team, wishes: Mapping[str, Any]) -> Recipe:
    """A named recipe in the precision that the device is fast at."""
    if team.device.type != "cuda" or wishes.get("precision") is not None:
        return recipe
    best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return replace(recipe, precision=facts.choose("precision", best, "what this GPU is fast at"))


def check_finished(wishes: Mapping[str, Any] | None) -> None:
    """Refuses wishes for a recipe that is read from a file: only named ones adapt."""
    if asked := [name for name, wish in (wishes or {}).items() if wish is not None]:
        option = f"--{asked[0].replace('_', '-')}"
        raise ValueError(f"{option} is for named recipes: this one is finished, change it with --set")


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
    run = kind_of(recipe)(recipe, prepared, directory, machine, team, [], listeners, trackers, progress)
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


def wanted(teacher: str | None, distil: str | None, cache: bool, recipe: Recipe | None) -> Teacher | None:
    """The teacher that was asked for, which is there and a model before anything else is done; or else the recipe's own."""
    before = recipe.teacher if recipe is not None else None
    if teacher is None and before is None:
        if distil or cache:
            raise ValueError(f"{'--distil' if distil else '--teacher-cache'} is about a teacher: give --teacher MODEL")
        return None
    if teacher is not None:
        with describe(weights_of(teacher)):
            before = replace(before, where=teacher) if before is not None else Teacher(teacher)
    assert before is not None
    return replace(before, cached=cache or before.cached)


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


def kind_of(recipe: Recipe) -> type[Run]:
    """What kind of run a recipe makes: one that learns labels, by itself or with a teacher, or one that does without."""
    name, without = type(recipe.objective).__name__, recipe.model.classes is None
    if isinstance(recipe.objective, PictureSlot):
        if not without:
            raise ValueError(f"{name} learns without labels, in a model without classes: use vitrail pretrain")
        if recipe.teacher is not None:
            raise ValueError(f"{name} does not ask a teacher: set teacher=none, or use --method {FEATURES}")
        return Pretraining
    unlabelled = recipe.data.task == "none"
    if method_of(recipe) == FEATURES:
        if not unlabelled:
            raise ValueError(f"without classes there are no labels to learn: use vitrail pretrain --method {FEATURES}")
        return Imitation
    if without:
        raise ValueError(f"{name} learns labels, and the model has no classes: leave both as they are")
    if unlabelled:
        raise ValueError(f"{name} with {recipe.model.classes} classes learns labels: use vitrail train")
    return Taught if is_taught(recipe) else Supervised


def unused(where: str, kind: str) -> Path:
    """A name for the run that is not taken: runs/photos-finetune-1."""
    data = re.sub(r"[^\w.-]+", "-", Path(where).resolve().name if Path(where).exists() else where).strip("-.") or "data"
    number = 1
    while (place := Path("runs") / f"{data}-{kind}-{number}").exists():
        number += 1
    return place


def announcement(recipe: Recipe, prepared: Prepared, facts: Facts, directory: Path) -> list[str]:
    """What is about to happen, and why it was chosen."""
    parts = ", ".join(f"{len(p):,} {split}" for split, p in prepared.splits.items())
    classes = f"{len(prepared.labels)} classes; " if prepared.labelled else ""
    lines = [f"{recipe.data.where}: {classes}{parts}"]
    lines += [f"  {note}" for note in (*prepared.dataset.notes, *prepared.warnings)]
    lines += [f"  {line}" for line in prepared.audit.summary() if not line.startswith("note")]
    if prepared.skipped:
        lines.append(f"  {len(prepared.skipped)} bad files are left out; they are named in {directory / 'run.json'}")
    lines.append(f"recipe {recipe.name}" + (f", beginning with {recipe.init}" if recipe.init else ""))
    return lines + [f"  {reason}" for reason in facts.chosen] + [f"run directory {directory}"]
