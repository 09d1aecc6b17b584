"""`vitrail.train`, `vitrail.pretrain` and `vitrail.resume`: from data to a finished run directory."""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from vitrail.checkpoints.known_models import expand_name
from vitrail.checkpoints.load import find_weights, inspect_checkpoint
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.file_names import preview_labels
from vitrail.data.sources.objects import PREFIX, describe_object
from vitrail.data.transforms.augment import AugmentSlot
from vitrail.data.transforms.pipeline import CROP_TYPES
from vitrail.data.transforms.user import UserFunction, bind_transforms, describe_transform, list_functions
from vitrail.models.base import image_sides
from vitrail.models.sizes import closest
from vitrail.objectives.registry import PRETRAINING
from vitrail.reports import write_report
from vitrail.training.budget import fit_recipe
from vitrail.training.distributed import Team, join_process_group
from vitrail.training.logging import Listener, import_tracker
from vitrail.training.precision import choose_training_precision
from vitrail.training.recipe import Data, Facts, Machine, Recipe, Teacher, method_of, read_recipe, with_settings
from vitrail.training.recipes import METHODS, build_recipe, check_name
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import check_recipe, read_run_record, read_summary
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunSetup
from vitrail.training.runs.teaching import with_teacher
from vitrail.training.runs.validation import describe_validation, limit_validation
from vitrail.utils.json import dataclass_from_json
from vitrail.utils.precision import PrecisionChoice, check_precision
from vitrail.utils.progress import ProgressCallback

RECIPE_OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # of named recipes
SPECIFIC_OVERRIDES = ("width", "depth", "patch_dropout", "distil")  # of some of them
COMMON_OVERRIDES = ("seed", "tune", "precision")  # of all recipes
Augment = UserFunction | AugmentSlot | Sequence[UserFunction | AugmentSlot]
FROM_CHECKPOINT = ("finetune", "paper-finetune", *METHODS)


class Connected(TypedDict):
    """Receivers of what a run reports: functions, external trackers, and a display of progress."""

    listeners: tuple[Listener, ...]
    trackers: tuple[str, ...]
    progress: ProgressCallback | None


def train(
    data: Any = None,
    *,
    init: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    distil: str | None = None,
    teacher_cache: bool = False,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    model: str | None = None,
    size: int | tuple[int, int] | None = None,
    width: int | None = None,
    depth: int | None = None,
    patch_dropout: float | None = None,
    tune: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    patience: int | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = None,
    seed: int | None = None,
    settings: Sequence[str] = (),
    minutes: float | None = None,
    augment: Augment | None = None,
    fractions: tuple[float, float, float] | None = None,
    task: Literal["auto", "single", "multi"] | None = None,
    balance: Literal["none", "weights", "sampling"] | None = None,
    per_class: int | None = None,
    allow_class_mismatch: bool | None = None,
    quarantine: str | os.PathLike[str] | None = None,
    label_from: str | None = None,
    names: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    workers: int | None = None,
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model with labels; return the run directory and its summary.

    `data` is anything that `load_dataset` reads: a path, a name, hf://datasets/owner/name, a dataset of PyTorch or Hugging
    Face, a list of (image, label), (images, labels) as arrays, a table, a dict of splits; or a `Data`. `fractions`, `task`,
    `balance`, `per_class`, `allow_class_mismatch`, `quarantine`, `label_from` and `names` are fields of `Data`.

    `init` is the initial checkpoint, a path or a name of `vitrail models`; `recipe` a name, a recipe.json or a Recipe (by
    default `finetune` with a checkpoint, `distil` with a teacher, otherwise `scratch-small`). `teacher` is a trained model to
    learn from, `distil` how (hard, soft, features, tokens); with `teacher_cache` its outputs are computed once for each image.
    A named recipe adapts to `model` ("S/16") or `width`, `depth` and `patch_dropout`, to `size`, `tune` ("head", "lora"),
    `epochs` or `steps`, `batch_size` and `lr`; `settings` change the finished recipe: ["optimizer.lr=3e-4", "ema=none"].
    With `minutes` a few steps are measured, and the recipe gets so many steps that the call ends after about that time.
    `precision` is fp32, bf16, fp16, or "auto" (the default of named recipes): a lower one if a second of measuring says that it
    is faster, except for short runs; the recipe records it. Training stops after `patience` validations without improvement.
    `augment` is a function of one image (of torchvision, albumentations or your own) in place of the recipe's steps after the
    crop, or a list of functions and steps in place of all. `device` and `workers` are fields of `machine`.
    """
    name = os.fspath(recipe) if isinstance(recipe, str) and not recipe.endswith(".json") else None
    if name is not None:
        check_name(name)
    given = read_given(None if name else recipe)
    if given is not None and (method := method_of(given)):
        raise ValueError(f"the recipe pretrains without labels ({method}): use vitrail.pretrain")
    fields = {"fractions": fractions, "task": task, "balance": balance, "per_class": per_class}
    fields |= {"allow_class_mismatch": allow_class_mismatch, "quarantine": optional_path(quarantine)}
    fields |= {"label_from": label_from, "names": optional_path(names)}
    source = find_data(data, given, fields)
    taught = choose_teacher(optional_path(teacher), distil, teacher_cache, given)
    name = name or ("finetune" if init else "distil" if taught else "scratch-small")
    overrides = {"model": model, "size": size, "tune": tune, "epochs": epochs, "steps": steps, "batch_size": batch_size}
    overrides |= {"lr": lr, "precision": precision, "seed": seed}
    overrides |= {"width": width, "depth": depth, "patch_dropout": patch_dropout}
    settings = [*settings, *([f"patience={patience}"] if patience is not None else [])]
    choice = RecipeChoice(
        name, given, *source, optional_path(init), taught, distil, overrides, settings, augment, set_deadline(minutes)
    )
    connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
    return start_run(choice, out, change_machine(machine, device, workers), connected)


def pretrain(
    data: Any = None,
    *,
    method: str | None = None,
    init: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    teacher_cache: bool = False,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    model: str | None = None,
    size: int | tuple[int, int] | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    patience: int | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = None,
    seed: int | None = None,
    settings: Sequence[str] = (),
    minutes: float | None = None,
    augment: Augment | None = None,
    fractions: tuple[float, float, float] | None = None,
    quarantine: str | os.PathLike[str] | None = None,
    label_from: str | None = None,
    names: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    workers: int | None = None,
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model without labels; return the run directory and its summary.

    `data` is as for `vitrail.train`; it may be images without labels. `method` is mpp (masked patch prediction), mae, dino or
    features; `init` the initial checkpoint; `recipe` a recipe.json or a Recipe instead of a method. `teacher` is the trained
    model whose features are learnt; with `teacher_cache` they are computed once for each image. Everything else is as for
    `vitrail.train`; `vitrail.resume` resumes it.
    """
    given = read_given(recipe)
    if given is not None and method_of(given) is None:
        raise ValueError(f"the recipe {given.name} learns labels: use vitrail.train")
    fields = {"fractions": fractions, "quarantine": optional_path(quarantine), "task": "none"}
    source = find_data(data, given, fields | {"label_from": label_from, "names": optional_path(names)})
    if given is None and method is None:
        *most, last = (f"method={name!r}" for name in METHODS)
        raise ValueError(f"no method: give {', '.join(most)} or {last}")
    if method is not None and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    if method is not None and given is not None:
        raise ValueError("a recipe file has a method already: leave out method=")
    name = str(method if given is None else method_of(given))
    uses_teacher = PRETRAINING[name].teacher_output is not None
    if not uses_teacher and (teacher or teacher_cache):
        option = "teacher=" if teacher else "teacher_cache="
        raise ValueError(f"method={name!r} uses no teacher: leave out {option}, or use method='features'")
    if uses_teacher and teacher is None and given is None:
        raise ValueError(f"method={name!r} needs a teacher: give teacher=MODEL, a trained model")
    taught = choose_teacher(optional_path(teacher), None, teacher_cache, given) if uses_teacher else None
    overrides = {"model": model, "size": size, "epochs": epochs, "steps": steps, "batch_size": batch_size, "lr": lr}
    overrides |= {"precision": precision, "seed": seed}
    settings = [*settings, *([f"patience={patience}"] if patience is not None else [])]
    choice = RecipeChoice(
        name, given, *source, optional_path(init), taught, None, overrides, settings, augment, set_deadline(minutes)
    )
    connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
    return start_run(choice, out, change_machine(machine, device, workers), connected)


def optional_path(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text."""
    return None if path is None else os.fspath(path)


def change_machine(machine: Machine, device: str | None, workers: int | None) -> Machine:
    """Return the machine's settings with the device and workers that were given."""
    asked = {"device": device, "workers": workers}
    return replace(machine, **{name: value for name, value in asked.items() if value is not None})


def read_given(recipe: str | os.PathLike[str] | Recipe | None) -> Recipe | None:
    """Return the recipe of a caller that gives one, as a value or as a file."""
    return recipe if recipe is None or isinstance(recipe, Recipe) else read_recipe(Path(recipe))


def find_data(data: Any, given: Recipe | None, fields: Mapping[str, Any]) -> tuple[Data, Any]:
    """Return the data of a run with the fields that are not None, and the Python object if it is one.

    Without data, it is that of the recipe.
    """
    if data is None and given is None:
        raise ValueError("no data: give a folder, a file, a name such as 'digits', or a Python object")
    is_named = data is None or isinstance(data, Data | str | os.PathLike)
    where: Any = (data if given is None or data is not None else given.data) if is_named else describe_object(data)
    found = where if isinstance(where, Data) else Data(os.fspath(where))
    return replace(
        found, **{name: value for name, value in fields.items() if value is not None}
    ), None if is_named else data


@dataclass(frozen=True)
class RecipeChoice:
    """Everything that determines the recipe of a run besides its data: a name or a recipe, and the user's changes of it."""

    name: str  # of a named recipe, or the method of `given`
    given: Recipe | None
    data: Data
    source: Any  # the Python object that `data` names, or None
    init: str | None
    teacher: Teacher | None
    distil: str | None
    overrides: Mapping[str, Any]
    settings: Sequence[str]
    augment: Augment | None = None
    deadline: float | None = None  # by `time.monotonic()`

    def __post_init__(self) -> None:
        if self.init is not None:  # the recipe records the address, not the name
            object.__setattr__(self, "init", expand_name(self.init))
        if (precision := self.overrides.get("precision")) is not None:
            check_precision(precision)
        if precision == "auto" and self.given is None:
            object.__setattr__(self, "overrides", {**self.overrides, "precision": None})

    def choose(self, prepared: Prepared, machine: Machine, team: Team) -> tuple[Recipe, Facts]:
        """Return the recipe for this data, within the time budget if there is one, and the choices made."""
        fixed = frozenset(setting.partition("=")[0].strip() for setting in self.settings)
        lengths = {"epochs", "steps"}
        if self.deadline is not None:
            if self.given is not None:
                raise ValueError("minutes= is for named recipes: leave it out, or use settings=['steps=N']")
            if both := lengths & {*fixed, *(name for name in lengths if self.overrides.get(name) is not None)}:
                raise ValueError(f"minutes= and {min(both)}= are both given: give one of them")
        measured, precisions = prepared.measure_facts(), list[PrecisionChoice | None]()

        def build(more: Mapping[str, Any]) -> tuple[Recipe, Facts]:
            facts = replace(measured, overrides={}, chosen=[], used=set())
            recipe = replace(self, overrides={**self.overrides, **more}).build(facts)
            if not precisions:  # once: the recipe within a time budget has the same
                precisions.append(self.measure_precision(recipe, len(prepared.train), team))
            return with_precision(recipe, facts, precisions[0]), facts

        if self.deadline is not None:
            recipe, facts = fit_recipe(
                build, prepared, machine, team, self.deadline, fixed, list_functions(self.augment)
            )
        else:
            (asked, facts) = build({})
            recipe = asked if self.given is not None else limit_validation(asked, prepared, fixed)
            if recipe == asked:
                return recipe, facts
        facts.chosen.append(describe_validation(recipe, prepared))
        return recipe, facts

    def measure_precision(self, recipe: Recipe, n_images: int, team: Team) -> PrecisionChoice | None:
        """Return the fastest precision of a named recipe; None if it is given, or if the run is too short to measure."""
        is_set = any(setting.partition("=")[0].strip() == "precision" for setting in self.settings)
        if self.given is not None or self.overrides.get("precision") is not None or is_set:
            return None
        return choose_training_precision(recipe, n_images, team)

    def build(self, facts: Facts) -> Recipe:
        """Return the recipe for data with these facts."""
        if self.given is not None:
            if asked := [name for name, value in self.overrides.items() if value is not None]:
                raise ValueError(f"{asked[0]}= is for named recipes: change a recipe file with settings=['NAME=VALUE']")
            recipe = replace(self.given, data=self.data, init=self.init or self.given.init)
        else:
            asked, facts.teacher = {k: value for k, value in self.overrides.items() if value is not None}, self.teacher
            asked |= {"size": image_sides(asked["size"])} if "size" in asked else {}
            asked |= {"distil": self.distil} if self.distil and self.name == "distil" else {}
            recipe = build_named_recipe(self.name, facts, self.data, self.init, asked)
        if self.teacher is not None and (self.given is not None or recipe.teacher is None):
            recipe = with_teacher(recipe, self.teacher, self.distil)
        if self.augment is not None:
            recipe = with_augment(recipe, self.augment)
        return with_settings(recipe, self.settings)


def with_precision(recipe: Recipe, facts: Facts, choice: PrecisionChoice | None) -> Recipe:
    """Return a recipe with the chosen precision, and record the choice."""
    if choice is None:
        return recipe
    return replace(recipe, precision=facts.choose("precision", choice.precision, choice.why))


def with_augment(recipe: Recipe, augment: Augment) -> Recipe:
    """Return a recipe with another augmentation: a function in place of all steps after the crop, or a sequence of steps."""
    if recipe.views is not None:
        raise ValueError(f"the recipe {recipe.name} makes several crops of each image: augment= is for one")
    crop = [step for step in recipe.augment if isinstance(step, CROP_TYPES)]
    steps = [*crop, augment] if not isinstance(augment, Sequence) or callable(augment) else augment
    slots = [describe_transform(step) if callable(step) else step for step in steps]
    if strange := [step for step in slots if not isinstance(step, get_args(AugmentSlot))]:
        raise ValueError(f"augment takes functions and steps of vitrail, got {strange[0]!r}")
    return replace(recipe, augment=tuple(slots))


def start_run(
    choice: RecipeChoice, out: str | os.PathLike[str] | None, machine: Machine, connected: Connected
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe from its first step, or resume it where torchrun restarted this process."""
    where = choice.data.where
    named = choice.given.name if choice.given else choice.name
    directory = choose_directory(where, named) if out is None else Path(out)
    for tracker in connected["trackers"]:
        import_tracker(tracker)  # fails before anything else is done
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need the same run directory: give out=RUN")
    with join_process_group(machine.device, machine.parallel) as team:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun, after a failure
        if restarted and (directory / "recipe.json").is_file():
            return resume_run(directory, machine, team, connected, source=choice.source, augment=choice.augment)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: give the name of a directory as out=")
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(
                f"{directory} is not empty: give another name as out=, or use vitrail.resume({str(directory)!r})"
            )
        prepared = prepare_on_all(team, choice.data, connected["progress"], choice.source)
        recipe, facts = choice.choose(prepared, machine, team)
        check_labels(recipe)
        classes, present = recipe.model.classes, len(prepared.labels)
        if classes is not None and classes != present:
            counts = f"the recipe is for {classes} classes and {where} has {present}"
            raise ValueError(f"{counts}: settings=['model.classes={present}'], or use a named recipe")
        functions = list_functions(choice.augment)
        setup = RunSetup(recipe, prepared, directory, machine, team, facts.chosen, **connected, functions=functions)
        setup.check_functions()
        for line in describe_run(recipe, prepared, facts, directory):
            setup.note(line)
        return write_run_report(setup, Run(setup).start())


def resume(
    directory: str | os.PathLike[str],
    *,
    data: Any = None,
    device: str | None = None,
    workers: int | None = None,
    changes: Mapping[str, Any] | None = None,
    accept_changes: bool = False,
    augment: Augment | None = None,
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Resume a run that was stopped or killed; the weights are those of an uninterrupted run.

    A run on a Python object needs the same object as `data`, one with functions as augmentation needs them in `augment`. The
    machine's settings are those of the start; `device`, `workers` and `changes` replace some of them: {"compile": True}. A
    recipe.json that was edited since is refused; `accept_changes` continues with it.
    """
    directory = Path(directory)
    for tracker in trackers:
        import_tracker(tracker)
    if not (directory / "recipe.json").is_file():
        raise ValueError(f"{directory} is not a run directory: it has no recipe.json")
    machine = dataclass_from_json(read_run_record(directory)["machine"], Machine, f"{directory / 'run.json'}: machine")
    machine = change_machine(replace(machine, **(changes or {})), device, workers)
    with join_process_group(machine.device, machine.parallel) as team:
        connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
        return resume_run(directory, machine, team, connected, accept_changes, data, augment)


def resume_run(
    directory: Path,
    machine: Machine,
    team: Team,
    connected: Connected,
    accept_changes: bool = False,
    source: Any = None,
    augment: Augment | None = None,
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
    if (source is None) == recipe.data.where.startswith(PREFIX):
        started = f"{directory} was started on {recipe.data.where}"
        needs = "give the same Python object, vitrail.resume(RUN, data=OBJECT)" if source is None else "leave out data"
        raise ValueError(f"{started}: {needs}")
    functions = list_functions(augment)
    bind_transforms(recipe.augment, functions)  # raises before the data is read
    prepared = prepare_on_all(team, recipe.data, connected["progress"], source)
    setup = RunSetup(recipe, prepared, directory, machine, team, **connected, functions=functions)
    setup.check_functions()
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
        raise ValueError(f"the recipe {name} builds its own model: leave out init=, or use recipe='finetune'")
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
        raise ValueError(f"the recipe {name} does not use {unused[0]}=: leave it out, or use settings=")
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
            raise ValueError(f"{'distil=' if distil else 'teacher_cache='} needs a teacher: give teacher=MODEL")
        return None
    if teacher is not None:
        teacher = expand_name(teacher)
        with inspect_checkpoint(find_weights(teacher)):
            settings = replace(settings, where=teacher) if settings is not None else Teacher(teacher)
    assert settings is not None
    return replace(settings, cached=cache or settings.cached)


def prepare_on_all(team: Team, data: Data, progress: ProgressCallback | None, source: Any = None) -> Prepared:
    """Return the prepared data on every process: the audit of the main one fills the cache that the others read."""
    prepared = problem = None
    if team.is_main:
        try:
            prepared = prepare_data(data, progress, source=source)
        except (ValueError, OSError) as error:
            problem = error
    failed = team.broadcast_object(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise SystemExit(2)  # the main process reports the error
    return prepared or prepare_data(data, source=source)


def check_labels(recipe: Recipe) -> None:
    """Raise ValueError where objective, model and data do not agree on whether labels are learnt."""
    objective, classes, unlabelled = recipe.objective, recipe.model.classes, recipe.data.task == "none"
    name = type(objective).__name__
    if objective.label_use == "none":
        if classes is not None:
            raise ValueError(f"{name} trains without labels, a model without classes: use vitrail.pretrain")
        if recipe.teacher is not None:
            raise ValueError(f"{name} uses no teacher: settings=['teacher=none'], or use method='features'")
    elif classes is None and objective.label_use == "required":
        raise ValueError(f"{name} learns labels, the model has no classes: set model.classes, or use vitrail.pretrain")
    elif classes is None and not unlabelled:
        raise ValueError(f"the model has no classes to learn: use vitrail.pretrain with method={objective.method!r}")
    elif classes is not None and unlabelled:
        raise ValueError(f"{name} with {classes} classes learns labels: use vitrail.train")


def choose_directory(where: str, kind: str) -> Path:
    """Return a run directory that does not exist yet, such as runs/photos-finetune-1."""
    name = Path(where).resolve().name if Path(where).exists() else where.removeprefix(PREFIX)
    data = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"
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
