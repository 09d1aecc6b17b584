"""`vitrail.pretrain`: pictures without labels in, a finished run directory with a model of good features out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.engine.distributed import Team
from vitrail.engine.journal import Listener
from vitrail.recipe import FEATURES, Data, Facts, Machine, Recipe, method_of, read_recipe
from vitrail.recipes import METHODS
from vitrail.run.prepare import Prepared
from vitrail.training import Progress, begin, check_finished, named, suited, unused, wanted


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
    wishes: Mapping[str, Any] | None = None,
    machine: Machine = Machine(),  # noqa: B008 (a value)
    listeners: tuple[Listener, ...] = (),
    trackers: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Learns from pictures alone, and gives the run directory and its summary.

    `method` is mpp (masked patch prediction), mae, dino or features; `init` a checkpoint to begin with; `recipe` a recipe.json
    or a Recipe instead of a method. `teacher` is the trained model whose features are learnt, and with `teacher_cache` it is
    asked once about each picture. Everything else is as for `vitrail.train`; `vitrail.resume` goes on with it.
    """
    given = recipe if isinstance(recipe, Recipe) else read_recipe(Path(recipe)) if recipe is not None else None
    if given is not None and method_of(given) is None:
        raise ValueError(f"the recipe {given.name} learns labels: use vitrail train")
    if data is None and given is None:
        raise ValueError("what to learn from? Give a folder, a file or a name: vitrail pretrain photos --method dino")
    if given is None and method is None:
        raise ValueError(f"how to learn? Give --method {', --method '.join(METHODS[:-1])} or --method {METHODS[-1]}")
    if method is not None and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    if method is not None and given is not None:
        raise ValueError("a finished recipe has its method already: leave out --method")
    how = method if given is None else method_of(given)
    if how != FEATURES and (teacher or teacher_cache):
        option = "--teacher" if teacher else "--teacher-cache"
        raise ValueError(f"{option} is for --method {FEATURES}: {how} learns from pictures alone, leave it out")
    if how == FEATURES and teacher is None and given is None:
        raise ValueError(f"--method {FEATURES} learns a teacher's features: give --teacher MODEL, a trained model")
    taught = wanted(teacher, None, teacher_cache, given)
    source = Data(data) if isinstance(data, str) else data if data is not None else given.data  # type: ignore[union-attr]
    source = replace(source, task="none")

    def choose(prepared: Prepared, facts: Facts, team: Team) -> Recipe:
        if given is not None:
            check_finished(wishes)
            return replace(given, data=source, init=init or given.init, teacher=taught)
        asked, facts.teacher = dict(wishes or {}), taught
        return suited(named(method, facts, source, init, asked), facts, team, asked)

    place = out if out is not None else unused(source.where, given.name if given else str(method))
    return begin(source, place, choose, out is not None, settings, machine, listeners, trackers, progress)
