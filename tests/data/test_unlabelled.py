"""Pictures without labels: every source gives them when none are needed, and names what is missing when they are."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.sources import read
from vitrail.data.sources.parts import PICTURE


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 8, 3), dtype=np.uint8))


def encoded(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def fill(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        (folder / f"{number}.png").write_bytes(encoded(number))


def total(where: Path) -> int:
    found = read(where, several="unlabelled")
    assert all(split.classes == (PICTURE,) and not split.targets.any() for split in found.splits.values())
    return sum(len(split) for split in found.splits.values())


def test_flat_folder_with_folders_beside_the_pictures(tmp_path: Path) -> None:
    fill(tmp_path / "photos", 12)
    fill(tmp_path / "photos" / "2024" / "summer", 3, first=12)
    assert total(tmp_path / "photos") == 15
    with pytest.raises(ValueError, match="no class folders"):
        read(tmp_path / "photos" / "2024" / "summer")


def test_flat_split_folders(tmp_path: Path) -> None:
    fill(tmp_path / "train", 5)
    fill(tmp_path / "val", 3, first=5)
    found = read(tmp_path, several="unlabelled")
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 5, "validation": 3}


def test_class_folders_keep_their_classes(tmp_path: Path) -> None:
    fill(tmp_path / "cat", 4)
    fill(tmp_path / "dog", 4, first=4)
    assert read(tmp_path, several="unlabelled")["train"].classes == ("cat", "dog")


@pytest.mark.parametrize("rows", ["path\n{0}\n{1}\n", "path,label\n{0},\n{1},cat\n"])
def test_csv_without_labels_or_with_some_missing(tmp_path: Path, rows: str) -> None:
    fill(tmp_path / "all", 2)
    (tmp_path / "list.csv").write_text(rows.format("all/0.png", "all/1.png"))
    assert total(tmp_path / "list.csv") == 2
    with pytest.raises(ValueError, match="label"):
        read(tmp_path / "list.csv")


@pytest.mark.parametrize("labels", [None, ["cat", None, "dog"]])
def test_parquet_without_labels_or_with_some_missing(tmp_path: Path, labels: list[str | None] | None) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"image": [{"bytes": encoded(number), "path": None} for number in range(3)]}
    parquet.write_table(arrow.table(columns | ({"label": labels} if labels else {})), tmp_path / "all.parquet")
    assert total(tmp_path / "all.parquet") == 3


@pytest.mark.parametrize("labelled", [(), (1,)])
def test_tar_without_labels_or_with_some_missing(tmp_path: Path, labelled: tuple[int, ...]) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for number in range(3):
            members = {f"{number}.png": encoded(number)} | ({f"{number}.cls": b"7"} if number in labelled else {})
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    assert total(tmp_path / "all.tar") == 3
    with pytest.raises(ValueError, match="no label"):
        read(tmp_path / "all.tar")
