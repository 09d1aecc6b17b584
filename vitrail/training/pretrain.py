"""`vitrail.pretrain`: from images without labels to a finished run directory with a model of good features."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.objectives.registry import PRETRAINING
from vitrail.training.distributed import Team
from vitrail.training.logging import Listener
from vitrail.training.recipe import Data, Facts, Machine, Recipe, method_of, read_recipe
from vitrail.training.recipes import METHODS
from vitrail.training.runs.prepare import Prepared
from vitrail.training.train import (
    Progress,
    build_named_recipe,
    choose_directory,
    choose_precision,
    choose_teacher,
    refuse_overrides,
    start_run,
)


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
    machine: Machine = Machine(),  # noqa: B008
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Train a model without labels; return the run directory and its summary.

    `method` is mpp (masked patch prediction), mae, dino or features; `init` the initial checkpoint; `recipe` a recipe.json
    or a Recipe instead of a method. `teacher` is the trained model whose features are learnt; with `teacher_cache` they are
    computed once for each image. Everything else is as for `vitrail.train`; `vitrail.resume` resumes it.
    """
    given = recipe if isinstance(recipe, Recipe) else read_recipe(Path(recipe)) if recipe is not None else None
    if given is not None and method_of(given) is None:
        raise ValueError(f"the recipe {given.name} learns labels: use vitrail train")
    if data is None and given is None:
        raise ValueError("no data: give a folder, a file or a name, such as vitrail pretrain photos --method dino")
    if given is None and method is None:
        raise ValueError(f"no method: give --method {', --method '.join(METHODS[:-1])} or --method {METHODS[-1]}")
    if method is not None and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    if method is not None and given is not None:
        raise ValueError("a recipe file has a method already: leave out --method")
    how = str(method if given is None else method_of(given))
    uses_teacher = PRETRAINING[how].teacher_output is not None
    if not uses_teacher and (teacher or teacher_cache):
        option = "--teacher" if teacher else "--teacher-cache"
        raise ValueError(f"--method {how} uses no teacher: leave out {option}, or use --method features")
    if uses_teacher and teacher is None and given is None:
        raise ValueError(f"--method {how} needs a teacher: give --teacher MODEL, a trained model")
    settings_of_teacher = choose_teacher(teacher, None, teacher_cache, given)
    source = Data(data) if isinstance(data, str) else data if data is not None else given.data  # type: ignore[union-attr]
    source = replace(source, task="none")

    def choose(prepared: Prepared, facts: Facts, team: Team) -> Recipe:
        if given is not None:
            refuse_overrides(overrides)
            return replace(given, data=source, init=init or given.init, teacher=settings_of_teacher)
        asked, facts.teacher = dict(overrides or {}), settings_of_teacher
        return choose_precision(build_named_recipe(method, facts, source, init, asked), facts, team, asked)

    directory = out if out is not None else choose_directory(source.where, given.name if given else how)
    return start_run(source, directory, choose, out is not None, settings, machine, listeners, trackers, progress)
