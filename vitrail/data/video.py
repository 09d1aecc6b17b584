"""Videos: frames by their number in display order. A frame is an image, so all that is done to images applies to it.

`open_video` opens a file of video, which needs PyAV (`vitrail/data/video_file.py`), or a folder of frames.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import IMAGE_SUFFIXES, name_image_errors, open_image

# Accepted demuxers of libav and the suffixes of their files. Others are excluded: playlists open further files.
VIDEO_FORMATS = {
    "mov": (".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2", ".f4v"),
    "matroska": (".mkv", ".webm"),
    "avi": (".avi", ".divx"),
    "mpeg": (".mpg", ".mpeg", ".mpe", ".vob"),
    "mpegts": (".m2ts", ".mts"),
    "asf": (".wmv", ".asf"),
    "flv": (".flv",),
    "ogg": (".ogv",),
}
VIDEO_SUFFIXES = frozenset(suffix for suffixes in VIDEO_FORMATS.values() for suffix in suffixes)
STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")  # of images in containers of videos
NUMBER = re.compile(r"(\d+)")


class VideoEndsError(OSError):
    """Raised where a video ends, or cannot be decoded further, before a wanted frame. `frames` before it are readable."""

    def __init__(self, message: str, frames: int) -> None:
        super().__init__(message)
        self.frames = frames


class Video(ABC):
    """An opened video: `len(video)` frames, numbered from 0 in display order."""

    name: str  # in messages
    rate: float | None = None  # frames per second, if known
    is_variable: bool = False  # True if frames are not shown at equal intervals
    is_turned: bool = False  # True if frames are stored turned
    stated: int = 0  # frames that the header of a file lists, if the file ends long before them

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def iter_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
        """Yield the frames with these numbers, which must increase; raise VideoEndsError at one that is not there."""

    def find_frames(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the frames at positions of equal duration, of which there are as many as frames.

        They are the positions themselves, unless the frame rate varies: then those of the frames shown at these times.
        """
        return positions

    def read_frames(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the frames with these numbers, in any order, as uint8 [T, H, W, 3]."""
        wanted, inverse = np.unique(np.asarray(numbers, dtype=np.int64), return_inverse=True)
        frames = [np.asarray(frame.convert("RGB")) for frame in self.iter_frames(wanted)]
        if len({frame.shape for frame in frames}) > 1:
            sizes = sorted({f"{frame.shape[1]}×{frame.shape[0]}" for frame in frames})
            raise ValueError(f"{self.name}: frames of several sizes ({', '.join(sizes)}): resize them one by one")
        return np.stack(frames)[inverse]

    def close(self) -> None:  # noqa: B027
        """Close the files of the video."""

    def __enter__(self) -> "Video":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_clip(
    video: Video, least: int, choose: Callable[[int], np.ndarray], make: Callable[[Image.Image], Tensor]
) -> Tensor:
    """Return what `make` returns for the frames of a clip, stacked before the last two axes: [..., T, H, W].

    `choose` returns the positions of a clip's frames in a video of a given number. If a video ends before the frames that its
    container lists, positions are chosen among those before the end; fewer than `least` are an error.
    """
    count = len(video)
    if count < min(least, video.stated):
        raise VideoEndsError(f"{video.name}: ends after {count:,} of {video.stated:,} frames, fewer than a clip", count)
    while True:
        positions = choose(count)
        shown = (
            video.find_frames(positions) if count == len(video) else positions
        )  # the times of the others are not known
        numbers, inverse = np.unique(shown, return_inverse=True)
        try:
            made = [make(frame) for frame in video.iter_frames(numbers)]
        except VideoEndsError as error:
            if error.frames < min(least, count) or error.frames >= count:
                raise
            count = error.frames
        else:
            return torch.stack([made[row] for row in inverse.tolist()], -3)


def first_frame(image: Image.Image | Video) -> Image.Image:
    """Return an opened image, or the first frame of an opened video."""
    return next(image.iter_frames([0])) if isinstance(image, Video) else image


class FrameFolder(Video):
    """A video whose frames are the image files of a folder, in the order of the numbers in their names."""

    def __init__(self, folder: str, name: str | None = None) -> None:
        self.folder, self.name = folder, name or folder
        with name_image_errors(self.name):
            self.files = list_frames(folder)
        if not self.files:
            raise OSError(f"{self.name}: a folder without frames")

    def __len__(self) -> int:
        return len(self.files)

    def iter_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
        for number in check_order(numbers):
            path = os.path.join(self.folder, self.files[number])
            name = os.path.join(self.name, self.files[number])
            with open_image(path, name) as image, name_image_errors(name):
                yield image


def list_frames(folder: str) -> list[str]:
    """Return the names of the image files in a folder, in the order of the numbers in them: frame_2 before frame_10."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name[0] != "." and not entry.is_dir()]
    return sorted((name for name in names if has_suffix(name, IMAGE_SUFFIXES)), key=number_key)


def number_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in NUMBER.split(name)]


def check_order(numbers: Sequence[int] | np.ndarray) -> list[int]:
    """Return the numbers as a list; raise ValueError if they do not increase."""
    listed = [int(number) for number in numbers]
    if any(second <= first for first, second in pairwise(listed)) or (listed and listed[0] < 0):
        raise ValueError(f"frame numbers must be >= 0 and increase, got {listed[:8]}")
    return listed


def has_suffix(name: str, suffixes: frozenset[str]) -> bool:
    """Return True if the file name has one of the suffixes, in upper or lower case."""
    return name[name.rfind(".") :].lower() in suffixes


def is_video_name(name: str) -> bool:
    """Return True if the file name has a video suffix."""
    return has_suffix(name, VIDEO_SUFFIXES)


def is_video_data(head: bytes) -> bool:
    """Return True if a file with these first bytes is one of VIDEO_FORMATS; of images in the same containers False."""
    if head[4:8] == b"ftyp":
        return head[8:12] not in STILL_BRANDS
    starts = (b"\x1a\x45\xdf\xa3", b"\0\0\x01\xba", b"\0\0\x01\xb3", b"\x30\x26\xb2\x75", b"FLV", b"OggS")
    is_stream = head[:1] == b"G" == head[188:189]  # MPEG transport stream
    is_avi = head[:4] == b"RIFF" and head[8:12] == b"AVI "
    return head.startswith(starts) or is_avi or is_stream or head[4:8] in (b"moov", b"mdat", b"wide")


def import_av() -> Any:
    """Return PyAV, or raise an error that tells how to install it."""
    try:
        import av
    except ImportError:
        raise ValueError("videos need PyAV: pip install 'vitrail[video]'") from None
    return av


def open_video(path: str, name: str | None = None) -> Video:
    """Open a file of video or a folder of frames."""
    if os.path.isdir(path):
        return FrameFolder(path, name)
    from vitrail.data.video_file import VideoFile

    status = os.stat(path)
    return VideoFile(lambda: open(path, "rb"), name or path, (status.st_size, status.st_mtime_ns))


def to_video(value: Any) -> Video:
    """Return the video of a value: a path, the bytes of a file, frames uint8 [T, H, W] or [T, H, W, C], or a video."""
    if isinstance(value, Video):
        return value
    if isinstance(value, str | os.PathLike):
        path = os.path.expanduser(os.fspath(value))
        with name_image_errors(path):
            return open_video(path)
    if isinstance(value, bytes | bytearray):
        from vitrail.data.video_file import VideoFile

        return VideoFile.from_bytes(bytes(value), "the video")
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise ValueError(f"a video of type {type(value).__name__}: give a path, bytes, or an array [T, H, W, C]")
    return ArrayVideo(value, "the video")


class ArrayVideo(Video):
    """A video in memory, uint8 [T, H, W] for grey or [T, H, W, C] with 1, 3 or 4 channels."""

    def __init__(self, pixels: np.ndarray, name: str) -> None:
        shape = list(pixels.shape)
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and shape[3] not in (1, 3, 4)):
            raise ValueError(f"{name} is {pixels.dtype} {shape}: give uint8 [T, H, W, C] with 1, 3 or 4 channels")
        if not pixels.size:
            raise ValueError(f"{name} has the shape {shape}: a video needs frames")
        self.pixels, self.name = pixels[..., 0] if shape[3:] == [1] else pixels, name

    def __len__(self) -> int:
        return len(self.pixels)

    def iter_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
        for number in check_order(numbers):
            yield Image.fromarray(np.ascontiguousarray(self.pixels[number]))
