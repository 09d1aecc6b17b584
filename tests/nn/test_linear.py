"""Linear layers by oneDNN give the products, gradients and files of PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.nn import linear as module
from vitrail.nn.linear import LinearLayer, linear

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Use oneDNN on any processor, and list the shapes that it multiplies."""
    seen: list[tuple[int, ...]] = []
    multiply = module.multiply

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return multiply(x, weight, bias)

    monkeypatch.setattr(module, "prefers_onednn", lambda: True)
    monkeypatch.setattr(module, "multiply", counted)
    return seen


def gradients(layer: Callable[[Tensor, Tensor, Tensor | None], Tensor], inputs: list[Tensor | None]) -> list[Tensor]:
    x, weight, bias = (None if t is None else t.detach().clone().requires_grad_() for t in inputs)
    assert x is not None
    assert weight is not None
    y = layer(x, weight, bias)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    return [y.detach(), *(t.grad for t in (x, weight, bias) if t is not None and t.grad is not None)]


@needs_onednn
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_products_and_gradients_are_those_of_pytorch(calls: list[tuple[int, ...]], biased: bool, whole: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 60, 48)
    x = x if whole else x[:, :50]  # the first tokens are not contiguous
    inputs = [x, torch.randn(192, 48), torch.randn(192) if biased else None]
    ours, theirs = gradients(linear, inputs), gradients(F.linear, inputs)
    assert len(calls) == 2  # forward, and the gradient of the input
    assert len(ours) == len(theirs) == 3 + biased
    for a, b in zip(ours, theirs, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@needs_onednn
def test_frozen_weights_and_inputs_get_no_gradient(calls: list[tuple[int, ...]]) -> None:
    layer, x = LinearLayer(64, 256), torch.randn(128, 64)
    layer.weight.requires_grad = False
    layer(x).sum().backward()  # the bias alone
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, torch.full((256,), 128.0))


@needs_onednn
def test_second_derivatives_are_those_of_pytorch(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(128, 64, requires_grad=True), torch.randn(256, 64, requires_grad=True)
    found = []
    for layer in (linear, F.linear):
        (g,) = torch.autograd.grad(layer(x, weight).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), weight)[0])
    assert calls
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1.0)


@needs_onednn
def test_small_products_and_observed_ones_stay_with_pytorch(calls: list[tuple[int, ...]]) -> None:
    layer, x = LinearLayer(64, 256), torch.randn(128, 64)
    layer(x[:8])
    layer.double()(x.double())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 128 * 64 * 256
    torch.func.grad(lambda x: layer(x).sum())(x)
    torch.func.jvp(layer, (x,), (x,))
    torch.jit.trace(layer, x, check_trace=False)
    torch.export.export(layer, (x,))
    assert calls == []
    with torch.no_grad():
        layer(x)
    assert calls == [(128, 64, 256)]


@needs_onednn
def test_model_keeps_its_names_and_logits(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = vitrail.build("Ti/16", classes=10).eval(), torch.randn(2, 3, 224, 224)
    assert all(isinstance(m, LinearLayer) for m in model.modules() if isinstance(m, nn.Linear))
    with torch.inference_mode():
        ours = model(x)
        assert len(calls) == 1 + 12 * 4 - 3  # embedding and layers; the last one computes the class token only
        monkeypatch.setattr(module, "prefers_onednn", lambda: False)
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-4)
