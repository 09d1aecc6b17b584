"""Small pictures, and folders of them, for tests."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def pixels(number: int, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def encoded(number: int, kind: str = "PNG") -> bytes:
    """A picture of its own for each number."""
    out = io.BytesIO()
    Image.fromarray(pixels(number)).save(out, kind)
    return out.getvalue()


def tree(root: Path, files: dict[str, int | bytes]) -> Path:
    """Files by their paths: a number makes a picture, bytes are written as they are, and a path with / is a folder."""
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else encoded(content))
    return root


def table(pictures) -> dict[str, list[str]]:
    """The names of a split's pictures by class."""
    found = {name: [] for name in pictures.classes}
    for index in range(len(pictures)):
        found[pictures.classes[pictures.targets[index]]].append(pictures.name(index))
    return found
