"""Writing that leaves the old file or the new one, never half of either."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name only when all of it is on the disk."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file")
    _parent(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(f"{path} was not written: {error.strerror or error}") from error
        raise


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A place to write a file or a directory and look at it again, before it takes its name.

    A file that is there is replaced in one step; a directory that is not empty is never touched.
    """
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is there and not empty: give another name, or empty it first")
    _parent(path)
    try:
        around = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise OSError(f"{path} was not written: {error.strerror or error}") from error
    try:
        yield around / path.name
        os.replace(around / path.name, path)
    except OSError as error:
        said = str(error) if "was not written" in str(error) else error.strerror or error
        raise OSError(
            f"{path} was not written: {said}".replace(f"{around / path.name} was not written: ", "")
        ) from error
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
