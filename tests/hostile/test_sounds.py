"""Hostile and broken sounds through the command line: no crash, no hang, each is named, and none is lost."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.sounds import encode_sound, mutate_sounds, save_model, tone
from vitrail.cli import main

pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")

MUTATED, HOUR = 500, 2 * 8000 * 3600  # files; bytes of samples


def lie_about_size(data: bytes, count: int) -> bytes:
    """Return a WAV file whose header lists this many bytes of samples."""
    return data[:40] + count.to_bytes(4, "little") + data[44:]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two class folders with sounds of all kinds and 500 mutated ones; names of unreadable ones begin with "bad"."""
    root, wave = tmp_path_factory.mktemp("hostile") / "sounds", tone(400, 0.4)
    files = {
        "stereo.wav": encode_sound(np.stack([wave, tone(900, 0.4)], 1)),
        "8-bit.wav": encode_sound(wave, subtype="PCM_U8"),
        "24-bit.wav": encode_sound(wave, subtype="PCM_24"),
        "44-kHz.flac": encode_sound(tone(400, 0.4, 44_100), 44_100, "FLAC"),
        "lies-more.wav": lie_about_size(encode_sound(tone(500, 0.4)), 10**6),
        "lies-less.wav": lie_about_size(encode_sound(tone(600, 0.4)), 1600),
        "bad-lies-none.wav": lie_about_size(encode_sound(tone(700, 0.4)), 0),
        "bad-empty.wav": b"",
        "bad-words.mp3": b"no sound at all" * 100,
        "bad-webm.wav": b"\x1a\x45\xdf\xa3" + bytes(100),
        "bad-telephone.wav": b"\0\0\0\x1cftypM4A " + bytes(100),
        "bad-short.wav": encode_sound(tone(400, 0.01)),
    }
    files |= {f"mutated-{number}.wav": data for number, data in enumerate(mutate_sounds(MUTATED))}
    for label in ("high", "low"):
        (root / label).mkdir(parents=True)
    for name, data in files.items():
        (root / "low" / name).write_bytes(data)
    for number in range(12):
        (root / "high" / f"{number}.wav").write_bytes(encode_sound(tone(1500 + 20 * number, 0.3, seed=number)))
    with (root / "high" / "hour.wav").open("wb") as file:
        file.write(lie_about_size(encode_sound(np.zeros(800, np.float32)), HOUR))
        file.truncate(44 + HOUR)
    return root


def list_names(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*.*")}


def test_predict_has_a_row_with_the_reason_for_each(
    sounds: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, out = save_model(tmp_path / "model.safetensors"), tmp_path / "rows.csv"
    assert main(["predict", str(model), str(sounds), "--out", str(out)]) == 0
    assert "mpg123" not in capfd.readouterr().err  # the decoder of MP3 prints what it finds
    rows = {Path(row["path"]).name: row for row in csv.DictReader(out.open())}
    assert set(rows) == list_names(sounds)
    for name, row in rows.items():
        assert bool(row["label"]) != bool(row["error"])
        assert "\n" not in row["error"]
        if not name.startswith("mutated"):
            assert bool(row["error"]) == name.startswith("bad"), (name, row)
    assert rows["bad-webm.wav"]["error"] == "WebM is not read: convert it to WAV, FLAC or OGG, for example with ffmpeg"
    assert rows["bad-telephone.wav"]["error"].startswith("M4A or MP4 is not read")
    assert rows["bad-lies-none.wav"]["error"] == "has no samples"
    assert 100 < sum(bool(row["label"]) for name, row in rows.items() if name.startswith("mutated")) < MUTATED


def test_check_names_each_and_training_leaves_it_out(
    sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["check", str(sounds), "--workers", "0", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    unusable = {"unreadable", "zero-byte", "short-sound"}
    named = {Path(each["path"]).name for each in problems if each["kind"] in unusable}
    assert {name for name in named if not name.startswith("mutated")} == {
        name for name in list_names(sounds) if name.startswith("bad")
    }
    kinds = {Path(each["path"]).name: each["kind"] for each in problems}
    assert (kinds["hour.wav"], kinds["lies-more.wav"], kinds["44-kHz.flac"]) == ("silent", "sound-cut", "sample-rate")
    options = ["--size", "32x48", "--steps", "2", "--batch-size", "8", "--workers", "0"]
    assert main(["train", str(sounds), "--out", str(tmp_path / "run"), *options]) == 0
    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"]
    assert {Path(each["path"]).name for each in skipped} == named
