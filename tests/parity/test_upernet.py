"""UPerNet against transformers' head, with random weights."""

import pytest
import torch

from vitrail.models.registry import build_segmenter
from vitrail.nn.decoder import UPerNet

upernet = pytest.importorskip("transformers.models.upernet.modeling_upernet")
transformers = pytest.importorskip("transformers")

SWIN = {"family": "swin", "width": 16, "depths": (1, 1, 1, 1), "heads": (1, 2, 4, 8), "window": 4, "image_size": 64}
NAMES = {  # ours: theirs
    "pools": ("psp_modules.{}.1", 4),
    "bottleneck": ("bottleneck", 0),
    "laterals": ("lateral_convs.{}", 3),
    "outputs": ("fpn_convs.{}", 3),
    "fusion": ("fpn_bottleneck", 0),
}


def map_names():
    """Return our names of modules and theirs."""
    for ours, (theirs, count) in NAMES.items():
        for index in range(count) if count else [None]:
            own = ours if index is None else f"{ours}.{index}"
            yield f"{own}.0", f"{theirs.format(index)}.conv"
            yield f"{own}.1", f"{theirs.format(index)}.batch_norm"
    yield "classifier", "classifier"


@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients_are_those_of_transformers(training):
    torch.manual_seed(0)
    ours = build_segmenter(decoder=UPerNet(24), classes=5, **SWIN).head.train(training)
    config = transformers.UperNetConfig(hidden_size=24, num_labels=5)
    theirs = upernet.UperNetHead(config, [16, 32, 64, 128]).train(training)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.5)
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    table = dict(map_names())
    for own, other in table.items():
        ours.get_submodule(own).load_state_dict(theirs.get_submodule(other).state_dict())
    assert len(ours.state_dict()) == len(theirs.state_dict())
    maps = [torch.randn(2, 16 * 2**s, 28 // 2**s, 20 // 2**s + 1, requires_grad=True) for s in range(4)]
    actual, expected = ours(maps), theirs(maps)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(expected)
    for own, other in table.items():
        pairs = zip(ours.get_submodule(own).parameters(), theirs.get_submodule(other).parameters(), strict=True)
        for a, b in pairs:
            a, b = (
                torch.autograd.grad((o * weight).mean(), p, retain_graph=True)[0]
                for o, p in ((actual, a), (expected, b))
            )
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad((output * weight).mean(), maps) for output in (actual, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
