"""`--compile`: whatever an objective calls of a model is compiled, and computes the same."""

from functools import partialmethod

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import vitrail
from vitrail.data.rng import StepRandom
from vitrail.models.vit import ViT
from vitrail.objectives.base import LossModule
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.training.runs.run import compile_loss

CPU = torch.device("cpu")


def made(method: str) -> tuple[LossModule, object]:
    torch.manual_seed(0)
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=None, image_size=16)
    assert isinstance(model, ViT)
    images = torch.randn(4, 3, 16, 16)
    if method == "dino":
        return DINO(out=32, hidden=16, bottleneck=8).build(model, 10), (
            torch.randn(4, 2, 3, 16, 16),
            torch.empty(4, 0, 3, 8, 8),
        )
    if method == "mae":
        return MAE().build(model, 10), images
    return MaskedPatches().build(model, 10, mean=(0.5,) * 3, std=(0.5,) * 3), images


@pytest.mark.parametrize("method", ["mpp", "mae", "dino"])
def test_every_method_is_compiled_and_computes_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")
    )  # no C++ to compile
    torch.compiler.reset()
    counters.clear()
    loss_module, images = made(method)
    draw = StepRandom(0, 0, 0, 4, 4, CPU)
    with torch.no_grad():
        plain = loss_module(images, None, draw)["loss"]
        assert not counters["stats"]
        compile_loss(loss_module.eval())
        compiled = loss_module(images, None, draw)["loss"]
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    torch.testing.assert_close(compiled, plain)


@torch._dynamo.config.patch(recompile_limit=8)  # monkeypatch would delete it at the end
def test_every_rate_of_stochastic_depth_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = vitrail.build(None, patch=4, width=16, depth=12, heads=2, classes=None, image_size=16, stochastic_depth=0.2)
    loss_module = MAE().build(model, 10).train()
    compile_loss(loss_module)
    loss_module(torch.randn(2, 3, 16, 16), None, StepRandom(0, 0, 0, 2, 2, CPU))
    assert counters["stats"]["unique_graphs"] > 12  # and those of the decoder, which has no stochastic depth
    assert not counters["unimplemented"]
