"""One process at a time writes a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Holds a run's lock; the system lets go of it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training {directory}: wait for it, or stop it first") from None
        yield
