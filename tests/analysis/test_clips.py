"""Attention of models of clips over time: traces, the strip, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.clips import CLIP, LABELS, clip_model, frames, save_model, write_folder, write_videos
from vitrail.analysis import record_attention
from vitrail.analysis.clips import trace_clip
from vitrail.analysis.stages import trace_stages
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.video import to_video
from vitrail.models.base import Unsupported
from vitrail.models.mvit import MViT
from vitrail.models.mvit_config import CLIPS, MViTConfig


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_attention_over_time_is_that_of_the_model(pool: str) -> None:
    net = clip_model(pool=pool)
    assert isinstance(net.preprocessing, vitrail.Preprocessing)
    pixels = net.preprocessing.to_pixels(to_video(frames()))
    trace = trace_clip(net, net.preprocessing, pixels)
    assert [(each.layer, each.kind, each.values.shape) for each in trace.maps] == [
        (layer, "attention", (2, 2, 2, 3))
        for layer in (1, 2)  # heads, time steps, rows, columns
    ]
    assert trace.frames.shape == (2, 3, 16, 24)
    assert trace.numbers == (2, 4)
    assert np.array_equal(trace.frames[1], pixels[:, 3].numpy())
    with record_attention(net) as maps, torch.inference_mode():
        logits = net(net.preprocessing.normalise(pixels[None]))
    whole = maps[2][0].numpy()  # [H, T, T]
    prefix = 1 if pool == "class" else 0
    expected = whole[:, 0, 1:] if prefix else whole.mean(1)
    assert np.allclose(trace.maps[1].values.reshape(2, -1), expected, atol=1e-6)
    assert np.allclose(trace.outputs, logits[0].numpy(), atol=1e-5)
    assert trace.reader == ("class token" if prefix else "mean of patches")
    assert np.isclose(trace.maps[0].steps.sum(), 1, atol=1e-5)
    assert trace_clip(net, net.preprocessing, pixels, [2]).layers == (2,)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_divided_attention_is_that_of_the_two_modules(pool: str) -> None:
    net = clip_model(block="divided", pool=pool, tubelet=1)
    assert isinstance(net.preprocessing, vitrail.Preprocessing)
    pixels = net.preprocessing.to_pixels(to_video(frames()))
    batch = net.preprocessing.normalise(torch.stack((pixels, pixels.flip(1))))
    prefix = int(pool == "class")
    inputs: dict[str, torch.Tensor] = {}
    block = net.layers()[1].module
    for name in ("msa", "time_msa"):
        getattr(block, name).register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    plain = net(batch)
    with record_attention(net, axis="space") as space, record_attention(net, axis="time") as time:
        assert torch.equal(net(batch), plain)
    assert space[2].shape == (2, 4, 2, 6 + prefix, 6 + prefix)  # clips, frames, heads, tokens of a frame
    assert time[2].shape == (2, 6, 2, 4, 4)  # clips, places, heads, time steps
    for name, maps in (("msa", space), ("time_msa", time)):
        module = getattr(block, name)
        q, k, _v = module.split_heads(module.qkv(inputs[name]))
        expected = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        assert torch.allclose(maps[2].flatten(0, 1), expected, atol=1e-6)

    trace = trace_clip(net, net.preprocessing, pixels)
    assert [(each.layer, each.kind) for each in trace.maps] == [(1, "time"), (1, "space"), (2, "time"), (2, "space")]
    assert all(each.values.shape == (2, 4, 2, 3) for each in trace.maps)
    in_time, in_space = trace.find_maps("time")[1].values, trace.find_maps("space")[1].values
    assert np.allclose(in_time[1, 2, 1, 0], time[2][0, 3, 1, :, 2].mean(), atol=1e-6)  # to step 3 of the place in row 2
    assert np.allclose(in_time.sum(1), 1, atol=1e-5)  # over the time steps of each place
    row = space[2][0, 2, 1, 0, 1:] if prefix else space[2][0, 2, 1].mean(0)
    assert np.allclose(in_space[1, 2].ravel(), row, atol=1e-6)


def test_divided_attention_needs_an_axis_and_others_have_none() -> None:
    with (
        pytest.raises(Unsupported, match="record axis='space' or axis='time'"),
        record_attention(clip_model(block="divided")),
    ):
        pass
    with (
        pytest.raises(Unsupported, match="axis='time' is for divided attention"),
        record_attention(clip_model(), axis="time"),
    ):
        pass


def test_pooled_attention_of_clips_is_that_of_the_model() -> None:
    net = pooled_model()
    assert isinstance(net.preprocessing, vitrail.Preprocessing)
    pixels = net.preprocessing.to_pixels(to_video(frames()))
    with record_attention(net) as maps:
        logits = net(net.preprocessing.normalise(pixels[None]))
    trace = trace_clip(net, net.preprocessing, pixels)
    assert trace.reader == "class token"
    assert trace.numbers == (2, 4)
    assert [each.values.shape for each in trace.maps] == [(1, 2, 2, 2), (2, 2, 4, 4)]  # heads and keys of each stage
    for each in trace.maps:
        assert np.allclose(each.values.reshape(len(each.values), -1), maps[each.layer][0, 0, :, 0, 1:], atol=1e-6)
    assert np.allclose(trace.outputs, logits[0].detach(), atol=1e-5)
    with pytest.raises(Unsupported, match="analysis of images does not support models of clips"):
        trace_stages(net, torch.zeros(1, 3, 32, 32))


def pooled_model() -> vitrail.Model:
    """Return an MViT of clips of 4 frames of 32×32 pixels, two stages of one layer."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**CLIPS, "classes": 3}
    sizes = {
        "width": 16,
        "depths": (1, 1),
        "heads": (1, 2),
        "q_strides": ((1, 1, 1), (1, 2, 2)),
        "kv_stride": (1, 4, 4),
    }
    net = MViT(MViTConfig(**(options | sizes), frames=4, image_size=(32, 32))).eval()
    for tensor in net.parameters():
        tensor.data.normal_(std=0.2)
    net.labels, net.preprocessing = LABELS, Preprocessing((32, 32), (32, 32), clip=CLIP)
    return net


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
        assert arrays["layer2.attention"].shape == (2, 2, 2, 3)
        assert [len(video["steps"][layer]) for layer in ("1", "2")] == [2, 2]
        (row,) = vitrail.predict(model, video["video"], top=1)
        assert video["predicted"][0]["name"] == row.label
    page = (out / "index.html").read_text()
    assert page.count('name="image"') == 2
    assert "video1/attention.png" in page
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
    assert not (tmp_path / "out").exists()


# --- the page ---


@pytest.fixture(scope="module", params=["joint", "divided", "pooled"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return the kind of attention, the output directory and the model of an inspection of two videos."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp(request.param)
    model = folder / "model.safetensors"
    if request.param == "pooled":
        vitrail.save(pooled_model(), model)
    else:
        save_model(model, tubelet=1, block="divided" if request.param == "divided" else "pre")
    write_videos(folder / "videos", 2)
    assert main(["inspect", str(model), str(folder / "videos"), "--out", str(folder / "out")]) == 0
    return request.param, folder / "out", model


def scale_map(path: Path, name: str, step: int, head: int | None = None) -> np.ndarray:
    """Return the map of a time step of a layer, as codes of its maximum over the clip, [h, w]."""
    values = np.load(path)[name]
    values = values.mean(0) if head is None else values[head - 1]
    return (values[step] / values.max() * 255).round()


def read_codes(opened: Any) -> np.ndarray:
    """Return the codes of the map on the stage, before they are drawn, [h, w]."""
    codes = opened.evaluate("Array.from(atStep(wholeClip(traced(), state.head), state.step, traced()))")
    return np.array(codes).reshape(opened.evaluate("traced().grid.slice(1)"))


def test_page_moves_through_time_with_the_keyboard(browser: Any, written: tuple[str, Path, Path]) -> None:
    kind, out, _ = written
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    opened, messages = context.new_page(), list[str]()
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.goto((out / "index.html").as_uri())
    opened.wait_for_function("document.documentElement.dataset.ready === '0'")
    state = "({...document.getElementById('explore').dataset})"
    name = "time" if kind == "divided" else "attention"
    arrays, steps = out / "video0" / "arrays.npz", 2 if kind == "pooled" else 4
    assert opened.evaluate(state) | {"image": "0"} == {
        "step": "0",
        "layer": "2",
        "head": "0",
        "kind": name,
        "image": "0",
    }
    assert opened.locator("#strip button").count() == steps

    opened.locator("#step").focus()
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate(state)["step"] == "1"
    assert opened.locator("#step").get_attribute("aria-valuetext").startswith(f"2 of {steps}, frame ")
    np.testing.assert_allclose(read_codes(opened), scale_map(arrays, f"layer2.{name}", 1), atol=2)
    opened.keyboard.press("End")
    opened.locator("#stage").focus()
    opened.keyboard.press("ArrowLeft")
    assert opened.evaluate(state)["step"] == str(steps - 2)
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowLeft")  # no time step before the first
    assert opened.evaluate(state)["step"] == "0"
    before = opened.evaluate("stage.toDataURL()")
    opened.locator("#strip button").nth(steps - 1).press("Enter")
    assert opened.evaluate(state)["step"] == str(steps - 1)
    assert opened.evaluate("stage.toDataURL()") != before
    assert opened.locator("#strip button[aria-pressed=true]").count() == 1
    shares = [int(text.rstrip(" %")) for text in opened.locator("#strip span").all_inner_texts()]
    assert abs(sum(shares) - 100) <= steps

    opened.locator("#head").fill("1")
    opened.locator("#layer").fill("1")
    values = scale_map(arrays, f"layer1.{name}", steps - 1, 1)
    np.testing.assert_allclose(read_codes(opened), values, atol=2)
    assert f"Layer 1, head 1: time step {steps} of {steps}" in opened.locator("#caption").inner_text()
    buttons = opened.locator("#kinds button")
    assert buttons.first.is_visible() == (kind == "divided")
    if kind == "divided":
        assert buttons.all_inner_texts() == ["Over time", "Over space"]
        buttons.nth(1).press("Enter")
        np.testing.assert_allclose(read_codes(opened), scale_map(arrays, "layer1.space", 3, 1), atol=2)
        assert "read separately" in opened.locator("#reading").inner_text()
    opened.locator("[name=image]").first.focus()
    opened.keyboard.press("ArrowRight")
    opened.wait_for_function("document.documentElement.dataset.ready === '1'")
    assert opened.locator("#file").inner_text() == "video1"
    for width in (1280, 390):
        opened.set_viewport_size({"width": width, "height": 900})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert messages == []
    context.close()
