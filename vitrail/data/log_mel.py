"""Log-mel spectrograms: the features of a sound, an image of one channel whose rows are mel bins and whose columns are time.

Row 0 is the lowest frequency, column 0 the beginning. Values are those of Kaldi's `fbank` with a Hann window, which the Audio
Spectrogram Transformer takes (Gong et al. 2021).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

ALIGNMENTS = ("start", "centre")
LOW_HZ = 20.0  # lower edge of the first mel filter
PREEMPHASIS = 0.97
FLOOR = 2.0**-23  # smallest energy, before the logarithm
PADDING = 0.0  # value after the end of a sound, as AST pads
MAX_RATE, MAX_BINS, MAX_WINDOW = 384_000, 1024, 65_536


@dataclass(frozen=True)
class LogMel:
    """The settings of log-mel spectrograms of waveforms.

    A frame has `frame_length` samples, at `sample_rate`, and begins `frame_shift` samples after the one before; samples that
    do not fill a frame are left out. A frame loses its mean, is pre-emphasised, weighted with a Hann window and padded to the
    next power of two; its power spectrum is summed under `mel_bins` triangles on the mel scale, from 20 Hz to half the rate.

    Of a sound that is longer than the model's input, `align` "start" takes the beginning, as transformers does, and "centre" the
    middle. A shorter one is padded with zeros: at its end, or on both sides.
    """

    sample_rate: int = 16_000  # Hz
    mel_bins: int = 128
    frame_length: int = 400  # samples: 25 ms at 16 kHz
    frame_shift: int = 160  # samples: 10 ms at 16 kHz
    align: Literal["start", "centre"] = field(default="start", metadata={"omit_default": True})

    def __post_init__(self) -> None:
        limits = {"sample_rate": (100, MAX_RATE), "mel_bins": (1, MAX_BINS), "frame_length": (2, MAX_WINDOW)}
        for name, (least, most) in (limits | {"frame_shift": (1, MAX_WINDOW)}).items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"sound {name} must be {least:,} to {most:,}, got {getattr(self, name)}")
        if self.align not in ALIGNMENTS:
            raise ValueError(f"unknown sound align {self.align!r}: use {', '.join(ALIGNMENTS)}")

    @property
    def fft_length(self) -> int:
        """Return the length of the Fourier transform: the power of two that holds a frame."""
        return 1 << (self.frame_length - 1).bit_length()

    def count_frames(self, samples: int) -> int:
        """Return the number of whole frames in this many samples."""
        return max(0, 1 + (samples - self.frame_length) // self.frame_shift)

    def count_samples(self, frames: int) -> int:
        """Return the number of samples that this many frames cover."""
        return (frames - 1) * self.frame_shift + self.frame_length

    def seconds(self, frames: int) -> float:
        """Return the duration of this many frames in seconds."""
        return frames * self.frame_shift / self.sample_rate

    def frequencies(self) -> list[float]:
        """Return the centre frequency of each mel bin in Hz."""
        return to_hertz(mel_edges(self)[1:-1]).tolist()

    def find_start(self, total: int, frames: int) -> int:
        """Return the first of the `frames` columns that a model sees of `total`; < 0 where a sound is padded before it."""
        return 0 if self.align == "start" else (total - frames) // 2

    def describe(self) -> str:
        """Return the features in words."""
        length, shift = (1000 * n / self.sample_rate for n in (self.frame_length, self.frame_shift))
        return f"{self.sample_rate:,} Hz, {self.mel_bins} mel bins, frames of {length:g} ms every {shift:g} ms"


def log_mel(waveform: Tensor, sound: LogMel) -> Tensor:
    """Return the log-mel spectrograms of mono waveforms in [-1, 1], [..., n], as float32 [..., mel bins, frames].

    The Fourier transform is computed in float64: in float32, quiet bins beside loud ones would differ from NumPy's.
    """
    window, filters = make_tables(sound)
    if not sound.count_frames(waveform.shape[-1]):
        return torch.empty((*waveform.shape[:-1], sound.mel_bins, 0), dtype=torch.float32, device=waveform.device)
    frames = waveform.double().unfold(-1, sound.frame_length, sound.frame_shift)  # [..., T, n]
    frames = frames - frames.mean(-1, keepdim=True)
    before = torch.cat((frames[..., :1], frames[..., :-1]), -1)
    frames = (frames - PREEMPHASIS * before) * window.to(waveform.device)
    power = torch.fft.rfft(frames, sound.fft_length).abs().square()  # [..., T, F]
    return (power @ filters.to(waveform.device)).clamp(min=FLOOR).log().float().transpose(-1, -2)


def fit_frames(spectrogram: Tensor, frames: int, start: int = 0) -> Tensor:
    """Return `frames` columns of a spectrogram [..., mel bins, T] from `start` on, which may be < 0; outside it is PADDING."""
    cut = spectrogram[..., max(0, start) : max(0, start + frames)]
    left = min(frames, max(0, -start))
    return torch.nn.functional.pad(cut, (left, frames - left - cut.shape[-1]), value=PADDING)


def to_mel(hertz: Tensor) -> Tensor:
    """Return frequencies in Hz on the mel scale of Kaldi and HTK."""
    return 1127.0 * torch.log1p(hertz / 700.0)


def to_hertz(mel: Tensor) -> Tensor:
    """Return frequencies on the mel scale in Hz."""
    return 700.0 * torch.expm1(mel / 1127.0)


def mel_edges(sound: LogMel) -> Tensor:
    """Return the edges of the triangles on the mel scale, float64 [mel bins + 2]: a triangle spans three of them."""
    low, high = to_mel(torch.tensor([LOW_HZ, sound.sample_rate // 2], dtype=torch.float64)).tolist()
    return torch.linspace(low, high, sound.mel_bins + 2, dtype=torch.float64)


@lru_cache(maxsize=16)
def make_tables(sound: LogMel) -> tuple[Tensor, Tensor]:
    """Return the window [frame length] and the mel filters [frequencies, mel bins], float64."""
    window = torch.hann_window(sound.frame_length, periodic=False, dtype=torch.float64)
    bins = torch.arange(sound.fft_length // 2 + 1, dtype=torch.float64)
    mel, edges = to_mel(bins * (sound.sample_rate / sound.fft_length))[:, None], mel_edges(sound)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    return window, torch.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)).clamp(min=0)
