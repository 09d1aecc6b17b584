"""Sounds: mono waveforms of files, read in parts at any sample rate, and their log-mel spectrograms.

Files of sound need soundfile (extra `audio`). Only the samples that a spectrogram needs are decoded, so an hour takes as much
memory as a second.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from math import ceil, gcd
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import name_image_errors
from vitrail.data.log_mel import MAX_RATE, LogMel, fit_frames, log_mel
from vitrail.data.video import has_suffix
from vitrail.utils.stderr import StderrFilter

# Accepted formats of libsndfile and the suffixes of their files.
SOUND_FORMATS = {
    "WAV": (".wav", ".wave"),
    "FLAC": (".flac",),
    "OGG": (".ogg", ".oga", ".opus"),
    "MP3": (".mp3",),
    "AIFF": (".aif", ".aiff", ".aifc"),
}
SOUND_SUFFIXES = frozenset(suffix for suffixes in SOUND_FORMATS.values() for suffix in suffixes)
LIBRARY_FORMATS = {"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF"}  # libsndfile's names
SIGNATURES = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM")  # MP3 has others
WEBM_START, MP4_START = b"\x1a\x45\xdf\xa3", b"ftyp"  # what browsers and telephones record
MIN_RATE, MAX_CHANNELS = 100, 64
BLOCK_SAMPLES = 2**16  # decoded at a time
ZERO_CROSSINGS, ROLL_OFF, KAISER_BETA = 16, 0.945, 9.0  # of the low-pass filter of resampling
DRAWN_FRAMES = 1024
quiet_mpeg = StderrFilter(
    "[src/libmpg123", "Note: ", "Warning: "
)  # the decoder of MP3 prints what is wrong with a file
MAX_PHASES = 8192  # filters kept for a pair of rates


class Sound(ABC):
    """An opened sound: `len(sound)` samples of one channel, the mean of the channels of a file."""

    name: str  # in messages
    rate: int  # samples per second, Hz; 0: that of the model
    channels: int = 1  # of the file
    stated: int = 0  # samples that the header of a file lists, if the file ends long before them

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, count: int) -> np.ndarray:
        """Return samples from `start` on, float32 [n]; fewer than `count` at the end of the sound."""

    @property
    def seconds(self) -> float:
        return len(self) / self.rate

    def count_frames(self, features: LogMel) -> int:
        """Return the number of columns of the spectrogram; raise ValueError if the sound is shorter than one."""
        samples = -(-len(self) * features.sample_rate // self.rate)
        frames = features.count_frames(samples)
        if not frames:
            least = 1000 * features.frame_length / features.sample_rate
            length = 1000 * self.seconds
            raise ValueError(f"{self.name}: {length:.3g} ms are shorter than a frame of {least:g} ms")
        return frames

    def spectrogram(self, features: LogMel, start: int, frames: int) -> Tensor:
        """Return columns of the log-mel spectrogram from `start` on, [mel bins, frames]; outside the sound it is padded."""
        total = self.count_frames(features)
        first, last = max(0, start), min(total, start + frames)
        wave = self.waveform(features.sample_rate, first * features.frame_shift, features.count_samples(last - first))
        return fit_frames(log_mel(torch.from_numpy(wave), features), frames, start - first)

    def waveform(self, rate: int, start: int, count: int) -> np.ndarray:
        """Return samples at another rate from `start` on, float32 [count]; after the end they are 0."""
        if rate == self.rate:
            wave = self.read(start, count)
        else:
            up, down, filters, reach = make_filters(self.rate, rate)
            begin = start * down // up - reach
            end = (start + count - 1) * down // up + reach + 1
            wave = self.read(max(0, begin), end - max(0, begin))
            padded = np.pad(wave, (max(0, -begin), end - max(0, begin) - len(wave)))
            wave = resample(padded, begin, start, count, up, down, filters)
        if not np.isfinite(wave).all():
            raise ValueError(f"{self.name}: has samples that are not finite")
        return np.pad(wave, (0, count - len(wave)))

    def close(self) -> None:  # noqa: B027
        """Close the file of the sound."""

    def __enter__(self) -> "Sound":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SoundFile(Sound):
    """A file of sound, opened by soundfile."""

    def __init__(self, source: str | BinaryIO, name: str) -> None:
        soundfile, self.name = import_soundfile(), name
        formats = ", ".join(SOUND_FORMATS)
        start = read_start(source)
        if start.startswith(WEBM_START) or start[4:8] == MP4_START:
            kind = "WebM" if start.startswith(WEBM_START) else "M4A or MP4"
            raise OSError(f"{name}: {kind} is not read: convert it to WAV, FLAC or OGG, for example with ffmpeg")
        if not has_signature(start):  # libmpg123 would look for a sound in it, and print what it finds
            raise OSError(f"{name}: not a sound, or none of {formats}")
        self._quiet = quiet_mpeg if is_mpeg(start) else nullcontext
        try:
            with self._quiet():
                self._file = soundfile.SoundFile(os.fsencode(source) if isinstance(source, str) else source)
        except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
            text = str(error).rsplit(": ", 1)[-1].strip().rstrip(".")
            raise OSError(f"{name}: not a sound, or none of {formats} ({text})") from None
        self.rate, self.channels = self._file.samplerate, self._file.channels
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if self._file.format not in LIBRARY_FORMATS:
            raise OSError(f"{self.name}: unsupported sound format {self._file.format}: use {', '.join(SOUND_FORMATS)}")
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise OSError(f"{self.name}: sample rate must be {MIN_RATE} to {MAX_RATE:,} Hz, got {self.rate:,}")
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise OSError(f"{self.name}: must have 1 to {MAX_CHANNELS} channels, got {self.channels:,}")
        if len(self) < 1:
            raise OSError(f"{self.name}: has no samples")

    def __len__(self) -> int:
        return self._file.frames

    def read(self, start: int, count: int) -> np.ndarray:
        count = max(0, min(count, len(self) - start))
        blocks = [np.empty(0, np.float32)]
        with self._quiet():
            done = self._read_blocks(start, count, blocks)
        if not done and count:
            raise OSError(f"{self.name}: ends before sample {start:,} of {len(self):,}")
        return np.concatenate(blocks)

    def _read_blocks(self, start: int, count: int, blocks: list[np.ndarray]) -> int:
        """Append the samples to `blocks`, and return how many there are."""
        soundfile, done = import_soundfile(), 0
        try:
            if count:
                self._file.seek(start)
            while done < count:
                block = self._file.read(min(BLOCK_SAMPLES, count - done), dtype="float32", always_2d=True)
                if not len(block):
                    break
                blocks.append(block[:, 0] if block.shape[1] == 1 else block.mean(1))
                done += len(block)
        except (soundfile.SoundFileError, RuntimeError) as error:
            raise OSError(f"{self.name}: cannot be decoded at sample {start + done:,} ({error})") from None
        return done

    def close(self) -> None:
        with self._quiet():
            self._file.close()


class ArraySound(Sound):
    """A waveform in memory, [n] or [n, channels]: floats in [-1, 1], or integers of 16 or 32 bits."""

    def __init__(self, waveform: np.ndarray, rate: int, name: str = "the sound") -> None:
        if waveform.ndim not in (1, 2) or not waveform.size or waveform.dtype.kind not in "if":
            raise ValueError(f"{name} is {waveform.dtype} {list(waveform.shape)}: give floats [n] or [n, channels]")
        if waveform.dtype.kind == "i":
            waveform = waveform.astype(np.float64) / -float(np.iinfo(waveform.dtype).min)
        self._wave = (waveform if waveform.ndim == 1 else waveform.mean(1)).astype(np.float32)
        self.name, self.rate, self.channels = name, rate, waveform.shape[1] if waveform.ndim == 2 else 1

    def __len__(self) -> int:
        return len(self._wave)

    def read(self, start: int, count: int) -> np.ndarray:
        return self._wave[start : start + count]


@lru_cache(maxsize=32)
def make_filters(old: int, new: int) -> tuple[int, int, Callable[[np.ndarray], np.ndarray], int]:
    """Return what turns samples at one rate into samples at another: the ratio up / down, its filters, and their reach.

    Sample n of the result lies at n · down / up of the old samples, between two of them: its phase is n · down % up. The filter
    of a phase is a sinc in a Kaiser window that passes 94.5 % of the lower of both bandwidths.
    """
    common = gcd(old, new)
    up, down = new // common, old // common
    cutoff = min(1.0, up / down) * ROLL_OFF
    reach = ceil(ZERO_CROSSINGS / cutoff)

    def design(phases: np.ndarray) -> np.ndarray:  # [n] -> [n, 2 · reach + 1]
        t = np.arange(-reach, reach + 1) - phases[:, None] / up
        window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (t * cutoff / ZERO_CROSSINGS) ** 2, 0, 1))) / np.i0(
            KAISER_BETA
        )
        return (cutoff * np.sinc(cutoff * t) * window * (np.abs(t) * cutoff < ZERO_CROSSINGS)).astype(np.float32)

    if up > MAX_PHASES:
        return up, down, design, reach
    table = design(np.arange(up))
    return up, down, lambda phases: table[phases], reach


def resample(
    wave: np.ndarray,
    begin: int,
    start: int,
    count: int,
    up: int,
    down: int,
    filters: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return `count` samples at the new rate from `start` on; `wave` are the old samples from `begin` on, as far as needed."""
    out = np.empty(count, np.float32)
    for first in range(0, count, BLOCK_SAMPLES // 4):
        exact = np.arange(start + first, start + min(count, first + BLOCK_SAMPLES // 4), dtype=np.int64) * down
        kernel = filters(exact % up)  # [n, taps]
        reach = kernel.shape[1] // 2
        windows = np.lib.stride_tricks.sliding_window_view(wave, kernel.shape[1])
        out[first : first + len(exact)] = np.einsum("nt,nt->n", windows[exact // up - reach - begin], kernel)
    return out


def draw_spectrogram(sound: Sound, features: LogMel | None = None) -> Image.Image:
    """Return the spectrogram of the first DRAWN_FRAMES frames of a sound as a grey image, high frequencies at the top.

    Without `features`, they suit the rate of the sound.
    """
    rate = min(sound.rate, 16_000)
    features = features or LogMel(rate, 64, max(2, rate // 40), max(1, rate // 100))
    values = sound.spectrogram(features, 0, min(DRAWN_FRAMES, sound.count_frames(features)))
    low, high = values.min(), values.max()
    grey = ((values - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8).flip(0)
    return Image.fromarray(grey.numpy())


def read_start(source: str | BinaryIO) -> bytes:
    """Return the first bytes of a file."""
    if isinstance(source, str):
        with open(source, "rb") as file:
            return file.read(8)
    start = source.read(8)
    source.seek(0)
    return start


def has_signature(start: bytes) -> bool:
    """Return True if these first bytes of a file are those of an accepted format."""
    return is_mpeg(start) or start.startswith(SIGNATURES)


def is_mpeg(start: bytes) -> bool:
    """Return True if these first bytes of a file are those of MP3."""
    return start[:3] == b"ID3" or (start[:1] == b"\xff" and start[1:2] >= b"\xe0")


def is_sound_name(name: str) -> bool:
    """Return True if the file name has a sound suffix."""
    return has_suffix(name, SOUND_SUFFIXES)


def import_soundfile() -> Any:
    """Return soundfile, or raise an error that tells how to install it."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without libsndfile
        raise ValueError("sounds need soundfile: pip install 'vitrail[audio]'") from None
    return soundfile


def open_sound(path: str, name: str | None = None) -> Sound:
    """Open a file of sound."""
    if os.path.isdir(path):
        raise OSError(f"{name or path}: not a file, but a folder")
    os.stat(path)  # raises FileNotFoundError
    return SoundFile(path, name or path)


def to_sound(value: Any, rate: int = 0) -> Sound:
    """Return the sound of a value: a path, the bytes of a file, a waveform [n] or [n, channels], or a sound.

    `rate` is that of a waveform; 0 for that of the model.
    """
    if isinstance(value, Sound):
        return value
    if isinstance(value, str | os.PathLike):
        path = os.path.expanduser(os.fspath(value))
        with name_image_errors(path):
            return open_sound(path)
    if isinstance(value, bytes | bytearray):
        return SoundFile(io.BytesIO(bytes(value)), "the sound")
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise ValueError(f"a sound of type {type(value).__name__}: give a path, bytes, or a waveform [n]")
    return ArraySound(value, rate)
