"""Attention of models of clips over time: traces, the strip, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.clips import clip_model, frames, save_model, write_folder, write_videos
from vitrail.analysis import record_attention
from vitrail.analysis.clips import trace_clip
from vitrail.cli import main
from vitrail.data.video import to_video
from vitrail.models.base import Unsupported


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_attention_over_time_is_that_of_the_model(pool: str) -> None:
    net = clip_model(pool=pool)
    assert isinstance(net.preprocessing, vitrail.Preprocessing)
    pixels = net.preprocessing.to_pixels(to_video(frames()))
    trace = trace_clip(net, net.preprocessing, pixels)
    assert trace.attention.shape == (2, 2, 2, 2, 3)  # layers, heads, time steps, rows, columns
    assert trace.frames.shape == (2, 3, 16, 24)
    assert np.array_equal(trace.frames[1], pixels[:, 3].numpy())
    with record_attention(net) as maps, torch.inference_mode():
        logits = net(net.preprocessing.normalise(pixels[None]))
    whole = maps[2][0].numpy()  # [H, T, T]
    prefix = 1 if pool == "class" else 0
    expected = whole[:, 0, 1:] if prefix else whole.mean(1)
    assert np.allclose(trace.attention[1].reshape(2, -1), expected, atol=1e-6)
    assert np.allclose(trace.outputs, logits[0].numpy(), atol=1e-5)
    assert trace.reader == ("class token" if prefix else "mean of patches")
    assert np.allclose(trace.steps.sum(1), 1, atol=1e-5)
    assert trace_clip(net, net.preprocessing, pixels, [2]).layers == (2,)


def test_divided_attention_is_refused() -> None:
    net = clip_model(block="divided")
    assert isinstance(net.preprocessing, vitrail.Preprocessing)
    with pytest.raises(Unsupported, match="does not support divided attention"):
        trace_clip(net, net.preprocessing, net.preprocessing.to_pixels(to_video(frames())))


def test_the_command_writes_a_strip_for_each_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model, out = save_model(tmp_path / "model.safetensors"), tmp_path / "out"
    write_videos(tmp_path / "videos", 2)
    (write_folder(tmp_path / "videos" / "bad", frames(3)) / "frame_2.png").write_bytes(b"no image")
    assert main(["inspect", str(model), str(tmp_path / "videos"), "--out", str(out), "--json"]) == 1
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert "frame_2.png" in captured.err
    assert [video["folder"] for video in record["videos"]] == ["video0", "video1"]
    for video in record["videos"]:
        with Image.open(out / video["folder"] / "attention.png") as strip:
            assert strip.width > strip.height / 3
        arrays = np.load(out / video["folder"] / "arrays.npz")
        assert arrays["attention"].shape == (2, 2, 2, 2, 3)
        (row,) = vitrail.predict(model, video["video"], top=1)
        assert video["predicted"][0]["name"] == row.label
    assert (out / "index.html").read_text().count("<img") == 2
    assert main(["inspect", str(model), str(tmp_path / "videos" / "video0"), "--out", str(out), "--layers", "2"]) == 0
    assert not (out / "video1").exists()  # of the earlier inspection


def test_what_a_model_of_clips_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model.safetensors")
    video = write_folder(tmp_path / "video", frames())
    for options, flag in ((["--view", "rollout"], "--view rollout"), (["--at", "1,1"], "--at")):
        assert main(["inspect", str(model), str(video), "--out", str(tmp_path / "out"), *options]) == 2
        assert f"{flag} does not support models of clips" in capsys.readouterr().err
    assert main(["inspect", str(model), str(video / "frame_0.png"), "--out", str(tmp_path / "out")]) == 2
    assert "takes videos, and" in capsys.readouterr().err
    divided = save_model(tmp_path / "divided.safetensors", block="divided")
    assert main(["inspect", str(divided), str(video), "--out", str(tmp_path / "out")]) == 2
    assert "recording attention does not support divided attention" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
