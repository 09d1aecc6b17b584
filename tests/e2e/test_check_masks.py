"""`vitrail check` on images with masks, through the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.making import tree
from tests.data.test_sources_coco import box, coco, write
from tests.data.test_sources_masks import PETS, pairs, photo, png, values
from vitrail.cli import main


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments: str, code: int = 0) -> str:
    """Run `vitrail check` and return what it prints."""
    assert main(["check", *arguments, "--workers", "0"]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def test_shares_of_pixels_are_shown(tmp_path, capsys):
    half = np.zeros((20, 30))
    half[:10] = 1
    half[0] = 255
    files = {f"scans/images/{i}.jpg": photo(i) for i in range(10)} | {
        f"scans/masks/{i}.png": png(half) for i in range(10)
    }
    tree(tmp_path, files | {"scans/classes.txt": b"healthy\nill\n"})
    shown = " ".join(run(capsys, "scans").split())
    assert "10 images, 2 classes" in shown
    assert "healthy 52.63 % 52.63 %" in shown
    assert "(ignored) 5.00 % 5.00 %" in shown
    assert "ready to train" in shown
    result = json.loads(run(capsys, "scans", "--json"))
    assert result["classes"] == ["healthy", "ill"]
    assert result["kind"] == "masks"
    pixels = [split["pixels"] for split in result["splits"].values()]
    assert sum(each["healthy"] for each in pixels) == 10 * 300
    assert sum(each["ill"] for each in pixels) == 10 * 270


def test_ignored_values_and_names(tmp_path, capsys):
    tree(tmp_path / "pets", pairs(choices=(1, 2, 3)))
    result = json.loads(run(capsys, "pets", "--ignore", "3", "--json"))
    assert result["classes"] == ["1", "2"]
    Path("names.txt").write_text("pet\nground\n")
    named = run(capsys, "pets", "--ignore", "3,255", "--names", "names.txt")
    assert "1 is pet, 2 is ground" in named
    assert "classes are the 2 values of the masks; 3 ignored" in named
    with pytest.raises(SystemExit):
        main(["check", "pets", "--ignore", "x"])
    assert "must be whole numbers >= 0 with commas" in capsys.readouterr().err


def test_bad_pairs_are_listed_for_quarantine(tmp_path, capsys):
    files = pairs() | {"images/x.jpg": photo(70), "masks/x.png": png(values(0, size=(5, 5)))}
    tree(tmp_path / "scans", files | {"images/y.jpg": photo(71)})
    shown = run(capsys, "scans", "--quarantine", "bad.txt", code=1)
    assert "mask-size: masks of another size than their image" in shown
    assert "5×5 pixels, the image has 30×20 (mask masks/x.png)" in shown
    assert "missing-mask: images without a mask" in shown
    assert Path("bad.txt").read_text().startswith("scans/images/x.jpg\tmask-size: 5×5")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"images/a.jpg": photo(1), "masks/b.png": png(values(1))}, "has the name of an image"),
        (
            {"images/a.jpg": photo(1), "masks/a.jpg": png(np.kron(np.eye(4), np.full((16, 16), 200)), kind="JPEG")},
            "save masks as PNG",
        ),
        (pairs() | {"classes.txt": b"a\na\n"}, "lists the name 'a' twice"),
        (pairs("train/") | {"val/images/1.jpg": photo(9), "val/masks/2.png": png(values(1))}, None),
    ],
)
def test_refusals_are_one_line(files, message, tmp_path, capsys):
    tree(tmp_path / "scans", files)
    if message is None:  # a split without a pair is none; the training split is divided
        assert "split by content" in run(capsys, "scans")
        return
    (line,) = run(capsys, "scans", code=2).splitlines()
    assert message in line


def test_a_folder_of_masks_without_images_is_named(tmp_path, capsys):
    tree(tmp_path, {f"empty/images/{i}.jpg": photo(i) for i in range(6)} | {"empty/masks/0.npy": b"array"})
    (line,) = run(capsys, "empty", code=2).splitlines()
    assert "empty/masks has no images: save masks as PNG, or use classes:empty for classes" in line


def test_one_image_is_not_enough_to_train(tmp_path, capsys):
    tree(tmp_path / "one", {"images/0.jpg": photo(0), "masks/0.png": png(values(1))})
    shown = run(capsys, "one")
    assert "in no mask of validation; 1 image of train has it" in shown
    assert shown.splitlines()[-1].endswith("no errors, but training needs images of a validation split.")


def test_one_value_is_no_plural(tmp_path, capsys):
    tree(tmp_path / "flat", pairs(choices=(1,)))
    assert "classes are the only value of the masks" in run(capsys, "flat")


def test_coco_files(tmp_path, capsys):
    write(tmp_path / "coco", coco([{"segmentation": [box(0, 0, 15, 20)]}]))
    result = json.loads(run(capsys, "coco", "--json"))
    pixels = [split["pixels"] for split in result["splits"].values()]
    assert sum(each["cat"] for each in pixels) == 300
    assert [problem["kind"] for problem in result["problems"]].count("absent-class") == 2 * 3 - 3
    write(tmp_path / "bad", coco([{"segmentation": [box(0, 0, 4, 4)], "image_id": 9}]))
    (line,) = run(capsys, "bad", code=2).splitlines()
    assert "annotation 0: no image has the id 9" in line


def test_a_csv_of_pairs(tmp_path, capsys):
    rows = [f"images/{i}.jpg,masks/{i}.png" for i in range(6)] + ["images/0.jpg,masks/gone.png"]
    tree(tmp_path, pairs() | {"pairs.csv": "\n".join(["image,mask", *rows]).encode()})
    shown = run(capsys, "pairs.csv", code=1)
    assert "mask-unreadable" in shown
    assert "missing file or broken link" in shown


@pytest.mark.skipif(not PETS.exists(), reason="no photographs beside this checkout (../shared/data)")
def test_real_pets(capsys):
    shown = " ".join(run(capsys, str(PETS), "--near", "none").split())
    assert "550 images, 3 classes" in shown
    assert "1 29.59 % 31.24 %" in shown
    assert "3 11.14 % 10.98 %" in shown
