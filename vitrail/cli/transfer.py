"""What a trained model is worth on your pictures: probes, its head, LoRA and full fine-tuning, in one table.

The time is shared out: features are computed once for the probes; each training is then measured for a few steps and gets as many
as fit into an equal part of what is left, or as many as the recipe would choose. What there is no time for is named. Every run is
kept under --out; the same command started again goes on with what is missing.
"""

import argparse
import json
from typing import Any

from vitrail.cli.describe import size
from vitrail.cli.live import Live
from vitrail.cli.train import DATA, FIELDS, add_few, fractions, told

# The same names as in vitrail.transfer.table, kept here too so that --help need not import PyTorch; a test compares.
METHODS = ("knn", "linear", "head", "lora", "full")


def methods(text: str) -> tuple[str, ...]:
    """knn,linear as names."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [name for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no method: use {', '.join(METHODS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"which methods? Use {', '.join(METHODS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, data, time and methods."""
    parser.epilog = (
        "examples:\n"
        "  vitrail transfer deit_tiny.safetensors photos                   ten minutes, all methods\n"
        "  vitrail transfer hf://facebook/dinov2-small photos --minutes 60 --out runs/dinov2\n"
        "  vitrail transfer deit_tiny.safetensors photos --methods knn,linear,lora --json\n"
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint: a file, a directory, hf://owner/name")
    parser.add_argument("data", metavar="DATA", help="a folder, a file or a name, as for `vitrail train`")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for everything together (10)")
    parser.add_argument(
        "--methods",
        type=methods,
        default=METHODS,
        metavar="NAME,…",
        help="knn, linear (probes), head, lora, full (trainings); all of them unless given",
    )
    parser.add_argument("--out", metavar="DIR", help="runs and table.json; runs/DATA-transfer-N unless given")
    parser.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures as the model sees them")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--no-cache", action="store_true", help="compute features anew, and keep none")
    data = parser.add_argument_group("data")
    data.add_argument("--split", type=fractions, metavar="A,B,C", help="train, validation, test, where there are none")
    data.add_argument("--task", choices=("auto", "single", "multi"), help="one label each, or several")
    data.add_argument("--balance", choices=("none", "weights", "sampling"), help="for classes with few pictures")
    data.add_argument("--allow-class-mismatch", action="store_true", default=None, help="warn, do not refuse")
    data.add_argument("--quarantine", metavar="FILE", help="pictures to leave out")
    add_few(data)
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that prepare pictures")
    parser.add_argument("--quiet", action="store_true", help="say nothing but the table")
    parser.add_argument("--json", action="store_true", help="the table for machines")


def run(options: argparse.Namespace) -> int:
    """Compares, and prints the table."""
    from vitrail.engine.loop import Stopped
    from vitrail.recipe import Data, Machine
    from vitrail.training import unused
    from vitrail.transfer import transfer

    about: dict[str, Any] = {FIELDS.get(name, name): given for name, given in told(options, DATA).items()}
    out = options.out or unused(options.data, "transfer")
    live = Live(options.quiet)
    try:
        table = transfer(
            options.model,
            Data(options.data, **about),
            minutes=options.minutes,
            methods=options.methods,
            out=out,
            seed=options.seed,
            size=options.size,
            machine=Machine(device=options.device, workers=options.workers),
            cache=not options.no_cache,
            listeners=(live.hear,),
            progress=live.progress,
        )
    except Stopped as stopped:
        live.say(f"{stopped}. The same command with --out {out} goes on")
        return 128 + stopped.number
    live.clear()
    if options.json:
        print(json.dumps(table.as_dict() | {"out": str(out)}, indent=2, ensure_ascii=False))
    else:
        print("\n".join([*table.lines(), f"runs    {out}"]))
    return 0
