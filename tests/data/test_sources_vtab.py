"""VTAB datasets are read from files in their published form."""

import csv
import gzip
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from vitrail.data.dataset import Dataset
from vitrail.data.sources import load_dataset, vtab
from vitrail.data.sources.vtab import arrays


def jpeg(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 50, 90)).save(path)


def list_images(dataset: Dataset, split: str) -> list[tuple[str, str]]:
    """Return the file name and class of every image, after opening it."""
    images = dataset[split]
    for index in range(len(images)):
        images.open(index).load()
    names = [Path(images.name(index)).name for index in range(len(images))]
    return [(name, images.classes[target]) for name, target in zip(names, images.targets, strict=True)]


def svhn(folder: Path, train: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", 3)):
        pixels = np.arange(count, dtype=np.uint8) + np.zeros((32, 32, 3, 1), np.uint8)  # an image's number everywhere
        digits = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]  # 10 is the digit 0
        savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": digits})


def test_svhn_is_transposed_and_label_ten_is_zero(tmp_path):
    svhn(tmp_path)
    found = load_dataset(f"svhn:{tmp_path}")
    assert {split: len(images) for split, images in found.splits.items()}["test"] == 3
    assert len(found["train"]) + len(found["validation"]) == 20
    assert found["train"].classes == tuple("0123456789")
    assert [label for _, label in list_images(found, "test")] == ["1", "2", "3"]
    image = found["test"].open(2)
    assert (image.size, image.mode, image.getpixel((5, 7))) == ((32, 32), "RGB", (2, 2, 2))
    everything = {**dict(list_images(found, "train")), **dict(list_images(found, "validation"))}
    assert everything["train_32x32.mat[9]"] == "0"


def test_missing_or_damaged_files_raise_one_line(tmp_path):
    svhn(tmp_path)
    (tmp_path / "test_32x32.mat").write_bytes(b"no matrix at all" * 40)
    with pytest.raises(ValueError, match=r"test_32x32\.mat is not an SVHN file"):
        load_dataset(f"svhn:{tmp_path}")
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(ValueError, match=r"has no test_32x32\.mat: add it as published"):
        load_dataset(f"svhn:{tmp_path}")
    with pytest.raises(ValueError, match=r"has no train_32x32\.mat or test_32x32\.mat, as svhn is published"):
        load_dataset(f"svhn:{tmp_path / 'elsewhere'}")


def test_files_one_folder_below_are_found(tmp_path):
    svhn(tmp_path / "unpacked")
    assert len(load_dataset(f"svhn:{tmp_path}")["test"]) == 3


def sprites(folder: Path, count: int = 80) -> np.ndarray:
    classes = np.stack(
        [np.zeros(count, int)] * 3 + [np.arange(count) % 40, np.arange(count) % 32, np.zeros(count, int)], 1
    )
    imgs = np.zeros((count, 64, 64), np.uint8)
    imgs[np.arange(count), np.arange(count) % 64, 3] = 1
    name = folder / "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
    metadata = np.array({"title": "dSprites"}, dtype=object)  # pickled, as it is published: nobody may touch it
    np.savez_compressed(
        name, metadata=metadata, imgs=imgs, latents_classes=classes, latents_values=classes.astype(float)
    )
    return classes


def test_dsprites_has_16_classes_per_task(tmp_path):
    sprites(tmp_path)
    for task, values in (("location", 32), ("orientation", 40)):
        found = load_dataset(f"dsprites-{task}:{tmp_path}")
        assert set(found.splits) == {"train", "validation", "test"}
        for split in found.splits:
            for name, label in list_images(found, split):
                item = int(name.partition("[")[2][:-1])
                assert int(label) == int(item % values // (values / 16))
    image = np.asarray(found["test"].open(0))
    item = int(found["test"].items[0])
    assert (image.shape, image.sum(), image[item % 64, 3]) == ((64, 64), 255, 255)


def test_a_damaged_dsprites_file_is_refused(tmp_path):
    (tmp_path / arrays.DSPRITES_FILE).write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match="is not a dSprites file"):
        load_dataset(f"dsprites-location:{tmp_path}")


def norb(path: Path, values: np.ndarray) -> None:
    kind = 0x1E3D4C55 if values.dtype == np.uint8 else 0x1E3D4C54
    shape = (*values.shape, *(1,) * (3 - values.ndim))
    data = (
        struct.pack(f"<II{len(shape)}I", kind, values.ndim, *shape)
        + values.astype("<i4" if kind & 1 == 0 else "u1").tobytes()
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def small_norb(folder: Path) -> None:
    info = np.array([[4, e, 2 * a, 0] for a in range(18) for e in range(9)], np.int32)
    for name, packed in (
        ("smallnorb-5x46789x9x18x6x2x96x96-training", ".gz"),
        ("smallnorb-5x01235x9x18x6x2x96x96-testing", ""),
    ):
        pixels = np.zeros((len(info), 2, 96, 96), np.uint8)
        pixels[:, 0] = np.arange(len(info), dtype=np.uint8)[:, None, None]
        pixels[:, 1] = 255  # the other camera
        norb(folder / f"{name}-dat.mat{packed}", pixels)
        norb(folder / f"{name}-info.mat{packed}", info)


def test_smallnorb_is_read_plain_and_gzipped(tmp_path):
    small_norb(tmp_path)
    azimuth, elevation = (load_dataset(f"smallnorb-{task}:{tmp_path}") for task in ("azimuth", "elevation"))
    assert (len(azimuth["train"].classes), len(elevation["train"].classes)) == (18, 9)
    assert {split: len(images) for split, images in azimuth.splits.items()} == {
        "train": 162,
        "validation": 81,
        "test": 81,
    }
    assert [azimuth["train"].targets[10], elevation["train"].targets[10]] == [1, 1]  # row 10: azimuth 2, elevation 1
    image = azimuth["train"].open(10)
    assert (image.size, image.getpixel((0, 0))) == ((96, 96), 10)


def test_a_damaged_smallnorb_matrix_is_refused(tmp_path):
    norb(tmp_path / "whole", np.arange(6, dtype=np.int32).reshape(2, 3))
    assert arrays.read_norb_matrix(tmp_path / "whole").tolist() == [[0, 1, 2], [3, 4, 5]]
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"which is not a matrix of \(2, 3\)"):
        arrays.read_norb_matrix(tmp_path / "cut")
    (tmp_path / "other").write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(ValueError, match="is not a smallNORB matrix"):
        arrays.read_norb_matrix(tmp_path / "other")


def patches(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    contents = {}
    for part, count in (("train", 4), ("valid", 2), ("test", 2)):
        x = np.zeros((count, 96, 96, 3), np.uint8) + np.arange(count, dtype=np.uint8)[:, None, None, None]
        y = (np.arange(count) % 2).astype(np.uint8)[:, None, None, None]
        for which, values in (("x", x), ("y", y)):
            path = folder / f"camelyonpatch_level_2_split_{part}_{which}.h5"
            path.touch()
            contents[str(path)] = {which: values}
    return contents


@pytest.fixture
def no_open_files():
    arrays.open_hdf5.cache_clear()
    yield
    arrays.open_hdf5.cache_clear()


def test_patch_camelyon_is_read_row_by_row(tmp_path, monkeypatch, no_open_files):
    # h5py need not be installed: what is asked of it is a file by its name, and rows of x and y.
    contents = patches(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=lambda path, mode: contents[path]))
    found = load_dataset(f"patch-camelyon:{tmp_path}")
    assert {split: len(images) for split, images in found.splits.items()} == {
        "train": 4,
        "validation": 2,
        "test": 2,
    }
    assert list_images(found, "validation") == [
        ("camelyonpatch_level_2_split_valid_x.h5[0]", "normal"),
        ("camelyonpatch_level_2_split_valid_x.h5[1]", "tumour"),
    ]
    assert found["train"].open(3).getpixel((9, 9)) == (3, 3, 3)


def test_patch_camelyon_without_h5py_names_the_package(tmp_path, monkeypatch, no_open_files):
    patches(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"needs h5py: pip install h5py, or use class folders"):
        load_dataset(f"patch-camelyon:{tmp_path}")
    packed = tmp_path / "camelyonpatch_level_2_split_train_x.h5"
    packed.rename(packed.with_name(packed.name + ".gz"))
    with pytest.raises(ValueError, match=r"is compressed: decompress it with gunzip camelyonpatch"):
        load_dataset(f"patch-camelyon:{tmp_path}")


def test_dtd_uses_the_publishers_first_splits(tmp_path):
    for part, name in (
        ("train1", "banded/banded_0002"),
        ("val1", "dotted/dotted_0001"),
        ("test1", "banded/banded_0005"),
    ):
        (tmp_path / "dtd" / "labels").mkdir(parents=True, exist_ok=True)
        (tmp_path / "dtd" / "labels" / f"{part}.txt").write_text(f"{name}.jpg\n")
        jpeg(tmp_path / "dtd" / "images" / f"{name}.jpg")
    found = load_dataset(f"dtd:{tmp_path}")
    assert [list_images(found, split) for split in ("train", "validation", "test")] == [
        [("banded_0002.jpg", "banded")],
        [("dotted_0001.jpg", "dotted")],
        [("banded_0005.jpg", "banded")],
    ]
    assert found["test"].classes == ("banded", "dotted")


def test_flowers_are_numbered_from_one(tmp_path):
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[77, 1, 102]], np.uint8)})
    sets = {
        "trnid": np.array([[3]], np.uint16),
        "valid": np.array([[1]], np.uint16),
        "tstid": np.array([[2]], np.uint16),
    }
    savemat(tmp_path / "setid.mat", sets)
    for number in (1, 2, 3):
        jpeg(tmp_path / "jpg" / f"image_0000{number}.jpg")
    found = load_dataset(f"flowers-102:{tmp_path}")
    assert [list_images(found, split)[0] for split in ("train", "validation", "test")] == [
        ("image_00003.jpg", "102"),
        ("image_00001.jpg", "77"),
        ("image_00002.jpg", "1"),
    ]
    assert len(found["train"].classes) == 102
    savemat(tmp_path / "setid.mat", {"other": np.array([[3]])})
    with pytest.raises(ValueError, match="are not the files of Flowers-102"):
        load_dataset(f"flowers-102:{tmp_path}")


def test_pets_classes_and_validation_split(tmp_path):
    (tmp_path / "annotations").mkdir()
    names = [f"{breed}_{n}" for breed in ("Abyssinian", "american_bulldog") for n in range(10)]
    (tmp_path / "annotations" / "trainval.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
    (tmp_path / "annotations" / "test.txt").write_text("#Image CLASS-ID SPECIES BREED\nAbyssinian_99 1 1 1\n")
    for shade, name in enumerate([*names, "Abyssinian_99"]):
        jpeg(tmp_path / "images" / f"{name}.jpg", 12 * shade)
    found = load_dataset(f"pets:{tmp_path}")
    assert list_images(found, "test") == [("Abyssinian_99.jpg", "Abyssinian")]
    assert found["train"].classes == ("Abyssinian", "american_bulldog")
    assert any("20 % validation" in note for note in found.notes)


def test_sun397_uses_the_publishers_first_partition(tmp_path):
    (tmp_path / "Partitions").mkdir()
    lists = {
        "Training": ["/a/abbey/sun_a.jpg", "/a/apartment_building/outdoor/sun_b.jpg"],
        "Testing": ["/a/abbey/sun_c.jpg"],
    }
    for part, names in lists.items():
        (tmp_path / "Partitions" / f"{part}_01.txt").write_text("\n".join(names))
        for shade, name in enumerate(names):
            jpeg(tmp_path / name[1:], 40 * shade)
    found = load_dataset(f"sun397:{tmp_path}", fractions=(0.5, 0.5, 0.0))
    assert list_images(found, "test") == [("sun_c.jpg", "abbey")]
    both = list_images(found, "train") + (list_images(found, "validation") if "validation" in found.splits else [])
    assert sorted(both) == [("sun_a.jpg", "abbey"), ("sun_b.jpg", "apartment_building/outdoor")]


def test_caltech_has_30_training_images_per_class(tmp_path):
    for name in ("BACKGROUND_Google", "Faces"):
        for number in range(33):
            jpeg(tmp_path / "101_ObjectCategories" / name / f"image_{number:04d}.jpg", 7 * number)
    found = load_dataset(f"caltech-101:{tmp_path}")
    assert found["test"].count_classes().tolist() == [3, 3]
    assert (found["train"].count_classes() + found["validation"].count_classes()).tolist() == [30, 30]


def test_class_folders_are_split_as_in_vtab(tmp_path):
    for name in ("AnnualCrop", "Forest"):
        for number in range(60):
            jpeg(tmp_path / "2750" / name / f"{name}_{number}.jpg", 4 * number)
    found = load_dataset(f"eurosat:{tmp_path}")
    assert found["train"].classes == ("AnnualCrop", "Forest")
    assert any("60 % train, 20 % validation, 20 % test" in note for note in found.notes)


def test_retinopathy_splits_follow_kaggle_usage(tmp_path):
    tables = {
        "trainLabels.csv": [("image", "level"), ("10_left", 0), ("10_right", 4)],
        "retinopathy_solution.csv": [("image", "level", "Usage"), ("1_left", 2, "Public"), ("1_right", 1, "Private")],
    }
    for name, rows in tables.items():
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    for name in ("train/10_left", "train/10_right", "test/1_left", "test/1_right"):
        jpeg(tmp_path / f"{name}.jpeg")
    found = load_dataset(f"retinopathy:{tmp_path}")
    assert list_images(found, "train") == [("10_left.jpeg", "0"), ("10_right.jpeg", "4")]
    assert (list_images(found, "validation"), list_images(found, "test")) == (
        [("1_left.jpeg", "2")],
        [("1_right.jpeg", "1")],
    )
    (tmp_path / "trainLabels.csv").write_text("image,level\n10_left,9\n")
    with pytest.raises(ValueError, match=r"trainLabels\.csv: .* expected image, level of 0 to 4"):
        load_dataset(f"retinopathy:{tmp_path}")


def scene(name: str, *depths: float) -> dict:
    return {"image_filename": name, "objects": [{"shape": "cube", "pixel_coords": [1, 2, depth]} for depth in depths]}


def test_clevr_count_and_distance_labels(tmp_path):
    contents = {
        "train": [scene("CLEVR_train_000000.png", 9.2, 11.0, 12.0), scene("CLEVR_train_000001.png", *[8.4] * 10)],
        "val": [scene("CLEVR_val_000000.png", 7.5, 9.0, 12.0, 13.0), scene("CLEVR_val_000001.png", 10.5, 12.0, 12.0)],
    }
    for part, listed in contents.items():
        (tmp_path / "CLEVR_v1.0" / "scenes").mkdir(parents=True, exist_ok=True)
        path = tmp_path / "CLEVR_v1.0" / "scenes" / f"CLEVR_{part}_scenes.json"
        path.write_text(json.dumps({"info": {"split": part}, "scenes": listed}))
        for shade, each in enumerate(listed):
            jpeg(tmp_path / "CLEVR_v1.0" / "images" / part / each["image_filename"], 90 * shade)
    count, distance = (
        load_dataset(f"clevr-{task}:{tmp_path}", fractions=(1.0, 0.0, 0.0)) for task in ("count", "distance")
    )
    assert (len(count["train"].classes), len(distance["train"].classes)) == (8, 6)
    assert [label for _, label in list_images(count, "train")] == ["3", "10"]
    assert [label for _, label in list_images(count, "test")] == ["4", "3"]
    assert distance["train"].targets.tolist() == [3, 1]  # over 9.0 and up to 9.5; over 8.0 and up to 8.5
    assert distance["test"].targets.tolist() == [0, 5]
    (tmp_path / "CLEVR_v1.0" / "scenes" / "CLEVR_val_scenes.json").write_text('{"scenes": [{"objects": []}]}')
    with pytest.raises(ValueError, match="has no CLEVR scenes"):
        load_dataset(f"clevr-count:{tmp_path}")


def vehicle(kind: str, depth: float) -> str:
    return f"{kind} 0.00 0 -1.57 599.41 156.40 629.75 189.25 2.85 2.63 12.34 0.47 1.49 {depth:.2f} -1.56\n"


def test_kitti_distance_labels(tmp_path):
    label_files = [
        vehicle("Car", 7.9) + vehicle("Van", 30.0),
        vehicle("Truck", 12.0) + vehicle("Pedestrian", 2.0),
        vehicle("Van", 60.0),
        vehicle("Cyclist", 5.0) + "DontCare -1 -1 -10 503.89 169.71 590.61 190.13 -1 -1 -1 -1000 -1000 -1000 -10\n",
    ]
    (tmp_path / "training" / "label_2").mkdir(parents=True)
    for number, text in enumerate(label_files):
        (tmp_path / "training" / "label_2" / f"{number:06d}.txt").write_text(text)
        jpeg(tmp_path / "training" / "image_2" / f"{number:06d}.png", 50 * number)
    found = load_dataset(f"kitti-distance:{tmp_path}", fractions=(1.0, 0.0, 0.0))
    assert [label for _, label in list_images(found, "train")] == ["near", "over 8 m", "over 20 m", "none"]
    assert any("frames of one drive may be in several splits" in note for note in found.notes)
    (tmp_path / "mapping").mkdir()
    drives = ["0005", "0005", "0009", "0011"]
    lines = [f"2011_09_26 2011_09_26_drive_{drive}_sync {n:010d}\n" for n, drive in enumerate(drives)]
    (tmp_path / "mapping" / "train_mapping.txt").write_text("".join(lines))
    (tmp_path / "mapping" / "train_rand.txt").write_text("3,1,4,2")
    sides = vtab.read_drive_splits(tmp_path)
    assert sides is not None
    assert sides[1] == sides[3]  # frames of one drive
    assert sorted(set(sides)) == ["test", "train", "validation"]
    whole = load_dataset(f"kitti-distance:{tmp_path}")
    assert sum(len(images) for images in whole.splits.values()) == 4
    assert not whole.notes


def test_every_vtab_task_but_dmlab_and_cifar_has_a_reader():
    from vitrail.studies.vtab import VTAB_TASKS

    assert {task.name for task in VTAB_TASKS} - set(vtab.VTAB_LAYOUTS) == {"dmlab", "cifar-100"}
