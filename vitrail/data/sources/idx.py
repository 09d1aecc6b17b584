"""IDX, the format of MNIST and its family: `train-images-idx3-ubyte` and its three companions, plain or gzipped."""

import gzip
import hashlib
import math
import os
import re
import zlib

import numpy as np

from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import parts
from vitrail.data.sources.pixels import Pixels

NAME = re.compile(r"(?P<before>.*?)(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx\d-ubyte(?P<gz>\.gz)?")
UNSIGNED_BYTE = 8  # the code of the only kind of value that pictures have
MOST = 2**34  # bytes that a file's header may promise

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
# Of the labels without header or compression, so that it is the same however the file was packed: train, test.
FASHION_LABELS = {
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}


def files_in(names: list[str]) -> dict[tuple[str, str], str]:
    """The files of one family by split and content; a plain one before a gzipped one."""
    found: dict[tuple[str, str], str] = {}
    before: dict[str, str] = {}
    for name in sorted(names):
        if match := NAME.fullmatch(name):
            split = "train" if match["split"] == "train" else "test"
            before.setdefault(match["before"], name)
            found.setdefault((split, match["what"]), name)
    if len(before) > 1:
        raise ValueError(
            f"several sets of IDX files together, {' and '.join(before.values())}: give each its own folder"
        )
    return found


def read(root: str, fractions: parts.Fractions | None, progress: parts.Progress | None) -> Dataset:
    """A folder with IDX files."""
    found = files_in(os.listdir(root))
    paths = {key: os.path.join(root, name) for key, name in found.items()}
    whole = {split: pair(root, paths, split) for split in ("train", "test") if any(key[0] == split for key in paths)}
    images, labels = [images for images, _ in whole.values()], [labels for _, labels in whole.values()]
    notes: list[str] = []
    if len({each.shape[1:] for each in images}) > 1:
        raise ValueError(f"{root} has pictures of different sizes to train and to test on")
    if any(name.startswith("emnist-") for name in found.values()):
        images = [each.swapaxes(1, 2) for each in images]
        notes.append("EMNIST's pictures lie on their side and are set upright")
    classes, targets = named(labels)
    starts = np.cumsum([0, *map(len, images)]).tolist()
    store = Pixels(
        np.concatenate(images), tuple((at, paths[s, "images"]) for at, s in zip(starts, whole, strict=False))
    )
    splits = {
        split: Pictures(store, np.arange(start, start + len(each)), each, classes, split)
        for split, start, each in zip(whole, starts, targets, strict=False)
    }
    splits = parts.completed(splits, fractions, parts.HELD_OUT, notes, progress)
    return Dataset(root, "idx", splits, tuple(notes))


def pair(root: str, paths: dict[tuple[str, str], str], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels of a split."""
    for has, lacks in (("images", "labels"), ("labels", "images")):
        if (split, lacks) not in paths:
            raise ValueError(f"{root} has {os.path.basename(paths[split, has])} without its {lacks}")
    images, labels = array(paths[split, "images"], 3), array(paths[split, "labels"], 1)
    if len(images) != len(labels):
        raise ValueError(f"{paths[split, 'images']} has {len(images):,} pictures, and its labels are {len(labels):,}")
    if not images.size:
        raise ValueError(f"{paths[split, 'images']} holds no pictures")
    return images, labels


def named(labels: list[np.ndarray]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The classes, and the labels as indices into them."""
    if any(hashlib.sha256(each.tobytes()).hexdigest() in FASHION_LABELS for each in labels):
        return FASHION, [each.astype(np.int64) for each in labels]
    values = np.unique(np.concatenate(labels))
    return tuple(map(str, values.tolist())), [np.searchsorted(values, each) for each in labels]


def array(path: str, dimensions: int) -> np.ndarray:
    """The bytes of an IDX file in the shape that its header says."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTE:
                raise ValueError(f"{path} is no IDX file of bytes: it begins with {head.hex(' ')}, not 00 00 08")
            if head[3] != dimensions:
                raise ValueError(f"{path} has {head[3]} dimensions, and {dimensions} are wanted")
            sizes = file.read(4 * dimensions)
            shape = tuple(np.frombuffer(sizes, ">u4").tolist()) if len(sizes) == 4 * dimensions else ()
            wanted = math.prod(shape)
            if not shape or wanted > MOST:
                raise ValueError(f"{path} is cut off in its header, or promises {wanted:,} bytes: get it again")
            data = file.read(wanted + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not whole: {error}. Get it again") from None
    if len(data) != wanted:
        more = "more" if len(data) > wanted else f"{len(data):,}"
        raise ValueError(f"{path} should hold {wanted:,} bytes and holds {more}: get it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
