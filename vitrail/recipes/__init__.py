"""Named recipes: each a module with what to expect in its docstring, and a function of the facts of the data."""

import ast
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING

from vitrail.models.sizes import closest

if TYPE_CHECKING:
    from vitrail.recipe import Data, Facts, Recipe

NAMES = (
    "scratch-small",
    "finetune",
    "distil",
    "paper-imagenet",
    "paper-finetune",
    "plain-s16",
    "augreg",
    "deit",
    "deit3",
)

METHODS = ("mpp", "mae", "dino", "features")  # without labels: `vitrail pretrain --method`


def check_name(name: str, names: tuple[str, ...] = NAMES) -> None:
    """Refuses a name that is none of them, with the closest."""
    if name in METHODS and names is NAMES:
        raise ValueError(f"{name} learns without labels: vitrail pretrain DATA --method {name}")
    if name not in names:
        raise ValueError(f"unknown recipe {name!r}: {closest(name, list(names))}; or a recipe.json")


def described(name: str) -> tuple[str, str]:
    """What a recipe is in a line, and all that its page says. Read, not imported: listing recipes needs no PyTorch."""
    check_name(name, (*NAMES, *METHODS))
    source = (files(__name__) / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return text.splitlines()[0], text


def made(name: str, facts: "Facts", data: "Data") -> "Recipe":
    """A named recipe for this data."""
    check_name(name, (*NAMES, *METHODS))
    return import_module(f"vitrail.recipes.{name.replace('-', '_')}").recipe(facts, data)
