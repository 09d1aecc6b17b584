"""Files of video, decoded with PyAV: a few frames of a long file, in bounded memory.

Decoding starts at the last keyframe before a wanted frame. Frames that no other frame needs are not decoded, and only wanted
frames are converted to RGB, turned upright by the display matrix of the file.
"""

import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image

from vitrail.data.decode import name_image_errors, orient_pixels
from vitrail.data.video import VIDEO_FORMATS, Video, VideoEndsError, check_order, import_av
from vitrail.data.video_index import (
    KEPT,
    MAX_PIXELS,
    FrameIndex,
    build_index,
    count_index,
    read_packets,
)

SEEK_FRAMES = 8  # frames that a seek must save
FORMATS = ",".join(VIDEO_FORMATS)
OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none", "max_pixels": str(MAX_PIXELS)}
BUFFER_BYTES = 2**16


@contextmanager
def name_video_errors(name: str) -> Iterator[None]:
    """Convert errors of the decoder to an OSError or ValueError that names the video."""
    av = import_av()
    with name_image_errors(name):
        try:
            yield
        except av.error.FFmpegError as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise OSError(f"{name}: not a readable video ({reason})") from None


class VideoFile(Video):
    """A file of video. `open_file` opens its bytes; with a `stamp` of size and time, the index is kept for the next reading."""

    def __init__(self, open_file: Callable[[], BinaryIO], name: str, stamp: tuple[int, int] | None = None) -> None:
        self.name, self._open_file = name, open_file
        self._container: Any = None
        with name_video_errors(name):
            index = None if stamp is None else KEPT.find((name, *stamp))
            self.index = index or self._read_index()
            if stamp is not None and index is None:
                KEPT.keep((name, *stamp), self.index)
        self.rate = 1 / self.index.tick if self.index.counted and self.index.tick else self._find_rate()
        if not len(self.index):
            self.close()
            raise OSError(f"{name}: has no frames")
        self.is_variable = self.index.is_variable
        if not self.index.is_complete:
            self.stated = self.index.stated

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> "VideoFile":
        """Return the video of the bytes of a file."""
        return cls(lambda: io.BytesIO(data), name)

    def __len__(self) -> int:
        return len(self.index)

    def find_frames(self, positions: np.ndarray) -> np.ndarray:
        return self.index.find_frames(positions)

    def iter_frames(self, numbers: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
        wanted = check_order(numbers)
        if wanted and wanted[-1] >= len(self):
            raise self._end(len(self))
        with name_video_errors(self.name), closing(self._iter_raw(wanted)) as frames:
            for frame in frames:
                orientation = read_orientation(frame)
                self.is_turned = orientation > 1
                yield convert_frame(frame, orientation)

    def close(self) -> None:
        if self._container is not None:
            with suppress(OSError):
                self._container.close()
            self._file.close()
            self._container = None

    def _find_rate(self) -> float | None:
        times, tick = self.index.times, self.index.tick
        seconds = float(times[-1] - times[0]) * tick if len(times) else 0.0
        return (len(times) - 1) / seconds if seconds > 0 else None

    def _end(self, frames: int) -> VideoEndsError:
        total = max(self.index.stated, len(self))
        return VideoEndsError(f"{self.name}: only {frames:,} of {total:,} frames can be decoded", frames)

    def _read_index(self) -> FrameIndex:
        container, stream = self._open()
        packets = read_packets(container, stream, self._n_bytes)
        if index := build_index(packets, container, stream):
            return index
        self._open()
        return count_index(self._iter_decoded(None), self._stream)

    def _open(self) -> tuple[Any, Any]:
        """Open the file, or open it again to decode from its start."""
        av = import_av()
        self.close()
        self._file = self._open_file()
        self._n_bytes = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        if not self._n_bytes:
            self._file.close()
            raise OSError("an empty file")
        try:
            self._container = av.open(self._file, metadata_errors="replace", options=OPTIONS, buffer_size=BUFFER_BYTES)
            self._stream = choose_stream(self._container)
        except BaseException:
            self.close()
            self._file.close()
            raise
        return self._container, self._stream

    def _iter_raw(self, wanted: list[int]) -> Generator[Any, None, None]:
        """Yield the decoded frames with these numbers."""
        self._open()
        return self._iter_counted(wanted) if self.index.counted else self._iter_timed(wanted)

    def _iter_counted(self, wanted: list[int]) -> Generator[Any, None, None]:
        """Decode from the start and count."""
        remaining, count = iter(wanted), 0
        target = next(remaining, None)
        for frame in self._iter_decoded(None) if wanted else ():
            if count == target:
                yield frame
                if (target := next(remaining, None)) is None:
                    return
            count += 1
        if target is not None:
            raise self._end(count)

    def _iter_timed(self, wanted: list[int]) -> Generator[Any, None, None]:
        """Decode from keyframes. In place of a frame that cannot be decoded, the one before it is shown."""
        times, keys = self.index.times, self.index.keys
        wanted_times = {int(times[number]) for number in wanted}
        shown: Any = None  # the last frame at or before the wanted time
        ahead: Any = None  # a decoded frame after it
        position, frames = 0, self._iter_decoded(wanted_times)
        for number in wanted:
            time, key = int(times[number]), self.index.find_key(number)
            if keys[key] - position > SEEK_FRAMES:
                shown, ahead, frames = None, None, self._seek(key, wanted_times)
            ended = False
            while not ended and (shown is None or shown.pts < time) and (ahead is None or ahead.pts <= time):
                if ahead is not None:
                    shown, ahead = ahead, None
                    continue
                ahead = next((frame for frame in frames if frame.pts is not None), None)
                ended = ahead is None
            if shown is None or shown.pts < time:
                if ended:
                    raise self._end(0 if shown is None else int(np.searchsorted(times, shown.pts, side="right")))
                shown = shown or ahead
            position = number
            yield shown

    def _seek(self, key: int, wanted: set[int]) -> Iterator[Any]:
        """Return the frames from a keyframe on; if the file cannot be read from there, from its start on."""
        av = import_av()
        time = int(self.index.times[self.index.keys[key]])
        with suppress(av.error.FFmpegError):
            self._container.seek(time, stream=self._stream, backward=True, any_frame=False)
            frames = self._iter_decoded(wanted)
            first = next(frames, None)
            if first is not None and first.key_frame and first.pts is not None and first.pts <= time:
                return chain([first], frames)
        self._open()
        return self._iter_decoded(wanted)

    def _iter_decoded(self, wanted: set[int] | None) -> Iterator[Any]:
        """Yield the frames of all packets that follow; damaged packets are skipped.

        Packets at other than the wanted times are not decoded if no other frame needs them.
        """
        av, decoder = import_av(), self._stream.codec_context
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError:  # the file ends inside a packet
                packet = None
            is_last = packet is None or not packet.size
            if wanted is not None and packet is not None:
                needed = is_last or packet.is_keyframe or packet.pts in wanted
                decoder.skip_frame = "DEFAULT" if needed else "NONREF"
            try:
                frames = decoder.decode(None if is_last else packet)
            except av.error.EOFError:
                return
            except MemoryError:  # not the end of the video
                raise MemoryError("not enough memory to decode the video") from None
            except av.error.FFmpegError:
                frames = []
            yield from frames
            if is_last:
                return


def choose_stream(container: Any) -> Any:
    """Return the first stream of video that is not a cover image, decoded by one thread; the other streams are not read."""
    streams = [each for each in container.streams.video if "attached_pic" not in str(each.disposition)]
    if not streams:
        raise OSError("has no video stream")
    stream = streams[0]
    discard = import_av().stream.Discard
    for other in container.streams:
        if other.index != stream.index:
            other.discard = discard.all
    decoder = stream.codec_context
    if decoder.width * decoder.height > MAX_PIXELS:
        raise ValueError(f"frames of {decoder.width}×{decoder.height} pixels are too large")
    decoder.thread_type, decoder.thread_count = "NONE", 1
    return stream


def convert_frame(frame: Any, orientation: int) -> Image.Image:
    """Return a decoded frame as an upright RGB image."""
    kind = import_av().video.reformatter.Interpolation
    exact = kind.BILINEAR | kind.ACCURATE_RND | kind.BITEXACT  # the same pixels on every processor
    # One thread: a pool of threads, freed in a forked process, would be waited for in vain.
    pixels = frame.reformat(format="rgb24", interpolation=exact, threads=1).to_ndarray()
    if orientation > 1:
        pixels = orient_pixels(torch.from_numpy(pixels).permute(2, 0, 1), orientation).permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(pixels))


def read_orientation(frame: Any) -> int:
    """Return the EXIF orientation that equals the display matrix of a frame, rounded to quarter turns; 1 without one."""
    data = frame.side_data.get(import_av().sidedata.sidedata.Type.DISPLAYMATRIX)
    if data is None or len(bytes(data)) < 36:
        return 1
    a, b, _, c, d = np.frombuffer(bytes(data), dtype=np.int32)[:5].tolist()  # x' = a x + c y, y' = b x + d y
    if abs(b) + abs(c) > abs(a) + abs(d):
        return {(True, False): 6, (False, True): 8, (True, True): 5, (False, False): 7}[b > 0, c > 0]
    return {(True, True): 1, (False, False): 3, (False, True): 2, (True, False): 4}[a > 0, d > 0]
