"""A directory to write to, made early so that nothing is computed in vain, and taken away again if nothing came of it."""

from pathlib import Path


def make(path: Path) -> list[Path]:
    """Makes it with those above it; gives the ones that are new, from the innermost out."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        unmake(new)
        raise OSError(f"{path} was not made, give another directory: {error.strerror or error}") from error
    return new


def unmake(new: list[Path]) -> None:
    """Takes those of them away that are empty."""
    for each in new:
        if each.is_dir() and not any(each.iterdir()):
            each.rmdir()
