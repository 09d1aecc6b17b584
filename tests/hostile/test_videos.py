"""Hostile and broken videos through the command line: no crash, no hang, each is named, and none is lost."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_video import encode, mutate
from tests.deploy.clips import save_model
from vitrail.cli import main
from vitrail.data.clip import Clip

av = pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")

CLIP = Clip(4, 2)
NOISE = np.random.default_rng(0).integers(0, 256, (20, 4, 7, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
LIMITS = {"capture_output": True, "text": True, "timeout": 120, "check": False}


def encode_sound() -> bytes:
    """Return a Matroska file without video."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def set_number(data: bytes, box: bytes, offset: int, value: int) -> bytes:
    """Return an MP4 file with another 32-bit number in every box of this name, so many bytes after the name."""
    changed, start = bytearray(data), data.find(box)
    while start >= 0:
        changed[start + offset : start + offset + 4] = value.to_bytes(4, "big")
        start = data.find(box, start + 4)
    return bytes(changed)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two class folders with a video of every kind of problem; the names of unreadable ones begin with "bad"."""
    good, stream = encode(NOISE), encode(NOISE, "mpegts", "mpeg2video", gop=4)
    garbage = np.random.default_rng(1).integers(0, 256, len(stream) // 3, dtype=np.uint8).tobytes()
    files = {
        "good.mp4": good,
        "one-frame.mp4": encode(NOISE[:1]),
        "three-frames.mp4": encode(NOISE[:3]),
        "corrupt-tail.m2ts": stream[: 2 * len(stream) // 3] + garbage,
        "lies-duration.mp4": set_number(set_number(good, b"mvhd", 20, 2**31 - 1), b"mdhd", 20, 2**31 - 1),
        "bad-empty.mp4": b"",
        "bad-sound.mkv": encode_sound(),
        "bad-lies-many.mp4": set_number(good, b"stsz", 12, 2_000_000_000),
        "bad-lies-few.mp4": set_number(good, b"stsz", 12, 5),
    }
    if "libx264" in av.codecs_available:
        odd = np.ascontiguousarray(NOISE[:, :31, :51])
        files["ten-bit.mkv"] = encode(NOISE, "matroska", "libx264", pixel_format="yuv420p10le")
        files["odd-size.mkv"] = encode(odd, "matroska", "libx264", pixel_format="yuv444p")
    root = tmp_path_factory.mktemp("hostile") / "videos"
    for label, other in (("a", NOISE), ("b", NOISE[::-1])):
        (root / label).mkdir(parents=True)
        for name, data in files.items():
            if label == "a" or name.startswith("bad"):
                (root / label / name).write_bytes(data)
        for number in range(4):
            (root / label / f"more{number}.mp4").write_bytes(encode(np.roll(other, 5 * number + 1, 2)))
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors", CLIP)


def list_names(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*.*")}


def test_predict_has_a_row_with_the_reason_for_each(videos: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert main(["predict", str(model), str(videos / "a"), "--out", str(out)]) == 0
    rows = {Path(row["path"]).name: row for row in csv.DictReader(out.open())}
    assert set(rows) == list_names(videos / "a")
    for name, row in rows.items():
        assert bool(row["error"]) == name.startswith("bad"), (name, row)
        assert bool(row["label"]) != bool(row["error"])
    assert rows["bad-empty.mp4"]["error"] == "an empty file"
    assert rows["bad-sound.mkv"]["error"] == "has no video stream"
    assert rows["bad-lies-few.mp4"]["error"] == "ends after 5 of 20 frames, fewer than a clip"
    assert "not a readable video" in rows["bad-lies-many.mp4"]["error"]


def test_check_names_each(videos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clip", str(CLIP), "--no-cache", "--workers", "0", "--json"]
    assert main(["check", str(videos), *options]) == 1
    findings = json.loads(capsys.readouterr().out)["problems"]
    unreadable = {
        Path(each["path"]).name for each in findings if each["kind"] in ("unreadable", "zero-byte", "video-cut")
    }
    assert unreadable >= {name for name in list_names(videos) if name.startswith("bad")}
    short = {Path(each["path"]).name for each in findings if each["kind"] == "short-video"}
    assert {"one-frame.mp4", "three-frames.mp4"} <= short


def test_training_and_evaluation_leave_out_what_is_unreadable(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--clip", str(CLIP), "--size", "16", "--steps", "2", "--batch-size", "4", "--workers", "0"]
    for name, value in (("width", 16), ("depth", 1), ("heads", 1), ("mlp", 32)):
        options += ["--set", f"model.size.{name}={value}"]
    out = tmp_path / "run"
    assert main(["train", str(videos), "--fractions", "0.7,0.3,0", "--out", str(out), *options]) == 0
    skipped = {Path(each["path"]).name for each in json.loads((out / "run.json").read_text())["data"]["skipped"]}
    unreadable = set(json.loads((out / "summary.json").read_text())["unreadable"])
    named = skipped | {Path(path).name for path in unreadable}
    assert named <= {name for name in list_names(videos) if name.startswith("bad")}
    assert {"bad-empty.mp4", "bad-sound.mkv", "bad-lies-many.mp4"} <= named
    capsys.readouterr()
    listed = tmp_path / "list.csv"
    paths = sorted(videos.rglob("*.*"))
    listed.write_text("\n".join(["path,label", *(f"{path},{path.parent.name}" for path in paths)]))
    assert main(["evaluate", str(out), str(listed), "--workers", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    total = len(paths)
    assert result["n"] + len(result["unreadable"]) == total
    assert all(result["unreadable"].values())


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_videos_are_predicted_or_named(count: int, model: Path, tmp_path: Path) -> None:
    kinds = [
        ("mp4", "mp4", "mpeg4"),
        ("mkv", "matroska", "mpeg4"),
        ("avi", "avi", "mpeg4"),
        ("m2ts", "mpegts", "mpeg2video"),
    ]
    if "libx264" in av.codecs_available:
        kinds.append(("m4v", "mp4", "libx264"))
    made = [(suffix, encode(NOISE, *kind, gop=5, b_frames=1)) for suffix, *kind in kinds]
    folder, out = tmp_path / "videos", tmp_path / "rows.jsonl"
    folder.mkdir()
    for seed in range(count):
        suffix, data = made[seed % len(made)]
        (folder / f"{seed}.{suffix}").write_bytes(mutate(data, seed))
    command = [sys.executable, "-m", "vitrail", "predict", str(model), str(folder), "--out", str(out)]
    result = subprocess.run(command, **LIMITS)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {Path(row["path"]).name for row in rows} == list_names(folder)
    assert len(rows) == count
    errors = [row["error"] for row in rows if row.get("error")]
    assert count // 10 < len(errors) < count - count // 10
    assert all(len(error.splitlines()) == 1 for error in errors)
    assert "Traceback" not in result.stderr


def write_hour(path: Path) -> None:
    """Write 18,000 frames of 96×96 pixels, an hour at 5 frames per second: 1,500 times the same packets."""
    small = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    with av.open(io.BytesIO(encode(small, gop=12))) as source:
        packets = [(bytes(packet), packet.is_keyframe) for packet in source.demux(video=0) if packet.size]
        with av.open(str(path), "w") as out:
            stream = out.add_stream_from_template(source.streams.video[0])
            length = round(1 / (5 * source.streams.video[0].time_base))
            for number in range(18_000):
                data, is_key = packets[number % len(packets)]
                packet = av.Packet(data)
                packet.stream, packet.time_base = stream, source.streams.video[0].time_base
                packet.pts = packet.dts = number * length
                packet.duration, packet.is_keyframe = length, is_key
                out.mux(packet)


HOUR = """
import resource, sys, numpy as np
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.video import open_video
from vitrail.data.video_file import VideoFile
decoded = 0
original = VideoFile._iter_decoded
def count(self, wanted):
    global decoded
    for frame in original(self, wanted):
        decoded += 1
        yield frame
VideoFile._iter_decoded = count
prepare = Preprocessing((32, 32), (36, 36), clip=Clip(16, 4, clips=5))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open_video(sys.argv[1]) as video:
    prepare.to_views(video)
before, decoded = peak(), 0
with open_video(sys.argv[2]) as video:
    views = prepare.to_views(video)
    print(len(video), round(len(video) / video.rate), tuple(views.shape)[:3], decoded, peak() - before)
"""


def test_an_hour_is_read_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "short.mp4").write_bytes(encode(NOISE))
    write_hour(tmp_path / "hour.mp4")
    files = [str(tmp_path / name) for name in ("short.mp4", "hour.mp4")]
    result = subprocess.run([sys.executable, "-c", HOUR, *files], **LIMITS)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert result.returncode == 0, result.stderr[-2000:]
    frames, seconds, *shape, decoded, kilobytes = (
        result.stdout.replace("(", "").replace(")", "").replace(",", "").split()
    )
    assert (frames, seconds, shape) == ("18000", "3600", ["5", "3", "16"])
    assert int(decoded) < 5 * (61 + 12 + 8)  # the frames of five clips, from the keyframe before each
    assert int(kilobytes) < 64 * 1024  # 500 MB if all frames were kept
