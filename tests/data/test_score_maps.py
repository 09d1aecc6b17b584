"""Score map files are append-only, survive a kill, and reject other files."""

import os

import numpy as np
import pytest

from vitrail.data.cache import HEADER_BYTES, MapShape, ScoreMapFile, compute_image_key
from vitrail.data.dataset import Images
from vitrail.data.sources.arrays import ArrayStore

SHAPE = MapShape((2, 3), 2, 5)


def make_images(count: int, seed: int = 0) -> Images:
    array = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return Images(ArrayStore(array, ((0, "array"),)), np.arange(count), np.zeros(count, dtype=np.int64), ("a",))


def add(file: ScoreMapFile, some: Images, first: int, last: int) -> None:
    keys = [compute_image_key(some, index) for index in range(first, last)]
    classes = np.stack([np.full((2, 3, 2), index % 5) for index in range(first, last)])
    scores = np.stack([np.full((2, 3, 2), index / 16) for index in range(first, last)])
    file.append(keys, size=[(4, 10 + index) for index in range(first, last)], classes=classes, scores=scores)


def test_maps_are_found_in_any_order(tmp_path) -> None:
    file, some = ScoreMapFile(tmp_path / "a.maps", SHAPE), make_images(6)
    add(file, some, 3, 6)
    add(file, some, 0, 3)
    maps = ScoreMapFile(tmp_path / "a.maps", SHAPE).load_maps(some.select([5, 0, 4]))
    indices = np.arange(3)
    np.testing.assert_array_equal(maps.image_sizes(indices), [(4, 15), (4, 10), (4, 14)])
    _, classes, scores = SHAPE.split_columns(maps.target_columns(indices, np.zeros((3, 2, 3))))
    assert classes[:, 1, 2, 0].tolist() == [0, 0, 4]
    assert scores[:, 0, 0, 1].tolist() == [5 / 16, 0, 4 / 16]


def test_only_new_images_are_missing(tmp_path) -> None:
    file, some = ScoreMapFile(tmp_path / "a.maps", SHAPE), make_images(6)
    assert file.find_missing(some).tolist() == [0, 1, 2, 3, 4, 5]
    add(file, some, 0, 4)
    assert file.find_missing(some).tolist() == [4, 5]
    with pytest.raises(OSError, match=r"a\.maps has no map of 2 images, first array\[4\]"):
        file.load_maps(some)


@pytest.mark.parametrize("left", [HEADER_BYTES // 2, HEADER_BYTES + 30, -7])
def test_a_kill_while_writing_loses_no_whole_record(tmp_path, left: int) -> None:
    file, some = ScoreMapFile(tmp_path / "a.maps", SHAPE), make_images(4)
    add(file, some, 0, 3)
    os.truncate(file.path, left if left > 0 else file.path.stat().st_size + left)
    again = ScoreMapFile(file.path, SHAPE)
    survived = max(0, left + 3 * SHAPE.record_dtype.itemsize) // SHAPE.record_dtype.itemsize if left < 0 else 0
    assert again.find_missing(some).tolist() == list(range(survived, 4))
    add(again, some, survived, 4)
    maps = again.load_maps(some)
    np.testing.assert_array_equal(maps.image_sizes(np.arange(4))[:, 1], [10, 11, 12, 13])


def test_a_file_of_other_maps_is_refused(tmp_path) -> None:
    file, some = ScoreMapFile(tmp_path / "a.maps", SHAPE), make_images(2)
    add(file, some, 0, 2)
    with pytest.raises(
        ValueError, match=r"maps of 2×3 cells with the top 2 of 5 classes, expected maps of 2×3 .* of 6 classes"
    ):
        ScoreMapFile(file.path, MapShape((2, 3), 2, 6))
    (tmp_path / "b.maps").write_bytes(b"x" * 2 * HEADER_BYTES)
    with pytest.raises(ValueError, match="data other than score maps"):
        ScoreMapFile(tmp_path / "b.maps", SHAPE)


def test_a_damaged_file_is_named(tmp_path) -> None:
    file, some = ScoreMapFile(tmp_path / "a.maps", SHAPE), make_images(2)
    add(file, some, 0, 2)
    content = bytearray(file.path.read_bytes())
    content[HEADER_BYTES + 40] ^= 1  # a class or a score of the first, which may still be one
    file.path.write_bytes(content)
    broken = ScoreMapFile(file.path, SHAPE)
    assert broken.load_maps(some.select([1])).target_columns(np.arange(1), np.zeros((1, 2, 3))).isfinite().all()
    with pytest.raises(ValueError, match=r"a\.maps is damaged: delete it"):
        broken.load_maps(some.select([0])).target_columns(np.arange(1), np.zeros((1, 2, 3)))


def test_renamed_and_changed_images_have_new_keys(tmp_path) -> None:
    from PIL import Image

    from vitrail.data.sources.files import FileStore

    def keys() -> list[bytes]:
        paths = sorted(str(path) for path in tmp_path.glob("*.png"))
        store = FileStore.from_paths(paths)
        some = Images(store, np.arange(len(paths)), np.zeros(len(paths), dtype=np.int64), ("a",))
        return [compute_image_key(some, index) for index in range(len(paths))]

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    before = keys()
    assert keys() == before
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    assert keys() != before


def test_folders_with_the_same_name_have_different_keys(tmp_path, monkeypatch) -> None:
    from vitrail.data.sources.files import FileStore

    found = {}
    for folder in ("one", "other"):
        (tmp_path / folder / "data").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        (tmp_path / folder / "data" / "a.png").write_bytes(folder[:3].encode())
        os.utime("data/a.png", (0, 0))
        for typed in ("data/a.png", str(tmp_path / folder / "data" / "a.png")):
            some = Images(FileStore.from_paths([typed]), np.arange(1), np.zeros(1, dtype=np.int64), ("a",))
            found[folder, typed[:1]] = compute_image_key(some, 0)
    assert found["one", "d"] == found["one", "/"]  # one folder, however it is typed
    assert found["one", "d"] != found["other", "d"]


@pytest.mark.parametrize(("grid", "top"), [((0, 3), 1), ((2, 3), 0), ((2, 3), 6)])
def test_invalid_map_shapes_raise(grid: tuple[int, int], top: int) -> None:
    with pytest.raises(ValueError, match=r"got 0×3|classes kept per cell must be 1 to 5"):
        MapShape(grid, top, 5)
