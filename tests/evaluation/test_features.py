"""Features of a frozen model, their cache, and the probes."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.training.test_train import COLOURS, picture
from vitrail.cli import evaluate as options
from vitrail.cli import main
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import splits as parts
from vitrail.data.sources.arrays import ArrayStore
from vitrail.evaluation.probes import PROBES, ProbeSettings, probe
from vitrail.training import features as module
from vitrail.training.features import VectorCache, extract_features, hash_model
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import prepare_data

PIPELINE = Preprocessing((16, 16), (16, 16))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(12):
            picture(tmp_path / "photos" / "train" / name / f"{number}.png", colour, 100 * number + len(name))
        for number in range(4):
            picture(tmp_path / "photos" / "val" / name / f"{number}.png", colour, 7000 + 100 * number + len(name))
    return tmp_path / "photos"


def tiny(**slots: object) -> vitrail.Model:
    torch.manual_seed(0)
    return vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=None, image_size=16, **slots).eval()


def saved(tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=5, image_size=16)
    model.preprocessing = PIPELINE
    vitrail.save(model, tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def counted(model: vitrail.Model) -> list[int]:
    """Return a list that receives the size of every batch."""
    seen: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    return seen


def test_features_are_the_vector_before_the_head(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).splits["validation"]
    model = tiny()
    found = extract_features(model, PIPELINE, split, cache=False, workers=0)
    assert found.values.shape == (12, 16)
    for index in (0, 5, 11):
        with split.open(index) as image, torch.inference_mode():
            expected = model.pool(model.encode(model.tokens(PIPELINE(image)[None])))[0]
        np.testing.assert_allclose(found.values[index], expected.numpy(), atol=1e-5)
    assert np.array_equal(found.targets, split.targets)


def test_distilled_features_concatenate_both_tokens(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).splits["validation"]
    model = tiny(prefix="class+distillation")
    found = extract_features(model, PIPELINE, split, cache=False, workers=0)
    with split.open(0) as image, torch.inference_mode():
        both = model(PIPELINE(image)[None])[0]  # [2, D]
    np.testing.assert_allclose(found.values[0], torch.cat((both[0], both[1])).numpy(), atol=1e-5)


def test_features_are_computed_once(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).train
    model = tiny()
    seen = counted(model)
    first = extract_features(model, PIPELINE, split, workers=0)
    again = extract_features(model, PIPELINE, split, workers=0)
    assert sum(seen) == 36
    assert (first.cached, again.cached) == (False, True)
    assert np.array_equal(first.values, again.values)
    extract_features(model, PIPELINE, split, workers=0, cache=False)
    assert sum(seen) == 72


def test_cache_depends_on_model_preprocessing_and_images(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).train
    model = tiny()
    assert not extract_features(model, PIPELINE, split, workers=0).cached
    other = tiny()
    with torch.no_grad():
        other.blocks[1].mlp.fc2.bias[3] += 1e-3
    assert not extract_features(other, PIPELINE, split, workers=0).cached
    assert not extract_features(model, Preprocessing((16, 16), (18, 18)), split, workers=0).cached
    assert extract_features(tiny(), PIPELINE, split, workers=0).cached
    changed = Path(split.name(0))
    picture(changed, (1, 2, 3), 5)
    os.utime(changed, ns=(1, 1))
    assert not extract_features(model, PIPELINE, split, workers=0).cached


def test_model_content_covers_weights_config_and_preprocessing() -> None:
    model = tiny()
    same = hash_model(model, PIPELINE)
    assert same == hash_model(tiny(), PIPELINE)
    assert same != hash_model(model, Preprocessing((16, 16), (20, 20)))
    assert same != hash_model(tiny(eps=1e-5), PIPELINE)
    with torch.no_grad():
        model.prefix.outputs[0, 0, 0] = 0.5
    assert same != hash_model(model, PIPELINE)


def test_only_new_and_changed_images_are_computed(folder: Path) -> None:
    model = tiny()
    seen = counted(model)
    first = extract_features(model, PIPELINE, prepare_data(Data(str(folder))).train, workers=0)
    picture(folder / "train" / "red" / "more.png", COLOURS["red"], 99)
    changed = folder / "train" / "blue" / "3.png"
    picture(changed, (1, 2, 3), 5)
    os.utime(changed, ns=(1, 1))
    (folder / "train" / "green" / "0.png").unlink()
    split = prepare_data(Data(str(folder))).train
    again = extract_features(model, PIPELINE, split, workers=0)
    assert sum(seen) == 36 + 2
    assert (len(again.values), again.cached) == (36, False)
    fresh = extract_features(tiny(), PIPELINE, split, workers=0, cache=False)
    np.testing.assert_allclose(again.values, fresh.values, atol=1e-5)
    assert len({row.tobytes() for row in again.values} & {row.tobytes() for row in first.values}) == 34
    few = extract_features(model, PIPELINE, split.select([30, 2, 17]), workers=0)  # another split of the same pictures
    assert few.cached
    assert np.array_equal(few.values, again.values[[30, 2, 17]])


def test_interrupted_computation_keeps_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_SIZE", 10)
    split, model = prepare_data(Data(str(folder))).train, tiny()
    seen = counted(model)

    def stop(what: str, done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_features(model, PIPELINE, split, workers=0, progress=stop)
    assert extract_features(model, PIPELINE, split, workers=0).values.shape == (36, 16)
    assert sum(seen) == 36


@pytest.mark.parametrize("damage", ["flipped", "width", "text", "other"])
def test_damaged_cache_is_recomputed_with_a_note(folder: Path, tmp_path: Path, damage: str) -> None:
    split = prepare_data(Data(str(folder))).train
    first = extract_features(tiny(), PIPELINE, split, workers=0)
    [file] = (tmp_path / "cache" / "vitrail" / "features").iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-10] ^= 1
    elif damage == "width":
        content[content.index(b'"width": 16') + 10] ^= 1
    elif damage == "text":
        content = bytearray(b"nothing")
    file.write_bytes(content)
    if damage == "other":
        file.unlink()
        assert VectorCache(file.with_name("other.float32")).add([b"k" * 16], np.zeros((1, 16), dtype=np.float32)) == ""
        file.with_name("other.float32").rename(file)
    again = extract_features(tiny(), PIPELINE, split, workers=0)
    assert not again.cached
    assert "damaged" in again.notes[0]
    assert "train split are computed again" in again.notes[0]
    np.testing.assert_allclose(first.values, again.values, atol=1e-5)
    whole = extract_features(tiny(), PIPELINE, split, workers=0)
    assert whole.cached
    assert not whole.notes


def test_empty_cache_file_is_kept(folder: Path, tmp_path: Path) -> None:
    split = prepare_data(Data(str(folder))).train
    extract_features(tiny(), PIPELINE, split, workers=0)
    [file] = (tmp_path / "cache" / "vitrail" / "features").iterdir()
    os.truncate(file, 0)
    number = file.stat().st_ino
    assert not extract_features(tiny(), PIPELINE, split, workers=0).notes
    assert file.stat().st_ino == number
    assert extract_features(tiny(), PIPELINE, split, workers=0).cached


def test_truncated_cache_keeps_complete_records(folder: Path, tmp_path: Path) -> None:
    split, model = prepare_data(Data(str(folder))).train, tiny()
    first = extract_features(model, PIPELINE, split, workers=0)
    [file] = (tmp_path / "cache" / "vitrail" / "features").iterdir()
    os.truncate(file, file.stat().st_size - 3 * (16 + 8 + 16 * 4) - 5)
    seen = counted(model)
    again = extract_features(model, PIPELINE, split, workers=0)
    assert sum(seen) == 4  # three records, and one of which a part was there
    np.testing.assert_allclose(first.values, again.values, atol=1e-5)
    assert extract_features(model, PIPELINE, split, workers=0).cached


def test_every_changed_byte_of_a_cache_is_detected(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    keys: list[bytes | None] = [bytes([number]) * 16 for number in range(3)]
    place = tmp_path / "key.float32"
    assert VectorCache(place).add(keys, values) == ""
    content = place.read_bytes()
    whole, read, output = VectorCache(place).read(keys)
    assert (read.all(), output) == (True, "")
    np.testing.assert_array_equal(whole, values)
    damaged = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content))]
    damaged += [content[:length] for length in range(len(content))]
    for strange in (np.save, np.savez):
        with (tmp_path / "strange").open("wb") as file:
            strange(file, values)
        damaged.append((tmp_path / "strange").read_bytes())
    for wrong in damaged:
        place.write_bytes(wrong)
        found, read, output = VectorCache(place).read(keys)
        assert not read.all()
        assert all(np.array_equal(found[row], values[row]) for row in np.flatnonzero(read))
        assert output == "" or "is damaged" in output
    place.with_name("other.float32").write_bytes(content)
    assert not VectorCache(place.with_name("other.float32")).read(keys)[1].any()  # of another model


def test_probes_use_all_training_images_with_a_test_split(folder: Path, tmp_path: Path) -> None:
    (folder / "val").rename(folder / "test")
    found = probe(saved(tmp_path), Data(str(folder)), ["knn"], workers=0)
    assert (found.split, found.train, found.images) == ("test", 36, 12)
    divided = probe(saved(tmp_path), Data(str(folder / "train")), ["knn"], workers=0)
    assert divided.split == "validation"
    assert divided.train + divided.images == 36


def test_one_image_per_class_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, colour in COLOURS.items():
        picture(tmp_path / "few" / name / "0.png", colour, len(name))
    monkeypatch.setattr(
        parts, "DEFAULT_FRACTIONS", (0.999999, 0.000001, 0.0)
    )  # a picture's content decides its side: all to train
    assert main(["evaluate", saved(tmp_path), str(tmp_path / "few"), "--probe", "knn", "--workers", "0"]) == 2
    output = capsys.readouterr().err
    assert "has no test images: add a test folder" in output
    assert "--split" not in output


def test_unwritable_cache_is_noted(folder: Path, tmp_path: Path) -> None:
    split = prepare_data(Data(str(folder)), cache=False).train
    (tmp_path / "cache" / "vitrail").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "vitrail" / "features").write_text("a file where a directory should be")
    found = extract_features(tiny(), PIPELINE, split, workers=0)
    assert found.values.shape == (36, 16)
    assert "not cached" in found.notes[0]


def test_cache_works_without_file_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refused(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    split = prepare_data(Data(str(folder)), cache=False).train
    assert not extract_features(tiny(), PIPELINE, split, workers=0).notes
    assert extract_features(tiny(), PIPELINE, split, workers=0).cached


def test_unreadable_image_is_listed_and_not_cached(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).train
    bad = Path(split.name(7))
    bad.write_bytes(b"gone")
    found = extract_features(tiny(), PIPELINE, split, workers=0)
    assert len(found.values) == len(found.targets) == 35
    assert list(found.unreadable) == [str(bad)]
    assert np.array_equal(found.targets, np.delete(split.targets, 7))
    assert not extract_features(tiny(), PIPELINE, split, workers=0).cached


def test_many_unreadable_images_are_skipped_again(folder: Path) -> None:
    split = prepare_data(Data(str(folder))).train
    for index in range(0, 36, 6):
        Path(split.name(index)).write_bytes(b"gone")
    for _ in range(2):  # the second time they are all that is not known yet
        found = extract_features(tiny(), PIPELINE, split, workers=0)
        assert (len(found.values), len(found.unreadable)) == (30, 6)


def test_cache_key_includes_the_image_shape() -> None:
    content = np.random.default_rng(0).integers(0, 256, (3, 32 * 8), dtype=np.uint8)
    for shape in ((32, 8), (8, 32)):
        store = ArrayStore(content.reshape(3, *shape), ((0, "pixels"),))
        split = Images(store, np.arange(3), np.zeros(3, dtype=np.int64), ("one",))
        found = extract_features(tiny(), PIPELINE, split, workers=0)
        expected = extract_features(tiny(), PIPELINE, split, workers=0, cache=False)
        np.testing.assert_allclose(found.values, expected.values, atol=1e-5)


def test_every_probe_separates_colours(folder: Path, tmp_path: Path) -> None:
    settings = ProbeSettings(neighbours=5, shots=(1, 5), draws=3)
    found = probe(saved(tmp_path), Data(str(folder)), tuple(PROBES), settings, workers=0)
    assert [row.probe for row in found.results] == ["knn", "linear", "few-shot", "few-shot"]
    assert (found.train, found.images, found.split, found.width) == (36, 12, "validation", 16)
    for row in (found.results[0], found.results[1], found.results[3]):
        assert row.score > 0.8
        assert row.interval is not None
        assert row.interval[0] <= row.score <= row.interval[1]
    assert found.results[1].parameters == 3 * 17
    assert probe(saved(tmp_path), Data(str(folder)), ["knn"], settings, workers=0).cached


def test_unreadable_file_is_listed_in_the_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train" / "red" / "text.png").write_text("not a picture")
    arguments = ["evaluate", saved(tmp_path), str(folder), "--workers", "0", "--probe", "knn,few-shot"]
    arguments += ["--shots", "1,3", "--draws", "2"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "3 classes, 36 training images, evaluated on 12 validation images" in output
    assert "1 file left out" in output
    assert "text.png" in output
    assert "over 2 draws" in output
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["probes"]) == {"knn", "few-shot"}
    assert set(report["probes"]["few-shot"]) == {"1", "3"}
    assert report["probes"]["knn"]["top1"] > 0.5
    assert len(report["probes"]["knn"]["interval"]) == 2
    assert report["features"]["cached"]
    assert [Path(name).name for name in report["unreadable"]] == ["text.png"]


def test_more_shots_than_images_have_no_interval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", saved(tmp_path), str(folder), "--workers", "0", "--probe", "few-shot"]
    assert main([*arguments, "--shots", "5,25"]) == 0
    five, many = capsys.readouterr().out.splitlines()[-2:]
    assert "over 5 draws" in five
    assert "25 per class, all samples of 3 smaller classes" in many
    assert "none: every sample is drawn" in many
    assert main([*arguments, "--shots", "25", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["probes"]["few-shot"]["25"]["interval"] is None
    assert report["top1"] == report["probes"]["few-shot"]["25"]["top1"]  # a single row is at the top too


def test_multilabel_probes_use_map(folder: Path, tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for split, part in (("train", "train"), ("val", "validation")):
        for path in sorted((folder / split).glob("*/*.png")):
            label = path.parent.name + ("|warm" if path.parent.name == "red" else "")
            lines.append(f"{path},{label},{part}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    data = Data(str(tmp_path / "list.csv"), task="multi")
    found = probe(saved(tmp_path), data, ["knn", "linear"], workers=0)
    assert found.measure == "map"
    assert all(row.score > 0.8 for row in found.results)
    with pytest.raises(ValueError, match="few-shot does not support multi-label data"):
        probe(saved(tmp_path), data, ["few-shot"], workers=0)


def test_command_line_lists_the_probes() -> None:
    assert tuple(PROBES) == options.PROBES
    with pytest.raises(ValueError, match="'nearest'"):
        probe("none", Data("nowhere"), ["nearest"])
