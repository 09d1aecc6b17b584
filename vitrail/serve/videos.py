"""Decoding of untrusted files of video to the views of a model of clips. Runs in a decoding process.

Frames are counted from the packets of the file, and their size is that of the decoded frame: the header of a container may state
anything. The process limits memory and CPU time, so that a file which decodes for ever ends the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.video import Video
from vitrail.serve.limits import RequestRefused


@dataclass(frozen=True)
class VideoLimits:
    """Limits of one video."""

    pixels: int  # of a frame
    frames: int
    seconds: float


class LimitedVideo(Video):
    """A client's video. Only frames within the limits are passed on."""

    def __init__(self, video: Video, limits: VideoLimits) -> None:
        self.video, self.limits, self.name, self.stated = video, limits, video.name, video.stated
        self.cost, self.size = 0, (0, 0)  # decoded pixels, and height and width of a frame
        if len(video) > limits.frames:
            raise RequestRefused(413, f"{self.name}: {len(video):,} frames, the limit is {limits.frames:,}")
        seconds = len(video) / video.rate if video.rate else 0.0
        if seconds > limits.seconds:
            raise RequestRefused(413, f"{self.name}: {seconds:,.0f} s long, the limit is {limits.seconds:g} s")

    def __len__(self) -> int:
        return len(self.video)

    def find_frames(self, positions: np.ndarray) -> np.ndarray:
        return self.video.find_frames(positions)

    def iter_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
        for frame in self.video.iter_frames(numbers):
            pixels = frame.width * frame.height
            if pixels > self.limits.pixels:
                limit = f"the limit is {self.limits.pixels / 1e6:g} million"
                raise RequestRefused(413, f"{self.name}: a frame of {frame.width}×{frame.height} pixels, {limit}")
            self.cost, self.size = self.cost + pixels, (frame.height, frame.width)
            yield frame

    def close(self) -> None:
        self.video.close()


def decode_video(
    data: bytes, name: str, preprocessing: Preprocessing, limits: VideoLimits
) -> tuple[np.ndarray, int, tuple[int, int]]:
    """Return the views of a video, uint8 [V, C, T, H, W], the pixels of the frames decoded for them, and the size of a frame."""
    from vitrail.data.video_file import VideoFile

    with closing(VideoFile.from_bytes(data, name)) as opened:
        video = LimitedVideo(opened, limits)
        return preprocessing.to_views(video).numpy(), video.cost, video.size
