"""A checkpoint of any known form to another, with proof.

What is written is read back and compared, every tensor bit for bit, and then the logits on a photograph; only then does it
take the name OUT. A model that the other form cannot express is refused with the reason.
"""

import argparse
import json
from pathlib import Path

from vitrail.cli import reading
from vitrail.cli.describe import bytes_of, classes, size
from vitrail.cli.progress import progress

# The same names as in vitrail.checkpoints.convert, kept here too so that --help need not import PyTorch; a test compares.
FORMS = ("vitrail", "timm", "hf", "big_vision", "torchvision", "vit-pytorch", "clip", "dinov2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to read, what to write, and what to change on the way."""
    parser.epilog = (
        "examples:\n"
        "  vitrail convert vit_base.pth vit_base.safetensors --to vitrail --labels names.txt\n"
        "  vitrail convert hf://facebook/dinov2-base dinov2.safetensors --to timm\n"
        "  vitrail convert deit_tiny.safetensors deit --to hf --licence apache-2.0\n"
        "  vitrail convert deit_tiny.safetensors mine.safetensors --to vitrail --adapter runs/photos-finetune-1/adapter\n"
        "  vitrail convert runs/photos-mae-1/pretraining.safetensors mae --to hf   # with the decoder; --to timm: Facebook's\n"
        "  vitrail convert deit_tiny.safetensors grey.safetensors --to vitrail --classes 10 --size 160x224 --channels 1\n"
    )
    parser.add_argument("source", metavar="IN", help="a file, a directory, or hf://owner/name")
    parser.add_argument("out", metavar="OUT", help="a file; for hf a new directory")
    parser.add_argument("--to", required=True, choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    change = parser.add_argument_group("change on the way")
    change.add_argument(
        "--classes", type=classes, default=..., metavar="N", help="a new head, zero at first; none for features"
    )
    change.add_argument("--size", type=size, metavar="N|HxW", help="another image size: positions are resampled")
    change.add_argument(
        "--channels", type=int, metavar="N", help="first projection summed for 1, else repeated and scaled"
    )
    change.add_argument("--adapter", type=Path, metavar="DIR", help="merge low-rank additions (LoRA) in PEFT's form")
    change.add_argument("--labels", type=Path, metavar="FILE", help="class names: a JSON list, or one to a line")
    change.add_argument("--licence", metavar="TEXT", help="recorded in the artifact")
    how = parser.add_argument_group("how it is read")
    reading.add_arguments(how)
    reading.add_missing(parser)
    parser.add_argument(
        "--image", type=Path, metavar="PICTURE", help="compare logits on this instead of a photograph of ours"
    )
    parser.add_argument("--json", action="store_true", help="the proof for machines")


def names_in(path: Path) -> tuple[str, ...]:
    """Class names from a JSON list or from lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith(("[", "{")):
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text or JSON ({error})") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: a JSON list of names is wanted")
    return tuple(names)


def run(options: argparse.Namespace) -> int:
    """Converts, and prints the proof."""
    from vitrail.checkpoints.convert import PHOTOGRAPH
    from vitrail.checkpoints.loading import KEEP
    from vitrail.checkpoints.mae import convert

    proof = convert(
        options.source,
        options.out,
        options.to,
        assume=reading.assumed(options),
        take=options.take,
        allow_missing=options.allow_missing,
        classes=KEEP if options.classes is ... else options.classes,
        image_size=options.size,
        channels=options.channels,
        labels=names_in(options.labels) if options.labels else None,
        licence=options.licence,
        adapter=options.adapter,
        picture=options.image or PHOTOGRAPH,
        progress=progress("reading"),
    )
    if options.json:
        print(json.dumps(proof.as_dict(), indent=2, ensure_ascii=False))
        return 0
    print(f"{options.source} → {proof.path} ({proof.target})")
    print(f"  {proof.tensors} tensors, {bytes_of(proof.bytes)}, written and read back the same, bit for bit")
    print(
        f"  {proof.compared} on a photograph: largest difference {proof.largest_difference:.3g}, of {proof.largest_logit:.3g}"
    )
    if proof.as_read_by_strangers is not None:
        print(f"  read by someone who is told nothing: largest difference {proof.as_read_by_strangers:.3g}")
    for note in proof.notes:
        print(f"  note: {note}")
    return 0
