"""Videos as data: class folders, folders of frames, lists, tar shards; batches that do not depend on the workers."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_video import encode, numbered, values
from vitrail.data.audit import check
from vitrail.data.clip import Clip
from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset
from vitrail.data.transforms.augment import ColourJitter, Flip, RandAugment, RandomErasing
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.data.video import is_video_data

pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")

FORMATS = (("mp4", "mp4"), ("avi", "avi"), ("mkv", "matroska"))


@pytest.fixture(scope="module")
def encoded() -> list[tuple[str, bytes]]:
    """Return twelve different videos, with their suffixes."""
    videos = []
    for number in range(12):
        suffix, container = FORMATS[number % 3]
        frames = np.roll(numbered(12 + number, (32, 56)), number, 0)
        videos.append((suffix, encode(frames, container, b_frames=number % 2, gop=4)))
    return videos


@pytest.fixture
def folder(encoded: list[tuple[str, bytes]], tmp_path: Path) -> Path:
    """Return class folders of videos."""
    for number, (suffix, data) in enumerate(encoded):
        path = tmp_path / "videos" / "ab"[number % 2] / f"{number:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "videos"


def read_whole(source: str, **options: object) -> Images:
    return load_dataset(source, fractions=(1.0, 0.0, 0.0), **options)["train"]  # pyright: ignore[reportArgumentType]


def test_class_folders_of_videos(folder: Path) -> None:
    images = read_whole(str(folder))
    assert (images.media, len(images), images.classes) == ("video", 12, ("a", "b"))
    with images.open_video(0) as video:
        assert len(video) == 12
    split = load_dataset(str(folder), fractions=(0.5, 0.5, 0.0)).splits
    assert sorted(map(len, split.values())) != [0, 12]


def test_lists_and_names_of_videos(folder: Path, tmp_path: Path) -> None:
    paths = sorted(folder.rglob("*.*"))
    lines = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in paths]
    (tmp_path / "list.csv").write_text("\n".join(["video,label", *lines]))
    rows = [f'{{"path": "{path}", "label": "{path.parent.name}|x"}}' for path in paths]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    (tmp_path / "numbers.csv").write_text("\n".join(["path,speed", *(f"{path},{k}.5" for k, path in enumerate(paths))]))
    by_name = load_dataset([(str(path), path.parent.name) for path in paths], fractions=(1.0, 0.0, 0.0))["train"]
    for images in (read_whole(str(tmp_path / "list.csv")), by_name, read_whole(str(folder), label_from="^.(.)")):
        assert (images.media, len(images)) == ("video", 12)
    assert read_whole(str(tmp_path / "list.jsonl")).is_multi_label
    numbers = read_whole(str(tmp_path / "numbers.csv"), targets="speed")
    assert (numbers.media, numbers.target_kind) == ("video", "numbers")


def test_tar_shards_of_videos(encoded: list[tuple[str, bytes]], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number, (suffix, data) in enumerate(encoded):
            for name, content in ((f"{number}.{suffix}", data), (f"{number}.cls", str(number % 2).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    images = read_whole(str(tmp_path / "train-0.tar"))
    assert (images.media, images.classes) == ("video", ("0", "1"))
    with images.open_video(3) as video:
        assert values(video.read_frames([0, 5])) == [12, 2]  # 15 frames, rolled by 3


def write_table(path: Path, column: str, cells: list[bytes | None], nested: bool = True, **more: object) -> str:
    """Write a Parquet table with a column of videos, three rows in each group."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if nested else pa.large_binary()
    values = [{"bytes": cell, "path": None} for cell in cells] if nested else cells
    columns = {column: pa.array(values, kind), "label": [number % 2 for number in range(len(cells))]}
    pq.write_table(pa.table(columns | more), path, row_group_size=3)
    return str(path)


@pytest.mark.parametrize(("column", "nested"), [("video", True), ("mp4", False), ("bytes", False), ("content", True)])
def test_parquet_with_embedded_videos(
    encoded: list[tuple[str, bytes]], tmp_path: Path, column: str, nested: bool
) -> None:
    path = write_table(tmp_path / "train.parquet", column, [data for _, data in encoded], nested)
    images = read_whole(path)
    assert (images.media, images.classes, len(images)) == ("video", ("0", "1"), 12)
    with images.open_video(3) as video:
        assert values(video.read_frames([0, 5])) == [12, 2]  # 15 frames, rolled by 3
    assert images.name(7).endswith("train.parquet[7]")
    loader = Loader(images, None, TRAINING, batch_size=4, seed=5, epochs=1, workers=2)
    assert sum(len(batch.pixels) for batch in loader.iter_epoch(0)) == 12
    loader.close()
    numbers = load_dataset(path, fractions=(1.0, 0.0, 0.0), targets="label")["train"]
    assert (numbers.media, numbers.target_kind) == ("video", "numbers")


def test_rows_without_a_video_and_damaged_ones_are_named(encoded: list[tuple[str, bytes]], tmp_path: Path) -> None:
    cells = [encoded[0][1], None, encoded[1][1][:60], b"", encoded[2][1], encoded[4][1]]
    audit = check(write_table(tmp_path / "train.parquet", "video", cells), cache=False, workers=0)
    found = {
        finding.path.rpartition("/")[2]: finding.kind for finding in audit.findings if finding.kind != "short-video"
    }
    assert {name: kind for name, kind in found.items() if kind in ("unreadable", "zero-byte")} == {
        "train.parquet[1]": "unreadable",
        "train.parquet[2]": "unreadable",
        "train.parquet[3]": "zero-byte",
    }
    reasons = {finding.path.rpartition("/")[2]: finding.detail for finding in audit.findings}
    assert "the row has no video" in reasons["train.parquet[1]"]
    both = write_table(tmp_path / "both.parquet", "video", [encoded[0][1]], image=[b"x"])
    with pytest.raises(ValueError, match=r"the table has images \(image\) and videos \(video\): leave out one"):
        read_whole(both)


def test_first_bytes_tell_videos_from_images(encoded: list[tuple[str, bytes]], tmp_path: Path) -> None:
    noise = numbered(4, (32, 56))
    streams = [encode(noise, "mpegts", "mpeg2video"), encode(noise, "mpeg", "mpeg2video"), encode(noise, "flv", "flv")]
    assert all(is_video_data(data[:256]) for data in [*streams, *(data for _, data in encoded)])
    for suffix in ("png", "jpeg", "webp", "avif", "gif", "tiff", "bmp"):
        out = io.BytesIO()
        Image.new("RGB", (8, 8)).save(out, suffix)
        assert not is_video_data(out.getvalue()[:256]), suffix


def write_frames(folder: Path, pattern: str, count: int = 5) -> None:
    folder.mkdir(parents=True)
    for number in range(1, count + 1):
        Image.new("RGB", (12, 8), (number * 20, len(folder.name), 0)).save(folder / pattern.format(number))


def test_folders_of_frames_are_videos(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "b/three"):
        write_frames(tmp_path / "auto" / name, "frame_{:04}.png")
        write_frames(tmp_path / "other" / name, "img_{:05}.png")
    dataset = load_dataset(str(tmp_path / "auto"), fractions=(1.0, 0.0, 0.0))
    assert (dataset["train"].media, dataset["train"].class_counts) == ("video", {"a": 2, "b": 1})
    assert dataset.notes[0].startswith("3 folders of frames are read as videos; classes:")
    with dataset["train"].open_video(2) as video:
        assert video.read_frames([0, 4])[:, 0, 0, 0].tolist() == [20, 100]
    assert read_whole(f"classes:{tmp_path / 'auto'}").media == "image"
    assert read_whole(str(tmp_path / "other")).media == "image"
    assert len(read_whole(f"frames:{tmp_path / 'other'}")) == 3
    (tmp_path / "list.csv").write_text("path,label\nother/a/one,a\nother/b/three,b\n")
    listed = read_whole(str(tmp_path / "list.csv"))
    assert (listed.media, len(listed.open_video(0))) == ("video", 5)


def test_images_among_videos_are_refused(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a/poster.jpg")
    with pytest.raises(ValueError, match=r"videos has images \(poster.jpg\) and videos \(.*\): keep one kind"):
        load_dataset(str(folder))


def test_without_pyav_the_message_names_the_extra(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ValueError, match=r"videos need PyAV: pip install 'vitrail\[video\]'"):
        load_dataset(str(folder))
    write_frames(tmp_path / "frames/a/one", "frame_{}.png")
    write_frames(tmp_path / "frames/b/two", "frame_{}.png")
    assert len(read_whole(str(tmp_path / "frames")).open_video(0)) == 5


STEPS = (RandomResizedCrop((24, 24)), Flip(), RandAugment(2, 9), ColourJitter(), RandomErasing(0.5))
TRAINING = TrainPipeline(STEPS, (24, 24), clip=Clip(4, 3))


def test_batches_of_clips_are_the_same_for_any_number_of_workers_and_processes(folder: Path) -> None:
    images = read_whole(str(folder))

    def read(**options: int) -> list[torch.Tensor]:
        loader = Loader(images, None, TRAINING, batch_size=4, seed=5, epochs=2, **options)
        batches = [batch.pixels for epoch in range(2) for batch in loader.iter_epoch(epoch)]
        loader.close()
        assert not loader.unreadable
        return batches

    alone = read()
    assert alone[0].shape == (4, 3, 4, 24, 24)
    assert alone[0].dtype == torch.uint8
    assert not torch.equal(alone[0], alone[3])
    assert all(map(torch.equal, alone, read(workers=2)))
    shares = zip(read(rank=0, world_size=2), read(rank=1, world_size=2), strict=True)
    assert all(torch.equal(whole, torch.cat(parts)) for whole, parts in zip(alone, shares, strict=True))


def test_evaluation_gives_clips_or_views_and_leaves_out_unreadable_videos(folder: Path) -> None:
    (folder / "a/00.mp4").write_bytes(b"not a video")
    images = read_whole(str(folder))
    loader = Loader(images, None, Preprocessing((24, 24), (24, 24), clip=Clip(4, 2)), batch_size=5)
    shapes = [tuple(batch.pixels.shape) for batch in loader.iter_once()]
    assert shapes == [(4, 3, 4, 24, 24), (5, 3, 4, 24, 24), (2, 3, 4, 24, 24)]
    assert [Path(name).name for name in loader.unreadable] == ["00.mp4"]
    views = Loader(images, None, Preprocessing((24, 24), (24, 24), clip=Clip(4, 2, clips=2, crops=3)), batch_size=6)
    assert next(iter(views.iter_once())).pixels.shape == (5, 6, 3, 4, 24, 24)


def test_a_pipeline_of_images_refuses_videos_and_the_other_way_round(folder: Path) -> None:
    with pytest.raises(ValueError, match="the data has videos, but the model takes images"):
        Loader(read_whole(str(folder)), None, Preprocessing(), batch_size=2)
    with pytest.raises(ValueError, match="the data has images, but the model takes clips of 16 frames"):
        Loader(read_whole("digits"), None, Preprocessing(clip=Clip()), batch_size=2)
