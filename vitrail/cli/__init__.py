"""Command line: one module per command. Nothing here imports PyTorch before a command runs.

The docstring of a command's module is its help: the description, then the examples.
"""

import argparse
import os
import sys
import time
from importlib import import_module

import vitrail
from vitrail.cli.options import CommandParser
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import clear_progress
from vitrail.data.remote.settings import CACHE_SIZE
from vitrail.data.remote.urls import RemoteError, redact
from vitrail.utils.slurm import adopt_step

COMMANDS = {
    "train": "train or fine-tune a classifier on a folder of images",
    "pretrain": "train without labels: masked patches, MAE, DINO, features of a teacher",
    "transfer": "compare probes, head, LoRA and full fine-tuning of a checkpoint on your data",
    "paper": "run a study of the ViT paper at your scale and compare the finding",
    "recipes": "list the training recipes and their expected results",
    "check": "find defects in a dataset before training",
    "label": "find wrong labels, propose labels, choose images to label, apply decisions",
    "evaluate": "measure a model with confidence intervals, or probe its features",
    "predict": "write the predicted label of every image",
    "embed": "write the feature vector of every image",
    "join": "join the parts that several hosts have predicted",
    "search": "index a folder of images and find nearest neighbours",
    "export": "export a model to ONNX, OpenVINO or torch.export, and verify the file",
    "serve": "serve models over HTTP, with a web page",
    "inspect": "write attention maps, rollout, distances and other figures of a model",
    "report": "write the report page of a run, or compare several runs",
    "models": "list public checkpoints that can be given by name",
    "describe": "describe a checkpoint, or the shapes and cost of an architecture",
    "convert": "convert a checkpoint to another project's format, and verify it",
    "push": "upload a model with its card to the Hugging Face Hub",
    "doctor": "examine the installation and the machine, and test that both work",
}

EPILOG = """\
examples:
  vitrail check photos                            find defects in a folder
  vitrail label suspects photos                   find labels that are probably wrong
  vitrail train photos --init deit-tiny           fine-tune a public checkpoint; see `vitrail models`
  vitrail train fashion-mnist                     from scratch; see `vitrail recipes`
  vitrail describe B/16                           shapes and cost of ViT-B/16
  vitrail describe S/16 --size 160x224 --pool mean --registers 4
  vitrail describe G/14 --json
  vitrail describe deit_tiny.safetensors          format, architecture and completeness of a checkpoint
  vitrail convert deit_tiny.safetensors deit --to hf
  vitrail doctor                                  if something does not work; `vitrail doctor --json` for a bug report

`vitrail COMMAND --help` shows the options of a command. VITRAIL_TRACEBACK=1 shows the traceback of an error.
"""


def build_parser() -> CommandParser:
    """Return the parser of all commands."""
    main_parser = CommandParser(
        prog="vitrail",
        description="Vision Transformers, from the paper to deployment.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"vitrail {vitrail.__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    flags: dict[str, str] = {}
    for name, summary in COMMANDS.items():
        command = import_module(f"vitrail.cli.{name}")
        description, heading, examples = (command.__doc__ or "").partition("examples:\n")
        sub = commands.add_parser(
            name,
            help=summary,
            description=description.rstrip(),
            epilog=heading + examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_shared("--traceback")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, flags=flags)
        flags |= list_flags(sub)  # a message may advise another command
    return main_parser


def list_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a command and its parts, by the names of their values."""
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                flags |= list_flags(part)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: after an error 2, for a full disk or lost processes 1, after Ctrl-C 130."""
    for name in ("stdout", "stderr"):  # a daemon may have closed them; a terminal may lack some characters
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    started = time.monotonic()
    options = build_parser().parse_args(arguments)
    options.started = started
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    if getattr(options, "cache_size", None) is not None:
        os.environ[CACHE_SIZE] = options.cache_size  # worker processes read it too
    try:
        adopt_step()  # a task of srun is then a process of torchrun
        return options.run(options)
    except BrokenPipeError:  # `vitrail describe … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RemoteError) as error:
        clear_progress()
        if options.traceback or os.environ.get("VITRAIL_TRACEBACK"):
            raise
        print(f"vitrail {options.command}: {redact(spell_options(str(error), options.flags))}", file=sys.stderr)
        return getattr(error, "exit_code", 2)  # 1 where the machine is at fault, not the user
    except KeyboardInterrupt:
        clear_progress()
        print(f"vitrail {options.command}: interrupted", file=sys.stderr)
        return 130
