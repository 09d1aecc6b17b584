"""Sounds in training, evaluation, prediction, search and export, through the command line."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.data.sounds import HERTZ, encode_sound, tone, write_folder
from vitrail.cli import main
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sound import ArraySound
from vitrail.data.sources import load_dataset
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.tasks.base import open_thumbnail
from vitrail.training.recipe import read_recipe

pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")
SMALL: dict[str, Any] = {"width": 32, "depth": 1, "steps": 12, "batch_size": 8, "workers": 0, "size": (32, 32)}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "sounds", 10)


@pytest.fixture(scope="module")
def run(sounds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(sounds, out=tmp_path_factory.mktemp("runs") / "run", **SMALL)[0]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_sounds_choose_their_recipe(run: Path) -> None:
    recipe = read_recipe(run / "recipe.json")
    assert (recipe.name, recipe.model.channels, recipe.preprocessing.size) == ("sound", 1, (32, 32))
    assert recipe.preprocessing.sound == LogMel(8000, 32, 200, 80, "centre")
    model = vitrail.load(run)
    assert isinstance(model.preprocessing, Preprocessing)
    assert model.preprocessing == recipe.preprocessing
    assert (run / "report.html").is_file()


def test_the_thumbnail_of_a_sound_is_its_spectrogram(sounds: Path) -> None:
    """Low frequencies are at the bottom: the brightest row of a tone is that of its frequency."""
    images = load_dataset(str(sounds), fractions=(1.0, 0.0, 0.0))["train"]
    brightest = {}
    for index in (0, 19):  # high, low
        thumbnail = open_thumbnail(images, index)
        assert thumbnail.mode == "RGB"
        brightest[images.classes[images.targets[index]]] = np.asarray(thumbnail)[..., 0].mean(1).argmax()
    assert brightest["high"] < brightest["low"]


def test_a_resumed_run_is_the_same_bit_for_bit(sounds: Path, run: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: object) -> None:
        if isinstance(record, dict) and record.get("step") == 7:
            raise Stop

    machine = vitrail.training.recipe.Machine(save_seconds=0)
    with pytest.raises(Stop):
        vitrail.train(sounds, out=tmp_path / "run", machine=machine, listeners=(stop,), **SMALL)
    vitrail.resume(tmp_path / "run", workers=0)
    first, second = (vitrail.load(where).state_dict() for where in (run, tmp_path / "run"))
    assert all((first[name] == second[name]).all() for name in first)


def test_evaluate(run: Path, sounds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation gives what the run recorded at its end."""
    assert main(["evaluate", str(run), str(sounds), "--split", "validation", "--workers", "0", "--json"]) == 0
    found, recorded = json.loads(capsys.readouterr().out), np.load(run / "evaluation" / "validation.npz")
    assert found["images"] == len(recorded["targets"])
    assert found["top1"] == pytest.approx((recorded["logits"].argmax(1) == recorded["targets"]).mean())


def test_predict_writes_a_row_for_each_file(run: Path, sounds: Path, tmp_path: Path) -> None:
    """Unreadable files have an error in their row; other files of the folder are left out."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.wav").write_bytes(encode_sound(tone(HERTZ["low"])))
    (folder / "stereo.flac").write_bytes(encode_sound(np.stack([tone(HERTZ["high"])] * 2, 1), 16000, "FLAC"))
    (folder / "broken.mp3").write_bytes(b"nothing")
    (folder / "short.wav").write_bytes(encode_sound(tone(400, 0.01)))
    Image.new("L", (8, 8)).save(folder / "cover.png")
    assert main(["predict", str(run), str(folder), "--out", str(tmp_path / "rows.csv")]) in (0, 1)
    rows = {Path(row["path"]).name: row for row in read_rows(tmp_path / "rows.csv")}
    assert sorted(rows) == ["broken.mp3", "good.wav", "short.wav", "stereo.flac"]
    assert rows["good.wav"]["label"] in HERTZ
    assert rows["broken.mp3"]["error"] == "not a sound, or none of WAV, FLAC, OGG, MP3, AIFF"
    assert rows["short.wav"]["error"] == "10 ms are shorter than a frame of 25 ms"
    assert not rows["stereo.flac"]["error"]


def test_predict_takes_lists_waveforms_and_opened_sounds(run: Path, sounds: Path, tmp_path: Path) -> None:
    paths = sorted(sounds.rglob("*.wav"))[:4]
    (tmp_path / "list.csv").write_text("\n".join(["path", *map(str, paths)]))
    model = vitrail.load(run)
    by_path = [dict(row.predictions) for row in vitrail.predict(model, [str(path) for path in paths])]
    listed = [dict(row.predictions) for row in vitrail.predict(model, str(tmp_path / "list.csv"))]
    waves = [ArraySound(tone(HERTZ["high"] * (1 + n / 50), 0.25 + n / 100, seed=n), 8000) for n in range(4)]
    arrays = [sound.read(0, len(sound)) for sound in waves]
    opened, given = ([dict(row.predictions) for row in vitrail.predict(model, values)] for values in (waves, arrays))
    for one, *others in zip(by_path, listed, opened, given, strict=True):
        for other in others:
            assert other == pytest.approx(one, abs=2e-3)


def test_search_finds_the_nearest_sound(
    run: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, query = tmp_path / "index", sounds / "low" / "3.wav"
    assert main(["search", "index", str(run), str(sounds), "--out", str(index)]) == 0
    page = tmp_path / "found.html"
    assert main(["search", "find", str(index), str(query), "--top", "2", "--out", str(page)]) == 0
    assert "of 20 sounds" in capsys.readouterr().out
    assert page.read_text().count("data:image/") >= 2
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    assert main(["search", "find", str(index), str(tmp_path / "x.png")]) != 0
    assert "takes sounds, and" in capsys.readouterr().err


def test_an_onnx_file_computes_what_the_model_does(run: Path, sounds: Path, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    file = tmp_path / "model.onnx"
    assert main(["export", str(run), str(file)]) == 0
    deployed = open_deployed_model(file)
    assert (deployed.contract.media, deployed.contract.preprocessing) == ("sound", vitrail.load(run).preprocessing)
    first, second = (vitrail.predict(where, str(sounds / "low")) for where in (str(run), str(file)))
    for one, other in zip(first, second, strict=True):
        assert dict(one.predictions) == pytest.approx(dict(other.predictions), abs=1e-4)


def test_sounds_and_images_are_not_confused(
    run: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    model = vitrail.build(patch=8, width=16, depth=1, heads=2, image_size=16, classes=2)
    vitrail.save(model, tmp_path / "m.safetensors", labels=("a", "b"), preprocessing=Preprocessing((16, 16), (16, 16)))
    cases = [
        (["predict", str(run), str(tmp_path / "x.png"), "--out", str(tmp_path / "p.csv")], "takes sounds, and"),
        (
            ["predict", str(tmp_path / "m.safetensors"), str(sounds), "--out", str(tmp_path / "p.csv")],
            "is a sound: give images",
        ),
        (["evaluate", str(tmp_path / "m.safetensors"), str(sounds)], "the data has sounds"),
        (["train", str(sounds), "--recipe", "scratch-small", "--out", str(tmp_path / "r")], "use --recipe sound"),
        (["export", str(run), str(tmp_path / "m.onnx"), "--uint8"], "--uint8 is for pixels"),
    ]
    for command, message in cases:
        assert main(command) != 0
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error
