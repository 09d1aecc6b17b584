"""Sounds as data: class folders, lists, Parquet, tar shards; checks; batches that do not depend on the workers."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.sounds import HERTZ, encode_sound, tone, write_folder
from vitrail.cli import main
from vitrail.data.audit import check
from vitrail.data.audit.sound import count_clipped
from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import Preprocessing, sound_preprocessing
from vitrail.data.rng import SampleRandom
from vitrail.data.sources import load_dataset
from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.data.transforms.spectrogram import SpecAugment, SpectrogramWarp

pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")
FEATURES = LogMel(8000, 40, 200, 80)
PREPROCESSING = sound_preprocessing(FEATURES, 24, -4.0, 9.0)


def read_whole(source: Path | str, **options: object) -> Images:
    return load_dataset(str(source), fractions=(1.0, 0.0, 0.0), **options)["train"]  # pyright: ignore[reportArgumentType]


def test_class_folders(tmp_path: Path) -> None:
    images = read_whole(write_folder(tmp_path / "sounds", suffix="flac", format="FLAC"))
    assert (images.media, len(images), images.classes) == ("sound", 12, ("high", "low"))
    with images.open_sound(0) as sound:
        assert (len(sound), sound.rate) == (2000, 8000)


def test_lists_and_file_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sounds")
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(folder.rglob("*.wav"))]
    (tmp_path / "list.csv").write_text("\n".join(["audio,label", *rows]))
    listed = read_whole(tmp_path / "list.csv")
    assert (listed.media, len(listed), listed.classes) == ("sound", 12, ("high", "low"))
    for path in sorted(folder.rglob("*.wav")):
        path.rename(tmp_path / f"{path.parent.name}_{path.name}")
    named = read_whole(tmp_path / "*.wav", label_from="^([a-z]+)_")
    assert (named.media, len(named), named.classes) == ("sound", 12, ("high", "low"))


def test_parquet_with_embedded_sounds_and_paths(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    folder = write_folder(tmp_path / "sounds")
    paths = sorted(folder.rglob("*.wav"))
    labels = [path.parent.name for path in paths]
    embedded = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    pyarrow.parquet.write_table(pa.table({"audio": embedded, "label": labels}), tmp_path / "embedded.parquet")
    relative = [str(path.relative_to(tmp_path)) for path in paths]
    pyarrow.parquet.write_table(pa.table({"path": relative, "label": labels}), tmp_path / "paths.parquet")
    for name in ("embedded", "paths"):
        images = read_whole(tmp_path / f"{name}.parquet")
        assert (images.media, len(images), images.classes) == ("sound", 12, ("high", "low"))
        with images.open_sound(3) as sound:
            assert len(sound) == 2240


def test_tar_shards(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number in range(8):
            name = list(HERTZ)[number % 2]
            members = {"ogg": encode_sound(tone(HERTZ[name], seed=number), format="OGG"), "cls": name.encode()}
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    images = read_whole(tmp_path / "train-0.tar")
    assert (images.media, len(images)) == ("sound", 8)
    assert PREPROCESSING.to_row(images.open_sound(5), None).shape == (1, 40, 24)


def test_two_kinds_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    folder = write_folder(tmp_path / "sounds")
    Image.new("L", (8, 8)).save(folder / "low" / "x.png")
    with pytest.raises(ValueError, match=r"has images \(x.png\) and sounds \(0.wav\)"):
        read_whole(folder)


def test_without_the_extra_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    folder = write_folder(tmp_path / "sounds")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert main(["check", str(folder)]) != 0
    error = capsys.readouterr().err.strip()
    assert error == "vitrail check: sounds need soundfile: pip install 'vitrail[audio]'"


def make_loader(images: Images, pipeline: TrainPipeline | Preprocessing, workers: int) -> Loader:
    return Loader(images, None, pipeline, batch_size=4, seed=3, workers=workers)


def test_batches_are_equal_for_every_number_of_workers(tmp_path: Path) -> None:
    images = read_whole(write_folder(tmp_path / "sounds"))
    steps = (SpectrogramWarp(), SpecAugment())
    pipeline = TrainPipeline(steps, (40, 24), 1, sound=FEATURES)
    batches = []
    for workers in (0, 1):
        loader = make_loader(images, pipeline, workers)
        batches.append([batch for epoch in range(2) for batch in loader.iter_epoch(epoch)])
        loader.close()
    for one, other in zip(*batches, strict=True):
        assert (one.pixels.dtype, one.pixels.shape) == (torch.float32, (4, 1, 40, 24))
        torch.testing.assert_close(one.pixels, other.pixels, rtol=0, atol=0)
    once = torch.cat([batch.pixels for batch in make_loader(images, PREPROCESSING, 0).iter_once()])
    with images.open_sound(7) as sound:
        torch.testing.assert_close(once[7], PREPROCESSING.to_pixels(sound), rtol=0, atol=0)


def test_training_takes_random_parts_and_places(tmp_path: Path) -> None:
    """A long sound starts anywhere; a short one lies anywhere between paddings."""
    images, pipeline = read_whole(write_folder(tmp_path / "sounds")), TrainPipeline((), (40, 24), 1, sound=FEATURES)
    longer = TrainPipeline((), (40, 60), 1, sound=FEATURES)
    with images.open_sound(11) as sound:
        total = sound.count_frames(FEATURES)
        whole = sound.spectrogram(FEATURES, 0, total)
        starts, places = set(), set()
        for index in range(60):
            part = pipeline(sound, SampleRandom(0, 1, index))[0]
            starts |= {s for s in range(total - 23) if torch.allclose(part, whole[:, s : s + 24], atol=1e-4)}
            padded = longer(sound, SampleRandom(0, 1, index))[0]
            places.add(int(padded.abs().sum(0).nonzero()[0]))
            assert (padded.abs().sum(0) > 0).sum() == total
    assert {min(starts), max(starts)} == {0, total - 24}
    assert len(places) > 15


def test_spec_augment_masks_stripes() -> None:
    values, step = torch.rand(1, 40, 50), SpecAugment(0.5, 0.5)
    widths = []
    for index in range(50):
        masked = step.apply(values, SampleRandom(0, 0, index)) != values
        rows, columns = masked[0].all(1), masked[0].all(0)
        assert torch.equal(masked[0], rows[:, None] | columns)
        for stripe in (rows, columns):
            assert (stripe[1:] ^ stripe[:-1]).sum() <= 2
        widths.append((int(rows.sum()), int(columns.sum())))
    assert max(w for w, _ in widths) in range(15, 21)
    assert max(w for _, w in widths) in range(19, 26)
    assert torch.equal(SpecAugment(0.0, 0.0).apply(values, SampleRandom(0, 0, 0)), values)


def test_warp_changes_loudness_and_pitch() -> None:
    values = torch.linspace(0, 1, 40)[None, :, None].expand(1, 40, 50).contiguous()
    assert torch.equal(
        SpectrogramWarp(0, 0, 0).apply(values, SampleRandom(0, 0, 0)).round(decimals=5), values.round(decimals=5)
    )
    louder = [SpectrogramWarp(0, 0, 10).apply(values, SampleRandom(0, 0, index)) - values for index in range(40)]
    gains = torch.stack([each.mean() for each in louder])
    assert 2.0 < gains.max() <= 2.303
    assert -2.303 <= gains.min() < -2.0
    moved = SpectrogramWarp(0.5, 4, 0).apply(values, SampleRandom(0, 0, 1)) - values
    assert moved[0, 10:30].std() < 1e-4  # a ramp is shifted everywhere by the same amount
    assert 0 < moved[0, 20, 20].abs() <= 4 / 39


def test_steps_of_images_do_not_apply_to_sounds() -> None:
    with pytest.raises(ValueError, match="Flip does not apply to sounds"):
        TrainPipeline((Flip(),), (40, 24), 1, sound=FEATURES)
    with pytest.raises(ValueError, match="SpecAugment does not apply to images"):
        TrainPipeline((SpecAugment(),), (40, 24), 1)


def test_a_model_of_images_does_not_take_sounds(tmp_path: Path) -> None:
    images = read_whole(write_folder(tmp_path / "sounds"))
    with pytest.raises(ValueError, match="the data has sounds, but the model takes images or videos"):
        make_loader(images, Preprocessing(), 0)


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Return split folders with a sound of every kind of problem."""
    root, plain = tmp_path / "sounds", tone(500, 0.5)
    exact = (tone(900) * 32767).astype(np.int16)
    cut = encode_sound(tone(510, 0.5))
    files = {
        "train/a/plain.wav": encode_sound(plain),
        "train/b/copy.flac": encode_sound(exact, format="FLAC"),
        "train/a/silent.wav": encode_sound(np.zeros(4000, np.float32)),
        "train/a/clipped.wav": encode_sound((4 * tone(300)).clip(-1, 1)),
        "train/b/other.wav": encode_sound(exact),
        "train/b/rate.wav": encode_sound(tone(700, rate=16000), 16000),
        "train/b/cut.wav": cut[: len(cut) // 2],
        "train/b/empty.wav": b"",
        "train/b/none.wav": encode_sound(np.zeros(0, np.float32)),
        "train/b/short.wav": encode_sound(tone(500, 0.01)),
        "train/b/broken.mp3": b"no sound at all" * 100,
        "validation/a/leak.wav": encode_sound(plain),
        "validation/b/nan.wav": encode_sound(np.full(800, np.nan, np.float32), subtype="FLOAT"),
        "validation/b/fine.ogg": encode_sound(tone(800), format="OGG"),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_every_problem_is_found(spoilt: Path) -> None:
    audit = check(spoilt, cache=False, workers=0)
    found = {kind: sorted(Path(f.path).name for f in audit.select_findings([kind])) for kind in audit.counts}
    assert found == {
        "leak": ["plain.wav"],
        "duplicate": ["other.wav"],
        "zero-byte": ["empty.wav"],
        "unreadable": ["broken.mp3", "nan.wav", "none.wav"],
        "short-sound": ["short.wav"],
        "sound-cut": ["cut.wav"],
        "silent": ["silent.wav"],
        "clipped": ["clipped.wav"],
        "sample-rate": ["rate.wav"],
    }
    assert audit.sounds["train"].rates == (8000, 8000, 16000)
    assert sorted(map(len, audit.clean_dataset().splits.values())) == [2, 7]


def test_the_command_prints_sounds(spoilt: Path, capsys) -> None:
    assert main(["check", str(spoilt), "--no-cache", "--workers", "0"]) == 1
    text = capsys.readouterr().out
    assert "14 sounds, 2 classes" in text
    assert "8000 · 8000 · 16000" in text
    assert "identical sounds in two splits" in text
    assert main(["check", str(spoilt), "--no-cache", "--workers", "0", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)["splits"]["validation"]["sounds"]
    assert summary["channels"] == [1, 1, 1]


def test_results_are_cached(spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = check(spoilt, workers=0)
    monkeypatch.setattr("vitrail.data.audit.sound.inspect_samples", None)
    assert check(spoilt, workers=0).findings == first.findings


def test_clipped_samples_are_counted_across_blocks() -> None:
    wave = np.zeros(100, np.float32)
    wave[10:15], wave[30:32], wave[58:63] = 1, 1, -1
    assert count_clipped(wave, 0) == (10, 0)
    for cut in (12, 60, 59, 62):
        first, run = count_clipped(wave[:cut], 0)
        second, last = count_clipped(wave[cut:], run)
        assert (first + second, last) == (10, 0)
