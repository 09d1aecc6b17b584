"""Atomic writes of files and directories, and the cache directory."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it replaces `path` only when it is complete on the disk."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give a file name")
    with stage_output(path) as staged, open(staged, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def stage_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or directory, which is then moved to `path`.

    An existing file is replaced in one step; a directory that is not empty is never changed.
    """
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} exists and is not empty: give another name, or empty it first")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no directory {path.parent}")
    try:
        with tempfile.TemporaryDirectory(
            ".partial", f".{path.name}.", path.parent, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder) / path.name
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        reason = error.strerror or str(error).rpartition(" was not written: ")[2]
        raise OSError(f"{path} was not written: {reason}") from error


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
