"""A folder of pictures to a model that can be trusted.

DATA is a folder of class folders, a CSV or Parquet table, tar shards, or a name: digits, fashion-mnist, cifar-10, cifar-100. It
is checked first; bad files are left out by name. With --init a trained model is fine-tuned, without it one is trained from
scratch, and with --teacher a small one learns from a trained one. The run directory ends with model.safetensors, report.html,
summary.json, metrics.jsonl and recipe.json.
"""

import argparse
import json
import os
from typing import Any

from vitrail.cli.describe import size
from vitrail.cli.live import Live
from vitrail.cli.outcome import outcome

WISHES = ("epochs", "steps", "batch_size", "lr", "model", "size", "tune", "seed", "precision")
DATA = ("split", "task", "balance", "allow_class_mismatch", "quarantine", "per_class", "drawn")
TEACHER = ("teacher", "distil", "teacher_cache")
DISTIL = ("hard", "soft", "features", "tokens")
MACHINE = ("device", "workers", "parallel", "compile", "save_seconds", "keep_checkpoints")
FIELDS = {"split": "fractions"}  # where a recipe calls it otherwise


def told(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Those options that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def option(name: str) -> str:
    """An option as it is typed."""
    return "DATA" if name == "data" else f"--{name.replace('_', '-')}"


def fractions(text: str) -> tuple[float, float, float]:
    """0.8,0.1,0.1 as numbers."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) == 2:
        found = (*found, 0.0)
    if len(found) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: write the shares of train, validation and test as 0.8,0.1,0.1")
    return found[0], found[1], found[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train on, what to begin with, and everything that can be changed."""
    parser.epilog = (
        "examples:\n"
        "  vitrail train digits                                        a minute on a laptop\n"
        "  vitrail train photos --init deit_tiny.safetensors           fine-tune on a folder\n"
        "  vitrail train photos --init hf://facebook/deit-tiny-patch16-224 --tune lora --epochs 10\n"
        "  vitrail train photos --teacher runs/photos-finetune-1       a small student learns from a trained model\n"
        "  vitrail train photos --teacher clip.safetensors --distil features   … whose classes are others\n"
        "  vitrail train imagenet --recipe deit --model B/16 --set optimizer.lr=1e-3\n"
        "  vitrail train --recipe runs/photos-finetune-1/recipe.json   the same again\n"
        "  vitrail train --resume runs/photos-finetune-1               go on after a stop or a crash\n"
        "  torchrun --nproc-per-node 8 -m vitrail train imagenet --recipe deit --out runs/deit\n"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="a folder, a file or a name")
    parser.add_argument(
        "--init", metavar="FILE", help="a checkpoint to begin with: a file, a directory, hf://owner/name"
    )
    parser.add_argument("--recipe", metavar="NAME|FILE", help="see `vitrail recipes`; or a run's recipe.json")
    parser.add_argument("--out", metavar="RUN", help="the run directory; runs/DATA-RECIPE-N unless given")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change the recipe: optimizer.lr=3e-4, ema=EMA"
    )
    common = parser.add_argument_group("what the recipe adapts to")
    common.add_argument("--epochs", type=float, metavar="N")
    common.add_argument("--steps", type=int, metavar="N")
    common.add_argument("--batch-size", type=int, metavar="N", help="over all processes; the learning rate follows")
    common.add_argument("--lr", type=float, metavar="RATE")
    common.add_argument("--model", metavar="NAME", help="S/16, B/32, R50x1 …, for training from scratch")
    common.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures as the model sees them")
    common.add_argument("--tune", metavar="HOW", help="full, head, last-N, lora or lora-R")
    common.add_argument("--seed", type=int, metavar="N")
    taught = parser.add_argument_group("a teacher")
    taught.add_argument(
        "--teacher", metavar="MODEL", help="a trained model to learn from: a file, a run, a directory, hf://owner/name"
    )
    taught.add_argument(
        "--distil",
        choices=DISTIL,
        help="what is learnt: its surest class, all that it answers, its features, or its answer at every patch",
    )
    taught.add_argument(
        "--teacher-cache",
        action="store_true",
        default=None,
        help="ask it once about each picture as it is, and keep that on the disk: quicker, and it sees no augmentation",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--split",
        type=fractions,
        metavar="A,B,C",
        help="train, validation, test, where the data has no splits (0.8,0.2,0)",
    )
    data.add_argument("--task", choices=("auto", "single", "multi"), help="one label each, or several")
    data.add_argument(
        "--balance",
        choices=("none", "weights", "sampling"),
        help="make up for classes with few pictures",
    )
    data.add_argument(
        "--allow-class-mismatch",
        action="store_true",
        default=None,
        help="warn of classes that differ between splits, do not refuse",
    )
    data.add_argument(
        "--quarantine", metavar="FILE", help="pictures to leave out, as `vitrail check --quarantine` lists them"
    )
    add_few(data)
    add_computing(parser)


def add_few(data: argparse._ArgumentGroup) -> None:
    """How many of the pictures are learnt from."""
    data.add_argument(
        "--per-class", type=int, metavar="N", help="learn from at most N pictures of each class, drawn at random"
    )
    data.add_argument("--drawn", type=int, metavar="SEED", help="which ones these are (0)")


def add_computing(parser: argparse.ArgumentParser) -> None:
    """On what, and how it is watched."""
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--device", metavar="auto|cpu|cuda|mps", help="auto unless given")
    how.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="of matrix products; fp32, and on cuda what it is fast at"
    )
    how.add_argument("--workers", type=int, metavar="N", help="processes that prepare pictures")
    how.add_argument("--parallel", choices=("ddp", "fsdp"), help="with torchrun: copies (ddp), or shards")
    how.add_argument("--compile", action="store_true", default=None, help="torch.compile: slow to start, then faster")
    how.add_argument("--skip-nonfinite", type=int, metavar="N", help="leave out up to N steps whose loss is no number")
    how.add_argument(
        "--patience", type=int, metavar="N", help="stop after N validations without improvement; keep the best"
    )
    how.add_argument("--save-seconds", type=float, metavar="N", help="a checkpoint at least this often (300)")
    how.add_argument("--keep-checkpoints", type=int, metavar="N", help="the last N (2) are kept, and the best")
    how.add_argument(
        "--log", action="append", default=[], choices=("tensorboard", "wandb", "mlflow"), help="tell these too"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the summary for machines at the end")


def watched(options: argparse.Namespace) -> tuple[bool, Live, dict[str, Any]]:
    """Whether this process talks, what it says things with, and what a run is given to be heard."""
    leads = os.environ.get("RANK", "0") == "0"  # of several processes, the first one talks
    live = Live(options.quiet or not leads)
    return leads, live, {"listeners": (live.hear,), "trackers": tuple(options.log), "progress": live.progress}


def changes_of(options: argparse.Namespace) -> list[str]:
    """What is to be set in the recipe, also by options of their own."""
    named = [
        f"{name}={getattr(options, name)}"
        for name in ("skip_nonfinite", "patience")
        if getattr(options, name) is not None
    ]
    return [*options.set, *named]


def run(options: argparse.Namespace) -> int:
    """Trains or goes on, and says where the result is."""
    wishes = told(options, WISHES)
    about = told(options, DATA)
    teacher = told(options, TEACHER)
    changes = told(options, MACHINE)
    other = {name: getattr(options, name) for name in ("init", "recipe", "out", "set", "patience", "skip_nonfinite")}
    if options.resume and (
        extra := [*wishes, *about, *teacher, *(["data"] if options.data else []), *(n for n in other if other[n])]
    ):
        raise ValueError(f"--resume goes on with a run as it was begun: leave out {option(extra[0])}")
    if about and not options.data:
        raise ValueError(f"{option(next(iter(about)))} is about DATA: name it too")

    from vitrail.engine.loop import Stopped
    from vitrail.recipe import Data, Machine
    from vitrail.training import resume, train

    leads, live, shared = watched(options)
    settings = changes_of(options)
    try:
        if options.resume:
            directory, summary = resume(options.resume, changes=changes, **shared)
        else:
            data = options.data and Data(
                options.data, **{FIELDS.get(name, name): given for name, given in about.items()}
            )
            directory, summary = train(
                data,
                init=options.init,
                **teacher,
                recipe=options.recipe,
                out=options.out,
                settings=settings,
                wishes=wishes,
                machine=Machine(**changes),
                **shared,
            )
    except Stopped as stopped:
        live.say(f"{stopped}. Go on with: vitrail train --resume {options.resume or stopped.run}")
        return 128 + stopped.number
    live.clear()
    if not leads:
        return 0
    if options.json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    elif not options.quiet:
        print(outcome(summary, directory))
    return 0
