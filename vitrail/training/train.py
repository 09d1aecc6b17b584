"""`vitrail.train` and `vitrail.resume`: from data to a finished run directory."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.load import find_weights, inspect_checkpoint
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.sizes import closest
from vitrail.reports import write_report
from vitrail.training.distributed import Team, join_process_group
from vitrail.training.logging import Listener, import_tracker
from vitrail.training.recipe import Data, Facts, Machine, Recipe, Teacher, method_of, read_recipe, with_settings
from vitrail.training.recipes import METHODS, build_recipe, check_name
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import read_json
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import Progress, RunSetup
from vitrail.training.runs.teaching import with_teacher
from vitrail.utils.json import dataclass_from_json

RECIPE_OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # of named recipes
SPECIFIC_OVERRIDES = ("width", "depth", "patch_dropout", "distil")  # of some of them
COMMON_OVERRIDES = ("seed", "tune", "precision")  # of all recipes
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
    overrides: Mapping[str, Any] | None = None,
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model with labels; return the run directory and its summary.

    `data` is a folder, a file or a name; `init` the initial checkpoint; `recipe` a name, a recipe.json or a Recipe (by default
    `finetune` with a checkpoint, `distil` with a teacher, otherwise `scratch-small`). `teacher` is a trained model to learn from,
    `distil` how (hard, soft, features, tokens); with `teacher_cache` its outputs are computed once for each image.
    `overrides` are values that a named recipe adapts to (`epochs`, `steps`, `batch_size`, `lr`, `model`, `size`), `settings`
    change the finished recipe (`optimizer.lr=3e-4`).
    """
    if isinstance(recipe, str):
        recipe = Path(recipe) if recipe.endswith(".json") else recipe
        if isinstance(recipe, str):
            check_name(recipe)
    given = read_recipe(recipe) if isinstance(recipe, Path) else recipe if isinstance(recipe, Recipe) else None
    if given is not None and (method := method_of(given)):
        raise ValueError(f"the recipe pretrains without labels ({method}): use vitrail pretrain --recipe")
    if data is None and given is None:
        raise ValueError("no data: give a folder, a file or a name, such as vitrail train digits")
    source = Data(data) if isinstance(data, str) else data if data is not None else given.data  # type: ignore[union-attr]

    settings_of_teacher = choose_teacher(teacher, distil, teacher_cache, given)
    default = "finetune" if init else "distil" if settings_of_teacher else "scratch-small"
    name = recipe if isinstance(recipe, str) else default

    def choose(prepared: Prepared, facts: Facts, team: Team) -> Recipe:
        if given is None:
            asked, facts.teacher = dict(overrides or {}), settings_of_teacher
            asked |= {"distil": distil} if distil and name == "distil" else {}
            chosen = choose_precision(build_named_recipe(name, facts, source, init, asked), facts, team, asked)
            if settings_of_teacher is None or chosen.teacher:
                return chosen
            return with_teacher(chosen, settings_of_teacher, distil)
        refuse_overrides(overrides)
        chosen = replace(given, data=source, init=init or given.init)
        return chosen if settings_of_teacher is None else with_teacher(chosen, settings_of_teacher, distil)

    directory = out if out is not None else choose_directory(source.where, given.name if given else name)
    return start_run(source, directory, choose, out is not None, settings, machine, listeners, trackers, progress)


def start_run(
    source: Data,
    out: str | Path,
    choose: Callable[[Prepared, Facts, Team], Recipe],
    explicit_out: bool,
    settings: Sequence[str],
    machine: Machine,
    listeners: tuple[Listener, ...],
    trackers: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe from its first step, or resume it where torchrun restarted this process."""
    directory = Path(out)
    for tracker in trackers:
        import_tracker(tracker)  # fails before anything else is done
    if not explicit_out and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need the same run directory: give --out RUN")
    with join_process_group(machine.device, machine.parallel) as team:
        if is_elastic_restart(directory):
            return resume_run(directory, machine, team, listeners, trackers, progress)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: give --out the name of a directory")
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty: give --out another name, or use --resume {directory}")
        prepared = prepare_on_all(team, source, progress)
        facts = prepared.measure_facts()
        recipe = with_settings(choose(prepared, facts, team), list(settings))
        recipe.check()
        check_labels(recipe)
        classes = recipe.model.classes
        if classes is not None and classes != len(prepared.labels):
            raise ValueError(
                f"the recipe is for {classes} classes and {source.where} has {len(prepared.labels)}: "
                f"--set model.classes={len(prepared.labels)}, or use a named recipe"
            )
        setup = RunSetup(recipe, prepared, directory, machine, team, facts.chosen, listeners, trackers, progress)
        for line in describe_run(recipe, prepared, facts, directory):
            setup.note(line)
        return write_run_report(setup, Run(setup).start())


def choose_precision(recipe: Recipe, facts: Facts, team: Team, overrides: Mapping[str, Any]) -> Recipe:
    """Return a named recipe in the precision that the device is fast at."""
    if team.device.type != "cuda" or overrides.get("precision") is not None:
        return recipe
    best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return replace(recipe, precision=facts.choose("precision", best, "fast on this GPU"))


def refuse_overrides(overrides: Mapping[str, Any] | None) -> None:
    """Raise ValueError for overrides of a recipe from a file: only named recipes adapt."""
    if asked := [name for name, value in (overrides or {}).items() if value is not None]:
        option = f"--{asked[0].replace('_', '-')}"
        raise ValueError(f"{option} is for named recipes: change a recipe file with --set")


def resume(
    directory: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Resume a run that was stopped or killed; the weights are those of an uninterrupted run.

    The machine's settings are those of the start; `changes` replace some of them: {"workers": 2}.
    """
    directory = Path(directory)
    for tracker in trackers:
        import_tracker(tracker)
    machine = replace(read_machine(directory), **(changes or {}))
    with join_process_group(machine.device, machine.parallel) as team:
        return resume_run(directory, machine, team, listeners, trackers, progress)


def read_machine(directory: Path) -> Machine:
    """Return the machine settings that a run started with."""
    if not (directory / "recipe.json").is_file():
        raise ValueError(f"{directory} is not a run directory: it has no recipe.json")
    return dataclass_from_json(
        read_json(directory / "run.json").get("machine"), Machine, f"{directory / 'run.json'}: machine"
    )


def resume_run(
    directory: Path,
    machine: Machine,
    team: Team,
    listeners: tuple[Listener, ...],
    trackers: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Path, dict[str, Any]]:
    """Resume a run on this team; return at once where it is finished."""
    if (directory / "summary.json").is_file():
        if team.is_main:
            for listener in listeners:
                listener({"kind": "note", "text": f"{directory} is finished already"})
            if not (directory / "report.html").is_file():  # killed before the report was written
                write_report(directory)
        return directory, read_json(directory / "summary.json")
    recipe = read_recipe(directory / "recipe.json")
    check_labels(recipe)
    prepared = prepare_on_all(team, recipe.data, progress)
    setup = RunSetup(recipe, prepared, directory, machine, team, [], listeners, trackers, progress)
    return write_run_report(setup, Run(setup).resume())


def write_run_report(setup: RunSetup, summary: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Write the report of a finished run; return its directory and summary."""
    if setup.team.is_main:
        write_report(setup.directory)
    return setup.directory, summary


def build_named_recipe(
    name: str | None, facts: Facts, data: Data, init: str | None, overrides: dict[str, Any]
) -> Recipe:
    """Return a named recipe for this data, checkpoint and overrides."""
    name = name or ("scratch-small" if init is None else "finetune")
    if unknown := sorted(set(overrides) - {*RECIPE_OVERRIDES, *COMMON_OVERRIDES, *SPECIFIC_OVERRIDES}):
        raise ValueError(f"unknown option {unknown[0]}: {closest(unknown[0], [*RECIPE_OVERRIDES, *COMMON_OVERRIDES])}")
    for option in ("epochs", "steps", "batch_size", "lr"):
        if overrides.get(option) is not None and not 0 < overrides[option] < math.inf:
            raise ValueError(f"{option.replace('_', ' ')} must be > 0, got {overrides[option]}")
    if overrides.get("epochs") is not None and overrides.get("steps") is not None:
        raise ValueError("epochs and steps are both given: give one of them")
    if init is not None and name not in FROM_CHECKPOINT:
        raise ValueError(f"the recipe {name} builds its own model: leave out --init, or use --recipe finetune")
    if init is not None:
        with inspect_checkpoint(init) as checkpoint:
            facts.init = checkpoint.contract.config
            pipeline = checkpoint.contract.preprocessing
            facts.init_preprocessing = pipeline if isinstance(pipeline, Preprocessing) else None
    facts.overrides = overrides
    recipe = build_recipe(name, facts, data)
    if overrides.get("lr") is not None and "lr" not in facts.used:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=facts.choose("lr", None, "")))
    options = (*RECIPE_OVERRIDES, *SPECIFIC_OVERRIDES)
    if unused := [option for option in options if overrides.get(option) is not None and option not in facts.used]:
        option = unused[0].replace("_", "-")
        raise ValueError(f"the recipe {name} does not use --{option}: leave it out, or use --set")
    return replace(recipe, init=init, **{k: overrides[k] for k in COMMON_OVERRIDES if overrides.get(k) is not None})


def choose_teacher(teacher: str | None, distil: str | None, cache: bool, recipe: Recipe | None) -> Teacher | None:
    """Return the settings of the given teacher, whose file must be readable, or those of the recipe."""
    settings = recipe.teacher if recipe is not None else None
    if teacher is None and settings is None:
        if distil or cache:
            raise ValueError(f"{'--distil' if distil else '--teacher-cache'} needs a teacher: give --teacher MODEL")
        return None
    if teacher is not None:
        with inspect_checkpoint(find_weights(teacher)):
            settings = replace(settings, where=teacher) if settings is not None else Teacher(teacher)
    assert settings is not None
    return replace(settings, cached=cache or settings.cached)


def prepare_on_all(team: Team, data: Data, progress: Progress | None) -> Prepared:
    """Return the prepared data on every process: the audit of the main one fills the cache that the others read."""
    prepared: Prepared | None = None
    problem = None
    if team.is_main:
        try:
            prepared = prepare_data(data, progress)
        except (ValueError, OSError) as error:
            problem = error
    failed = team.broadcast_object(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise SystemExit(2)  # the main process reports the error
    return prepared or prepare_data(data)


def is_elastic_restart(directory: Path) -> bool:
    """Return whether torchrun restarted this process after a failure, and there is a run to resume."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (directory / "recipe.json").is_file()


def check_labels(recipe: Recipe) -> None:
    """Raise ValueError where objective, model and data do not agree on whether labels are learnt."""
    objective, classes, unlabelled = recipe.objective, recipe.model.classes, recipe.data.task == "none"
    name = type(objective).__name__
    if objective.label_use == "none":
        if classes is not None:
            raise ValueError(f"{name} trains without labels, a model without classes: use vitrail pretrain")
        if recipe.teacher is not None:
            raise ValueError(f"{name} uses no teacher: set teacher=none, or use --method features")
    elif classes is None and objective.label_use == "required":
        raise ValueError(
            f"{name} learns labels, and the model has no classes: set model.classes, or use vitrail pretrain"
        )
    elif classes is None and not unlabelled:
        raise ValueError(f"the model has no classes to learn: use vitrail pretrain --method {objective.method}")
    elif classes is not None and unlabelled:
        raise ValueError(f"{name} with {classes} classes learns labels: use vitrail train")


def choose_directory(where: str, kind: str) -> Path:
    """Return a run directory that does not exist yet, such as runs/photos-finetune-1."""
    data = re.sub(r"[^\w.-]+", "-", Path(where).resolve().name if Path(where).exists() else where).strip("-.") or "data"
    number = 1
    while (directory := Path("runs") / f"{data}-{kind}-{number}").exists():
        number += 1
    return directory


def describe_run(recipe: Recipe, prepared: Prepared, facts: Facts, directory: Path) -> list[str]:
    """Return lines that describe the data, the recipe and its choices."""
    parts = ", ".join(f"{len(p):,} {split}" for split, p in prepared.splits.items())
    classes = f"{len(prepared.labels)} classes; " if prepared.labelled else ""
    lines = [f"{recipe.data.where}: {classes}{parts}"]
    lines += [f"  {note}" for note in (*prepared.dataset.notes, *prepared.warnings)]
    lines += [f"  {line}" for line in prepared.audit.format_summary() if not line.startswith("note")]
    if prepared.skipped:
        lines.append(f"  {len(prepared.skipped)} bad files are left out; {directory / 'run.json'} lists them")
    lines.append(f"recipe {recipe.name}" + (f", starting from {recipe.init}" if recipe.init else ""))
    return lines + [f"  {reason}" for reason in facts.chosen] + [f"run directory {directory}"]
