"""`vitrail.train`, `vitrail.pretrain` and `vitrail.resume`: from data to a finished run directory."""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from vitrail.data.clip import Clip, describe_samples
from vitrail.data.dataset import Images
from vitrail.data.remote.urls import RemoteError, is_redacted, redact
from vitrail.data.sources.file_names import preview_labels
from vitrail.data.sources.objects import PREFIX
from vitrail.data.transforms.user import bind_transforms, list_functions
from vitrail.objectives.registry import CONTRASTIVE, PRETRAINING
from vitrail.reports.page import write_report
from vitrail.tasks import Task, task_of
from vitrail.training.distributed import Team, count_processes, join_process_group
from vitrail.training.logging import Listener, import_tracker
from vitrail.training.recipe import Data, Facts, Machine, Recipe, method_of, read_recipe
from vitrail.training.recipe_choice import (
    WITH_CAPTIONS,
    Augment,
    RecipeChoice,
    check_text_tower,
    choose_teacher,
    find_data,
    read_given,
)
from vitrail.training.recipes import METHODS, check_name
from vitrail.training.runs.captions import read_run_tokenizer, tokenizer_on_all, with_tokenizer
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import check_recipe, read_run_record, read_summary
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunSetup
from vitrail.utils.json import dataclass_from_json
from vitrail.utils.progress import ProgressCallback


class Connected(TypedDict):
    """Receivers of what a run reports: functions, external trackers, and a display of progress."""

    listeners: tuple[Listener, ...]
    trackers: tuple[str, ...]
    progress: ProgressCallback | None


def train(
    data: Any = None,
    *,
    objective: Literal["clip", "siglip"] | None = None,
    init: str | os.PathLike[str] | None = None,
    init_image: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    distil: str | None = None,
    teacher_cache: bool = False,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    model: str | None = None,
    size: int | tuple[int, int] | None = None,
    clip: str | Clip | None = None,
    width: int | None = None,
    depth: int | None = None,
    patch_dropout: float | None = None,
    decoder: str | None = None,
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
    task: Literal["auto", "single", "multi", "captions"] | None = None,
    balance: Literal["none", "weights", "sampling"] | None = None,
    per_class: int | None = None,
    allow_class_mismatch: bool | None = None,
    quarantine: str | os.PathLike[str] | None = None,
    label_from: str | None = None,
    names: str | os.PathLike[str] | None = None,
    ignore: tuple[int, ...] | None = None,
    targets: str | Sequence[str] | None = None,
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
    `balance`, `per_class`, `allow_class_mismatch`, `quarantine`, `label_from`, `names`, `ignore` and `targets` are fields of
    `Data`.

    `init` is the initial checkpoint, a path or a name of `vitrail models`; `recipe` a name, a recipe.json or a Recipe (by
    default `finetune` with a checkpoint, `distil` with a teacher, otherwise `scratch-small`, for videos `video`). `teacher` is a
    trained model to learn from, `distil` how (hard, soft, features, tokens); with `teacher_cache` its outputs are computed once
    for each image.
    Images with masks get the recipe `segment`, with a `decoder` (linear, linear-4, upernet, eomt) on the model. `targets` are
    columns of numbers to learn, in place of labels, with the recipe `regress`.
    Tables with captions get the recipe `contrastive`, which trains two towers like CLIP or, with `objective="siglip"`, SigLIP;
    a given `objective` reads captions also where there are labels. `init_image` is a checkpoint of the image tower, which
    tune="text" locks; `tokenizer` is a file or directory (by default that of `init`, or one learnt from the captions).
    A named recipe adapts to `model` ("S/16") or `width`, `depth` and `patch_dropout`, to `size`, to `clip` ("16x4": frames of
    a clip and the step between them, for videos), `tune` ("head", "lora"),
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
    fields |= {"label_from": label_from, "names": optional_path(names), "ignore": ignore}
    fields |= {"targets": (targets,) if isinstance(targets, str) else None if targets is None else tuple(targets)}
    if objective is not None:
        check_contrastive(objective, name, data.task if isinstance(data, Data) and task is None else task)
        fields["task"] = "captions"
    source = find_data(data, given, fields)
    if source[0].targets and (teacher or distil):
        option = "teacher=" if teacher else "distil="
        raise ValueError(f"{option} teaches classes, and targets= are numbers: leave out one of them")
    taught = choose_teacher(optional_path(teacher), distil, teacher_cache, given)
    default = "finetune" if init else "distil" if taught else "scratch-small"
    overrides = {"model": model, "size": size, "tune": tune, "epochs": epochs, "steps": steps, "batch_size": batch_size}
    overrides |= {"lr": lr, "precision": precision, "seed": seed, "clip": clip}
    overrides |= {"width": width, "depth": depth, "patch_dropout": patch_dropout, "decoder": decoder}
    overrides |= {"objective": objective}
    settings = [*settings, *([f"patience={patience}"] if patience is not None else [])]
    choice = RecipeChoice(
        name or default,
        given,
        *source,
        optional_path(init),
        taught,
        distil,
        overrides,
        settings,
        augment,
        set_deadline(minutes),
        by_default=name is None,
        init_image=optional_path(init_image),
        tokenizer=optional_path(tokenizer),
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
    clip: str | Clip | None = None,
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

    `data` is as for `vitrail.train`; it may be images without labels. `method` is mpp (masked patch prediction), mae, videomae
    (of videos, with `clip`), dino or features; `init` the initial checkpoint; `recipe` a recipe.json or a Recipe instead of a
    method. `teacher` is the trained model whose features are learnt; with `teacher_cache` they are computed once for each image.
    Everything else is as for `vitrail.train`; `vitrail.resume` resumes it.
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
    overrides |= {"precision": precision, "seed": seed, "clip": clip}
    settings = [*settings, *([f"patience={patience}"] if patience is not None else [])]
    choice = RecipeChoice(
        name, given, *source, optional_path(init), taught, None, overrides, settings, augment, set_deadline(minutes)
    )
    connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
    return start_run(choice, out, change_machine(machine, device, workers), connected)


def check_contrastive(objective: str, recipe: str | None, task: str | None) -> None:
    """Raise ValueError for an unknown objective, or one that another recipe has."""
    if objective not in CONTRASTIVE:
        raise ValueError(f"unknown objective {objective!r}: use {' or '.join(CONTRASTIVE)}")
    if recipe not in (None, WITH_CAPTIONS):
        raise ValueError(f"objective={objective!r} is for captions, not for the recipe {recipe}: leave out one of them")
    if task not in (None, "auto", "captions"):
        raise ValueError(f"objective={objective!r} learns captions, task={task!r} classes: leave out one of them")


def optional_path(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text."""
    return None if path is None else os.fspath(path)


def change_machine(machine: Machine, device: str | None, workers: int | None) -> Machine:
    """Return the machine's settings with the device and workers that were given."""
    asked = {"device": device, "workers": workers}
    return replace(machine, **{name: value for name, value in asked.items() if value is not None})


def start_run(
    choice: RecipeChoice, out: str | os.PathLike[str] | None, machine: Machine, connected: Connected
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe from its first step, or resume it where torchrun restarted this process."""
    where = choice.data.where
    directory = None if out is None else Path(out)  # the default's name depends on the data
    for tracker in connected["trackers"]:
        import_tracker(tracker)  # fails before anything else is done
    if out is None and count_processes() > 1:
        raise ValueError("several processes need the same run directory: give out=RUN")
    with join_process_group(**machine.group()) as team:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun, after a failure
        if directory is not None and agree_to_resume(team, directory, restarted):
            return resume_run(directory, machine, team, connected, source=choice.source, augment=choice.augment)
        if directory is not None and directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: give the name of a directory as out=")
        if directory is not None and directory.is_dir() and any(directory.iterdir()):
            raise ValueError(
                f"{directory} is not empty: give another name as out=, or use vitrail.resume({str(directory)!r})"
            )
        prepared = prepare_on_all(team, choice.data, connected["progress"], choice.source)
        task = task_of(prepared.train)
        check_sampling(choice.data, task)
        task.check_splits(prepared.splits, where)
        choice = choice.for_data(task, prepared.train.media)
        if prepared.train.captions is not None:
            check_captions(choice)
            init = choice.init or (choice.given.init if choice.given is not None else None)
            path = choice.tokenizer or (choice.given.tokenizer if choice.given is not None else None)
            prepared = tokenizer_on_all(team, prepared, path, None if choice.init_image else init, choice.given)
        elif choice.tokenizer is not None:
            raise ValueError(f"tokenizer= is for captions, and {where} has {task.title}: leave it out")
        if directory is None:
            directory = choose_directory(where, choice.given.name if choice.given else choice.name)
        recipe, facts = choice.choose(prepared, machine, team)
        check_labels(recipe)
        check_task(recipe, task)
        check_recipe_media(recipe, prepared.train)
        classes, present = recipe.model.classes, len(prepared.labels)
        if classes is not None and classes != present:
            counts = f"the recipe is for {classes} {task.noun} and {where} has {present}"
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
    changed = {"shard_size": None, **changes} if changes and "parallel" in changes else changes or {}
    machine = change_machine(replace(machine, **changed), device, workers)
    with join_process_group(**machine.group()) as team:
        connected = Connected(listeners=listeners, trackers=trackers, progress=progress)
        agree_to_resume(team, directory, True)
        return resume_run(directory, machine, team, connected, accept_changes, data, augment)


def agree_to_resume(team: Team, directory: Path, resumes: bool) -> bool:
    """Return whether one of the processes resumes the run, and the main process sees it.

    After a failure of one host, torchrun starts the processes of the others again with their command, and a new torchrun on
    that host may have been given `--resume`.
    """
    (resumes,) = team.any_process(resumes)
    return resumes and team.broadcast_object((directory / "recipe.json").is_file())


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
    if is_redacted(recipe.data.where):
        if source is None or redact(source) != recipe.data.where:
            raise ValueError(
                f"{directory} was started on {recipe.data.where}: give this DATA again, with its credentials"
            )
    elif (source is None) == recipe.data.where.startswith(PREFIX):
        started = f"{directory} was started on {recipe.data.where}"
        needs = "give the same Python object, vitrail.resume(RUN, data=OBJECT)" if source is None else "leave out data"
        raise ValueError(f"{started}: {needs}")
    functions = list_functions(augment)
    bind_transforms(recipe.augment, functions)  # raises before the data is read
    prepared = prepare_on_all(team, recipe.data, connected["progress"], source)
    if prepared.train.captions is not None:
        prepared = with_tokenizer(prepared, read_run_tokenizer(directory))
    setup = RunSetup(recipe, prepared, directory, machine, team, **connected, functions=functions)
    setup.check_functions()
    task_of(prepared.train).check_splits(prepared.splits, recipe.data.where)
    for change in changes:
        setup.note(f"the recipe changed: {change}")
    return write_run_report(setup, Run(setup).resume())


def write_run_report(setup: RunSetup, summary: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Write the report of a finished run; return its directory and summary."""
    if setup.team.is_main:
        write_report(setup.directory)
    return setup.directory, summary


def set_deadline(minutes: float | None) -> float | None:
    """Return the time by `time.monotonic()` at which a run of so many minutes that starts now should end."""
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be > 0, got {minutes:g}")
    return time.monotonic() + 60 * minutes


def prepare_on_all(team: Team, data: Data, progress: ProgressCallback | None, source: Any = None) -> Prepared:
    """Return the prepared data on every process: the audit of the main one fills the cache that the others read."""
    prepared = problem = None
    if team.is_main:
        try:
            prepared = prepare_data(data, progress, source=source)
        except (ValueError, OSError, RemoteError) as error:
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
    elif not objective.learns_classes:
        if recipe.model.text_tower is None:
            raise ValueError(f"{name} learns captions, the model has no text tower: use recipe='contrastive'")
        if recipe.teacher is not None:
            raise ValueError(f"{name} uses no teacher: leave it out")
    elif classes is None and objective.label_use == "required":
        raise ValueError(f"{name} learns labels, the model has no classes: set model.classes, or use vitrail.pretrain")
    elif classes is None and not unlabelled:
        raise ValueError(f"the model has no classes to learn: use vitrail.pretrain with method={objective.method!r}")
    elif classes is not None and unlabelled:
        raise ValueError(f"{name} with {classes} classes learns labels: use vitrail.train")


def check_task(recipe: Recipe, task: Task) -> None:
    """Raise ValueError if the recipe learns another kind of target than the data has."""
    kinds = recipe.objective.target_kinds
    if recipe.objective.label_use == "none" or recipe.data.task == "none" or task.name in kinds:
        return
    remedy = f"use recipe={task.recipe!r}" if task.recipe else "use a recipe for classes, such as 'finetune'"
    raise ValueError(f"the recipe {recipe.name} does not learn {task.title}, which {recipe.data.where} has: {remedy}")


def check_captions(choice: RecipeChoice) -> None:
    """Raise ValueError if another recipe than that of captions was asked for, before a tokeniser is made."""
    if choice.given is None and choice.name != WITH_CAPTIONS:
        where = f"{choice.data.where} has captions"
        raise ValueError(f"the recipe {choice.name} does not learn captions, and {where}: use recipe='contrastive'")
    if choice.given is None and choice.init is not None:
        check_text_tower(choice.init)


def check_recipe_media(recipe: Recipe, images: Images) -> None:
    """Raise ValueError if the recipe's model takes clips and the data has images, or the other way round; likewise of sounds."""
    where, clip = recipe.data.where, recipe.preprocessing.clip
    if images.media == "sound" and recipe.preprocessing.sound is None:
        raise ValueError(
            f"{where} has sounds, and the recipe {recipe.name} trains no model of sounds: use recipe='sound'"
        )
    if images.media != "sound" and recipe.preprocessing.sound is not None:
        raise ValueError(f"{where} has {images.media}s, and the model takes sounds: give sounds")
    if images.media == "video" and clip is None:
        remedy = (
            "use recipe='video', or 'finetune' with init=" if method_of(recipe) is None else "use method='videomae'"
        )
        raise ValueError(f"{where} has videos, and the recipe {recipe.name} trains a model of images: {remedy}")
    if images.media != "video" and clip is not None:
        raise ValueError(f"{where} has images, and the model takes {describe_samples(clip.frames)}: give videos")


def check_sampling(data: Data, task: Task) -> None:
    """Raise ValueError if images are to be drawn by their class, and the task has no class of an image."""
    if data.balance == "sampling" and not task.has_image_classes:
        raise ValueError(f"balance='sampling' needs classes of images, {data.where} has {task.title}: use 'weights'")


def choose_directory(where: str, kind: str) -> Path:
    """Return a run directory that does not exist yet, such as runs/photos-finetune-1."""
    name = Path(where).resolve().name if Path(where).exists() else where.removeprefix(PREFIX)
    if "://" in name:  # the name of the shards, or of their folder
        path = re.sub(r"[?,].*", "", name.partition("://")[2])
        name = re.sub(r"[\d{}*.-]*(\.\w+)?$", "", path).rstrip("/").rpartition("/")[2]
    data = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"
    number = 1
    while (directory := Path("runs") / f"{data}-{kind}-{number}").exists():
        number += 1
    return directory


def describe_run(recipe: Recipe, prepared: Prepared, facts: Facts, directory: Path) -> list[str]:
    """Return lines that describe the data, the recipe and its choices."""
    parts = ", ".join(f"{len(p):,} {split}" for split, p in prepared.splits.items())
    classes = task_of(prepared.train).describe_targets(prepared.train) if recipe.data.task != "none" else ""
    classes = f"{classes or f'{len(prepared.labels)} classes'}; " if classes or prepared.labelled else ""
    lines = [f"{recipe.data.where}: {classes}{parts}"]
    lines += [f"  {note}" for note in (*prepared.dataset.notes, *prepared.warnings)]
    lines += [f"    {line}" for line in preview_labels(prepared.dataset)] if recipe.data.label_from else []
    lines += [f"  {line}" for line in prepared.audit.format_summary() if not line.startswith("note")]
    if prepared.skipped:
        lines.append(f"  {len(prepared.skipped)} bad files are left out; {directory / 'run.json'} lists them")
    lines.append(f"recipe {recipe.name}" + (f", starting from {recipe.init}" if recipe.init else ""))
    return lines + [f"  {reason}" for reason in facts.chosen] + [f"run directory {directory}"]
