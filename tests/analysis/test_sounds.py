"""Inspection of models of sounds: maps over spectrograms, with axes in Hz and seconds."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")

import vitrail
from tests.data.sounds import encode_sound, save_model, tone
from vitrail.analysis import trace_image
from vitrail.analysis.sounds import SoundAxes, draw_input, find_axes, flip_trace
from vitrail.cli import main
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import sound_preprocessing
from vitrail.nn.embed import Patches


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sounds")
    save_model(root / "model.safetensors")
    (root / "sounds").mkdir()
    for hertz in (400, 1800):
        (root / "sounds" / f"{hertz}.wav").write_bytes(encode_sound(tone(hertz, 0.4)))
    return root


@pytest.mark.parametrize("rate", [8000, 16_000])
def test_axes_say_where_a_tone_is(rate: int) -> None:
    features = LogMel(rate, 64, rate // 40, rate // 100, "centre")
    preprocessing = sound_preprocessing(features, 48, -4.0, 9.0)
    silence, sound = np.zeros(rate // 5, np.float32), tone(1500, 0.1, rate)
    wave = np.concatenate((silence, sound, silence))
    axes = find_axes(features.count_frames(len(wave)), preprocessing, (8, 6), 8)
    pixels = draw_input(preprocessing.to_pixels(vitrail.data.sound.ArraySound(wave, rate))[0].numpy(), axes)
    grey = pixels[..., 0].astype(float)
    down = (grey[:, axes.columns // 2].argmax() + 0.5) / len(grey)
    assert axes.hertz_at(down) == pytest.approx(1500, rel=0.08)
    loud = np.flatnonzero(grey.max(0) > 200)
    assert axes.seconds_at(loud[0] / grey.shape[1]) == pytest.approx(0.2, abs=0.03)
    assert axes.seconds_at((loud[-1] + 1) / grey.shape[1]) == pytest.approx(0.3, abs=0.03)
    row, column = axes.find_cell(0.25, 1500, (8, 6))
    assert row == int(down * 8)
    assert axes.describe_cell(row, column, (8, 6)).endswith("Hz")
    place = {text: at for at, text in axes.hertz_ticks}["1k"]
    assert axes.hertz_at(place) == pytest.approx(1000, rel=1e-6)


def test_a_picture_is_cut_to_the_patches_that_overlap() -> None:
    """A cell is the part around the centre of its patch: the last columns are in no patch."""
    embed = Patches(16, overlap=6)
    preprocessing = sound_preprocessing(LogMel(8000, 128, 200, 80), 64, 0.0, 1.0)
    axes = find_axes(40, preprocessing, embed.grid_of((128, 64)), 10, 6)
    assert (axes.bottom, axes.bins, axes.left, axes.columns) == (3, 120, 3, 50)
    pixels = draw_input(np.random.default_rng(0).normal(size=(128, 64)), axes)
    assert pixels.shape == (120, 50, 3)
    assert (pixels[:, 37:] == 60).all()  # after the sound
    assert len(np.unique(pixels[:, :37])) > 100
    long = SoundAxes(LogMel(), 0, 2000, 0, 128, 0, 1024)
    assert draw_input(np.zeros((128, 1024)), long).shape == (384, 1024, 3)


def test_flipped_maps_count_rows_from_the_top(place: Path) -> None:
    model = vitrail.load(place / "model.safetensors").eval()
    assert model.preprocessing is not None
    image = model.preprocessing(place / "sounds" / "400.wav")[None]
    trace = trace_image(model, image, at=(0, 1))
    turned = flip_trace(trace)
    assert trace.rollout is not None
    assert trace.colours is not None
    assert trace.between is not None
    assert turned.between is not None
    assert turned.at == (3, 1)
    h, w = trace.grid
    for name in ("attention", "attention_at"):
        np.testing.assert_array_equal(getattr(turned, name), getattr(trace, name)[:, :, ::-1])
    np.testing.assert_array_equal(turned.rollout, trace.rollout[::-1])
    np.testing.assert_array_equal(turned.colours, trace.colours[:, ::-1])
    rows = turned.between.reshape(2, 2, h, w, h, w)
    np.testing.assert_array_equal(rows[:, :, 3, 1], trace.between.reshape(2, 2, h, w, h, w)[:, :, 0, 1, ::-1])


def test_the_command_writes_pages_figures_and_arrays(place: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    paths = [str(place / "sounds" / "400.wav"), str(tmp_path / "broken.wav")]
    command = ["inspect", str(place / "model.safetensors"), *paths, "--out", str(tmp_path / "out")]
    views = ["--view", "attention", "--view", "rollout"]
    assert main([*command, *views, "--at", "0.2,400", "--json"]) == 1  # one is skipped
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert "broken.wav: not a sound, or none of WAV" in err
    assert [Path(image["picture"]).name for image in record["images"]] == ["400.wav"]
    assert "0.20–0.28 s" in record["images"][0]["patch"]["where"]
    arrays = np.load(tmp_path / "out" / "400" / "arrays.npz")
    assert (len(arrays["hertz"]), len(arrays["seconds"])) == (5, 7)
    assert arrays["hertz"][0] > 3500 > 100 > arrays["hertz"][-1]
    page = (tmp_path / "out" / "index.html").read_text()
    assert '"axes":{"hertz"' in page
    assert "8,000 Hz, 32 mel bins" in page
    assert {"attention.png", "attention-at.png", "rollout.png", "relevance.png"} <= set(record["images"][0]["files"])


def test_the_terminal_has_axes(place: Path, capsys) -> None:
    paths = [str(place / "model.safetensors"), str(place / "sounds" / "400.wav")]
    assert main(["inspect", *paths, "--terminal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  Hz ")
    assert any(line.startswith("  1k ") for line in lines)
    assert lines[-3].split()[:2] == ["0", "0.1"]
    assert lines[-2] == "the spectrogram, and attention rollout over all layers: light is high"
    assert main(["inspect", *paths, "--terminal", "attention"]) == 0
    assert "from left to right 0.38 s, 32 mel bins up to 4 kHz" in capsys.readouterr().out


def test_what_is_not_supported_is_refused_in_one_line(place: Path, tmp_path: Path, capsys) -> None:
    model, sound = str(place / "model.safetensors"), str(place / "sounds" / "400.wav")
    out = ["--out", str(tmp_path / "out")]
    cases = [
        ([model, sound, *out, "--at", "9,400"], "--at must be seconds,Hz within 0.00,"),
        ([model, sound, *out, "--at", "far"], "seconds,Hz"),
        ([model, str(tmp_path), *out], "has no sounds: give a file or a folder with"),
        (["--compare", model, model, str(place / "sounds")], "--compare does not support models of sounds"),
    ]
    for command, message in cases:
        with pytest.raises(SystemExit) if message == "seconds,Hz" else nullcontext():
            assert main(["inspect", *command]) == 2
        assert message in capsys.readouterr().err
