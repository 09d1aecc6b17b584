"""Pseudo-labels: labels that a teacher predicted for unlabelled images, selected by confidence, stored as CSV.

N images, K classes.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Images
from vitrail.data.sources import load_dataset
from vitrail.data.sources.joined import join_images
from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS, UNLABELLED
from vitrail.utils.files import atomic_write
from vitrail.utils.progress import ProgressCallback

MAX_COPIES = 4  # of an image, so that classes with few pseudo-labels have as many as others
COLUMNS = ("path", "label", "confidence", "copies")


@dataclass(frozen=True)
class PseudoLabels:
    """The images that are learnt with a predicted label."""

    indices: np.ndarray  # int64 [n], in the unlabelled images
    targets: np.ndarray  # int64 [n], classes
    confidence: np.ndarray  # float [n], 0 to 1
    copies: np.ndarray  # int64 [n], how often an image is part of an epoch

    def __len__(self) -> int:
        return len(self.indices)


def select_pseudo_labels(indices: np.ndarray, probabilities: np.ndarray, threshold: float) -> PseudoLabels:
    """Select predictions, probabilities [N, K], of at least this confidence, about equally many of each class.

    The median class sets the number: of larger classes the most confident images are taken, those of smaller ones are repeated
    up to `MAX_COPIES` times (Xie et al. 2020, Noisy Student).
    """
    targets, confidence = probabilities.argmax(1), probabilities.max(1)
    counts = np.bincount(targets[confidence >= threshold], minlength=probabilities.shape[1])
    wanted = int(np.ceil(np.median(counts[counts > 0]))) if counts.any() else 0
    chosen, copies = [], []
    for label in np.flatnonzero(counts):
        mine = np.flatnonzero((targets == label) & (confidence >= threshold))
        mine = mine[np.argsort(-confidence[mine], kind="stable")][:wanted]
        chosen.append(mine)
        copies.append(np.full(len(mine), min(MAX_COPIES, max(1, wanted // len(mine)))))
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *chosen])
    repeats = np.concatenate([np.zeros(0, dtype=np.int64), *copies])
    order = np.argsort(indices[rows], kind="stable")
    rows, repeats = rows[order], repeats[order]
    return PseudoLabels(indices[rows], targets[rows], confidence[rows], repeats)


def write_pseudo_labels(path: Path, labels: PseudoLabels, images: Images, classes: tuple[str, ...]) -> None:
    """Write the names of the images with their labels, confidence and copies, atomically."""
    with atomic_write(path) as file:
        lines = [",".join(COLUMNS)]
        columns = zip(labels.indices, labels.targets, labels.confidence, labels.copies, strict=True)
        for index, target, confidence, copies in columns:
            cells = quote_cell(images.name(int(index))), quote_cell(classes[target]), f"{confidence:.6f}", str(copies)
            lines.append(",".join(cells))
        file.write(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))


def quote_cell(text: str) -> str:
    """Return a cell of a CSV, in quotation marks where it needs them."""
    return '"' + text.replace('"', '""') + '"' if any(character in text for character in ',"\r\n') else text


def load_unlabelled(source: str, progress: ProgressCallback | None = None) -> Images:
    """Return the training images of a source whose labels, if it has any, are not used to train."""
    dataset = load_dataset(source, fractions=TRAIN_ONLY_FRACTIONS, multi_label=UNLABELLED, progress=progress)
    if "train" not in dataset.splits:
        raise ValueError(f"unlabelled={source!r} has no training images: it has {', '.join(dataset.splits)}")
    return dataset["train"]


def read_pseudo_labels(path: Path, images: Images, classes: tuple[str, ...]) -> PseudoLabels:
    """Return what a file says about these images; raise ValueError if it names others, or other classes."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise ValueError(f"the pseudo-labels {path} do not exist: train with unlabelled= again") from None
    rows = list(csv.reader(text.splitlines(keepends=True)))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path}: the first line must be {','.join(COLUMNS)}")
    positions = {images.name(index): index for index in range(len(images))}
    numbers = {name: number for number, name in enumerate(classes)}
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(COLUMNS) or not row[3].isdecimal() or not 1 <= int(row[3]) <= MAX_COPIES:
            raise ValueError(f"{path}, line {line}: expected path, label, confidence and 1 to {MAX_COPIES} copies")
        if row[0] not in positions:
            raise ValueError(f"{path}, line {line}: {row[0]} is no unlabelled image: give the same folder")
        if row[1] not in numbers:
            raise ValueError(f"{path}, line {line}: {row[1]!r} is no class of the labelled images")
    return PseudoLabels(
        np.array([positions[row[0]] for row in rows[1:]], dtype=np.int64),
        np.array([numbers[row[1]] for row in rows[1:]], dtype=np.int64),
        np.array([float(row[2]) for row in rows[1:]]),
        np.array([int(row[3]) for row in rows[1:]], dtype=np.int64),
    )


def add_pseudo_labels(train: Images, source: str, path: Path) -> tuple[Images, str]:
    """Return the training images and, after them, those with pseudo-labels; and a note for the user."""
    if train.target_kind != "single":
        raise ValueError("pseudo-labels are classes: the labelled images need one class each")
    images = load_unlabelled(source)
    labels = read_pseudo_labels(path, images, train.classes)
    added = replace(
        images.select(np.repeat(labels.indices, labels.copies)),
        targets=np.repeat(labels.targets, labels.copies),
        classes=train.classes,
    )
    copies = "" if len(labels) == len(added) else f", {len(added):,} with copies"
    note = f"{len(labels):,} images of {source} have predicted labels ({path.name}{copies})"
    return join_images(train, added), note
