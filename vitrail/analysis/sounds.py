"""Spectrograms as images for figures and pages: high frequencies at the top, with axes in Hz and seconds.

The row of a spectrogram that a model takes first is the lowest mel bin. Drawings have it at the bottom, so `flip_trace` turns the
maps of a trace over. Of patches that overlap, the image is cut to what their grid covers evenly: a cell is the part of the
spectrogram around the centre of its patch.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitrail.analysis.results import ImageTrace
from vitrail.data.log_mel import LogMel, to_hertz, to_mel
from vitrail.data.preprocessing import Preprocessing
from vitrail.nn.shape import Grid

HERTZ_TICKS = (50, 100, 200, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
TICK_GAP = 0.09  # of the height between two ticks in Hz
SECOND_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
MOST_SECOND_TICKS = 5
PADDING_GREY = 60
MAX_ASPECT = 3.0  # of a drawn spectrogram: the rows of a longer one are repeated

Tick = tuple[float, str]  # its place as a fraction of the side, from the left or from the top, and its text


@dataclass(frozen=True)
class SoundAxes:
    """The axes of a drawn spectrogram; `top` and `left` are those of the whole input, in its pixels."""

    features: LogMel
    start: int  # first frame of the sound that the model takes; < 0 where it is padded before
    frames: int  # of the whole sound
    bottom: int  # first mel bin that is drawn
    bins: int
    left: int  # first column that is drawn
    columns: int

    def hertz_at(self, fraction: float) -> float:
        """Return the frequency at a fraction of the height, from the top."""
        low, high = to_mel(torch.tensor([20.0, self.features.sample_rate // 2], dtype=torch.float64)).tolist()
        place = self.bottom + (1 - fraction) * self.bins  # in mel bins from the lowest
        mel = low + (place + 0.5) / (self.features.mel_bins + 1) * (high - low)
        return float(to_hertz(torch.tensor(mel, dtype=torch.float64)))

    def seconds_at(self, fraction: float) -> float:
        """Return the time of the sound at a fraction of the width, from the left."""
        frame = self.start + self.left + fraction * self.columns
        middle = (self.features.frame_length - self.features.frame_shift) / 2
        return (frame * self.features.frame_shift + middle) / self.features.sample_rate

    def find_place(self, seconds: float, hertz: float) -> tuple[float, float]:
        """Return the fractions of the height, from the top, and of the width of a time and a frequency."""
        ends = self.seconds_at(0), self.seconds_at(1)
        marks = torch.tensor([self.hertz_at(1), hertz, self.hertz_at(0)], dtype=torch.float64)
        low, mel, high = to_mel(marks).tolist()
        return (high - mel) / (high - low), (seconds - ends[0]) / (ends[1] - ends[0])

    def find_cell(self, seconds: float, hertz: float, grid: Grid) -> Grid:
        """Return row, from the top, and column of the cell at a time and a frequency; raise ValueError outside."""
        down, across = self.find_place(seconds, hertz)
        if not (0 <= down <= 1 and 0 <= across <= 1):
            begin, end = max(0.0, self.seconds_at(0)), self.seconds_at(1)
            inside = f"{begin:.2f},{self.hertz_at(1):.0f} to {end:.2f},{self.hertz_at(0):.0f}"
            raise ValueError(f"--at must be seconds,Hz within {inside}, got {seconds:g},{hertz:g}")
        return min(int(down * grid[0]), grid[0] - 1), min(int(across * grid[1]), grid[1] - 1)

    def describe_cell(self, row: int, column: int, grid: Grid) -> str:
        """Return the time and the frequencies of a cell in words."""
        h, w = grid
        begin, end = (self.seconds_at((column + side) / w) for side in (0, 1))
        return f"{begin:.2f}–{end:.2f} s, {self.hertz_at((row + 1) / h):.0f}–{self.hertz_at(row / h):.0f} Hz"

    @property
    def hertz_ticks(self) -> list[Tick]:
        """Return the frequencies to write beside a spectrogram."""
        ticks: list[Tick] = []
        for hertz in reversed(HERTZ_TICKS):
            place = self.find_place(0, hertz)[0]
            if 0.02 <= place <= 0.99 and all(abs(place - other) >= TICK_GAP for other, _ in ticks):
                ticks.append((place, f"{hertz / 1000:g}k" if hertz >= 1000 else f"{hertz}"))
        return ticks

    @property
    def second_ticks(self) -> list[Tick]:
        """Return the times to write below a spectrogram: within the sound."""
        first, last = max(0.0, self.seconds_at(0)), min(self.seconds_at(1), self.end)
        step = next((s for s in SECOND_STEPS if (last - first) / s <= MOST_SECOND_TICKS), SECOND_STEPS[-1])
        times = np.arange(np.ceil(first / step - 1e-6), np.floor(last / step + 1e-6) + 1) * step
        return [(self.find_place(float(time), 100)[1], f"{abs(time):.6g}") for time in times]

    @property
    def end(self) -> float:
        """Return the time of the end of the sound."""
        return self.frames * self.features.frame_shift / self.features.sample_rate

    def describe(self) -> str:
        """Return what the model takes of the sound in words."""
        first, last = max(0.0, self.seconds_at(0)), min(self.seconds_at(1), self.end)
        what = f"{first:.2f} to {last:.2f} s" if first > 0.05 or last < self.end - 0.05 else f"{self.end:.2f} s"
        return f"{what}, {self.features.mel_bins} mel bins up to {self.features.sample_rate / 2000:g} kHz"

    def to_page(self) -> dict[str, Any]:
        """Return the ticks, and the edges of a fine grid by which a page names cells, ready for JSON."""
        fine = np.linspace(0, 1, 129).tolist()
        return {
            "hertz": [[round(place, 4), text] for place, text in self.hertz_ticks],
            "seconds": [[round(place, 4), text] for place, text in self.second_ticks],
            "heights": [round(self.hertz_at(fraction), 1) for fraction in fine],
            "begin": round(self.seconds_at(0), 4),
            "end": round(self.seconds_at(1), 4),
        }


def find_axes(frames: int, preprocessing: Preprocessing, grid: Grid, stride: int, overlap: int = 0) -> SoundAxes:
    """Return the axes of what a model with this grid of patches takes of a sound of so many frames."""
    features, (bins, columns) = preprocessing.sound, preprocessing.size
    assert features is not None
    margin = overlap // 2
    height, width = (min(stride * cells, side - margin) for cells, side in zip(grid, (bins, columns), strict=True))
    return SoundAxes(features, features.find_start(frames, columns), frames, margin, height, margin, width)


def draw_input(spectrogram: np.ndarray, axes: SoundAxes) -> np.ndarray:
    """Return a model's input [mel bins, frames] as an image, uint8 [H, W, 3]; padding is of one grey.

    Rows of a long sound are repeated, so that the image is at most MAX_ASPECT times as wide as high.
    """
    frames = axes.start + axes.left + np.arange(axes.columns)
    inside = (frames >= 0) & (frames < axes.frames)
    values = spectrogram[axes.bottom : axes.bottom + axes.bins, axes.left : axes.left + axes.columns][::-1]
    heard = values[:, inside] if inside.any() else values
    low, high = np.quantile(heard, 0.05), heard.max()
    grey = ((values - low) / max(high - low, 1e-6)).clip(0, 1) * 255
    grey[:, ~inside] = PADDING_GREY
    repeats = max(1, round(grey.shape[1] / grey.shape[0] / MAX_ASPECT))
    return np.repeat(np.repeat(grey.round().astype(np.uint8), repeats, 0)[..., None], 3, 2)


def flip_trace(trace: ImageTrace) -> ImageTrace:
    """Return the trace of a spectrogram with rows counted from the top, the highest frequencies."""
    changed: dict[str, Any] = {}
    rows = {"attention": 2, "attention_at": 2, "rollout": 0, "relevance": 0}
    rows |= {"colours": 1, "similar": 1, "norms": 1, "embedded": 0, "positions": 0}
    for name, axis in rows.items():
        values = getattr(trace, name)
        if values is not None:
            changed[name] = np.ascontiguousarray(np.flip(values, axis))
    if trace.between is not None and trace.between_grid is not None:
        a, b = trace.between_grid
        cells = trace.between.reshape(*trace.between.shape[:2], a, b, a, b)
        changed["between"] = np.ascontiguousarray(np.flip(cells, (2, 4))).reshape(trace.between.shape)
    if trace.at is not None:
        changed["at"] = (trace.grid[0] - 1 - trace.at[0], trace.at[1])
    return replace(trace, **changed)
