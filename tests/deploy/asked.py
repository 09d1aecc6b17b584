"""A small model, pictures for it, and the command in this process."""

import csv
import json
from pathlib import Path

import numpy as np

from tests.data.making import tree
from tests.evaluation.made import CLASSES, model
from vitrail.cli import main

__all__ = ["CLASSES", "model", "pictures", "read", "vitrail"]


def pictures(root: Path, count: int = 20) -> Path:
    """A folder of small pictures, each of its own."""
    return tree(root, {f"{number:04d}.png": number for number in range(count)})


def vitrail(*arguments) -> int:
    """The command, as typed."""
    return main([str(argument) for argument in arguments])


def read(path: Path) -> list[dict]:
    """The rows of a file of any form; what is empty is None."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    values = np.load(path)
    rows = read(path.with_name(path.name + ".paths.csv"))
    assert len(values) == len(rows)
    return [row | {"features": None if np.isnan(v).all() else v.tolist()} for row, v in zip(rows, values, strict=True)]
