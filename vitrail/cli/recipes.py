"""List the training recipes with their expected results.

`vitrail recipes NAME` shows one in full; `vitrail train DATA --recipe NAME` runs it. `vitrail pretrain DATA --method NAME`
runs the methods without labels (mpp, mae, dino, features).

examples:
  vitrail recipes
  vitrail recipes finetune
"""

import argparse
import textwrap

from vitrail.cli.options import CommandParser, print_result


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail recipes`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe to show in full [list all]")
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe."""
    from vitrail.training.recipes import METHODS, NAMES, describe_recipe

    names = [options.name] if options.name else [*NAMES, *METHODS]
    recipes = {name: describe_recipe(name) for name in names}
    lines = [text if options.name else format_recipe(name, line, text) for name, (line, text) in recipes.items()]
    return print_result(options, [{"name": name, "text": text} for name, (_, text) in recipes.items()], lines)


def format_recipe(name: str, line: str, text: str) -> str:
    """Return the first line of a recipe's description and its expected results."""
    expected = " ".join(text[text.index("Expected") :].split())
    wrapped = textwrap.fill(expected, 110, initial_indent=" " * 16, subsequent_indent=" " * 16)
    return f"{name:<16}{line}\n{wrapped}\n"
