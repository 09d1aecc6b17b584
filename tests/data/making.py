"""Small images, and folders of them, for tests."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def pixels(number: int, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def encoded(number: int, kind: str = "PNG") -> bytes:
    """Return the bytes of a different image for each number."""
    out = io.BytesIO()
    Image.fromarray(pixels(number)).save(out, kind)
    return out.getvalue()


def tree(root: Path, files: Mapping[str, int | bytes]) -> Path:
    """Write files by path: a number is an image, bytes are written as they are, a path ending in / is a folder."""
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else encoded(content))
    return root


def table(images) -> dict[str, list[str]]:
    """Return the names of a split's images by class."""
    found = {name: [] for name in images.classes}
    for index in range(len(images)):
        found[images.classes[images.targets[index]]].append(images.name(index))
    return found
