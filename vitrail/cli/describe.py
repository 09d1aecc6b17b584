"""What a checkpoint is, or what a model would cost.

MODEL is a size and a patch (Ti S B L H g G: "B/16", "G/14"), a hybrid ("R50+B/16") or a BiT ResNet ("R50x1"): the way
through it, with shapes, parameters, multiply-adds and bytes of each stage, before any weight exists. Multiply-adds and
activation bytes are for the whole batch, in 32-bit floats; attention's are for one image.

FILE is a checkpoint (safetensors, .pth, .npz, a directory, hf://owner/name): which form it has and why, the architecture,
whether every tensor has its place, where labels and preprocessing come from, and whether all values are finite.
"""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli import reading
from vitrail.cli.progress import progress

if TYPE_CHECKING:
    from vitrail.models.cost import Cost, Stage

# The same names as in vitrail.models.build, kept here too so that --help need not import PyTorch; a test compares them.
SLOTS = {
    "embed": (("patches", "conv-stem"), "how patches become tokens"),
    "prefix": (("none", "class", "class+distillation"), "tokens before the patches"),
    "pool": (("class", "mean", "mean-norm", "class+mean", "map"), "how tokens become one vector"),
    "block": (("pre", "post", "parallel"), "order of norm, attention and MLP"),
    "mlp": (("gelu", "gelu-tanh", "gelu-quick", "relu", "swiglu"), "kind of MLP"),
    "head": (("linear", "pre-logits"), "what follows the pooling"),
}
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".index.json")
POSITIONS = ("none", "learned1d", "learned2d", "relative", "sincos2d", "sinusoid1d", "rotary2d")


def size(text: str) -> tuple[int, int]:
    """ "384" or "160x224", height first."""
    parts = text.lower().replace("×", "x").split("x")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 384, or HEIGHTxWIDTH like 160x224")
    return numbers[0], numbers[-1]


def classes(text: str) -> int | None:
    """A number of classes, or "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of classes: use 1000, or none") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Each slot of the model is an option."""
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
        "model", metavar="MODEL|FILE", help='"B/16", "R50+B/16", "R50x1"; or a file, a directory, hf://owner/name'
    )
    parser.add_argument("--size", type=size, default=(224, 224), metavar="N|HxW", help="image size (default 224)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--classes", type=classes, default=1000, metavar="N", help="or none, for features")
    parser.add_argument("--channels", type=int, default=3, metavar="N", help="of the image (default 3)")
    parser.add_argument("--json", action="store_true", help="everything for machines, on standard output")
    slots = parser.add_argument_group("slots of a Vision Transformer")
    slots.add_argument(
        "--position",
        metavar="NAME[@PLACE]",
        help=f"{', '.join(POSITIONS)}; @every or @shared adds them at every layer (default learned1d)",
    )
    for name, (names, what) in SLOTS.items():
        slots.add_argument(f"--{name}", metavar="NAME", help=f"{what}: {', '.join(names)}")
    slots.add_argument("--registers", type=int, metavar="N", help="register tokens")
    slots.add_argument("--layer-scale", type=float, metavar="X", help="LayerScale that begins at X")
    slots.add_argument("--qk-norm", action="store_true", default=None, help="normalise queries and keys")
    for name in ("patch", "width", "depth", "heads", "mlp-width"):
        slots.add_argument(f"--{name}", type=int, metavar="N", help="instead of the named size's")
    reading.add_arguments(parser.add_argument_group("for a checkpoint"))
    parser.add_argument("--header", action="store_true", help="of a checkpoint, read no values: quick for large files")
    resnet = parser.add_argument_group("slots of a ResNet")
    resnet.add_argument("--root", choices=("large", "small"), help="small suits images of 32² (default large)")


def run(options: argparse.Namespace) -> int:
    """Counts, then prints a table or JSON; or reports on a checkpoint."""
    if is_checkpoint(options.model):
        return checkpoint(options)
    from vitrail.models.build import configure
    from vitrail.models.cost import count

    names = (
        *SLOTS,
        "position",
        "registers",
        "layer_scale",
        "qk_norm",
        "patch",
        "width",
        "depth",
        "heads",
        "mlp_width",
        "root",
    )
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config = configure(
        options.model, image_size=options.size, classes=options.classes, channels=options.channels, **given
    )
    cost = count(config, options.batch)
    if options.json:
        print(json.dumps({"model": options.model, **cost.as_dict()}, indent=2))
    else:
        print(table(options.model, cost))
    return 0


def is_checkpoint(name: str) -> bool:
    """Whether a path is meant and not a model's name."""
    if re.fullmatch(r"(R\d*\+)?[A-Za-z]+/\d+", name):
        return False
    return name.startswith("hf://") or name.endswith(SUFFIXES) or Path(name).exists()


def checkpoint(options: argparse.Namespace) -> int:
    """The report on a checkpoint. Exit code 1 if it would not be loaded."""
    from vitrail.checkpoints.loading import describe
    from vitrail.checkpoints.report import report, text

    with describe(options.model, reading.assumed(options), options.take) as found:
        made = report(found, None if options.header else progress("reading"))
    print(json.dumps(made, indent=2, ensure_ascii=False) if options.json else text(made))
    return 0 if made["loads"] else 1


def table(name: str, cost: "Cost") -> str:
    """The way through the model, and its totals, for people. Equal layers share a line."""
    rows = [("stage", "shape", "parameters", "multiply-adds", "kept for backward")]
    for stages in _runs(cost.stages):
        first, count = stages[0], len(stages)
        label = first.name if count == 1 else first.name.replace("layer 1", f"layers 1 to {count}")
        rows.append(
            (
                label,
                f"[{', '.join(map(str, first.shape))}]",
                f"{count * first.params:,}",
                number(count * first.macs),
                bytes_of(count * first.activation_bytes),
            )
        )
    rows.append(("total", "", f"{cost.params:,}", number(cost.macs), bytes_of(cost.activation_bytes)))
    lines = _aligned(rows)
    rule = "─" * max(map(len, lines))
    height, width = cost.image_size
    images = "1 image" if cost.batch == 1 else f"{cost.batch} images"
    return "\n".join(
        [
            f"{name}: {images} of {height}×{width}, 32-bit floats",
            "",
            *(lines[0], rule, *lines[1:-1], rule, lines[-1]),
            "",
            *(f"{label:<12}{fact}" for label, fact in _facts(cost)),
        ]
    )


def _facts(cost: "Cost") -> list[tuple[str, str]]:
    facts = [
        ("inference", f"{bytes_of(cost.inference_bytes)}: weights, and what is alive at once"),
        (
            "training",
            f"{bytes_of(cost.training_bytes)}: weights, gradients, Adam's two moments, what is kept for backward",
        ),
    ]
    if cost.macs_every_token > cost.macs:
        every = number(cost.macs_every_token)
        facts.append(
            ("last layer", f"computes the tokens that are read; with every token, {every} multiply-adds in all")
        )
    if cost.tokens:
        matrix, total = bytes_of(cost.attention_bytes_per_matrix), bytes_of(cost.attention_bytes_total)
        facts += [
            ("tokens", f"{cost.tokens:,} for each image"),
            ("attention", f"{cost.attention_entries:,} entries, {matrix}, in each matrix between patches;"),
            ("", f"{cost.attention_matrices} of them, {total} for each image, are computed and never stored"),
        ]
    return facts


def _runs(stages: "list[Stage]") -> "list[list[Stage]]":
    """Consecutive layers that do the same, together."""
    runs: list[list[Stage]] = []
    for stage in stages:
        before = runs[-1][-1] if runs else stage
        both_layers = stage.name.startswith("layer ") and before.name.startswith("layer ")
        if runs and both_layers and replace(stage, name="") == replace(before, name=""):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def number(value: int) -> str:
    """1,234, 5.7 M, 16.46 G."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:,}" if value else "–"


def bytes_of(value: int) -> str:
    """150.1 KB, 192.0 MB: powers of 1,024."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B" if value else "–"
