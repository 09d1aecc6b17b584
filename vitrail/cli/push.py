"""A model to the Hugging Face Hub, as vitrail's artifact with a generated model card.

The token is the one that `hf auth login` stored, or HF_TOKEN. Needs huggingface_hub: pip install 'vitrail[hub]'.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vitrail.cli import reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to push, and where to."""
    parser.epilog = "example:\n  vitrail push model.safetensors me/my-vit --licence apache-2.0 --private\n"
    parser.add_argument("source", metavar="FILE", help="a checkpoint of any form")
    parser.add_argument("repo", metavar="OWNER/NAME", help="on the Hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="if it is made, for you alone")
    parser.add_argument("--licence", metavar="TEXT", help="for the card, as the Hub spells it: apache-2.0")
    parser.add_argument(
        "--about", type=Path, metavar="FILE", help="JSON for the card: data, recipe, metrics, provenance"
    )
    parser.add_argument("--message", metavar="TEXT", help="of the commit")
    parser.add_argument("--json", action="store_true", help="the address for machines")
    reading.add_arguments(parser.add_argument_group("how it is read"))


def run(options: argparse.Namespace) -> int:
    """Pushes, and prints the address."""
    from vitrail.checkpoints.push import push

    about: dict[str, Any] = {}
    if options.about:
        try:
            about = json.loads(options.about.read_text(encoding="utf-8-sig"))
            unknown = set(about) - {"data", "recipe", "metrics", "provenance", "licence"}
        except (ValueError, RecursionError, TypeError) as error:
            raise ValueError(f"{options.about}: not readable as JSON ({error})") from None
        if unknown or not isinstance(about, dict):
            raise ValueError(f"{options.about}: a card has data, recipe, metrics, provenance and licence")
    if options.licence:
        about["licence"] = options.licence
    where = push(
        options.source,
        options.repo,
        private=options.private,
        message=options.message,
        assume=reading.assumed(options),
        take=options.take,
        **about,
    )
    print(json.dumps({"url": where}) if options.json else where)
    return 0
