"""Same weights, same logits, same gradients as torchvision and vit-pytorch."""

import pytest
import torch

import vitrail
from tests.parity.peers import assert_same, spread
from vitrail.checkpoints.formats import torchvision as torchvision_names
from vitrail.checkpoints.formats import vit_pytorch as vit_pytorch_names
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches

OURS = {"patch": 16, "width": 48, "depth": 3, "heads": 3, "image_size": 64, "classes": 7}
NORMED = {"embed": Patches(16, normed=True), "eps": 1e-5}


def test_vit_gives_torchvision_logits_and_gradients():
    torchvision = pytest.importorskip(
        "torchvision", reason="torchvision is not installed: pip install 'vitrail[peers]'"
    )
    theirs = torchvision.models.VisionTransformer(64, 16, 3, 3, 48, 192, num_classes=7)
    config = configure(**OURS)
    image = torch.randn(2, 3, 64, 64)
    assert_same(vitrail.build_from(config), spread(theirs), torchvision_names.map_vit(config), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_vit_gives_vit_pytorch_logits_and_gradients(channels):
    vit_pytorch = pytest.importorskip(
        "vit_pytorch", reason="vit-pytorch is not installed: pip install 'vitrail[peers]'"
    )
    theirs = vit_pytorch.ViT(
        image_size=64,
        patch_size=16,
        num_classes=7,
        dim=48,
        depth=3,
        heads=3,
        mlp_dim=192,
        dim_head=16,
        channels=channels,
    )
    config = configure(**OURS, **NORMED, channels=channels, block=PreNorm(qkv_bias=False))
    image = torch.randn(2, channels, 64, 64)
    assert_same(vitrail.build_from(config), spread(theirs), vit_pytorch_names.map_vit(config), image)


def test_simple_vit_gives_vit_pytorch_logits_and_gradients():
    vit_pytorch = pytest.importorskip(
        "vit_pytorch", reason="vit-pytorch is not installed: pip install 'vitrail[peers]'"
    )
    theirs = vit_pytorch.SimpleViT(
        image_size=(64, 96), patch_size=16, num_classes=7, dim=48, depth=3, heads=3, mlp_dim=192, dim_head=16
    )
    block = PreNorm(qkv_bias=False, out_bias=False)
    slots = {**OURS, **NORMED, "image_size": (64, 96), "block": block, "pool": "mean", "position": "sincos2d"}
    config = configure(**slots)
    image = torch.randn(2, 3, 64, 96)
    assert_same(vitrail.build_from(config), spread(theirs), vit_pytorch_names.map_simple_vit(config), image)
