"""Quarantine lists: images to exclude from training, one per line: path, tab, reason.

Lines that start with # are comments.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Dataset

ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}  # characters that a path may contain
UNESCAPES = {escape: character for character, escape in ESCAPES.items()} | {"\\#": "#"}


def format_quarantine(images: Mapping[str, str]) -> str:
    """Return the lines of a quarantine list."""
    return "".join(f"{_escape(path)}\t{' '.join(reason.split())}\n" for path, reason in sorted(images.items()))


def read_quarantine(file: Path) -> dict[str, str]:
    """Read the paths and reasons of a quarantine list; reasons are optional."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: expected one path per line") from None
    pairs = (line.rstrip("\r").partition("\t") for line in lines if line.strip() and line[0] != "#")
    return {_unescape(path): reason for path, _, reason in pairs}


def exclude_images(dataset: Dataset, names: Collection[str]) -> tuple[Dataset, list[str]]:
    """Return the dataset without these images, and the names of the excluded images.

    Deleted files are ignored. A list of existing files of which none belongs to the dataset is an error.
    """
    listed = {os.path.abspath(name) for name in names}
    excluded: list[str] = []
    splits = {}
    for split, images in dataset.splits.items():
        image_names = [images.name(index) for index in range(len(images))]
        keep = np.array([os.path.abspath(name) not in listed for name in image_names], dtype=bool)
        excluded += [image_names[index] for index in np.flatnonzero(~keep).tolist()]
        splits[split] = images if keep.all() else images.select(keep)
    if names and not excluded and all(map(os.path.exists, listed)):
        source, first = dataset.source, min(names)
        raise ValueError(f"none of the {len(names):,} listed paths is an image of {source}; the first is {first}")
    return replace(dataset, splits=splits), excluded


def _escape(path: str) -> str:
    escaped = "".join(ESCAPES.get(character, character) for character in path)
    return "\\" + escaped if escaped.startswith("#") else escaped


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: UNESCAPES.get(match[0], match[0]), text)
