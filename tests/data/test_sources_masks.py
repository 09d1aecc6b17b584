"""Masks beside images: pairing by name, splits, class files, values, colours, and what is refused."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.making import tree
from vitrail.data.dataset import IGNORED, Images
from vitrail.data.labels import LabelMap
from vitrail.data.sources import load_dataset
from vitrail.data.sources.mask_folders import match_names

PETS = Path(__file__).parents[3] / "shared" / "data" / "pets"
SIZE = (20, 30)  # height, width


def photo(number: int, size: tuple[int, int] = SIZE, kind: str = "JPEG", orientation: int = 1) -> bytes:
    """Return an encoded image of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **({"exif": exif} if orientation > 1 else {}))
    return out.getvalue()


def values(number: int, choices=(0, 1, 2), size: tuple[int, int] = SIZE) -> np.ndarray:
    """Return random values in blocks; every choice occurs."""
    found = np.random.default_rng(number).choice(np.array(choices), size)
    found.ravel()[: len(choices)] = choices
    return found


def png(pixels: np.ndarray, mode: str | None = None, kind: str = "PNG") -> bytes:
    """Return an array as an encoded image, optionally with another mode."""
    pixels = pixels if pixels.dtype == np.uint16 else pixels.astype(np.uint8)
    image = Image.fromarray(pixels)
    if mode == "P":
        image = Image.frombytes("P", image.size, image.tobytes())
        image.putpalette([channel for i in range(256) for channel in (i, 255 - i, i // 2)])
    elif mode is not None:
        image = image.convert(mode)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def pairs(prefix: str = "", count: int = 6, choices=(0, 1, 2), images="images", masks="masks", first: int = 0):
    """Return the files of images and masks."""
    files: dict[str, int | bytes] = {}
    for i in range(first, first + count):
        files[f"{prefix}{images}/{i}.jpg"] = photo(i)
        files[f"{prefix}{masks}/{i}.png"] = png(values(i, choices))
    return files


def names(images: Images) -> list[tuple[str, str]]:
    """Return the file names of the images with those of their masks."""
    return [(Path(images.name(i)).name, Path(images.mask_name(i)).name) for i in range(len(images))]


def all_names(dataset) -> set[tuple[str, str]]:
    return {pair for images in dataset.splits.values() for pair in names(images)}


def test_pairs_without_splits_are_split_by_content(tmp_path):
    dataset = load_dataset(tree(tmp_path, pairs(count=20)))
    assert all_names(dataset) == {(f"{i}.jpg", f"{i}.png") for i in range(20)}
    assert set(dataset.splits) == {"train", "validation"}
    train = dataset["train"]
    assert (dataset.kind, train.target_kind, train.classes) == ("masks", "masks", ("0", "1", "2"))
    for index in range(len(train)):
        number = int(Path(train.name(index)).stem)
        np.testing.assert_array_equal(train.read_mask(index), values(number))
        assert train.read_mask(index).dtype == np.uint8
    chosen = train.select([1])
    np.testing.assert_array_equal(chosen.read_mask(0), train.read_mask(1))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("train/", "images", "masks"), ("val/", "images", "masks")),
        (("", "images/train", "masks/train"), ("", "images/valid", "masks/valid")),
        (("", "train_images", "train_masks"), ("", "val_images", "val_masks")),
        (("", "images/training", "annotations/training"), ("", "images/validation", "annotations/validation")),
        (("a/b/train/", "imgs", "labels"), ("a/b/dev/", "imgs", "labels")),
        (("", "train", "train_masks"), ("", "validation", "validation_masks")),
        (("Train/", "JPEGImages", "SegmentationClass"), ("VAL/", "JPEGImages", "SegmentationClass")),
        (("", "train2017", "annotations/train2017"), ("", "val2017", "annotations/val2017")),
        (("", "images/train2017", "annotations/train2017"), ("", "images/val2017", "annotations/val2017")),
    ],
)
def test_splits_in_folders(first, second, tmp_path):
    prefix, images, masks = first
    files = pairs(prefix, 4, images=images, masks=masks)
    prefix, images, masks = second
    files |= pairs(prefix, 3, images=images, masks=masks, first=10)
    dataset = load_dataset(tree(tmp_path / "data", files))
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 4, "validation": 3}
    assert names(dataset["validation"]) == [(f"{i}.jpg", f"{i}.png") for i in range(10, 13)]


def test_other_folders_are_listed_and_class_folders_with_masks_are_not_pairs(tmp_path):
    dataset = load_dataset(tree(tmp_path / "a", pairs() | {"overlays/1.jpg": photo(8), "test/images/1.jpg": photo(9)}))
    assert sorted(Path(path).name for path, _ in dataset.skipped) == ["overlays", "test"]
    files = {f"{name}/{i}.jpg": photo(10 * k + i) for k, name in enumerate(("cat", "dog")) for i in range(4)}
    files |= {f"cat_mask/{i}.png": png(values(i)) for i in range(4)}
    assert load_dataset(tree(tmp_path / "b", files))["train"].classes == ("cat", "cat_mask", "dog")


def test_lists_of_names_state_the_splits(tmp_path):
    files = pairs("voc/VOC2012/", 8, images="JPEGImages", masks="SegmentationClass")
    files |= {"voc/VOC2012/SegmentationObject/0.png": png(values(0))}
    files |= {"voc/VOC2012/Annotations/0.xml": b"<a/>", "voc/VOC2012/JPEGImages/99.jpg": photo(99)}
    folder = "voc/VOC2012/ImageSets/Segmentation/"
    files |= {f"{folder}train.txt": b"0\n1\n2\n", f"{folder}val.txt": b"3\n4\n", f"{folder}trainval.txt": b"0\n"}
    dataset = load_dataset(tree(tmp_path, files) / "voc")
    assert [len(part) for part in dataset.splits.values()] == [3, 2]
    assert "splits from lists: 5 of 8 images with masks are listed" in dataset.notes
    assert "1 image without a mask is not used" in dataset.notes
    (tmp_path / folder / "val.txt").write_text("3\n1\n")
    with pytest.raises(ValueError, match=r"val.txt lists '1', which is in .*train.txt too: remove one"):
        load_dataset(tmp_path / "voc")
    (tmp_path / folder / "val.txt").write_text("3\nnothing\n")
    assert "not found: 'nothing'" in load_dataset(tmp_path / "voc").notes[-2]


def test_a_table_states_the_splits(tmp_path):
    rows = "".join(f"{i}.jpg,{'train' if i < 4 else 'test'}\n" for i in range(6))
    dataset = load_dataset(tree(tmp_path, pairs() | {"split.csv": f"image,split\n{rows}".encode()}))
    assert names(dataset["test"]) == [("4.jpg", "4.png"), ("5.jpg", "5.png")]
    (tmp_path / "split.csv").write_text("image,split\n0.jpg,train\n0.jpg,test\n")
    with pytest.raises(ValueError, match=r"line 3: '0.jpg' is in two splits"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("a.jpg", "a.png"),
        ("a.JPG", "a.PNG"),
        ("a.jpg", "a_mask.png"),
        ("a.jpg", "a_gt.gif"),
        ("a.jpg", "a-seg.bmp"),
        ("a.jpg", "a_segmentation.TIF"),
        ("a.jpg", "a.jpg.png"),
        ("a_sat.jpg", "a_mask.png"),
        ("a_leftImg8bit.png", "a_gtFine_labelIds.png"),
        ("größe 猫.jpg", "größe 猫.png"),
        ("cafe\u0301.jpg", "caf\u00e9.png"),
        ("b/c/a.jpg", "b/c/a.png"),
        ("a.b.jpg", "a.b.png"),
    ],
)
def test_names_that_match(image, mask):
    from vitrail.data.sources.mask_folders import relative_name

    images, masks = ({0: relative_name(name, ".")} for name in (image, mask))
    assert match_names(images, masks) == ({0: 0}, {})


@pytest.mark.parametrize(("image", "mask"), [("a.jpg", "b.png"), ("x/a.jpg", "y/a.png"), ("ab.jpg", "a_mask.png")])
def test_names_that_do_not_match(image, mask):
    assert match_names({0: image}, {0: mask}) == ({}, {})


def test_unclear_pairs_are_left_out(tmp_path):
    files = pairs(count=3) | {"images/0.png": photo(50, kind="PNG"), "masks/1.bmp": png(values(1), kind="BMP")}
    dataset = load_dataset(tree(tmp_path, files))
    assert all_names(dataset) == {("2.jpg", "2.png")}
    reasons = {Path(path).name: reason for path, reason in dataset.skipped}
    assert set(reasons) == {"0.jpg", "0.png", "1.jpg"}
    assert reasons["0.jpg"].startswith("unclear pair: another image has the mask")
    assert reasons["1.jpg"].startswith("unclear pair: its masks are")
    os.rename(tmp_path / "masks" / "0.png", tmp_path / "masks" / "0.jpg.png")  # the whole name is clear
    assert ("0.jpg", "0.jpg.png") in all_names(load_dataset(tmp_path))


def test_links_folders_below_and_other_formats(tmp_path):
    for kind, suffix in (("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif"), ("PNG", "PNG"), ("PPM", "pgm")):
        path = tmp_path / "store" / f"{kind}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(values(7), kind=kind))
    files = {f"data/images/{kind}/deep/x.JPG": photo(n) for n, kind in enumerate(("GIF", "BMP", "TIFF", "PNG", "PPM"))}
    tree(tmp_path, files)
    for path in (tmp_path / "store").iterdir():
        (tmp_path / "data" / "masks" / path.stem / "deep").mkdir(parents=True)
        (tmp_path / "data" / "masks" / path.stem / "deep" / f"x_mask{path.suffix}").symlink_to(path)
    (tmp_path / "data" / "masks" / "loop").symlink_to(tmp_path / "data" / "masks")
    dataset = load_dataset(tmp_path / "data", fractions=(1.0, 0.0, 0.0))
    assert len(dataset["train"]) == 5
    for index in range(5):
        np.testing.assert_array_equal(dataset["train"].read_mask(index), values(7))


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "I;16", "1"])
def test_modes_of_index_masks(mode, tmp_path):
    choices = (0, 1) if mode == "1" else (0, 1, 2)
    files = pairs(count=4, choices=choices)
    for i in range(4):
        pixels = values(i, choices)
        encoded = png(pixels.astype(np.uint16)) if mode == "I;16" else png(pixels * (255 if mode == "1" else 1), mode)
        files[f"masks/{i}.png"] = encoded
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    assert train.classes == tuple(map(str, choices))
    np.testing.assert_array_equal(train.read_mask(2), values(2, choices))


def test_values_become_indices_and_255_is_ignored(tmp_path):
    train = load_dataset(tree(tmp_path, pairs(choices=(1, 7, 255))), fractions=(1.0, 0.0, 0.0))["train"]
    assert train.classes == ("1", "7")
    stored = values(0, (1, 7, 255))
    np.testing.assert_array_equal(train.read_mask(0), np.where(stored == 7, 1, np.where(stored == 1, 0, IGNORED)))
    ignoring = load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0), ignore=(7,))
    assert ignoring["train"].classes == ("1", "255")  # one class alone would not be a task
    with pytest.raises(ValueError, match="ignore must be whole numbers"):
        load_dataset(tmp_path, ignore=-1)
    with pytest.raises(ValueError, match="ignore=300 must be a value of masks, from 0 to 255"):
        load_dataset(tmp_path, ignore=300)


def test_foreground_of_255_is_a_class(tmp_path):
    dataset = load_dataset(tree(tmp_path, pairs(choices=(0, 255))), fractions=(1.0, 0.0, 0.0))
    assert dataset["train"].classes == ("0", "255")
    np.testing.assert_array_equal(dataset["train"].read_mask(0), values(0, (0, 255)) // 255)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("classes.txt", "sky\nroad\nignore\n"),
        ("classes.txt", "1 road\n0 sky\n2 ignore\n"),
        ("classes.txt", "0 sky #000001\n1 road #0000ff\n2 ignore #ffffff\n"),
        ("classes.json", '{"0": "sky", "1": "road", "ignore": 2}'),
        ("classes.json", '["sky", "road", "ignore"]'),
        (
            "classes.json",
            '[{"id": 0, "name": "sky"}, {"id": 1, "name": "road"}, {"id": 2, "name": "x", "ignore": true}]',
        ),
        ("classes.json", '{"classes": ["sky", "road"], "ignore": [2, 255]}'),
    ],
)
def test_class_files(name, text, tmp_path):
    files = pairs(choices=(0, 1, 2, 255)) | {name: text.encode()}
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    stored = values(0, (0, 1, 2, 255))
    assert train.classes == ("sky", "road")
    np.testing.assert_array_equal(train.read_mask(0), np.where(stored > 1, IGNORED, stored))
    assert train.colours == (((0, 0, 1), (0, 0, 255)) if "#" in text else None)


def test_class_files_state_things_and_stuff(tmp_path):
    text = (
        '[{"id": 0, "name": "sky", "isthing": 0}, {"id": 1, "name": "car", "isthing": 1}, {"id": 2, "name": "ignore"}]'
    )
    files = pairs(choices=(0, 1, 2)) | {"classes.json": text.encode()}
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    assert (train.classes, train.things) == (("sky", "car"), (False, True))
    assert LabelMap(("car", "sky")).apply(train).images.things == (True, False)
    (tmp_path / "classes.json").write_text(text.replace('"name": "sky", "isthing": 0', '"name": "sky"'))
    assert load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0))["train"].things is None, "not stated for every class"


def test_void_is_a_class_unless_it_is_marked(tmp_path):
    files = pairs(choices=(0, 1, 255)) | {"classes.txt": b"0 sky\n1 void\n255 unlabeled\n"}
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    assert train.classes == ("sky", "void", "unlabeled")
    assert set(np.unique(train.read_mask(0))) == {0, 1, 2}
    assert load_dataset(tmp_path, ignore=255)["train"].classes == ("sky", "void")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("classes.txt", "sky #0a141e\nroad #ff0000\n"),
        ("labelmap.txt", "# label:color_rgb:parts:actions\nsky:10,20,30::\nroad:255,0,0::\n"),
        ("class_dict.csv", "name,r,g,b\nsky,10,20,30\nroad,255,0,0\n"),
    ],
)
def test_masks_of_colours(name, text, mode, tmp_path):
    palette = np.array([[10, 20, 30], [255, 0, 0]], dtype=np.uint8)
    files = pairs(count=3) | {name: text.encode()}
    for i in range(3):
        image = Image.fromarray(palette[values(i, (0, 1))])
        out = io.BytesIO()
        (image.quantize(2) if mode == "P" else image.convert(mode)).save(out, "PNG")
        files[f"masks/{i}.png"] = out.getvalue()
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    assert (train.classes, train.colours) == (("sky", "road"), ((10, 20, 30), (255, 0, 0)))
    np.testing.assert_array_equal(train.read_mask(1), values(1, (0, 1)))
    (tmp_path / name).unlink()
    if mode == "P":
        assert load_dataset(tmp_path)["train"].classes == ("0", "1")  # the indices of a palette are values
    else:
        with pytest.raises(ValueError, match=r"has colours: list them in classes.txt"):
            load_dataset(tmp_path)


def test_values_in_three_equal_channels_beside_colours(tmp_path):
    files = pairs(count=3) | {"classes.txt": b"0 sky #87ceeb\n1 road #404040\n"}
    for i in range(3):
        out = io.BytesIO()
        Image.fromarray(np.repeat(values(i, (0, 1)).astype(np.uint8)[..., None], 3, 2)).save(out, "PNG")
        files[f"masks/{i}.png"] = out.getvalue()
    out = io.BytesIO()
    Image.fromarray(np.full((*values(2).shape, 3), 64, dtype=np.uint8)).save(out, "PNG")
    files["masks/2.png"] = out.getvalue()  # the grey of the road: colours come first
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    np.testing.assert_array_equal(train.read_mask(1), values(1, (0, 1)))
    assert (train.read_mask(2) == 1).all()
    Image.fromarray(np.full((*values(2).shape, 3), 65, dtype=np.uint8)).save(tmp_path / "masks/2.png")
    with pytest.raises(ValueError, match="colour #414141 without a class"):
        train.read_mask(2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("classes.txt", "", "is empty"),
        ("classes.txt", "sky\nsky\n", "lists the name 'sky' twice"),
        ("classes.txt", "0 sky\n0 road\n", "lists the value 0 twice"),
        ("classes.txt", "0 sky\n0 sky #ff0000\n", "lists the value 0 twice"),
        ("classes.txt", "0 sky\n300 road\n", "the value 300 must be from 0 to 255"),
        ("classes.txt", "0 sky #ff0000\n1 road #ff0000\n", "lists the colour '#ff0000' twice"),
        (
            "classes.txt",
            "# names\n\n0 sky\nroad\n",
            "line 4: some lines start with a value and some do not: number all",
        ),
        ("classes.txt", "sky\n\n1 road\n", "line 3: some lines start with a value"),
        ("classes.txt", "0 sky\n\n1 #ff0000\n", "line 3: no name"),
        ("classes.txt", "0 ignore\n1 ignore\n", "names no class that is not ignored"),
        ("classes.json", "{", "is not valid JSON"),
        ("classes.json", "3", "must hold names"),
        ("classes.json", '{"a": "b"}', "needs a whole number as its id"),
        ("classes.json", '[{"id": 1}]', "the class 0 needs a name"),
        ("classes.json", '{"0": "a", "1": "b", "ignore": "x"}', "ignore must be values from 0 to 255"),
        ("classes.json", '[{"id": 0, "name": "a", "color": "red"}]', "needs a color as #rrggbb"),
        ("classes.json", '[{"id": 0, "name": "a", "isthing": "yes"}]', "isthing of the class 'a' must be 0 or 1"),
        ("labelmap.txt", "sky:1,2:::\n", "needs a colour of three numbers"),
    ],
)
def test_class_file_errors_are_one_line(name, text, message, tmp_path):
    tree(tmp_path, pairs(count=2) | {name: text.encode()})
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_values_name_the_mask(tmp_path):
    tree(tmp_path, pairs(choices=(0, 1, 2, 3)) | {"classes.txt": b"0 sky\n1 road\n2 car\n"})
    train = load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    with pytest.raises(ValueError, match=r"masks/0.png: value 3 without a class \(\d+ pixels\)"):
        train.read_mask(0)


def test_a_mask_as_stored_is_rotated_with_its_photograph(tmp_path):
    upright = values(1, (0, 1, 2), (30, 20))
    stored = np.rot90(upright)  # orientation 6 rotates the stored image clockwise
    files = {"images/a.jpg": photo(1, (20, 30), orientation=6), "masks/a.png": png(stored)}
    files |= {"images/b.jpg": photo(2, (20, 30), orientation=6), "masks/b.png": png(upright)}
    files |= {"images/c.jpg": photo(3), "masks/c.png": png(values(3, size=(10, 10)))}
    train = load_dataset(tree(tmp_path, files), fractions=(1.0, 0.0, 0.0))["train"]
    np.testing.assert_array_equal(train.read_mask(0), upright)
    np.testing.assert_array_equal(train.read_mask(1), upright)
    with pytest.raises(ValueError, match=r"c.png: 10×10 pixels, the image has 30×20"):
        train.read_mask(2)


def test_smoothed_and_lossy_masks_are_refused(tmp_path):
    smooth = np.zeros((64, 64), dtype=np.uint8)
    smooth[20:40, 20:40] = 200
    smooth[19, :64] = np.arange(64)
    tree(tmp_path / "smooth", {"images/a.jpg": photo(1, (64, 64)), "masks/a.png": png(smooth)})
    with pytest.raises(ValueError, match="values, most of them rare, as smoothing makes: name the real ones"):
        load_dataset(tmp_path / "smooth")
    tree(tmp_path / "jpeg", {"images/a.jpg": photo(1, (64, 64)), "masks/a.jpg": png(smooth, kind="JPEG")})
    with pytest.raises(ValueError, match="JPEG changes values: save masks as PNG"):
        load_dataset(tmp_path / "jpeg")


def test_folders_without_pairs(tmp_path):
    tree(tmp_path / "apart", {"images/a.jpg": photo(1), "masks/b.png": png(values(1))})
    with pytest.raises(ValueError, match=r"no mask in .*masks has the name of an image"):
        load_dataset(tmp_path / "apart")
    tree(tmp_path / "empty", {"images/": b"", "masks/": b""})
    with pytest.raises(ValueError, match=r"empty|no class folders|without images"):
        load_dataset(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="masks:nowhere: no such folder"):
        load_dataset("masks:nowhere")
    with pytest.raises(ValueError, match="has no folder of images beside one of masks"):
        load_dataset(f"masks:{tmp_path / 'empty'}")
    tree(tmp_path / "two", pairs(count=2) | {"seg_masks/0.png": png(values(0)), "gt/0.png": png(values(0))})
    with pytest.raises(ValueError, match="has the masks gt and masks: leave one"):
        load_dataset(tmp_path / "two")


def test_folders_that_do_not_look_like_masks_can_be_insisted_on(tmp_path):
    tree(tmp_path, {f"{name}/{i}.png": 10 * k + i for k, name in enumerate(("images", "masks")) for i in range(4)})
    assert load_dataset(tmp_path)["train"].classes == ("images", "masks")
    with pytest.raises(ValueError, match=r"has colours: list them in classes.txt"):
        load_dataset(f"masks:{tmp_path}")


def test_labels_are_refused_for_masks_and_masks_for_labels(tmp_path):
    tree(tmp_path / "pairs", pairs())
    for several in (True, False):
        with pytest.raises(ValueError, match="has masks: leave out task="):
            load_dataset(tmp_path / "pairs", multi_label=several)
    with pytest.raises(ValueError, match=r"their classes are counted by vitrail.check"):
        load_dataset(tmp_path / "pairs")["train"].count_classes()
    assert load_dataset(f"classes:{tmp_path / 'pairs'}")["train"].classes == ("images", "masks")
    tree(tmp_path / "labels", {f"{name}/{i}.png": 10 * k + i for k, name in enumerate("ab") for i in range(4)})
    with pytest.raises(ValueError, match="ignore= is for masks"):
        load_dataset(tmp_path / "labels", ignore=255)
    (tmp_path / "pairs" / "images" / "more.jpg").write_bytes(photo(70))  # without a mask
    unlabelled = load_dataset(tmp_path / "pairs", multi_label="unlabelled")
    assert sum(map(len, unlabelled.splits.values())) == 7
    assert all(images.target_kind == "single" for images in unlabelled.splits.values())


def test_a_csv_of_pairs(tmp_path):
    rows = [f"images/{i}.jpg,masks/{i}.png,{'train' if i < 4 else 'val'}" for i in range(6)]
    files = pairs() | {"pairs.csv": "\n".join(["image,mask,split", *rows, "images/0.jpg,,train"]).encode()}
    tree(tmp_path, files | {"classes.txt": b"sky\nroad\ncar\n"})
    dataset = load_dataset(tmp_path / "pairs.csv")
    assert [len(part) for part in dataset.splits.values()] == [4, 2]
    assert dataset["train"].classes == ("sky", "road", "car")
    np.testing.assert_array_equal(dataset["validation"].read_mask(0), values(4))
    assert "1 image without a mask is not used" in dataset.notes
    (tmp_path / "none.csv").write_text("image,mask\nimages/0.jpg,\n")
    with pytest.raises(ValueError, match="has no image with a mask"):
        load_dataset(tmp_path / "none.csv")
    (tmp_path / "short.csv").write_text("image,mask\nimages/0.jpg\n")
    with pytest.raises(ValueError, match="line 2: 1 cells, the header has 2"):
        load_dataset(tmp_path / "short.csv")


@pytest.mark.parametrize("names", [("image", "mask"), ("pixel_values", "label"), ("image", "annotation")])
@pytest.mark.parametrize("struct", [True, False])
def test_parquet_with_images_and_masks(names, struct, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cells = [[photo(i) for i in range(5)], [png(values(i)) for i in range(5)]]
    wrapped = [[{"bytes": cell, "path": None} for cell in column] if struct else column for column in cells]
    table = pyarrow.table(dict(zip(names, wrapped, strict=True)))
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        parquet.write_table(table, tmp_path / "data" / f"{split}-00000-of-00001.parquet", row_group_size=2)
    (tmp_path / "classes.json").write_text(json.dumps({"0": "sky", "1": "road", "2": "car"}))
    dataset = load_dataset(tmp_path)
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 5, "validation": 5}
    assert dataset["train"].classes == ("sky", "road", "car")
    np.testing.assert_array_equal(dataset["validation"].read_mask(3), values(3))


def test_label_maps_match_masks_by_name(tmp_path):
    tree(tmp_path, pairs() | {"classes.txt": b"0 sky #000001\n1 road #000002\n2 car #000003\n"})
    images = load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    assert LabelMap.from_images(images).names == ("sky", "road", "car")
    mapped = LabelMap(("car", "sky", "road")).apply(images).images
    np.testing.assert_array_equal(mapped.read_mask(0), np.array([1, 2, 0])[values(0)])
    assert mapped.colours == ((0, 0, 3), (0, 0, 1), (0, 0, 2))
    back = LabelMap(("sky", "road", "car")).apply(mapped).images
    np.testing.assert_array_equal(back.read_mask(0), values(0))
    with pytest.raises(ValueError, match=r"has classes not in training: 'car' and has no class 'tree'"):
        LabelMap(("sky", "road", "tree")).apply(images)
    allowed = LabelMap(("sky", "road", "tree")).apply(images, allow_mismatch=True)
    np.testing.assert_array_equal(allowed.images.read_mask(0), np.array([0, 1, IGNORED])[values(0)])
    assert len(allowed.warnings) == 2


@pytest.mark.skipif(not PETS.exists(), reason="no photographs beside this checkout (../shared/data)")
def test_real_trimaps():
    dataset = load_dataset(PETS)
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 400, "validation": 150}
    assert dataset["train"].classes == dataset["validation"].classes == ("1", "2", "3")
    ignoring = load_dataset(PETS, ignore=3)["train"]
    assert ignoring.classes == ("1", "2")
    assert set(np.unique(ignoring.read_mask(0))) == {0, 1, IGNORED}
