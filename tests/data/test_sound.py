"""Sound files: all formats and sample types, reading in parts, resampling, and unusable files."""

import random
import tracemalloc
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.sounds import encode_sound, tone
from vitrail.data.decode import IMAGE_ERRORS
from vitrail.data.log_mel import LogMel, log_mel
from vitrail.data.preprocessing import Preprocessing, sound_preprocessing
from vitrail.data.sound import ArraySound, SoundFile, open_sound, to_sound

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")
FEATURES = LogMel(8000, 40, 200, 80)

SUBTYPES = [("WAV", "PCM_U8", 0.01), ("WAV", "PCM_16", 1e-4), ("WAV", "PCM_24", 1e-6), ("WAV", "PCM_32", 1e-6)]
SUBTYPES += [("WAV", "FLOAT", 1e-7), ("WAV", "DOUBLE", 1e-7), ("WAV", "ULAW", 0.05), ("WAV", "MS_ADPCM", 0.1)]
SUBTYPES += [("FLAC", "PCM_16", 1e-4), ("FLAC", "PCM_24", 1e-6), ("AIFF", "PCM_16", 1e-4), ("RF64", "PCM_16", 1e-4)]
SUBTYPES += [("OGG", "VORBIS", 0.1), ("MP3", "MPEG_LAYER_III", 0.1)]


@pytest.mark.parametrize(("format", "subtype", "error"), SUBTYPES)
def test_formats(tmp_path: Path, format: str, subtype: str, error: float) -> None:
    """Every format gives the samples, in parts as at once, of a path as of bytes."""
    wave = tone(440, 2.0)
    path = tmp_path / "sound"
    path.write_bytes(encode_sound(wave, format=format, subtype=subtype))
    with open_sound(str(path)) as sound, to_sound(path.read_bytes(), 8000) as other:
        assert (sound.rate, sound.channels, len(sound)) == (8000, 1, len(wave))
        whole = sound.read(0, len(sound))
        assert np.abs(whole - wave).max() < error
        np.testing.assert_array_equal(other.read(0, len(other)), whole)
        part = sound.read(9000, 1000)
        assert np.abs(part - whole[9000:10000]).max() <= (1e-3 if format in ("MP3", "OGG") else 0)
        assert len(sound.read(len(sound) - 10, 100)) == 10


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(300), tone(900)
    path = tmp_path / "stereo.wav"
    path.write_bytes(encode_sound(np.stack((left, right), 1), subtype="FLOAT"))
    with open_sound(str(path)) as sound:
        assert sound.channels == 2
        np.testing.assert_allclose(sound.read(0, len(sound)), (left + right) / 2, atol=1e-7)


@pytest.mark.parametrize(
    ("old", "new"), [(44100, 16000), (8000, 16000), (48000, 16000), (16000, 44100), (44101, 16000)]
)
def test_resampling_keeps_tones_and_removes_what_is_too_high(old: int, new: int) -> None:
    def resampled(hertz: float, at: int, start: int = 0, count: int = 4000) -> np.ndarray:
        wave = np.sin(2 * np.pi * hertz * np.arange(at) / at).astype(np.float32)
        return ArraySound(wave, at).waveform(new, start, count)

    exact = np.sin(2 * np.pi * 1000 * np.arange(4000) / new)
    assert np.abs(resampled(1000, old) - exact)[300:].max() < 1e-4
    np.testing.assert_allclose(resampled(1000, old, 1500, 100), resampled(1000, old)[1500:1600], atol=1e-6)
    if new < old:
        assert np.abs(resampled(0.55 * new, old))[300:].max() < 2e-3


def test_a_part_of_a_spectrogram_is_that_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(encode_sound(tone(440, 1.0, 11025), 11025))
    with open_sound(str(path)) as sound:
        total = sound.count_frames(FEATURES)
        whole = log_mel(torch.from_numpy(sound.waveform(8000, 0, 8000)), FEATURES)
        assert whole.shape[1] == total
        torch.testing.assert_close(sound.spectrogram(FEATURES, 20, 30), whole[:, 20:50], atol=1e-3, rtol=0)
        padded = sound.spectrogram(FEATURES, -5, total + 10)
        torch.testing.assert_close(padded[:, 5:-5], whole, atol=1e-3, rtol=0)
        assert not padded[:, :5].any()
        assert not padded[:, -5:].any()


def test_preprocessing_takes_paths_bytes_waveforms_and_sounds(tmp_path: Path) -> None:
    preprocessing, wave = sound_preprocessing(FEATURES, 50, -4.0, 9.0), tone(440, 0.3)
    path = tmp_path / "sound.wav"
    path.write_bytes(encode_sound(wave, subtype="FLOAT"))
    values = [path, str(path), path.read_bytes(), wave, torch.from_numpy(wave), ArraySound(wave, 8000)]
    first, *others = preprocessing(values)
    assert first.shape == (1, 40, 50)
    for other in others:
        torch.testing.assert_close(other, first)
    expected = torch.nn.functional.pad(log_mel(torch.from_numpy(wave), FEATURES), (0, 50 - 28))
    torch.testing.assert_close(first[0], (expected + 4) / 9)


def test_centred_sounds_are_cropped_and_padded_on_both_sides() -> None:
    features = LogMel(8000, 40, 200, 80, "centre")
    wave = tone(440, 0.5)
    whole = log_mel(torch.from_numpy(wave), features)  # 48 frames
    cropped = sound_preprocessing(features, 20, 0.0, 1.0)(wave)
    torch.testing.assert_close(cropped[0], whole[:, 14:34])
    padded = sound_preprocessing(features, 58, 0.0, 1.0)(wave)
    torch.testing.assert_close(padded[0, :, 5:53], whole)


def test_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="takes images, got a sound"):
        Preprocessing().to_pixels(ArraySound(tone(440), 8000))
    with pytest.raises(ValueError, match="takes sounds, got an image"):
        sound_preprocessing(FEATURES, 50, 0.0, 1.0).to_pixels(Image.new("L", (8, 8)))


def test_a_header_that_lies_about_its_size(tmp_path: Path) -> None:
    """The samples that are there are read, also of files that say they have four gigabytes."""
    data = bytearray(encode_sound(tone(440, 0.5)))
    at = data.index(b"data") + 4
    for stated, samples in ((2**32 - 1, 4000), (10**6, 4000), (2000, 1000)):
        data[at : at + 4] = stated.to_bytes(4, "little")
        path = tmp_path / f"{stated}.wav"
        path.write_bytes(bytes(data))
        with open_sound(str(path)) as sound:
            assert len(sound) == samples
            assert sound.spectrogram(FEATURES, 0, 20).isfinite().all()


def test_an_hour_takes_little_memory(tmp_path: Path) -> None:
    """A part of an hour is read without the rest of it."""
    path = tmp_path / "hour.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        second = (tone(440, 1.0) * 32767).astype("<i2").tobytes()
        for _ in range(60):
            file.writeframesraw(second * 60)
    tracemalloc.start()
    with open_sound(str(path)) as sound:
        assert sound.seconds == 3600
        middle = sound_preprocessing(LogMel(16000, 64, 400, 160, "centre"), 100, 0.0, 1.0).to_pixels(sound)
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()
    assert middle.shape == (1, 64, 100)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a sound, or none of WAV, FLAC"),
        (b"no sound at all" * 100, "not a sound, or none of WAV, FLAC"),
        (encode_sound(np.zeros(0, np.float32)), "has no samples"),
        (encode_sound(tone(440), format="AU"), "not a sound, or none of WAV, FLAC"),
        (encode_sound(tone(440), format="SVX", subtype="PCM_16"), "unsupported sound format SVX"),
        (encode_sound(np.zeros((100, 65), np.float32)), "must have 1 to 64 channels, got 65"),
        (encode_sound(tone(440), rate=50), "sample rate must be 100 to 384,000 Hz, got 50"),
        (encode_sound(np.zeros(50, np.float32)), "6.25 ms are shorter than a frame of 25 ms"),
        (encode_sound(np.full(800, np.nan, np.float32), subtype="FLOAT"), "has samples that are not finite"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(data)
    with pytest.raises((OSError, ValueError), match=message) as caught, open_sound(str(path)) as sound:
        sound.spectrogram(FEATURES, 0, 10)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_sound(str(tmp_path / "none.wav"))
    with pytest.raises(OSError, match="not a file, but a folder"):
        open_sound(str(tmp_path))


def test_mutated_files_give_a_spectrogram_or_one_line(tmp_path: Path) -> None:
    """500 files with bytes changed, removed or repeated: no crash, no endless loop, finite values or a named error."""
    wave, read, refused = tone(440, 0.2), 0, []
    originals = [
        encode_sound(wave, format=f, subtype=s) for f, s in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None))
    ]
    originals += [encode_sound(wave, format=f) for f in ("OGG", "MP3")]
    rng, path = random.Random(0), tmp_path / "mutated.wav"
    for number in range(500):
        data = bytearray(originals[number % 5])
        for _ in range(rng.choice((1, 3, 20))):
            at = rng.randrange(min(len(data), 64 if number % 2 else len(data)))
            data[at] = rng.randrange(256)
        if number % 7 == 0:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(bytes(data))
        try:
            with SoundFile(str(path), "mutated.wav") as sound:
                start = FEATURES.find_start(sound.count_frames(FEATURES), 20)
                assert sound.spectrogram(FEATURES, start, 20).isfinite().all()
                read += 1
        except IMAGE_ERRORS as error:
            refused.append(str(error))
    assert all(line.startswith("mutated.wav: ") and "\n" not in line and len(line) < 200 for line in refused)
    assert 100 < read < 500
