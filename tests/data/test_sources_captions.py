"""Captions in tables: CSV, JSON lines, Parquet with paths or images, several captions of an image, the audit."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.audit import check
from vitrail.data.sources import load_dataset

ALL = (1.0, 0.0, 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(30):
        Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def write(folder: Path, rows: list[str], header: str = "image,caption") -> Path:
    path = folder / "pairs.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def list_pairs(dataset) -> list[tuple[str, str]]:
    return [
        (Path(images.name(index)).name, images.caption(index))
        for images in dataset.splits.values()
        for index in range(len(images))
    ]


def test_an_image_has_several_captions_and_a_caption_several_images(folder) -> None:
    rows = ["0.png,a  cat ", '0.png,"one cat, asleep"', "1.png,a cat"]
    dataset = load_dataset(write(folder, rows), fractions=ALL)
    train = dataset["train"]
    assert list_pairs(dataset) == [("0.png", "a cat"), ("0.png", "one cat, asleep"), ("1.png", "a cat")]
    assert (train.target_kind, train.classes, train.class_counts) == ("captions", ("caption",), {})
    assert train.items.tolist() == [0, 0, 1]
    assert train.captions == ("a cat", "one cat, asleep")


def test_all_captions_of_an_image_are_in_one_split(folder) -> None:
    dataset = load_dataset(
        write(folder, [f"{n}.png,image {n}" for n in range(30)] + [f"{n}.png,no. {n}" for n in range(30)])
    )
    names = {split: {images.name(i) for i in range(len(images))} for split, images in dataset.splits.items()}
    assert not names["train"] & names["validation"]
    assert len(names["train"]) + len(names["validation"]) == 30


@pytest.mark.parametrize("header", ["filepath,title", "file_name,text", "Image,Caption"])
def test_usual_names_of_columns_are_known(folder, header) -> None:
    assert load_dataset(write(folder, ["0.png,a cat"], header), fractions=ALL)["train"].target_kind == "captions"


def test_labels_come_first_unless_captions_are_wanted(folder) -> None:
    path = write(folder, ["0.png,a cat,x", "1.png,a dog,y"], "image,caption,label")
    assert load_dataset(path, fractions=ALL)["train"].target_kind == "single"
    dataset = load_dataset(path, fractions=ALL, multi_label="captions")
    assert list_pairs(dataset) == [("0.png", "a cat"), ("1.png", "a dog")]
    with pytest.raises(ValueError, match="has no column of captions, got image, label: name one caption"):
        load_dataset(write(folder, ["0.png,x"], "image,label"), multi_label="captions")
    with pytest.raises(ValueError, match="digits has no captions: give a table with the columns image and caption"):
        load_dataset("digits", multi_label="captions")


def test_json_lines_are_read_and_bad_captions_are_skipped(folder) -> None:
    rows = [
        {"image": "0.png", "caption": "a cat", "split": "train"},
        {"image": "1.png", "caption": "\ud800", "split": "train"},
        {"image": "2.png", "caption": 3, "split": "val"},
        {"image": "3.png", "caption": None, "split": "val"},
        {"image": "4.png", "caption": "x" * 100_001, "split": "val"},
        {"image": "5.png", "caption": "a dog", "split": "val"},
    ]
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = load_dataset(path)
    assert list_pairs(dataset) == [("0.png", "a cat"), ("5.png", "a dog")]
    assert [reason.split(" (")[0] for _, reason in dataset.skipped] == [
        "no caption: it is not valid Unicode",
        "no caption: it '3' is not a text",
        "no caption: it is missing",
        "no caption: it has 100,001 characters, at most 100,000 are read",
    ]


def test_parquet_has_paths_or_images_and_lists_of_captions(folder) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    captions = [["a cat", "one cat"], ["a dog"]]
    parquet.write_table(arrow.table({"path": ["0.png", "1.png"], "caption": captions}), folder / "paths.parquet")
    names = [name for name, _ in list_pairs(load_dataset(folder / "paths.parquet", fractions=ALL))]
    assert names == ["0.png", "0.png", "1.png"]
    images = [{"bytes": (folder / f"{n}.png").read_bytes()} for n in range(2)]
    parquet.write_table(arrow.table({"image": images, "caption": captions}), folder / "images.parquet")
    dataset = load_dataset(folder / "images.parquet", fractions=ALL)
    assert list_pairs(dataset) == [
        ("images.parquet[0]", "a cat"),
        ("images.parquet[0]", "one cat"),
        ("images.parquet[1]", "a dog"),
    ]
    with dataset["train"].open(2) as image:
        assert image.size == (16, 16)


def test_audit_finds_empty_repeated_and_long_captions_missing_images_and_leaks(folder) -> None:
    (folder / "copy.png").write_bytes((folder / "29.png").read_bytes())
    rows = [f"{n}.png,{'train' if n < 20 else 'val'},picture {n}" for n in range(30)]
    rows += ["0.png,train,", "1.png,train,picture 1", "2.png,train," + "word " * 61]
    rows += ["gone.png,train,nothing", "copy.png,train,a copy", "3.png,train,another text of the same image"]
    audit = check(write(folder, rows, "image,split,caption"), cache=False)
    found = [(finding.kind, Path(finding.path).name) for finding in audit.findings if finding.severity != "note"]
    assert sorted(found) == [
        ("caption-copy", "1.png"),
        ("caption-long", "2.png"),
        ("caption-value", "0.png"),
        ("leak", "copy.png"),
        ("unreadable", "gone.png"),
    ]
    assert audit.captions["train"].to_dict() == {"images": 22, "pairs": 24, "captions": 24, "words": 2.0, "longest": 61}
    assert len(audit.clean_dataset()["train"]) == 23
    shared = check(write(folder, [f"{n}.png,a photo" for n in range(30)]), cache=False, fractions=ALL)
    assert [(finding.kind, finding.detail) for finding in shared.findings] == [("caption-shared", "30 of 30 images")]
    assert shared.is_ok


def test_table_without_a_usable_caption_is_refused(folder) -> None:
    with pytest.raises(ValueError, match=r"has no image with a caption: .*0\.png: no caption: it is empty"):
        load_dataset(write(folder, ["0.png,  "]))
