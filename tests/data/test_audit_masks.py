"""The audit of masks: what is found, what is left out of training, what is counted."""

import os
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.data.making import tree
from tests.data.test_sources_coco import box, coco, write
from tests.data.test_sources_masks import PETS, pairs, photo, png, values
from vitrail.data.audit import FINDING_KINDS, UNUSABLE_KINDS, audit_dataset, scan
from vitrail.data.audit import masks as mask_audit
from vitrail.data.labels import LabelMap
from vitrail.data.sources import load_dataset

CLASSES = {"classes.txt": b"0 sky\n1 road\n2 car\n"}
WHOLE = (1.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def check(root: Path, **options):
    return vitrail.check(root, workers=0, fractions=WHOLE, **options)


def found(audit) -> dict[str, list[str]]:
    """Return the file names of the findings by kind."""
    kinds = {kind: [Path(f.path).name for f in audit.select_findings([kind])] for kind in audit.counts}
    return {kind: names for kind, names in kinds.items() if kind not in ("near-duplicate", "absent-class")}


def test_good_masks_give_counts_and_no_findings(tmp_path):
    audit = check(tree(tmp_path, pairs() | CLASSES))
    assert found(audit) == {}
    assert audit.is_ok
    counts = audit.mask_counts["train"]
    stored = np.concatenate([values(i).ravel() for i in range(6)])
    np.testing.assert_array_equal(counts.pixels, np.bincount(stored))
    assert counts.images.tolist() == [6, 6, 6]
    assert counts.shares.sum() == pytest.approx(1)
    split = audit.to_dict()["splits"]["train"]
    assert split["pixels"] == dict(zip(("sky", "road", "car"), np.bincount(stored).tolist(), strict=True))
    assert (split["classes"], split["ignored_pixels"]) == ({"sky": 6, "road": 6, "car": 6}, 0)


BAD: dict[str, tuple[str, bytes]] = {
    "size": ("mask-size", png(values(1, size=(9, 9)))),
    "value": ("mask-value", png(values(1, (0, 1, 9)))),
    "blurred": ("mask-blurred", png(values(1, range(40)))),
    "depth": ("mask-depth", png(values(1, (0, 26001)).astype(np.uint16))),
    "colours": ("mask-value", photo(3, kind="PNG")),
    "text": ("mask-unreadable", b"not an image"),
    "empty": ("mask-unreadable", b""),
    "truncated": ("mask-unreadable", png(values(1))[:-40]),
    "lossy": ("mask-lossy", png(values(1), kind="JPEG")),
}


def test_bad_masks_are_found_and_left_out(tmp_path):
    files = pairs() | CLASSES
    for number, (name, (_, content)) in enumerate(BAD.items()):
        files |= {f"images/{name}.jpg": photo(100 + number), f"masks/{name}.png": content}
    audit = check(tree(tmp_path, files))
    expected = {kind: sorted(f"{n}.jpg" for n, (k, _) in BAD.items() if k == kind) for kind, _ in BAD.values()}
    assert {kind: sorted(names) for kind, names in found(audit).items()} == expected
    assert not audit.is_ok
    assert set(expected) <= set(UNUSABLE_KINDS)
    clean = audit.clean_dataset()["train"]
    assert {Path(clean.name(i)).stem for i in range(len(clean))} == set(map(str, range(6)))
    assert audit_dataset(load_dataset(tmp_path, fractions=WHOLE), workers=0).counts == audit.counts
    assert {Path(path).stem for path in audit.list_quarantine()} == set(BAD)
    assert audit.mask_counts["train"].images.tolist() == [6, 6, 6]


def test_missing_orphan_and_unclear_masks(tmp_path):
    files = pairs() | CLASSES | {"images/lonely.jpg": photo(50), "masks/orphan.png": png(values(1))}
    files |= {"images/0.png": photo(51, kind="PNG")}
    audit = check(tree(tmp_path, files))
    assert found(audit) == {
        "mask-unclear": ["0.jpg", "0.png"],
        "missing-mask": ["lonely.jpg"],
        "orphan-mask": ["orphan.png"],
    }
    assert "1 image without a mask is not used" in audit.dataset.notes


def test_unusual_masks_are_used_and_noted(tmp_path):
    files = pairs() | CLASSES
    speck = np.zeros((20, 30), dtype=np.uint8)
    speck[3, 3] = 2
    good: dict[str, int | bytes] = {
        "masks/0.png": png(values(0), "RGBA"),
        "masks/1.png": png(values(1).astype(np.uint16)),
        "masks/2.png": png(np.full((20, 30), 255)),
        "masks/3.png": png(np.ones((20, 30))),
        "masks/4.png": png(speck),
        "images/5.jpg": photo(5, (20, 30), orientation=6),
    }
    audit = check(tree(tmp_path, files | good))
    assert found(audit) == {
        "mask-ignored": ["2.jpg"],
        "mask-uniform": ["3.jpg"],
        "mask-speck": ["4.jpg"],
        "mask-alpha": ["0.jpg"],
        "mask-16-bit": ["1.jpg"],
        "mask-turned": ["5.jpg"],
        "turned": ["5.jpg"],
    }
    assert audit.is_ok
    assert len(audit.clean_dataset()["train"]) == 6
    assert audit.mask_counts["train"].ignored == 600


def test_masks_of_unreadable_images_are_not_reported(tmp_path):
    files = pairs() | CLASSES | {"images/0.jpg": b"", "masks/0.png": b""}
    assert found(check(tree(tmp_path, files))) == {"zero-byte": ["0.jpg"]}


def test_classes_absent_from_a_split(tmp_path):
    files = pairs("train/") | pairs("val/", choices=(0, 1), first=10) | {"classes.txt": b"0 a\n1 b\n2 c\n3 d\n"}
    audit = vitrail.check(tree(tmp_path, files), workers=0)
    absent = {finding.path: finding.detail for finding in audit.select_findings(["absent-class"])}
    assert absent == {
        "train/d": "in no mask of train; in no split",
        "validation/c": "in no mask of validation; 6 images of train have it",
        "validation/d": "in no mask of validation; in no split",
    }
    assert audit.is_ok  # a warning


def test_classes_are_not_absent_because_all_masks_are_bad(tmp_path):
    files = (
        pairs("train/", choices=(0, 1, 9)) | pairs("val/", choices=(0, 1), first=10) | {"classes.txt": b"0 a\n1 b\n"}
    )
    audit = vitrail.check(tree(tmp_path, files), workers=0)
    assert audit.counts == {"mask-value": 6}
    assert "value 9 without a class" in audit.findings[0].detail
    audit = vitrail.check(tree(tmp_path, files | {"classes.txt": b"0 a\n"}), workers=0)
    assert "values 1, 9 without a class" in audit.findings[0].detail
    assert not audit.select_findings(["absent-class"])


def test_splits_with_other_classes_are_counted_by_name(tmp_path):
    tree(tmp_path, pairs("a/") | pairs("b/", choices=(1, 2), first=10))
    audit = vitrail.check({"train": tmp_path / "a", "validation": tmp_path / "b"}, workers=0)
    assert [finding.path for finding in audit.select_findings(["absent-class"])] == ["validation/0"]
    assert audit.dataset["validation"].classes == ("0", "1", "2")  # the values of all splits, as in one folder
    tree(tmp_path, {"a/classes.txt": b"sky\nroad\ncar\n", "b/classes.txt": b"1 road\n2 car\n"})
    named = load_dataset({"train": tmp_path / "a", "validation": tmp_path / "b"})
    with pytest.raises(ValueError, match="the validation split has no class 'sky'"):
        LabelMap.from_images(named["train"]).apply(named["validation"])
    with pytest.raises(ValueError, match="ignore= is for masks that are not read yet"):
        vitrail.check(audit.dataset, ignore=1)
    labels = {f"{name}/{i}.png": 10 * k + i for k, name in enumerate("xy") for i in range(4)}
    with pytest.raises(ValueError, match="some splits have masks and some have labels"):
        load_dataset({"train": tmp_path / "a", "validation": tree(tmp_path / "c", labels)})


def test_copies_with_equal_and_other_masks(tmp_path):
    files = pairs("train/", 3) | pairs("val/", 3, first=10)
    files |= {"val/images/same.jpg": photo(0), "val/masks/same.png": png(values(0))}
    files |= {"val/images/other.jpg": photo(1), "val/masks/other.png": png(values(99))}
    audit = vitrail.check(tree(tmp_path, files), workers=0)
    assert [Path(f.path).name for f in audit.select_findings(["leak"])] == ["0.jpg"]
    contradictions = audit.select_findings(["contradiction"])
    assert {Path(f.path).name for f in contradictions} == {"1.jpg", "other.jpg"}
    assert "masks/other.png" in contradictions[0].detail


def test_the_cache_knows_masks_by_file_classes_and_image(tmp_path, monkeypatch):
    tree(tmp_path / "data", pairs() | CLASSES)
    inspected: list[int] = []
    inspect = mask_audit.inspect_mask
    monkeypatch.setattr(mask_audit, "inspect_mask", lambda images, i: (inspected.append(i), inspect(images, i))[1])

    def count(**options) -> int:
        inspected.clear()
        check(tmp_path / "data", **options)
        return len(inspected)

    assert count() == 6
    assert count() == 0
    assert count(cache=False) == 6
    assert count(ignore=2) == 6  # other classes
    assert count(ignore=2) == 0
    os.utime(tmp_path / "data" / "masks" / "0.png", ns=(1, 1))
    os.utime(tmp_path / "data" / "images" / "1.jpg", ns=(1, 1))
    assert count() == 2


def test_worker_processes_find_the_same(tmp_path):
    files = pairs() | CLASSES | {"masks/0.png": BAD["size"][1], "masks/1.png": BAD["value"][1]}
    dataset = load_dataset(tree(tmp_path, files), fractions=WHOLE)
    alone, together = (audit_dataset(dataset, cache=False, workers=workers) for workers in (0, 2))
    assert alone.findings == together.findings
    np.testing.assert_array_equal(alone.mask_counts["train"].pixels, together.mask_counts["train"].pixels)


def test_damaged_rows_of_the_cache_are_not_used():
    good = mask_audit.MaskInspection("", "", bytes(16), np.array([[0, 5]], dtype=np.int64).tobytes())
    assert good.is_valid()
    assert not mask_audit.MaskInspection("", "", b"x").is_valid()
    assert not mask_audit.MaskInspection("", "", b"", b"123").is_valid()
    assert not mask_audit.MaskInspection("", "", b"", np.array([[300, 5]], dtype=np.int64).tobytes()).is_valid()
    assert not mask_audit.MaskInspection("", "", b"", np.array([[-2, 5]], dtype=np.int64).tobytes()).is_valid()
    cache = scan.InspectionCache(False, mask_audit.MaskInspection)
    assert cache.parse_row(("", "", "text", b"", "", 0)) is None
    assert cache.parse_row(("", "", bytes(16), good.counts, "", 0)) == good


def test_shapes_of_coco_files_are_checked(tmp_path):
    shapes = [{"segmentation": [box(0, 0, 4, 400)]}, {"segmentation": [box(0, 0, 4, 4)], "image_id": 2}]
    audit = check(write(tmp_path, coco(shapes)))
    (finding,) = audit.select_findings(["mask-shape"])
    assert Path(finding.path).name == "1.jpg"
    assert len(audit.clean_dataset()["train"]) == 1
    assert audit.mask_counts["train"].pixels.tolist() == [600 - 16, 16, 0]


def test_every_unusable_kind_is_an_error():
    assert {FINDING_KINDS[kind].severity for kind in UNUSABLE_KINDS} == {"error"}


@pytest.mark.skipif(not PETS.exists(), reason="no photographs beside this checkout (../shared/data)")
def test_real_trimaps_have_no_errors():
    audit = vitrail.check(PETS, near=None)
    assert audit.is_ok
    counts = audit.mask_counts["train"]
    assert counts.classes == ("1", "2", "3")
    assert counts.shares.round(2).tolist() == [0.30, 0.59, 0.11]
