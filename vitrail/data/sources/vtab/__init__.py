"""VTAB datasets in their publishers' files, without TensorFlow: `svhn:FOLDER`, `clevr-count:FOLDER`.

The name selects the task, since the files of CLEVR, dSprites and smallNORB serve several. Datasets published as class
folders, such as EuroSAT, are split as VTAB splits them. Those published as image files are read here, from lists and
annotations, the others in `arrays.py`.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.decode import IMAGE_SUFFIXES
from vitrail.data.labels import sort_class_names
from vitrail.data.sources.files import FileStore, read_class_folders
from vitrail.data.sources.manifest import build_dataset
from vitrail.data.sources.splits import Fractions, ReadOptions
from vitrail.data.sources.vtab import arrays

ListedFile = tuple[Path, str, str | None]  # path, label, split
RETINOPATHY_GRADES = ("0", "1", "2", "3", "4")  # from none to proliferative
CALTECH_TRAIN_IMAGES = 30  # per class; the others are the test split
CLEVR_COUNTS = tuple(map(str, range(3, 11)))  # objects in a scene
CLEVR_DISTANCE_BINS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)  # distance of the closest object
CLEVR_DISTANCE_CLASSES = tuple(f"over {threshold:g}" for threshold in CLEVR_DISTANCE_BINS)
KITTI_VEHICLES = frozenset({"Car", "Van", "Truck"})
KITTI_DISTANCE_BINS = (-100.0, 8.0, 20.0, 999.0)  # distance of the closest vehicle; the last bin is for none
KITTI_DISTANCE_CLASSES = ("near", "over 8 m", "over 20 m", "none")
NO_VEHICLE_METRES = 1000.0


def find_bin(thresholds: Sequence[float], value: float) -> int:
    """Return the index of the last threshold below the value."""
    return max(i for i, threshold in enumerate(thresholds) if threshold < value)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file without blank lines and comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def build_records(
    files: Sequence[ListedFile],
    class_order: tuple[str, ...] | None = None,
    fractions: Fractions | None = None,
    notes: tuple[str, ...] = (),
) -> arrays.VtabRecords:
    """Build the records of files with labels and splits; classes are sorted unless an order is given."""
    labels = [label for _, label, _ in files]
    store = FileStore.from_paths(str(path) for path, _, _ in files)
    splits = [split for *_, split in files]
    return arrays.VtabRecords(store, labels, splits, class_order or sort_class_names(labels), fractions, notes)


def read_dtd(folder: Path) -> arrays.VtabRecords:
    """Read images/<class>/… and labels/train1.txt, val1.txt, test1.txt with lines such as banded/banded_0002.jpg."""
    files: list[ListedFile] = []
    for split, name in (("train", "train1"), ("validation", "val1"), ("test", "test1")):
        for line in read_lines(arrays.require_published(folder, f"labels/{name}.txt")):
            files.append((folder / "images" / line, line.split("/")[0], split))
    return build_records(files)


def read_flowers(folder: Path) -> arrays.VtabRecords:
    """Read jpg/image_00001.jpg …, the labels 1 to 102 in imagelabels.mat, and the splits in setid.mat."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    paths = arrays.require_published(folder, "imagelabels.mat"), arrays.require_published(folder, "setid.mat")
    try:
        labels = loadmat(paths[0])["labels"].reshape(-1)
        sets = loadmat(paths[1])
        parts = {"train": sets["trnid"], "validation": sets["valid"], "test": sets["tstid"]}
    except (MatReadError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        names = f"{paths[0]} and {paths[1].name}"
        raise ValueError(f"{names} are not the files of Flowers-102 ({error}): download them again") from None
    numbered = ((split, number) for split, numbers in parts.items() for number in numbers.reshape(-1).tolist())
    files = [(folder / "jpg" / f"image_{n:05d}.jpg", str(labels[n - 1]), split) for split, n in numbered]
    return build_records(files, class_order=tuple(map(str, range(1, 103))))


def read_pets(folder: Path) -> arrays.VtabRecords:
    """Read images/Abyssinian_100.jpg …, and annotations/trainval.txt and test.txt: name, class, species, breed.

    VTAB validates on a fifth of trainval.
    """
    files: list[ListedFile] = []
    for split, name in (("train", "trainval"), ("test", "test")):
        for line in read_lines(arrays.require_published(folder, f"annotations/{name}.txt")):
            image = line.split()[0]
            files.append((folder / "images" / f"{image}.jpg", image.rpartition("_")[0], split))
    return build_records(files, fractions=(0.8, 0.2, 0.0))


def read_sun397(folder: Path) -> arrays.VtabRecords:
    """Read a/abbey/sun_….jpg, and the publisher's first partition, Training_01.txt and Testing_01.txt."""
    files: list[ListedFile] = []
    for split, name in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        prefix = "Partitions/" if (folder / "Partitions" / name).is_file() else ""
        for line in read_lines(arrays.require_published(folder, prefix + name)):
            path = line.strip("/")
            files.append((folder / path, path.rpartition("/")[0].partition("/")[2], split))
    return build_records(files, notes=("splits: the publisher's first partition, not VTAB's",))


def read_caltech(folder: Path) -> arrays.VtabRecords:
    """Read 101_ObjectCategories/<class>/image_0001.jpg: 30 training images per class, the others for testing."""
    files: list[ListedFile] = []
    rng = np.random.default_rng(0)
    root = arrays.require_published(folder, "101_ObjectCategories")
    for class_folder in sorted(path for path in root.iterdir() if path.is_dir()):
        images = sorted(path for path in class_folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        chosen = set(rng.permutation(len(images))[:CALTECH_TRAIN_IMAGES].tolist())
        for i, path in enumerate(images):
            files.append((path, class_folder.name, "train" if i in chosen else "test"))
    return build_records(files, notes=("30 random training images per class, not VTAB's selection",))


def read_retinopathy(folder: Path) -> arrays.VtabRecords:
    """Read Kaggle's trainLabels.csv (image, level) with train/10_left.jpeg, and retinopathy_solution.csv with test/…

    The latter has the columns image, level, Usage; public images are the validation split, private ones the test split.
    """
    files: list[ListedFile] = []
    for name, part in (("trainLabels.csv", "train"), ("retinopathy_solution.csv", "test")):
        path = arrays.require_published(folder, name)
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                try:
                    usage = {"Public": "validation", "Private": "test"}[row["Usage"]] if part == "test" else "train"
                    path_of_image = folder / part / f"{row['image']}.jpeg"
                    files.append((path_of_image, RETINOPATHY_GRADES[int(row["level"])], usage))
                except (KeyError, ValueError, IndexError):
                    needs = "image, level of 0 to 4" + " and Usage" * (part == "test")
                    raise ValueError(f"{path}: invalid row {dict(row)}: expected {needs}") from None
    return build_records(files, class_order=RETINOPATHY_GRADES)


def read_clevr(folder: Path, task: str) -> arrays.VtabRecords:
    """Read images/train/… and scenes/CLEVR_train_scenes.json; val is the test split, since test has no scenes."""
    files: list[ListedFile] = []
    for split, part in (("train", "train"), ("test", "val")):
        path = arrays.require_published(folder, f"scenes/CLEVR_{part}_scenes.json")
        try:
            for scene in json.loads(path.read_text(encoding="utf-8"))["scenes"]:
                label = str(len(scene["objects"]))
                if task == "distance":
                    distance = min(item["pixel_coords"][2] for item in scene["objects"])
                    label = CLEVR_DISTANCE_CLASSES[find_bin(CLEVR_DISTANCE_BINS, distance)]
                files.append((folder / "images" / part / scene["image_filename"], label, split))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path} has no CLEVR scenes ({error!r}): download it again") from None
    return build_records(files, class_order=CLEVR_COUNTS if task == "count" else CLEVR_DISTANCE_CLASSES)


def read_kitti(folder: Path) -> arrays.VtabRecords:
    """Read training/image_2/000000.png and training/label_2/000000.txt, one object per line: type first, x, y, z at 11 to 13.

    With the devkit's mapping, whole drives are in one split, since frames of one drive look alike.
    """
    drives = read_drive_splits(folder)
    files: list[ListedFile] = []
    for path in sorted(arrays.require_published(folder, "training/label_2").glob("*.txt")):
        try:
            objects = [line.split() for line in read_lines(path)]
            depths = [float(fields[13]) for fields in objects if fields[0] in KITTI_VEHICLES]
        except (ValueError, IndexError):
            raise ValueError(f"{path} is not a KITTI label file of 15 words per line: download it again") from None
        label = KITTI_DISTANCE_CLASSES[find_bin(KITTI_DISTANCE_BINS, min([*depths, NO_VEHICLE_METRES]))]
        split = None if drives is None else drives[int(path.stem)]
        files.append((folder / "training" / "image_2" / f"{path.stem}.png", label, split))
    if drives is not None:
        return build_records(files, class_order=KITTI_DISTANCE_CLASSES)
    note = "frames of one drive may be in several splits: put the devkit's folder mapping beside training"
    return build_records(files, class_order=KITTI_DISTANCE_CLASSES, fractions=(0.8, 0.1, 0.1), notes=(note,))


def read_drive_splits(folder: Path) -> list[str] | None:
    """Return the split of each image by its drive, 10 % of the drives for validation and test; None without a mapping."""
    mapping, order = folder / "mapping" / "train_mapping.txt", folder / "mapping" / "train_rand.txt"
    if not mapping.is_file() or not order.is_file():
        return None
    frames = [line.split()[1] for line in read_lines(mapping)]
    names = sorted(set(frames))
    shuffled = [names[i] for i in np.random.default_rng(0).permutation(len(names))]
    tenth = max(1, round(len(names) / 10))
    sides = dict.fromkeys(names, "train") | dict.fromkeys(shuffled[:tenth], "validation")
    sides |= dict.fromkeys(shuffled[tenth : 2 * tenth], "test")
    numbers = [int(number) for number in order.read_text().replace("\n", ",").split(",") if number.strip()]
    return [sides[frames[number - 1]] for number in numbers]


@dataclass(frozen=True)
class VtabLayout:
    """The files by which a published dataset is recognised, and its reader; None for class folders."""

    files: tuple[str, ...]
    reader: Callable[[Path], arrays.VtabRecords] | None = None


FOLDER_FRACTIONS = (0.6, 0.2, 0.2)  # VTAB's split of class folders
NORB_MATRICES = tuple(f"{name}-{kind}.mat" for name in arrays.NORB_FILES.values() for kind in ("dat", "info"))
CAMELYON_PARTS = arrays.CAMELYON_SPLITS.values()
CAMELYON_FILES = tuple(arrays.CAMELYON_FILE.format(part, which) for part in CAMELYON_PARTS for which in "xy")
VTAB_LAYOUTS = {
    "caltech-101": VtabLayout(("101_ObjectCategories",), read_caltech),
    "dtd": VtabLayout(("labels/train1.txt", "labels/val1.txt", "labels/test1.txt", "images"), read_dtd),
    "flowers-102": VtabLayout(("imagelabels.mat", "setid.mat", "jpg"), read_flowers),
    "pets": VtabLayout(("annotations/trainval.txt", "annotations/test.txt", "images"), read_pets),
    "sun397": VtabLayout(("a/abbey",), read_sun397),
    "svhn": VtabLayout(("train_32x32.mat", "test_32x32.mat"), arrays.read_svhn),
    "patch-camelyon": VtabLayout(CAMELYON_FILES, arrays.read_camelyon),
    "eurosat": VtabLayout(("AnnualCrop",)),
    "resisc45": VtabLayout(("airplane",)),
    "retinopathy": VtabLayout(("trainLabels.csv", "retinopathy_solution.csv", "train", "test"), read_retinopathy),
    "clevr-count": VtabLayout(("scenes/CLEVR_train_scenes.json", "images"), partial(read_clevr, task="count")),
    "clevr-distance": VtabLayout(("scenes/CLEVR_train_scenes.json", "images"), partial(read_clevr, task="distance")),
    "kitti-distance": VtabLayout(("training/label_2", "training/image_2"), read_kitti),
    "dsprites-location": VtabLayout((arrays.DSPRITES_FILE,), partial(arrays.read_dsprites, latent=4, values=32)),
    "dsprites-orientation": VtabLayout((arrays.DSPRITES_FILE,), partial(arrays.read_dsprites, latent=3, values=40)),
    "smallnorb-azimuth": VtabLayout(NORB_MATRICES, partial(arrays.read_smallnorb, column=2, step=2)),
    "smallnorb-elevation": VtabLayout(NORB_MATRICES, partial(arrays.read_smallnorb, column=1, step=1)),
}


def find_root(name: str, folder: str | Path) -> Path | None:
    """Return the folder with the files of a dataset: this one, or one of its subfolders; otherwise None."""
    root = Path(folder)
    known = VTAB_LAYOUTS[name].files[0] if name in VTAB_LAYOUTS else None
    if known is None or not root.is_dir():
        return None
    children = sorted(path for path in root.iterdir() if path.is_dir())
    return next((path for path in (root, *children) if arrays.find_published(path, known) is not None), None)


def parse_source(source: str) -> tuple[str, str] | None:
    """Split `svhn:FOLDER` into name and folder; return None for anything else."""
    name, colon, folder = source.partition(":")
    return (name, folder) if colon and name in VTAB_LAYOUTS else None


def read_vtab(name: str, folder: str, options: ReadOptions) -> Dataset:
    """Read a dataset from its publisher's files."""
    layout, root = VTAB_LAYOUTS[name], find_root(name, folder)
    if root is None:
        expected = " or ".join(layout.files[:2])
        raise ValueError(f"{folder} has no {expected}, as {name} is published: give the folder that contains them")
    if layout.reader is None:
        options = ReadOptions(options.fractions or FOLDER_FRACTIONS, progress=options.progress)
        return read_class_folders(str(root), options)
    store, labels, splits, order, fractions, notes = layout.reader(root)
    if unknown := sorted(set(labels) - set(order)):
        raise ValueError(f"{root} has the class {unknown[0]}, which is not in {name}: download it again")
    options, source = replace(options, fractions=options.fractions or fractions), f"{name}:{folder}"
    return build_dataset(source, "vtab", store, labels, splits, options, class_order=order, notes=notes)
