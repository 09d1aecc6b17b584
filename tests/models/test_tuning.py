"""Partial fine-tuning of a model."""

import pytest
import torch

import vitrail
from vitrail.models.lora import merge_lora, tune


def model(**options) -> vitrail.Model:
    torch.manual_seed(0)
    made = vitrail.build(None, patch=4, width=16, depth=3, heads=2, classes=5, image_size=16, **options)
    torch.nn.init.normal_(made.head.weight)
    return made


def trained(made: vitrail.Model) -> set[str]:
    return {name for name, parameter in made.named_parameters() if parameter.requires_grad}


def test_head_only_is_trained() -> None:
    made = model()
    tune(made, "head")
    assert trained(made) == {"head.weight", "head.bias"}


def test_last_layers_and_later_parameters_are_trained() -> None:
    made = model()
    tune(made, "last-2")
    parts = {name.split(".")[0] + "." + name.split(".")[1] for name in trained(made)}
    assert parts == {"blocks.1", "blocks.2", "pool.norm", "head.weight", "head.bias"}


def test_full_freezes_nothing() -> None:
    made = model()
    tune(made, "full")
    assert trained(made) == {name for name, _ in made.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"position": "rotary-dinov3", "key_bias": False}], ids=["paper", "rotary"])
def test_lora_is_zero_at_first_and_merges_exactly(options) -> None:
    plain, made = model(**options), model(**options)
    image = torch.randn(2, 3, 16, 16)
    tune(made, "lora-4")
    torch.testing.assert_close(made(image), plain(image))
    assert all("parametrizations" in name or name.startswith("head") for name in trained(made))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".b"):
                parameter.normal_(std=0.1)
    changed = made(image)
    assert not torch.allclose(changed, plain(image))
    merge_lora(made)
    assert set(made.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(made(image), changed)


@pytest.mark.parametrize("mode", ["tail", "last-0", "last-4", "lora-0", ""])
def test_unknown_tuning_modes_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"tun(e|ing)"):
        tune(model(), mode)
