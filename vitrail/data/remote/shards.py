"""Remote shards of a source: addresses, braces, patterns and folders of S3, text files that list shards; and a sample of them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import numpy as np

from vitrail.data.remote.file import RemoteFile, open_binary, open_files
from vitrail.data.remote.transport import CONNECTIONS
from vitrail.data.remote.urls import RemoteError, is_redacted, is_remote, plain_name, redact, split_addresses
from vitrail.utils.progress import ProgressCallback

LIST_SUFFIX = ".txt"
SHARD_SUFFIXES = (".parquet", ".tar")
MAX_LIST_BYTES = 2**26
SAMPLED_SHARDS = 8  # of each split, by `vitrail check`
SAMPLES_PER_SHARD = 64
KINDS = "tar shards, Parquet files with embedded images, and text files that list them"

ExpandBraces = Callable[[str], list[str]]


def find_shards(source: str, expand_braces: ExpandBraces, progress: ProgressCallback | None = None) -> list[RemoteFile]:
    """Return the shards at the addresses of a source, in order."""
    if is_redacted(source):
        remedy = "give DATA again, or list the shards in a text file"
        raise RemoteError(f"{source} was stored without its credentials: {remedy}")
    try:
        urls = [url for address in split_addresses(source) for url in expand_braces(address)]
    except ValueError as error:
        raise ValueError(redact(str(error))) from None
    shards: list[RemoteFile] = []
    plain: list[str] = []
    for url in [match for address in urls for match in expand_pattern(address)]:
        if file_suffix(url) == LIST_SUFFIX:
            shards += open_files(plain, progress)
            plain = []
            (listing,) = open_files([url])
            entries = [urljoin(url, entry) for entry in read_list(listing)]
            if wrong := [entry for entry in entries if not is_remote(entry)]:
                raise ValueError(f"{listing} lists {redact(wrong[0])}, which is not remote: give addresses")
            shards += open_files([match for entry in entries for match in expand_pattern(entry)], progress)
        else:
            plain.append(url)
    shards += open_files(plain, progress)
    shards = list({shard.url: shard for shard in shards}.values())
    if wrong := [shard for shard in shards if file_suffix(shard) not in SHARD_SUFFIXES]:
        name = wrong[0].lower()
        packed = name.endswith((".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"))
        hint = "decompress it, for random access" if packed else f"give {KINDS}"
        raise ValueError(f"{wrong[0]} cannot be read over the network: {hint}")
    return shards


def file_suffix(url: str) -> str:
    """Return the suffix of the file at an address."""
    return os.path.splitext(urlsplit(url).path.lower())[1]


def expand_pattern(url: str) -> list[str]:
    """Return the files that an address matches, if it is a pattern or a folder of S3."""
    path = url.partition("://")[2] if url.lower().startswith("s3://") else urlsplit(url).path
    is_folder = path.endswith("/") or "/" not in path
    if not is_folder and not any(letter in path for letter in ("*?[" if url.lower().startswith("s3://") else "*")):
        return [url]
    listed = CONNECTIONS.find(url).list_files(url if not is_folder or url.endswith("/") else f"{url}/")
    if not is_folder and listed:
        return listed
    found = [[each for each in listed if each.lower().endswith(suffix)] for suffix in SHARD_SUFFIXES]
    if chosen := next(filter(None, found), []):
        return chosen
    what = "no shards (.tar or .parquet) in" if is_folder else "no file matches"
    raise RemoteError(f"{what} {plain_name(url)}")


def read_list(path: str) -> list[str]:
    """Return the entries of a text file that lists shards, one a line; lines that start with # are comments."""
    with open_binary(path) as file:
        data = file.read(MAX_LIST_BYTES + 1)
    try:
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        lines = []
    entries = [line for line in lines if line and not line.startswith("#")]
    if not entries or len(data) > MAX_LIST_BYTES:
        raise ValueError(f"{path} lists no shards: write the path or the address of one on every line")
    return entries


def read_local_list(
    path: str, expand: Callable[[str], list[str]], expand_braces: ExpandBraces, progress: ProgressCallback | None = None
) -> list[str]:
    """Return the shards that a local text file lists: addresses, or paths relative to it."""
    shards: list[str] = []
    remote: list[str] = []
    folder = os.path.dirname(path)
    for entry in read_list(path):
        if is_remote(entry):
            remote.append(entry)
            continue
        shards += expand(os.path.join(folder, os.path.expanduser(entry)))
    if remote:
        shards += find_shards(",".join(remote), expand_braces, progress)
    if wrong := [shard for shard in shards if file_suffix(shard) not in SHARD_SUFFIXES]:
        raise ValueError(f"{path} lists {wrong[0]}: list tar shards or Parquet files with embedded images")
    return shards


@dataclass(frozen=True)
class Sample:
    """A part of the shards of a source: the first samples of some of them."""

    shards: list[str]
    of: int  # shards
    nbytes: int  # of all shards

    def describe(self, images: int) -> str:
        """Return the note about it."""
        size = f"{self.nbytes / 1e9:,.1f} GB" if self.nbytes >= 1e8 else f"{self.nbytes / 1e6:,.1f} MB"
        shards = f"{len(self.shards)} of {self.of} shard{'s' * (self.of != 1)} ({size} in all)"
        return f"a sample: {images:,} images, the first of {shards}"


def sample_shards(shards: Sequence[str], splits: Sequence[str | None]) -> Sample | None:
    """Return a sample of remote shards, evenly spaced in every split; None for local ones, which are read wholly."""
    remote = [shard for shard in shards if isinstance(shard, RemoteFile)]
    if len(remote) < len(shards):
        return None
    chosen: list[int] = []
    for split in dict.fromkeys(splits):
        members = [number for number, each in enumerate(splits) if each == split]
        places = np.linspace(0, len(members) - 1, min(SAMPLED_SHARDS, len(members))).round().astype(int)
        chosen += [members[place] for place in places.tolist()]
    return Sample([shards[number] for number in sorted(chosen)], len(shards), sum(shard.size for shard in remote))
