"""Options, parsers of option values and JSON output shared by several commands."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitrail import deploy

if TYPE_CHECKING:
    from vitrail.deploy.predict.predict import InferenceOptions

ArgumentParent = argparse.ArgumentParser | argparse._ArgumentGroup

RUNTIMES = ("auto", *deploy.RUNTIMES)
MODEL_HELP = (
    f"checkpoint file or directory, run, hf://owner/name, or exported file ({', '.join(deploy.RUNTIME_SUFFIXES)})"
)
ASSUME_HELP = (
    "value that the tensors do not determine (repeatable): heads=6, gelu=exact|tanh|quick, eps=1e-6, size=224x224, "
    "pool=class|mean, channels=3; preprocessing: mean=imagenet|half|clip|R,G,B, std=R,G,B, crop=0.9, fit=cover|squash, "
    "interpolation=bicubic"
)


def print_json(value: Any) -> None:
    """Print a value as indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def parse_size(text: str) -> tuple[int, int]:
    """Return "384" or "160x224" as (height, width)."""
    parts = text.lower().replace("×", "x").split("x")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 384, or HEIGHTxWIDTH like 160x224")
    return numbers[0], numbers[-1]


def parse_classes(text: str) -> int | None:
    """Return a number of classes, or None for "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of classes: use 1000, or none") from None


def parse_count(text: str) -> int:
    """Return a whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def parse_positive(text: str) -> int:
    """Return a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Return "0.8,0.1,0.1" as the fractions of train, validation and test."""
    try:
        fractions = tuple(float(part) for part in text.split(","))
    except ValueError:
        fractions = ()
    if len(fractions) == 2:
        fractions = (*fractions, 0.0)
    if len(fractions) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: write the fractions of train, validation and test as 0.8,0.1,0.1")
    return fractions[0], fractions[1], fractions[2]


def parse_names(text: str, known: Sequence[str], kind: str) -> tuple[str, ...]:
    """Return comma-separated names, each once, all of them in `known`."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown {kind} {unknown[0]!r}: use {', '.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError(f"no {kind} given: use {', '.join(known)}")
    return names


def parse_assumptions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --assume by name."""
    assumptions: dict[str, Any] = {}
    for item in options.assume:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"--assume {item}: write it as NAME=VALUE, for example heads=6")
        assumptions[name] = value
    return assumptions


def check_at_least(minimum: int, value: int, option: str) -> int:
    """Return `value`, or raise if it is below the minimum of its option."""
    if value < minimum:
        raise ValueError(f"{option} must be >= {minimum}, got {value}")
    return value


def given_options(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return those of the named options that the user gave."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def option_flag(name: str) -> str:
    """Return the spelling of an option on the command line."""
    return "DATA" if name == "data" else f"--{name.replace('_', '-')}"


def add_checkpoint_options(parser: ArgumentParent) -> None:
    """Add --assume and --take."""
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help=ASSUME_HELP)
    parser.add_argument(
        "--take", metavar="NAME", help="entry of a .pth file with several models: teacher, student, model_ema …"
    )


def add_allow_missing_option(parser: argparse.ArgumentParser) -> None:
    """Add --allow-missing."""
    parser.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="PATTERN",
        help="initialise missing tensors that match at random ('blocks.11.*'; repeatable); each one is listed",
    )


def add_size_option(parser: ArgumentParent) -> None:
    """Add --size."""
    parser.add_argument(
        "--size", type=parse_size, metavar="N|HxW", help="input size in pixels, positions are resampled [the model's]"
    )


def add_device_option(parser: ArgumentParent) -> None:
    """Add --device."""
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="compute device [auto]")


def add_runtime_options(parser: ArgumentParent) -> None:
    """Add --runtime and --device."""
    parser.add_argument(
        "--runtime",
        default="auto",
        choices=RUNTIMES,
        help="inference runtime [auto: the fastest on this machine, measured once, where that pays off]",
    )
    add_device_option(parser)


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of inference: runtime, precision, batches, and the reading of the checkpoint."""
    compute = parser.add_argument_group("compute")
    add_runtime_options(compute)
    compute.add_argument(
        "--merge", type=int, default=0, metavar="R", help="tokens merged per layer: faster, slightly less accurate [0]"
    )
    add_size_option(compute)
    compute.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="precision of matrix products [fp32]"
    )
    compute.add_argument("--batch-size", type=int, metavar="N", help="images per batch [chosen by measured speed]")
    compute.add_argument("--workers", type=int, metavar="N", help="batches computed in parallel [one per core]")
    add_checkpoint_options(parser.add_argument_group("checkpoint"))


def inference_options(options: argparse.Namespace) -> "InferenceOptions":
    """Return the options of `add_compute_options` as the library's object."""
    from vitrail.deploy.predict.predict import InferenceOptions

    return InferenceOptions(
        options.runtime,
        options.device,
        options.precision,
        options.merge,
        options.size,
        options.batch_size,
        options.workers,
        parse_assumptions(options),
        options.take,
    )
