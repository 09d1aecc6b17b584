"""The attention that transformers materialises, with the same weights: ViT, DeiT, DINOv2."""

import pytest
import torch

import vitrail
from tests.parity.peers import spread
from vitrail.analysis import record_attention, trace_image

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}


@pytest.mark.parametrize("family", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters"])
@torch.no_grad()
def test_attention_equals_transformers_eager_output(family, tmp_path):
    settings = getattr(transformers, f"{family}Config")(**SMALL, num_labels=7, attn_implementation="eager")
    theirs = spread(getattr(transformers, f"{family}ForImageClassification")(settings), 0.2).eval()
    theirs.save_pretrained(tmp_path)
    ours = vitrail.load(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    expected = theirs(x, output_attentions=True).attentions
    with record_attention(ours) as maps:
        ours(x)
    assert len(maps) == len(expected) == 3
    for layer, attention in enumerate(expected, start=1):
        assert attention.std() > 1e-3  # there is something to compare
        assert (maps[layer] - attention).abs().max() <= 1e-5
    seen = trace_image(ours, x[:1], views=["attention"])
    assert seen.attention is not None
    patches = torch.stack([attention[0, :, 0, -16:] for attention in expected]).unflatten(-1, (4, 4))
    assert (torch.from_numpy(seen.attention) - patches).abs().max() <= 1e-5
