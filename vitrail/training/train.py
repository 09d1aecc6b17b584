"""`vitrail.train`, `vitrail.pretrain` and `vitrail.resume`: from data to a finished run directory."""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from vitrail.checkpoints.load import find_weights, inspect_checkpoint
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.file_names import preview_labels
from vitrail.models.sizes import closest
from vitrail.objectives.registry import PRETRAINING
from vitrail.reports import write_report
from vitrail.training.budget import fit_recipe
from vitrail.training.distributed import Team, join_process_group
from vitrail.training.logging import Listener, import_tracker
from vitrail.training.recipe import Data, Facts, Machine, Recipe, Teacher, method_of, read_recipe, with_settings
from vitrail.training.recipes import METHODS, build_recipe, check_name
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import check_recipe, read_run_record, read_summary
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunSetup
from vitrail.training.runs.teaching import with_teacher
from vitrail.training.runs.validation import describe_validation, limit_validation
from vitrail.utils.json import dataclass_from_json
from vitrail.utils.progress import ProgressCallback

RECIPE_OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # of named recipes
SPECIFIC_OVERRIDES = ("width", "depth", "patch_dropout", "distil")  # of some of them
COMMON_OVERRIDES = ("seed", "tune", "precision")  # of all recipes
FROM_CHECKPOINT = ("finetune", "paper-finetune", *METHODS)


class Connected(TypedDict):
    """Receivers of what a run reports: functions, external trackers, and a display of progress."""

    listeners: tuple[Listener, ...]
    trackers: tuple[str, ...]
    progress: ProgressCallback | None


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
    minutes: float | None = None,
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model with labels; return the run directory and its summary.

    `data` is a folder, a file or a name; `init` the initial checkpoint; `recipe` a name, a recipe.json or a Recipe (by default
    `finetune` with a checkpoint, `distil` with a teacher, otherwise `scratch-small`). `teacher` is a trained model to learn from,
    `distil` how (hard, soft, features, tokens); with `teacher_cache` its outputs are computed once for each image.
    `overrides` are values that a named recipe adapts to (`epochs`, `steps`, `batch_size`, `lr`, `model`, `size`), `settings`
    change the finished recipe (`optimizer.lr=3e-4`). With `minutes` a few steps are measured, and the recipe gets so many
    steps that the call ends after about that time.
    """
    name = recipe if isinstance(recipe, str) and not recipe.endswith(".json") else None
    if name is not None:
        check_name(name)
    given = read_given(None if name else recipe)
    if given is not None and (method := method_of(given)):
        raise ValueError(f"the recipe pretrains without labels ({method}): use vitrail pretrain --recipe")
    source = find_data(data, given, "vitrail train digits")
    taught = choose_teacher(teacher, distil, teacher_cache, given)
    name = name or ("finetune" if init else "distil" if taught else "scratch-small")
    choice = RecipeChoice(name, given, source, init, taught, distil, overrides or {}, settings, set_deadline(minutes))
    return start_run(choice, out, machine, Connected(listeners=listeners, trackers=trackers, progress=progress))


def pretrain(
    data: str | Data | None = None,
    *,
    method: str | None = None,
    init: str | None = None,
    teacher: str | None = None,
    teacher_cache: bool = False,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model without labels; return the run directory and its summary.

    `method` is mpp (masked patch prediction), mae, dino or features; `init` the initial checkpoint; `recipe` a recipe.json
    or a Recipe instead of a method. `teacher` is the trained model whose features are learnt; with `teacher_cache` they are
    computed once for each image. Everything else is as for `vitrail.train`; `vitrail.resume` resumes it.
    """
    given = read_given(recipe)
    if given is not None and method_of(given) is None:
        raise ValueError(f"the recipe {given.name} learns labels: use vitrail train")
    source = replace(find_data(data, given, "vitrail pretrain photos --method dino"), task="none")
    if given is None and method is None:
        raise ValueError(f"no method: give --method {', --method '.join(METHODS[:-1])} or --method {METHODS[-1]}")
    if method is not None and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    if method is not None and given is not None:
        raise ValueError("a recipe file has a method already: leave out --method")
    name = str(method if given is None else method_of(given))
    uses_teacher = PRETRAINING[name].teacher_output is not None
    if not uses_teacher and (teacher or teacher_cache):
        option = "--teacher" if teacher else "--teacher-cache"
        raise ValueError(f"--method {name} uses no teacher: leave out {option}, or use --method features")
    if uses_teacher and teacher is None and given is None:
        raise ValueError(f"--method {name} needs a teacher: give --teacher MODEL, a trained model")
    taught = choose_teacher(teacher, None, teacher_cache, given) if uses_teacher else None
    choice = RecipeChoice(name, given, source, init, taught, None, overrides or {}, settings, set_deadline(minutes))
    return start_run(choice, out, machine, Connected(listeners=listeners, trackers=trackers, progress=progress))


def read_given(recipe: str | Path | Recipe | None) -> Recipe | None:
    """Return the recipe of a caller that gives one, as a value or as a file."""
    return recipe if recipe is None or isinstance(recipe, Recipe) else read_recipe(Path(recipe))


def find_data(data: str | Data | None, given: Recipe | None, example: str) -> Data:
    """Return the data of a run: as given, or that of the recipe."""
    if data is None and given is None:
        raise ValueError(f"no data: give a folder, a file or a name, such as {example}")
    return Data(data) if isinstance(data, str) else data or given.data  # type: ignore[union-attr]


@dataclass(frozen=True)
class RecipeChoice:
    """Everything that determines the recipe of a run besides its data: a name or a recipe, and the user's changes of it."""

    name: str  # of a named recipe, or the method of `given`
    given: Recipe | None
    data: Data
    init: str | None
    teacher: Teacher | None
    distil: str | None
    overrides: Mapping[str, Any]
    settings: Sequence[str]
    deadline: float | None = None  # by `time.monotonic()`

    def choose(self, prepared: Prepared, machine: Machine, team: Team) -> tuple[Recipe, Facts]:
        """Return the recipe for this data, within the time budget if there is one, and the choices made."""
        fixed = frozenset(setting.partition("=")[0].strip() for setting in self.settings)
        lengths = {"epochs", "steps"}
        if self.deadline is not None:
            if self.given is not None:
                raise ValueError("--minutes is for named recipes: leave it out, or use --set steps=N")
            if both := lengths & {*fixed, *(name for name in lengths if self.overrides.get(name) is not None)}:
                raise ValueError(f"--minutes and {min(both)} are both given: give one of them")
        measured = prepared.measure_facts()

        def build(more: Mapping[str, Any]) -> tuple[Recipe, Facts]:
            facts = replace(measured, overrides={}, chosen=[], used=set())
            return replace(self, overrides={**self.overrides, **more}).build(facts, team), facts

        if self.deadline is not None:
            recipe, facts = fit_recipe(build, prepared, machine, team, self.deadline, fixed)
        else:
            (asked, facts) = build({})
            recipe = asked if self.given is not None else limit_validation(asked, prepared, fixed)
            if recipe == asked:
                return recipe, facts
        facts.chosen.append(describe_validation(recipe, prepared))
        return recipe, facts

    def build(self, facts: Facts, team: Team) -> Recipe:
        """Return the recipe for data with these facts."""
        if self.given is not None:
            if asked := [name for name, value in self.overrides.items() if value is not None]:
                option = f"--{asked[0].replace('_', '-')}"
                raise ValueError(f"{option} is for named recipes: change a recipe file with --set")
            recipe = replace(self.given, data=self.data, init=self.init or self.given.init)
        else:
            asked, facts.teacher = dict(self.overrides), self.teacher
            asked |= {"distil": self.distil} if self.distil and self.name == "distil" else {}
            recipe = build_named_recipe(self.name, facts, self.data, self.init, asked)
            if team.device.type == "cuda" and asked.get("precision") is None:
                best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
                recipe = replace(recipe, precision=facts.choose("precision", best, "fast on this GPU"))
        if self.teacher is not None and (self.given is not None or recipe.teacher is None):
            recipe = with_teacher(recipe, self.teacher, self.distil)
        return with_settings(recipe, self.settings)


def start_run(
    choice: RecipeChoice, out: str | Path | None, machine: Machine, connected: Connected
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe from its first step, or resume it where torchrun restarted this process."""
    where = choice.data.where
    named = choice.given.name if choice.given else choice.name
    directory = choose_directory(where, named) if out is None else Path(out)
    for tracker in connected["trackers"]:
        import_tracker(tracker)  # fails before anything else is done
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need the same run directory: give --out RUN")
    with join_process_group(machine.device, machine.parallel) as team:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun, after a failure
        if restarted and (directory / "recipe.json").is_file():
            return resume_run(directory, machine, team, connected)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: give --out the name of a directory")
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty: give --out another name, or use --resume {directory}")
        prepared = prepare_on_all(team, choice.data, connected["progress"])
        recipe, facts = choice.choose(prepared, machine, team)
        check_labels(recipe)
        classes, present = recipe.model.classes, len(prepared.labels)
        if classes is not None and classes != present:
            counts = f"the recipe is for {classes} classes and {where} has {present}"
            raise ValueError(f"{counts}: --set model.classes={present}, or use a named recipe")
        setup = RunSetup(recipe, prepared, directory, machine, team, facts.chosen, **connected)
        for line in describe_run(recipe, prepared, facts, directory):
            setup.note(line)
        return write_run_report(setup, Run(setup).start())


def resume(
    directory: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    accept_changes: bool = False,
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Resume a run that was stopped or killed; the weights are those of an uninterrupted run.

    The machine's settings are those of the start; `changes` replace some of them: {"workers": 2}. A recipe.json that was edited
    since is refused; `accept_changes` continues with it.
    """
    directory = Path(directory)
    for tracker in trackers:
        import_tracker(tracker)
    if not (directory / "recipe.json").is_file():
        raise ValueError(f"{directory} is not a run directory: it has no recipe.json")
    machine = dataclass_from_json(read_run_record(directory)["machine"], Machine, f"{directory / 'run.json'}: machine")
    machine = replace(machine, **(changes or {}))
    with join_process_group(machine.device, machine.parallel) as team:
        connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
        return resume_run(directory, machine, team, connected, accept_changes)


def resume_run(
    directory: Path, machine: Machine, team: Team, connected: Connected, accept_changes: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Resume a run on this team; return at once where it is finished."""
    if (directory / "summary.json").is_file():
        if team.is_main:
            for listener in connected["listeners"]:
                listener({"kind": "note", "text": f"{directory} is finished already"})
            if not (directory / "report.html").is_file():  # killed before the report was written
                write_report(directory)
        return directory, read_summary(directory)
    recipe = read_recipe(directory / "recipe.json")
    changes = check_recipe(directory, recipe, accept_changes)
    check_labels(recipe)
    prepared = prepare_on_all(team, recipe.data, connected["progress"])
    setup = RunSetup(recipe, prepared, directory, machine, team, **connected)
    for change in changes:
        setup.note(f"the recipe changed: {change}")
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


def set_deadline(minutes: float | None) -> float | None:
    """Return the time by `time.monotonic()` at which a run of so many minutes that starts now should end."""
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be > 0, got {minutes:g}")
    return time.monotonic() + 60 * minutes


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


def prepare_on_all(team: Team, data: Data, progress: ProgressCallback | None) -> Prepared:
    """Return the prepared data on every process: the audit of the main one fills the cache that the others read."""
    prepared = problem = None
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
        raise ValueError(f"{name} learns labels, the model has no classes: set model.classes, or use vitrail pretrain")
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
    lines += [f"    {line}" for line in preview_labels(prepared.dataset)] if recipe.data.label_from else []
    lines += [f"  {line}" for line in prepared.audit.format_summary() if not line.startswith("note")]
    if prepared.skipped:
        lines.append(f"  {len(prepared.skipped)} bad files are left out; {directory / 'run.json'} lists them")
    lines.append(f"recipe {recipe.name}" + (f", starting from {recipe.init}" if recipe.init else ""))
    return lines + [f"  {reason}" for reason in facts.chosen] + [f"run directory {directory}"]
