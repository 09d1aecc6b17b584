"""Train or fine-tune a classifier on a folder of images.

DATA is a folder of class folders, a CSV or Parquet table, tar shards, or a name: digits, fashion-mnist, cifar-10, cifar-100. It
is checked first; defective files are listed and left out. --init fine-tunes a checkpoint; without it, a model is trained from
scratch; --teacher distils a trained model into a small one. The run directory receives model.safetensors, report.html,
summary.json, metrics.jsonl and recipe.json.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from vitrail.cli.options import given_options, option_flag, parse_fractions, parse_size, print_json
from vitrail.cli.text.training import TrainingDisplay, format_outcome

OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size", "tune", "seed", "precision")
DATA_OPTIONS = ("split", "task", "balance", "allow_class_mismatch", "quarantine", "per_class", "drawn")
TEACHER_OPTIONS = ("teacher", "distil", "teacher_cache")
DISTILLATION_METHODS = ("hard", "soft", "features", "tokens")
MACHINE_OPTIONS = ("device", "workers", "parallel", "compile", "save_seconds", "keep_checkpoints")
RECIPE_FIELDS = {"split": "fractions"}  # where the recipe has another name for an option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail train`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail train digits                                        a minute on a laptop\n"
        "  vitrail train photos --init deit_tiny.safetensors           fine-tune on a folder\n"
        "  vitrail train photos --init hf://facebook/deit-tiny-patch16-224 --tune lora --epochs 10\n"
        "  vitrail train photos --teacher runs/photos-finetune-1       distil a trained model into a small one\n"
        "  vitrail train photos --teacher clip.safetensors --distil features   a teacher with other classes\n"
        "  vitrail train imagenet --recipe deit --model B/16 --set optimizer.lr=1e-3\n"
        "  vitrail train --recipe runs/photos-finetune-1/recipe.json   repeat a run\n"
        "  vitrail train --resume runs/photos-finetune-1               continue after a stop or a crash\n"
        "  torchrun --nproc-per-node 8 -m vitrail train imagenet --recipe deit --out runs/deit\n"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder, file or dataset name")
    parser.add_argument("--recipe", metavar="NAME|FILE", help="recipe name, see `vitrail recipes`, or a recipe.json")
    add_run_options(parser, "DATA-RECIPE-N", "optimizer.lr=3e-4, ema=EMA")
    add_override_options(parser, "model for training from scratch: S/16, B/32, R50x1 …").add_argument(
        "--tune", metavar="METHOD", help="trained parameters: full, head, last-N, lora or lora-R [full]"
    )
    add_teacher_options(parser.add_argument_group("teacher")).add_argument(
        "--distil",
        choices=DISTILLATION_METHODS,
        help="target: the teacher's top class, its probabilities, its features, or its prediction per patch [hard]",
    )
    add_data_options(parser.add_argument_group("data"))
    add_machine_options(parser)


def add_run_options(parser: argparse.ArgumentParser, default_run: str, example: str) -> None:
    """Add the options of a run: its start, its directory and changes of its recipe."""
    parser.add_argument("--init", metavar="FILE", help="checkpoint to start from: file, directory, hf://owner/name")
    parser.add_argument("--out", metavar="RUN", help=f"run directory [runs/{default_run}]")
    parser.add_argument("--resume", metavar="RUN", help="run directory to continue")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"field of the recipe (repeatable): {example}"
    )


def add_override_options(parser: argparse.ArgumentParser, model_help: str) -> argparse._ArgumentGroup:
    """Add the options that override the recipe's own choice, and return their group."""
    group = parser.add_argument_group("overrides of the recipe")
    group.add_argument("--epochs", type=float, metavar="N", help="epochs of training")
    group.add_argument("--steps", type=int, metavar="N", help="steps of training, instead of epochs")
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="batch size over all processes; lr is scaled with it"
    )
    group.add_argument("--lr", type=float, metavar="LR", help="peak learning rate")
    group.add_argument("--model", metavar="NAME", help=model_help)
    group.add_argument("--size", type=parse_size, metavar="N|HxW", help="input size in pixels")
    group.add_argument("--seed", type=int, metavar="N", help="random seed [0]")
    return group


def add_teacher_options(group: argparse._ArgumentGroup) -> argparse._ArgumentGroup:
    """Add --teacher and --teacher-cache."""
    group.add_argument(
        "--teacher", metavar="MODEL", help="trained model to distil: file, run, directory, hf://owner/name"
    )
    group.add_argument(
        "--teacher-cache",
        action="store_true",
        default=None,
        help="compute the teacher's outputs once per image, without augmentation, and keep them on disk: faster",
    )
    return group


def add_data_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of a labelled dataset."""
    group.add_argument(
        "--split",
        type=parse_fractions,
        metavar="A,B,C",
        help="fractions of train, validation, test, if the data has no splits [0.8,0.2,0]",
    )
    group.add_argument("--task", choices=("auto", "single", "multi"), help="one label per image, or several [auto]")
    group.add_argument(
        "--balance",
        choices=("none", "weights", "sampling"),
        help="compensation of class imbalance: loss weights or sampling [none]",
    )
    group.add_argument(
        "--allow-class-mismatch",
        action="store_true",
        default=None,
        help="warn, instead of failing, if classes differ between splits",
    )
    group.add_argument(
        "--quarantine", metavar="FILE", help="images to leave out, a list of `vitrail check --quarantine`"
    )
    group.add_argument("--per-class", type=int, metavar="N", help="maximum training images per class, at random [all]")
    group.add_argument("--drawn", type=int, metavar="SEED", help="seed of the selection for --per-class [0]")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of device, precision, checkpoints and logging."""
    group = parser.add_argument_group("compute")
    group.add_argument("--device", metavar="auto|cpu|cuda|mps", help="compute device [auto]")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="precision of matrix products [fp32; on cuda bf16 or fp16]",
    )
    group.add_argument("--workers", type=int, metavar="N", help="processes that decode and augment images")
    group.add_argument("--parallel", choices=("ddp", "fsdp"), help="parallelism under torchrun: copies or shards [ddp]")
    group.add_argument(
        "--compile", action="store_true", default=None, help="use torch.compile: slow first step, then faster"
    )
    group.add_argument(
        "--skip-nonfinite", type=int, metavar="N", help="steps with a non-finite loss that are skipped [0]"
    )
    group.add_argument(
        "--patience", type=int, metavar="N", help="stop after N validations without improvement, keep the best model"
    )
    group.add_argument("--save-seconds", type=float, metavar="N", help="seconds between checkpoints [300]")
    group.add_argument(
        "--keep-checkpoints", type=int, metavar="N", help="checkpoints to keep, besides the best one [2]"
    )
    group.add_argument(
        "--log", action="append", default=[], choices=("tensorboard", "wandb", "mlflow"), help="tracker (repeatable)"
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def create_display(options: argparse.Namespace) -> tuple[bool, TrainingDisplay, dict[str, Any]]:
    """Return whether this process prints, its display, and the arguments that connect a run to it."""
    is_main = os.environ.get("RANK", "0") == "0"
    display = TrainingDisplay(options.quiet or not is_main)
    connected = {"listeners": (display.on_record,), "trackers": tuple(options.log), "progress": display.progress}
    return is_main, display, connected


def recipe_settings(options: argparse.Namespace, *names: str) -> list[str]:
    """Return --set, and the options that set a field of the recipe, as NAME=VALUE."""
    given = given_options(options, ("skip_nonfinite", "patience", *names))
    return [*options.set, *(f"{name}={value}" for name, value in given.items())]


def check_run_options(
    options: argparse.Namespace, data_options: dict[str, Any], given: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Raise if --resume comes with an option that only a new run takes, or a data option comes without DATA."""
    extra = [*given, *data_options, *(name for name in ("data", *names) if getattr(options, name))]
    if options.resume and extra:
        raise ValueError(f"--resume continues a run with its own settings: leave out {option_flag(extra[0])}")
    if data_options and not options.data:
        raise ValueError(f"{option_flag(next(iter(data_options)))} needs DATA: give it too")


def print_outcome(options: argparse.Namespace, is_main: bool, summary: dict[str, Any], directory: Path) -> None:
    """Print the summary of a finished run as text or JSON."""
    if is_main and options.json:
        print_json(summary)
    elif is_main and not options.quiet:
        print(format_outcome(summary, directory))


def run(options: argparse.Namespace) -> int:
    """Train or resume, and print the outcome."""
    overrides = given_options(options, OVERRIDES)
    data_options = given_options(options, DATA_OPTIONS)
    teacher = given_options(options, TEACHER_OPTIONS)
    machine = given_options(options, MACHINE_OPTIONS)
    names = ("init", "recipe", "out", "set", "patience", "skip_nonfinite")
    check_run_options(options, data_options, (*overrides, *teacher), names)

    from vitrail.training.recipe import Data, Machine
    from vitrail.training.train import resume, train
    from vitrail.training.trainer import Stopped

    is_main, display, connected = create_display(options)
    try:
        if options.resume:
            directory, summary = resume(options.resume, changes=machine, **connected)
        else:
            fields = {RECIPE_FIELDS.get(name, name): value for name, value in data_options.items()}
            directory, summary = train(
                options.data and Data(options.data, **fields),
                init=options.init,
                **teacher,
                recipe=options.recipe,
                out=options.out,
                settings=recipe_settings(options),
                overrides=overrides,
                machine=Machine(**machine),
                **connected,
            )
    except Stopped as stopped:
        display.print_line(f"{stopped}. Continue with: vitrail train --resume {options.resume or stopped.run}")
        return 128 + stopped.number
    display.clear()
    print_outcome(options, is_main, summary, directory)
    return 0
