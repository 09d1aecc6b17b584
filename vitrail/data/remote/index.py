"""The members of a remote tar shard, from one pass over its headers, which is kept in the cache.

Headers lie between the contents. Where members are small, the pass reads all of the shard, in large requests, and the blocks stay
in the cache, as far as they fit; large members are skipped, and only their headers are requested.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vitrail.data.remote.cache import open_cache
from vitrail.data.remote.file import BLOCK_BYTES, RemoteFile

INDEX_NAME = "tar-1"
HEADER_BYTES = 2**14  # requested of a header after a large member
MAX_AHEAD_BYTES = 2**23


class TarMember(NamedTuple):
    """A regular file of a tar shard; `data` is the content of a label, None of all others."""

    name: str
    offset: int
    size: int
    data: bytes | None = None


class HeaderReader:
    """A remote tar file, read ahead where members are small and skipped through where they are large."""

    def __init__(self, file: RemoteFile) -> None:
        self.file, self.position, self.start, self.ahead = file, 0, 0, BLOCK_BYTES
        self.buffer = b""

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.file.size}[whence]
        self.position = max(0, base + offset)
        return self.position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        size = max(0, min(self.file.size - self.position, size if size >= 0 else self.file.size))
        end = self.start + len(self.buffer)
        if not self.start <= self.position <= self.position + size <= end:
            skipped = self.position - end
            if skipped > BLOCK_BYTES or skipped < -len(self.buffer):
                self.ahead = max(size, HEADER_BYTES)
            elif self.buffer:
                self.ahead = min(MAX_AHEAD_BYTES, max(2 * self.ahead, BLOCK_BYTES))
            keep = self.ahead >= BLOCK_BYTES
            stop = self.position + max(size, self.ahead)
            if keep:  # whole blocks
                stop = -(-stop // BLOCK_BYTES) * BLOCK_BYTES
            self.buffer = self.file.read(self.position, stop - self.position, keep=keep)
            self.start = self.position
        begin = self.position - self.start
        part = self.buffer[begin : begin + size]
        self.position += len(part)
        return part

    def close(self) -> None:
        self.buffer = b""


def list_members(file: RemoteFile, scan: Callable[[], Iterator[TarMember]]) -> Iterator[TarMember]:
    """Yield the members of a shard from its index, or scan it; a scan that comes to its end is kept as index."""
    cache = open_cache()
    entry = None if cache is None else cache.find(file.key, INDEX_NAME)
    if entry is not None:
        yield from decode_index(entry.read(0, entry.size))
        return
    members = []
    for member in scan():
        members.append(member)
        yield member
    if cache is not None:
        cache.put(file.key, INDEX_NAME, encode_index(members))


def encode_index(members: list[TarMember]) -> bytes:
    """Return members as compressed JSON."""
    rows = [(*member[:3], None if member.data is None else member.data.decode("latin-1")) for member in members]
    return zlib.compress(json.dumps(rows).encode(), 1)


def decode_index(data: bytes) -> Iterator[TarMember]:
    """Yield the members of an index."""
    for name, offset, size, text in json.loads(zlib.decompress(data)):
        yield TarMember(name, offset, size, None if text is None else text.encode("latin-1"))
