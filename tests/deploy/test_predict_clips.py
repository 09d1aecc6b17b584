"""`vitrail.predict` and `vitrail.embed` with models of clips: videos as files, folders of frames and arrays."""

import csv
import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.asked import model as image_model
from tests.deploy.clips import CLIP, clip_model, frames, save_model, write_mp4, write_videos
from vitrail.cli import main
from vitrail.data.clip import Clip
from vitrail.deploy.predict.inputs import collect_inputs
from vitrail.metrics.calibration import softmax
from vitrail.metrics.views import average_views
from vitrail.models.base import Model


def scores(net: Model, pixels: np.ndarray) -> np.ndarray:
    """Return the mean probabilities of all views of a video, by the model alone."""
    pipeline = net.preprocessing
    assert isinstance(pipeline, vitrail.Preprocessing)
    from vitrail.data.video import to_video

    with torch.inference_mode():
        return net(pipeline.normalise(pipeline.to_views(to_video(pixels)))).softmax(1).mean(0).numpy()


@pytest.mark.parametrize("clip", [CLIP, replace(CLIP, clips=3, crops=2)])
def test_predictions_are_the_mean_over_the_views(tmp_path: Path, clip: Clip) -> None:
    net, videos = clip_model(clip), write_videos(tmp_path / "videos")
    expected = np.stack([scores(net, pixels) for pixels in videos])
    folders = sorted((tmp_path / "videos").iterdir())
    for given in (videos, folders, tmp_path / "videos", [folders[0], videos[1], torch.from_numpy(videos[2])]):
        rows = list(vitrail.predict(net, given, top=3, workers=1))
        assert [row.error for row in rows] == [None] * 3
        found = [[dict(row.predictions)[label] for label in net.labels or ()] for row in rows]
        assert np.allclose(found, expected, atol=1e-5)
    (row,) = vitrail.predict(net, videos[0])
    assert row.label == (net.labels or ())[int(expected[0].argmax())]
    assert [row.path for row in vitrail.predict(net, [folders[0], videos[1]])] == [str(folders[0]), "video[1]"]


def test_features_are_the_mean_over_the_views(tmp_path: Path) -> None:
    net, pixels = clip_model(replace(CLIP, clips=2)), frames()
    (row,) = vitrail.embed(net, pixels)
    pipeline = net.preprocessing
    from vitrail.data.video import to_video

    with torch.inference_mode():
        expected = net.embed_images(pipeline.normalise(pipeline.to_views(to_video(pixels)))).mean(0).numpy()  # type: ignore[union-attr]
    assert row.features is not None
    assert np.allclose(row.features, expected, atol=1e-5)


def test_the_mean_of_views_has_the_mean_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32) * 5
    assert np.allclose(softmax(average_views(logits, "softmax")), softmax(logits).mean(1), atol=1e-6)
    one = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert np.allclose(1 / (1 + np.exp(-average_views(logits, "sigmoid").astype(np.float64))), one.mean(1), atol=1e-6)
    assert np.allclose(average_views(logits), logits.mean(1), atol=1e-6)
    extreme = np.array([[[2000.0, -2000.0], [2000.0, -2000.0]]], np.float32)
    assert np.isfinite(average_views(extreme, "softmax")).all()
    assert np.isfinite(average_views(extreme, "sigmoid")).all()
    extreme[0, 1, 0] = np.nan
    assert np.isnan(average_views(extreme, "softmax")).all()


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_the_command_writes_a_row_for_each_video(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path, out = save_model(tmp_path / "model.safetensors"), tmp_path / name
    videos = write_videos(tmp_path / "videos")
    (tmp_path / "videos" / "video1" / "frame_4.png").write_bytes(b"no image")
    assert main(["predict", str(path), str(tmp_path / "videos"), "--out", str(out)]) == 0
    assert "3 videos" in capsys.readouterr().out
    if name == "out.csv":
        rows = list(csv.DictReader(out.open()))
    elif name == "out.jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        from pyarrow import parquet

        rows = parquet.read_table(out).to_pylist()
    assert [row["path"] for row in rows] == [str(tmp_path / "videos" / f"video{number}") for number in range(3)]
    assert "frame_4.png" in rows[1]["error"]
    assert not rows[1]["label"]
    net = vitrail.load(path)
    for number in (0, 2):
        assert float(rows[number]["score"]) == pytest.approx(float(scores(net, videos[number]).max()), rel=1e-4)


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = save_model(tmp_path / "model.safetensors"), tmp_path / "out.csv"
    write_videos(tmp_path / "videos", 5)
    command = ["predict", str(path), str(tmp_path / "videos"), "--out", str(out), "--workers", "1", "--batch-size", "1"]
    from vitrail.data.preprocessing import Preprocessing

    calls, to_views = [0], Preprocessing.to_views

    def interrupt(self: Preprocessing, video: object) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return to_views(self, video)  # type: ignore[arg-type]

    monkeypatch.setattr(Preprocessing, "to_views", interrupt)
    gc.disable()  # the locks are released without the help of the garbage collector
    try:
        assert main(command) == 130
        assert main([*command, "--resume"]) == 0
    finally:
        gc.enable()
    assert calls[0] in (6, 7, 8)  # only what was not on disk is computed again
    resumed = out.read_text()
    assert main([*command, "--force"]) == 0
    assert out.read_text() == resumed
    assert len(resumed.splitlines()) == 6


def test_images_and_videos_are_not_confused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips, images = save_model(tmp_path / "clips.safetensors"), tmp_path / "images.safetensors"
    image_model(images)
    write_videos(tmp_path / "videos", 1)
    image = tmp_path / "videos" / "video0" / "frame_0.png"
    assert main(["predict", str(clips), str(image), "--out", "-"]) == 2
    assert "takes videos, as clips of 4 frames, and" in (error := capsys.readouterr().err)
    assert "frame_0.png" in error
    (tmp_path / "a.mp4").write_bytes(b"no video")
    pytest.importorskip("av")
    assert main(["predict", str(images), str(tmp_path / "a.mp4"), "--out", "-"]) == 2
    assert "takes images, and" in (error := capsys.readouterr().err)
    assert "a.mp4 is a video" in error
    with pytest.raises(ValueError, match=r"takes videos, as clips of 4 frames, and image.0. is an image"):
        list(vitrail.predict(clips, [Image.new("RGB", (8, 8))]))
    with pytest.raises(ValueError, match=r"takes images, and video.0. is a video"):
        list(vitrail.predict(images, [frames()]))
    with pytest.raises(ValueError, match="item 0 is a video, item 1 an image"):
        list(vitrail.predict(clips, [frames(), Image.new("RGB", (8, 8))]))
    with pytest.raises(ValueError, match=r"is an image and .*a.mp4 a video"):
        collect_inputs([image, tmp_path / "a.mp4"])
    # The same folders are one video, or the images in it.
    assert len(list(vitrail.predict(clips, tmp_path / "videos"))) == 1
    assert len(list(vitrail.predict(images, tmp_path / "videos"))) == 10


def test_unreadable_videos_are_named_and_the_others_predicted(tmp_path: Path) -> None:
    net, good = clip_model(), frames()
    rows = list(vitrail.predict(net, [good, good.astype(np.float32), tmp_path / "missing", good[:0], good]))
    assert [row.error is None for row in rows] == [True, False, False, False, True]
    assert "uint8" in (rows[1].error or "")
    assert "No such file" in (rows[2].error or "")
    assert rows[0].predictions == rows[4].predictions


def test_a_list_of_folders_and_a_grey_video(tmp_path: Path) -> None:
    net = clip_model()
    videos = write_videos(tmp_path / "videos", 2)
    (tmp_path / "list.csv").write_text("path\nvideos/video1\nvideos/video0\n")
    rows = list(vitrail.predict(net, tmp_path / "list.csv", top=3))
    direct = list(vitrail.predict(net, videos[::-1], top=3))
    for row, other in zip(rows, direct, strict=True):
        assert dict(row.predictions) == pytest.approx(dict(other.predictions), abs=1e-5)
    (row,) = vitrail.predict(net, frames()[..., 0])
    assert row.error is None
    assert len(list(vitrail.predict(net, np.stack([frames(), frames(seed=1)])))) == 2


def test_a_model_with_the_preprocessing_of_another_is_refused() -> None:
    net = clip_model()
    for clip, made in ((None, "images"), (Clip(8, 2), "clips of 8 frames")):
        net.preprocessing = vitrail.Preprocessing((16, 24), (16, 24), clip=clip)
        with pytest.raises(ValueError, match=f"takes clips of 4 frames and the preprocessing gives {made}"):
            list(vitrail.predict(net, frames()))


def test_a_file_of_video_is_predicted_as_its_frames(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_mp4(tmp_path / "a.mp4", frames(12))
    net = clip_model()
    from vitrail.data.video import open_video

    with open_video(str(tmp_path / "a.mp4")) as video:
        decoded = video.read_frames(range(12))
    (tmp_path / "b.mp4").write_bytes((tmp_path / "a.mp4").read_bytes()[:500])
    first, second = vitrail.predict(net, tmp_path, top=3)
    (other,) = vitrail.predict(net, decoded, top=3)
    assert dict(first.predictions) == pytest.approx(dict(other.predictions), abs=1e-5)
    assert second.path.endswith("b.mp4")
    assert second.error


def test_videos_in_a_table_are_predicted_and_none_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("av")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = [write_mp4(tmp_path / f"{number}.mp4", frames(12, number)) for number in range(3)]
    cells = [files[0].read_bytes(), None, files[1].read_bytes()[:200], files[2].read_bytes()]
    pq.write_table(pa.table({"video": pa.array(cells, pa.binary())}), tmp_path / "videos.parquet", row_group_size=2)
    net = clip_model()
    rows = list(vitrail.predict(net, tmp_path / "videos.parquet"))
    assert [row.path.rpartition("/")[2] for row in rows] == [f"videos.parquet[{number}]" for number in range(4)]
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert "the row has no video" in str(rows[1].error)
    expected = [row.label for row in vitrail.predict(net, [files[0], files[2]])]
    assert [rows[0].label, rows[3].label] == expected
