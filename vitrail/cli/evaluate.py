"""How good a model is, with the uncertainty of every number.

MODEL is a checkpoint of any known form (a file, a directory, hf://owner/name) or a run of vitrail train. DATA is whatever vitrail
train takes; its test split is taken, else its validation split, else all of it. Classes are matched to the model's by name, and
for models without names by number; what does not match is an error, and --map FILE translates. Pictures that cannot be read are
left out, counted and named. With --against another model is judged on the same pictures, and a paired test says whether they
differ by more than chance.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vitrail.cli import probing, reading
from vitrail.cli.describe import size
from vitrail.cli.progress import cleared, counted

NOT_FOR_PROBES = ("against", "map", "only_present", "label_from", "limit", "out", "split", "batch_size", "precision")
NOT_FOR_PROBES += ("runtime", "merge")

FOR_PROBES = {  # which of them listen to it
    "neighbours": ("knn",),
    "temperature": ("knn",),
    "shots": ("few-shot",),
    "draws": ("few-shot",),
    "seed": ("linear", "few-shot"),
    "no_cache": ("knn", "linear", "few-shot"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is judged, on what, and where the results go."""
    parser.epilog = (
        "examples:\n"
        "  vitrail evaluate runs/photos-finetune-1 photos --split validation   what training held out\n"
        "  vitrail evaluate deit_tiny.safetensors imagenet/val --map LOC_synset_mapping.txt --out judged\n"
        "  vitrail evaluate runs/a photos --against runs/b             is the difference more than chance?\n"
        "  vitrail evaluate model.safetensors photos --size 288        at another resolution\n"
        "  vitrail evaluate model.safetensors samples --label-from '^(\\d+)_'   the class is in the files' names\n"
        "  vitrail evaluate model.safetensors photos --json | jq .top1\n"
        "  vitrail evaluate model.safetensors photos --merge 8 --against model.safetensors   what merging costs\n"
        "  vitrail evaluate model.onnx photos                          a file that vitrail export made\n"
        "  vitrail evaluate dino.pth photos --probe knn,linear         what frozen features know\n"
    )
    parser.add_argument("model", metavar="MODEL", help="a file, a directory, a run, hf://owner/name, .onnx, .xml, .pt2")
    parser.add_argument("data", metavar="DATA", help="a folder, a file or a name, as for vitrail train")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="MODEL",
        help="another model for the same pictures; again for more",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write predictions.csv, evaluation.json and report.html to a new or empty directory, or an earlier evaluation's",
    )
    parser.add_argument("--json", action="store_true", help="everything for machines, on standard output")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--split", metavar="NAME", help="train, validation or test (default: test, else validation, else all)"
    )
    data.add_argument(
        "--map",
        metavar="FILE",
        help="which class of the data is which of the model: JSON, CSV of two columns, a list of names in the model's order, "
        "imagenet_class_index.json, LOC_synset_mapping.txt; or the word index, where the data's classes are indices",
    )
    data.add_argument("--only-present", action="store_true", help="only classes that the data has are possible answers")
    data.add_argument("--label-from", metavar="REGEX", help="the class is what this finds in a file's name")
    data.add_argument("--limit", type=int, metavar="N", help="N pictures, evenly spread over their order")
    data.add_argument("--task", choices=("auto", "single", "multi"), default="auto", help="one label each, or several")
    data.add_argument(
        "--quarantine", metavar="FILE", help="pictures to leave out, as `vitrail check --quarantine` lists them"
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures; positions are resampled")
    how.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")
    how.add_argument("--batch-size", type=int, metavar="N", help="64 unless given")
    how.add_argument("--workers", type=int, metavar="N", help="processes that prepare pictures")
    how.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="of matrix products (fp32)")
    how.add_argument("--runtime", choices=("auto", "torch", "onnx", "openvino"), help="what runs MODEL (torch)")
    how.add_argument("--merge", type=int, metavar="R", help="merge R tokens in each layer of MODEL")
    reading.add_arguments(parser.add_argument_group("of MODEL's file"))
    probing.add_probe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Judges, writes what is asked for, and prints what was found."""
    show = counted()
    if options.probe is not None:
        if deaf := [name for name in NOT_FOR_PROBES if given(options, name)]:
            raise ValueError(f"--{deaf[0].replace('_', '-')} means nothing to --probe: leave it out")
        for name, listen in FOR_PROBES.items():
            if given(options, name) and not set(listen) & set(options.probe):
                raise ValueError(f"--{name} is for --probe {' or '.join(listen)}: ask for that, or leave it out")
        try:
            return probing.run_probes(options, show)
        finally:
            cleared()
    if extra := [name for name in FOR_PROBES if given(options, name)]:
        raise ValueError(f"--{extra[0].replace('_', '-')} is for probes: add --probe, or leave it out")
    if options.out is None:
        return evaluated_by(options, show)
    from vitrail.checkpoints.files.directory import unmake

    new = check_out(options.out)
    try:
        return evaluated_by(options, show)
    finally:
        unmake(new)  # what is still empty


def evaluated_by(options: argparse.Namespace, show: Any) -> int:
    """Judges with progress, also where it is interrupted, and tells."""
    told = {"doing": "", "done": 0, "total": 0}

    def progress(doing: str, done: int, total: int) -> None:
        told.update(doing=doing, done=done, total=total)
        show(doing, done, total)

    try:
        evaluated = judged(options, progress)
    except KeyboardInterrupt:
        cleared()
        if told["doing"] != "judging":
            raise
        where = "; nothing was written" if options.out else ""
        print(
            f"vitrail evaluate: interrupted after {told['done']:,} of {told['total']:,} pictures{where}",
            file=sys.stderr,
        )
        return 130
    finally:
        cleared()
    files = evaluated.write(options.out) if options.out is not None else []
    if options.json:
        print(json.dumps(evaluated.as_dict(), indent=2, ensure_ascii=False))
        return 0
    from vitrail.cli.evaluated import text

    print(text(evaluated))
    for path in files:
        print(path)
    return 0


def given(options: argparse.Namespace, name: str) -> bool:
    """Whether an option was given, be it 0."""
    value = getattr(options, name)
    return not (value is None or value is False or value == [])


def judged(options: argparse.Namespace, progress: Any) -> Any:
    """The evaluation that the options ask for."""
    from vitrail.engine.distributed import pick_device
    from vitrail.evaluation.answering import BATCH, Computing
    from vitrail.evaluation.choosing import Wanted
    from vitrail.evaluation.evaluating import evaluate

    if options.workers is not None and options.workers < 0:
        raise ValueError(f"--workers {options.workers}: 0 or more")
    return evaluate(
        options.model,
        Wanted(
            options.data, options.split, options.task, options.quarantine, options.limit, label_from=options.label_from
        ),
        against=options.against,
        translate=options.map,
        only_present=options.only_present,
        size=options.size,
        assume=reading.assumed(options),
        take=options.take,
        runtime=options.runtime or "torch",
        merge=options.merge or 0,
        how=Computing(
            pick_device(options.device),
            BATCH if options.batch_size is None else options.batch_size,
            options.workers,
            options.precision or "fp32",
        ),
        command=("vitrail", *options.arguments),
        progress=progress,
    )


def check_out(out: Path) -> list[Path]:
    """Makes the directory, before anything is computed that would have no place; gives what is new of it."""
    from vitrail.checkpoints.files.directory import make
    from vitrail.evaluation.evaluating import written_in

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give --out the name of a directory")
    if (out / "run.json").is_file():
        raise ValueError(f"{out} is a run, whose report.html would be lost: give --out another directory")
    if out.is_dir() and any(out.iterdir()) and not written_in(out):
        raise ValueError(f"{out} is there, not empty and not written by an evaluation: give --out another directory")
    return make(out)
