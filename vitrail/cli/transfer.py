"""Compare probes, head, LoRA and full fine-tuning of a checkpoint on your data, in one table.

The time budget is divided: features are computed once for the probes; each training is then timed for a few steps and gets an
equal share of the remaining time, or as many steps as the recipe would choose. Methods without time are listed. Every run is
kept under --out; the same command continues an interrupted comparison.
"""

import argparse
from functools import partial

from vitrail.cli.options import add_device_option, given_options, parse_names, parse_size, print_json
from vitrail.cli.text.training import TrainingDisplay
from vitrail.cli.train import DATA_OPTIONS, RECIPE_FIELDS, add_data_options

# The names of vitrail.evaluation.transfer, repeated so that --help does not import PyTorch; a test compares them.
METHODS = ("knn", "linear", "head", "lora", "full")

parse_methods = partial(parse_names, known=METHODS, kind="method")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail transfer`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail transfer deit_tiny.safetensors photos                   ten minutes, all methods\n"
        "  vitrail transfer hf://facebook/dinov2-small photos --minutes 60 --out runs/dinov2\n"
        "  vitrail transfer deit_tiny.safetensors photos --methods knn,linear,lora --json\n"
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint: file, directory, hf://owner/name")
    parser.add_argument("data", metavar="DATA", help="folder, file or dataset name, as for `vitrail train`")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="time budget of all methods [10]")
    parser.add_argument(
        "--methods",
        type=parse_methods,
        default=METHODS,
        metavar="NAME,…",
        help="knn, linear (probes), head, lora, full (training) [all]",
    )
    parser.add_argument("--out", metavar="DIR", help="directory of the runs and table.json [runs/DATA-transfer-N]")
    parser.add_argument("--size", type=parse_size, metavar="N|HxW", help="input size in pixels [the model's]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed [0]")
    parser.add_argument("--no-cache", action="store_true", help="compute the features again and do not store them")
    add_data_options(parser.add_argument_group("data"))
    add_device_option(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes that decode and augment images")
    parser.add_argument("--quiet", action="store_true", help="print the table only")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the comparison and print the table."""
    from vitrail.evaluation.transfer import transfer
    from vitrail.training.recipe import Data, Machine
    from vitrail.training.train import choose_directory
    from vitrail.training.trainer import Stopped

    fields = {RECIPE_FIELDS.get(name, name): value for name, value in given_options(options, DATA_OPTIONS).items()}
    out = options.out or choose_directory(options.data, "transfer")
    display = TrainingDisplay(options.quiet)
    try:
        table = transfer(
            options.model,
            Data(options.data, **fields),
            minutes=options.minutes,
            methods=options.methods,
            out=out,
            seed=options.seed,
            size=options.size,
            machine=Machine(device=options.device, workers=options.workers),
            cache=not options.no_cache,
            listeners=(display.on_record,),
            progress=display.progress,
        )
    except Stopped as stopped:
        display.print_line(f"{stopped}. Continue with the same command and --out {out}")
        return 128 + stopped.number
    display.clear()
    if options.json:
        print_json(table.as_dict() | {"out": str(out)})
    else:
        print("\n".join([*table.format_lines(), f"runs    {out}"]))
    return 0
