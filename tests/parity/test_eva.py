"""EVA and EVA-02: the logits and gradients of timm, at any image size, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file

import vitrail
from tests.parity.peers import assert_same, relative_difference, spread
from vitrail.checkpoints.formats import eva as names
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm
from vitrail.nn.mlp import SwiGLU

eva = pytest.importorskip("timm.models.eva", reason="timm is not installed: pip install 'vitrail[peers]'")

OURS = {"patch": 16, "width": 48, "depth": 3, "heads": 3, "mlp_width": 128, "image_size": 64, "classes": 7}
THEIRS = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 4 * 2 / 3, "num_classes": 7}
ROTARY = {"swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (16, 16)}
LARGE = {**ROTARY, "qkv_fused": False, "scale_mlp": True}
EVA02 = {"position": "rotary-eva02"}
VARIANTS = {
    "EVA": ({}, {"pool": "mean-norm"}),
    "EVA-02 tiny": (ROTARY, {**EVA02, "mlp": "swiglu", "pool": "mean-norm"}),
    "EVA-02 large": (LARGE, {**EVA02, "mlp": SwiGLU(normed=True), "pool": "mean-norm"}),
    "EVA-02 CLIP": (
        {**LARGE, "scale_attn_inner": True, "global_pool": "token"},
        {**EVA02, "mlp": SwiGLU(normed=True), "block": PreNorm(attention_norm=True)},
    ),
}


@pytest.mark.parametrize("size", [(64, 64), (32, 32), (112, 112), (48, 80)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_timms_logits_and_gradients(variant, size):
    theirs, ours = VARIANTS[variant]
    peer = spread(eva.Eva(**THEIRS, **theirs, dynamic_img_size=True))
    config = configure(**OURS, **ours, key_bias=False, prefix="class")
    assert_same(vitrail.build_from(config), peer, names.build_table(config), torch.randn(2, 3, *size))


def make_file(folder, changes, **options):
    model = spread(eva.Eva(**{**THEIRS, "embed_dim": 192, "depth": 1, **LARGE, **options})).eval()
    state = {**model.state_dict(), **changes}
    path = folder / "eva02_base_patch16_64.safetensors"
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path, model


def test_a_file_named_as_timm_names_it_is_read(tmp_path):
    path, model = make_file(tmp_path, {})
    image = torch.randn(2, 3, 64, 64)
    assert relative_difference(vitrail.load(path)(image), model(image)) <= 1e-4
    with inspect_checkpoint(path) as found:
        assert found.contract.config.describe() == "ViT of width 192, depth 1, patch 16"
        assert found.preprocessing_from == "timm's default for EVA"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.mlp.norm.bias": None}, r"blocks\.0\.mlp\.norm\.bias \[512\] is missing"),
        ({"blocks.0.attn.v_proj.bias": None}, r"blocks\.0\.attn\.v_proj\.bias \[192\] is missing"),
        ({"blocks.0.attn.k_proj.bias": torch.ones(192)}, r"blocks\.0\.attn\.k_proj\.bias \[192\] is unexpected"),
        ({"rope.freqs": torch.ones(4)}, r"rope\.freqs \[4\] is unexpected"),
        ({"pos_embed": torch.ones(1, 12, 192)}, "11 positions are no square grid"),
        ({"patch_embed.proj.weight": torch.ones(1792, 3, 16, 16)}, "eva02_enormous is not supported"),
    ],
)
def test_a_changed_file_is_refused_by_the_name_of_the_tensor(tmp_path, changes, message):
    path, _ = make_file(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        vitrail.load(path)
