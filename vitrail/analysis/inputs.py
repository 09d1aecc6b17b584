"""Images of an inspection: listing of files, loading with the model's preprocessing, batches."""

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.analysis.results import space_evenly
from vitrail.data.audit.image import MAX_FILE_BYTES, inspect_bytes
from vitrail.data.dataset import Images, Media
from vitrail.data.decode import IMAGE_SUFFIXES, name_image_errors, supported_formats
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sound import SOUND_SUFFIXES, Sound, import_soundfile, open_sound
from vitrail.data.sources.files import FileStore, printable_path
from vitrail.inference import BATCH_SIZE, run_batches
from vitrail.models.base import Model, TokenModel
from vitrail.models.sizes import closest
from vitrail.nn.shape import Grid
from vitrail.reports.html import clean_text
from vitrail.utils.progress import ProgressCallback

Item = TypeVar("Item")
MAX_BATCH_IMAGES, MAX_BATCH_TOKENS = 8, 2048  # per batch; a batch of one image may have more tokens


@dataclass(frozen=True)
class InspectedModel:
    """Model with its preprocessing and name."""

    model: TokenModel
    preprocessing: Preprocessing
    name: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def grid(self) -> Grid:
        """Return the grid of patches at the preprocessing size."""
        return self.model.config.grid_of(self.preprocessing.size)

    def iter_batches(
        self, images: Images, read: list[int], skipped: list[str], stage: str, on_progress: ProgressCallback | None
    ) -> Iterator[Tensor]:
        """Yield the readable images as normalised batches [B, C, H, W] on the device; raise ValueError if there are none.

        `read` receives the indices of these images, `skipped` the reasons of the others.
        """
        unreadable: dict[str, str] = {}
        batches = run_batches(
            lambda pixels: self.preprocessing.normalise(torch.from_numpy(pixels).to(self.device)),
            images,
            self.preprocessing,
            unreadable,
            batch_size=max(1, min(MAX_BATCH_IMAGES, MAX_BATCH_TOKENS // (self.grid[0] * self.grid[1]))),
            workers=0 if len(images) <= BATCH_SIZE else None,  # few images take less time than starting a worker
            device=self.device,
            progress=on_progress,
            stage=stage,
            max_unreadable=len(images),
        )
        for batch in batches:
            read += batch.indices.tolist()
            yield batch.outputs
        problems = [f"{name}: {reason}" for name, reason in unreadable.items()]
        skipped += problems
        if not read:
            raise make_no_images_error(problems, self.preprocessing.media)


def resolve_target(model: Model, text: str) -> int:
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


def list_images(paths: list[str], media: Media = "image") -> list[Path]:
    """Return the given files and the images, or sounds, in the given folders and their subfolders, in order."""
    suffixes = SOUND_SUFFIXES if media == "sound" else IMAGE_SUFFIXES
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in suffixes
            and not os.path.isdir(file)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not inside:
            raise ValueError(f"{path} has no {media}s: give a file or a folder with {', '.join(sorted(suffixes))}")
        files += inside
    return files


def sample_evenly(items: Sequence[Item], max_items: int) -> list[Item]:
    """Return at most `max_items` of the items, evenly spaced."""
    return [items[k] for k in space_evenly(len(items), max_items)]


class UnusableImageError(ValueError):
    """Image that cannot be used, with the reason in one line."""


def make_no_images_error(problems: list[str], media: Media = "image") -> ValueError:
    """Return the error for inputs without a usable image or sound: the first three reasons."""
    more = f"; and {len(problems) - 3:,} more" if len(problems) > 3 else ""
    return ValueError(f"no {media} could be read: {'; '.join(problems[:3])}{more}")


class CheckedFiles(FileStore):
    """Store of files that are checked before they are decoded, so that the reasons for skipped ones are specific."""

    def name(self, item: int) -> str:
        return clean_text(super().name(item))

    def open(self, item: int) -> Any:
        load = load_sound_file if self.media == "sound" else load_image_file
        return load(Path(self.path(item)))


def make_images(store: FileStore) -> Images:
    """Return all files of a store, without labels."""
    return Images(store, np.arange(len(store)), np.zeros(len(store), dtype=np.int64), ("",))


def load_sound_file(path: Path) -> Sound:
    """Return an opened sound; raise UnusableImageError if it is missing or damaged."""
    import_soundfile()  # raises if it is not installed
    with report_unusable(path):
        if not path.exists():
            raise UnusableImageError(f"{clean_text(printable_path(os.fspath(path)))}: no such file, or a broken link")
        if not path.is_file():
            raise UnusableImageError(f"{clean_text(printable_path(os.fspath(path)))}: not a regular file")
        return open_sound(os.fspath(path), clean_text(printable_path(os.fspath(path))))


@contextmanager
def report_unusable(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as UnusableImageError, with its name."""
    name = clean_text(printable_path(os.fspath(path)))
    try:
        yield
    except UnusableImageError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        message = str(error) if name in str(error) else f"{name}: {error or type(error).__name__}"
        raise UnusableImageError(" ".join(message.split())) from error


def load_image_file(path: Path) -> Image.Image:
    """Return the first frame of an image file; raise UnusableImageError if it is missing, too large or damaged."""
    name = clean_text(printable_path(os.fspath(path)))
    with report_unusable(path):
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
