"""Packed copies of models compute the same: every slot and family, in fp32 and bf16."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from tests.variants import SMALL, VIT_SLOTS
from vitrail.data.preprocessing import Preprocessing
from vitrail.inference import TorchRuntime
from vitrail.models.registry import configure
from vitrail.nn.attention import dot_product_attention
from vitrail.nn.packing import PackedLinear, can_pack, pack_module

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="PyTorch without oneDNN")
needs_bf16 = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN has no bf16 on this processor")


def randomise(model: nn.Module) -> nn.Module:
    """Return the model with random values in place of zeros, such as those of heads."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.3)
    return model.eval()


def run_pair(
    model: nn.Module, dtype: torch.dtype, size=(32, 48), channels: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(3, channels, *size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(images), pack_module(model, dtype)(images.to(dtype))


@needs_packing
@pytest.mark.parametrize("slot", VIT_SLOTS)
def test_a_packed_copy_of_every_slot_gives_the_same_outputs(slot):
    model = randomise(vitrail.build(**{**SMALL, **VIT_SLOTS[slot]}))
    expected, outputs = run_pair(model, torch.float32, channels=model.config.channels)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@needs_bf16
@pytest.mark.parametrize("slot", VIT_SLOTS)
def test_bf16_copies_are_close_and_return_fp32(slot):
    model = randomise(vitrail.build(**{**SMALL, **VIT_SLOTS[slot]}))
    expected, outputs = run_pair(model, torch.bfloat16, channels=model.config.channels)
    assert outputs.dtype is torch.float32
    assert float((outputs - expected).abs().max()) < 0.06 * float(expected.abs().max())


SWIN = {"family": "swin", "width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "image_size": 32}
FAMILIES = {"swin": SWIN, "swin v2": SWIN | {"version": 2}, "bit": {"name": "R14x0.25", "image_size": 64}}


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_packed(family):
    torch.manual_seed(0)
    model = vitrail.build_from(configure(**FAMILIES[family], classes=5)).eval()
    nn.init.normal_(model.head.weight, std=0.1)
    size = model.config.image_size
    expected, outputs = run_pair(model, torch.float32, size)
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-4)
    if can_pack(torch.bfloat16):
        _, outputs = run_pair(model, torch.bfloat16, size)
        assert float((outputs - expected).abs().max()) < 0.1 * float(expected.abs().max())


@needs_packing
def test_merged_tokens_are_packed_and_the_model_stays_as_it_is():
    model = randomise(vitrail.build(**SMALL))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = model.merge_tokens(4)
    packed = pack_module(merged, torch.float32)
    assert any(isinstance(part, PackedLinear) for part in packed.modules())
    images = torch.randn(2, 3, 32, 48)
    with torch.inference_mode():
        torch.testing.assert_close(packed(images), merged(images), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(part, PackedLinear) for part in model.modules())


@pytest.mark.parametrize("mask", [None, (3, 7, 9), (1, 1, 1, 9)])
def test_attention_as_products_equals_the_fused_kernel(mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16).bfloat16() for n in (7, 9, 9))
    bias = None if mask is None else torch.randn(*mask).bfloat16()
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), None if bias is None else bias.float())
    torch.testing.assert_close(dot_product_attention(q, k, v, bias).float(), expected, rtol=0.05, atol=0.05)


def test_a_runtime_in_fp32_computes_what_the_model_computes_bit_for_bit():
    model, pipeline = randomise(vitrail.build(**SMALL)), Preprocessing(size=(32, 48), resize=(32, 48))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 48), dtype=np.uint8)
    with torch.inference_mode():
        expected = model(pipeline.normalise(torch.from_numpy(pixels))).numpy()
    runtime = TorchRuntime(model, pipeline, precision="fp32")
    assert runtime.packed is None
    assert np.array_equal(runtime(pixels), expected)
