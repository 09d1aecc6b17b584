"""Decoding of untrusted files of sound to the spectrogram of a model. Runs in a decoding process.

Only the part that the model takes is decoded. The header of a file may lie about its length: samples that are missing are 0,
and the process limits memory and CPU time.
"""

import io

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sound import SoundFile
from vitrail.serve.limits import RequestRefused


def decode_sound(
    data: bytes, name: str, preprocessing: Preprocessing, max_seconds: float
) -> tuple[np.ndarray, int, tuple[int, int]]:
    """Return the spectrogram, float32 [1, mel bins, frames], the samples decoded, and the size of that of the whole sound."""
    features = preprocessing.sound
    assert features is not None
    with SoundFile(io.BytesIO(data), name) as sound:
        if sound.seconds > max_seconds:
            raise RequestRefused(413, f"{name}: {sound.seconds:,.0f} s long, the limit is {max_seconds:g} s")
        frames = sound.count_frames(features)
        taken = features.count_samples(min(frames, preprocessing.size[1])) * sound.rate / features.sample_rate
        pixels = preprocessing.to_pixels(sound).numpy()
        return pixels, round(taken * sound.channels), (features.mel_bins, frames)
