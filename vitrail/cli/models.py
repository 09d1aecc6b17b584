"""List public checkpoints that every command takes by name, where it takes a checkpoint.

The table has the repository on the Hugging Face Hub, the architecture, parameters, input size, licence, and the published
accuracy on ImageNet-1k with its source. FILTER selects the rows that contain all of its words. A name stands for its
hf:// address; VITRAIL_MODELS=DIR is a directory of weights that is searched before the Hub: DIR/owner/name or DIR/NAME,
a directory or a file (NAME.safetensors).

examples:
  vitrail models
  vitrail models dino
  vitrail models deit base --json
  vitrail train photos --init deit-tiny
  VITRAIL_MODELS=weights vitrail predict deit-tiny photos
"""

import argparse
from typing import Any

from vitrail.checkpoints.known_models import KNOWN_MODELS, KnownModel
from vitrail.cli.options import CommandParser, print_result
from vitrail.utils.text import format_table

COLUMNS = ("name", "model", "parameters", "size", "ImageNet-1k", "licence", "repository")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail models`."""
    parser.add_argument("filter", nargs="*", metavar="FILTER", help="words that a row must contain [list all]")
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Print the table, or the rows that match the filter."""
    models = [model for model in KNOWN_MODELS if matches(model, options.filter)]
    if not models:
        words = " ".join(options.filter)
        raise ValueError(f"no model matches {words!r}: leave out FILTER to list all {len(KNOWN_MODELS)}")
    return print_result(options, [describe_model(model) for model in models], format_models(models))


def matches(model: KnownModel, words: list[str]) -> bool:
    """Return whether a model's row contains all of the words."""
    text = " ".join((model.name, model.repo, model.architecture, model.training, model.licence, model.measure)).lower()
    return all(word.lower() in text for word in words)


def describe_model(model: KnownModel) -> dict[str, Any]:
    """Return the facts of a model as JSON values."""
    names = ("name", "repo", "address", "architecture", "parameters", "size", "classes", "training", "licence")
    facts = {name: getattr(model, name) for name in (*names, "accuracy", "measure", "source")}
    return facts if model.accuracy is not None else facts | {"measure": None}


def format_models(models: list[KnownModel]) -> list[str]:
    """Return the table, then the sources of its accuracies."""
    rows = [COLUMNS, *(format_row(model) for model in models)]
    sources = {model.source: model.measure for model in models if model.source is not None}
    notes = [f"  {measure:<11}{source}" for source, measure in sources.items()]
    if any(model.accuracy is None for model in models):
        notes.append(f"  {'–':<11}no published accuracy was found for exactly these weights")
    count = f"{len(models)} model{'' if len(models) == 1 else 's'}"
    end = f"{count}. Accuracies in per cent as published, not measured here:"
    return [*format_table(rows, right=(2, 3), rules=(1,)), "", end, *notes]


def format_row(model: KnownModel) -> tuple[str, ...]:
    """Return the cells of a model."""
    accuracy = "–" if model.accuracy is None else f"{model.accuracy:.1f} {model.measure}"
    params = f"{model.parameters / 1e6:,.1f} M"
    return model.name, model.architecture, params, str(model.size), accuracy, model.licence, model.repo
