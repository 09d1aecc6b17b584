"""Upload a model to the Hugging Face Hub, with a generated model card.

The token is the one that `hf auth login` stored, or HF_TOKEN. Needs huggingface_hub: pip install 'vitrail[hub]'.

examples:
  vitrail push model.safetensors me/my-vit --licence apache-2.0 --private
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vitrail.cli.options import CommandParser, parse_assumptions, print_result

CARD_FIELDS = ("data", "recipe", "metrics", "provenance", "licence")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail push`."""
    parser.add_argument("source", metavar="FILE", help="checkpoint of any known format")
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository on the Hub, created if absent")
    parser.add_option("--private", "create the repository as private")
    parser.add_shared("--licence TEXT")
    parser.add_option("--about FILE", "JSON file for the card: data, recipe, metrics, provenance", Path)
    parser.add_option("--message TEXT", "commit message")
    parser.add_shared("--json")
    parser.add_checkpoint_options()


def run(options: argparse.Namespace) -> int:
    """Upload the model and print its URL."""
    from vitrail.checkpoints.card import push

    about: dict[str, Any] = {}
    if options.about:
        try:
            about = json.loads(options.about.read_text(encoding="utf-8-sig"))
            unknown = set(about) - set(CARD_FIELDS)
        except (ValueError, RecursionError, TypeError) as error:
            raise ValueError(f"{options.about}: not readable as JSON ({error})") from None
        if unknown or not isinstance(about, dict):
            raise ValueError(f"{options.about} must be a JSON object with the fields {', '.join(CARD_FIELDS)}")
    if options.licence:
        about["licence"] = options.licence
    url = push(
        options.source,
        options.repo,
        private=options.private,
        message=options.message,
        assume=parse_assumptions(options),
        take=options.take,
        **about,
    )
    return print_result(options, {"url": url}, [url])
