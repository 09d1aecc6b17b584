"""Write the predicted label or numbers of every image, in the order of the images; of a segmentation model, the mask.

MODEL is a checkpoint of any known format, a run of `vitrail train`, hf://owner/name, or a file of `vitrail export`. A row has
the path, the label and its probability (score); for an unreadable image it has the error instead. --top 5 adds the next
labels. Labels of the dataset are not read. A model of clips takes videos: files, and folders of frames; a score is the
mean probability over all views (clips and crops) of a video.

--resume continues an interrupted run without lost or repeated rows. Under torchrun, each process writes a share of the
images to FILE.part-3-of-8, and the last one to end joins the parts. --part 3/8 does the same without torchrun, on hosts
that need not know each other; `vitrail join FILE` joins parts that were copied to one place.

examples:
  vitrail predict runs/photos-1 photos --out predictions.csv
  vitrail predict deit_tiny.safetensors cat.jpg dog.jpg --out -
  vitrail predict model.safetensors list.csv --top 5 --out predictions.jsonl
  vitrail predict model.safetensors 'shards/{000..099}.tar' --out predictions.parquet --resume
  vitrail predict model.onnx photos --out predictions.csv --json | jq .images_per_second
  torchrun --nproc-per-node 4 -m vitrail predict model.safetensors photos --out predictions.csv
  vitrail predict model.safetensors photos --out predictions.csv --part 3/8 --resume
  vitrail predict segmenter.safetensors photos --out masks/ --overlays
  vitrail predict clips.safetensors videos walk.mp4 --out predictions.csv
  vitrail predict eomt.safetensors photos --out segments/ --panoptic --stuff sky,road
  vitrail predict clip.safetensors photos --out predictions.csv --classes 'a cat,a dog'

formats of --out:
  .csv      path,label,score,error; --top adds label2,score2 and so on
  .jsonl    one object per line; --top adds the list `answers`
  .parquet  the columns of the CSV

formats of --out for regression models:
  .csv      path, one column per target, error; .jsonl and .parquet alike

formats of --out for segmentation models:
  masks/    a directory: a palette PNG per image, and masks.csv with the paths and the shares of the classes
  .jsonl    one object per line: path, height, width, classes with label, share and run lengths, error
  .json     a COCO file: images, annotations with run lengths, categories
  -         a line per image with the shares of its classes

formats of --out with --panoptic:
  segments/ a directory: COCO's panoptic PNGs, and panoptic.json with their segments
  .jsonl    one object per line: path, height, width, segments with label, score, area, box and run lengths, error
  -         a line per image with its segments
"""

import argparse
import gc
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import (
    CommandParser,
    check_at_least,
    given_options,
    inference_options,
    print_result,
    refuse_options,
    zero_shot_model,
)
from vitrail.cli.text.progress import clear_progress, count_progress
from vitrail.utils.text import format_image_count

if TYPE_CHECKING:
    from vitrail.deploy.predict.formats import RowFormat
    from vitrail.deploy.predict.inputs import ImageInputs
    from vitrail.deploy.predict.predict import RuntimePool
    from vitrail.deploy.predict.write import Summary

PANOPTIC_OPTIONS = ("stuff", "score_threshold", "mask_threshold", "overlap_threshold")
MASK_OPTIONS = ("overlays", "inference", "flip", "panoptic", *PANOPTIC_OPTIONS)
PATHS_HELP = (
    "files, folders (recursive), patterns ('*.jpg', '**/*.png', 'part-{00..09}.tar'), lists of paths (CSV, TSV, JSON "
    "lines, Parquet), tar shards, Parquet with embedded images, both also at https:// and s3://"
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail predict`."""
    add_output_options(parser, "csv, jsonl or parquet; of masks a directory/, jsonl or json (COCO)")
    parser.add_option("--top K", "labels per image, most probable first [1]", int)
    parser.add_shared("--names FILE")
    parser.add_zero_shot_options()
    masks = parser.add_group("segmentation models")
    masks.add_option("--overlays", "also write NAME.overlay.jpg, the mask over the image, to the directory of --out")
    modes = "whole: image resized to the model's size; sliding: overlapping windows [whole]"
    masks.add_option("--inference", modes, choices=("whole", "sliding"))
    masks.add_option("--flip", "average with the predictions for the mirror image")
    segments = parser.add_group("panoptic segments of EoMT models")
    segments.add_option("--panoptic", "write objects and regions instead of a class for each pixel")
    segments.add_shared("--stuff NAMES")
    segments.add_option("--score-threshold P", "least probability of a segment's class [0.8]", float)
    segments.add_option("--mask-threshold P", "least probability of a pixel in its segment [0.5]", float)
    segments.add_option("--overlap-threshold P", "least share of a mask that no other segment covers [0.8]", float)


def run(options: argparse.Namespace) -> int:
    """Write the predictions."""
    check_at_least(1, options.top, "--top")
    return write_output(options, "logits", options.top or 1)


def add_output_options(parser: CommandParser, formats: str, required: bool = True) -> None:
    """Add the options that `vitrail predict` and `vitrail embed` share."""
    parser.add_shared("model MODEL")
    parser.add_argument("paths", metavar="PATHS", nargs="+" if required else "*", help=PATHS_HELP)
    parser.add_option("--out FILE", f"output file, {formats} by its suffix; - for standard output", required=required)
    parser.add_option("--format NAME", f"output format, {formats} [from the suffix of FILE]")
    parser.add_option("--resume", "continue an interrupted run")
    parser.add_option("--force", "start again and replace FILE when the new one is complete")
    parser.add_option("--part K/N", "compute the K-th of N shares of the images, to FILE.part-K-of-N")
    parser.add_option("--limit N", "maximum number of images, from the first [all]", int)
    parser.add_shared("--cache-size SIZE", "--json")
    parser.add_compute_options()


def write_output(options: argparse.Namespace, output_kind: Any, top: int) -> int:
    """Write one row per image to --out and print a summary."""
    summary = compute_output(options, output_kind, top)
    if summary is None:
        return 130
    lines = format_summary(options, summary)
    if options.out == "-":
        print_note("\n".join(lines))
    else:
        print_result(options, summary.as_dict(), lines)
    return 0


def compute_output(options: argparse.Namespace, output_kind: Any, top: int) -> "Summary | None":
    """Write one row per image to --out and return the summary; None if interrupted, with a note how to continue."""
    gc.disable()  # the imports create many objects that all stay; collecting during them costs a tenth of the time
    from vitrail.deploy.predict.formats import select_format
    from vitrail.deploy.predict.inputs import collect_inputs, take_images
    from vitrail.deploy.predict.masks import PANOPTIC_TABLE, TABLE, check_directory, is_directory, needs_masks
    from vitrail.deploy.predict.predict import check_input_media, open_pool
    from vitrail.deploy.predict.processes import is_restarted, process_share, share_choices
    from vitrail.deploy.predict.resume import check_resumable, journal_path, partial_path, read_recorded_precision
    from vitrail.deploy.predict.write import PredictionInterrupted, compute_state_checksum, write_outputs
    from vitrail.deploy.runtimes.open import ask_media

    gc.enable()
    gc.freeze()
    is_folder = output_kind == "logits" and options.out != "-" and is_directory(options.out)
    is_panoptic = bool(given_options(options, ("panoptic",)))
    table = PANOPTIC_TABLE if is_panoptic else TABLE
    out = os.path.join(options.out, table) if is_folder else options.out  # the file that is written and resumed
    for_masks = output_kind == "logits" and (is_panoptic or needs_masks(options.out, options.format))
    row_format = None if for_masks else select_format(options.out, options.format, output_kind, top)
    if options.out == "-" and (options.json or options.resume):
        raise ValueError(f"--{'json' if options.json else 'resume'} needs --out FILE")
    if options.resume and options.force:
        raise ValueError("--resume continues and --force starts again: give one of them")
    check_at_least(1, options.limit, "--limit")
    compute = inference_options(options)
    # The options that determine the rows: a resumed run must have the same ones.
    names = ("merge", "precision", "tolerance", "size", "take", "limit", "format")
    identity = {"top": top, "assume": sorted(options.assume)} | {name: getattr(options, name) for name in names}
    identity |= {"names": compute.names} if compute.names else {}
    identity |= given_options(options, MASK_OPTIONS)
    zero_shot = zero_shot_model(options) if output_kind == "logits" else None
    if zero_shot is not None:
        compute = replace(compute, assume=None, take=None)  # facts of the file that was read
        identity |= given_options(options, ("classes", "template")) | {"weights": compute_state_checksum(zero_shot)}
    share = process_share(part=options.part)
    if out != "-" and is_restarted() and journal_path(partial_path(Path(out), share.rank, share.world)).is_file():
        options.resume, options.force = True, False
    if is_folder:
        check_directory(Path(options.out), table)
    if out != "-" and not (is_folder and not os.path.exists(options.out)):  # before any computation
        check_resumable(Path(out), share.rank, share.world, resume=options.resume, force=options.force)
    if options.resume and compute.precision == "auto":  # the rows of a file have one precision
        identity["precision"], recorded = read_recorded_precision(Path(out), share.rank, share.world)
        compute = replace(compute, precision=recorded)
    show = count_progress() if not share.rank else None
    try:
        media = take_images if is_panoptic else ask_media(zero_shot or options.model, compute.assume, compute.take)
        inputs = collect_inputs(options.paths, show, media)
        total = len(inputs) if options.limit is None else min(options.limit, len(inputs))
        opened_for = "queries" if is_panoptic else output_kind
        with share_choices(share) if options.precision == "auto" else nullcontext():
            model = open_pool(zero_shot or options.model, opened_for, compute, share.largest(total), print_note)
        check_input_media(model.deployed, inputs)
        labels, targets = model.deployed.contract.labels, model.deployed.contract.targets
        if model.masks is not None:
            model, row_format = prepare_masks(options, model, inputs, total, share.world)
        elif row_format is None or given_options(options, MASK_OPTIONS):
            kind = "classes" if targets is None else "numbers"
            refuse_options(options, MASK_OPTIONS, f"is for segmentation models: {model.deployed.name} predicts {kind}")
            raise ValueError(f"--out {options.out} is for masks: {model.deployed.name} predicts {kind}, give a .csv")
        elif targets is not None and output_kind == "logits":
            what = f"is for classes of images, and {model.deployed.name} predicts numbers: leave it out"
            refuse_options(options, ("top",), what)
            row_format = select_format(options.out, options.format, output_kind, top, targets)
        elif labels is not None and top > len(labels):
            raise ValueError(f"--top must be <= {len(labels):,}, the classes of {model.deployed.name}, got {top}")
        return write_outputs(
            model,
            inputs,
            out,
            row_format,
            top=top,
            limit=options.limit,
            options=identity,
            share=share,
            resume=options.resume,
            force=options.force,
            progress=show,
        )
    except PredictionInterrupted as stopped:
        print_note(f"vitrail {options.command}: interrupted after {stopped.rows:,} of {stopped.count:,} images")
        if options.out != "-":
            print_note(f"continue with: {resume_command(options, 1 if options.part else share.world)}")
        return None


def prepare_masks(
    options: argparse.Namespace, pool: "RuntimePool", inputs: "ImageInputs", count: int, world: int
) -> "tuple[RuntimePool, RowFormat]":
    """Return the pool of a segmentation model, with overlays if asked for, and the format of its masks or segments."""
    from vitrail.deploy.predict.masks import MaskFiles, delete_interrupted_masks, select_mask_format
    from vitrail.deploy.predict.panoptic import PanopticFiles, select_panoptic_format
    from vitrail.deploy.predict.predict import with_overlays
    from vitrail.deploy.runtimes.masks import class_colours
    from vitrail.deploy.runtimes.panoptic import PanopticInference

    name, contract = pool.deployed.name, pool.deployed.contract
    refuse_options(options, ("top",), f"is for classes of images, and {name} predicts masks: leave it out")
    wanted, labels = (options.out, options.format), contract.labels or ()
    if isinstance(pool.masks, PanopticInference):
        row_format = select_panoptic_format(*wanted, labels, pool.masks.reader.things, inputs, count)
    else:
        row_format = select_mask_format(*wanted, labels, class_colours(contract), inputs, count)
    if isinstance(row_format, MaskFiles | PanopticFiles):
        row_format = replace(row_format, overlays=options.overlays)
        Path(options.out).mkdir(parents=True, exist_ok=True)
        if options.force and world == 1:  # of several processes, another may have written new ones
            delete_interrupted_masks(Path(options.out), row_format.table)
    elif options.overlays:
        raise ValueError(f"--overlays needs a directory, for example --out masks/, got --out {options.out}")
    return with_overlays(pool) if options.overlays else pool, row_format


def print_note(text: str) -> None:
    """Print a line on standard error, over the progress line."""
    clear_progress()
    print(text, file=sys.stderr, flush=True)


def resume_command(options: argparse.Namespace, world: int) -> str:
    """Return the command that continues, with the same number of processes."""
    arguments = [argument for argument in options.arguments if argument not in ("--force", "--resume")]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # the others run on other machines
    machines = ["--nnodes", str(world // local)] if world > local else []
    launcher = ["torchrun", *machines, "--nproc-per-node", str(local), "-m"] if world > 1 else []
    return shlex.join([*launcher, "vitrail", *arguments, "--resume"])


def format_summary(options: argparse.Namespace, summary: "Summary") -> list[str]:
    """Return the summary as lines."""
    count = summary.images
    process = f"process {summary.rank + 1} of {summary.processes}: " if summary.processes > 1 else ""
    lines = [*summary.notes]
    if summary.errors:
        lines.append(
            f"{process}{summary.errors:,} of {count:,} {summary.media}s are unreadable: see the error in their rows"
        )
    resumed = f" ({summary.resumed:,} from the earlier run)" if summary.resumed else ""
    speed = f", {summary.images_per_second:,.1f} {summary.media}s/s" if count > summary.resumed else ""
    compute = f"{summary.runtime}, {summary.precision}, {summary.workers} in parallel, batch size {summary.batch}"
    lines.append(
        f"{process}{format_image_count(count, summary.media)}{resumed} in {summary.seconds:,.1f} s{speed}; {compute}"
    )
    if options.out != "-":
        where = f"{summary.part} is complete; the last part joins all, or use: vitrail join"
        lines.append(options.out if summary.whole else f"{where} {shlex.quote(options.out)}")
    return lines
