"""Atomic writes of files and directories, and the cache directory."""

import errno
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

WEIGHT_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")  # of files of weights, the safest first
MIN_FREE_BYTES = 2**20  # with less, a failed write is blamed on the full disk
STALE_SECONDS = 10.0  # a new temporary directory may not be locked yet


class DiskFullError(OSError):
    """A file system without room for what is written to it."""

    exit_code = 1


@contextmanager
def atomic_write(path: Path, nbytes: int = 0) -> Iterator[BinaryIO]:
    """Open a file for writing; it replaces `path` only when it is complete on the disk. `nbytes`: see `stage_output`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give a file name")
    with stage_output(path, nbytes) as staged, open(staged, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def stage_output(path: Path, nbytes: int = 0) -> Iterator[Path]:
    """Yield a temporary path for a file or directory, which is then moved to `path`, with other files beside it.

    An existing file is replaced in one step; a directory that is not empty is never changed. If the size is known, `nbytes`, the
    free space is checked first.
    """
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} exists and is not empty: give another name, or empty it first")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no directory {path.parent}")
    remove_stale_partials(path.parent, path.name, STALE_SECONDS)
    check_free_space(path, nbytes)
    try:
        with (
            tempfile.TemporaryDirectory(
                ".partial", f".{path.name}.", path.parent, ignore_cleanup_errors=True
            ) as folder,
            _report_full_disk(path, nbytes),
            _open_handle(folder) as handle,
        ):
            with suppress(OSError):  # no locks here: then nothing stale is removed either
                try_lock(handle)
            yield Path(folder) / path.name
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):  # `path` last
                os.replace(file, path.parent / file.name)
    except DiskFullError:
        raise
    except OSError as error:
        reason = error.strerror or str(error).rpartition(" was not written: ")[2]
        raise OSError(f"{path} was not written: {reason}") from error


def check_free_space(path: Path, nbytes: int) -> None:
    """Raise DiskFullError unless the file system of `path` has room for a file of this size."""
    if nbytes > shutil.disk_usage(path.parent).free:
        raise disk_full_error(path, nbytes)


def disk_full_error(path: Path, nbytes: int = 0, free: int | None = None) -> DiskFullError:
    """Return the error of a full disk, with the size of the file if it is known."""
    mount = next(parent for parent in path.absolute().parents if os.path.ismount(parent))
    free = shutil.disk_usage(path.parent).free if free is None else free
    needs = f"needs about {max(1, round(nbytes / 1e6)):,} MB, " if nbytes else "was not written, "
    return DiskFullError(f"no space left on {mount}: {path.name} {needs}{free / 1e6:,.0f} MB are free")


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is that of a full disk or quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _report_full_disk(path: Path, nbytes: int) -> Iterator[None]:
    """Raise DiskFullError for a write that failed on a full disk; libraries in C++ raise RuntimeError for it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free  # before the temporary file is removed
        if isinstance(error, DiskFullError) or not (is_disk_full(error) or free < MIN_FREE_BYTES):
            raise
        raise disk_full_error(path, nbytes, free) from error


def remove_stale_partials(directory: Path, name: str = "", min_age: float = 0.0) -> None:
    """Remove what killed processes left of their writes, of one file or of all; living processes hold a lock."""
    now = time.time()
    for folder in directory.glob(f".{glob.escape(name)}{'.' if name else ''}*.partial"):
        with suppress(OSError), _open_handle(folder) as handle:
            try_lock(handle)
            if now - folder.stat().st_mtime >= min_age:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


@contextmanager
def _open_handle(path: str | Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def try_lock(file: IO[bytes] | IO[str] | int) -> None:
    """Lock an open file until it is closed; raise BlockingIOError if another process has locked it.

    Where there are no locks (Windows, some network file systems), raise OSError.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("no file locks on this system") from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def make_directories(path: Path) -> list[Path]:
    """Make a directory and its parents; return the new ones, from the innermost out."""
    new = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remove_empty_directories(new)
        raise OSError(f"cannot make the directory {path}: {error.strerror or error}; give another one") from error
    return new


def remove_empty_directories(directories: list[Path]) -> None:
    """Remove those of the directories that are empty."""
    for directory in directories:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def cache_directory() -> Path:
    """Return the directory of this user's caches."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "vitrail"


@contextmanager
def lock_file(file: IO[bytes]) -> Iterator[None]:
    """Wait for an exclusive lock on an open file, and flush the file at the end; closing it releases the lock."""
    with suppress(ImportError, OSError):  # Windows and some network file systems have no locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    yield
    file.flush()
