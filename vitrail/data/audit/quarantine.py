"""A list of pictures to leave out, for a person to look through and for training to obey: a path, a tab, the reason.

Lines that begin with # are a person's own remarks.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.data.pictures import Dataset

ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}  # a name may hold any of them
PLAIN = {escape: character for character, escape in ESCAPES.items()} | {"\\#": "#"}


def written(pictures: Mapping[str, str]) -> str:
    """Paths with reasons as lines."""
    return "".join(f"{_escaped(path)}\t{' '.join(why.split())}\n" for path, why in sorted(pictures.items()))


def read_quarantine(file: Path) -> dict[str, str]:
    """The lines back: paths with reasons. A list without reasons is as good."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a list of paths in UTF-8") from None
    pairs = (line.rstrip("\r").partition("\t") for line in lines if line.strip() and line[0] != "#")
    return {_plain(path): why for path, _, why in pairs}


def without(dataset: Dataset, names: Collection[str]) -> tuple[Dataset, list[str]]:
    """A dataset without the pictures of these names, and which were left out.

    Names of what has been deleted since are no matter; a list of which nothing fits was made for other data.
    """
    listed = {os.path.abspath(name) for name in names}
    left_out: list[str] = []
    splits = {}
    for split, pictures in dataset.splits.items():
        here = [pictures.name(index) for index in range(len(pictures))]
        keep = np.array([os.path.abspath(name) not in listed for name in here], dtype=bool)
        left_out += [here[index] for index in np.flatnonzero(~keep).tolist()]
        splits[split] = pictures if keep.all() else pictures.only(keep)
    if names and not left_out and all(map(os.path.exists, listed)):
        first = sorted(names)[0]
        raise ValueError(
            f"none of the {len(names):,} paths to leave out is a picture of {dataset.where}; the first is {first}"
        )
    return replace(dataset, splits=splits), left_out


def _escaped(path: str) -> str:
    plain = "".join(ESCAPES.get(character, character) for character in path)
    return "\\" + plain if plain.startswith("#") else plain


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: PLAIN.get(found[0], found[0]), text)
