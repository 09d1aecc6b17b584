"""Convert a checkpoint of any known format to another, and verify the result.

The written file is read back; every tensor must be identical bit for bit, then the logits on a photograph are compared. Only
then is the file renamed to OUT. A model that the target format cannot express is refused with the reason.

examples:
  vitrail convert vit_base.pth vit_base.safetensors --to vitrail --labels names.txt
  vitrail convert hf://facebook/dinov2-base dinov2.safetensors --to timm
  vitrail convert deit_tiny.safetensors deit --to hf --licence apache-2.0
  vitrail convert deit_tiny.safetensors mine.safetensors --to vitrail --adapter runs/photos-finetune-1/adapter
  vitrail convert runs/photos-mae-1/pretraining.safetensors mae --to hf   # with the decoder; --to timm: Facebook's
  vitrail convert clip.safetensors zero.safetensors --to vitrail --zero-shot "a cat,a dog"
  vitrail convert runs/photos-finetune-1/model.safetensors both.safetensors --to vitrail --interpolate zero.safetensors
  vitrail convert deit_tiny.safetensors grey.safetensors --to vitrail --classes 10 --size 160x224 --channels 1
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.checkpoints import TARGET_NAMES
from vitrail.cli.describe import format_bytes
from vitrail.cli.options import CHECKPOINT_HELP, CommandParser, parse_assumptions, print_result, refuse_options
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import byte_progress

if TYPE_CHECKING:
    from vitrail.checkpoints.convert import ConversionReport


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
    texts = parser.add_group("zero-shot classifiers and fine-tuning that keeps what they could (WiSE-FT)")
    names = "class names with commas, a file, or imagenet: the image tower becomes a classifier by these texts"
    texts.add_option("--zero-shot NAMES", names)
    prompt = 'text with {} for the class name (repeatable: features are averaged) ["a photo of a {}."]'
    texts.add_option("--template TEXT", prompt, action="append", default=[])
    texts.add_option(
        "--tokenizer PATH", "tokeniser: directory, tokenizer.json, or bpe_simple_vocab_16e6.txt.gz [that of IN]"
    )
    start = "model that IN was fine-tuned from: weights between both are written"
    texts.add_option("--interpolate MODEL", start)
    texts.add_option("--alpha A", "share of IN in the weights, from 0 (MODEL) to 1 (IN) [0.5]", float)
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

    check_text_options(options)
    if options.zero_shot is not None:
        return write_classifier(options)
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
        interpolate=options.interpolate,
        alpha=0.5 if options.alpha is None else options.alpha,
    )
    return print_proof(options, proof)


def check_text_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need another one, or that a classifier by texts has no use for."""
    if options.interpolate is None:
        refuse_options(options, ("alpha",), "needs --interpolate")
    if options.zero_shot is None:
        refuse_options(options, ("template", "tokenizer"), "needs --zero-shot")
        return
    if options.to != "vitrail":
        raise ValueError(
            f"--zero-shot needs --to vitrail: the format {options.to} has no head that normalises features"
        )
    given = ("interpolate", "adapter", "labels", "stuff", "channels", "text_tower", "allow_missing", "licence", "size")
    refuse_options(options, given, "does not go with --zero-shot: convert twice")
    if options.classes is not ...:
        raise ValueError("--classes does not go with --zero-shot, whose names are the classes: leave it out")


def write_classifier(options: argparse.Namespace) -> int:
    """Write the image tower as a classifier by texts."""
    from vitrail.checkpoints.artifact import CheckpointContract
    from vitrail.checkpoints.convert import SAMPLE_IMAGE, write_and_verify
    from vitrail.checkpoints.load import find_weights, load_towers, require_preprocessing
    from vitrail.prompts import TEMPLATES, zero_shot

    reading = {"assume": parse_assumptions(options), "take": options.take, "tokenizer": options.tokenizer}
    towers = load_towers(find_weights(options.source, towers=True), **reading)
    try:
        model = zero_shot(towers, options.zero_shot, options.template or TEMPLATES)
    except ValueError as error:  # here --classes is a number
        raise ValueError(str(error).replace("classes=", "--zero-shot")) from None
    contract = CheckpointContract(
        model.config, model.labels, require_preprocessing(options.source, model), dict(model.card)
    )
    proof = write_and_verify(contract, model.state_dict(), Path(options.out), "vitrail", options.image or SAMPLE_IMAGE)
    return print_proof(options, proof)


def print_proof(options: argparse.Namespace, proof: "ConversionReport") -> int:
    """Print what was written and how it was verified."""
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
