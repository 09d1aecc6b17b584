"""Small models and datasets for fast evaluation."""

import csv
from pathlib import Path

import torch

import vitrail
from tests.data.making import tree
from vitrail.data.preprocessing import Preprocessing

CLASSES = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu")


def model(path: Path, labels=CLASSES, *, seed: int = 0, classes: int | None = None) -> Path:
    """Save a model with random weights and no biases, whose predictions differ between images."""
    torch.manual_seed(seed)
    made = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=classes or len(labels), image_size=8, pool="mean")
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2 / parameter.shape[1] ** 0.5)
        made.state_dict()["position.weight"].normal_(std=0.1)
    path.parent.mkdir(parents=True, exist_ok=True)
    vitrail.save(made, path, labels=labels, preprocessing=Preprocessing((8, 8), (8, 8)))
    return path


def folder(root: Path, classes=CLASSES, each: int = 6, begin: int = 0, split: str = "") -> Path:
    """Create class folders; later classes have more images."""
    files, number = {}, begin
    for index, name in enumerate(classes):
        for _ in range(each + index):
            files[f"{split}{name}/{number:04d}.png"] = number
            number += 1
    return tree(root, files)


def several(root: Path, count: int = 40, classes=CLASSES) -> Path:
    """Create a multi-label list of images."""
    tree(root, {f"{k:03d}.png": k for k in range(count)})
    with (root / "labels.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("path", "label", "split"))
        for k in range(count):
            table.writerow(
                (f"{k:03d}.png", "|".join(c for j, c in enumerate(classes) if (k * 7 + j * 3) % 5 < 2), "test")
            )
    return root / "labels.csv"
