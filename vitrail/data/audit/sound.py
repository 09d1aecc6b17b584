"""Inspection of sounds: all samples are decoded, in blocks, to find silence, clipping, ends that come early, and copies."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import ClassVar

import numpy as np

from vitrail.data.audit.findings import Finding
from vitrail.data.audit.image import format_error
from vitrail.data.audit.scan import SplitScan
from vitrail.data.dataset import Images
from vitrail.data.decode import format_image_error
from vitrail.data.sound import BLOCK_SAMPLES, Sound
from vitrail.data.sources.splits import read_blocks

SILENCE = 10 ** (-60 / 20)  # peak below which a sound is silent: −60 dB of full scale
FULL_SCALE, CLIPPED_RUN, CLIPPED_SHARE = (
    0.999,
    3,
    1e-3,
)  # samples at full scale in a row, and their share of all samples
MIN_SECONDS = 0.025  # a frame of the usual features
TOLERANCE = 0.01  # of the bytes of a file that its header may overstate


@dataclass(frozen=True)
class SoundInspection:
    """The result of inspecting one sound."""

    UNREADABLE: ClassVar[str] = "unreadable"

    problem: str = ""  # one of UNUSABLE_KINDS, or "" if it is usable
    detail: str = ""
    digest: bytes = b""  # of the decoded samples and the rate, 16 bytes: copies in other formats are found
    rate: int = 0  # Hz
    channels: int = 0
    milliseconds: int = 0
    peak: float = 0.0
    clipped: int = 0  # samples in runs at full scale
    missing: int = 0  # percent of the samples that the header lists, if the file ends before them
    passing: bool = False  # transient: permissions, disk or memory errors

    def is_valid(self) -> bool:
        """Return True if the values of a cached result are possible."""
        numbers = (self.rate, self.channels, self.milliseconds, self.clipped, self.missing)
        return len(self.digest) in (0, 16) and min(numbers) >= 0 and max(numbers) < 2**40


def inspect_sound(images: Images, index: int) -> SoundInspection:
    """Inspect one sound. Problems are returned, not raised."""
    item, name = int(images.items[index]), images.name(index)
    try:
        blocks = iter(read_blocks(images.store, item))
        start = next(blocks, b"")
        missing = measure_missing(start, len(start) + sum(map(len, blocks)))
    except OSError as error:
        return SoundInspection("unreadable", format_error(error), passing=True)
    if not start:
        return SoundInspection("zero-byte", "empty file")
    try:
        with images.open_sound(index) as sound:
            return replace(inspect_samples(sound), missing=missing)
    except (OSError, ValueError, MemoryError) as error:
        detail, passing = format_image_error(error, name), isinstance(error, MemoryError)
        return SoundInspection("unreadable", detail[:160], passing=passing)


def inspect_samples(sound: Sound) -> SoundInspection:
    """Decode all samples of a sound in blocks; raise an error if they cannot be used."""
    digest, done, peak, clipped, run = hashlib.blake2b(f"{sound.rate}".encode(), digest_size=16), 0, 0.0, 0, 0
    while done < len(sound):
        block = sound.read(done, BLOCK_SAMPLES)
        if not len(block):
            break
        if not np.isfinite(block).all():
            raise ValueError("has samples that are not finite")
        digest.update(block.tobytes())
        peak = max(peak, float(np.abs(block).max()))
        found, run = count_clipped(block, run)
        clipped, done = clipped + found, done + len(block)
    seconds = done / sound.rate
    inspection = SoundInspection(
        digest=digest.digest(),
        rate=sound.rate,
        channels=sound.channels,
        milliseconds=round(1000 * seconds),
        peak=round(min(peak, 1e6), 6),
        clipped=clipped if clipped > CLIPPED_SHARE * done else 0,
    )
    if seconds < MIN_SECONDS:
        return replace(inspection, problem="short-sound", detail=f"{1000 * seconds:.3g} ms")
    return inspection


def count_clipped(block: np.ndarray, before: int) -> tuple[int, int]:
    """Return the samples in runs at full scale, and the length of the run at the end of the block, which may go on.

    `before` is the length of the run at the end of the block before this one.
    """
    loud = np.concatenate(([False], np.abs(block) >= FULL_SCALE, [False]))
    edges = np.flatnonzero(loud[1:] != loud[:-1]).reshape(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    if before and len(edges) and not edges[0, 0]:
        lengths[0] += before
    counted = lengths[lengths >= CLIPPED_RUN].sum()
    already = before if before >= CLIPPED_RUN and len(edges) and not edges[0, 0] else 0
    last = int(lengths[-1]) if len(edges) and edges[-1, 1] == len(block) else 0
    return int(counted) - already, last


def measure_missing(start: bytes, size: int) -> int:
    """Return the percentage of a WAV file's samples that its header lists and the file does not have; 0 for other formats."""
    if start[:4] != b"RIFF" or start[8:12] != b"WAVE":
        return 0
    position = 12
    while position + 8 <= len(start):
        length = int.from_bytes(start[position + 4 : position + 8], "little")
        if start[position : position + 4] == b"data":
            present = size - position - 8
            streamed = length >= 2**31 - 1  # written without knowing the length
            return 0 if streamed or present >= length * (1 - TOLERANCE) else max(1, round(100 * (1 - present / length)))
        position += 8 + length + length % 2
    return 0


class SoundScan(SplitScan):
    """The inspection results of one split of sounds."""

    def __init__(self, images: Images) -> None:
        super().__init__(images)
        self.sounds: dict[int, SoundInspection] = {}

    def add(self, index: int, inspection: SoundInspection) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.add_content(index, inspection.digest, b"", (0, 0))
        self.sounds[index] = replace(inspection, digest=b"")
        if inspection.problem:
            self.unusable.add(index)


@dataclass(frozen=True)
class SoundSummary:
    """Lengths, sample rates and channels of the readable sounds of a split: the smallest, the median and the largest."""

    seconds: tuple[float, float, float]
    rates: tuple[float, float, float]  # Hz
    channels: tuple[float, float, float]
    usual_seconds: float  # that 95 % do not exceed

    def to_dict(self) -> dict[str, tuple[float, ...] | float]:
        return asdict(self)


def summarise_sounds(scan: SplitScan) -> SoundSummary | None:
    """Return the statistics of a split; None without readable sounds."""
    sounds = [each for each in scan.sounds.values() if not each.problem] if isinstance(scan, SoundScan) else []
    if not sounds:
        return None
    columns = [s.milliseconds / 1000 for s in sounds], [s.rate for s in sounds], [s.channels for s in sounds]
    ends = [tuple(round(float(value), 3) for value in (min(c), np.median(c), max(c))) for c in columns]
    usual = round(float(np.quantile(columns[0], 0.95)), 3)
    return SoundSummary(*ends, usual)  # type: ignore[arg-type]


def find_sound_problems(scans: dict[str, SplitScan]) -> Iterator[Finding]:
    """Yield the findings about single sounds of all splits; the usual sample rate is the most frequent one."""
    found = {split: scan for split, scan in scans.items() if isinstance(scan, SoundScan)}
    rates = Counter(sound.rate for sound in chain(*(scan.sounds.values() for scan in found.values())) if sound.rate)
    usual = rates.most_common(1)[0][0] if rates else 0
    for split, scan in found.items():
        for index, sound in sorted(scan.sounds.items()):
            for kind, detail in _iter_problems(sound, usual):
                yield Finding(kind, scan.images.name(index), detail, (split, index))


def _iter_problems(sound: SoundInspection, usual: int) -> Iterator[tuple[str, str]]:
    """Yield the kind and detail of each finding about a sound."""
    if sound.problem:
        yield sound.problem, sound.detail
        return
    if sound.missing:
        yield "sound-cut", f"{sound.missing} % of the samples that its header lists are missing"
    if sound.peak < SILENCE:
        yield "silent", f"peak {sound.peak:.2g} of full scale"
    if sound.clipped:
        yield "clipped", f"{sound.clipped:,} samples in runs at full scale"
    if sound.rate != usual:
        yield "sample-rate", f"{sound.rate:,} Hz, most have {usual:,} Hz"
