"""Log-mel spectrograms equal those of transformers' AST feature extractor."""

import warnings

import numpy as np
import pytest
import torch

from vitrail.data.log_mel import LogMel, fit_frames, log_mel
from vitrail.data.preprocessing import Preprocessing, sound_preprocessing
from vitrail.utils.json import dataclass_from_json, to_json

AST = {"mean": -4.2677393, "std": 4.5689974}


def make_waveform(samples: int, rate: int, seed: int = 0) -> np.ndarray:
    """Return a waveform of a loud tone, a quiet one, noise and silence, float32 [n]."""
    rng, t = np.random.default_rng(seed), np.arange(samples) / rate
    wave = 0.7 * np.sin(2 * np.pi * 440 * t) + 1e-4 * np.sin(2 * np.pi * 0.37 * rate * t)
    wave += 0.1 * rng.standard_normal(samples) * (t > t[-1] / 2)
    wave[samples // 4 : samples // 3] = 0
    return wave.astype(np.float32)


def extract(waveform: np.ndarray, rate: int, bins: int, frames: int, normalise: bool = True) -> np.ndarray:
    """Return the features of transformers, [mel bins, frames]."""
    extractors = pytest.importorskip("transformers.models.audio_spectrogram_transformer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extractor = extractors.ASTFeatureExtractor(
            sampling_rate=rate, num_mel_bins=bins, max_length=frames, do_normalize=normalise, **AST
        )
    assert not extractors.feature_extraction_audio_spectrogram_transformer.is_speech_available()
    return extractor(waveform, sampling_rate=rate, return_tensors="np")["input_values"][0].T


@pytest.mark.parametrize(
    ("samples", "rate", "bins", "frames"),
    [
        *((400, 16000, 128, 4), (559, 16000, 128, 4), (560, 16000, 40, 4), (16000, 16000, 128, 1024)),
        *((30000, 16000, 128, 64), (8000, 8000, 64, 100), (5000, 8000, 128, 100), (44100, 44100, 80, 300)),
        *((11025, 11025, 64, 128), (399, 16000, 128, 4)),
    ],
)
def test_equals_transformers(samples: int, rate: int, bins: int, frames: int) -> None:
    """Feature extractors of transformers have frames of 400 samples at every rate."""
    waveform, sound = make_waveform(samples, rate), LogMel(rate, bins)
    preprocessing = sound_preprocessing(sound, frames, AST["mean"], 2 * AST["std"])
    features = fit_frames(log_mel(torch.from_numpy(waveform), sound), frames)
    np.testing.assert_allclose(features, extract(waveform, rate, bins, frames, False), atol=1e-4, rtol=0)
    normalised = preprocessing.normalise(features[None])
    np.testing.assert_allclose(normalised[0], extract(waveform, rate, bins, frames), atol=1e-4, rtol=0)


def test_batches_equal_single_waveforms() -> None:
    waves = torch.stack([torch.from_numpy(make_waveform(4000, 16000, seed)) for seed in range(3)])
    torch.testing.assert_close(log_mel(waves, LogMel()), torch.stack([log_mel(w, LogMel()) for w in waves]))


def test_a_tone_is_in_the_row_of_its_frequency() -> None:
    """Row 0 is the lowest frequency, and frequencies increase with the row."""
    sound = LogMel()
    t = torch.arange(16000) / 16000
    for hertz in (300.0, 1000.0, 5000.0):
        row = log_mel((2 * torch.pi * hertz * t).sin(), sound).mean(-1).argmax().item()
        assert abs(sound.frequencies()[int(row)] - hertz) < 0.06 * hertz + 20
    assert sound.frequencies() == sorted(sound.frequencies())


def test_counts_of_frames_and_samples_agree() -> None:
    sound = LogMel(8000, 64, 200, 80)
    assert [sound.count_frames(n) for n in (0, 199, 200, 279, 280)] == [0, 0, 1, 1, 2]
    assert all(sound.count_frames(sound.count_samples(n)) == n for n in (1, 2, 100))
    assert sound.seconds(100) == 1.0


def test_json_both_ways() -> None:
    for sound in (LogMel(), LogMel(8000, 64, 200, 80, "centre")):
        preprocessing = sound_preprocessing(sound, 100, -4.0, 9.0)
        assert dataclass_from_json(to_json(preprocessing), Preprocessing, "preprocessing") == preprocessing
    assert "sound" not in to_json(Preprocessing())


def test_preprocessing_of_a_sound() -> None:
    preprocessing = sound_preprocessing(LogMel(), 1024, -4.0, 9.0)
    assert preprocessing.shape == (1, 128, 1024)
    assert preprocessing.describe() == (
        "16,000 Hz, 128 mel bins, frames of 25 ms every 10 ms; 1024 frames (10.24 s) from the start; mean -4; std 9"
    )
    longer = preprocessing.with_size((64, 2048))
    assert longer.sound == LogMel(mel_bins=64)
    assert longer.shape == (1, 64, 2048)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_rate": 0}, "sound sample_rate must be 100 to 384,000, got 0"),
        ({"align": "end"}, "unknown sound align"),
    ],
)
def test_wrong_features_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogMel(**settings)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="64 rows, but its features have 128 mel bins"):
        Preprocessing((64, 100), (64, 100), mean=(0.0,), std=(1.0,), sound=LogMel())
    with pytest.raises(ValueError, match="one channel, got 3"):
        Preprocessing((128, 100), (128, 100), sound=LogMel())
