"""A small model, images for it, and the command line in this process."""

import csv
import json
from pathlib import Path

import numpy as np

from tests.data.making import tree
from tests.evaluation.made import CLASSES, model
from vitrail.cli import main

__all__ = ["CLASSES", "images", "model", "read", "vitrail"]


def images(root: Path, count: int = 20) -> Path:
    """Create a folder of small distinct images."""
    return tree(root, {f"{number:04d}.png": number for number in range(count)})


def vitrail(*arguments) -> int:
    """Run the command line."""
    return main([str(argument) for argument in arguments])


def read(path: Path) -> list[dict]:
    """Return the rows of a file of any format; empty cells are None."""
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
