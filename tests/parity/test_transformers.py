"""Same weights, same logits, same gradients as Hugging Face transformers, through the names that it writes to disk."""

import pytest
import torch

import vitrail
from tests.parity.peers import assert_same, saved_state, spread
from vitrail.checkpoints.formats.transformers import map_vit
from vitrail.models.registry import configure

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")

THEIRS = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 7,
}
OURS = {"patch": 16, "width": 48, "depth": 3, "heads": 3, "image_size": 64, "classes": 7}


def logits(answer):
    return answer.logits


def test_vit_gives_transformers_logits_and_gradients():
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**THEIRS, intermediate_size=192))
    config = configure(**OURS, eps=1e-12)
    image = torch.randn(2, 3, 64, 64)
    assert_same(vitrail.build_from(config), spread(theirs), map_vit(config, "vit"), image, saved_state, logits)


def test_vit_model_pooler_is_the_pre_logits_head():
    theirs = transformers.ViTModel(transformers.ViTConfig(**THEIRS, intermediate_size=192))
    config = configure(**{**OURS, "classes": None}, eps=1e-12, head="pre-logits")
    image = torch.randn(2, 3, 64, 64)
    model = vitrail.build_from(config)
    assert_same(model, spread(theirs), map_vit(config, "vit"), image, saved_state, lambda answer: answer.pooler_output)


def test_deit_with_teacher_gives_transformers_logits_and_gradients():
    settings = transformers.DeiTConfig(**THEIRS, intermediate_size=192)
    theirs = transformers.DeiTForImageClassificationWithTeacher(settings)
    config = configure(**OURS, eps=1e-12, prefix="class+distillation")
    image = torch.randn(2, 3, 64, 64)
    assert_same(vitrail.build_from(config), spread(theirs), map_vit(config, "deit"), image, saved_state, logits)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_gives_transformers_logits_and_gradients(swiglu, registers):
    if registers:
        family = "dinov2_with_registers"
        settings = transformers.Dinov2WithRegistersConfig(
            **THEIRS, mlp_ratio=4, use_swiglu_ffn=swiglu, num_register_tokens=registers
        )
        theirs = transformers.Dinov2WithRegistersForImageClassification(settings)
    else:
        family = "dinov2"
        settings = transformers.Dinov2Config(**THEIRS, mlp_ratio=4, use_swiglu_ffn=swiglu)
        theirs = transformers.Dinov2ForImageClassification(settings)
    config = configure(
        **OURS,
        mlp="swiglu" if swiglu else "gelu",
        mlp_width=128 if swiglu else 192,
        layer_scale=1.0,
        pool="class+mean",
        registers=registers,
    )
    image = torch.randn(2, 3, 64, 64)
    assert_same(vitrail.build_from(config), spread(theirs), map_vit(config, family), image, saved_state, logits)
