"""Costs agree with the paper, with PyTorch's counter and with the tensors that autograd stores."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.variants import SMALL, VIT_SLOTS
from vitrail.models.flops import count
from vitrail.models.registry import configure


def counted_by_torch(config, batch):
    """Return the multiply-adds by PyTorch's counter, on the meta device, where attention is not fused."""
    with torch.device("meta"):
        model = vitrail.build_from(config).eval().requires_grad_(False)
        image = torch.empty(batch, config.channels, *config.input_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_multiply_adds_agree_with_torchs_counter_on_every_slot(slots):
    config = configure(**{**SMALL, **slots})
    assert count(config, 3).macs == counted_by_torch(config, 3)


@pytest.mark.parametrize("name", ["B/16", "L/32", "R50+B/16", "R26+S/32", "R+Ti/16", "R50x1", "R14x0.25", "AST-B/16"])
def test_multiply_adds_agree_with_torchs_counter_on_named_models(name):
    config = configure(name)
    assert count(config).macs == counted_by_torch(config, 1)


def test_attention_of_the_paper():
    cost = count(configure("B/16"))
    assert cost.tokens == 197
    assert cost.attention_entries == 38_416
    assert cost.attention_bytes_per_matrix == 38_416 * 4
    assert cost.attention_bytes_per_matrix // 1024 == 150
    assert count(configure("G/16")).attention_bytes_total // 2**20 == 112  # 48 layers, 16 heads
    at_14 = count(configure("G/14"))
    assert at_14.attention_entries == 65_536
    assert at_14.attention_bytes_total == 192 * 2**20


def test_every_token_costs_what_is_usually_published():
    assert count(configure("B/16")).macs_every_token / 1e9 == pytest.approx(17.56, abs=0.02)
    assert count(configure("S/16")).macs_every_token / 1e9 == pytest.approx(4.61, abs=0.02)


def test_one_layer_is_the_last_layer():
    cost = count(configure("S/16", depth=1))
    assert cost.macs < cost.macs_every_token == count(configure("S/16", depth=1, pool="mean", prefix="class")).macs


def test_batch_multiplies_work_and_not_weights():
    one, eight = count(configure("Ti/16")), count(configure("Ti/16"), 8)
    assert eight.macs == 8 * one.macs
    assert eight.params == one.params
    assert eight.attention_bytes_total == one.attention_bytes_total


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_activation_bytes_are_what_autograd_keeps(slots):
    config = configure(**{**SMALL, **slots})
    really = kept_by_autograd(config, 4)
    assert count(config, 4).activation_bytes == pytest.approx(really, rel=0.1)


def kept_by_autograd(config, batch):
    model = vitrail.build_from(config).train()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(batch, config.channels, *config.input_size))
    assert output.requires_grad
    return sum(size for size, _ in kept.values())


def test_activation_bytes_of_a_resnet_are_what_autograd_keeps():
    config = configure("R14x0.25", image_size=64)
    really = kept_by_autograd(config, 4)
    assert count(config, 4).activation_bytes == pytest.approx(really, rel=0.1)


def test_parameters_belong_to_the_stages_that_have_them():
    cost = count(configure("B/16"))
    stages = {stage.name: stage for stage in cost.stages}
    assert stages["patches x_p E"].params == 768 * 768 + 768
    assert stages["head"].params == 768 * 1000 + 1000
    assert stages["tokens z_0 (eq. 1)"].shape == (1, 197, 768)
    assert sum(stage.params for stage in cost.stages) == cost.params == 86_567_656


def test_batch_of_zero_is_refused():
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        count(configure("Ti/16"), 0)
