"""Convert a checkpoint of any known format to another, and verify the result.

The written file is read back; every tensor must be identical bit for bit, then the logits on a photograph are compared. Only
then is the file renamed to OUT. A model that the target format cannot express is refused with the reason.
"""

import argparse
import json
from pathlib import Path

from vitrail.checkpoints import TARGET_NAMES
from vitrail.cli.describe import format_bytes
from vitrail.cli.options import (
    add_allow_missing_option,
    add_checkpoint_options,
    parse_assumptions,
    parse_classes,
    parse_size,
    print_json,
)
from vitrail.cli.text.progress import byte_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail convert`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail convert vit_base.pth vit_base.safetensors --to vitrail --labels names.txt\n"
        "  vitrail convert hf://facebook/dinov2-base dinov2.safetensors --to timm\n"
        "  vitrail convert deit_tiny.safetensors deit --to hf --licence apache-2.0\n"
        "  vitrail convert deit_tiny.safetensors mine.safetensors --to vitrail --adapter runs/photos-finetune-1/adapter\n"
        "  vitrail convert runs/photos-mae-1/pretraining.safetensors mae --to hf   # with the decoder; --to timm: Facebook's\n"
        "  vitrail convert deit_tiny.safetensors grey.safetensors --to vitrail --classes 10 --size 160x224 --channels 1\n"
    )
    parser.add_argument("source", metavar="IN", help="checkpoint file or directory, or hf://owner/name")
    parser.add_argument("out", metavar="OUT", help="output file; for hf a new directory")
    parser.add_argument(
        "--to", required=True, choices=TARGET_NAMES, metavar="FORMAT", help=f"target format: {', '.join(TARGET_NAMES)}"
    )
    change = parser.add_argument_group("changes")
    change.add_argument(
        "--classes",
        type=parse_classes,
        default=...,
        metavar="N",
        help="number of classes of a new head, initialised to zero; none removes the head",
    )
    change.add_argument("--size", type=parse_size, metavar="N|HxW", help="new image size, positions are resampled")
    change.add_argument(
        "--channels", type=int, metavar="N", help="input channels: the first projection is summed for 1, else repeated"
    )
    change.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA adapter in PEFT's format to merge")
    change.add_argument("--labels", type=Path, metavar="FILE", help="class names: JSON list, or one per line")
    change.add_argument("--licence", metavar="TEXT", help="licence recorded in the file")
    add_checkpoint_options(parser.add_argument_group("checkpoint"))
    add_allow_missing_option(parser)
    parser.add_argument(
        "--image", type=Path, metavar="IMAGE", help="image for the comparison of logits [a photograph in the package]"
    )
    parser.add_argument("--json", action="store_true", help="print the verification as JSON")


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read class names from a JSON list or from lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith(("[", "{")):
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text or JSON ({error})") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} must be a JSON list of names")
    return tuple(names)


def run(options: argparse.Namespace) -> int:
    """Convert, verify and print the verification."""
    from vitrail.checkpoints.convert import SAMPLE_IMAGE
    from vitrail.checkpoints.load import KEEP
    from vitrail.checkpoints.mae import convert_with_decoder

    proof = convert_with_decoder(
        options.source,
        options.out,
        options.to,
        assume=parse_assumptions(options),
        take=options.take,
        allow_missing=options.allow_missing,
        classes=KEEP if options.classes is ... else options.classes,
        image_size=options.size,
        channels=options.channels,
        labels=read_class_names(options.labels) if options.labels else None,
        licence=options.licence,
        adapter=options.adapter,
        image_path=options.image or SAMPLE_IMAGE,
        progress=byte_progress("reading"),
    )
    if options.json:
        print_json(proof.as_dict())
        return 0
    print(f"{options.source} → {proof.path} ({proof.target})")
    print(f"  {proof.tensors} tensors, {format_bytes(proof.bytes)}, read back identical bit for bit")
    print(
        f"  {proof.compared} on a photograph: largest difference {proof.largest_difference:.3g}, "
        f"largest value {proof.largest_logit:.3g}"
    )
    if proof.as_read_by_strangers is not None:
        print(f"  read without the configuration: largest difference {proof.as_read_by_strangers:.3g}")
    for note in proof.notes:
        print(f"  note: {note}")
    return 0
