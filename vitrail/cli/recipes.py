"""List the training recipes with their expected results.

`vitrail recipes NAME` shows one in full; `vitrail train DATA --recipe NAME` runs it. `vitrail pretrain DATA --method NAME`
runs the methods without labels (mpp, mae, dino, features).
"""

import argparse
import textwrap

from vitrail.cli.options import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail recipes`."""
    parser.epilog = "examples:\n  vitrail recipes\n  vitrail recipes finetune\n"
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe to show in full [list all]")
    parser.add_argument("--json", action="store_true", help="print the recipes as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe."""
    from vitrail.training.recipes import METHODS, NAMES, describe_recipe

    names = [options.name] if options.name else [*NAMES, *METHODS]
    if options.json:
        print_json([{"name": name, "text": describe_recipe(name)[1]} for name in names])
    elif options.name:
        print(describe_recipe(options.name)[1])
    else:
        for name in names:
            line, text = describe_recipe(name)
            expected = " ".join(text[text.index("Expected") :].split())
            print(f"{name:<16}{line}")
            print(textwrap.fill(expected, 110, initial_indent=" " * 16, subsequent_indent=" " * 16), end="\n\n")
    return 0
