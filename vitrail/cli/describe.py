"""Describe a checkpoint, or the cost of an architecture before any weight exists.

MODEL is a size and a patch (Ti S B L H g G: "B/16", "G/14"), a hybrid ("R50+B/16") or a BiT ResNet ("R50x1"). The table has
the shape, parameters, multiply-adds and bytes of each stage. Multiply-adds and activation bytes are for the whole batch, in
32-bit floats; those of attention are for one image.

FILE is a checkpoint (safetensors, .pth, .npz, a directory, hf://owner/name). The report has its format and the evidence for
it, the architecture, missing and unused tensors, the origin of labels and preprocessing, and whether all values are finite.
"""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import (
    add_checkpoint_options,
    given_options,
    parse_assumptions,
    parse_classes,
    parse_size,
    print_json,
)
from vitrail.cli.text.progress import byte_progress
from vitrail.models.sizes import SLOT_NAMES
from vitrail.utils.text import format_table

if TYPE_CHECKING:
    from vitrail.models.flops import Cost, Stage

CHECKPOINT_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".index.json")
SIZE_OPTIONS = ("patch", "width", "depth", "heads", "mlp_width")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail describe`: one for each slot of a model."""
    parser.epilog = (
        "examples:\n"
        "  vitrail describe B/16 --size 384 --batch 8\n"
        "  vitrail describe S/16 --position sincos2d --pool mean --registers 4 --channels 1 --size 160x224\n"
        "  vitrail describe Ti/4 --width 128 --depth 6 --heads 4 --size 28 --channels 1 --classes 10\n"
        "  vitrail describe R152x4 --json\n"
        "  vitrail describe deit_tiny.safetensors\n"
        "  vitrail describe my_vit.pth --assume heads=6 --assume mean=imagenet\n"
        "  vitrail describe hf://google/vit-base-patch16-224 --header\n"
    )
    parser.add_argument(
        "model",
        metavar="MODEL|FILE",
        help='architecture ("B/16", "R50+B/16", "R50x1"), or checkpoint: file, directory, hf://owner/name',
    )
    parser.add_argument("--size", type=parse_size, default=(224, 224), metavar="N|HxW", help="image size [224]")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images per batch [1]")
    parser.add_argument(
        "--classes",
        type=parse_classes,
        default=1000,
        metavar="N",
        help="number of classes, or none for features [1000]",
    )
    parser.add_argument("--channels", type=int, default=3, metavar="N", help="channels of the image [3]")
    parser.add_argument("--json", action="store_true", help="print the description as JSON")
    slots = parser.add_argument_group("slots of a Vision Transformer")
    for name, (names, meaning) in SLOT_NAMES.items():
        at = "; @every or @shared adds it at every layer [learned1d]" if name == "position" else ""
        metavar = "NAME[@every|@shared]" if name == "position" else "NAME"
        slots.add_argument(f"--{name}", metavar=metavar, help=f"{meaning}: {', '.join(names)}{at}")
    slots.add_argument("--registers", type=int, metavar="N", help="number of register tokens [0]")
    slots.add_argument("--layer-scale", type=float, metavar="X", help="initial value of LayerScale [no LayerScale]")
    slots.add_argument("--qk-norm", action="store_true", default=None, help="normalise queries and keys")
    for name in SIZE_OPTIONS:
        words = name.replace("_", " ")
        slots.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{words} [the named size's]")
    add_checkpoint_options(parser.add_argument_group("checkpoint"))
    parser.add_argument("--header", action="store_true", help="do not read the values of a checkpoint: fast")
    resnet = parser.add_argument_group("slots of a ResNet")
    resnet.add_argument("--root", choices=("large", "small"), help="stem; small suits images of 32×32 [large]")


def run(options: argparse.Namespace) -> int:
    """Print the cost table of an architecture, or the report on a checkpoint."""
    if is_checkpoint(options.model):
        return describe_checkpoint(options)
    from vitrail.models.flops import count
    from vitrail.models.registry import configure

    given = given_options(options, (*SLOT_NAMES, "registers", "layer_scale", "qk_norm", *SIZE_OPTIONS, "root"))
    config = configure(
        options.model, image_size=options.size, classes=options.classes, channels=options.channels, **given
    )
    cost = count(config, options.batch)
    if options.json:
        print_json({"model": options.model, **cost.as_dict()})
    else:
        print(format_cost_table(options.model, cost))
    return 0


def is_checkpoint(name: str) -> bool:
    """Return whether `name` is a checkpoint and not the name of an architecture."""
    if re.fullmatch(r"(R\d*\+)?[A-Za-z]+/\d+", name):
        return False
    return name.startswith("hf://") or name.endswith(CHECKPOINT_SUFFIXES) or Path(name).exists()


def describe_checkpoint(options: argparse.Namespace) -> int:
    """Print the report on a checkpoint and return 1 if it cannot be loaded."""
    from vitrail.checkpoints.card import build_report, format_report
    from vitrail.checkpoints.load import inspect_checkpoint

    with inspect_checkpoint(options.model, parse_assumptions(options), options.take) as checkpoint:
        report = build_report(checkpoint, None if options.header else byte_progress("reading"))
    if options.json:
        print_json(report)
    else:
        print(format_report(report))
    return 0 if report["loads"] else 1


def format_cost_table(name: str, cost: "Cost") -> str:
    """Return the stages of a model with their cost as a table. Equal consecutive layers share a line."""
    rows = [("stage", "shape", "parameters", "multiply-adds", "kept for backward")]
    for stages in _group_equal_layers(cost.stages):
        first, count = stages[0], len(stages)
        label = first.name if count == 1 else first.name.replace("layer 1", f"layers 1 to {count}")
        rows.append(
            (
                label,
                f"[{', '.join(map(str, first.shape))}]",
                f"{count * first.params:,}",
                format_count(count * first.macs),
                format_bytes(count * first.activation_bytes),
            )
        )
    rows.append(("total", "", f"{cost.params:,}", format_count(cost.macs), format_bytes(cost.activation_bytes)))
    height, width = cost.image_size
    images = "1 image" if cost.batch == 1 else f"{cost.batch} images"
    return "\n".join(
        [
            f"{name}: {images} of {height}×{width}, 32-bit floats",
            "",
            *format_table(rows, right=(2, 3, 4), rules=(1, len(rows) - 1)),
            "",
            *(f"{label:<12}{fact}" for label, fact in _cost_facts(cost)),
        ]
    )


def _cost_facts(cost: "Cost") -> list[tuple[str, str]]:
    facts = [
        ("inference", f"{format_bytes(cost.inference_bytes)}: weights, and activations alive at the same time"),
        (
            "training",
            f"{format_bytes(cost.training_bytes)}: weights, gradients, two Adam moments, activations for backward",
        ),
    ]
    if cost.macs_every_token > cost.macs:
        every = format_count(cost.macs_every_token)
        facts.append(
            ("last layer", f"only the tokens that the head reads are computed; with all tokens {every} multiply-adds")
        )
    if cost.tokens:
        matrix, total = format_bytes(cost.attention_bytes_per_matrix), format_bytes(cost.attention_bytes_total)
        facts += [
            ("tokens", f"{cost.tokens:,} per image"),
            ("attention", f"{cost.attention_entries:,} entries, {matrix}, per attention matrix between patches;"),
            ("", f"{cost.attention_matrices} matrices, {total} per image, computed and never stored"),
        ]
    return facts


def _group_equal_layers(stages: "list[Stage]") -> "list[list[Stage]]":
    """Return the stages with equal consecutive layers grouped."""
    groups: list[list[Stage]] = []
    for stage in stages:
        before = groups[-1][-1] if groups else stage
        both_layers = stage.name.startswith("layer ") and before.name.startswith("layer ")
        if groups and both_layers and replace(stage, name="") == replace(before, name=""):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def format_count(value: int) -> str:
    """Return a count as 1,234, 5.70 M or 16.46 G."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:,}" if value else "–"


def format_bytes(value: int) -> str:
    """Return a number of bytes as 150.1 KB or 192.0 MB, in powers of 1,024."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B" if value else "–"
