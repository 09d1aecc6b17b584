"""A bounded cache of remote files on disk, shared by processes: blocks of a version of a file, and indices of shards.

An entry is a file of data and its hash. It is written beside its place and renamed, so no reader finds a part of one; the hash is
compared when a process opens an entry for the first time, so that none that a crash of the machine left behind is used. The
bytes of all entries are counted, under a lock and before they are written; beyond the limit, the entries that were not used for
longest are deleted. A killed process leaves at most a count that is too high and a partial file: the next clean-up corrects both.
"""

import errno
import hashlib
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from vitrail.data.remote.settings import CACHE_SIZE, read_settings
from vitrail.data.remote.urls import RemoteError
from vitrail.utils.files import cache_directory, lock_file, try_lock

HASH_BYTES = 16
MAX_OPEN = 64  # entries kept open by a process
TOUCH_SECONDS = 30.0  # between updates of the time at which an entry was used
KEPT_SHARE = 0.9  # of the limit, after a clean-up
PARTIAL = ".partial"
STALE_SECONDS = 10.0  # a new partial file may not be locked yet


class Entry:
    """An open entry. Its data stays readable after another process has deleted it."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle, self.touched = path, os.open(path, os.O_RDONLY), time.monotonic()
        status = os.fstat(self.handle)
        self.size, self.inode = status.st_size - HASH_BYTES, status.st_ino

    def __del__(self) -> None:
        if (handle := getattr(self, "handle", None)) is not None:
            os.close(handle)

    def read(self, start: int, stop: int) -> bytes:
        """Return a part of the data."""
        if time.monotonic() - self.touched > TOUCH_SECONDS:
            self.touch()
        return os.pread(self.handle, max(0, min(stop, self.size) - start), start)

    def touch(self) -> None:
        """Note that the entry was used."""
        self.touched = time.monotonic()
        with suppress(OSError):  # another process has deleted it
            os.utime(self.path)

    def is_whole(self) -> bool:
        """Return True if the data has its hash."""
        data = os.pread(self.handle, max(0, self.size), 0)
        return self.size >= 0 and hash_entry(data) == os.pread(self.handle, HASH_BYTES, self.size)


def hash_entry(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


class RemoteCache:
    """Entries by the key of a file and their name, at most `limit` bytes of them on disk."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.opened: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self.verified: dict[tuple[str, str], int] = {}  # inodes of entries that were compared with their hash
        self.lock = threading.Lock()

    def path(self, key: str, name: str) -> Path:
        return self.folder / key[:2] / key / name

    def find(self, key: str, name: str) -> Entry | None:
        """Return an entry; None if there is none."""
        with self.lock:
            if (entry := self.opened.get((key, name))) is not None:
                self.opened.move_to_end((key, name))
                return entry
        path = self.path(key, name)
        try:
            entry = Entry(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.explain(error) from None
        if self.verified.get((key, name)) != entry.inode:
            if not entry.is_whole():
                with suppress(OSError):
                    path.unlink()
                return None
            self.verified[key, name] = entry.inode
        entry.touch()
        with self.lock:
            self.opened[key, name] = entry
            while len(self.opened) > MAX_OPEN:
                self.opened.popitem(last=False)
        return entry

    def put(self, key: str, name: str, data: bytes) -> None:
        """Store an entry; one that is larger than the cache is left out."""
        path, size = self.path(key, name), len(data) + HASH_BYTES
        if size > self.limit or path.exists():
            return
        try:
            self.reserve(size)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(PARTIAL, f".{name}.", path.parent)
            try:
                with open(handle, "wb") as file:
                    with suppress(OSError):  # no locks here: partial files are then deleted by their age
                        try_lock(file)
                    file.write(data)
                    file.write(hash_entry(data))
                    file.flush()
                    os.replace(partial, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
        except OSError as error:
            raise self.explain(error) from None

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be written; delete old entries if they would exceed the limit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "usage", "ab+") as file, lock_file(file):
            file.seek(0)
            text = file.read(32)
            used = int(text) if text.isdigit() else None
            if used is None or used + size > self.limit:
                used = self.clean_up(int(KEPT_SHARE * self.limit) - size if used is not None else self.limit - size)
            file.truncate(0)
            file.write(b"%d" % (used + size))

    def clean_up(self, target: int) -> int:
        """Delete entries, those not used for longest first, until they have `target` bytes; return the bytes that are left."""
        entries: list[tuple[float, int, str]] = []
        used, now = 0, time.time()
        for path in list_files(self.folder):
            try:
                status = os.stat(path)
                if path.endswith(PARTIAL) and now - status.st_mtime > STALE_SECONDS and is_abandoned(path):
                    os.unlink(path)
                    continue
            except OSError:  # another process has renamed or deleted it
                continue
            used += status.st_size
            if not path.endswith(PARTIAL):
                entries.append((status.st_mtime, status.st_size, path))
        for _, size, path in sorted(entries):
            if used <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                used -= size
                with suppress(OSError):  # the folder still has entries
                    os.rmdir(os.path.dirname(path))
        return used

    @contextmanager
    def lock_key(self, key: str) -> Iterator[None]:
        """Hold the lock of a file, over all processes."""
        folder = self.folder / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / key[:2], "ab")  # noqa: SIM115 a few files in all
        except OSError as error:
            raise self.explain(error) from None
        with file, lock_file(file):
            yield

    def explain(self, error: OSError) -> RemoteError:
        """Return the error of a cache that cannot be read or written."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "no space left" if full else error.strerror or str(error)
        remedy = f"give less with cache_size= or ${CACHE_SIZE}" if full else f"set $XDG_CACHE_HOME, or {CACHE_SIZE}=0"
        return RemoteError(f"cannot use the cache of remote files {self.folder} ({reason}): {remedy}")


def list_files(folder: Path) -> Iterator[str]:
    """Yield the entries and partial files of a cache."""
    for parent, folders, names in os.walk(folder):
        if parent == str(folder):
            folders[:] = [name for name in folders if name != "locks"]
            continue
        yield from (os.path.join(parent, name) for name in names)


def is_abandoned(path: str) -> bool:
    """Return True if no process is writing this partial file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try_lock(handle)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the folder of the cache of remote files."""
    return cache_directory() / "remote"


@lru_cache(maxsize=8)
def _open_cache(folder: Path, limit: int) -> RemoteCache:
    return RemoteCache(folder, limit)


def open_cache() -> RemoteCache | None:
    """Return the cache of the settings; None if it is turned off."""
    limit = read_settings().cache_bytes
    return _open_cache(cache_folder(), limit) if limit else None


def _forget_locks() -> None:
    """Give a forked process locks of its own: a thread of the parent may hold the others."""
    _open_cache.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
