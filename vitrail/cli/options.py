"""Options that several commands share, parsers of option values, and the output of results.

An option is declared by its usage, as the help shows it: `--size N|HxW` has a value, `--json` is a switch.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from vitrail import deploy
from vitrail.cli.text.progress import clear_progress
from vitrail.models.sizes import RESAMPLING_NAMES
from vitrail.utils.precision import PRECISIONS

if TYPE_CHECKING:
    from vitrail.deploy.predict.predict import InferenceOptions
    from vitrail.models.base import Model

CHECKPOINT_HELP = "checkpoint file or directory, run, hf://owner/name, name of `vitrail models` (deit-tiny)"
DATA_HELP = "folder, CSV or Parquet table, tar shards (also https:// and s3://), or dataset name (digits)"
IGNORE_NOTE = "those that the model's training ignored"  # default of --ignore beside a model


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
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of classes: use 1000, or none") from None


def parse_count(text: str, minimum: int = 0) -> int:
    """Return a whole number >= 0, or another minimum."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {minimum}, got {text!r}")
    return int(text)


def parse_positive(text: str) -> int:
    """Return a whole number >= 1."""
    return parse_count(text, 1)


def parse_fractions(text: str) -> tuple[float, float, float]:
    """Return "0.8,0.1,0.1" as the fractions of train, validation and test."""
    try:
        fractions = [float(part) for part in text.split(",")]
        train, validation, test = fractions if len(fractions) > 2 else (*fractions, 0.0)
        return train, validation, test
    except ValueError:
        message = f"{text!r}: write the fractions of train, validation and test as 0.8,0.1,0.1"
        raise argparse.ArgumentTypeError(message) from None


def parse_values(text: str) -> tuple[int, ...]:
    """Return "0,255" as whole numbers >= 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers >= 0 with commas: 3 or 0,255")
    return tuple(map(int, parts))


def parse_cache_size(text: str) -> str:
    """Return a size such as 20GB, checked."""
    from vitrail.data.remote.settings import parse_bytes

    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_columns(text: str) -> tuple[str, ...]:
    """Return "age,height" as names of columns."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be names of columns with commas: price or age,height")
    return names


def parse_names(text: str, known: Sequence[str], kind: str) -> tuple[str, ...]:
    """Return comma-separated names, each once, all of them in `known`."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown {kind} {unknown[0]!r}: use {', '.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError(f"no {kind} given: use {', '.join(known)}")
    return names


# Usage: help and further arguments of `add_argument`. A default that differs between commands is their `note`.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model MODEL": (f"{CHECKPOINT_HELP}, or exported file ({', '.join(deploy.RUNTIME_SUFFIXES)})", {}),
    "data DATA": (DATA_HELP, {}),
    "--json": ("print the result as JSON", {}),
    "--quiet": ("print errors only", {}),
    "--traceback": ("show the traceback of an error", {}),
    "--cache-size SIZE": (
        "disk space for remote files, 500MB or 20GB; 0 keeps none [$VITRAIL_CACHE_SIZE, else 20GB]",
        {"type": parse_cache_size},
    ),
    "--no-cache": ("compute everything again and store nothing in the cache", {}),
    "--seed N": ("random seed [0]", {"type": int}),
    "--size N|HxW": ("input size in pixels [the model's]; position embeddings are resampled", {"type": parse_size}),
    "--clip TxS": ("frames of a clip, and the step between them in the video: 16x4", {}),
    "--classes N": ("number of classes; none for features without a head", {"type": parse_classes}),
    "--text-tower": ("read both towers of a model like CLIP [the image tower alone]", {}),
    "--channels N": ("input channels", {"type": int}),
    "--device auto|cpu|cuda|mps": ("compute device [auto]", {"default": "auto"}),
    "--precision": (
        "precision of matrix products [auto: fp32, or lower if supported and faster]",
        {"choices": PRECISIONS},
    ),
    "--runtime": (
        "inference runtime [auto: the fastest on this machine, measured once]",
        {"choices": ("auto", *deploy.RUNTIMES), "default": "auto"},
    ),
    "--tolerance POINTS": (
        "points of accuracy that a verified int8 export may lose to be chosen by --runtime auto [none is chosen]",
        {"type": float},
    ),
    "--merge R": ("number of tokens to merge in each layer: faster, less accurate [0]", {"type": int, "default": 0}),
    "--batch-size N": ("images per batch", {"type": int}),
    "--workers N": ("processes that decode images", {"type": int}),
    "--save-seconds N": ("seconds between checkpoints", {"type": float}),
    "--init FILE": ("checkpoint to start from: file, directory, hf://owner/name, name of `vitrail models`", {}),
    "--licence TEXT": ("licence, as the Hugging Face Hub spells it: apache-2.0", {}),
    "--set NAME=VALUE": (
        "field of the recipe (repeatable): steps=50, optimizer.lr=3e-4, ema=EMA (on), ema=none",
        {"action": "append", "default": []},
    ),
    # data
    "--fractions A,B,C": ("fractions of train, validation, test, if the data has no splits", {"type": parse_fractions}),
    "--split NAME": ("split to use: train, validation or test [test, else validation, else all]", {}),
    "--map FILE": (
        "mapping of the data's classes to the model's: JSON, CSV of two columns, list of names in the model's order, "
        "imagenet_class_index.json, LOC_synset_mapping.txt; or the word index if the data's classes are indices",
        {},
    ),
    "--label-from REGEX": (
        "regular expression that finds the class in a file name, or in the path if it has a slash: '^(.+)_'; DATA is a "
        "folder or a pattern, 'photos/*.jpg'",
        {},
    ),
    "--names FILE": (
        "readable class names: list in order, JSON, CSV of two columns, imagenet_class_index.json, "
        "LOC_synset_mapping.txt; or the word imagenet",
        {},
    ),
    "--ignore VALUES": (
        "stored values of masks that neither train nor count: 3 or 0,254 [255, and those that the data states]",
        {"type": parse_values},
    ),
    "--stuff NAMES": (
        "classes of EoMT without objects, such as sky: names with commas, all, or a file (COCO's categories) [those that "
        "the model file states]",
        {},
    ),
    "--targets NAME,…": (
        "columns of numbers to learn, of a CSV, TSV, JSONL or Parquet table: price or age,height [labels are learnt]",
        {"type": parse_columns},
    ),
    "--limit N": ("maximum number of images, evenly spaced [all]", {"type": int}),
    "--task": ("one label per image, or several [auto]", {"choices": ("auto", "single", "multi")}),
    "--quarantine FILE": ("images to leave out, a list written by `vitrail check --quarantine`", {}),
    # checkpoint
    "--assume NAME=VALUE": (
        "value that the tensors do not determine (repeatable): heads=6, gelu=exact|tanh|quick, eps=1e-6, size=224x224, "
        f"pool=class|mean, block=pre|res-post, channels=3, resampling={'|'.join(RESAMPLING_NAMES)} "
        "(rule for positions at other image sizes, "
        "named after its project), periods=float32|bfloat16 (of DINOv3's rotation), frames=16 (of a clip), "
        "stride=10 (of overlapping patches); preprocessing: "
        "mean=imagenet|half|clip|R,G,B (half: mean and std 0.5), std=R,G,B, "
        "crop=0.9, fit=cover|squash (keep or ignore the aspect ratio), interpolation=bicubic",
        {"action": "append", "default": []},
    ),
    "--take NAME": (
        "entry of a .pth file with several models (teacher, student, model_ema), or modality of a shared encoder",
        {},
    ),
}


class OptionParent(argparse._ActionsContainer):
    """Methods of parsers and groups that declare options by their usage."""

    def add_option(self, usage: str, text: str, type: Callable[[str], Any] = str, **more: Any) -> None:
        """Add an option with its help text; without a value and choices it is a switch."""
        flag, _, metavar = usage.partition(" ")
        if metavar:
            self.add_argument(flag, metavar=metavar, help=text, type=type, **more)
        else:
            self.add_argument(flag, help=text, **({} if "choices" in more else {"action": "store_true"}), **more)

    def add_shared(self, *usages: str, note: str = "", **changes: Any) -> None:
        """Add shared options. `note` replaces the default in brackets; `changes` replace arguments of `add_argument`."""
        for usage in usages:
            text, settings = SHARED[usage]
            self.add_option(usage, f"{text.partition(' [')[0]} [{note}]" if note else text, **(settings | changes))


class OptionGroup(OptionParent, argparse._ArgumentGroup):
    """Group of options under a title."""


class CommandParser(OptionParent, argparse.ArgumentParser):
    """Parser of a command. Errors are one line; an abbreviated option is unknown, so that a new option breaks no script."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments of this command; raise for unknown ones here, where the options are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if options := [text.partition("=")[0] for text in unknown if text.startswith("-")]:
            known = list(self._option_string_actions)
            self.error(f"unknown option {options[0]}: {suggest_option(options[0], known, f'{self.prog} --help')}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}: see {self.prog} --help")
        return namespace, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise for an unknown command with the closest one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = suggest_option(value, list(action.choices), f"{self.prog} --help")
            raise argparse.ArgumentError(None, f"unknown command {value!r}: {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        hint = f": see {self.prog} --help" if message.startswith("the following arguments are required") else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n")

    def add_group(self, title: str, description: str | None = None) -> OptionGroup:
        """Add a group of options."""
        group = OptionGroup(self, title, description)
        self._action_groups.append(group)
        return group

    def add_checkpoint(self) -> None:
        """Add the argument MODEL, a checkpoint."""
        self.add_argument("model", metavar="MODEL", help=CHECKPOINT_HELP)

    def add_checkpoint_options(self) -> None:
        """Add --assume and --take."""
        self.add_group("checkpoint").add_shared("--assume NAME=VALUE", "--take NAME")

    def add_compute_options(self, precision: str = "auto") -> None:
        """Add the options of inference: runtime, precision, batches, and the reading of the checkpoint."""
        compute = self.add_group("compute")
        compute.add_shared("--runtime", "--device auto|cpu|cuda|mps", "--merge R", "--size N|HxW")
        compute.add_shared("--precision", note="" if precision == "auto" else precision, default=precision)
        compute.add_shared("--tolerance POINTS")
        compute.add_shared("--batch-size N", note="chosen by measured speed")
        compute.add_option("--workers N", "batches computed in parallel [one per core]", int)
        compute.add_option("--batch-timeout S", "time limit of a batch of an exported file, in seconds [600]", float)
        self.add_checkpoint_options()

    def add_zero_shot_options(self) -> None:
        """Add the options of classification with class names alone."""
        group = self.add_group("zero-shot classification, for models with a text tower such as CLIP")
        names = "class names: separated by commas, a file, or the word imagenet"
        group.add_option("--classes NAMES", f"{names} [the classes of MODEL]")
        prompt = 'text with {} for the class name (repeatable: features are averaged) ["a photo of a {}."]'
        group.add_option("--template TEXT", prompt, action="append", default=[])
        files = "directory, tokenizer.json, or bpe_simple_vocab_16e6.txt.gz [that of MODEL]"
        group.add_option("--tokenizer PATH", f"tokeniser: {files}")


def suggest_option(text: str, known: Sequence[str], command: str) -> str:
    """Return a question with the closest known option or command, or where they are listed."""
    longer = [name for name in known if len(text) > 3 and name.startswith(text)]
    bare = {name.lstrip("-"): name for name in known}  # dashes, which all options share, make none alike
    near = longer or [bare[name] for name in get_close_matches(text.lstrip("-"), bare, n=1, cutoff=0.6)]
    return f"did you mean {near[0]}?" if near else f"see {command}"


def inference_options(options: argparse.Namespace) -> "InferenceOptions":
    """Return the options of `add_compute_options` as the library's object."""
    from vitrail.deploy.predict.predict import InferenceOptions

    names = ("runtime", "device", "precision", "tolerance", "merge", "size", "batch_size", "workers", "take")
    timeout = {} if options.batch_timeout is None else {"batch_timeout": options.batch_timeout}
    masks = ("inference", "flip", "panoptic", "stuff", "score_threshold", "mask_threshold", "overlap_threshold")
    given = {name: getattr(options, name) for name in names} | timeout | given_options(options, masks)
    return InferenceOptions(**given, assume=parse_assumptions(options), names=getattr(options, "names", None))


def zero_shot_model(options: argparse.Namespace) -> "Model | None":
    """Return the classifier that --classes asks for; None without that option."""
    if options.classes is None:
        refuse_options(options, ("template", "tokenizer"), "needs --classes")
        return None
    from vitrail.checkpoints.load import find_weights, load_towers
    from vitrail.prompts import TEMPLATES, zero_shot

    reading = {"assume": parse_assumptions(options), "take": options.take, "tokenizer": options.tokenizer}
    return zero_shot(
        load_towers(find_weights(options.model, towers=True), **reading), options.classes, options.template or TEMPLATES
    )


def parse_assumptions(options: argparse.Namespace) -> dict[str, str]:
    """Return the values of --assume by name."""
    assumptions: dict[str, str] = {}
    for item in options.assume:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"--assume {item}: write it as NAME=VALUE, for example heads=6")
        assumptions[name] = value
    return assumptions


def check_at_least(minimum: int, value: int | None, option: str) -> None:
    """Raise ValueError if the value of an option was given and is below the minimum."""
    if value is not None and value < minimum:
        raise ValueError(f"{option} must be >= {minimum}, got {value}")


def given_options(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named options that the command has and the user gave; 0 counts as given."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def refuse_options(options: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raise ValueError with the reason if one of the named options was given."""
    if given := given_options(options, names):
        raise ValueError(f"{first_flag(given)} {reason}")


def first_flag(names: Iterable[str]) -> str:
    """Return the first of these options as it is spelt on the command line."""
    name = next(iter(names))
    return "DATA" if name == "data" else f"--{name.replace('_', '-')}"


def print_result(options: argparse.Namespace, value: Any, lines: Iterable[Any]) -> int:
    """Print `value` as JSON with --json, else the lines. Return the exit code, 0."""
    clear_progress()
    if options.json:
        print(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        print(*lines, sep="\n")
    return 0
