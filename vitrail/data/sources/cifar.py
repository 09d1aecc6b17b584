"""CIFAR-10 and CIFAR-100 in their binary form: a folder of `.bin` files, or the archive as it is published."""

import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import parts
from vitrail.data.sources.pixels import Pixels

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Form:
    """How one of the two is laid out."""

    train: re.Pattern[str]
    test: str
    names: str
    before: int  # bytes of label before the pixels; the last of them is the one that is learnt
    classes: int


TEN = Form(re.compile(r"data_batch_\d+\.bin"), "test_batch.bin", "batches.meta.txt", 1, 10)
HUNDRED = Form(re.compile(r"train\.bin"), "test.bin", "fine_label_names.txt", 2, 100)


def form_of(names: Iterable[str]) -> Form | None:
    """Which of the two these files are; None for neither."""
    names = set(names)
    if any(TEN.train.fullmatch(name) for name in names):
        return TEN
    return HUNDRED if {"train.bin", HUNDRED.names} <= names else None


def read(where: str, fractions: parts.Fractions | None, progress: parts.Progress | None) -> Dataset:
    """A folder, or a .tar.gz, with CIFAR's binary files."""
    if os.path.isdir(where):
        files = {name: os.path.join(where, name) for name in os.listdir(where)}
        return assembled(where, files, lambda name: _file(files[name]), fractions, progress)
    held = members(where)
    return assembled(where, {name: f"{where}:{name}" for name in held}, held.__getitem__, fractions, progress)


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def members(archive: str) -> dict[str, bytes]:
    """The files of a published archive, which fit in memory; nothing is unpacked to the disk."""
    held: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                name = os.path.basename(member.name)
                if file and name.endswith((".bin", ".txt")) and member.size <= 2**28:
                    held[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} is not a whole archive ({error}): get it again") from None
    if not form_of(held):
        raise ValueError(f"{archive} holds neither CIFAR-10's nor CIFAR-100's binary files")
    return held


def assembled(
    where: str,
    files: dict[str, str],
    load: Callable[[str], bytes],
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
) -> Dataset:
    """The dataset of some files, by what they are called in messages."""
    form = form_of(files)
    assert form is not None
    if form.names not in files:
        raise ValueError(f"{where} lacks {form.names}, the names of the classes")
    classes = tuple(line.strip() for line in load(form.names).decode("utf-8", "replace").splitlines() if line.strip())
    if len(classes) != form.classes or len(set(classes)) != form.classes:
        raise ValueError(f"{files[form.names]} has {len(set(classes))} names, not {form.classes}")
    named = {"train": sorted(filter(form.train.fullmatch, files)), "test": [form.test] if form.test in files else []}
    images, labels, origins, count, splits = [], {}, [], 0, {}
    for split, batches in named.items():
        for name in batches:
            targets, pixels = batch(load(name), files[name], form)
            origins.append((count, files[name]))
            images.append(pixels)
            labels.setdefault(split, []).append(targets)
            count += len(targets)
    store = Pixels(np.concatenate(images), tuple(origins))
    start = 0
    for split, batches in labels.items():
        targets = np.concatenate(batches)
        splits[split] = Pictures(store, np.arange(start, start + len(targets)), targets, classes, split)
        start += len(targets)
    notes: list[str] = []
    splits = parts.completed(splits, fractions, parts.HELD_OUT, notes, progress)
    return Dataset(where, "cifar", splits, tuple(notes))


def batch(data: bytes, name: str, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Labels [n], and pictures [n, 32, 32, 3]."""
    size = form.before + PIXELS
    if not data or len(data) % size:
        raise ValueError(f"{name} has {len(data):,} bytes, which is not a number of pictures of {size:,}: get it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    targets = records[:, form.before - 1].astype(np.int64)
    if targets.max() >= form.classes:
        raise ValueError(f"{name} has the label {targets.max()}, and there are {form.classes} classes: get it again")
    pixels = records[:, form.before :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return targets, np.ascontiguousarray(pixels)
