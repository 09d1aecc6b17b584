"""Checks of videos: unreadable, cut, short and turned ones, copies and leaks, and a summary of lengths and sizes."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_video import encode, numbered
from vitrail.cli import main
from vitrail.data.audit import check
from vitrail.data.clip import Clip

pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")


def scene(seed: int, count: int = 20) -> np.ndarray:
    """Return frames of random blocks that move, other ones for each seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    return np.stack([np.roll(blocks, step, 1) for step in range(count)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return split folders with a video of every kind of problem."""
    root = tmp_path / "videos"
    plain = encode(scene(1))
    stream = encode(numbered(60), "mpegts", "mpeg2video", gop=6)
    times = [40 * i for i in range(10)] + [400 + 200 * i for i in range(10)]
    files = {
        "train/a/plain.mp4": plain,
        "train/a/copy.mp4": plain,
        "train/b/turned.mp4": encode(scene(2), rotation=90),
        "train/b/uneven.mkv": encode(scene(3), "matroska", times=times),
        "train/b/short.avi": encode(scene(4, 5), "avi"),
        "train/b/empty.mp4": b"",
        "train/a/broken.mp4": b"no video at all" * 100,
        "validation/a/leak.mp4": plain,
        "validation/b/stream.m2ts": stream[: len(stream) // 2],
        "validation/b/other.mp4": encode(scene(6)),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def found(audit, kind: str) -> list[str]:
    return sorted(Path(finding.path).name for finding in audit.select_findings([kind]))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_problem_is_found(folder: Path, workers: int) -> None:
    audit = check(str(folder), cache=False, workers=workers, clip=Clip(4, 3))
    assert found(audit, "unreadable") == ["broken.mp4"]
    assert found(audit, "zero-byte") == ["empty.mp4"]
    assert found(audit, "short-video") == ["short.avi"]
    assert found(audit, "variable-rate") == ["uneven.mkv"]
    assert found(audit, "video-turned") == ["turned.mp4"]
    assert found(audit, "leak") == ["copy.mp4", "plain.mp4"]
    assert not audit.is_ok
    assert len(audit.clean_dataset()["train"]) == 5
    summary = audit.videos["train"]
    assert summary.frames == (5, 20, 20)
    assert summary.widths == (48, 64, 64)
    assert summary.rates[1] == pytest.approx(25, rel=0.01)
    short = check(str(folder), cache=False, workers=0)  # a clip of 61 frames
    assert len(found(short, "short-video")) >= 6


def test_the_command_prints_a_summary_in_the_words_of_videos(folder: Path, capsys) -> None:
    assert main(["check", str(folder), "--clip", "4x3", "--no-cache", "--workers", "0"]) == 1
    printed = capsys.readouterr().out
    assert "videos: 10 videos, 2 classes" in printed
    assert "smallest · median · largest" in printed
    assert "unreadable videos" in printed
    assert "image" not in printed
    assert main(["check", str(folder), "--json", "--no-cache", "--workers", "0"]) == 1
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["videos"]["frames"] == [5, 20, 20]
    with pytest.raises(SystemExit):
        main(["check", str(folder), "--clip", "16"])
    assert "'16' is not a clip: give frames and stride, such as 16x4" in capsys.readouterr().err


def test_results_are_cached_and_generated_videos_need_none(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = check(str(folder), workers=0)
    monkeypatch.setattr("vitrail.data.audit.video.inspect_frames", lambda *_: pytest.fail("inspected again"))
    assert check(str(folder), workers=0).findings == first.findings
    assert check("moving-digits", workers=0).is_ok
