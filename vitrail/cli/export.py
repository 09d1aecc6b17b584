"""Export a model for another runtime, and verify the file.

MODEL is a checkpoint of any known format or a run of `vitrail train`. The file contains labels and preprocessing, so that
`vitrail predict`, `evaluate` and `serve` accept it directly. It is compared with the model on images (--verify DATA, or
generated ones): largest difference, changed predictions, accuracy with intervals where labels exist, size, latency and
throughput. A file beyond the tolerance is not kept. In float, logits may differ by 1e-3 and no prediction may change; with
--int8, --fp16 and --bf16 accuracy may fall by one point, or 5 % of the predictions may change where there are no labels.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import (
    add_checkpoint_options,
    add_size_option,
    check_at_least,
    option_flag,
    parse_assumptions,
    print_json,
)
from vitrail.cli.text.progress import clear_progress, count_progress
from vitrail.deploy import RUNTIME_SUFFIXES

if TYPE_CHECKING:
    from vitrail.deploy.export.comparison import VerificationReport

DEFAULT_VERIFY_IMAGES, DEFAULT_CALIBRATION_IMAGES, MAX_GENERATED_IMAGES = 500, 64, 32
OUT_HELP = "output file: " + ", ".join(RUNTIME_SUFFIXES).replace(".xml", ".xml (with a .bin beside it)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail export`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail export deit_tiny.safetensors deit.onnx --verify photos\n"
        "  vitrail export runs/photos-finetune-1 photos.xml --uint8            OpenVINO, normalisation in the graph\n"
        "  vitrail export deit_tiny.safetensors deit.onnx --dynamic-size       positions resampled in the graph\n"
        "  vitrail export deit_tiny.safetensors fast.xml --merge 8 --verify photos\n"
        "  vitrail export runs/photos-finetune-1 small.onnx --int8 --verify photos   sensitive layers stay in float\n"
        "  vitrail export deit_tiny.safetensors deit.pt2                       torch.export program\n"
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint file or directory, run, hf://owner/name")
    parser.add_argument("out", type=Path, metavar="OUT", help=OUT_HELP)
    parser.add_argument("--to", choices=tuple(RUNTIME_SUFFIXES.values()), help="target runtime [by the suffix of OUT]")
    parser.add_argument("--json", action="store_true", help="print the verification as JSON")
    graph = parser.add_argument_group("graph")
    graph.add_argument("--uint8", action="store_true", help="take uint8 pixels and normalise them in the graph")
    graph.add_argument("--dynamic-size", action="store_true", help="take images of any size divisible by the patch")
    add_size_option(graph)
    graph.add_argument("--merge", type=int, default=0, metavar="R", help="tokens merged per layer [0]")
    precision = graph.add_mutually_exclusive_group()
    precision.add_argument("--int8", action="store_true", help="8-bit integers with calibration (onnx, openvino)")
    precision.add_argument("--fp16", action="store_true", help="weights in half precision")
    precision.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    proof = parser.add_argument_group("verification")
    proof.add_argument("--verify", metavar="DATA", help="images to compare on, labelled or not [generated images]")
    proof.add_argument("--split", metavar="NAME", help="split of DATA [test, else validation, else all]")
    proof.add_argument("--map", metavar="FILE", help="class mapping of DATA, as for vitrail evaluate")
    proof.add_argument("--label-from", metavar="REGEX", help="regular expression that finds the class in a file name")
    proof.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_VERIFY_IMAGES,
        metavar="N",
        help=f"maximum images [{DEFAULT_VERIFY_IMAGES}]",
    )
    proof.add_argument(
        "--calibrate",
        metavar="DATA",
        help="images for the calibration of --int8 [images of --verify that are not compared, or generated ones]",
    )
    proof.add_argument(
        "--calibration",
        type=int,
        default=DEFAULT_CALIBRATION_IMAGES,
        metavar="N",
        help=f"calibration images [{DEFAULT_CALIBRATION_IMAGES}]",
    )
    proof.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="in float: difference of logits [0.001]; else points of accuracy [1]",
    )
    proof.add_argument("--force", action="store_true", help="keep the file even if it is beyond the tolerance")
    proof.add_argument("--threads", type=int, metavar="N", help="threads of model and file in the comparison")
    add_checkpoint_options(parser.add_argument_group("checkpoint"))


def run(options: argparse.Namespace) -> int:
    """Export, verify and print the verification, also if it fails."""
    target = target_runtime(options)
    for name in ("limit", "calibration"):
        check_at_least(1, getattr(options, name), f"--{name}")
    if options.threads is not None:
        check_at_least(1, options.threads, "--threads")
    if options.calibrate is not None and not options.int8:
        raise ValueError("--calibrate needs --int8: add it, or leave this out")
    for name in ("split", "map", "label_from"):
        if getattr(options, name) is not None and options.verify is None:
            raise ValueError(f"{option_flag(name)} needs --verify DATA: add it, or leave this out")
    from vitrail.deploy.export.verify import VerificationError

    try:
        report = export_from_options(options, target)
    except VerificationError as refused:
        clear_progress()
        print_report(options, refused.report)
        raise
    finally:
        clear_progress()
    print_report(options, report)
    return 0


def target_runtime(options: argparse.Namespace) -> str:
    """Return the runtime of --to, or that of the suffix of OUT."""
    if options.to is None and options.out.suffix not in RUNTIME_SUFFIXES:
        raise ValueError(f"{options.out}: unknown suffix, use {', '.join(RUNTIME_SUFFIXES)}, or give --to")
    return options.to or RUNTIME_SUFFIXES[options.out.suffix]


def export_from_options(options: argparse.Namespace, target: str) -> "VerificationReport":
    """Return the verification of the export that the options describe."""
    import torch

    from vitrail.checkpoints.load import find_weights
    from vitrail.cli.export_images import load_calibration_images, load_verification_images
    from vitrail.deploy.export.verify import ExportRequest, export_and_verify
    from vitrail.deploy.runtimes.open import open_checkpoint

    progress = count_progress()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    assume = parse_assumptions(options)
    deployed = open_checkpoint(options.model, merge=options.merge, size=options.size, assume=assume, take=options.take)
    assert deployed.model is not None
    precision = next((name for name in ("int8", "fp16", "bf16") if getattr(options, name)), "fp32")
    request = ExportRequest(
        target,
        options.uint8,
        options.dynamic_size,
        options.merge,
        precision,
        options.tolerance,
        options.force,
        options.threads,
    )
    images, notes, names = load_verification_images(options, deployed, progress)
    calibration = None
    if options.int8:
        calibration, more = load_calibration_images(options, deployed, names, progress)
        notes = [*notes, *more]
    for note in (*deployed.notes, *notes):
        print(f"note: {note}", file=sys.stderr)
    return export_and_verify(
        deployed.model,
        deployed.contract,
        options.out,
        request,
        images,
        calibration=calibration,
        bytes_before=sum(file.stat().st_size for file in weight_files(find_weights(options.model))),
        progress=progress,
    )


def weight_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint file or directory."""
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


def print_report(options: argparse.Namespace, report: "VerificationReport") -> None:
    """Print the verification as text or JSON."""
    if options.json:
        print_json(report.as_dict())
        return
    from vitrail.cli.text.export import format_report

    print(format_report(options.model, report))
