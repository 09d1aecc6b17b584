r"""Measure a model with confidence intervals, or probe its frozen features.

MODEL is a checkpoint of any known format (a file, a directory, hf://owner/name) or a run of `vitrail train`. DATA is anything
that `vitrail train` accepts; without it, MODEL's own data is used, split as for its training. The test split is used, else the
validation split, else all images. Classes are matched by name,
and by index for models without class names; a class without a match is an error, and --map FILE translates. Unreadable images
are left out, counted and listed. --against evaluates another model on the same images, with a paired test of the difference;
--merge applies to MODEL only.

examples:
  vitrail evaluate runs/photos-finetune-1                     the held-out images of its own data
  vitrail evaluate runs/photos-finetune-1 photos --split validation   the split held out in training
  vitrail evaluate deit_tiny.safetensors imagenet/val --map LOC_synset_mapping.txt --out results
  vitrail evaluate runs/a photos --against runs/b             paired test of two models
  vitrail evaluate model.safetensors photos --size 288        at another resolution
  vitrail evaluate model.safetensors samples --label-from '^(\d+)_'   classes from the file names
  vitrail evaluate model.safetensors photos --json | jq .top1
  vitrail evaluate model.safetensors photos --merge 8 --against model.safetensors   cost of token merging
  vitrail evaluate runs/videos-video-1 videos --clips 5 --crops 3   mean of 15 views of each video
  vitrail evaluate model.onnx photos                          an exported file
  vitrail evaluate dino.pth photos --probe knn,linear         probes of frozen features
  vitrail evaluate clip.safetensors photos --classes cat,dog  zero-shot classification with class names
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import (
    DATA_HELP,
    IGNORE_NOTE,
    CommandParser,
    check_at_least,
    given_options,
    parse_assumptions,
    parse_names,
    parse_positive,
    print_result,
    refuse_options,
    zero_shot_model,
)
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import clear_progress, count_progress
from vitrail.data.remote.urls import redact_all

if TYPE_CHECKING:
    from vitrail.evaluation.evaluate import EvaluationResult
    from vitrail.training.recipe import Data
    from vitrail.utils.progress import ProgressCallback

# The names of vitrail.evaluation.probes, repeated so that --help does not import PyTorch; a test compares them.
PROBES = ("knn", "linear", "few-shot")
NON_PROBE_OPTIONS = ("against", "map", "only_present", "limit", "out", "split", "batch_size", "precision")
NON_PROBE_OPTIONS += ("runtime", "merge", "clips", "crops", "classes", "template", "tokenizer")
PROBE_OPTIONS = {  # the probes that use each option
    "neighbours": ("knn",),
    "temperature": ("knn",),
    "shots": ("few-shot",),
    "draws": ("few-shot",),
    "seed": ("linear", "few-shot"),
    "no_cache": ("knn", "linear", "few-shot"),
}


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return "1,5,10" as whole numbers >= 1, each once."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers >= 1 as 1,5,10,25")
    return numbers


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail evaluate`."""
    parser.add_shared("model MODEL")
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"{DATA_HELP} [the data of the run MODEL]")
    parser.add_option("--against MODEL", "another model to compare with (repeatable)", action="append", default=[])
    files = "directory for predictions.csv, evaluation.json and report.html: new, empty, or of an earlier evaluation"
    parser.add_option("--out DIR", files, Path)
    parser.add_shared("--json")
    data = parser.add_group("data")
    data.add_shared("--split NAME", "--map FILE")
    data.add_option("--only-present", "restrict predictions to the classes in the data")
    data.add_shared("--label-from REGEX", "--names FILE")
    data.add_shared("--ignore VALUES", note=IGNORE_NOTE)
    data.add_shared("--limit N")
    data.add_shared("--task", default="auto")
    data.add_shared("--quarantine FILE", "--cache-size SIZE")
    views = parser.add_group("videos", "the probabilities of all clips and crops of a video are averaged")
    views.add_option("--clips N", "clips of a video, evenly spaced [1, at its centre]", parse_positive)
    views.add_option("--crops M", "crops of each clip, along the longer side of the frames [1]", parse_positive)
    compute = parser.add_group("compute")
    compute.add_shared("--size N|HxW", "--device auto|cpu|cuda|mps")
    compute.add_shared("--batch-size N", note="64")
    compute.add_shared("--workers N")
    compute.add_shared("--precision")
    compute.add_shared("--runtime", note="torch", default=None)
    compute.add_shared("--merge R", default=None)
    parser.add_checkpoint_options()
    parser.add_zero_shot_options()
    about = "the head is ignored; the features of both splits are computed once and kept in the cache directory"
    group = parser.add_group("probes of frozen features", about)
    linear = "logistic regression, its regularisation C chosen on a part of the training images"
    probes = f"knn (weighted, DINO's protocol), linear ({linear}), few-shot (least squares, as in the ViT paper)"
    group.add_option("--probe NAME,…", probes, partial(parse_names, known=PROBES, kind="probe"))
    group.add_option("--neighbours K", "knn: number of neighbours [20]", parse_positive)
    group.add_option("--temperature T", "knn: temperature of the weights [0.07]", float)
    group.add_option("--shots N,…", "few-shot: images per class [1,5,10,25]", parse_numbers)
    group.add_option("--draws N", "few-shot: random draws per number of shots [5]", parse_positive)
    group.add_shared("--seed N", "--no-cache")


def run(options: argparse.Namespace) -> int:
    """Evaluate or probe, write the requested files and print the results."""
    if options.probe is not None:
        return run_probes(options)
    refuse_options(options, PROBE_OPTIONS, "is an option of probes: add --probe, or leave it out")
    from vitrail.utils.files import remove_empty_directories

    created = [] if options.out is None else prepare_output(options.out)
    try:
        return run_evaluation(options)
    finally:
        remove_empty_directories(created)


def run_probes(options: argparse.Namespace) -> int:
    """Run the probes and print their table, or JSON. Raise if an option was given that they do not use."""
    refuse_options(options, NON_PROBE_OPTIONS, "has no effect with --probe: leave it out")
    for name, probes in PROBE_OPTIONS.items():
        if not set(probes) & set(options.probe):
            refuse_options(options, [name], f"is an option of --probe {' or '.join(probes)}: add that, or leave it out")
    from vitrail.cli.text.evaluation import format_probes
    from vitrail.evaluation.probes import ProbeSettings, probe

    report = probe(
        options.model,
        probe_data(options),
        options.probe,
        ProbeSettings(**given_options(options, ("neighbours", "temperature", "shots", "draws", "seed"))),
        device=options.device,
        workers=options.workers,
        cache=not options.no_cache,
        assume=parse_assumptions(options),
        take=options.take,
        size=options.size,
        progress=count_progress(),
    )
    return print_result(options, report.as_dict(), format_probes(report))


def probe_data(options: argparse.Namespace) -> "Data":
    """Return the data of the probes: as given, or that of the run."""
    from vitrail.evaluation.loading import find_own_data
    from vitrail.training.recipe import Data

    given = given_options(options, ("quarantine", "label_from", "names", "ignore"))
    if options.data is not None:
        return Data(options.data, task=options.task, **given)
    own = replace(find_own_data(options.model), **given)
    return own if options.task == "auto" else replace(own, task=options.task)


def run_evaluation(options: argparse.Namespace) -> int:
    """Evaluate, write the files and print the results; on Ctrl-C print the number of images done."""
    state: dict[str, Any] = {"stage": "", "done": 0, "total": 0}
    show = count_progress()

    def progress(stage: str, done: int, total: int) -> None:
        state.update(stage=stage, done=done, total=total)
        show(stage, done, total)

    try:
        result = evaluate_from_options(options, progress)
    except KeyboardInterrupt:
        if state["stage"] not in ("judging", "evaluating"):
            raise
        clear_progress()
        done = f"{state['done']:,} of {state['total']:,} images{'; nothing was written' if options.out else ''}"
        print(f"vitrail evaluate: interrupted after {done}", file=sys.stderr)
        return 130
    from vitrail.cli.text.evaluation import format_evaluation

    files = result.write(options.out) if options.out is not None else []
    return print_result(options, result.as_dict(), [spell_options(format_evaluation(result), options.flags), *files])


def evaluate_from_options(options: argparse.Namespace, progress: "ProgressCallback") -> "EvaluationResult":
    """Return the evaluation that the options describe."""
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.selection import EvaluationData

    check_at_least(0, options.workers, "--workers")
    zero_shot = zero_shot_model(options)  # read with --assume and --take
    return evaluate(
        options.model if zero_shot is None else zero_shot,
        EvaluationData(
            options.data,
            options.split,
            options.task,
            options.quarantine,
            options.limit,
            options.label_from,
            options.names,
            options.ignore,
        ),
        against=options.against,
        class_map=options.map,
        only_present=options.only_present,
        size=options.size,
        clips=options.clips,
        crops=options.crops,
        assume=parse_assumptions(options) if zero_shot is None else None,
        take=options.take if zero_shot is None else None,
        runtime=options.runtime or "torch",
        merge=options.merge or 0,
        device=options.device,
        workers=options.workers,
        precision=options.precision or "auto",
        **given_options(options, ["batch_size"]),
        command=("vitrail", *redact_all(options.arguments)),
        progress=progress,
    )


def prepare_output(out: Path) -> list[Path]:
    """Create the output directory before any computation and return the directories that are new."""
    from vitrail.evaluation.evaluate import is_evaluation
    from vitrail.utils.files import make_directories

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: give a directory")
    if (out / "run.json").is_file():
        raise ValueError(f"--out {out} is a run, its report.html would be overwritten: give another directory")
    if out.is_dir() and any(out.iterdir()) and not is_evaluation(out):
        raise ValueError(f"--out {out} is not empty and not an evaluation: give another directory")
    return make_directories(out)
