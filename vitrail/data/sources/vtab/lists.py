"""Pictures in files beside lists of them: DTD, Flowers-102, Pets, SUN397, retinopathy; and Caltech-101, which has none."""

import csv
from pathlib import Path

import numpy as np

from vitrail.data.labels import ordered
from vitrail.data.opening import SUFFIXES
from vitrail.data.sources.files import Files
from vitrail.data.sources.parts import Fractions
from vitrail.data.sources.vtab.found import Found, lines, needed

Listed = tuple[Path, str, str | None]  # a file, its label, its split
GRADES = ("0", "1", "2", "3", "4")  # of retinopathy, from none to proliferative
SHOTS = 30  # pictures of each class of Caltech-101 to learn from: the other ones are for testing


def listed(
    pictures: list[Listed],
    order: tuple[str, ...] | None = None,
    fractions: Fractions | None = None,
    notes: tuple[str, ...] = (),
) -> Found:
    """Files with their labels and splits; classes are sorted, unless they have an order."""
    labels = [label for _, label, _ in pictures]
    store = Files.of(str(path) for path, _, _ in pictures)
    return Found(store, labels, [split for *_, split in pictures], order or ordered(labels), fractions, notes)


def dtd(folder: Path) -> Found:
    """images/<class>/…, and labels/train1.txt, val1.txt and test1.txt with a line for each: banded/banded_0002.jpg."""
    found: list[Listed] = []
    for split, name in (("train", "train1"), ("validation", "val1"), ("test", "test1")):
        for line in lines(needed(folder, f"labels/{name}.txt")):
            found.append((folder / "images" / line, line.split("/")[0], split))
    return listed(found)


def flowers(folder: Path) -> Found:
    """jpg/image_00001.jpg and on; the labels, 1 to 102, in imagelabels.mat, and which are which in setid.mat."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    paths = needed(folder, "imagelabels.mat"), needed(folder, "setid.mat")
    try:
        labels = loadmat(paths[0])["labels"].reshape(-1)
        sets = loadmat(paths[1])
        parts = {"train": sets["trnid"], "validation": sets["valid"], "test": sets["tstid"]}
    except (MatReadError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{paths[0]} and {paths[1].name} are not Flowers-102's ({error}): get them again") from None
    return listed(
        [
            (folder / "jpg" / f"image_{number:05d}.jpg", str(labels[number - 1]), split)
            for split, numbers in parts.items()
            for number in numbers.reshape(-1).tolist()
        ],
        order=tuple(str(label + 1) for label in range(102)),
    )


def pets(folder: Path) -> Found:
    """images/Abyssinian_100.jpg, and annotations/trainval.txt and test.txt: name, class, species, breed. VTAB validates on a
    fifth of the first."""
    found: list[Listed] = []
    for split, name in (("train", "trainval"), ("test", "test")):
        for line in lines(needed(folder, f"annotations/{name}.txt")):
            picture = line.split()[0]
            found.append((folder / "images" / f"{picture}.jpg", picture.rpartition("_")[0], split))
    return listed(found, fractions=(0.8, 0.2, 0.0))


def sun397(folder: Path) -> Found:
    """a/abbey/sun_….jpg, and the publisher's first partition, Training_01.txt and Testing_01.txt: /a/abbey/sun_….jpg."""
    found: list[Listed] = []
    for split, name in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        inside = "Partitions/" if (folder / "Partitions" / name).is_file() else ""
        for line in lines(needed(folder, inside + name)):
            where = line.strip("/")
            found.append((folder / where, where.rpartition("/")[0].partition("/")[2], split))
    return listed(found, notes=("the publisher's first partition, which is not VTAB's",))


def caltech(folder: Path) -> Found:
    """101_ObjectCategories/<class>/image_0001.jpg: 30 of each class to learn from, the others to test, BACKGROUND_Google too."""
    found: list[Listed] = []
    chance = np.random.default_rng(0)
    for folder_of_class in sorted(path for path in needed(folder, "101_ObjectCategories").iterdir() if path.is_dir()):
        pictures = sorted(path for path in folder_of_class.iterdir() if path.suffix.lower() in SUFFIXES)
        chosen = set(chance.permutation(len(pictures))[:SHOTS].tolist())
        for place, path in enumerate(pictures):
            found.append((path, folder_of_class.name, "train" if place in chosen else "test"))
    return listed(found, notes=("30 pictures of each class to learn from, drawn here",))


def retinopathy(folder: Path) -> Found:
    """Kaggle's trainLabels.csv (image, level) with train/10_left.jpeg, and retinopathy_solution.csv (image, level, Usage) with
    test/…: what was public there is to validate on, what was private to test."""
    found: list[Listed] = []
    for name, pictures in (("trainLabels.csv", "train"), ("retinopathy_solution.csv", "test")):
        path = needed(folder, name)
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                try:
                    usage = {"Public": "validation", "Private": "test"}[row["Usage"]] if pictures == "test" else "train"
                    found.append((folder / pictures / f"{row['image']}.jpeg", GRADES[int(row["level"])], usage))
                except (KeyError, ValueError, IndexError):
                    raise ValueError(
                        f"{path}: {dict(row)} is no image with a level of 0 to 4"
                        + " and a Usage" * (pictures == "test")
                    ) from None
    return listed(found, order=GRADES)
