"""Real ImageNet weights of DeiT-Ti through our key table: the same logits as timm's."""

from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.checkpoints.formats.timm import map_vit
from vitrail.checkpoints.keys import import_state
from vitrail.models.registry import configure

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"


@pytest.mark.skipif(not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)")
def test_real_deit_tiny_gives_timm_logits():
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
    from safetensors.torch import load_file

    weights = load_file(WEIGHTS)
    assert len(weights) == 152
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    theirs.load_state_dict(weights)
    config = configure("Ti/16")
    ours = vitrail.build_from(config).eval()
    ours.load_state_dict(import_state(map_vit(config), weights))
    image = torch.randn(4, 3, 224, 224)
    with torch.inference_mode():
        expected, actual = theirs(image), ours(image)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
