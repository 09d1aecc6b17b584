"""Atomic writes of files and directories, and the cache directory."""

import os
import shutil
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
    _check_parent(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_get_umask())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(f"{path} was not written: {error.strerror or error}") from error
        raise


@contextmanager
def stage_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or directory, which is then moved to `path`.

    An existing file is replaced in one step; a directory that is not empty is never changed.
    """
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} exists and is not empty: give another name, or empty it first")
    _check_parent(path)
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise OSError(f"{path} was not written: {error.strerror or error}") from error
    try:
        yield staging / path.name
        os.replace(staging / path.name, path)
    except OSError as error:
        reason = str(error) if "was not written" in str(error) else error.strerror or error
        reason = str(reason).replace(f"{staging / path.name} was not written: ", "")
        raise OSError(f"{path} was not written: {reason}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no directory {path.parent}")


def _get_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
