"""Attention inside windows: recorded beside the fused kernel, traced, drawn, and explored on the page."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from tests.data.spoilt import encoded, photograph, put
from vitrail.analysis import record_attention, trace_image
from vitrail.analysis.figures.windows import find_edges
from vitrail.analysis.stages import extract_stage_positions, measure_stage_distances, trace_stages
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Unsupported
from vitrail.models.registry import configure

SMALL = {"family": "swin", "width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "classes": 3, "image_size": 32}


def build(**options):
    torch.manual_seed(0)
    model = vitrail.build_from(configure(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (36, 60)])
def test_recorded_attention_gives_the_output_of_the_fused_kernel(version, size):
    model, images = build(version=version), torch.randn(2, 3, *size)
    seen = []
    handles = [b.msa.register_forward_hook(lambda m, a, y: seen.append((m, a, y))) for b in model.blocks]
    with torch.no_grad():
        expected = model(images)
    for handle in handles:
        handle.remove()
    with record_attention(model) as maps, torch.no_grad():
        assert torch.equal(model(images), expected)
    for number, (msa, (windows, *_), output) in enumerate(seen, start=1):
        assert maps[number].shape == (2, windows.shape[1], msa.heads, 16, 16)
        _, _, v = msa.split_heads(msa.project(windows))
        torch.testing.assert_close(msa.out((maps[number] @ v).transpose(2, 3).flatten(3)), output)


def test_one_window_is_recorded_like_any_attention():
    model = build()
    with record_attention(model, layers=-1, queries=[0], reduce=lambda a: a.mean(2)) as maps, torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
    assert list(maps) == [4]
    assert maps[4].shape == (2, 1, 1, 16)  # the second stage is one window of 4×4
    torch.testing.assert_close(maps[4].sum(-1), torch.ones(2, 1, 1))


def test_a_compiled_model_is_recorded():
    model, image = build(), torch.randn(1, 3, 32, 32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(image)
        with record_attention(compiled) as maps:
            compiled(image)
    assert len(maps[1]) == 1


def test_layers_say_where_their_windows_are():
    layers = build(image_size=32).attention_layers((32, 32))
    assert [layer.queries.grid for layer in layers] == [(8, 8), (8, 8), (4, 4), (4, 4)]
    assert [layer.queries.stride for layer in layers] == [4, 4, 8, 8]
    assert layers[0].queries.cells[1].tolist()[:5] == [4, 5, 6, 7, 12]  # the second window, its second row
    assert layers[1].queries.cells[0, 0] == 2 * 8 + 2  # shifted by half a window
    assert layers[1].queries.regions[-1].unique().numel() == 4  # what the roll brought together is apart
    padded = build().attention_layers((36, 36))[0].queries
    assert padded.grid == (9, 9)
    assert (padded.cells >= 0).sum() == 81
    assert sorted(padded.cells[padded.cells >= 0].tolist()) == list(range(81))


@pytest.mark.parametrize("pixel", [(0, 0), (31, 31), (17, 5)])
def test_attention_of_a_position_stays_in_its_window(pixel):
    trace = trace_stages(build(), torch.randn(1, 3, 32, 32), at=pixel)
    sizes = {(0, 0): (16, 4), (31, 31): (16, 4), (17, 5): (16, 8)}[pixel]  # whole windows, and regions of shifted ones
    for layer, cells in zip(trace.layers[:2], sizes, strict=True):
        inside = ~np.isnan(layer.attention_at[0])
        assert layer.at == (pixel[1] // 4, pixel[0] // 4)
        assert inside.sum() == cells
        assert inside[layer.at]
        assert len(np.unique(layer.windows[inside])) == 1
        np.testing.assert_allclose(np.nansum(layer.attention_at, axis=(1, 2)), 1, atol=1e-5)
    assert not np.isnan(trace.layers[2].attention_at).any()  # the last stage is one window


def test_received_attention_and_distance_of_uniform_attention():
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.msa.qkv.weight.zero_()
            block.msa.qkv.bias.zero_()
            block.msa.offsets.zero_()
    trace = trace_stages(model, torch.randn(1, 3, 32, 32))
    for layer in trace.layers:
        np.testing.assert_allclose(layer.received, 1, atol=1e-5)
    np.testing.assert_allclose(trace.layers[0].entropy, np.log(16), atol=1e-5)
    y, x = np.mgrid[:4, :4].reshape(2, -1) * 4
    within = np.hypot(y[:, None] - y, x[:, None] - x).mean()
    np.testing.assert_allclose(trace.layers[0].distance, within, rtol=1e-5)
    assert trace.layers[1].distance < within  # the regions at the edges are smaller
    distances = measure_stage_distances(model, [torch.randn(2, 3, 32, 32)])
    assert distances.mean.shape == (4, 2)
    assert np.isnan(distances.mean[0, 1])  # the first stage has one head
    np.testing.assert_allclose(distances.mean[0, 0], within, rtol=1e-5)


def test_token_maps_have_the_grid_of_their_layer():
    trace = trace_stages(build(), torch.randn(1, 3, 36, 36), at=(35, 35))
    assert [m.shape for m in trace.norms] == [(9, 9), (9, 9), (9, 9), (5, 5), (5, 5)]
    assert [m.shape for m in trace.colours] == [(*m.shape, 3) for m in trace.norms]
    assert all(similar[-1, -1] == pytest.approx(1, abs=1e-5) for similar in trace.similar)


@pytest.mark.parametrize("version", [1, 2])
def test_bias_maps_are_the_bias_of_the_layers(version):
    model = build(version=version)
    bias = extract_stage_positions(model).bias
    assert bias.shape == (4, 2, 7, 7)
    assert np.isnan(bias[0, 1]).all()
    with torch.no_grad():
        pairs = model.blocks[3].msa.compute_bias()
    assert bias[3, 1, 3 + 1, 3 + 2] == pytest.approx(float(pairs[1, 0, 4 + 2]))  # from cell 0,0 to cell 1,2


def test_kept_weights_have_a_limit():
    model, image = build(), torch.randn(1, 3, 32, 32)
    weights = 4 * 256 * 2 + 256 * 2 * 2
    kept = [trace_stages(model, image, max_weights=n).layers[2].attention for n in (weights, weights - 1, 100)]
    assert [None if each is None else each.shape for each in kept] == [(2, 1, 16, 16), (1, 1, 16, 16), None]


def test_edges_are_lines_between_windows():
    windows = np.repeat(np.repeat(np.arange(4).reshape(2, 2), 3, 0), 3, 1)
    edge = find_edges(windows)
    assert edge[3].all()
    assert edge[:, 3].all()
    assert edge.sum() == 6 + 5


def test_bad_requests_are_one_line():
    model, image = build(), torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"pixel must be 0,0 to 31,31, got 32,0"):
        trace_stages(model, image, at=(32, 0))
    with pytest.raises(ValueError, match="unknown view 'rollout': use attention"):
        trace_stages(model, image, views=["rollout"])
    with pytest.raises(ValueError, match="got a batch of 2"):
        trace_stages(model, torch.cat((image, image)))
    with pytest.raises(ValueError, match="values that are not finite"):
        trace_stages(model, image * torch.nan)
    with pytest.raises(Unsupported, match="does not support Swin Transformers"):
        trace_image(model, image)
    with pytest.raises(ValueError, match="contains 2 models"), record_attention(nn.ModuleList([build(), build()])):
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Save a small model and an image."""
    root = tmp_path_factory.mktemp("swin")
    vitrail.save(
        build(),
        root / "swin.safetensors",
        labels=("cat", "dog", "owl"),
        preprocessing=Preprocessing((32, 32), (36, 36)),
    )
    put(root / "a.jpg", encoded(photograph(1)))
    return root


def test_inspect_writes_figures_arrays_and_a_page(files, tmp_path, capsys):
    out = tmp_path / "figures"
    assert (
        main(["inspect", str(files / "swin.safetensors"), str(files / "a.jpg"), "--at", "5,9", "--out", str(out)]) == 0
    )
    assert "pixel 5,9" in capsys.readouterr().out
    names = {path.name for path in (out / "a").iterdir()}
    assert names == {"attention.png", "attention-at.png", "tokens.png", "heads.png", "patches.png", "arrays.npz"}
    assert {path.name for path in out.glob("*.png")} == {"distance.png", "positions.png", "filters.png"}
    arrays = np.load(out / "a" / "arrays.npz")
    assert arrays["layer2.attention_at"].shape == (1, 8, 8)
    assert arrays["layer2.windows"].max() == 8  # nine regions of shifted windows
    assert json.loads((out / "inspect.json").read_text())["views"] == [
        "attention", "distance", "positions", "filters", "tokens", "heads", "patches"
    ]  # fmt: skip


@pytest.mark.parametrize("view", ["attention", "tokens", "heads", "patches", "distance", "positions", "filters"])
def test_views_in_the_terminal(files, view, capsys):
    arguments = ["inspect", str(files / "swin.safetensors"), str(files / "a.jpg"), "--at", "5,9", "--terminal", view]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_the_terminal_draws_attention_by_default(files, capsys):
    assert main(["inspect", str(files / "swin.safetensors"), str(files / "a.jpg"), "--terminal"]) == 0
    assert "attention received, inside windows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--terminal", "relevance"], "the view relevance does not support Swin Transformers: use attention or tokens"),
        (["--view", "rollout", "--out", "x"], "the view rollout does not support Swin Transformers"),
        (["--target", "cat", "--out", "x"], "--target does not support Swin Transformers"),
        (["--layers", "5", "--out", "x"], "layer must be 1 to 4, got 5"),
        (["--at", "40,1", "--out", "x"], "--at must be 0,0 to 31,31"),
    ],
)
def test_what_windows_have_not_is_refused_by_name(files, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(files / "swin.safetensors"), str(files / "a.jpg"), *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "x").exists()


def test_models_with_windows_are_not_compared(files, capsys):
    model = str(files / "swin.safetensors")
    assert main(["inspect", "--compare", model, model, str(files / "a.jpg")]) == 2
    assert "--compare does not support Swin Transformers" in capsys.readouterr().err


def test_the_page_draws_windows(files, tmp_path, browser):
    out = tmp_path / "figures"
    model, image = str(files / "swin.safetensors"), str(files / "a.jpg")
    assert main(["inspect", model, image, "--view", "attention", "--view", "tokens", "--out", str(out)]) == 0
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((out / "index.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("state.layer = 2; update()")
    assert "9 windows on 8×8 cells" in page.inner_text("#caption")
    assert page.locator("#heads button").count() == 2  # the mean and one head
    page.click("#patch")
    assert "From row 5, column 5 of 8×8 cells" in page.inner_text("#caption")
    page.keyboard.press("ArrowDown")
    assert "From row 6, column 5" in page.inner_text("#caption")
    inside = page.evaluate("[...current().inside].reduce((a, b) => a + b)")
    assert inside == 16  # the window in the middle
    trace = trace_stages(vitrail.load(files / "swin.safetensors"), page_image(files), at=(16, 20))
    largest = page.evaluate("current().largest")
    assert largest == pytest.approx(np.nanmax(trace.layers[1].attention_at), rel=0.01)
    page.click("#tab-tokens")
    assert "After layer 2" in page.inner_text("#caption")
    assert not problems
    page.close()


def page_image(files):
    from PIL import Image

    return vitrail.load(files / "swin.safetensors").preprocessing(Image.open(files / "a.jpg").convert("RGB"))[None]
