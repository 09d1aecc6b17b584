"""Sounds for tests: tones whose frequency is the class, as files of every format."""

import io
from pathlib import Path

import numpy as np

RATE = 8000
HERTZ = {"low": 400.0, "high": 1800.0}


def tone(hertz: float, seconds: float = 0.3, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """Return a tone with some noise, float32 [n]."""
    t = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(t))
    return (0.4 * np.sin(2 * np.pi * hertz * t + seed) + 0.01 * noise).astype(np.float32)


def encode_sound(
    wave: np.ndarray, rate: int = RATE, format: str = "WAV", subtype: str | None = None, endian: str | None = None
) -> bytes:
    """Return the bytes of a sound file."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=format, subtype=subtype, endian=endian)
    return file.getvalue()


def write_folder(root: Path, count: int = 6, suffix: str = "wav", format: str = "WAV") -> Path:
    """Write class folders of tones, `count` of each class."""
    for name, hertz in HERTZ.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            wave = tone(hertz * (1 + number / 50), 0.25 + number / 100, seed=number)
            (root / name / f"{number}.{suffix}").write_bytes(encode_sound(wave, format=format))
    return root
