"""Image files of an inspection: listing, loading with the model's preprocessing, batches, output folder names."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.analysis.figures.image_view import to_rgb
from vitrail.analysis.figures.registry import MODEL_VIEWS
from vitrail.analysis.output import RECORD_FILE
from vitrail.analysis.results import space_evenly
from vitrail.data.audit.image import MAX_FILE_BYTES, inspect_bytes
from vitrail.data.decode import IMAGE_SUFFIXES, name_image_errors, supported_formats
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.files import printable_path
from vitrail.models.base import TokenModel
from vitrail.models.sizes import closest
from vitrail.reports.html import clean_text

ProgressCallback = Callable[[str, int, int], None]  # label, done, total
Item = TypeVar("Item")
MAX_BATCH_IMAGES, MAX_BATCH_TOKENS = 8, 2048  # per batch; a batch of one image may have more tokens
RESERVED_NAMES = frozenset({"index.html", "model.npz", RECORD_FILE, *(f"{view}.png" for view in MODEL_VIEWS)})


def ignore_progress(label: str, done: int, total: int) -> None:
    """Do nothing."""


def resolve_target(model: TokenModel, text: str) -> int:
    """Return the index of a class from its name, in any case, or from its number."""
    count = model.config.classes
    if count is None:
        raise ValueError(f"--target {text}: this model has no classes, its output is features")
    names = model.labels or ()
    for same in (lambda name: name == text, lambda name: name.casefold() == text.casefold()):
        indices = [index for index, name in enumerate(names) if same(name)]
        if len(indices) == 1:
            return indices[0]
    if text.isdecimal() and int(text) < count:
        return int(text)
    if text.isdecimal():
        raise ValueError(f"--target must be 0 to {count - 1}, got {text}")
    if not names:
        raise ValueError(f"--target {text}: this model has no class names, give an index, 0 to {count - 1}")
    known = list(names)
    likely = closest(text, known).split("Known:")[0].strip()
    hint = likely or f"Classes are {known[0]!r}, {known[1 % count]!r}, …"
    raise ValueError(f"--target {text}: no such class. {hint}")


def list_images(paths: list[str]) -> list[Path]:
    """Return the given files and the images in the given folders and their subfolders, in order."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in IMAGE_SUFFIXES
            and not os.path.isdir(file)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not inside:
            raise ValueError(f"{path} has no images: give a file or a folder with {', '.join(sorted(IMAGE_SUFFIXES))}")
        files += inside
    return files


def sample_evenly(items: Sequence[Item], max_items: int) -> list[Item]:
    """Return at most `max_items` of the items, evenly spaced."""
    return [items[k] for k in space_evenly(len(items), max_items)]


class UnusableImageError(ValueError):
    """Image that cannot be used, with the reason in one line."""


def make_no_images_error(problems: list[str]) -> ValueError:
    """Return the error for inputs without a usable image: the first three reasons."""
    more = f"; and {len(problems) - 3:,} more" if len(problems) > 3 else ""
    return ValueError(f"no image could be read: {'; '.join(problems[:3])}{more}")


def iter_image_batches(
    load_pixels: Callable[[int], Tensor],
    count: int,
    preprocessing: Preprocessing,
    patches: int,
    device: torch.device,
    on_skip: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> Iterator[Tensor]:
    """Load images by index and yield normalised batches [B, C, H, W] on the device.

    An image whose `load_pixels` raises UnusableImageError is skipped and its reason passed to `on_skip`; if none is left,
    ValueError is raised.
    """
    batch_size = max(1, min(MAX_BATCH_IMAGES, MAX_BATCH_TOKENS // patches))
    pixels: list[Tensor] = []
    problems: list[str] = []
    for index in range(count):
        try:
            pixels.append(load_pixels(index))
        except UnusableImageError as problem:
            problems.append(str(problem))
            on_skip(str(problem))
        if len(pixels) == batch_size:
            yield preprocessing.normalise(torch.stack(pixels).to(device))
            pixels = []
        on_progress(index + 1, count)
    if pixels:
        yield preprocessing.normalise(torch.stack(pixels).to(device))
    if len(problems) == count:
        raise make_no_images_error(problems)


def prepare_image(path: Path, preprocessing: Preprocessing) -> tuple[Tensor, np.ndarray]:
    """Return a file as model input, [C, H, W], and the same crop to show, uint8 [H, W, 3]."""
    pixels = preprocessing.to_pixels(load_image_file(path))
    return preprocessing.normalise(pixels), to_rgb(pixels.numpy())


def load_image_file(path: Path) -> Image.Image:
    """Return the first frame of an image file; raise UnusableImageError if it is missing, too large or damaged."""
    name = clean_text(printable_path(os.fspath(path)))
    try:
        if not path.exists():
            raise UnusableImageError(f"{name}: no such file, or a broken link")
        if not path.is_file():
            raise UnusableImageError(f"{name}: not a regular file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnusableImageError(f"{name}: file of {path.stat().st_size / 2**30:.1f} GB is too large")
        data = path.read_bytes()
        check = inspect_bytes(data)
        if check.problem:
            raise UnusableImageError(f"{name}: {check.problem.replace('-', ' ')}, {check.detail}")
        with name_image_errors(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # problems were checked above
            image = Image.open(io.BytesIO(data), formats=supported_formats())
            image.load()
            return image
    except UnusableImageError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        message = str(error) if name in str(error) else f"{name}: {error or type(error).__name__}"
        raise UnusableImageError(" ".join(message.split())) from error


def make_folder_names(paths: list[Path]) -> list[str]:
    """Return a unique folder name for each image, its file name with a number where needed."""
    taken = set(RESERVED_NAMES)
    names = []
    for path in paths:
        plain = "".join(c if c.isalnum() or c in "-_. ()" else "_" for c in printable_path(path.stem))[:80]
        plain = plain.strip(" .") or "image"
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names
