"""Options that every command shares which reads a checkpoint."""

import argparse
from typing import Any

ASSUME = (
    "what tensors do not tell, again and again: heads=6, gelu=exact|tanh|quick, eps=1e-6, size=224x224, pool=class|mean, "
    "channels=3; of the preprocessing: mean=imagenet|half|clip|R,G,B, std=R,G,B, crop=0.9, fit=cover|squash, "
    "interpolation=bicubic"
)


def add_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """--assume and --take."""
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help=ASSUME)
    parser.add_argument("--take", metavar="NAME", help="one of several models in a .pth: teacher, student, model_ema…")


def assumed(options: argparse.Namespace) -> dict[str, Any]:
    """--assume as a table."""
    found: dict[str, Any] = {}
    for item in options.assume:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"--assume {item}: write it as NAME=VALUE, heads=6 for example")
        found[name] = value
    return found


def add_missing(parser: argparse.ArgumentParser) -> None:
    """--allow-missing."""
    parser.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="PATTERN",
        help="make these tensors at random if they are missing ('blocks.11.*'); they are all named then",
    )
