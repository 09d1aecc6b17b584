"""The file of score maps: it grows, survives a kill, and refuses what is not its own."""

import os

import numpy as np
import pytest

from vitrail.data.maps import MapFile, MapShape
from vitrail.data.pictures import Pictures
from vitrail.data.records import HEADER, key_of
from vitrail.data.sources.pixels import Pixels

SHAPE = MapShape((2, 3), 2, 5)


def pictures(count: int, seed: int = 0) -> Pictures:
    array = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return Pictures(Pixels(array, ((0, "array"),)), np.arange(count), np.zeros(count, dtype=np.int64), ("a",))


def add(file: MapFile, some: Pictures, first: int, last: int) -> None:
    keys = [key_of(some, index) for index in range(first, last)]
    classes = np.stack([np.full((2, 3, 2), index % 5) for index in range(first, last)])
    scores = np.stack([np.full((2, 3, 2), index / 16) for index in range(first, last)])
    file.add(keys, size=[(4, 10 + index) for index in range(first, last)], classes=classes, scores=scores)


def test_maps_come_back_for_their_pictures_in_any_order(tmp_path) -> None:
    file, some = MapFile(tmp_path / "a.maps", SHAPE), pictures(6)
    add(file, some, 3, 6)
    add(file, some, 0, 3)
    maps = MapFile(tmp_path / "a.maps", SHAPE).maps(some.only([5, 0, 4]))
    indices = np.arange(3)
    np.testing.assert_array_equal(maps.sizes(indices), [(4, 15), (4, 10), (4, 14)])
    _, classes, scores = SHAPE.apart(maps.columns(indices, np.zeros((3, 2, 3))))
    assert classes[:, 1, 2, 0].tolist() == [0, 0, 4]
    assert scores[:, 0, 0, 1].tolist() == [5 / 16, 0, 4 / 16]


def test_only_new_pictures_are_lacking(tmp_path) -> None:
    file, some = MapFile(tmp_path / "a.maps", SHAPE), pictures(6)
    assert file.lacking(some).tolist() == [0, 1, 2, 3, 4, 5]
    add(file, some, 0, 4)
    assert file.lacking(some).tolist() == [4, 5]
    with pytest.raises(OSError, match=r"a\.maps has no map of 2 pictures, array\[4\] first"):
        file.maps(some)


@pytest.mark.parametrize("left", [HEADER // 2, HEADER + 30, -7])
def test_a_kill_in_the_middle_of_writing_loses_no_whole_record(tmp_path, left: int) -> None:
    file, some = MapFile(tmp_path / "a.maps", SHAPE), pictures(4)
    add(file, some, 0, 3)
    os.truncate(file.path, left if left > 0 else file.path.stat().st_size + left)
    again = MapFile(file.path, SHAPE)
    survived = max(0, left + 3 * SHAPE.record.itemsize) // SHAPE.record.itemsize if left < 0 else 0
    assert again.lacking(some).tolist() == list(range(survived, 4))
    add(again, some, survived, 4)
    maps = again.maps(some)
    np.testing.assert_array_equal(maps.sizes(np.arange(4))[:, 1], [10, 11, 12, 13])


def test_a_file_of_other_maps_is_refused(tmp_path) -> None:
    file, some = MapFile(tmp_path / "a.maps", SHAPE), pictures(2)
    add(file, some, 0, 2)
    with pytest.raises(
        ValueError, match=r"maps of 2×3 cells with the best 2 of 5 classes, and maps of 2×3 .* of 6 classes"
    ):
        MapFile(file.path, MapShape((2, 3), 2, 6))
    (tmp_path / "b.maps").write_bytes(b"x" * 2 * HEADER)
    with pytest.raises(ValueError, match="something else than score maps"):
        MapFile(tmp_path / "b.maps", SHAPE)


def test_a_damaged_file_is_named(tmp_path) -> None:
    file, some = MapFile(tmp_path / "a.maps", SHAPE), pictures(2)
    add(file, some, 0, 2)
    content = bytearray(file.path.read_bytes())
    content[HEADER + 40] ^= 1  # a class or a score of the first, which may still be one
    file.path.write_bytes(content)
    broken = MapFile(file.path, SHAPE)
    assert broken.maps(some.only([1])).columns(np.arange(1), np.zeros((1, 2, 3))).isfinite().all()
    with pytest.raises(ValueError, match=r"a\.maps is damaged: delete it"):
        broken.maps(some.only([0])).columns(np.arange(1), np.zeros((1, 2, 3)))


def test_a_renamed_picture_and_a_changed_one_are_others(tmp_path) -> None:
    from PIL import Image

    from vitrail.data.sources.files import Files

    def keys() -> list[bytes]:
        paths = sorted(str(path) for path in tmp_path.glob("*.png"))
        store = Files.of(paths)
        some = Pictures(store, np.arange(len(paths)), np.zeros(len(paths), dtype=np.int64), ("a",))
        return [key_of(some, index) for index in range(len(paths))]

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    before = keys()
    assert keys() == before
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    assert keys() != before


def test_folders_of_one_name_are_not_mistaken_for_one_another(tmp_path, monkeypatch) -> None:
    from vitrail.data.sources.files import Files

    found = {}
    for place in ("one", "other"):
        (tmp_path / place / "data").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        (tmp_path / place / "data" / "a.png").write_bytes(place[:3].encode())
        os.utime("data/a.png", (0, 0))
        for typed in ("data/a.png", str(tmp_path / place / "data" / "a.png")):
            some = Pictures(Files.of([typed]), np.arange(1), np.zeros(1, dtype=np.int64), ("a",))
            found[place, typed[:1]] = key_of(some, 0)
    assert found["one", "d"] == found["one", "/"]  # one place, however it is typed
    assert found["one", "d"] != found["other", "d"]


@pytest.mark.parametrize(("grid", "top"), [((0, 3), 1), ((2, 3), 0), ((2, 3), 6)])
def test_maps_without_cells_or_classes_are_refused(grid: tuple[int, int], top: int) -> None:
    with pytest.raises(ValueError, match=r"score maps of 0×3 cells|classes of each cell: keep 1 to 5"):
        MapShape(grid, top, 5)
