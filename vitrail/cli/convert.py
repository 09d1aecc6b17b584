"""Convert a checkpoint of any known format to another, and verify the result.

The written file is read back; every tensor must be identical bit for bit, then the logits on a photograph are compared. Only
then is the file renamed to OUT. A model that the target format cannot express is refused with the reason.

examples:
  vitrail convert vit_base.pth vit_base.safetensors --to vitrail --labels names.txt
  vitrail convert hf://facebook/dinov2-base dinov2.safetensors --to timm
  vitrail convert deit_tiny.safetensors deit --to hf --licence apache-2.0
  vitrail convert deit_tiny.safetensors mine.safetensors --to vitrail --adapter runs/photos-finetune-1/adapter
  vitrail convert runs/photos-mae-1/pretraining.safetensors mae --to hf   # with the decoder; --to timm: Facebook's
  vitrail convert deit_tiny.safetensors grey.safetensors --to vitrail --classes 10 --size 160x224 --channels 1
"""

import argparse
from pathlib import Path

from vitrail.checkpoints import TARGET_NAMES
from vitrail.cli.describe import format_bytes
from vitrail.cli.options import CHECKPOINT_HELP, CommandParser, parse_assumptions, print_result
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import byte_progress


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail convert`."""
    parser.add_argument("source", metavar="IN", help=CHECKPOINT_HELP)
    parser.add_argument("out", metavar="OUT", help="output file; for hf a new directory")
    targets = f"target format: {', '.join(TARGET_NAMES)}"
    parser.add_option("--to FORMAT", targets, choices=TARGET_NAMES, required=True)
    change = parser.add_group("changes")
    change.add_shared("--classes N", note="the checkpoint's; a new head is initialised to zero", default=...)
    change.add_shared("--size N|HxW")
    change.add_shared("--channels N", note="the checkpoint's; for 1 the first projection is summed, else repeated")
    change.add_option("--adapter DIR", "LoRA adapter in PEFT's format to merge", Path)
    change.add_option("--labels FILE", "class names: JSON list, or one per line; or the word imagenet")
    change.add_shared("--stuff NAMES")
    change.add_shared("--text-tower")
    change.add_shared("--licence TEXT")
    parser.add_checkpoint_options()
    missing = "initialise missing tensors that match at random ('blocks.11.*'; repeatable); each one is listed"
    parser.add_option("--allow-missing PATTERN", missing, action="append", default=[])
    parser.add_option("--image IMAGE", "image for the comparison of logits [a photograph in the package]", Path)
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Convert, verify and print the verification."""
    from vitrail.checkpoints.convert import SAMPLE_IMAGE
    from vitrail.checkpoints.load import KEEP
    from vitrail.checkpoints.mae import convert_with_decoder
    from vitrail.data.class_names import name_outputs

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
        labels=name_outputs(options.labels, None, "labels=") if options.labels else None,
        stuff=options.stuff,
        licence=options.licence,
        adapter=options.adapter,
        image_path=options.image or SAMPLE_IMAGE,
        progress=byte_progress("reading"),
        text_tower=options.text_tower,
    )
    lines = [
        f"{options.source} → {proof.path} ({proof.target})",
        f"  {proof.tensors} tensors, {format_bytes(proof.bytes)}, read back identical bit for bit",
        f"  {proof.compared} on a photograph: largest difference {proof.largest_difference:.3g}, "
        f"largest value {proof.largest_logit:.3g}",
    ]
    if proof.as_read_by_strangers is not None:
        lines.append(f"  read without the configuration: largest difference {proof.as_read_by_strangers:.3g}")
    notes = (f"  note: {spell_options(note, options.flags)}" for note in proof.notes)
    return print_result(options, proof.as_dict(), [*lines, *notes])
