"""COCO files: shapes drawn as masks, run lengths in both forms, and files that contradict themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.making import tree
from tests.data.test_sources_masks import photo
from vitrail.data.dataset import IGNORED
from vitrail.data.sources import load_dataset
from vitrail.data.sources.coco import decode_counts, fill_polygon, fill_runs, open_coco

SIZE = (20, 30)
CATEGORIES = [{"id": 3, "name": "dog"}, {"id": 1, "name": "cat"}]


def encode_runs(mask: np.ndarray) -> list[int]:
    """Return the run lengths of a mask, down the columns, starting with zeros."""
    flat = mask.T.ravel().astype(int)
    changes = np.flatnonzero(np.diff(flat, prepend=0, append=1 - flat[-1]))
    return np.diff(changes, prepend=0).tolist()


def compress_runs(counts: list[int]) -> str:
    """Return run lengths as the text of COCO's compressed form."""
    text = ""
    for index, count in enumerate(counts):
        value, more = count - (counts[index - 2] if index > 2 else 0), True
        while more:
            code = value & 31
            value >>= 5
            more = value != -1 if code & 16 else value != 0
            text += chr((code | 32 if more else code) + 48)
    return text


def box(left: float, top: float, right: float, bottom: float) -> list[float]:
    return [left, top, right, top, right, bottom, left, bottom]


def coco(annotations: list[Any], **changes: Any) -> dict[str, Any]:
    """Return a COCO file of images 1 and 2 with these annotations; ids of annotations are added."""
    numbered = [
        {"id": i, "image_id": 1, "category_id": 1} | item if isinstance(item, dict) else item
        for i, item in enumerate(annotations)
    ]
    listed = [{"id": i, "file_name": f"{i}.jpg", "height": 20, "width": 30} for i in (1, 2)]
    return {"images": listed, "annotations": numbered, "categories": CATEGORIES} | changes


def write(root: Path, data: Any, name: str = "annotations/instances_train2017.json", folder="train2017") -> Path:
    files: dict[str, int | bytes] = {f"{folder}/{i}.jpg": photo(i) for i in (1, 2)}
    return tree(root, files | {name: json.dumps(data).encode()})


def read(root: Path, **options: Any):
    return load_dataset(root, fractions=(1.0, 0.0, 0.0), **options)["train"]


def test_shapes_are_drawn_in_order_on_a_background(tmp_path):
    annotations = [
        {"segmentation": [box(2, 3, 12, 13)], "category_id": 3},
        {"segmentation": [box(6, 3, 20, 8)]},
        {"segmentation": {"size": [20, 30], "counts": encode_runs(np.eye(20, 30) > 0)}, "iscrowd": 1},
    ]
    images = read(write(tmp_path, coco(annotations)))
    assert images.classes == ("background", "cat", "dog")
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[np.eye(20, 30) > 0] = IGNORED  # a crowd, under the objects
    expected[3:13, 2:12] = 2
    expected[3:8, 6:20] = 1
    np.testing.assert_array_equal(images.read_mask(0), expected)
    assert not images.read_mask(1).any()  # no objects
    assert images.mask_name(0).endswith("instances_train2017.json, image 1")


def test_several_polygons_of_an_object_and_boxes_of_nothing(tmp_path):
    annotations = [{"segmentation": [box(0, 0, 4, 4), box(10, 10, 12, 12)]}, {"segmentation": [], "image_id": 2}]
    images = read(write(tmp_path, coco(annotations)))
    assert images.read_mask(0).sum() == 16 + 4
    assert not images.read_mask(1).any()


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[1, 1], [4, 1], [4, 3], [1, 3]], 6),  # a box of 3 × 2 pixels
        ([[0.6, 0], [2.4, 0], [2.4, 1], [0.6, 1]], 1),  # centres 1.5 only
        ([[-1, -1], [6, -1], [6, 6], [-1, 6]], 25),  # larger than the image
        ([[0, 0], [5, 0], [0, 5]], 10),  # a triangle: pixels whose centre is above the diagonal
        ([[2, 2], [2, 2], [2, 2]], 0),
        ([[7, 7], [9, 7], [9, 9]], 0),
    ],
)
def test_pixels_are_inside_by_their_centres(points, expected):
    filled = fill_polygon(np.array(points, dtype=float), (5, 5))
    inside = [[is_inside(x + 0.5, y + 0.5, points) for x in range(5)] for y in range(5)]
    np.testing.assert_array_equal(filled, inside)
    assert filled.sum() == expected


def is_inside(x: float, y: float, points: list[list[float]]) -> bool:
    """Return True if a ray to the right crosses the polygon an odd number of times."""
    crossings = 0
    for (x1, y1), (x2, y2) in zip(points, points[1:] + points[:1], strict=True):
        if (y1 <= y) != (y2 <= y) and x1 + (y - y1) / (y2 - y1) * (x2 - x1) > x:
            crossings += 1
    return crossings % 2 == 1


def test_random_polygons_equal_the_crossing_rule():
    rng = np.random.default_rng(0)
    for count in (3, 4, 7, 12):
        points = rng.uniform(-0.9, 12.9, (count, 2))
        filled = fill_polygon(points, (12, 12))
        inside = [[is_inside(x + 0.5, y + 0.5, points.tolist()) for x in range(12)] for y in range(12)]
        np.testing.assert_array_equal(filled, inside)


def test_run_lengths_by_hand():
    mask = np.array([[0, 1, 1], [0, 1, 0]])  # columns: 00, 11, 10
    np.testing.assert_array_equal(fill_runs(np.array([2, 3, 1]), 2, 3), mask)
    assert encode_runs(mask) == [2, 3, 1]
    assert decode_counts("231").tolist() == [2, 3, 1]  # small numbers are their own digits
    assert decode_counts("2312").tolist() == [
        2,
        3,
        1,
        5,
    ]  # from the fourth on, differences from the one before last
    assert decode_counts("PT1").tolist() == [0 + 4 * 32 + 1 * 1024]  # five bits each, the lowest first


def test_run_lengths_survive_both_forms(tmp_path):
    rng = np.random.default_rng(1)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = rng.random(SIZE) < share
        counts = encode_runs(mask)
        assert decode_counts(compress_runs(counts)).tolist() == counts
        for stored in (counts, compress_runs(counts)):
            annotations = [{"segmentation": {"size": [20, 30], "counts": stored}}]
            folder = tmp_path / f"{share}{type(stored).__name__}"
            np.testing.assert_array_equal(read(write(folder, coco(annotations))).read_mask(0), mask)


def test_splits_folders_and_given_files(tmp_path):
    data = coco([{"segmentation": [box(0, 0, 4, 4)]}])
    write(tmp_path / "coco", data)
    write(tmp_path / "coco", data, "annotations/instances_val2017.json", folder="val2017")
    found = load_dataset(tmp_path / "coco")
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 2, "validation": 2}
    assert found.kind == "coco"
    for split in ("train", "valid"):  # as Roboflow writes it
        write(tmp_path / "flow", data, f"{split}/_annotations.coco.json", folder=split)
    assert set(load_dataset(tmp_path / "flow").splits) == {"train", "validation"}
    write(tmp_path / "one", data, "labels.json", folder="images")
    given = load_dataset(tmp_path / "one" / "labels.json", fractions=(1.0, 0.0, 0.0))
    assert given["train"].name(0).endswith("images/1.jpg")
    assert len(load_dataset(tmp_path / "one", multi_label="unlabelled", fractions=(1.0, 0.0, 0.0))["train"]) == 2
    other = coco([{"segmentation": [box(0, 0, 4, 4)]}], categories=[{"id": 1, "name": "cat"}])
    write(tmp_path / "coco", other, "annotations/instances_val2017.json", folder="val2017")
    with pytest.raises(ValueError, match="has other categories than"):
        load_dataset(tmp_path / "coco")


def test_ignored_ids_and_named_backgrounds(tmp_path):
    annotations = [{"segmentation": [box(0, 0, 4, 4)]}, {"segmentation": [box(8, 8, 10, 10)], "category_id": 3}]
    write(tmp_path / "a", coco(annotations))
    images = read(tmp_path / "a", ignore=3)
    assert images.classes == ("background", "cat")
    assert set(np.unique(images.read_mask(0))) == {0, 1, IGNORED}
    images = read(tmp_path / "a", ignore=0)
    assert images.classes == ("cat", "dog")
    assert images.read_mask(0)[19, 29] == IGNORED
    named = [{"id": 0, "name": "cat"}, {"id": 9, "name": "background"}]
    annotations = [{"segmentation": [box(0, 0, 4, 4)], "category_id": 0}]
    images = read(write(tmp_path / "b", coco(annotations, categories=named)))
    assert images.classes == ("cat", "background")
    assert images.read_mask(0)[[0, 19], [0, 29]].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("annotations", "changes", "message"),
    [
        ([{"segmentation": [box(0, 0, 4, 4)], "image_id": 7}], {}, "annotation 0: no image has the id 7"),
        ([{"segmentation": [box(0, 0, 4, 4)], "category_id": 7}], {}, "annotation 0: no category has the id 7"),
        ([{"segmentation": [box(0, 0, 4, 4)], "id": 5}] * 2, {}, "has the annotation id 5 twice"),
        ([{"segmentation": [[0, 0, 4, 4]]}], {}, "a polygon needs x, y of three points"),
        ([{"segmentation": [[0, 0, 4, 4, 5, float("inf")]]}], {}, "a coordinate that is not finite"),
        ([{"segmentation": [box(0, 0, 4, 4)]}, {"segmentation": "x"}], {}, "must be polygons or run lengths"),
        ([{"segmentation": {"size": [20], "counts": [600]}}], {}, "run lengths need a size"),
        ([{"segmentation": {"size": [20, 30], "counts": [1.5]}}], {}, "counts must be a text or whole numbers"),
        ([{"segmentation": {"size": [20, 30], "counts": "é"}}], {}, "characters from '0' to 'o' only"),
        ([{"segmentation": {"size": [20, 30], "counts": "P"}}], {}, "ends in the middle of a count"),
        ([{"segmentation": {"size": [20, 30], "counts": "o" * 40 + "0"}}], {}, "groups of 5 bits"),
        ([{"segmentation": {"size": [20, 30], "counts": [2**70]}}], {}, "larger than any mask"),
        ([{"segmentation": [box(0, 0, 4, 4)]}], {"categories": [{"id": 1, "name": "a"}] * 2}, "category id 1 twice"),
        ([{"segmentation": [box(0, 0, 4, 4)]}], {"categories": [{"id": 1}]}, "a category needs an id and a name"),
        ([{"segmentation": [box(0, 0, 4, 4)]}], {"images": []}, "lists no images"),
        ([{"segmentation": [box(0, 0, 4, 4)]}], {"images": [3]}, "an image needs an id and a file_name"),
        (
            [{"segmentation": [box(0, 0, 4, 4)]}],
            {"images": [{"id": 1, "file_name": "1.jpg", "height": 20, "width": 30}] * 2},
            "has the image id 1 twice",
        ),
        (
            [{"segmentation": [box(0, 0, 4, 4)]}],
            {"images": [{"id": 1, "file_name": "1.jpg", "height": 10**9, "width": 10**9}]},
            "needs a height and width in pixels",
        ),
        (
            [{"segmentation": [box(0, 0, 4, 4)]}],
            {"images": [{"id": 1, "file_name": "gone.jpg", "height": 20, "width": 30}]},
            "the image gone.jpg is not beside the file",
        ),
    ],
)
def test_contradictions_are_one_line(annotations, changes, message, tmp_path):
    write(tmp_path, coco(annotations, **changes))
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([box(0, 0, 4, 400)], r"a polygon reaches \(4, 400\), outside 30×20 pixels"),
        ([box(-50, 0, 4, 4)], r"a polygon reaches \(-50, 0\)"),
        ({"size": [20, 30], "counts": [10, 5]}, "the runs have 15 pixels, but the mask has 30×20 = 600"),
        ({"size": [20, 30], "counts": [610, -10]}, "runs must be 0 to 600 pixels long"),
        ({"size": [30, 20], "counts": [600]}, "run lengths of 20×30, the image has 30×20"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_of_their_image(shape, message, tmp_path):
    images = read(write(tmp_path, coco([{"segmentation": shape}, {"segmentation": [box(0, 0, 4, 4)], "image_id": 2}])))
    with pytest.raises(ValueError, match=message):
        images.read_mask(0)
    assert images.read_mask(1).sum() == 16


def test_an_unreadable_file_is_passed_over_unless_asked_for(tmp_path):
    write(tmp_path, coco([{"segmentation": [box(0, 0, 4, 4)]}]))
    unreadable = tmp_path / "annotations" / "instances_old.json"
    unreadable.symlink_to(tmp_path / "gone.json")  # also for root, who may read every file
    assert len(read(tmp_path)) == 2
    with pytest.raises(FileNotFoundError):
        open_coco(str(unreadable), required=True)


def test_boxes_without_shapes_and_other_json_are_refused(tmp_path):
    write(tmp_path / "boxes", coco([{"bbox": [0, 0, 4, 4]}]))
    with pytest.raises(ValueError, match="list the images in a CSV of path,label"):
        load_dataset(tmp_path / "boxes")
    for text in ("{", "[]", '{"images": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"is not valid JSON|is not a COCO file with segmentations"):
            load_dataset(tmp_path / "other.json")
