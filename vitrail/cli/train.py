"""Train or fine-tune a model on a folder of images or videos: classes, masks, numbers, or captions.

DATA is a folder of class folders of images or videos, a folder with images/ and masks/, a CSV, TSV, JSONL or Parquet table,
COCO JSON, tar shards, or a name: digits, mnist, fashion-mnist, cifar-10, cifar-100, moving-digits. It is checked first; defective
files are listed and left out. --init fine-tunes a checkpoint; without it, a model is trained from scratch; --teacher distils a
trained model into a small one; --unlabelled learns images without labels too. The run directory receives model.safetensors,
report.html, summary.json, metrics.jsonl and recipe.json.

examples:
  vitrail train digits                                        a minute on a laptop
  vitrail train photos --init deit_tiny.safetensors           fine-tune on a folder
  vitrail train photos --init deit-tiny --tune lora --epochs 10
  vitrail train pets --init deit-tiny                         images/ and masks/: a class for each pixel
  vitrail train houses.csv --targets price --init deit-tiny   numbers instead of classes
  vitrail train pairs.csv --objective clip                    images and captions, like CLIP
  vitrail train pairs.csv --init-image deit-tiny --tune text  a text tower for a trained image tower, which is locked
  vitrail train videos --clip 16x4                            clips of 16 frames, every fourth of a video
  vitrail train photos --label-from '^(.+)_'                  labels in the file names: cat_001.jpg
  vitrail train photos --teacher runs/photos-finetune-1       distil a trained model into a small one
  vitrail train photos --teacher clip.safetensors --distil features   a teacher with other classes
  vitrail train photos --init deit-tiny --unlabelled more-photos   few labels and many images without
  vitrail train imagenet --recipe deit --model B/16 --set optimizer.lr=1e-3
  vitrail train --recipe runs/photos-finetune-1/recipe.json   repeat a run
  vitrail train --resume runs/photos-finetune-1               continue after a stop or a crash
  torchrun --nproc-per-node 8 -m vitrail train imagenet --recipe deit --out runs/deit
  vitrail train imagenet --recipe deit --out runs/deit --slurm nodes=2,gpus=8,time=4:00:00   a batch script for SLURM
"""

import argparse
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

from vitrail.cli.options import CommandParser, OptionGroup, first_flag, given_options, print_result, refuse_options
from vitrail.cli.slurm import Restart, add_slurm_options, write_job
from vitrail.cli.text.training import TrainingDisplay, format_outcome, format_rounds
from vitrail.data.remote.urls import has_credentials
from vitrail.models.sizes import DECODER_NAMES
from vitrail.training.recipes import CONTRASTIVE_OBJECTIVES, DISTILLATION_METHODS

OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size", "clip", "tune", "decoder", "seed", "precision")
DATA_OPTIONS = ("fractions", "task", "balance", "allow_class_mismatch", "quarantine", "per_class", "per_class_seed")
DATA_OPTIONS += ("label_from", "names", "ignore", "targets")
CAPTION_OPTIONS = ("objective", "init_image", "tokenizer")
TEACHER_OPTIONS = ("teacher", "distil", "teacher_cache")
SELF_TRAINING_OPTIONS = ("rounds", "threshold")
MACHINE_OPTIONS = (
    "device",
    "workers",
    "parallel",
    "shard_size",
    "lost_after",
    "compile",
    "save_seconds",
    "keep_checkpoints",
)
RUN_FILES = ("recipe.json", "self_training.json")  # one of them is in a directory that can be resumed
RECIPE_OPTIONS = ("skip_nonfinite", "patience", "collapse")  # each sets a field of the recipe
NEW_RUN_OPTIONS = (
    *OVERRIDES,
    *TEACHER_OPTIONS,
    *CAPTION_OPTIONS,
    *DATA_OPTIONS,
    "data",
    "method",
    "init",
    "recipe",
    "out",
    "set",
    "minutes",
    "unlabelled",
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail train`."""
    parser.add_shared("data DATA", nargs="?")
    parser.add_option("--recipe NAME|FILE", "recipe name, see `vitrail recipes`, or a recipe.json")
    overrides, teacher = add_run_options(parser, "DATA-RECIPE-N", "teacher")
    overrides.add_option(
        "--tune METHOD",
        "trained parameters: full, head, last-N, lora or lora-R (rank R), text (locks the image tower) [full]",
    )
    decoder = "decoder of a segmentation model [upernet; linear with --tune head]"
    overrides.add_option("--decoder", decoder, choices=DECODER_NAMES)
    target = "target: the teacher's top class, its probabilities, its features, or its prediction per patch [hard]"
    teacher.add_option("--distil", target, choices=DISTILLATION_METHODS)
    add_self_training_options(parser.add_group("self-training"))
    captions = parser.add_group("images and captions, for tables with the columns image and caption")
    loss = "loss: clip (softmax over the batch) or siglip (sigmoid of each pair) [that of --init; clip]"
    captions.add_option("--objective NAME", loss, choices=CONTRASTIVE_OBJECTIVES)
    captions.add_option(
        "--init-image FILE", "initial checkpoint of the image tower; the text tower starts from scratch"
    )
    files = "directory, tokenizer.json, or bpe_simple_vocab_16e6.txt.gz [that of --init; learnt from the captions]"
    captions.add_option("--tokenizer PATH", f"tokeniser: {files}")
    add_data_options(parser.add_group("data"))
    add_machine_options(parser)


def add_self_training_options(group: OptionGroup) -> None:
    """Add the options of training with unlabelled images."""
    more = "images without labels: a teacher predicts them, a student learns the confident ones, and teaches the next"
    group.add_option("--unlabelled DATA", more)
    group.add_option("--rounds N", "students, each the teacher of the next [2]", int)
    group.add_option("--threshold P", "least confidence of a prediction that is learnt, 0 to 1 [0.8]", float)


def add_run_options(parser: CommandParser, default_run: str, teacher_title: str) -> tuple[OptionGroup, OptionGroup]:
    """Add the options of a run and its recipe; return the groups of overrides and of the teacher."""
    parser.add_shared("--init FILE")
    parser.add_option("--out RUN", f"run directory [runs/{default_run}]")
    parser.add_option("--resume RUN", "run directory to continue")
    parser.add_option("--accept-changes", "with --resume: continue with a recipe.json that was edited since the start")
    parser.add_shared("--set NAME=VALUE")
    group = parser.add_group("overrides of the recipe")
    group.add_option("--epochs N", "epochs of training", float)
    group.add_option("--steps N", "steps of training, instead of epochs", int)
    group.add_option("--minutes N", "time for the whole command: as many steps as fit, by measuring some", float)
    group.add_option("--batch-size N", "batch size over all processes; lr is scaled with it", int)
    group.add_option("--lr LR", "peak learning rate", float)
    group.add_option("--model NAME", "model for training from scratch: Ti/16, S/16, B/32 …")
    group.add_shared("--size N|HxW", note="the recipe's")
    group.add_shared("--clip TxS", note="the recipe's")
    group.add_shared("--seed N")
    teacher = parser.add_group(teacher_title)
    teacher.add_option("--teacher MODEL", "trained model to distil: file, run, directory, hf://owner/name, deit-base")
    cache = "compute the teacher's outputs once per image, without augmentation, and keep them on disk: faster"
    teacher.add_option("--teacher-cache", cache)
    return group, teacher


def add_data_options(group: OptionGroup) -> None:
    """Add the options of a labelled dataset."""
    group.add_shared("--targets NAME,…", "--label-from REGEX", "--names FILE", "--ignore VALUES")
    group.add_shared("--fractions A,B,C", note="0.8,0.2,0")
    group.add_shared("--task")
    balance = "compensation of class imbalance: loss weights or sampling [none]"
    group.add_option("--balance", balance, choices=("none", "weights", "sampling"))
    group.add_option("--allow-class-mismatch", "warn, instead of failing, if classes differ between splits")
    group.add_shared("--quarantine FILE")
    group.add_option("--per-class N", "maximum training images per class, at random [all]", int)
    group.add_option("--per-class-seed SEED", "seed of the random selection of --per-class [0]", int)
    group.add_shared("--cache-size SIZE")


def add_machine_options(parser: CommandParser) -> None:
    """Add the options of device, precision, checkpoints and logging."""
    group = parser.add_group("compute")
    group.add_shared("--device auto|cpu|cuda|mps", default=None)
    group.add_shared("--precision")
    group.add_shared("--workers N")
    parallel = "with several processes: ddp, a full model per process, fsdp, a sharded one, hsdp, one sharded in each host [ddp]"
    group.add_option("--parallel", parallel, choices=("ddp", "fsdp", "hsdp"))
    group.add_option("--shard-size N", "processes that share a model with hsdp [those of a host]", int)
    lost = "with several processes: end after so long without a sign of another process, to be restarted [60]"
    group.add_option("--lost-after SECONDS", lost, float)
    group.add_option("--compile", "use torch.compile: slow first step, then faster")
    group.add_option("--skip-nonfinite N", "skip up to N steps with a non-finite loss, then stop [0]", int)
    group.add_option("--patience N", "stop after N validations without improvement, keep the best model", int)
    group.add_shared("--save-seconds N", note="300")
    group.add_option("--keep-checkpoints N", "checkpoints to keep, besides the best one [2]", int)
    trackers, log = ("tensorboard", "wandb", "mlflow"), "experiment tracker to log to (repeatable)"
    group.add_argument("--log", action="append", default=[], choices=trackers, help=log)
    add_slurm_options(parser)
    parser.add_shared("--quiet", "--json")


def data_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the data options that were given, by the names of the recipe's fields."""
    given = given_options(options, DATA_OPTIONS)
    if "per_class_seed" in given and "per_class" not in given:
        raise ValueError("--per-class-seed needs --per-class: give it too")
    if "names" in given and os.path.isfile(given["names"]):  # resuming and evaluating may start in another directory
        given["names"] = os.path.abspath(given["names"])
    return {"drawn" if name == "per_class_seed" else name: value for name, value in given.items()}


def run(options: argparse.Namespace) -> int:
    """Train or resume, and print the outcome."""
    check_run_options(options)
    if not options.unlabelled:
        refuse_options(options, SELF_TRAINING_OPTIONS, "needs --unlabelled: give it too")
    if options.slurm:
        return write_training_job(options)
    if options.unlabelled or (options.resume and os.path.isfile(os.path.join(options.resume, "self_training.json"))):
        return run_self_training(options)
    from vitrail.training.train import train

    return run_training(options, train)


def run_self_training(options: argparse.Namespace) -> int:
    """Train rounds with unlabelled images, or resume them, and print the outcome."""
    from vitrail.training.recipe import Data, Machine
    from vitrail.training.self_training import resume_self_training, self_train
    from vitrail.training.train import Connected
    from vitrail.training.trainer import Stopped

    refuse_options(options, ("distil", "teacher_cache"), "is not supported with --unlabelled: leave it out")
    display = TrainingDisplay(options.quiet, options.flags)
    connected = Connected(listeners=(display.on_record,), trackers=tuple(options.log), progress=display.progress)
    machine = Machine(**given_options(options, MACHINE_OPTIONS))
    settings = [f"{name}={value}" for name, value in given_options(options, RECIPE_OPTIONS).items()]
    try:
        if options.resume:
            directory, summary = resume_self_training(options.resume, machine=machine, connected=connected)
        else:
            directory, summary = self_train(
                Data(options.data, **data_fields(options)),
                options.unlabelled,
                teacher=options.teacher,
                init=options.init,
                recipe=options.recipe,
                **given_options(options, SELF_TRAINING_OPTIONS),
                settings=[*options.set, *settings],
                minutes=remaining_minutes(options),
                out=options.out,
                machine=machine,
                connected=connected,
                **given_options(options, OVERRIDES),
            )
    except Stopped as stopped:
        rounds = os.path.dirname(stopped.run)
        display.print_line(f"{stopped}. Continue with: vitrail train --resume {shlex.quote(rounds)}")
        return stopped.exit_code
    display.clear()
    if options.json or not options.quiet:
        print_result(options, summary, [format_rounds(summary), format_outcome(summary, directory)])
    return 0


def check_run_options(options: argparse.Namespace) -> None:
    """Raise if --resume comes with an option that only a new run takes, or a data option comes without DATA."""
    extra = given_options(options, (*NEW_RUN_OPTIONS, *RECIPE_OPTIONS))
    if options.resume and has_credentials(options.data):  # not stored in the run
        extra.pop("data")
    if options.resume and extra:
        raise ValueError(f"--resume continues a run with its own settings: leave out {first_flag(extra)}")
    if options.accept_changes and not options.resume:
        raise ValueError("--accept-changes is for --resume RUN: leave it out")
    if options.submit and not options.slurm:
        raise ValueError("--submit needs --slurm: give it too, for example --slurm gpus=1,time=4:00:00")
    if options.data and os.path.isfile(os.path.join(options.data, "recipe.json")):
        run = shlex.quote(options.data)
        raise ValueError(
            f"{options.data} is a run, not data: use vitrail {options.command} --resume {run} to continue it"
        )
    if not options.data:
        refuse_options(options, DATA_OPTIONS, "needs DATA: give it too")


def write_training_job(options: argparse.Namespace) -> int:
    """Write the batch script of a run, which resumes the run where it exists."""
    if options.resume:
        if not any(os.path.isfile(os.path.join(options.resume, name)) for name in RUN_FILES):
            raise ValueError(f"{options.resume} is not a run directory: it has no recipe.json")
        return write_job(options, options.resume)
    if not options.out:
        raise ValueError("--slurm needs --out RUN: a requeued job looks for its run there")
    if os.path.isfile(options.out) or (os.path.isdir(options.out) and os.listdir(options.out)):
        remedy = f"give another --out, or use --resume {shlex.quote(options.out)}"
        raise ValueError(f"{options.out} exists and is not an empty directory: {remedy}")
    unlabelled = given_options(options, ("unlabelled",))
    if unlabelled and options.slurm.processes > 1:
        raise ValueError("self-training runs in one process: leave out nodes, gpus and tasks of --slurm")
    resume = [options.command, "--resume", options.out]
    for name, value in given_options(options, (*MACHINE_OPTIONS, "quiet", "traceback")).items():
        resume += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    resume += [word for tracker in options.log for word in ("--log", tracker)]
    marker = os.path.join(options.out, RUN_FILES[bool(unlabelled)])
    return write_job(options, options.out, Restart(marker, resume))


def remaining_minutes(options: argparse.Namespace) -> float | None:
    """Return the minutes of --minutes that are left after the start of the command; invalid values as they are."""
    if not options.minutes or not options.minutes > 0:
        return options.minutes
    return max(1e-3, options.minutes - (time.monotonic() - options.started) / 60)


def run_training(options: argparse.Namespace, start: Callable[..., Any], **more: Any) -> int:
    """Resume a run, or start one with `vitrail.train` or `vitrail.pretrain`. The exit code is 1 after a collapse."""
    from vitrail.training.recipe import Data, Machine
    from vitrail.training.train import resume
    from vitrail.training.trainer import Stopped

    is_main = os.environ.get("RANK", "0") == "0"
    display = TrainingDisplay(options.quiet or not is_main, options.flags)
    connected = {"listeners": (display.on_record,), "trackers": tuple(options.log), "progress": display.progress}
    machine = given_options(options, MACHINE_OPTIONS)
    settings = [f"{name}={value}" for name, value in given_options(options, RECIPE_OPTIONS).items()]
    try:
        if options.resume:
            accept = options.accept_changes
            directory, summary = resume(
                options.resume, data=options.data, changes=machine, accept_changes=accept, **connected
            )
        else:
            directory, summary = start(
                options.data and Data(options.data, **data_fields(options)),
                init=options.init,
                **given_options(options, (*TEACHER_OPTIONS, *CAPTION_OPTIONS)),
                recipe=options.recipe,
                out=options.out,
                settings=[*options.set, *settings],
                **given_options(options, OVERRIDES),
                minutes=remaining_minutes(options),
                machine=Machine(**machine),
                **more,
                **connected,
            )
    except Stopped as stopped:
        fewer = "" if stopped.workers is None else f" --workers {stopped.workers}"
        command = f"vitrail {options.command} --resume {options.resume or stopped.run}{fewer}"
        display.print_line(f"{stopped}. Continue with: {command}")
        return stopped.exit_code
    display.clear()
    if is_main and (options.json or not options.quiet):
        print_result(options, summary, [format_outcome(summary, directory)])
    return 1 if summary.get("stopped") == "collapse" else 0
