"""Measure a model with confidence intervals, or probe its frozen features.

MODEL is a checkpoint of any known format (a file, a directory, hf://owner/name) or a run of `vitrail train`. DATA is anything
that `vitrail train` accepts; the test split is used, else the validation split, else all images. Classes are matched by name,
and by index for models without class names; a class without a match is an error, and --map FILE translates. Unreadable images
are left out, counted and listed. --against evaluates another model on the same images, with a paired test of the difference.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import (
    MODEL_HELP,
    RUNTIMES,
    add_checkpoint_options,
    add_device_option,
    add_size_option,
    option_flag,
    parse_assumptions,
    parse_names,
    parse_positive,
    print_json,
)
from vitrail.cli.text.progress import clear_progress, count_progress

if TYPE_CHECKING:
    from vitrail.evaluation.evaluate import EvaluationResult
    from vitrail.utils.progress import ProgressCallback

# The names of vitrail.evaluation.probes, repeated so that --help does not import PyTorch; a test compares them.
PROBES = ("knn", "linear", "few-shot")
NON_PROBE_OPTIONS = ("against", "map", "only_present", "label_from", "limit", "out", "split", "batch_size", "precision")
NON_PROBE_OPTIONS += ("runtime", "merge")
PROBE_OPTIONS = {  # the probes that use each option
    "neighbours": ("knn",),
    "temperature": ("knn",),
    "shots": ("few-shot",),
    "draws": ("few-shot",),
    "seed": ("linear", "few-shot"),
    "no_cache": ("knn", "linear", "few-shot"),
}

parse_probes = partial(parse_names, known=PROBES, kind="probe")


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return "1,5,10" as whole numbers >= 1, each once."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers >= 1 as 1,5,10,25")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail evaluate`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail evaluate runs/photos-finetune-1 photos --split validation   the split held out in training\n"
        "  vitrail evaluate deit_tiny.safetensors imagenet/val --map LOC_synset_mapping.txt --out results\n"
        "  vitrail evaluate runs/a photos --against runs/b             paired test of two models\n"
        "  vitrail evaluate model.safetensors photos --size 288        at another resolution\n"
        "  vitrail evaluate model.safetensors samples --label-from '^(\\d+)_'   classes from the file names\n"
        "  vitrail evaluate model.safetensors photos --json | jq .top1\n"
        "  vitrail evaluate model.safetensors photos --merge 8 --against model.safetensors   cost of token merging\n"
        "  vitrail evaluate model.onnx photos                          an exported file\n"
        "  vitrail evaluate dino.pth photos --probe knn,linear         probes of frozen features\n"
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("data", metavar="DATA", help="folder, file or dataset name, as for vitrail train")
    parser.add_argument(
        "--against", action="append", default=[], metavar="MODEL", help="second model on the same images (repeatable)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory for predictions.csv, evaluation.json and report.html: new, empty, or of an earlier evaluation",
    )
    parser.add_argument("--json", action="store_true", help="print the evaluation as JSON")
    data = parser.add_argument_group("data")
    data.add_argument("--split", metavar="NAME", help="train, validation or test [test, else validation, else all]")
    data.add_argument(
        "--map",
        metavar="FILE",
        help="mapping of the data's classes to the model's: JSON, CSV of two columns, list of names in the model's order, "
        "imagenet_class_index.json, LOC_synset_mapping.txt; or the word index if the data's classes are indices",
    )
    data.add_argument("--only-present", action="store_true", help="restrict predictions to the classes in the data")
    data.add_argument("--label-from", metavar="REGEX", help="regular expression that finds the class in a file name")
    data.add_argument("--limit", type=int, metavar="N", help="number of images, evenly spaced [all]")
    data.add_argument(
        "--task", choices=("auto", "single", "multi"), default="auto", help="one label per image, or several [auto]"
    )
    data.add_argument(
        "--quarantine", metavar="FILE", help="images to leave out, a list of `vitrail check --quarantine`"
    )
    compute = parser.add_argument_group("compute")
    add_size_option(compute)
    add_device_option(compute)
    compute.add_argument("--batch-size", type=int, metavar="N", help="images per batch [64]")
    compute.add_argument("--workers", type=int, metavar="N", help="processes that decode images")
    compute.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="precision of matrix products [fp32]")
    compute.add_argument("--runtime", choices=RUNTIMES, help="inference runtime [torch]")
    compute.add_argument("--merge", type=int, metavar="R", help="tokens merged per layer of MODEL [0]")
    add_checkpoint_options(parser.add_argument_group("checkpoint"))
    add_probe_arguments(parser)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --probe and the settings of the probes."""
    group = parser.add_argument_group(
        "probes of frozen features",
        "the head is ignored; the features of both splits are computed once and kept in the cache directory",
    )
    group.add_argument(
        "--probe",
        type=parse_probes,
        metavar="NAME,…",
        help="knn (weighted, DINO's protocol), linear (logistic regression, C chosen on a part of the training images), "
        "few-shot (least squares, as in the ViT paper)",
    )
    group.add_argument("--neighbours", type=parse_positive, metavar="K", help="knn: number of neighbours [20]")
    group.add_argument("--temperature", type=float, metavar="T", help="knn: temperature of the weights [0.07]")
    group.add_argument("--shots", type=parse_numbers, metavar="N,…", help="few-shot: images per class [1,5,10,25]")
    group.add_argument(
        "--draws", type=parse_positive, metavar="N", help="few-shot: random draws per number of shots [5]"
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of the draws and of the part that chooses C [0]")
    group.add_argument("--no-cache", action="store_true", help="compute the features again and do not store them")


def run(options: argparse.Namespace) -> int:
    """Evaluate or probe, write the requested files and print the results."""
    show = count_progress()
    if options.probe is not None:
        check_probe_options(options)
        try:
            return run_probes(options, show)
        finally:
            clear_progress()
    if extra := [name for name in PROBE_OPTIONS if is_given(options, name)]:
        raise ValueError(f"{option_flag(extra[0])} is an option of probes: add --probe, or leave it out")
    if options.out is None:
        return run_evaluation(options, show)
    from vitrail.utils.files import remove_empty_directories

    created = prepare_output(options.out)
    try:
        return run_evaluation(options, show)
    finally:
        remove_empty_directories(created)


def check_probe_options(options: argparse.Namespace) -> None:
    """Raise if an option was given that the requested probes do not use."""
    if unused := [name for name in NON_PROBE_OPTIONS if is_given(options, name)]:
        raise ValueError(f"{option_flag(unused[0])} has no effect with --probe: leave it out")
    for name, probes in PROBE_OPTIONS.items():
        if is_given(options, name) and not set(probes) & set(options.probe):
            raise ValueError(
                f"{option_flag(name)} is an option of --probe {' or '.join(probes)}: add that, or leave it out"
            )


def is_given(options: argparse.Namespace, name: str) -> bool:
    """Return whether the user gave an option, including the value 0."""
    value = getattr(options, name)
    return not (value is None or value is False or value == [])


def run_probes(options: argparse.Namespace, progress: "ProgressCallback | None" = None) -> int:
    """Run the probes and print their table, or JSON."""
    from vitrail.cli.text.evaluation import format_probes
    from vitrail.evaluation.probes import ProbeSettings, probe
    from vitrail.training.recipe import Data

    settings = {name: getattr(options, name) for name in ("neighbours", "temperature", "shots", "draws", "seed")}
    report = probe(
        options.model,
        Data(options.data, task=options.task, quarantine=options.quarantine),
        options.probe,
        ProbeSettings(**{name: value for name, value in settings.items() if value is not None}),
        device=options.device,
        workers=options.workers,
        cache=not options.no_cache,
        assume=parse_assumptions(options),
        take=options.take,
        size=options.size,
        progress=progress,
    )
    if options.json:
        print_json(report.as_dict())
    else:
        print("\n".join(format_probes(report)))
    return 0


def run_evaluation(options: argparse.Namespace, show_progress: "ProgressCallback") -> int:
    """Evaluate, write the files and print the results; on Ctrl-C print the number of images done."""
    state: dict[str, Any] = {"stage": "", "done": 0, "total": 0}

    def progress(stage: str, done: int, total: int) -> None:
        state.update(stage=stage, done=done, total=total)
        show_progress(stage, done, total)

    try:
        result = evaluate_from_options(options, progress)
    except KeyboardInterrupt:
        clear_progress()
        if state["stage"] not in ("judging", "evaluating"):
            raise
        unwritten = "; nothing was written" if options.out else ""
        print(
            f"vitrail evaluate: interrupted after {state['done']:,} of {state['total']:,} images{unwritten}",
            file=sys.stderr,
        )
        return 130
    finally:
        clear_progress()
    files = result.write(options.out) if options.out is not None else []
    if options.json:
        print_json(result.as_dict())
        return 0
    from vitrail.cli.text.evaluation import format_evaluation

    print(format_evaluation(result))
    for path in files:
        print(path)
    return 0


def evaluate_from_options(options: argparse.Namespace, progress: "ProgressCallback") -> "EvaluationResult":
    """Return the evaluation that the options describe."""
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.loading import BATCH_SIZE, ComputeOptions
    from vitrail.evaluation.selection import EvaluationData
    from vitrail.training.distributed import pick_device

    if options.workers is not None and options.workers < 0:
        raise ValueError(f"--workers must be >= 0, got {options.workers}")
    return evaluate(
        options.model,
        EvaluationData(
            options.data, options.split, options.task, options.quarantine, options.limit, label_from=options.label_from
        ),
        against=options.against,
        class_map=options.map,
        only_present=options.only_present,
        size=options.size,
        assume=parse_assumptions(options),
        take=options.take,
        runtime=options.runtime or "torch",
        merge=options.merge or 0,
        compute=ComputeOptions(
            pick_device(options.device),
            BATCH_SIZE if options.batch_size is None else options.batch_size,
            options.workers,
            options.precision or "fp32",
        ),
        command=("vitrail", *options.arguments),
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
