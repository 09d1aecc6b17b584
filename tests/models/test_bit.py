"""BiT ResNets."""

import pytest
import torch

import vitrail


@pytest.mark.parametrize(
    ("name", "millions"), [("R50x1", 25.5), ("R101x1", 44.5), ("R152x2", 236.3), ("R152x4", 936.5)]
)
def test_parameter_counts_are_bits(name, millions):
    with torch.device("meta"):
        model = vitrail.build(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("size", [(32, 32), (40, 56)])
def test_small_ones_take_small_images(size):
    model = vitrail.build("R14x0.25", root="small", classes=4, image_size=size).eval()
    assert model.forward_features(torch.randn(2, 3, *size)).shape[:2] == (2, 512)
    assert model(torch.randn(2, 3, *size)).shape == (2, 4)


def test_standardised_weights_do_not_feel_scale_or_shift():
    model = vitrail.build("R14x0.25", classes=4).eval()
    torch.nn.init.normal_(model.head.weight)
    image = torch.randn(2, 3, 64, 64)
    expected = model(image)
    with torch.no_grad():
        model.stages[1][0].conv2.weight.mul_(7).add_(3)
    torch.testing.assert_close(model(image), expected, rtol=1e-3, atol=1e-3)


def test_without_classes_it_ends_in_features():
    assert vitrail.build("R14x0.25", classes=None)(torch.randn(1, 3, 64, 64)).shape == (1, 512)


def assert_compiles(model, image):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(image), model(image)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(output.sum(), list(model.parameters())) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


def test_compiles_without_a_graph_break():
    torch.compiler.reset()
    model = vitrail.build("R14x0.25", classes=4).eval()
    torch.nn.init.normal_(model.head.weight)
    image = torch.randn(2, 3, 64, 64)
    assert_compiles(model, image)


@pytest.mark.parametrize("name", ["R14+Ti/16", "R+Ti/16"])
def test_hybrids_compile_without_a_graph_break(name):
    torch.compiler.reset()
    model = vitrail.build(name, depth=1, image_size=64, classes=4).eval()
    torch.nn.init.normal_(model.head.weight)
    image = torch.randn(2, 3, 64, 64)
    assert_compiles(model, image)
