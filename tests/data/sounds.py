"""Sounds for tests: tones whose frequency is the class, as files of every format."""

import io
import random
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import sound_preprocessing

RATE = 8000
LABELS = ("high", "low", "none")
FEATURES = LogMel(8000, 32, 200, 80, "centre")
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


def save_model(path: Path) -> Path:
    """Save a ViT of spectrograms with random weights, of 32 mel bins and 48 frames."""
    torch.manual_seed(0)
    shape = {"image_size": (32, 48), "channels": 1, "classes": 3, "position": "sincos2d"}
    model = vitrail.build(patch=8, width=24, depth=2, heads=2, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    vitrail.save(model, path, labels=LABELS, preprocessing=sound_preprocessing(FEATURES, 48, -4.0, 9.0))
    return path


def mutate_sounds(count: int, seed: int = 0) -> list[bytes]:
    """Return sound files of five formats with bytes changed, every second one in its header, and every seventh cut."""
    rng, wave = random.Random(seed), tone(400, 0.2)
    originals = [encode_sound(wave, format=kind) for kind in ("WAV", "FLAC", "OGG", "AIFF", "MP3")]
    files = []
    for number in range(count):
        data = bytearray(originals[number % len(originals)])
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(min(len(data), 64 if number % 2 else len(data)))] = rng.randrange(256)
        files.append(bytes(data[: rng.randrange(len(data))] if number % 7 == 0 else data))
    return files
