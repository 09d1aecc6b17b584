"""Compare probes, head, LoRA and full fine-tuning of a checkpoint on your data, in one table; for masks, four trainings.

Features are computed once; the probes and the head use them and are not limited by the budget. LoRA and full fine-tuning are
then timed for a few steps and share the remaining time, or get as many steps as the recipe would choose. If it is too short for
both, LoRA comes first. Methods without time are listed with the minutes they need, trainings that did not converge are marked.
Every model is kept under --out; the same command continues an interrupted comparison. For masks, a linear decoder on the last
layer of the frozen backbone (linear) or on the last four (linear-4) and LoRA and full fine-tuning with UPerNet share the time.

examples:
  vitrail transfer deit_tiny.safetensors photos                   ten minutes, all methods
  vitrail transfer hf://facebook/dinov2-small photos --minutes 60 --out runs/dinov2
  vitrail transfer deit_tiny.safetensors photos --methods knn,linear,lora --json
"""

import argparse
from functools import partial

from vitrail.cli.options import CommandParser, parse_names, print_result
from vitrail.cli.text.training import TrainingDisplay
from vitrail.cli.train import add_data_options, data_fields

# The names of vitrail.evaluation.transfer, repeated so that --help does not import PyTorch; a test compares them.
METHODS = ("knn", "linear", "linear-4", "head", "lora", "full")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail transfer`."""
    parser.add_checkpoint()
    parser.add_shared("data DATA")
    parser.add_option("--minutes N", "time budget of all methods [10]", float, default=10.0)
    methods = "knn, linear (probes), head (the linear probe as a model), lora, full (training) [all]; "
    methods += "for masks linear, linear-4 (decoders on the frozen backbone), lora, full [all]"
    parse_methods = partial(parse_names, known=METHODS, kind="method")
    parser.add_option("--methods NAME,…", methods, parse_methods)
    parser.add_option("--out DIR", "directory of the runs and table.json [runs/DATA-transfer-N]")
    parser.add_shared("--size N|HxW")
    parser.add_shared("--seed N", default=0)
    parser.add_shared("--no-cache")
    add_data_options(parser.add_group("data"))
    parser.add_shared("--device auto|cpu|cuda|mps", "--workers N")
    parser.add_option("--quiet", "print the table only")
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Run the comparison and print the table."""
    from vitrail.evaluation.transfer import transfer
    from vitrail.training.recipe import Data, Machine
    from vitrail.training.train import choose_directory
    from vitrail.training.trainer import Stopped

    out = options.out or choose_directory(options.data, "transfer")
    display = TrainingDisplay(options.quiet, options.flags)
    try:
        table = transfer(
            options.model,
            Data(options.data, **data_fields(options)),
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
        return stopped.exit_code
    display.clear()
    return print_result(options, table.as_dict() | {"out": str(out)}, [*table.format_lines(), f"runs    {out}"])
