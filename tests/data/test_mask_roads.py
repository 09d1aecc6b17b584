"""The same pairs of images and masks from folders, lists, tables, shards and Python objects: equal bytes by every road."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.data.making import tree
from tests.data.test_sources_masks import photo, png, values
from vitrail.data.dataset import IGNORED, Images
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset

COUNT, SIZE = 6, (40, 56)
VALUES = (1, 7, 255)
NAMES = ("sky", "road")  # of the values 1 and 7
WHOLE = (1.0, 0.0, 0.0)


def image(number: int) -> bytes:
    return photo(number, SIZE, "PNG")


def stored(number: int) -> np.ndarray:
    """Return a mask of large blocks."""
    return np.kron(values(number, VALUES, (5, 7)), np.ones((8, 8), np.int64))


def pixels(number: int) -> np.ndarray:
    with Image.open(io.BytesIO(image(number))) as opened:
        return np.asarray(opened)


def write_shard(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def folders(root: Path) -> Any:
    files = {f"images/{i}.png": image(i) for i in range(COUNT)}
    return tree(root, files | {f"masks/{i}.png": png(stored(i)) for i in range(COUNT)})


def one_folder(root: Path) -> Any:
    files = {f"{i}.png": image(i) for i in range(COUNT)}
    return tree(root, files | {f"{i}_mask.png": png(stored(i)) for i in range(COUNT)})


def manifest(root: Path) -> Any:
    folders(root / "pairs")
    rows = [f"pairs/images/{i}.png,pairs/masks/{i}.png" for i in range(COUNT)]
    (root / "list.csv").write_text("\n".join(["image,mask", *rows]))
    return root / "list.csv"


def table(root: Path) -> Any:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"image": [image(i) for i in range(COUNT)], "mask": [png(stored(i)) for i in range(COUNT)]}
    root.mkdir(exist_ok=True)
    parquet.write_table(arrow.table(columns), root / "pairs.parquet", row_group_size=2)
    return root / "pairs.parquet"


def shards(root: Path) -> Any:
    for number in range(2):
        items = range(number * 3, number * 3 + 3)
        members = {f"{i}.png": image(i) for i in items} | {f"{i}.mask.png": png(stored(i)) for i in items}
        write_shard(root / f"pairs-{number:03}.tar", members)
    return root


def array_list(root: Path) -> Any:
    return [(pixels(i), stored(i)) for i in range(COUNT)]


def tensor_list(root: Path) -> Any:
    return [(torch.from_numpy(pixels(i).copy()).permute(2, 0, 1), torch.from_numpy(stored(i))) for i in range(COUNT)]


def dict_list(root: Path) -> Any:
    folders(root)
    return [{"image": str(root / f"images/{i}.png"), "mask": str(root / f"masks/{i}.png")} for i in range(COUNT)]


def arrays(root: Path) -> Any:
    return np.stack([pixels(i) for i in range(COUNT)]), np.stack([stored(i) for i in range(COUNT)])


class Pairs:
    """A dataset of one's own."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Image.Image, Image.Image]:
        return Image.fromarray(pixels(index)), Image.fromarray(stored(index).astype(np.uint8))


def dataset(root: Path) -> Any:
    return Pairs()


def frame(root: Path) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"image": [image(i) for i in range(COUNT)], "mask": [stored(i) for i in range(COUNT)]})


def hub_data(root: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    cells = {"image": [image(i) for i in range(COUNT)], "annotation": [png(stored(i)) for i in range(COUNT)]}
    cells = {name: [{"bytes": cell, "path": None} for cell in column] for name, column in cells.items()}
    return datasets.Dataset.from_dict(cells, features=features)


ROADS = (folders, one_folder, manifest, table, shards, array_list, tensor_list, dict_list, arrays, dataset, frame)
ROADS += (hub_data,)


def batches(images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels and masks of all batches of a loader."""
    pipeline = Preprocessing((24, 32), (24, 32), fit="squash", turn=True)
    loader = Loader(images, None, pipeline, batch_size=4)
    read = list(loader.iter_once())
    assert not loader.unreadable
    return torch.cat([batch.pixels for batch in read]), torch.cat([batch.targets for batch in read])


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    pipeline = Preprocessing((24, 32), (24, 32), fit="squash", turn=True)
    shown = [pipeline.to_pixels(Image.fromarray(pixels(i))) for i in range(COUNT)]
    indices = [np.select([stored(i) == 1, stored(i) == 7], [0, 1], IGNORED).astype(np.uint8) for i in range(COUNT)]
    return torch.stack(shown), torch.stack([pipeline.to_mask(mask) for mask in indices])


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_batches_are_equal_by_every_road(
    road: Callable[[Path], Any], expected: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    data = road(tmp_path / "data")
    images = load_dataset(data, fractions=WHOLE)["train"]
    assert (images.target_kind, images.classes) == ("masks", ("1", "7"))
    assert [value for value, _ in images.ignored] == [255]
    for found, wanted in zip(batches(images), expected, strict=True):
        assert torch.equal(found, wanted)
    ignoring = load_dataset(data, fractions=WHOLE, ignore=7)["train"]
    assert ignoring.classes == ("1", "255")  # one class alone would be no task
    audit = vitrail.check(data, fractions=WHOLE, cache=False, workers=0)
    assert audit.is_ok, str(audit)
    total = sum(int((stored(i) == 1).sum()) for i in range(COUNT))
    assert audit.mask_counts["train"].pixels[0] == total
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    named = load_dataset(data, fractions=WHOLE, names=str(tmp_path / "names.txt"))["train"]
    assert named.classes == NAMES


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_masks_are_left_out_without_labels(road: Callable[[Path], Any], tmp_path: Path) -> None:
    found = load_dataset(road(tmp_path / "data"), fractions=WHOLE, multi_label="unlabelled")["train"]
    assert (len(found), found.target_kind) == (COUNT, "single")
    assert found.open(0).size == SIZE[::-1]
    assert np.asarray(found.open(0)).ndim == 3  # the photograph, not the mask


def test_edited_masks_change_the_fingerprint_of_an_object() -> None:
    images, masks = arrays(Path())
    before = load_dataset((images, masks)).fingerprint
    assert load_dataset((images.copy(), masks.copy())).fingerprint == before
    edited = masks.copy()
    edited[0, 0, 0] = 7 if masks[0, 0, 0] == 1 else 1
    assert load_dataset((images, edited)).fingerprint != before


def test_classes_of_a_dictionary_of_splits_are_those_of_all_masks() -> None:
    images, masks = arrays(Path())
    fewer = np.where(masks == 7, 1, masks)  # 1 and 255: alone, these would be two classes
    found = load_dataset({"train": (images, masks), "validation": (images, fewer)})
    assert {images.classes for images in found.splits.values()} == {("1", "7")}
    assert set(np.unique(found["validation"].read_mask(0))) == {0, IGNORED}
    assert found.notes == ("classes are the 2 values of the masks: name them with names=; 255 ignored",)


def test_a_dataset_names_the_values_of_its_masks() -> None:
    class Named(Pairs):
        classes = ("sky", "road", "ignore")

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return pixels(index), np.minimum(stored(index), 2)

    found = load_dataset(Named(), fractions=WHOLE)["train"]
    assert found.classes == ("sky", "road")
    assert set(np.unique(found.read_mask(0))) == {1, IGNORED}


class Shaky(Pairs):
    """A dataset whose masks change with every read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return pixels(index), np.roll(stored(index), self.reads)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: [(pixels(0), stored(0)), (pixels(1), 3)], r"list\[0\] has a mask and list\[1\] has none"),
        (lambda: [(pixels(0), stored(0) / 2)], "has the type float64: a mask has whole numbers from 0 to 255"),
        (lambda: [(pixels(0), stored(0) - 2)], r"list\[0\]\.mask: values from -1 to 253 do not fit 8 bits"),
        (lambda: [(pixels(0), np.zeros((3, 4, 5, 6), int))], r"has the shape \[3, 4, 5, 6\]: a mask is \[H, W\]"),
        (lambda: [(pixels(0), pixels(0))], r"has colours: give values from 0 to 255, \[H, W\]"),
        (lambda: (np.stack([pixels(0)] * 2), stored(0)[None]), "got 2 images and 1 labels"),
        (Shaky, "gives other pixels when it is read again: leave out random transforms"),
    ],
)
def test_values_that_are_no_masks_are_refused(data: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset(data())
    assert "\n" not in str(caught.value)


def test_bad_masks_of_objects_are_found_by_the_audit() -> None:
    pairs = [(pixels(i), stored(i)) for i in range(COUNT)]
    pairs[2] = (pixels(2), stored(2)[:8])
    audit = vitrail.check(pairs, cache=False, workers=0)
    (finding,) = audit.select_findings(["mask-size"])
    assert (finding.path, finding.detail) == ("list[2]", "56×8 pixels, the image has 56×40 (mask list[2].mask)")


@pytest.mark.parametrize(("first", "second"), [("jpg", "png"), ("jpg", "seg.png"), ("png", "mask.png")])
def test_names_of_masks_in_shards(first: str, second: str, tmp_path: Path) -> None:
    kind = "JPEG" if first == "jpg" else "PNG"
    for split, start in (("train", 0), ("val", 10)):
        members = {f"a/{i}.{first}": photo(i, SIZE, kind) for i in range(start, start + 4)}
        members |= {f"a/{i}.{second}": png(stored(i)) for i in range(start, start + 3)}
        members |= {f"a/{i}.txt": b"a caption" for i in range(start, start + 4)}
        write_shard(tmp_path / f"{split}-0.tar", members)
    (tmp_path / "classes.json").write_text(json.dumps({"1": "sky", "7": "road"}))
    found = load_dataset(tmp_path)
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 3, "validation": 3}
    assert found["train"].classes == NAMES
    assert found["train"].name(0).endswith(f"train-0.tar:a/0.{first}")
    assert found["train"].mask_name(0).endswith(f"train-0.tar:a/0.{second}")
    assert "2 images without a mask are not used" in found.notes
    assert found["train"].shards is not None


def test_labels_in_shards_come_before_masks(tmp_path: Path) -> None:
    members = {f"{i}.jpg": photo(i) for i in range(4)} | {f"{i}.mask.png": png(stored(i)) for i in range(4)}
    write_shard(tmp_path / "a.tar", members | {f"{i}.cls": str(i % 2).encode() for i in range(4)})
    assert load_dataset(tmp_path / "a.tar")["train"].target_kind == "single"
    write_shard(tmp_path / "b.tar", {f"{i}.jpg": photo(i) for i in range(4)})
    with pytest.raises(ValueError, match=r"sample 0 has no label: add 0.cls, 0.json with a label, or 0.mask.png"):
        load_dataset(tmp_path / "b.tar")


def test_masks_among_images_in_split_folders(tmp_path: Path) -> None:
    files = {f"{split}/{i}_image.jpg": photo(i) for split in ("train", "val") for i in range(4)}
    files |= {
        f"{split}/{i}_mask.png": png(np.kron(np.eye(2), np.ones((10, 15))))
        for split in ("train", "val")
        for i in range(4)
    }
    files |= {"test/9.jpg": photo(9)}
    found = load_dataset(tree(tmp_path, files))
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 4, "validation": 4}
    assert [Path(path).name for path, _ in found.skipped] == ["test"]


def test_pairs_in_one_folder_that_are_unclear_or_incomplete(tmp_path: Path) -> None:
    one_folder(tmp_path)
    tree(tmp_path, {"6.png": image(6), "7_mask.png": png(stored(7)), "2_mask_1.png": png(stored(2)), "notes.txt": b"x"})
    found = load_dataset(tmp_path, fractions=WHOLE)
    assert len(found["train"]) == COUNT - 1
    reasons = {Path(path).name: reason.partition(" in ")[0] for path, reason in found.skipped}
    assert reasons["6.png"] == "no mask"
    assert reasons["7_mask.png"] == "no image for this mask"
    assert reasons["2.png"].startswith("unclear pair: its masks are")
    assert list(reasons) == ["6.png", "2.png", "7_mask.png", "notes.txt"]


def test_class_folders_with_masks_can_be_read_as_masks(tmp_path: Path) -> None:
    files = {
        f"{name}/{i}.jpg": photo(i + 50 * k, (64, 64)) for k, name in enumerate(("benign", "malign")) for i in range(3)
    }
    files |= {name.replace(".jpg", "_mask.png"): png(values(1, (0, 255), (64, 64))) for name in files}
    with pytest.raises(ValueError, match=r"masks among the images of benign.* \(to segment, use masks:"):
        load_dataset(tree(tmp_path, files))
    found = load_dataset(f"masks:{tmp_path}", fractions=WHOLE)
    assert (len(found["train"]), found["train"].classes) == (6, ("0", "255"))
    with pytest.raises(ValueError, match=r"use images/ and masks/, or a.jpg with a_mask.png"):
        load_dataset(f"masks:{tree(tmp_path / 'none', {'a/1.jpg': photo(1)})}")
