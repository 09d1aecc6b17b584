"""Published datasets by name: found on this machine, or downloaded from the publisher."""

import hashlib
import http.client
import io
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from vitrail.data.sources.arrays import detect_cifar, find_idx_files
from vitrail.utils.files import cache_directory, lock_file
from vitrail.utils.progress import ProgressCallback

MAX_ATTEMPTS = 5  # without progress, after data has arrived; 2 if none ever did
RETRY_PAUSE_SECONDS = 1.0  # before the second attempt; doubled for each one after it
TIMEOUT_SECONDS = 30.0  # without data
BLOCK_BYTES = 2**18
BUILTIN, GENERATED = "digits", "moving-digits"
SYSTEM_DIRECTORY = Path("/usr/share/datasets")  # used by Debian's packages


def download(url: str, path: Path, md5: str, progress: ProgressCallback | None = None) -> None:
    """Download a file. An interrupted download is kept in `.partial` and resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "ab+") as file, lock_file(file):
        if path.exists():  # another process has downloaded it
            partial.unlink(missing_ok=True)
            return
        resumed = _seek_end(file)
        try:
            _fetch(url, file, progress)
        finally:
            if not _seek_end(file):
                partial.unlink(missing_ok=True)
        if resumed and _compute_md5(file) != md5:  # the partial file was of other data: start over
            file.truncate(0)
            _fetch(url, file, progress)
        if (checksum := _compute_md5(file)) != md5:
            partial.unlink(missing_ok=True)
            raise ValueError(f"{url} has the MD5 {checksum}, expected {md5}: changed or damaged, and deleted")
        file.flush()
        os.fsync(file.fileno())
        os.replace(partial, path)


def _fetch(url: str, file: io.BufferedRandom, progress: ProgressCallback | None) -> None:
    """Download the whole file with retries; an attempt that makes progress resets the count."""
    attempts, pause, size = 2, RETRY_PAUSE_SECONDS, _seek_end(file)
    while True:
        try:
            if _try_fetch(url, file, progress):
                return
            problem: Exception = ConnectionError("the connection was lost")
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise OSError(f"{url} returned {error.code} {error.reason}") from None
            problem = error
        except (OSError, http.client.HTTPException) as error:
            problem = error
        if _seek_end(file) > size:
            attempts, pause, size = MAX_ATTEMPTS, RETRY_PAUSE_SECONDS, _seek_end(file)
        attempts -= 1
        if not attempts:
            reason = getattr(problem, "reason", None) or problem
            raise OSError(f"cannot read {url}: {reason}") from None
        time.sleep(pause)
        pause *= 2


def _try_fetch(url: str, file: io.BufferedRandom, progress: ProgressCallback | None) -> bool:
    """Request the missing part of the file; return True if the file is complete."""
    size = _seek_end(file)
    request = urllib.request.Request(url, headers={"User-Agent": "vitrail", "Accept-Encoding": "identity"})
    if size:
        request.add_header("Range", f"bytes={size}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and size:  # nothing is missing; the checksum verifies it
            return True
        raise
    with response:
        if response.status != 206:  # the server ignores ranges and sends the whole file
            file.truncate(0)
            size = 0
        length = response.headers.get("Content-Length")
        total = size + int(length) if length and length.isdigit() else 0
        while block := response.read(BLOCK_BYTES):
            file.write(block)
            size += len(block)
            if progress:
                progress(f"downloading {url.rpartition('/')[2]}", size, total)
        file.flush()
    return not total or size >= total


def _seek_end(file: io.BufferedRandom) -> int:
    return file.seek(0, os.SEEK_END)


def _compute_md5(file: io.BufferedRandom) -> str:
    """Return the MD5 that publishers list, against transmission errors only."""
    file.flush()
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class PublishedDataset:
    """A published dataset: its address, the files with their MD5, and other names of copies."""

    url: str
    files: dict[str, str]
    aliases: tuple[str, ...] = ()


def _mnist_files(md5s: str) -> dict[str, str]:
    names = (f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return dict(zip(names, md5s.split(), strict=True))


PUBLISHED_DATASETS = {
    "fashion-mnist": PublishedDataset(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _mnist_files(
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310"
        ),
        ("FashionMNIST/raw",),
    ),
    "mnist": PublishedDataset(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # PyTorch's copy: the publisher's server is offline
        _mnist_files(
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c"
        ),
        ("MNIST/raw",),
    ),
    "cifar-10": PublishedDataset(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ),
    "cifar-100": PublishedDataset(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        ("cifar-100-binary", "cifar-100-binary.tar.gz"),
    ),
}
DATASET_NAMES = (BUILTIN, GENERATED, *PUBLISHED_DATASETS)


def data_directory() -> Path:
    """Return the download directory: $VITRAIL_DATA, or the user's cache."""
    path = os.environ.get("VITRAIL_DATA")
    return Path(path).expanduser() if path else cache_directory() / "data"


def find_local(name: str) -> str | None:
    """Return the folder or file of a dataset on this machine, or None if it is missing or incomplete."""
    published = PUBLISHED_DATASETS[name]
    for root in dict.fromkeys((data_directory(), cache_directory() / "data", SYSTEM_DIRECTORY)):
        for child in (name, *(f"{name}/{alias}" for alias in published.aliases), *published.aliases):
            if has_dataset(root / child, published):
                return str(root / child)
    return None


def has_dataset(path: Path, published: PublishedDataset) -> bool:
    """Return True if the complete dataset is at this path, in a readable form."""
    if path.is_file():
        return path.name in published.files
    names = os.listdir(path) if path.is_dir() else []
    if any(file.endswith(".tar.gz") for file in published.files):
        layout = detect_cifar(names)
        return layout is not None and {layout.test_file, layout.names_file} <= set(names)
    return len(find_idx_files(names)) == len(published.files)


def ensure_downloaded(name: str, progress: ProgressCallback | None = None) -> str:
    """Return the path of a dataset, after downloading what is missing."""
    if path := find_local(name):
        return path
    published, folder = PUBLISHED_DATASETS[name], data_directory() / name
    for file, md5 in published.files.items():
        if not (folder / file).exists():
            try:
                download(published.url + file, folder / file, md5, progress)
            except (OSError, ValueError) as error:
                names = list(published.files)
                files = " and ".join(names) if len(names) < 3 else f"the {len(names)} files"
                hint = f"download {files} from {published.url} to {folder} yourself"
                raise type(error)(f"cannot download {name}: {error}; {hint}") from None
    path = find_local(name)
    assert path is not None, f"{name} was downloaded to {folder}, but is not there"
    return path


def format_unknown_source(source: str) -> str:
    """Return the message for a source that is neither a path nor a name, with the closest name."""
    if "/" in source or "\\" in source:
        return f"no such file or folder: {source}"
    plain = {re.sub(r"[^a-z0-9]", "", name): name for name in DATASET_NAMES}
    closest = get_close_matches(re.sub(r"[^a-z0-9]", "", source.lower()), plain, n=1, cutoff=0.6)
    hint = f"did you mean {plain[closest[0]]}? " if closest else ""
    return f"no such file, folder or dataset: {source}; {hint}datasets: {', '.join(DATASET_NAMES)}"
