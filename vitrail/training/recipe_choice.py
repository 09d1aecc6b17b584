"""The recipe of a run: a name or a given recipe, the user's changes of it, and the data that it adapts to."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vitrail.checkpoints.known_models import expand_name
from vitrail.checkpoints.load import find_weights, inspect_checkpoint
from vitrail.data.clip import parse_clip
from vitrail.data.dataset import Media
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.remote.urls import has_credentials, redact
from vitrail.data.sources.objects import describe_object
from vitrail.data.transforms.augment import AugmentSlot
from vitrail.data.transforms.pipeline import CROP_TYPES
from vitrail.data.transforms.user import UserFunction, describe_transform, list_functions
from vitrail.models.base import image_sides
from vitrail.models.sizes import closest
from vitrail.tasks import Task
from vitrail.training.budget import fit_recipe
from vitrail.training.distributed import Team
from vitrail.training.precision import choose_training_precision
from vitrail.training.recipe import Data, Facts, Machine, Recipe, Teacher, read_recipe, with_settings
from vitrail.training.recipes import METHODS, build_recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.teaching import with_teacher
from vitrail.training.runs.validation import describe_validation, limit_validation
from vitrail.utils.precision import PrecisionChoice, check_precision

RECIPE_OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size")  # of named recipes
SPECIFIC_OVERRIDES = ("width", "depth", "patch_dropout", "decoder", "distil", "clip", "objective")  # of some of them
COMMON_OVERRIDES = ("seed", "tune", "precision")  # of all recipes
Augment = UserFunction | AugmentSlot | Sequence[UserFunction | AugmentSlot]
FROM_CHECKPOINT = ("finetune", "self-training", "paper-finetune", "segment", "regress", "contrastive", *METHODS)
WITH_CAPTIONS = "contrastive"  # the recipe of captions, and of models with a text tower


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
    by_default: bool = False  # whether the name was not given, so that the data may ask for another recipe
    init_image: str | None = None  # checkpoint of the image tower
    tokenizer: str | None = None

    def for_data(self, task: Task, media: Media) -> "RecipeChoice":
        """Return the choice for data of this task, of images, videos or sounds: its own recipe, unless one was given."""
        if not self.by_default or self.given is not None:
            return self
        from_scratch = media != "image" and self.init is None and (media == "video" or self.teacher is None)
        name = task.recipe or (media if from_scratch else None)
        return self if name is None else replace(self, name=name)

    def __post_init__(self) -> None:
        if self.init is not None:  # the recipe records the address, not the name
            object.__setattr__(self, "init", expand_name(self.init))
        if self.init_image is not None:
            object.__setattr__(self, "init_image", expand_name(self.init_image))
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
            given = self.given
            init_image = self.init_image or (None if self.init else given.init_image)
            init = self.init or (None if self.init_image else given.init)
            tokenizer = self.tokenizer or given.tokenizer
            recipe = replace(given, data=self.data, init=init, init_image=init_image, tokenizer=tokenizer)
        else:
            asked, facts.teacher = {k: value for k, value in self.overrides.items() if value is not None}, self.teacher
            asked |= {"size": image_sides(asked["size"])} if "size" in asked else {}
            asked |= {"clip": parse_clip(asked["clip"])} if isinstance(asked.get("clip"), str) else {}
            asked |= {"distil": self.distil} if self.distil and self.name == "distil" else {}
            recipe = build_named_recipe(self.name, facts, self.data, self.init, asked, self.init_image)
            recipe = replace(recipe, init_image=self.init_image, tokenizer=self.tokenizer)
        recipe = replace(recipe, objective=recipe.objective.fit_targets(facts.target_mean, facts.target_std))
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


def build_named_recipe(
    name: str | None,
    facts: Facts,
    data: Data,
    init: str | None,
    overrides: dict[str, Any],
    init_image: str | None = None,
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
    if init_image is not None and name != WITH_CAPTIONS:
        raise ValueError(f"init_image= is for pairs of images and captions, not for the recipe {name}: use init=")
    if (checkpoint_path := init or init_image) is not None:
        with inspect_checkpoint(checkpoint_path, towers=init is not None and name == WITH_CAPTIONS) as checkpoint:
            facts.init = checkpoint.contract.config if init is not None else None
            facts.init_image = checkpoint.contract.config if init is None else None
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


def check_text_tower(init: str) -> None:
    """Raise ValueError if a checkpoint that can be read has no text tower."""
    try:
        with inspect_checkpoint(init, towers=True):
            return
    except ValueError as error:
        try:
            with inspect_checkpoint(init):
                pass
        except ValueError:
            raise error from None
    raise ValueError(f"{init} has no text tower: give it as init_image=, and a new text tower is trained")


def read_given(recipe: str | os.PathLike[str] | Recipe | None) -> Recipe | None:
    """Return the recipe of a caller that gives one, as a value or as a file."""
    return recipe if recipe is None or isinstance(recipe, Recipe) else read_recipe(Path(recipe))


def find_data(data: Any, given: Recipe | None, fields: Mapping[str, Any]) -> tuple[Data, Any]:
    """Return the data of a run with the fields that are not None, and what is not recorded: a Python object, an address.

    Without data, it is that of the recipe.
    """
    if data is None and given is None:
        raise ValueError("no data: give a folder, a file, a name such as 'digits', or a Python object")
    is_named = data is None or isinstance(data, Data | str | os.PathLike)
    where: Any = (data if given is None or data is not None else given.data) if is_named else describe_object(data)
    found = where if isinstance(where, Data) else Data(os.fspath(where))
    address = found.where if has_credentials(found.where) else None  # read with its credentials, recorded without
    found = replace(found, where=redact(found.where))
    return replace(
        found, **{name: value for name, value in fields.items() if value is not None}
    ), address if is_named else data


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
