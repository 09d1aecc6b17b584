"""Fit a recipe to a time budget: measure a few steps, then choose the number of steps and of validations.

The choice becomes part of the recipe, so a resumed run measures nothing and computes the same numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from vitrail.data.transforms.user import UserFunction
from vitrail.training.distributed import Team
from vitrail.training.recipe import Facts, Machine, Recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.validation import ValidationCost, count_passes, limit_validation
from vitrail.training.step_time import StepTime, measure_on_team

Build = Callable[[Mapping[str, Any]], tuple[Recipe, Facts]]  # a recipe for these overrides, and the choices made
FINISH_SECONDS = 2.0  # report, thumbnails, end of the process
MIN_STEPS = 5
MEASURING_SHARE, MIN_SECONDS, MAX_SECONDS = 0.05, 2.0, 20.0  # of the budget, for measuring


def fit_recipe(
    build: Build,
    prepared: Prepared,
    machine: Machine,
    team: Team,
    deadline: float,
    fixed: frozenset[str],
    functions: Sequence[UserFunction],
) -> tuple[Recipe, Facts]:
    """Return the recipe whose run ends at about the deadline, a value of `time.monotonic()`, with its choices.

    It is never longer than the recipe's own length. A recipe may adapt to few steps; where that changes what a step
    computes, it is measured again.
    """
    recipe, facts = build({})
    for _ in range(2):
        left = team.broadcast_object(deadline - time.monotonic())
        seconds = min(MAX_SECONDS, max(MIN_SECONDS, MEASURING_SHARE * left))
        pace = measure_on_team(recipe, prepared, machine, team, seconds, functions)
        left = team.broadcast_object(deadline - time.monotonic())
        measured = recipe
        recipe, facts = choose_steps(build, prepared, pace, left, fixed)
        if has_same_steps(recipe, measured):
            break
    return recipe, facts


def choose_steps(
    build: Build, prepared: Prepared, pace: StepTime, seconds: float, fixed: frozenset[str]
) -> tuple[Recipe, Facts]:
    """Return the recipe for the steps that fit into so many seconds, by measured times."""
    own, _ = build({})
    most, batch = own.total_steps(pace.steps_per_epoch), min(own.batch_size, len(prepared.train))
    passes = pace.step / batch / pace.image  # cost of a training image

    def plan(steps: int) -> tuple[Recipe, Facts, float]:
        """Return the recipe for so many steps, and the seconds of its validations."""
        recipe, facts = build({"steps": steps})
        recipe = limit_validation(recipe, prepared, fixed, passes)
        every = max(1, round(recipe.validate_every * pace.steps_per_epoch))
        cost: ValidationCost = count_passes(recipe, prepared)
        return recipe, facts, ceil(steps / every) * (cost.validation * pace.image + pace.save) + cost.begin * pace.image

    ending = count_passes(own, prepared).ending * pace.image + pace.save + FINISH_SECONDS
    available = seconds - pace.startup - ending
    _, _, validation = plan(max(1, min(most, int(0.9 * available / pace.step))))
    steps = min(most, int((available - validation) / pace.step))
    least = min(most, MIN_STEPS)
    if steps < least:
        needed = (pace.startup + ending + validation + least * pace.step - seconds) / 60
        raise ValueError(
            f"minutes= is too short for {least} steps of {pace.step:.2g} s with start and evaluation: "
            f"give at least {max(0.1, needed):.1f} minutes more"
        )
    recipe, facts, validation = plan(steps)
    whole = f"all of the recipe's {most:,}" if steps == most else f"of the recipe's {most:,}"
    parts = f"start {pace.startup:.0f} s, validation {validation:.0f} s, end {ending:.0f} s"
    why = f"{whole}, {pace.step:.2g} s each, in the {seconds:.0f} s that are left ({parts})"
    facts.chosen[:] = [f"steps {steps:,}: {why}" if line.startswith("steps ") else line for line in facts.chosen]
    return recipe, facts


def has_same_steps(recipe: Recipe, other: Recipe) -> bool:
    """Return whether a step of two recipes computes the same amount: all but their length, schedule and validation."""
    same = {name: getattr(other, name) for name in ("epochs", "steps", "schedule", "ema", "optimizer")}
    same |= {name: getattr(other, name) for name in ("validate_every", "validation_images")}
    objectives = recipe.objective.kept_patches == other.objective.kept_patches
    return objectives and replace(recipe, **same, objective=other.objective) == other
