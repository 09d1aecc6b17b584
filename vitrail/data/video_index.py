"""Index of a file of video: the display time of every frame and the frames at which decoding can start.

It is read from the packets, without decoding them. AVI files have no display times, and packets that hold two frames or none:
their frames are counted by decoding them once. The indices of recent files are kept, by name, size and modification time.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.video import import_av

KEPT_BYTES = 2**26  # of all indices
ENTRY_BYTES = 1024  # of an index besides its arrays
MIN_PACKETS = 2**16  # that any file may list; more only if it has as many bytes
MAX_PIXELS = 2**26  # of a frame
COMPLETE = 0.9  # of the frames in the header; the last frames of AVI files are often missing


@dataclass(frozen=True)
class FrameIndex:
    """The frames of a file in display order."""

    times: np.ndarray  # [n] int64, in ticks; of counted frames their numbers
    keys: (
        np.ndarray
    )  # [k] int64: numbers of the frames at which decoding can start; the first is 0, the start of the file
    tick: float  # seconds
    stated: int  # frames in the header of the file; 0: unknown
    counted: bool  # frames are identified by counting from the start, not by their times

    def __len__(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        return self.times.nbytes + self.keys.nbytes

    @property
    def is_complete(self) -> bool:
        """Return True if there are nearly as many frames as the header states."""
        return len(self) + 1 >= COMPLETE * self.stated

    @property
    def is_variable(self) -> bool:
        """Return True if frames are not shown at equal intervals, to within half of one."""
        return not self.counted and not np.array_equal(self.find_frames(np.arange(len(self))), np.arange(len(self)))

    def find_key(self, number: int) -> int:
        """Return the last entry of `keys` that is not after a frame."""
        return int(np.searchsorted(self.keys, number, side="right")) - 1

    def find_frames(self, positions: np.ndarray) -> np.ndarray:
        """Return the frames shown at positions of equal duration from the first frame to the last."""
        if self.counted or len(self) < 3:
            return positions
        first, last = int(self.times[0]), int(self.times[-1])
        shown = first + np.asarray(positions) * ((last - first) / (len(self) - 1))
        middles = (self.times[:-1] + self.times[1:]) / 2
        return np.searchsorted(middles, shown, side="left").astype(np.int64)


class KeptIndices:
    """The indices of files that were read, by file; the oldest ones are dropped beyond KEPT_BYTES. Threads may share it."""

    def __init__(self) -> None:
        self.indices: OrderedDict[tuple[Any, ...], FrameIndex] = OrderedDict()
        self.n_bytes, self.lock = 0, threading.Lock()

    def keep(self, key: tuple[Any, ...], index: FrameIndex) -> None:
        """Keep an index for the next time its file is read."""
        with self.lock:
            old = self.indices.pop(key, None)
            self.n_bytes += count_bytes(index) - (0 if old is None else count_bytes(old))
            self.indices[key] = index
            while len(self.indices) > 1 and self.n_bytes > KEPT_BYTES:
                self.n_bytes -= count_bytes(self.indices.popitem(last=False)[1])

    def find(self, key: tuple[Any, ...]) -> FrameIndex | None:
        """Return the index that was kept for a file."""
        return self.indices.get(key)


def count_bytes(index: FrameIndex) -> int:
    """Return the memory of a kept index."""
    return index.nbytes + ENTRY_BYTES


KEPT = KeptIndices()


Packet = tuple[int | None, int | None, bool]  # display time, decoding time, key flag


def read_packets(container: Any, stream: Any, n_bytes: int) -> list[Packet]:
    """Return the packets with a frame, up to where the file ends or is damaged."""
    packets: list[Packet] = []
    # Frames that others refer to and that are not shown have packets of their own.
    hides_frames = stream.codec_context.name == "vp8"
    limit, count, complete = max(MIN_PACKETS, n_bytes), 0, 0
    with suppress(import_av().error.FFmpegError):  # the file ends
        for packet in container.demux(stream):
            count += 1
            if count > limit:
                raise ValueError(f"lists more than {limit:,} frames in {n_bytes:,} bytes")
            if not packet.size or packet.is_discard or (hides_frames and not bytes(packet)[0] & 0x10):
                continue
            packets.append((packet.pts, packet.dts, packet.is_keyframe))
            complete = complete if packet.is_corrupt else len(packets)
    return packets[:complete]  # of the others, the ends are missing


def build_index(packets: list[Packet], container: Any, stream: Any) -> FrameIndex | None:
    """Return the index of a file by the times of its packets; None if they are not those at which frames are shown."""
    times = [pts for pts, _, _ in packets if pts is not None]
    if len(times) < len(packets) or len(set(times)) < len(times):
        return None
    if "avi" in container.format.name and any(pts != dts for pts, dts, _ in packets):
        return None  # derived from decoding times
    ordered = np.sort(np.array(times, dtype=np.int64))
    starts = [pts for pts, _, is_key in packets if is_key and pts is not None]
    keys = np.unique([0, *np.searchsorted(ordered, starts).tolist()])
    return FrameIndex(ordered, keys, float(stream.time_base or 0), max(0, stream.frames), counted=False)


def count_index(frames: Iterator[Any], stream: Any) -> FrameIndex:
    """Return the index of a file by decoding all frames once."""
    start = np.zeros(1, dtype=np.int64)
    count = sum(1 for _ in frames)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    tick = 1 / rate if rate > 0 else 0.0
    return FrameIndex(np.arange(count), start, tick, max(0, stream.frames), counted=True)
