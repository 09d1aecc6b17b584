"""The command line: one thin module per command. Nothing here imports PyTorch before a command needs it."""

import argparse
import os
import sys
from importlib import import_module

import vitrail

COMMANDS = {
    "train": "a folder of pictures to a model that can be trusted",
    "pretrain": "pictures without labels to a model with good features: masked patches, MAE, DINO, a teacher",
    "transfer": "what a model is worth on your pictures: probes, head, LoRA and all of it, in one table",
    "paper": "the paper's studies as programs: run one at your scale, and see whether it agrees",
    "recipes": "the recipes that training follows, and what to expect of them",
    "check": "what is wrong with a dataset, before it is trained on",
    "evaluate": "how good a model is, with the uncertainty of every number",
    "predict": "what a model says of pictures: files, folders, shards, a million of them",
    "embed": "what a model makes of pictures before its head: a vector of features for each",
    "search": "embed a folder once, then find the pictures nearest to a picture",
    "export": "a model to a file for another runtime, proven beside the original",
    "serve": "a model as a service: many clients at once, and a page to try it on",
    "inspect": "what a model looks at: figures, arrays and a page to explore",
    "report": "a run's page anew, or several runs side by side",
    "describe": "what a checkpoint is; or what a model is made of and costs, before it exists",
    "convert": "a checkpoint to another project's form, proven bit for bit",
    "push": "a model to the Hugging Face Hub, with its card",
}

EPILOG = """\
examples:
  vitrail check photos                            what is wrong with a folder, before it is trained on
  vitrail train photos --init deit_tiny.safetensors
  vitrail train fashion-mnist                     from scratch; `vitrail recipes` says what to expect
  vitrail describe B/16                           the way through ViT-B/16, with its cost
  vitrail describe S/16 --size 160x224 --pool mean --registers 4
  vitrail describe G/14 --json                    the same for machines
  vitrail describe deit_tiny.safetensors          what a checkpoint is, and whether it is whole
  vitrail convert deit_tiny.safetensors deit --to hf

`vitrail COMMAND --help` teaches each command. VITRAIL_TRACEBACK=1 shows where an error comes from.
"""


def parser() -> argparse.ArgumentParser:
    """The commands and, for the one that is asked for, its options."""
    main_parser = argparse.ArgumentParser(
        prog="vitrail",
        description="Vision Transformers, from the paper to a model that ships.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"vitrail {vitrail.__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = import_module(f"vitrail.cli.{name}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--traceback", action="store_true", help="show where an error comes from")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return main_parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command. A mistake of the user's is one line and exit code 2; Ctrl-C is 130."""
    for name in ("stdout", "stderr"):  # a daemon may have closed them, and not every terminal can show every letter
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (to the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `vitrail describe … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if options.traceback or os.environ.get("VITRAIL_TRACEBACK"):
            raise
        print(f"vitrail {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vitrail {options.command}: interrupted", file=sys.stderr)
        return 130
