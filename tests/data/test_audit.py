"""What an audit finds, and what it leaves alone."""

import io
import os
import signal
import sqlite3
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from tests.data.spoilt import bomb, chunk, encoded, good, odd_names, photograph, put, spoilt
from vitrail.data.audit import KINDS, Audit, audit, cache, crew
from vitrail.data.audit import seen as seen_module
from vitrail.data.audit.duplicates import alike, same
from vitrail.data.audit.look import Look, looked_at
from vitrail.data.audit.quarantine import read_quarantine, without, written
from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import read


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@dataclass(frozen=True)
class Bytes:
    """A store of pictures in a list."""

    pictures: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.pictures)

    def name(self, item: int) -> str:
        return f"picture {item}"

    def open(self, item: int) -> Image.Image:
        return Image.open(io.BytesIO(self.pictures[item]))

    def data(self, item: int) -> bytes:
        return self.pictures[item]

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


def dataset(kind="tar", **splits) -> Dataset:
    """A dataset of (store, targets, classes) by split."""
    return Dataset(
        "here",
        kind,
        {
            split: Pictures(store, np.arange(len(store)), np.asarray(targets), tuple(classes), split)
            for split, (store, targets, classes) in splits.items()
        },
    )


def found(audited: Audit, kind: str) -> set[str]:
    return {os.path.basename(each.path) for each in audited.findings if each.kind == kind}


def test_good_pictures_give_no_findings(tmp_path):
    audited = audit(read(str(good(tmp_path))))
    assert audited.findings == ()
    assert audited.ok


def test_every_bad_kind_is_named_and_nothing_else(tmp_path):
    audited = audit(read(str(spoilt(tmp_path))))
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
    assert {kind: found(audited, kind) for kind in audited.counts} == expected
    assert not audited.ok
    severities = [each.severity for each in audited.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


def test_the_same_is_found_in_one_process_and_in_three(tmp_path):
    spoilt(tmp_path)
    one, three = (audit(read(str(tmp_path)), cache=False, workers=workers) for workers in (0, 3))
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
def test_a_picture_cut_anywhere_cannot_be_used(form, options, part):
    whole = encoded(photograph(1), form, **options)
    assert looked_at(whole).problem == ""
    seen = looked_at(whole[: int(part * len(whole))])
    assert seen.problem in ("truncated", "unreadable")
    if form in ("JPEG", "PNG") and part >= 0.5:
        assert seen.problem == "truncated"


def test_a_download_that_stopped_and_left_zeros_is_truncated():
    whole = encoded(photograph(1))
    assert looked_at(whole[: len(whole) // 2] + bytes(len(whole) // 2)).problem == "truncated"
    assert looked_at(whole + bytes(500)).problem == ""  # padding after the end mark is some cameras' habit


def test_a_changed_byte_in_a_png_is_found():
    whole = bytearray(encoded(photograph(1), "PNG"))
    whole[len(whole) // 2] ^= 1
    seen = looked_at(bytes(whole))
    assert (seen.problem, seen.detail) == ("unreadable", "the checksum of its chunk IDAT does not match")


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
def test_what_is_no_picture_is_told_for_what_it_is(data, detail):
    seen = looked_at(data)
    assert seen.problem == "not-an-image"
    assert detail in seen.detail


def test_a_bomb_is_refused_from_its_header(monkeypatch):
    def never(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "draft", never)
    seen = looked_at(bomb())
    assert (seen.problem, seen.detail) == ("bomb", "3,600 megapixels: above 179, nothing is decoded")


def test_a_compressed_text_that_would_fill_the_memory_is_refused():
    import zlib

    head, tail = encoded(photograph(1), "PNG")[:33], encoded(photograph(1), "PNG")[33:]
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000)))
    assert looked_at(head + text + tail).problem in ("", "unreadable")


def test_enormous_but_decodable_pictures_are_a_warning(tmp_path, monkeypatch):
    good(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_000)  # the pictures have 19,200
    audited = audit(read(str(tmp_path)), cache=False)
    assert set(audited.counts) == {"large"}
    assert audited.ok


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_mode_that_can_be_made_rgb_is_looked_at(mode):
    picture = photograph(1).convert("L" if mode in ("1", "LA", "I;16", "I", "F") else "RGB").convert(mode)
    form = "TIFF" if mode in ("F", "I", "YCbCr", "CMYK") else "PNG"
    seen = looked_at(encoded(picture, form))
    assert (seen.problem, len(seen.thumb), seen.mode) == ("", 81, mode)


def test_a_mode_that_cannot_be_made_rgb_cannot_be_used():
    seen = looked_at(encoded(Image.new("LAB", (20, 20), (10, 20, 30)), "TIFF"))
    assert (seen.problem, seen.detail) == ("unreadable", "conversion from LAB to RGB not supported")


def test_sixteen_bits_look_like_eight():
    grey = photograph(3).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    a, b = (np.frombuffer(looked_at(encoded(p, "PNG")).thumb, np.uint8) for p in (grey, deep))
    assert len(alike(np.stack([a, b]))) == 1


def test_labels_of_published_arrays_are_compared_and_their_copies_are_warnings():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    pixels[1] = pixels[0]  # in one split, another label
    test = pixels[[2, 4]].copy()
    test[1] += 1
    audited = audit(dataset("idx", train=(Array(pixels), [0, 1, 0, 1, 0, 1], "ab"), test=(Array(test), [0, 1], "ab")))
    assert {(each.kind, each.path, each.severity) for each in audited.findings} == {
        ("contradiction", "array[0]", "warning"),
        ("contradiction", "array[1]", "warning"),
        ("leak", "array[2]", "warning"),
    }
    assert audited.ok


def test_sets_of_labels_contradict_when_they_differ_also_with_other_columns():
    one, two = encoded(photograph(1)), encoded(photograph(2))
    splits = {
        "train": (Bytes((one, two)), np.array([[1, 1], [1, 0]], np.uint8), ("cat", "dog")),
        "validation": (Bytes((one, two)), np.array([[1, 1], [0, 1]], np.uint8), ("dog", "cat")),
    }
    audited = audit(dataset(**splits))
    assert [each.kind for each in audited.findings] == ["leak", "leak"]  # the same sets, in another order
    splits["validation"] = (Bytes((one, two)), np.array([[1, 0], [0, 1]], np.uint8), ("dog", "cat"))
    details = [each.detail for each in audit(dataset(**splits)).findings if each.kind == "contradiction"]
    assert details == ["labelled cat|dog; picture 0, labelled dog", "labelled dog; picture 0, labelled cat|dog"]


def test_what_is_held_out_is_kept_when_a_picture_leaks(tmp_path):
    good(tmp_path)
    copy = (tmp_path / "validation/cat/0.jpg").read_bytes()
    for number in range(2):
        put(tmp_path / f"train/cat/copy{number}.jpg", copy)
    audited = audit(read(str(tmp_path)))
    assert found(audited, "leak") == {"copy0.jpg", "copy1.jpg"}
    held, left_out = without(read(str(tmp_path)), audited.quarantine())
    assert len(left_out) == 2
    assert audit(held).ok


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
    pictures = tuple(encoded(p) for p in originals) + tuple(changed[i % 6](p) for i, p in enumerate(originals))
    audited = audit(dataset(train=(Bytes(pictures), [0] * 24, "a")))
    near = {each.place[1] for each in audited.findings if each.kind == "near-duplicate"}
    assert near == set(range(12, 24))
    assert not audit(dataset(train=(Bytes(pictures), [0] * 24, "a")), near=None).findings


def test_plain_pictures_are_not_alike_because_they_are_plain():
    plain = tuple(encoded(Image.new("RGB", (64, 64), (value,) * 3)) for value in range(0, 250, 10))
    assert not audit(dataset(train=(Bytes(plain), [0] * 25, "a"))).findings


def test_alike_finds_what_comparing_all_pairs_finds():
    random = np.random.default_rng(0)
    thumbs = random.integers(0, 256, (400, 81), dtype=np.uint8)
    thumbs[200:] = np.clip(thumbs[:200].astype(int) + random.integers(-4, 5, (200, 81)), 0, 255)
    pairs = {(a, b) for a, b, _ in alike(thumbs, 12).tolist()}
    assert pairs == {(i, i + 200) for i in range(200)}


def test_many_copies_of_one_look_stay_quick_and_are_all_told():
    thumbs = np.tile(np.random.default_rng(0).integers(0, 256, 81, dtype=np.uint8), (5000, 1))
    pairs = alike(thumbs)
    assert set(pairs[:, :2].ravel()) == set(range(5000))
    assert len(pairs) < 5000 * 65


def test_same_names_the_first_of_each_group():
    digests = np.array([[5, 1], [5, 2], [5, 1], [0, 0], [5, 2]], dtype=np.uint64)
    assert same(digests).tolist() == [0, 1, 0, 3, 1]


def test_clean_leaves_out_what_cannot_be_used_and_counts_the_rest(tmp_path):
    audited = audit(read(str(spoilt(tmp_path))))
    cleaned = audited.clean()
    assert len(cleaned["validation"]) == len(audited.dataset["validation"])
    assert len(cleaned["train"]) == len(audited.dataset["train"]) - 5
    names = {os.path.basename(cleaned["train"].name(i)) for i in range(len(cleaned["train"]))}
    assert not names & {"zero.jpg", "short.jpg", "short.png", "words.jpg", "bomb.png"}
    assert {"no cat.jpg", "0.jpg"} <= names
    for index in range(len(cleaned["train"])):
        cleaned["train"].open(index).load()


def test_a_class_of_broken_pictures_alone_is_empty(tmp_path):
    good(tmp_path)
    for split in ("train", "validation"):
        put(tmp_path / split / "elk" / "a.jpg", b"")
    audited = audit(read(str(tmp_path)))
    assert [(each.kind, each.path) for each in audited.findings][-1] == ("empty-class", "train/elk")


def test_imbalance_is_told_with_both_classes(tmp_path):
    good(tmp_path)
    for number in range(36):
        put(tmp_path / "train" / "dog" / f"more{number}.jpg", encoded(photograph(500 + number)))
    assert audit(read(str(tmp_path)), imbalance=11).findings == ()
    (each,) = audit(read(str(tmp_path))).findings
    assert (each.kind, each.path) == ("imbalance", "train/cat")
    assert each.detail == "4 pictures; dog has 40, 10 times as many"


def test_pipes_links_to_nowhere_and_odd_names_neither_hang_nor_break(tmp_path):
    audited = audit(read(str(odd_names(tmp_path))))
    assert found(audited, "not-an-image") == {"pipe.jpg"}
    assert found(audited, "unreadable") == {"nowhere.jpg"}
    assert audited.counts["zero-byte"] == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_unreadable(tmp_path):
    good(tmp_path)
    (tmp_path / "train/cat/0.jpg").chmod(0)
    (each,) = audit(read(str(tmp_path))).findings
    assert (each.kind, each.detail) == ("unreadable", "Permission denied")


def test_a_quarantine_comes_back_whatever_the_names_hold(tmp_path):
    names = {
        "a\nb\tc.jpg": "zero-byte: no\ncontent",
        "back\\nslash.jpg": "bomb",
        "é 犬.png": "leak",
        "\\": "x",
        "#1.jpg": "y",
    }
    file = tmp_path / "bad.txt"
    file.write_text(written(names), encoding="utf-8")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 5
    file.write_text("# looked through on Monday\n\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_quarantine(file).keys() == names.keys()


def test_a_quarantine_of_other_data_is_an_error(tmp_path):
    good(tmp_path)
    other = put(tmp_path / "other.jpg", b"x")
    with pytest.raises(ValueError, match=r"none of the 1 paths to leave out is a picture of"):
        without(read(str(tmp_path)), [str(other)])
    assert without(read(str(tmp_path)), [str(tmp_path / "deleted.jpg")])[1] == []


# The cache


def no_looking(*_):
    raise AssertionError("looked again")


def test_a_second_audit_looks_at_nothing(tmp_path, monkeypatch):
    spoilt(tmp_path)
    os.remove(tmp_path / "train/dog/notes.txt")
    first = audit(read(str(tmp_path)))
    monkeypatch.setattr(seen_module, "looks", lambda _, tasks, __: [no_looking() for _ in tasks])
    assert audit(read(str(tmp_path))).findings == first.findings
    monkeypatch.chdir(tmp_path.parent)  # however it is written
    relative = audit(read(tmp_path.name))
    assert [each.kind for each in relative.findings] == [each.kind for each in first.findings]


def test_a_changed_file_is_looked_at_again(tmp_path):
    good(tmp_path)
    assert audit(read(str(tmp_path))).ok
    file = tmp_path / "train/cat/0.jpg"
    before = file.stat()
    file.write_bytes(file.read_bytes()[:-500] + bytes(500))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # the same size, a nanosecond later
    assert found(audit(read(str(tmp_path))), "truncated") == {"0.jpg"}


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + bytes(4096)])
def test_a_broken_cache_is_made_again(tmp_path, content, monkeypatch):
    good(tmp_path)
    audit(read(str(tmp_path)))
    (file,) = cache.directory().iterdir()
    file.write_bytes(content)
    assert audit(read(str(tmp_path))).ok
    monkeypatch.setattr(seen_module, "looks", lambda _, tasks, __: [no_looking() for _ in tasks])
    assert audit(read(str(tmp_path))).ok


def test_a_cache_damaged_in_the_middle_does_not_stop_an_audit(tmp_path):
    good(tmp_path, each=60)
    audit(read(str(tmp_path)))
    (file,) = cache.directory().iterdir()
    data = bytearray(file.read_bytes())
    data[5000:-100] = os.urandom(len(data) - 5100)
    file.write_bytes(data)
    assert audit(read(str(tmp_path))).ok


def test_without_a_place_for_the_cache_nothing_is_said(tmp_path, monkeypatch, capfd):
    good(tmp_path / "data")
    put(tmp_path / "file", b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert audit(read(str(tmp_path / "data"))).ok
    assert capfd.readouterr() == ("", "")


def test_a_cache_that_another_process_writes_is_waited_for_and_then_left(tmp_path):
    good(tmp_path)
    audit(read(str(tmp_path)))
    (file,) = cache.directory().iterdir()
    other = sqlite3.connect(file)
    other.execute("BEGIN EXCLUSIVE")
    assert audit(read(str(tmp_path))).ok
    other.close()


def test_no_cache_leaves_no_file(tmp_path):
    good(tmp_path)
    audit(read(str(tmp_path)), cache=False)
    assert not cache.directory().exists()


# The processes


@dataclass(frozen=True)
class Crashing(Bytes):
    """One of its pictures kills who reads it."""

    def data(self, item: int) -> bytes:
        if self.pictures[item] == b"deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.pictures[item]


def test_a_decoder_that_crashes_costs_its_picture_alone():
    pictures = [encoded(photograph(seed)) for seed in range(80)]
    pictures[37] = pictures[70] = b"deadly"
    audited = audit(dataset(train=(Crashing(tuple(pictures)), [0] * 80, "a")), workers=2)
    assert {(each.kind, each.path) for each in audited.findings} == {
        ("unreadable", "picture 37"),
        ("unreadable", "picture 70"),
    }
    assert "SIGKILL" in audited.findings[0].detail


def test_leaving_early_leaves_no_process_behind():
    pictures = Pictures(Bytes((encoded(photograph(0)),) * 200), np.arange(200), np.zeros(200, int), ("a",))
    running = crew.looks([pictures], ((0, [i]) for i in range(200)), 2)
    assert next(running)[1][0].problem == ""
    running.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_interrupted_keeps_what_was_seen(tmp_path, monkeypatch):
    good(tmp_path, each=60)
    seen: list[int] = []

    def interrupt(_doing, done, _total):
        seen.append(done)
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(read(str(tmp_path)), progress=interrupt)
    second: list[int] = []
    audit(read(str(tmp_path)), progress=lambda _doing, done, _total: second.append(done))
    assert second[0] >= seen[-2] > 0


def test_every_kind_has_a_remedy():
    for kind in KINDS.values():
        assert kind.severity in ("error", "warning", "note")
        assert 0 < len(kind.title) <= 40
        assert 0 < len(kind.remedy) <= 68
    assert Look().problem == ""
