"""Trained models that the user gives to a study, measured as its own models are and shown beside them.

STUDY/given.json holds their numbers. They take no part in the finding: their training differs in everything.
"""

import os
from pathlib import Path
from typing import Any, TypedDict

from vitrail.checkpoints.known_models import expand_name
from vitrail.checkpoints.load import load
from vitrail.studies.study import CellResult, Numbers, Study
from vitrail.training.recipe import Data
from vitrail.training.runs.record import write_json
from vitrail.utils.json import read_json_file

GIVEN_FILE = "given.json"


class GivenRecord(TypedDict):
    """The content of given.json: the numbers of each model by its name."""

    models: dict[str, Numbers]


def read_given(directory: Path) -> tuple[CellResult, ...]:
    """Return the results of the models that were given to the study in a directory."""
    path = directory / GIVEN_FILE
    if not path.is_file():
        return ()
    try:
        models = read_json_file(path, GivenRecord)["models"]
    except ValueError as error:
        raise ValueError(f"cannot read {error}: delete it, and give --model again") from None
    return tuple(CellResult({"model": name}, "given", numbers, 0.0) for name, numbers in models.items())


def check_given(study: Study, path: str) -> None:
    """Raise ValueError if the study measures nothing of a given model, or if there is no such file."""
    if study.measure_given is None:
        raise ValueError(f"study {study.name} does not support --model: it has nothing to measure without training")
    if (expanded := expand_name(path)) == path and not path.startswith("hf://") and not os.path.exists(expanded):
        raise ValueError(f"no such model: {path}")


def measure_given_model(study: Study, data: Data, directory: Path, path: str) -> None:
    """Measure a trained model and store its numbers under its name, in place of those of another with the same name."""
    check_given(study, path)
    assert study.measure_given is not None
    numbers = study.measure_given(load(expand_name(path)), data)
    known: dict[str, Any] = {str(result.at["model"]): result.numbers for result in read_given(directory)}
    write_json(directory / GIVEN_FILE, {"models": known | {name_model(path): numbers}})


def name_model(path: str) -> str:
    """Return the name of a model file in tables; of a run that of its directory."""
    plain = Path(path.removeprefix("hf://"))
    return plain.parent.name if plain.name == "model.safetensors" and plain.parent.name else plain.stem
