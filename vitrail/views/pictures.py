"""Picture files by name, opened and prepared as the model's own preprocessing does; what cannot be used says why."""

import io
import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.audit.look import MOST_BYTES, looked_at
from vitrail.data.opening import SUFFIXES, formats, named
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.files import printable
from vitrail.report.markup import plain
from vitrail.views.drawn import OF_MODELS
from vitrail.views.folder import RECORD
from vitrail.views.shown import as_rgb


def listed(places: list[str]) -> list[Path]:
    """The files that are named, and the pictures in the folders that are, with those below them; in order."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES)
            inside = [path for path in inside if not os.path.isdir(path)]  # what lies in such a folder is found itself
            inside = [
                path for path in inside if not any(part.startswith(".") for part in path.relative_to(place).parts)
            ]
            if not inside:
                raise ValueError(
                    f"{place} holds no pictures: give a file or a folder with {', '.join(sorted(SUFFIXES))}"
                )
            found += inside
        else:
            found.append(place)
    return found


def evenly(files: list[Path], most: int) -> list[Path]:
    """At most so many, spread evenly over all."""
    if len(files) <= most:
        return files
    return [files[round(k)] for k in np.linspace(0, len(files) - 1, most)]


class Unusable(ValueError):
    """A picture that cannot be shown, and why, in one line."""


def none_read(problems: list[str]) -> ValueError:
    """What is said when there is no picture left: the first few, and why."""
    more = f"; and {len(problems) - 3:,} more" if len(problems) > 3 else ""
    return ValueError(f"no picture could be read: {'; '.join(problems[:3])}{more}")


def prepared(path: Path, preprocessing: Preprocessing) -> tuple[Tensor, np.ndarray]:
    """A file as the model takes it, [C, H, W], and as it is shown, uint8 [H, W, 3]: the same crop."""
    pixels = preprocessing.pixels(opened(path))
    return preprocessing.normalise(pixels), as_rgb(pixels.numpy())


def opened(path: Path) -> Image.Image:
    """The first frame of a picture that is whole."""
    name = plain(printable(os.fspath(path)))
    try:
        if not path.exists():
            raise Unusable(f"{name}: there is no such file, or it links to nowhere")
        if not path.is_file():
            raise Unusable(f"{name}: no file, but a pipe, a socket or a device")
        if path.stat().st_size > MOST_BYTES:
            raise Unusable(f"{name}: a file of {path.stat().st_size / 2**30:.1f} GB")
        data = path.read_bytes()
        look = looked_at(data)
        if look.problem:
            raise Unusable(f"{name}: {look.problem.replace('-', ' ')}, {look.detail}")
        with named(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with it was judged above
            image = Image.open(io.BytesIO(data), formats=formats())
            image.load()
            return image
    except Unusable:
        raise
    except (OSError, ValueError, MemoryError) as error:
        said = str(error) if name in str(error) else f"{name}: {error or type(error).__name__}"
        raise Unusable(" ".join(said.split())) from error


BESIDE = frozenset(
    {"index.html", "model.npz", RECORD, *(f"{view}.png" for view in OF_MODELS)}
)  # the folders of pictures


def folder_names(paths: list[Path]) -> list[str]:
    """A folder for each picture, called like it; a number tells it from a file beside it, or another of that name."""
    taken = set(BESIDE)
    names = []
    for path in paths:
        plain = (
            "".join(c if c.isalnum() or c in "-_. ()" else "_" for c in printable(path.stem))[:80].strip(" .")
            or "picture"
        )
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names
