"""Named recipes: each is a module with expected results in its docstring and a function `recipe(facts, data)`."""

import ast
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING

from vitrail.models.sizes import closest

if TYPE_CHECKING:
    from vitrail.training.recipe import Data, Facts, Recipe

NAMES = (
    "scratch-small",
    "finetune",
    "distil",
    "segment",
    "regress",
    "self-training",
    "contrastive",
    "video",
    "sound",
    "paper-imagenet",
    "paper-finetune",
    "plain-s16",
    "augreg",
    "deit",
    "deit3",
    "swin",
    "swin-finetune",
    "mvit",
)

METHODS = ("mpp", "mae", "videomae", "dino", "features")  # pretraining without labels: `vitrail pretrain --method`
CONTRASTIVE_OBJECTIVES = ("clip", "siglip")  # of pairs of images and captions: `vitrail train --objective`
DISTILLATION_METHODS = ("hard", "soft", "features", "tokens")  # with a teacher: `vitrail train --distil`


def check_name(name: str, names: tuple[str, ...] = NAMES) -> None:
    """Raise ValueError for an unknown name, with the closest known one."""
    if name in METHODS and names is NAMES:
        raise ValueError(f"{name} trains without labels: use vitrail.pretrain with method={name!r}")
    if name not in names:
        raise ValueError(f"unknown recipe {name!r}: {closest(name, list(names))}; or a recipe.json")


def describe_recipe(name: str) -> tuple[str, str]:
    """Return the first line and the whole docstring of a recipe. Parsed, not imported: listing recipes needs no PyTorch."""
    check_name(name, (*NAMES, *METHODS))
    source = (files(__name__) / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return text.splitlines()[0], text


def build_recipe(name: str, facts: "Facts", data: "Data") -> "Recipe":
    """Return a named recipe for this data."""
    check_name(name, (*NAMES, *METHODS))
    return import_module(f"vitrail.training.recipes.{name.replace('-', '_')}").recipe(facts, data)
