"""A remote file: its name for messages, its address and version, and its bytes through the cache."""

import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

from vitrail.data.remote import transport
from vitrail.data.remote.cache import RemoteCache, open_cache
from vitrail.data.remote.settings import CACHE_SIZE
from vitrail.data.remote.transport import AccessError, Interrupted, Version
from vitrail.data.remote.urls import RemoteError, plain_name
from vitrail.utils.progress import ProgressCallback

BLOCK_BYTES = 2**20  # of the cache, and of the smallest request with one
MAX_REQUEST_BYTES = 2**24
MAX_CONNECTIONS = 16  # of `open_files`


class RemoteFile(str):
    """A remote file. As text it is its address without credentials and query, so it can be printed and stored as a path is."""

    url: str
    version: Version

    def __new__(cls, url: str, version: Version) -> "RemoteFile":
        file = super().__new__(cls, plain_name(url))
        file.url, file.version = url, version
        return file

    def __reduce__(self) -> Any:
        return RemoteFile, (self.url, self.version)

    @property
    def size(self) -> int:
        return self.version.size

    @property
    def key(self) -> str:
        """Return what identifies the content in the cache. An address that is signed anew has the same content."""
        identity = str(self) if self.version.etag else self.url
        return hashlib.blake2b(f"{identity}\0{self.version.text}".encode(), digest_size=16).hexdigest()

    @property
    def stamp(self) -> tuple[int, int]:
        """Return the size, and a number that changes with the content, in place of the modification time of a local file."""
        digest = hashlib.blake2b(self.version.text.encode(), digest_size=7).digest()
        return self.size, int.from_bytes(digest, "big")

    def read(self, start: int, size: int, keep: bool = True) -> bytes:
        """Return a part of the file; without `keep`, the requested bytes alone are read and none are cached."""
        stop = min(start + size, self.size)
        if stop <= start:
            return b""
        cache = open_cache()
        if not self.version.ranges:
            return self._read_whole(cache, start, stop)
        if cache is None:
            return self._fetch(start, stop)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        found = {block: self._find(cache, block, start, stop) for block in range(first, last + 1)}
        missing = [block for block, part in found.items() if part is None]
        if missing and not keep:
            return self._fetch(start, stop)
        for run in _group(missing, MAX_REQUEST_BYTES // BLOCK_BYTES):
            offset, end = run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self.size)
            data = transport.fetch(self.url, self.version, offset, end)
            for block in run:
                position = block * BLOCK_BYTES
                whole = data[position - offset : position - offset + BLOCK_BYTES]
                cache.put(self.key, f"{block:08d}", whole)
                found[block] = whole[max(0, start - position) : stop - position]
        return b"".join(part or b"" for part in found.values())

    def _find(self, cache: RemoteCache, block: int, start: int, stop: int) -> bytes | None:
        """Return the part of a block between two positions of the file, if the block is in the cache."""
        entry, position = cache.find(self.key, f"{block:08d}"), block * BLOCK_BYTES
        if entry is None or entry.size != min(BLOCK_BYTES, self.size - position):
            return None
        return entry.read(max(0, start - position), stop - position)

    def _fetch(self, start: int, stop: int) -> bytes:
        steps = range(start, stop, MAX_REQUEST_BYTES)
        return b"".join(
            transport.fetch(self.url, self.version, step, min(step + MAX_REQUEST_BYTES, stop)) for step in steps
        )

    def _read_whole(self, cache: RemoteCache | None, start: int, stop: int) -> bytes:
        """Return a part of a file of a server that sends whole files only: all blocks are cached at once."""
        if cache is None or self.size > 0.8 * cache.limit:
            problem = f"the server sends whole files only (no Range), and this one has {self.size / 1e6:,.0f} MB"
            raise RemoteError(f"{self}: {problem}: give a larger cache_size= (${CACHE_SIZE})")
        blocks = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
        for attempt in range(3):
            with cache.lock_key(self.key) if attempt else nullcontext():
                parts = [self._find(cache, block, start, stop) for block in blocks]
                if None not in parts:
                    return b"".join(part or b"" for part in parts)
                if attempt:
                    self._download(cache)
        parts = [self._find(cache, block, start, stop) for block in blocks]
        if None in parts:
            raise RemoteError(f"{self} does not stay in the cache: give a larger cache_size= (${CACHE_SIZE})")
        return b"".join(part or b"" for part in parts)

    def _download(self, cache: RemoteCache) -> None:
        """Cache all blocks of the file."""
        reached, client = 0, transport.CONNECTIONS.find(self.url)

        def attempt() -> None:
            nonlocal reached
            position, waiting = 0, bytearray()

            def take(data: bytes) -> None:
                nonlocal position, reached
                waiting.extend(data)
                position += len(data)
                while len(waiting) >= BLOCK_BYTES or (waiting and position == self.size):
                    block = (position - len(waiting)) // BLOCK_BYTES
                    cache.put(self.key, f"{block:08d}", bytes(waiting[:BLOCK_BYTES]))
                    del waiting[:BLOCK_BYTES]
                reached = max(reached, position)

            client.receive(self.url, self.version, 0, self.size, take)
            if position != self.size:
                raise Interrupted(f"{position:,} of {self.size:,} bytes came")

        transport.retry(self.url, attempt, lambda: reached)

    def open(self, start: int = 0, size: int | None = None) -> BinaryIO:
        """Open the file, or a part of it, for reading in any order."""
        return io.BufferedReader(RemoteWindow(self, start, self.size - start if size is None else size), 2**16)


class RemoteWindow(io.RawIOBase):
    """A part of a remote file, as a file."""

    def __init__(self, file: RemoteFile, start: int, size: int) -> None:
        super().__init__()
        self.file, self.start, self.size, self.position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), max(0, self.size - self.position))
        data = self.file.read(self.start + self.position, wanted)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position


def _group(blocks: Sequence[int], most: int) -> list[list[int]]:
    """Return runs of consecutive blocks, each of at most `most`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1 and len(runs[-1]) < most:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def open_files(urls: Sequence[str], progress: ProgressCallback | None = None) -> list[RemoteFile]:
    """Return the files at these addresses, with their versions of now; raise RemoteError for the first that is not there."""
    files: list[RemoteFile] = []
    pool = ThreadPoolExecutor(min(MAX_CONNECTIONS, max(1, len(urls))))
    try:
        for url, version in zip(urls, pool.map(transport.read_version, urls), strict=True):
            files.append(RemoteFile(url, version))
            if progress:
                progress("asking for shards", len(files), len(urls))
    finally:
        pool.shutdown(cancel_futures=True)
    return files


def find_beside(files: Sequence[str], names: Sequence[str]) -> RemoteFile | None:
    """Return the first file with one of these names beside remote files; a server may refuse those that are missing."""
    addresses = [urlsplit(file.url) for file in files if isinstance(file, RemoteFile)]
    folders = {(each.scheme, each.netloc, each.path.rpartition("/")[0]): each for each in addresses}
    for (_, _, folder), address in folders.items():
        for name in names:
            try:
                return open_files([urlunsplit(address._replace(path=f"{folder}/{name}"))])[0]
            except AccessError:
                continue
    return None


def open_binary(path: str) -> BinaryIO:
    """Open a local or a remote file for reading."""
    return path.open() if isinstance(path, RemoteFile) else open(path, "rb")


def read_range(path: str, start: int, size: int) -> bytes:
    """Return a part of a local or a remote file, less than `size` where the file ends."""
    if isinstance(path, RemoteFile):
        return path.read(start, size)
    # Opening a file takes microseconds, and no handle is shared by threads or processes.
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, start)


def read_stamp(path: str) -> tuple[int, int]:
    """Return the size of a file, and the time of its modification, or what stands for it."""
    if isinstance(path, RemoteFile):
        return path.stamp
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
