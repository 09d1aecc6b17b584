"""`vitrail search` with a model of clips: videos of a folder, and queries that are videos."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.clips import CLIP, frames, save_model, write_folder, write_mp4, write_videos
from vitrail.cli import main


def test_videos_are_indexed_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, index = save_model(tmp_path / "model.safetensors", replace(CLIP, clips=2)), tmp_path / "index"
    write_videos(tmp_path / "videos", 4)
    query = write_folder(tmp_path / "query", frames(12, 2))  # as video2
    assert main(["search", "index", str(model), str(tmp_path / "videos"), "--out", str(index)]) == 0
    assert "4 videos by" in capsys.readouterr().out
    sheet = ["--out", str(tmp_path / "sheet.html")]
    assert main(["search", "find", str(index), str(query), "--json", *sheet]) == 0
    (found,) = json.loads(capsys.readouterr().out)["answers"]
    assert next(Path(item["path"]).name for item in found["neighbours"]) == "video2"
    assert found["neighbours"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert (tmp_path / "sheet.html").read_text().count("<img") == 5

    write_folder(tmp_path / "videos" / "more", frames(9, 7))
    assert main(["search", "index", str(model), str(tmp_path / "videos"), "--out", str(index), "--update"]) == 0
    assert "1 new, 0 changed, 0 deleted, 4 unchanged" in capsys.readouterr().out
    (tmp_path / "videos" / "more" / "frame_3.png").unlink()
    assert main(["search", "index", str(model), str(tmp_path / "videos"), "--out", str(index), "--update"]) == 0
    assert "0 new, 1 changed, 0 deleted, 4 unchanged" in capsys.readouterr().out

    assert main(["search", "find", str(index), str(query / "frame_0.png")]) == 2
    assert "takes videos, as clips of 4 frames, and" in capsys.readouterr().err
    assert main(["search", "find", str(index), str(tmp_path / "none")]) == 2
    assert "does not exist: give a query video" in capsys.readouterr().err


def test_files_of_video_are_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")
    model, videos = save_model(tmp_path / "model.safetensors"), tmp_path / "videos"
    videos.mkdir()
    for number in range(2):
        write_mp4(videos / f"{number}.mp4", frames(12, number))
    assert main(["search", "index", str(model), str(videos), "--out", str(tmp_path / "index")]) == 0
    assert "2 videos by" in capsys.readouterr().out
