"""The way through a model: shapes, parameters, multiply-adds and bytes of each stage, before any weight exists.

MODEL is a size and a patch (Ti S B L H g G: "B/16", "G/14"), a hybrid ("R50+B/16") or a BiT ResNet ("R50x1").
Multiply-adds and activation bytes are for the whole batch, in 32-bit floats; attention's are for one image.
"""

import argparse
import json

# The same names as in vitrail.models.build, kept here too so that --help need not import PyTorch; a test compares them.
SLOTS = {
    "embed": (("patches", "conv-stem"), "how patches become tokens"),
    "prefix": (("none", "class", "class+distillation"), "tokens before the patches"),
    "pool": (("class", "mean", "mean-norm", "class+mean", "map"), "how tokens become one vector"),
    "block": (("pre", "post", "parallel"), "order of norm, attention and MLP"),
    "mlp": (("gelu", "relu", "swiglu"), "kind of MLP"),
    "head": (("linear", "pre-logits"), "what follows the pooling"),
}
POSITIONS = ("none", "learned1d", "learned2d", "relative", "sincos2d", "sinusoid1d", "rotary2d")


def size(text: str) -> tuple[int, int]:
    """"384" or "160x224", height first."""
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
    )
    parser.add_argument("model", metavar="MODEL", help='a size and a patch like "B/16", "R50+B/16", or "R50x1"')
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
    resnet = parser.add_argument_group("slots of a ResNet")
    resnet.add_argument("--root", choices=("large", "small"), help="small suits images of 32² (default large)")


def run(options: argparse.Namespace) -> int:
    """Counts, then prints a table or JSON."""
    from vitrail.models.build import config_for
    from vitrail.models.cost import count

    names = (*SLOTS, "position", "registers", "layer_scale", "qk_norm", "patch", "width", "depth", "heads", "mlp_width", "root")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config = config_for(
        options.model, image_size=options.size, classes=options.classes, channels=options.channels, **given
    )
    cost = count(config, options.batch)
    if options.json:
        print(json.dumps({"model": options.model, **cost.as_dict()}, indent=2))
    else:
        print(table(options.model, cost))
    return 0
