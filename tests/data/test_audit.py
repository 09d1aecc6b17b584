"""Findings of the dataset audit."""

import io
import os
import signal
import sqlite3
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from tests.data.spoilt import bomb, chunk, encoded, good, odd_names, photograph, put, spoilt
from vitrail.data.audit import FINDING_KINDS, Audit, audit_dataset, exclude_images, format_quarantine, read_quarantine
from vitrail.data.audit import scan as scan_module
from vitrail.data.audit.duplicates import find_near_pairs, group_identical
from vitrail.data.audit.image import ImageInspection, inspect_bytes, inspect_image
from vitrail.data.dataset import Dataset, Images
from vitrail.data.sources import load_dataset
from vitrail.utils.files import cache_directory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@dataclass(frozen=True)
class Bytes:
    """A store of encoded images in a list."""

    images: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, item: int) -> str:
        return f"image {item}"

    def open(self, item: int) -> Image.Image:
        return Image.open(io.BytesIO(self.images[item]))

    def data(self, item: int) -> bytes:
        return self.images[item]

    def stamp(self, item: int) -> None:
        return None


@dataclass(frozen=True, eq=False)
class Array:
    """A store of pixels."""

    pixels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, item: int) -> str:
        return f"array[{item}]"

    def stamp(self, item: int) -> None:
        return None

    open = data = None


def make_dataset(kind="tar", **splits) -> Dataset:
    """Build a dataset of (store, targets, classes) by split."""
    return Dataset(
        "here",
        kind,
        {
            split: Images(store, np.arange(len(store)), np.asarray(targets), tuple(classes), split)
            for split, (store, targets, classes) in splits.items()
        },
    )


def find_paths(audited: Audit, kind: str) -> set[str]:
    return {os.path.basename(each.path) for each in audited.findings if each.kind == kind}


def test_good_images_give_no_findings(tmp_path):
    audited = audit_dataset(load_dataset(str(good(tmp_path))))
    assert audited.findings == ()
    assert audited.is_ok


def test_every_kind_of_problem_is_reported(tmp_path):
    audited = audit_dataset(load_dataset(str(spoilt(tmp_path))))
    expected = {
        "zero-byte": {"zero.jpg"},
        "truncated": {"short.jpg", "short.png"},
        "not-an-image": {"words.jpg"},
        "bomb": {"bomb.png"},
        "tiny": {"dot.png"},
        "mode": {"print.jpg", "deep.png", "palette.png", "moves.gif"},
        "animated": {"moves.gif", "moves.webp"},
        "turned": {"turned.jpg"},
        "wrong-suffix": {"really.png"},
        "duplicate": {"copy.jpg"},
        "near-duplicate": {"nearly.jpg"},
        "leak": {"leak.jpg"},
        "near-leak": {"near leak.jpg"},
        "contradiction": {"no cat.jpg", "no dog.jpg"},
        "empty-class": {"owl"},
        "classes-differ": {"fox"},
        "hidden": {".ipynb_checkpoints"},
        "other-file": {"notes.txt"},
    }
    assert {kind: find_paths(audited, kind) for kind in audited.counts} == expected
    assert not audited.is_ok
    severities = [each.severity for each in audited.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


def test_findings_do_not_depend_on_the_number_of_processes(tmp_path):
    spoilt(tmp_path)
    one, three = (audit_dataset(load_dataset(str(tmp_path)), cache=False, workers=workers) for workers in (0, 3))
    assert one.findings == three.findings


@pytest.mark.parametrize("part", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"restart_marker_rows": 1, "subsampling": 0}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("AVIF", {}),
    ],
)
def test_an_image_truncated_anywhere_is_unusable(form, options, part):
    whole = encoded(photograph(1), form, **options)
    assert inspect_bytes(whole).problem == ""
    inspection = inspect_bytes(whole[: int(part * len(whole))])
    assert inspection.problem in ("truncated", "unreadable")
    if form in ("JPEG", "PNG") and part >= 0.5:
        assert inspection.problem == "truncated"


def test_trailing_zeros_are_truncation():
    whole = encoded(photograph(1))
    assert inspect_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2)).problem == "truncated"
    assert inspect_bytes(whole + bytes(500)).problem == ""  # padding after the end mark is some cameras' habit


def test_a_changed_byte_in_a_png_is_detected():
    whole = bytearray(encoded(photograph(1), "PNG"))
    whole[len(whole) // 2] ^= 1
    inspection = inspect_bytes(bytes(whole))
    assert (inspection.problem, inspection.detail) == ("unreadable", "checksum error in chunk IDAT")


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"<!DOCTYPE html><html>gone</html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        (b"%PDF-1.7", "a PDF"),
        (bytes(4096), "4,096 zeros"),
        (b"hello\nworld", "text: 'hello world'"),
        (b"\x80\x81\x82\x83" * 20, "unknown content"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
    ],
)
def test_other_content_is_described(data, detail):
    inspection = inspect_bytes(data)
    assert inspection.problem == "not-an-image"
    assert detail in inspection.detail


def test_a_decompression_bomb_is_rejected_from_its_header(monkeypatch):
    def never(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "draft", never)
    inspection = inspect_bytes(bomb())
    assert (inspection.problem, inspection.detail) == ("bomb", "3,600 megapixels exceed the limit of 179")


def test_a_png_text_bomb_is_rejected():
    import zlib

    head, tail = encoded(photograph(1), "PNG")[:33], encoded(photograph(1), "PNG")[33:]
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000)))
    assert inspect_bytes(head + text + tail).problem in ("", "unreadable")


def test_very_large_images_are_a_warning(tmp_path, monkeypatch):
    good(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_000)  # the images have 19,200
    audited = audit_dataset(load_dataset(str(tmp_path)), cache=False)
    assert set(audited.counts) == {"large"}
    assert audited.is_ok


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_mode_convertible_to_rgb_is_inspected(mode):
    image = photograph(1).convert("L" if mode in ("1", "LA", "I;16", "I", "F") else "RGB").convert(mode)
    form = "TIFF" if mode in ("F", "I", "YCbCr", "CMYK") else "PNG"
    inspection = inspect_bytes(encoded(image, form))
    assert (inspection.problem, len(inspection.thumb), inspection.mode) == ("", 81, mode)


def test_a_mode_not_convertible_to_rgb_is_unusable():
    inspection = inspect_bytes(encoded(Image.new("LAB", (20, 20), (10, 20, 30)), "TIFF"))
    assert (inspection.problem, inspection.detail) == ("unreadable", "conversion from LAB to RGB not supported")


def test_16_bit_images_match_their_8_bit_versions():
    grey = photograph(3).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    a, b = (np.frombuffer(inspect_bytes(encoded(p, "PNG")).thumb, np.uint8) for p in (grey, deep))
    assert len(find_near_pairs(np.stack([a, b]))) == 1


def test_copies_in_arrays_are_warnings():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    pixels[1] = pixels[0]  # in one split, another label
    test = pixels[[2, 4]].copy()
    test[1] += 1
    audited = audit_dataset(
        make_dataset("idx", train=(Array(pixels), [0, 1, 0, 1, 0, 1], "ab"), test=(Array(test), [0, 1], "ab"))
    )
    assert {(each.kind, each.path, each.severity) for each in audited.findings} == {
        ("contradiction", "array[0]", "warning"),
        ("contradiction", "array[1]", "warning"),
        ("leak", "array[2]", "warning"),
    }
    assert audited.is_ok


def test_different_label_sets_contradict_across_splits():
    one, two = encoded(photograph(1)), encoded(photograph(2))
    splits = {
        "train": (Bytes((one, two)), np.array([[1, 1], [1, 0]], np.uint8), ("cat", "dog")),
        "validation": (Bytes((one, two)), np.array([[1, 1], [0, 1]], np.uint8), ("dog", "cat")),
    }
    audited = audit_dataset(make_dataset(**splits))
    assert [each.kind for each in audited.findings] == ["leak", "leak"]  # the same sets, in another order
    splits["validation"] = (Bytes((one, two)), np.array([[1, 0], [0, 1]], np.uint8), ("dog", "cat"))
    details = [each.detail for each in audit_dataset(make_dataset(**splits)).findings if each.kind == "contradiction"]
    assert details == ["labelled cat|dog; image 0 is labelled dog", "labelled dog; image 0 is labelled cat|dog"]


def test_the_held_out_copy_of_a_leak_is_kept(tmp_path):
    good(tmp_path)
    copy = (tmp_path / "validation/cat/0.jpg").read_bytes()
    for number in range(2):
        put(tmp_path / f"train/cat/copy{number}.jpg", copy)
    audited = audit_dataset(load_dataset(str(tmp_path)))
    assert find_paths(audited, "leak") == {"copy0.jpg", "copy1.jpg"}
    cleaned, excluded = exclude_images(load_dataset(str(tmp_path)), audited.list_quarantine())
    assert len(excluded) == 2
    assert audit_dataset(cleaned).is_ok


def test_near_duplicates_survive_size_quality_format_and_brightness(tmp_path):
    originals = [photograph(seed, (320, 240)) for seed in range(12)]
    changed = [
        lambda p: encoded(p, quality=30),
        lambda p: encoded(p.resize((160, 120), Image.Resampling.BICUBIC)),
        lambda p: encoded(p, "PNG"),
        lambda p: encoded(p.point(lambda value: int(value * 0.85))),
        lambda p: encoded(p.convert("L")),
        lambda p: encoded(p.crop((2, 2, 318, 238))),
    ]
    images = tuple(encoded(p) for p in originals) + tuple(changed[i % 6](p) for i, p in enumerate(originals))
    audited = audit_dataset(make_dataset(train=(Bytes(images), [0] * 24, "a")))
    near = {each.location[1] for each in audited.findings if each.kind == "near-duplicate"}
    assert near == set(range(12, 24))
    assert not audit_dataset(make_dataset(train=(Bytes(images), [0] * 24, "a")), max_hash_distance=None).findings


def test_flat_images_are_not_near_duplicates():
    plain = tuple(encoded(Image.new("RGB", (64, 64), (value,) * 3)) for value in range(0, 250, 10))
    assert not audit_dataset(make_dataset(train=(Bytes(plain), [0] * 25, "a"))).findings


def test_near_pairs_equal_brute_force():
    random = np.random.default_rng(0)
    thumbs = random.integers(0, 256, (400, 81), dtype=np.uint8)
    thumbs[200:] = np.clip(thumbs[:200].astype(int) + random.integers(-4, 5, (200, 81)), 0, 255)
    pairs = {(a, b) for a, b, _ in find_near_pairs(thumbs, 12).tolist()}
    assert pairs == {(i, i + 200) for i in range(200)}


def test_many_similar_images_are_fast_and_all_reported():
    thumbs = np.tile(np.random.default_rng(0).integers(0, 256, 81, dtype=np.uint8), (5000, 1))
    pairs = find_near_pairs(thumbs)
    assert set(pairs[:, :2].ravel()) == set(range(5000))
    assert len(pairs) < 5000 * 65


def test_group_identical_returns_first_indices():
    digests = np.array([[5, 1], [5, 2], [5, 1], [0, 0], [5, 2]], dtype=np.uint64)
    assert group_identical(digests).tolist() == [0, 1, 0, 3, 1]


def test_clean_dataset_drops_unusable_images(tmp_path):
    audited = audit_dataset(load_dataset(str(spoilt(tmp_path))))
    cleaned = audited.clean_dataset()
    assert len(cleaned["validation"]) == len(audited.dataset["validation"])
    assert len(cleaned["train"]) == len(audited.dataset["train"]) - 5
    names = {os.path.basename(cleaned["train"].name(i)) for i in range(len(cleaned["train"]))}
    assert not names & {"zero.jpg", "short.jpg", "short.png", "words.jpg", "bomb.png"}
    assert {"no cat.jpg", "0.jpg"} <= names
    for index in range(len(cleaned["train"])):
        cleaned["train"].open(index).load()


def test_a_class_of_unusable_images_is_empty(tmp_path):
    good(tmp_path)
    for split in ("train", "validation"):
        put(tmp_path / split / "elk" / "a.jpg", b"")
    audited = audit_dataset(load_dataset(str(tmp_path)))
    assert [(each.kind, each.path) for each in audited.findings][-1] == ("empty-class", "train/elk")


def test_classes_that_differ_in_case_only_are_a_warning(tmp_path):
    good(tmp_path)
    for split in ("train", "validation"):
        for number in range(4):
            seed = 900 + number + 50 * (split == "train")
            put(tmp_path / split / "Dog" / f"upper{number}.jpg", encoded(photograph(seed)))
    if len(list((tmp_path / "train").iterdir())) < 3:
        pytest.skip("the file system ignores case")
    found = [each for each in audit_dataset(load_dataset(str(tmp_path))).findings if each.kind == "class-case"]
    assert [(each.path, each.detail, each.severity) for each in found] == [("dog", "Dog is another class", "warning")]


def test_imbalance_names_both_classes(tmp_path):
    good(tmp_path)
    for number in range(36):
        put(tmp_path / "train" / "dog" / f"more{number}.jpg", encoded(photograph(500 + number)))
    assert audit_dataset(load_dataset(str(tmp_path)), max_imbalance=11).findings == ()
    (each,) = audit_dataset(load_dataset(str(tmp_path))).findings
    assert (each.kind, each.path) == ("imbalance", "train/cat")
    assert each.detail == "4 images; dog has 40, 10 times as many"


def test_pipes_broken_links_and_odd_names_are_handled(tmp_path):
    audited = audit_dataset(load_dataset(str(odd_names(tmp_path))))
    assert find_paths(audited, "not-an-image") == {"pipe.jpg"}
    assert find_paths(audited, "unreadable") == {"nowhere.jpg"}
    assert audited.counts["zero-byte"] == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_unreadable(tmp_path):
    good(tmp_path)
    (tmp_path / "train/cat/0.jpg").chmod(0)
    (each,) = audit_dataset(load_dataset(str(tmp_path))).findings
    assert (each.kind, each.detail) == ("unreadable", "Permission denied")


def test_a_quarantine_list_round_trips_any_names(tmp_path):
    names = {
        "a\nb\tc.jpg": "zero-byte: empty\nfile",
        "back\\nslash.jpg": "bomb",
        "é 犬.png": "leak",
        "\\": "x",
        "#1.jpg": "y",
    }
    file = tmp_path / "bad.txt"
    file.write_text(format_quarantine(names), encoding="utf-8")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 5
    file.write_text("# looked through on Monday\n\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_quarantine(file).keys() == names.keys()


def test_a_quarantine_of_other_data_is_an_error(tmp_path):
    good(tmp_path)
    other = put(tmp_path / "other.jpg", b"x")
    with pytest.raises(ValueError, match=r"none of the 1 listed paths is an image of"):
        exclude_images(load_dataset(str(tmp_path)), [str(other)])
    assert exclude_images(load_dataset(str(tmp_path)), [str(tmp_path / "deleted.jpg")])[1] == []


# The cache


def fail_inspection(*_):
    raise AssertionError("looked again")


def test_a_second_audit_inspects_nothing(tmp_path, monkeypatch):
    spoilt(tmp_path)
    os.remove(tmp_path / "train/dog/notes.txt")
    first = audit_dataset(load_dataset(str(tmp_path)))
    monkeypatch.setattr(scan_module, "inspect_in_parallel", lambda _, tasks, *__: [fail_inspection() for _ in tasks])
    assert audit_dataset(load_dataset(str(tmp_path))).findings == first.findings
    monkeypatch.chdir(tmp_path.parent)  # however it is written
    relative = audit_dataset(load_dataset(tmp_path.name))
    assert [each.kind for each in relative.findings] == [each.kind for each in first.findings]


def test_a_changed_file_is_inspected_again(tmp_path):
    good(tmp_path)
    assert audit_dataset(load_dataset(str(tmp_path))).is_ok
    file = tmp_path / "train/cat/0.jpg"
    before = file.stat()
    file.write_bytes(file.read_bytes()[:-500] + bytes(500))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # the same size, a nanosecond later
    assert find_paths(audit_dataset(load_dataset(str(tmp_path))), "truncated") == {"0.jpg"}


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + bytes(4096)])
def test_a_damaged_cache_is_replaced(tmp_path, content, monkeypatch):
    good(tmp_path)
    audit_dataset(load_dataset(str(tmp_path)))
    (file,) = cache_directory().iterdir()
    file.write_bytes(content)
    assert audit_dataset(load_dataset(str(tmp_path))).is_ok
    monkeypatch.setattr(scan_module, "inspect_in_parallel", lambda _, tasks, *__: [fail_inspection() for _ in tasks])
    assert audit_dataset(load_dataset(str(tmp_path))).is_ok


def test_a_cache_damaged_in_the_middle_does_not_stop_an_audit(tmp_path):
    good(tmp_path, each=60)
    audit_dataset(load_dataset(str(tmp_path)))
    (file,) = cache_directory().iterdir()
    data = bytearray(file.read_bytes())
    data[5000:-100] = os.urandom(len(data) - 5100)
    file.write_bytes(data)
    assert audit_dataset(load_dataset(str(tmp_path))).is_ok


def test_an_unwritable_cache_is_silently_unused(tmp_path, monkeypatch, capfd):
    good(tmp_path / "data")
    put(tmp_path / "file", b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert audit_dataset(load_dataset(str(tmp_path / "data"))).is_ok
    assert capfd.readouterr() == ("", "")


def test_a_locked_cache_is_not_used(tmp_path):
    good(tmp_path)
    audit_dataset(load_dataset(str(tmp_path)))
    (file,) = cache_directory().iterdir()
    other = sqlite3.connect(file)
    other.execute("BEGIN EXCLUSIVE")
    assert audit_dataset(load_dataset(str(tmp_path))).is_ok
    other.close()


def test_no_cache_leaves_no_file(tmp_path):
    good(tmp_path)
    audit_dataset(load_dataset(str(tmp_path)), cache=False)
    assert not cache_directory().exists()


# The processes


@dataclass(frozen=True)
class Crashing(Bytes):
    """A store with images that kill the reading process."""

    def data(self, item: int) -> bytes:
        if self.images[item] == b"deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[item]


def test_a_crashing_decoder_loses_only_its_image():
    images = [encoded(photograph(seed)) for seed in range(80)]
    images[37] = images[70] = b"deadly"
    audited = audit_dataset(make_dataset(train=(Crashing(tuple(images)), [0] * 80, "a")), workers=2)
    assert {(each.kind, each.path) for each in audited.findings} == {
        ("unreadable", "image 37"),
        ("unreadable", "image 70"),
    }
    assert "SIGKILL" in audited.findings[0].detail


def test_stopping_early_leaves_no_processes():
    images = Images(Bytes((encoded(photograph(0)),) * 200), np.arange(200), np.zeros(200, int), ("a",))
    running = scan_module.inspect_in_parallel([images], ((0, [i]) for i in range(200)), 2)
    assert next(running)[1][0].problem == ""
    running.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_an_interrupted_audit_keeps_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no other process writes to it
    photos = tmp_path / "photos"
    photos.mkdir()
    good(photos, each=60)
    seen: list[int] = []

    def interrupt(_doing, done, _total):
        seen.append(done)
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_dataset(load_dataset(str(photos)), progress=interrupt)
    inspected: list[int] = []

    def count(images, index):
        inspected.append(index)
        return inspect_image(images, index)

    monkeypatch.setattr(scan_module, "inspect_image", count)
    audit_dataset(load_dataset(str(photos)), workers=0)
    assert len(inspected) == 240 - seen[-1]  # in whatever order the workers finished


def test_every_kind_has_a_remedy():
    for kind in FINDING_KINDS.values():
        assert kind.severity in ("error", "warning", "note")
        assert 0 < len(kind.title) <= 40
        assert 0 < len(kind.remedy) <= 68
    assert ImageInspection().problem == ""
