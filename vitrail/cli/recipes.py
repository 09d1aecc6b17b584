"""The recipes that come with vitrail, and what to expect of each.

`vitrail recipes NAME` shows one in full; `vitrail train DATA --recipe NAME` runs it. Those without labels (mpp, mae,
dino) are run by `vitrail pretrain DATA --method NAME`.
"""

import argparse
import json
import textwrap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which one, if one."""
    parser.epilog = "examples:\n  vitrail recipes\n  vitrail recipes finetune\n"
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one in full")
    parser.add_argument("--json", action="store_true", help="the same for machines")


def run(options: argparse.Namespace) -> int:
    """Lists them, or shows one."""
    from vitrail.recipes import METHODS, NAMES, described

    names = [options.name] if options.name else [*NAMES, *METHODS]
    if options.json:
        print(json.dumps([{"name": name, "text": described(name)[1]} for name in names], indent=2, ensure_ascii=False))
    elif options.name:
        print(described(options.name)[1])
    else:
        for name in names:
            line, text = described(name)
            expected = " ".join(text[text.index("Expected") :].split())
            print(f"{name:<16}{line}")
            print(textwrap.fill(expected, 110, initial_indent=" " * 16, subsequent_indent=" " * 16), end="\n\n")
    return 0
