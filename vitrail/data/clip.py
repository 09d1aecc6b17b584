"""Clips: the frames of a video that a model sees at once, and how they are chosen, as pure functions of the frame count."""

from dataclasses import dataclass, field

import numpy as np

from vitrail.data.rng import SampleRandom

CLIP_STREAM = 2**33  # random stream of a clip's start, apart from those of the pipeline's steps
MAX_FRAMES, MAX_STRIDE, MAX_VIEWS = 1024, 4096, 256


@dataclass(frozen=True)
class Clip:
    """A clip of `frames` frames of a video, every `stride`-th: it spans (frames - 1) · stride + 1 of them.

    Training takes it at a random start, evaluation at the centre of the video. With `clips` of 2 or more, evaluation takes that
    many, evenly spaced from the first frame to the last; with `crops`, each at that many places along the longer side of the
    frames. The outputs of all these views are averaged.

    Of a video with fewer frames than a clip spans, the last frame is repeated: a still image has no motion that the video
    does not have, as a loop would.
    """

    frames: int = 16
    stride: int = 4
    clips: int = field(default=1, metadata={"omit_default": True})
    crops: int = field(default=1, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        limits = {"frames": MAX_FRAMES, "stride": MAX_STRIDE, "clips": MAX_VIEWS, "crops": MAX_VIEWS}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"clip {name} must be 1 to {limit:,}, got {getattr(self, name)}")
        if self.views > MAX_VIEWS:
            raise ValueError(
                f"a video must have at most {MAX_VIEWS} views, got {self.clips} clips × {self.crops} crops"
            )

    @property
    def span(self) -> int:
        """Return the number of frames from the first to the last of a clip."""
        return (self.frames - 1) * self.stride + 1

    @property
    def views(self) -> int:
        """Return the number of clips and crops of a video at evaluation."""
        return self.clips * self.crops

    def sample(self, count: int, rng: SampleRandom) -> np.ndarray:
        """Return the frames of a clip at a random start of a video of `count` frames, int64 [T]."""
        room = max(0, count - self.span)
        return self._list_frames(int(rng.with_stream(CLIP_STREAM).uniform_at(0) * (room + 1)), count)

    def spread(self, index: int, count: int) -> np.ndarray:
        """Return the frames of one of the clips of an evaluation, int64 [T]: of several, from the start to the end."""
        room, last = max(0, count - self.span), self.clips - 1
        return self._list_frames((2 * index * room + last) // (2 * last) if last else room // 2, count)

    def _list_frames(self, start: int, count: int) -> np.ndarray:
        if count < 1:
            raise ValueError("a video without frames has no clip")
        return np.minimum(start + np.arange(self.frames, dtype=np.int64) * self.stride, count - 1)

    def describe(self) -> str:
        """Return the clip in words."""
        step = {1: "every frame", 2: "every second frame", 3: "every third frame"}.get(self.stride)
        step = step or f"one frame in {self.stride}"
        views = f", {self.clips} clips × {self.crops} crops" if self.views > 1 else ""
        return f"{self.frames} frames, {step}{views}"

    def __str__(self) -> str:
        """Return the frames and the stride as the command line takes them, 16x4."""
        return f"{self.frames}x{self.stride}"


def describe_samples(frames: int | None) -> str:
    """Return what a model takes that has clips of so many frames; None for images."""
    return "images" if frames is None else f"clips of {frames} frames"


def parse_clip(text: str) -> Clip:
    """Return the clip of a text such as 16x4: frames and stride."""
    frames, separator, stride = text.replace("×", "x").partition("x")
    if not (frames.isascii() and frames.isdecimal() and separator and stride.isascii() and stride.isdecimal()):
        raise ValueError(f"{text!r} is not a clip: give frames and stride, such as 16x4")
    return Clip(int(frames), int(stride))
