"""Attention to pooled keys: recorded beside the fused kernel, traced on two grids, drawn, and explored on the page."""

import numpy as np
import pytest
import torch

import vitrail
from tests.data.spoilt import encoded, photograph, put
from vitrail.analysis import record_attention
from vitrail.analysis.stages import extract_stage_positions, measure_stage_distances, trace_stages
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Unsupported
from vitrail.models.registry import configure

SMALL = {"family": "mvit", "width": 16, "depths": (1, 2), "heads": (1, 2), "classes": 3, "image_size": 32}


def build(**options):
    torch.manual_seed(0)
    model = vitrail.build_from(configure(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("options", [{}, {"class_token": True}])
@pytest.mark.parametrize("size", [(32, 32), (36, 60)])
def test_recorded_attention_gives_the_output_of_the_fused_kernel(options, size):
    model, images = build(**options, residual_pooling="none"), torch.randn(2, 3, *size)
    seen = []
    handles = [b.msa.register_forward_hook(lambda m, a, y: seen.append((m, a, y))) for b in model.blocks]
    with torch.no_grad():
        expected = model(images)
    for handle in handles:
        handle.remove()
    with record_attention(model) as maps, torch.no_grad():
        assert torch.equal(model(images), expected)
    layers = model.attention_layers(size)
    for number, ((msa, (x, grid), output), layer) in enumerate(zip(seen, layers, strict=True), start=1):
        tokens = layer.queries.cells.numel(), layer.keys.cells.numel()
        assert maps[number].shape == (2, 1, msa.heads, *tokens)
        v = msa.project(x, grid)[2].transpose(1, 2)
        torch.testing.assert_close(msa.out((maps[number][:, 0] @ v).transpose(1, 2).flatten(2)), output)


def test_layers_say_where_queries_and_keys_are():
    layers = build(class_token=True).attention_layers((32, 40))
    assert [(layer.queries.grid, layer.queries.stride) for layer in layers] == [((8, 10), 4), ((4, 5), 8), ((4, 5), 8)]
    assert [(layer.keys.grid, layer.keys.stride) for layer in layers] == [((2, 3), 16), ((4, 5), 8), ((2, 3), 16)]
    assert layers[0].keys.cells.tolist() == [[-1, 0, 1, 2, 3, 4, 5]]  # the class token has no cell
    published = vitrail.build("MViTv2-T").attention_layers((224, 224))
    assert {layer.keys.stride for layer in published} == {8, 16, 32}
    assert [layer.heads for layer in published] == [1, 2, 2, 4, 4, 4, 4, 4, 8, 8]
    with pytest.raises(Unsupported, match="cells that are not square does not support Multiscale Vision Transformers"):
        build(kv_stride=(2, 4)).attention_layers((32, 32))


@pytest.mark.parametrize("pixel", [(0, 0), (31, 31), (17, 5)])
def test_a_position_attends_to_the_whole_image(pixel):
    trace = trace_stages(build(), torch.randn(1, 3, 32, 32), at=pixel)
    assert not trace.has_windows
    for layer, stride in zip(trace.layers, (4, 8, 8), strict=True):
        assert layer.at == (pixel[1] // stride, pixel[0] // stride)
        assert layer.attention_at.shape[1:] == layer.key_grid
        np.testing.assert_allclose(layer.attention_at.sum((1, 2)), 1, atol=1e-5)
    assert [m.shape for m in trace.norms] == [(8, 8), (8, 8), (4, 4), (4, 4)]


def test_uniform_attention_has_its_entropy_and_distance():
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.msa.pool_q.norm.weight.zero_()
            block.msa.pool_q.norm.bias.zero_()
    trace = trace_stages(model, torch.randn(1, 3, 32, 32))
    for layer in trace.layers:
        np.testing.assert_allclose(layer.received, 1, atol=1e-5)
        np.testing.assert_allclose(layer.entropy, np.log(layer.key_cells.size), atol=1e-5)
    queries, keys = (np.stack(np.mgrid[:n, :n], -1).reshape(-1, 2) * s + s / 2 for n, s in ((8, 4), (2, 16)))
    expected = np.linalg.norm(queries[:, None] - keys[None], axis=-1).mean()
    np.testing.assert_allclose(trace.layers[0].distance, expected, rtol=1e-5)
    distances = measure_stage_distances(model, [torch.randn(2, 3, 32, 32)])
    np.testing.assert_allclose(distances.mean[0, 0], expected, rtol=1e-5)
    assert extract_stage_positions(model).kind == "query"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Save a small model with a class token, and an image."""
    root, pipeline = tmp_path_factory.mktemp("mvit"), Preprocessing((32, 32), (36, 36))
    vitrail.save(build(class_token=True), root / "mvit.safetensors", labels=("a", "b", "c"), preprocessing=pipeline)
    put(root / "a.jpg", encoded(photograph(1)))
    return root


def test_inspect_writes_figures_arrays_and_a_page(files, tmp_path, capsys, browser):
    out = tmp_path / "figures"
    arguments = ["inspect", str(files / "mvit.safetensors"), str(files / "a.jpg")]
    assert main([*arguments, "--at", "5,9", "--out", str(out)]) == 0
    names = {path.name for path in (out / "a").iterdir()}
    assert names == {"attention.png", "attention-at.png", "tokens.png", "heads.png", "patches.png", "arrays.npz"}
    arrays = np.load(out / "a" / "arrays.npz")
    assert arrays["layer1.attention_at"].shape == (1, 2, 2)
    assert arrays["layer2.attention_at"].shape == (2, 4, 4)
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((out / "index.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("state.layer = 1; update()")
    assert "8×8 cells, layer 1, mean of the heads: at most" in page.inner_text("#caption")
    assert page.inner_text("#caption").endswith("goes to one of 2×2 keys.")
    assert page.evaluate("current().largest") == pytest.approx(arrays["layer1.attention_at"].max(), rel=0.01)
    page.click("#whole")
    assert "8×8 cells attend to 2×2 keys" in page.inner_text("#caption")
    assert "keys that were pooled" in page.inner_text("#reading")
    assert not problems
    page.close()
    capsys.readouterr()
    assert main([*arguments, "--terminal"]) == 0
    assert "attention received: layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--view", "rollout", "--out", "x"], "the view rollout does not support Multiscale Vision Transformers"),
        (["--terminal", "relevance"], "the view relevance does not support Multiscale Vision Transformers"),
        (["--layers", "4", "--out", "x"], "layer must be 1 to 3, got 4"),
    ],
)
def test_what_needs_one_grid_is_refused_by_name(files, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(files / "mvit.safetensors"), str(files / "a.jpg"), *arguments]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "x").exists()
