"""Same weights, same logits, same gradients as timm."""

import pytest
import torch

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
import timm
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import vitrail
from tests.parity.peers import assert_same, spread
from vitrail.checkpoints.formats.timm import map_bit, map_vit
from vitrail.checkpoints.keys import import_state
from vitrail.models.bit import configure_bit
from vitrail.models.registry import configure
from vitrail.nn.position import Learned1D, SinCos2D

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "img_size": 64, "patch_size": 16, "num_classes": 7}
OURS = {"patch": 16, "width": 48, "depth": 3, "heads": 3, "image_size": 64, "classes": 7}


def assert_same_as_timm(theirs, config, batch=2):
    model = vitrail.build_from(config)
    image = torch.randn(batch, config.channels, *config.image_size)
    assert_same(model, spread(theirs), map_vit(config), image)


@pytest.mark.parametrize(
    ("name", "theirs", "depth"),
    [
        ("Ti/16", "vit_tiny_patch16_224", 12),
        ("S/16", "vit_small_patch16_224", 12),
        ("B/16", "vit_base_patch16_224", 4),
        ("B/32", "vit_base_patch32_224", 4),
        ("L/16", "vit_large_patch16_224", 2),
        ("H/14", "vit_huge_patch14_224", 2),
    ],
)
def test_named_size_gives_timm_logits_and_gradients(name, theirs, depth):
    assert_same_as_timm(timm.create_model(theirs, depth=depth, num_classes=1000), configure(name, depth=depth), batch=1)


@pytest.mark.parametrize(
    ("name", "theirs", "depth"),
    [
        ("R50+B/16", "vit_base_r50_s16_224", 2),
        ("R26+S/32", "vit_small_r26_s32_224", 3),
        ("R50+L/32", "vit_large_r50_s32_224", 1),
        ("R+Ti/16", "vit_tiny_r_s16_p8_224", 3),
    ],
)
def test_hybrid_gives_timm_logits_and_gradients(name, theirs, depth):
    assert_same_as_timm(timm.create_model(theirs, depth=depth, num_classes=1000), configure(name, depth=depth), batch=1)


def test_hybrid_pads_odd_maps_as_timm_does():
    theirs = timm.create_model("vit_small_r26_s32_224", depth=1, img_size=96)
    assert_same_as_timm(theirs, configure("R26+S/32", depth=1, image_size=96))


def test_distilled_deit_gives_timm_logits_and_gradients():
    theirs = timm.create_model("deit_tiny_distilled_patch16_224", depth=3)
    assert_same_as_timm(theirs, configure("Ti/16", depth=3, prefix="class+distillation"), batch=1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"reg_tokens": 4}, {"registers": 4, "position": Learned1D(prefix="all")}),
        ({"reg_tokens": 4, "no_embed_class": True}, {"registers": 4, "position": Learned1D(prefix="none")}),
        ({"global_pool": "avg", "fc_norm": True}, {"pool": "mean-norm", "prefix": "class"}),
        ({"global_pool": "avg", "fc_norm": False, "class_token": False}, {"pool": "mean"}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "mean", "prefix": "class"}),
        ({"global_pool": "map", "class_token": False}, {"pool": "map"}),
        ({"init_values": 0.1}, {"layer_scale": 0.1}),
        ({"qk_norm": True}, {"qk_norm": True}),
        ({"img_size": (32, 80)}, {"image_size": (32, 80)}),
        ({"in_chans": 1}, {"channels": 1}),
        ({"patch_size": 8}, {"patch": 8}),
    ],
)
def test_slot_gives_timm_logits_and_gradients(theirs, ours):
    assert_same_as_timm(VisionTransformer(**{**SMALL, **theirs}), configure(**{**OURS, **ours}))


def test_sincos_positions_give_timm_logits_and_gradients():
    theirs = spread(VisionTransformer(**SMALL, class_token=False, global_pool="avg", fc_norm=False))
    rows_first = build_sincos2d_pos_embed([4, 4], 48, interleave_sin_cos=True)  # [N, D], rows in the first half
    columns_first = rows_first.unflatten(1, (2, 24)).flip(1).flatten(1)[None]
    del theirs.pos_embed
    theirs.register_buffer("pos_embed", columns_first)  # fixed, as ours is
    config = configure(**OURS, pool="mean", position=SinCos2D(end=False))
    assert_same(vitrail.build_from(config), theirs, map_vit(config), torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
def test_relative_positions_give_timm_logits_and_gradients(shared, class_token):
    theirs = VisionTransformerRelPos(
        **SMALL,
        rel_pos_type="bias",
        shared_rel_pos=shared,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
        init_values=None,
        fc_norm=False,
    )
    pool = "class" if class_token else "mean"
    config = configure(**OURS, position="relative@shared" if shared else "relative", pool=pool)
    assert_same_as_timm(theirs, config)


@pytest.mark.parametrize(("name", "theirs"), [("R50x1", "resnetv2_50x1_bit")])
def test_bit_gives_timm_logits_and_gradients(name, theirs):
    config = configure_bit(name, classes=5)
    model = timm.create_model(theirs, num_classes=5)
    assert_same(vitrail.build_from(config), spread(model, 0.02), map_bit(config), torch.randn(1, 3, 224, 224))


def test_other_grid_gives_timm_logits_with_resampled_positions():
    config = configure(**OURS)
    theirs = spread(VisionTransformer(**SMALL, dynamic_img_size=True))
    ours = vitrail.build_from(config)
    ours.load_state_dict(import_state(map_vit(config), dict(theirs.named_parameters())))
    for size in ((64, 64), (96, 64), (160, 128), (32, 48)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(ours.eval()(image), theirs.eval()(image), rtol=1e-4, atol=1e-4)
