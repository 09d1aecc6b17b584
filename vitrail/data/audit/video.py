"""Inspection of videos: their frames, rate and size, and whether their beginning, middle and end can be decoded."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from vitrail.data.audit.findings import Finding, find_size_problems
from vitrail.data.audit.image import THUMB_SIDE, format_error, make_thumb
from vitrail.data.audit.scan import SplitScan
from vitrail.data.clip import Clip
from vitrail.data.dataset import Images
from vitrail.data.decode import DECODER_ERRORS, format_image_error
from vitrail.data.sources.splits import read_blocks
from vitrail.data.video import VideoEndsError


@dataclass(frozen=True)
class VideoInspection:
    """The result of inspecting one video."""

    UNREADABLE: ClassVar[str] = "unreadable"

    problem: str = ""  # one of UNUSABLE_KINDS, or "" if it is usable
    detail: str = ""
    digest: bytes = b""  # of the stored bytes, 16 bytes
    thumb: bytes = b""  # of the middle frame, grey
    width: int = 0
    height: int = 0
    frames: int = 0  # that can be decoded
    stated: int = 0  # if the file ends before the frames that it lists
    milliseconds: int = 0
    variable: bool = False  # frame rate
    turned: bool = False  # by a display matrix
    passing: bool = False  # transient: permissions, disk or memory errors

    def is_valid(self) -> bool:
        """Return True if the sizes of a cached result fit the arrays of a scan."""
        blobs = len(self.digest) in (0, 16) and len(self.thumb) in (0, THUMB_SIDE * THUMB_SIDE)
        numbers = (self.width, self.height, self.frames, self.stated, self.milliseconds)
        return blobs and min(numbers) >= 0 and max(numbers) < 2**31


def inspect_video(images: Images, index: int) -> VideoInspection:
    """Inspect one video. Problems are returned, not raised."""
    item, name = int(images.items[index]), images.name(index)
    try:
        digest, n_bytes = hashlib.blake2b(digest_size=16), 0
        for block in read_blocks(images.store, item):
            digest.update(block)
            n_bytes += len(block)
    except OSError as error:
        return VideoInspection("unreadable", format_error(error), passing=True)
    inspection = VideoInspection(digest=digest.digest())
    if not n_bytes:
        return replace(inspection, problem="zero-byte", detail="empty file")
    try:
        return inspect_frames(images, index, inspection)
    except (OSError, ValueError, MemoryError, *DECODER_ERRORS) as error:
        detail, passing = format_image_error(error, name), isinstance(error, MemoryError)
        return replace(inspection, problem="unreadable", detail=detail[:160], passing=passing)


def inspect_frames(images: Images, index: int, inspection: VideoInspection) -> VideoInspection:
    """Decode the first, the middle and the last frame of a video; raise an error if there is no frame."""
    with images.open_video(index) as video:
        count, stated = len(video), video.stated
        while True:
            numbers = sorted({0, count // 2, count - 1})
            try:
                frames = [frame.copy() for frame in video.iter_frames(numbers)]  # decoded while their files are open
                break
            except VideoEndsError as error:
                if not error.frames or error.frames >= count:
                    raise
                count, stated = error.frames, stated or len(video)
        seconds = count / video.rate if video.rate else 0.0
        middle = frames[numbers.index(count // 2)]
        return replace(
            inspection,
            thumb=make_thumb(middle),
            width=middle.width,
            height=middle.height,
            frames=count,
            stated=stated,
            milliseconds=min(round(1000 * seconds), 2**31 - 1),
            variable=video.is_variable,
            turned=video.is_turned,
        )


class VideoScan(SplitScan):
    """The inspection results of one split of videos."""

    def __init__(self, images: Images) -> None:
        super().__init__(images)
        self.videos: dict[int, VideoInspection] = {}

    def add(self, index: int, inspection: VideoInspection) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.add_content(index, inspection.digest, inspection.thumb, (inspection.width, inspection.height))
        self.videos[index] = replace(inspection, digest=b"", thumb=b"")
        if inspection.problem:
            self.unusable.add(index)


@dataclass(frozen=True)
class VideoSummary:
    """Sizes, lengths and frame rates of the readable videos of a split: the smallest, the median and the largest."""

    frames: tuple[int, int, int]
    seconds: tuple[float, float, float]
    rates: tuple[float, float, float]  # frames per second
    widths: tuple[int, int, int]
    heights: tuple[int, int, int]

    def to_dict(self) -> dict[str, tuple[float, ...]]:
        return asdict(self)


def summarise_videos(scan: SplitScan) -> VideoSummary | None:
    """Return the statistics of a split; None without readable videos."""
    videos = [each for each in scan.videos.values() if not each.problem] if isinstance(scan, VideoScan) else []
    if not videos:
        return None
    rates = [1000 * each.frames / each.milliseconds if each.milliseconds else 0.0 for each in videos]
    columns = ([each.frames for each in videos], [each.milliseconds / 1000 for each in videos], rates)
    sides = [each.width for each in videos], [each.height for each in videos]
    ends = [tuple(round(float(value), 3) for value in (min(c), np.median(c), max(c))) for c in (*columns, *sides)]
    return VideoSummary(*ends)  # type: ignore[arg-type]


def find_video_problems(split: str, scan: SplitScan, min_side: int, clip: Clip) -> Iterator[Finding]:
    """Yield the findings about single videos of a split."""
    if not isinstance(scan, VideoScan):
        return
    for index, video in sorted(scan.videos.items()):
        for kind, detail in _iter_problems(video, clip):
            yield Finding(kind, scan.images.name(index), detail, (split, index))
    yield from find_size_problems(split, scan, min_side)


def _iter_problems(video: VideoInspection, clip: Clip) -> Iterator[tuple[str, str]]:
    """Yield the kind and detail of each finding about a video."""
    if video.problem:
        yield video.problem, video.detail
        return
    if video.stated:
        yield "video-cut", f"only {video.frames:,} of {video.stated:,} frames can be decoded"
    if video.frames < clip.span:
        yield "short-video", f"{video.frames:,} frames, a clip of {clip} spans {clip.span:,}"
    if video.variable:
        yield "variable-rate", f"{video.frames:,} frames in {video.milliseconds / 1000:.1f} s"
    if video.turned:
        yield "video-turned", f"{video.width}×{video.height} when upright"
