"""Unlabelled data: every source accepts it if labels are not needed."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.sources import load_dataset
from vitrail.data.sources.splits import UNLABELLED_CLASS


def make_image(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 8, 3), dtype=np.uint8))


def encoded(number: int) -> bytes:
    file = io.BytesIO()
    make_image(number).save(file, "PNG")
    return file.getvalue()


def fill(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        (folder / f"{number}.png").write_bytes(encoded(number))


def total(where: Path) -> int:
    dataset = load_dataset(where, multi_label="unlabelled")
    assert all(split.classes == (UNLABELLED_CLASS,) and not split.targets.any() for split in dataset.splits.values())
    return sum(len(split) for split in dataset.splits.values())


def test_flat_folder_with_folders_beside_the_images(tmp_path: Path) -> None:
    fill(tmp_path / "photos", 12)
    fill(tmp_path / "photos" / "2024" / "summer", 3, first=12)
    assert total(tmp_path / "photos") == 15
    with pytest.raises(ValueError, match="no class folders"):
        load_dataset(tmp_path / "photos" / "2024" / "summer")


def test_flat_split_folders(tmp_path: Path) -> None:
    fill(tmp_path / "train", 5)
    fill(tmp_path / "val", 3, first=5)
    dataset = load_dataset(tmp_path, multi_label="unlabelled")
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 5, "validation": 3}


def test_class_folders_keep_their_classes(tmp_path: Path) -> None:
    fill(tmp_path / "cat", 4)
    fill(tmp_path / "dog", 4, first=4)
    assert load_dataset(tmp_path, multi_label="unlabelled")["train"].classes == ("cat", "dog")


@pytest.mark.parametrize("rows", ["path\n{0}\n{1}\n", "path,label\n{0},\n{1},cat\n"])
def test_csv_without_labels_or_with_some_missing(tmp_path: Path, rows: str) -> None:
    fill(tmp_path / "all", 2)
    (tmp_path / "list.csv").write_text(rows.format("all/0.png", "all/1.png"))
    assert total(tmp_path / "list.csv") == 2
    with pytest.raises(ValueError, match="label"):
        load_dataset(tmp_path / "list.csv")


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
        load_dataset(tmp_path / "all.tar")
