"""Export a model for another runtime, and verify the file.

MODEL is a checkpoint of any known format or a run of `vitrail train`. The file contains labels and preprocessing, so that
`vitrail predict`, `evaluate` and `serve` accept it directly. It is compared with the model on images (--verify DATA, or
generated ones): largest difference, changed predictions, accuracy with intervals where labels exist, size, latency and
throughput. A file beyond the tolerance is not kept. In float, logits may differ by 1e-3 and no prediction may change; with
--int8, --fp16 and --bf16 accuracy may fall by one point, or 5 % of the predictions may change where there are no labels.
Masks are compared by pixel: 0.1 % may change in float; else mIoU may fall by one point, or 1 % may change without labels.
Numbers may differ by 1e-3 standard deviations in float; else R² may fall by 0.01, or without labels numbers may change by 5 %
of their standard deviation on average.

examples:
  vitrail export deit_tiny.safetensors deit.onnx --verify photos
  vitrail export runs/photos-finetune-1 photos.xml --uint8            OpenVINO, normalisation in the graph
  vitrail export deit_tiny.safetensors deit.onnx --dynamic-size       positions resampled in the graph
  vitrail export deit_tiny.safetensors fast.xml --merge 8 --verify photos
  vitrail export runs/photos-finetune-1 small.onnx --int8 --verify photos   sensitive layers stay in float
  vitrail export deit_tiny.safetensors fast.xml --precision auto --verify photos    bf16 if it is faster here
  vitrail export deit_tiny.safetensors deit.pt2                       torch.export program
  vitrail export clip.safetensors text.onnx --text-tower              token ids to unit vectors, and tokenizer.json
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import (
    IGNORE_NOTE,
    CommandParser,
    check_at_least,
    parse_assumptions,
    print_result,
    refuse_options,
)
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import count_progress
from vitrail.deploy import RUNTIME_SUFFIXES
from vitrail.utils.text import format_bytes, format_table

if TYPE_CHECKING:
    from vitrail.deploy.export.comparison import OutputComparison, RuntimeSpeed, VerificationReport

MAX_GENERATED_IMAGES = {"image": 32, "video": 8, "sound": 32}
VERIFY_OPTIONS = ("split", "map", "label_from", "ignore")
IMAGE_OPTIONS = ("uint8", "dynamic_size", "size", "int8", "fp16", "bf16", "precision", "verify", "calibrate")
IMAGE_OPTIONS += ("tolerance", "force", "threads", *VERIFY_OPTIONS)
OUT_HELP = "output file: " + ", ".join(RUNTIME_SUFFIXES).replace(".xml", ".xml (with a .bin beside it)")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail export`."""
    parser.add_checkpoint()
    parser.add_argument("out", type=Path, metavar="OUT", help=OUT_HELP)
    parser.add_option("--to", "target runtime [by the suffix of OUT]", choices=tuple(RUNTIME_SUFFIXES.values()))
    parser.add_option("--text-tower", "export the text tower of a model such as CLIP: token ids to unit vectors")
    files = "directory, tokenizer.json, or bpe_simple_vocab_16e6.txt.gz [that of MODEL]"
    parser.add_option("--tokenizer PATH", f"tokeniser: {files}")
    parser.add_shared("--json")
    graph = parser.add_group("graph")
    graph.add_option("--uint8", "take uint8 pixels and normalise them in the graph")
    graph.add_option("--dynamic-size", "take images of any size divisible by the patch")
    graph.add_shared("--size N|HxW", "--merge R")
    precision = graph.add_mutually_exclusive_group()
    kinds = {"int8": "8-bit integers with calibration (onnx, openvino)"}
    kinds |= {"fp16": "weights in half precision", "bf16": "weights in bfloat16"}
    for kind, text in kinds.items():
        precision.add_argument(f"--{kind}", action="store_true", help=text)
    computed = "precision of matrix products [fp32]; auto: bf16 if native, faster and within the tolerance"
    precision.add_argument("--precision", choices=("auto", "fp32", "bf16"), help=computed)
    proof = parser.add_group("verification")
    proof.add_option("--verify DATA", "images to compare on, labelled or not [generated images]")
    proof.add_shared("--split NAME", "--map FILE", "--label-from REGEX")
    proof.add_shared("--ignore VALUES", note=IGNORE_NOTE)
    proof.add_shared("--limit N", note="500", default=500)
    calibrate = "images for the calibration of --int8 [images of --verify that are not compared, or generated ones]"
    proof.add_option("--calibrate DATA", calibrate)
    proof.add_option("--calibration N", "calibration images [64]", int, default=64)
    proof.add_option("--tolerance X", "in float: difference of logits [0.001]; else points of accuracy [1]", float)
    proof.add_option("--force", "keep the file even if it is beyond the tolerance")
    proof.add_option("--threads N", "threads of model and file in the comparison", int)
    parser.add_checkpoint_options()


def run(options: argparse.Namespace) -> int:
    """Export, verify and print the verification, also if it fails."""
    target = options.to or RUNTIME_SUFFIXES.get(options.out.suffix)
    if target is None:
        raise ValueError(f"{options.out}: unknown suffix, use {', '.join(RUNTIME_SUFFIXES)}, or give --to")
    if options.text_tower:
        return export_text_tower(options)
    refuse_options(options, ("tokenizer",), "needs --text-tower: add it, or leave this out")
    for name in ("limit", "calibration", "threads"):
        check_at_least(1, getattr(options, name), f"--{name}")
    if options.calibrate is not None and not options.int8:
        raise ValueError("--calibrate needs --int8: add it, or leave this out")
    if options.verify is None:
        refuse_options(options, VERIFY_OPTIONS, "needs --verify DATA: add it, or leave this out")
    from vitrail.deploy.export.verify import VerificationError

    try:
        report = export_from_options(options, target)
    except VerificationError as refused:
        print_result(options, refused.report.as_dict(), format_report(options.model, refused.report))
        raise
    return print_result(options, report.as_dict(), format_report(options.model, report))


def export_text_tower(options: argparse.Namespace) -> int:
    """Export the text tower and print what was written."""
    refuse_options(
        options,
        (*IMAGE_OPTIONS, *(("merge",) if options.merge else ())),
        "is for images: leave it out with --text-tower",
    )
    from vitrail.checkpoints.load import find_weights, load_towers
    from vitrail.deploy.export.text import export_text

    reading = {"assume": parse_assumptions(options), "take": options.take, "tokenizer": options.tokenizer}
    result = export_text(load_towers(find_weights(options.model, towers=True), **reading), options.out)
    lines = [
        f"{options.model} → {result.file} ({result.runtime}), tokens [B, {result.context}] to [B, {result.features}]"
    ]
    lines += [f"  compared with the model: largest difference {result.largest_difference:.2g}"]
    lines += [f"  tokeniser: {result.tokenizer or 'none: the model has none'}"]
    return print_result(options, result.as_dict(), lines)


def export_from_options(options: argparse.Namespace, target: str) -> "VerificationReport":
    """Return the verification of the export that the options describe."""
    import torch

    from vitrail.checkpoints.load import find_weights
    from vitrail.cli.export_images import load_calibration_images, load_verification_images
    from vitrail.deploy.export.precision import check_computed_precision, export_in_fastest_precision
    from vitrail.deploy.export.verify import ExportRequest, export_and_verify
    from vitrail.deploy.runtimes.open import open_checkpoint

    check_computed_precision(target, options.precision or "fp32")
    progress = count_progress()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cpu, assume = torch.device("cpu"), parse_assumptions(options)
    deployed = open_checkpoint(options.model, cpu, None, options.merge, options.size, assume, options.take, "fp32")
    assert deployed.model is not None
    precision = next((name for name in ("int8", "fp16", "bf16") if getattr(options, name)), options.precision or "fp32")
    is_auto = precision == "auto"
    graph = (options.uint8, options.dynamic_size, options.merge, precision)
    request = ExportRequest(target, *graph, options.tolerance, options.force, options.threads)
    images, notes, names = load_verification_images(options, deployed, progress)
    calibration = None
    if options.int8:
        calibration, more = load_calibration_images(options, deployed, names, progress)
        notes = [*notes, *more]
    for note in (*deployed.notes, *notes):
        print(f"note: {spell_options(note, options.flags)}", file=sys.stderr)
    path = find_weights(options.model)
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    write = export_in_fastest_precision if is_auto else export_and_verify
    return write(
        deployed.model,
        deployed.contract,
        options.out,
        request,
        images,
        calibration=calibration,
        bytes_before=sum(file.stat().st_size for file in files),
        progress=progress,
    )


def format_report(model: str, report: "VerificationReport") -> list[str]:
    """Return the verification as lines."""
    state = "" if report.passed else "  (beyond the tolerance)"
    lines = [f"{model} → {report.file} ({report.runtime}, {report.precision}){state}"]
    lines += [f"  compared with the model on {report.images:,} {report.media}s ({report.source}):"]
    lines += [f"    {line}" for line in format_comparison(report.compared)]
    if report.features is not None:
        lines.append(f"  features: largest difference {report.features.largest_difference:.3g}")
    for result in report.at_sizes:
        height, width = result.size
        lines.append(f"  at {height}×{width}, generated images: {format_difference(result.compared)}")
    if report.unmerged is not None:
        lines += ["  effect of token merging, compared with the model without it:"]
        lines += [f"    {line}" for line in format_comparison(report.unmerged)]
    lines.append(f"  size: {format_bytes(report.bytes)}, checkpoint {format_bytes(report.bytes_before)}")
    noun = "clip" if report.media == "video" else report.media
    lines += [f"  {line}" for line in format_speeds(report.speeds, report.batch_size, noun)]
    if report.kept:
        lines.append(f"  layers in float: {', '.join(report.kept)}")
    lines += [f"  note: {note}" for note in report.notes]
    return lines + [f"  beyond the tolerance: {refusal}" for refusal in report.refusals]


def format_difference(comparison: "OutputComparison") -> str:
    """Return the largest difference beside the largest value."""
    difference = f"largest difference {comparison.largest_difference:.3g}"
    if comparison.relative is not None:
        difference += f", {comparison.relative:.2g} standard deviations (mean {comparison.mean_relative or 0:.2g})"
    return f"{comparison.what}: {difference}, largest value {comparison.largest:.3g}"


def format_comparison(comparison: "OutputComparison") -> list[str]:
    """Return differences, agreement and accuracy as lines."""
    lines = [format_difference(comparison)]
    if comparison.agreement is not None and comparison.agreement_interval is not None:
        low, high = comparison.agreement_interval
        lines.append(f"same prediction: {comparison.agreement:.2%}  (95 %: {low:.1%} to {high:.1%})")
    elif comparison.agreement is not None:
        lines.append(f"same class: {comparison.agreement:.3%} of the {comparison.compared}")
    if comparison.score is not None:
        score = comparison.score
        if comparison.relative is not None:
            low, high = score.difference_interval
            lines.append(f"{score.measure}: {score.first:.4f} → {score.second:.4f}")
            return [*lines, f"difference: {score.difference:+.4f} (95 %: {low:+.4f} to {high:+.4f})"]
        before, after = (
            f"{value:.2%}" + ("" if interval is None else f" ({interval[0]:.1%} to {interval[1]:.1%})")
            for value, interval in ((score.first, score.first_interval), (score.second, score.second_interval))
        )
        low, high = (100 * bound for bound in score.difference_interval)
        lines.append(f"{score.measure}: {before} → {after}")
        lines.append(f"difference: {100 * score.difference:+.2f} points (95 %: {low:+.2f} to {high:+.2f})")
    return lines


def format_speeds(speeds: "Mapping[str, RuntimeSpeed]", batch_size: int, noun: str) -> list[str]:
    """Return latency and throughput as a table; the measurements are interleaved."""
    first = next(iter(speeds.values())).throughput
    rows = [("speed", f"latency, 1 {noun}", f"{noun}s/s, batch {batch_size}", "")]
    for name, speed in speeds.items():
        ratio = f"{speed.throughput / first:.2f}×"
        rows.append((name, f"{1000 * speed.latency:.2f} ms", f"{speed.throughput:.1f}", ratio))
    return format_table(rows, right=(1, 2, 3))
