"""Data that is known by name: found on this machine, or downloaded from its publisher."""

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from vitrail.data.sources import cifar, idx
from vitrail.data.sources.download import download
from vitrail.data.sources.parts import Progress

EMBEDDED = "digits"
SYSTEM = Path("/usr/share/datasets")  # where Debian's packages put them


@dataclass(frozen=True)
class Published:
    """What a publisher gives: an address, the files there with their MD5, and what else a copy may be called."""

    address: str
    files: dict[str, str]
    also: tuple[str, ...] = ()


def _mnist(images: str, labels: str, test_images: str, test_labels: str) -> dict[str, str]:
    return {
        "train-images-idx3-ubyte.gz": images,
        "train-labels-idx1-ubyte.gz": labels,
        "t10k-images-idx3-ubyte.gz": test_images,
        "t10k-labels-idx1-ubyte.gz": test_labels,
    }


PUBLISHED = {
    "fashion-mnist": Published(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _mnist(
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        ("FashionMNIST/raw",),
    ),
    "mnist": Published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # PyTorch's copy: the publisher's server answers no more
        _mnist(
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        ("MNIST/raw",),
    ),
    "cifar-10": Published(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ),
    "cifar-100": Published(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        ("cifar-100-binary", "cifar-100-binary.tar.gz"),
    ),
}
NAMES = (EMBEDDED, *PUBLISHED)


def home() -> Path:
    """Where downloads go: $VITRAIL_DATA, or the user's cache."""
    if told := os.environ.get("VITRAIL_DATA"):
        return Path(told).expanduser()
    return cache()


def cache() -> Path:
    """The user's cache of data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitrail" / "data"


def located(name: str) -> str | None:
    """The folder or file of a name on this machine, if it is whole; None if it has to be downloaded."""
    published = PUBLISHED[name]
    for place in dict.fromkeys((home(), cache(), SYSTEM)):
        for inside in (name, *(f"{name}/{other}" for other in published.also), *published.also):
            if holds(place / inside, published):
                return str(place / inside)
    return None


def holds(path: Path, published: Published) -> bool:
    """Whether the data is at this place, in the form that is read from there."""
    if path.is_file():
        return path.name in published.files
    names = os.listdir(path) if path.is_dir() else []
    if any(file.endswith(".tar.gz") for file in published.files):
        form = cifar.form_of(names)
        return form is not None and {form.test, form.names} <= set(names)
    return len(idx.files_in(names)) == len(published.files)


def fetched(name: str, progress: Progress | None = None) -> str:
    """Where the data of a name is, after downloading what is missing of it."""
    if found := located(name):
        return found
    published, folder = PUBLISHED[name], home() / name
    for file, md5 in published.files.items():
        if not (folder / file).exists():
            try:
                download(published.address + file, folder / file, md5, progress)
            except (OSError, ValueError) as error:
                files = (
                    " and ".join(published.files) if len(published.files) < 3 else f"the {len(published.files)} files"
                )
                raise type(error)(
                    f"{name} cannot be downloaded: {error}; by hand, put {files} of {published.address} in {folder}"
                ) from None
    found = located(name)
    assert found is not None, f"{name} was downloaded to {folder} and is not there"
    return found


def no_such(where: str) -> str:
    """Why something is neither a path nor a name, with the name that was perhaps meant."""
    if "/" in where or "\\" in where:
        return f"there is no {where}"
    plain = {re.sub(r"[^a-z0-9]", "", name): name for name in NAMES}
    near = get_close_matches(re.sub(r"[^a-z0-9]", "", where.lower()), plain, n=1, cutoff=0.6)
    meant = f"did you mean {plain[near[0]]}? " if near else ""
    return f"there is no {where} here, and no data of that name: {meant}known are {', '.join(NAMES)}"
