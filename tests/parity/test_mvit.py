"""Multiscale Vision Transformers: logits, gradients and tensors of timm, at several image sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from tests.parity.peers import assert_same, relative_difference, spread
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.detect import detect_format
from vitrail.checkpoints.keys import export_state, import_state
from vitrail.models.registry import build_from, configure

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
from safetensors.torch import load_file, save_file
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg, checkpoint_filter_fn

VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "mlp": {"expand_attn": False, "num_heads": 2},
    "class token": {"use_cls_token": True},
    "two stages": {"depths": (1, 2), "stride_q": ((1, 1), (2, 2))},
}


def build_timm(size: int = 64, **options: Any) -> MultiScaleVit:
    config = {"depths": (1, 2, 2, 1), "embed_dim": 16, "num_heads": 1} | options
    torch.manual_seed(0)
    return spread(MultiScaleVit(MultiScaleVitCfg(**config), img_size=size, num_classes=5)).eval()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def detect(tensors: dict[str, Tensor]):
    return detect_format({name: tuple(t.shape) for name, t in tensors.items()}, {}, {})


def load(tensors: dict[str, Tensor]):
    """Return our model of timm's tensors."""
    found = detect(tensors)
    assert found.format == "timm mvitv2"
    assert found.is_complete, found.list_differences()
    ours = build_from(found.config).eval()
    ours.load_state_dict(import_state(found.table, tensors))
    return ours


def fit_tables(model: MultiScaleVit, size: tuple[int, int]) -> MultiScaleVit:
    """Give timm's model tables for images that are not square, which its code uses but its constructor refuses."""
    grid = tuple(side // 4 for side in size)
    for stage in model.stages:
        for block in stage.blocks:
            attention, sides = block.attn, []
            for side, q, k in zip(grid, attention.pool_q.stride, attention.pool_k.stride, strict=True):
                sides.append((side // q, side // k))
            for name, pair in zip(("rel_pos_h", "rel_pos_w"), sides, strict=True):
                table = getattr(attention, name)
                new = F.interpolate(table.detach().T[None], size=2 * max(pair) - 1, mode="linear")[0].T
                setattr(attention, name, nn.Parameter(new.contiguous()))
            grid = tuple(q for q, _ in sides)
    return model


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("size", [64, 96])
def test_logits_gradients_and_tensors_are_timms(options: dict[str, Any], size: int):
    theirs = build_timm(size, **options)
    found = detect(tensors_of(theirs))
    assert found.format == "timm mvitv2"
    assert found.is_complete, found.list_differences()
    assert not found.ignored
    assert found.config.image_size == (size, size)
    assert_same(build_from(found.config), theirs, found.table, torch.randn(2, 3, size, size))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_another_size_resamples_positions_as_timm_does(options: dict[str, Any]):
    """timm resamples the tables when it loads a file for another size; ours also without that, inside the model."""
    tensors, image = tensors_of(build_timm(64, **options)), torch.randn(2, 3, 96, 96)
    theirs = build_timm(96, **options)
    resampled = checkpoint_filter_fn(dict(tensors), theirs)
    theirs.load_state_dict(resampled)
    ours = load(tensors)
    resized = ours.resize((96, 96))
    written = export_state(detect(resampled).table, resized.state_dict())
    assert all(torch.equal(written[name], tensor) for name, tensor in resampled.items())
    with torch.inference_mode():
        expected = theirs(image)
        assert relative_difference(resized(image), expected) <= 1e-5
        assert relative_difference(ours(image), expected) <= 1e-5


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("size", [(64, 96), (128, 32)])
def test_images_that_are_not_square_give_timms_logits_and_gradients(options: dict[str, Any], size: tuple[int, int]):
    theirs = build_timm(64, **options)
    ours = load(tensors_of(theirs))
    resized = ours.resize(size)
    fit_tables(theirs, size)
    found = detect(tensors_of(theirs))
    assert found.config == resized.config
    image = torch.randn(2, 3, *size)
    with torch.inference_mode():
        assert relative_difference(ours(image), theirs(image)) <= 1e-5
        assert relative_difference(resized(image), theirs(image)) <= 1e-5
    assert_same(resized, theirs, found.table, image)


def test_stage_outputs_are_timms():
    for options in VARIANTS.values():
        theirs = build_timm(64, **options)
        image = torch.randn(1, 3, 64, 64)
        with torch.inference_mode():
            expected = theirs.forward_intermediates(image, intermediates_only=True)
            actual = load(tensors_of(theirs)).feature_maps(image)
        assert len(actual) == len(expected)
        for ours, wanted in zip(actual, expected, strict=True):
            assert relative_difference(ours, wanted) <= 1e-5


def test_the_published_tiny_model_at_its_own_size():
    import timm

    theirs = timm.create_model("mvitv2_tiny").eval()
    ours, image = load(tensors_of(theirs)), torch.randn(1, 3, 224, 224)
    assert ours.config == configure("MViTv2-T")
    with torch.inference_mode():
        assert relative_difference(ours(image), theirs(image)) <= 1e-4


def test_files_convert_and_come_back_bit_for_bit(tmp_path: Path):
    for number, options in enumerate(VARIANTS.values()):
        tensors = tensors_of(build_timm(64, **options))
        file, own, back = (tmp_path / f"{name}-{number}.safetensors" for name in ("timm", "ours", "back"))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        convert(file, own, "vitrail")
        report = convert(own, back, "timm")
        assert report.largest_difference <= 1e-5 * max(1.0, report.largest_logit)
        returned = load_file(back)
        assert set(returned) == set(tensors)
        assert all(torch.equal(returned[name], tensor) for name, tensor in tensors.items())


def test_models_that_timm_cannot_express_are_refused(tmp_path: Path):
    small = {"family": "mvit", "width": 8, "depths": (1, 1), "heads": (1, 2), "classes": 3, "image_size": 32}
    for options, reason in (
        ({"image_size": (32, 64)}, r"needs square images with sides in multiples of 8, got 32×64"),
        ({"residual_pooling": "none"}, r"stores no residual_pooling, which must be all, got none"),
        ({"q_strides": ((1, 1), (4, 4))}, r"stores no q_strides"),
    ):
        vitrail.save(build_from(configure(**small | options)), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=reason):
            convert(tmp_path / "model.safetensors", tmp_path / "out.safetensors", "timm")
        assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(
        ValueError, match="transformers does not support Multiscale Vision Transformers: use --to vitrail"
    ):
        convert(tmp_path / "model.safetensors", tmp_path / "out", "hf")


def test_damaged_files_are_refused_with_the_reason(tmp_path: Path):
    tensors = tensors_of(build_timm())

    def refuse(match: str, name: str, changed: Tensor | None) -> None:
        kept = {key: tensor for key, tensor in (tensors | {name: changed}).items() if tensor is not None}
        save_file({key: tensor.contiguous() for key, tensor in kept.items()}, tmp_path / "in.safetensors")
        with pytest.raises(ValueError, match=match):
            vitrail.load(tmp_path / "in.safetensors")

    first, later = "stages.0.blocks.0.attn.rel_pos_h", "stages.1.blocks.0.attn.rel_pos_w"
    refuse("a table of 30 relative positions fits no grid", first, torch.zeros(30, 16))
    refuse(r"rel_pos_w is \[14, 16\], expected \[15, 16\]", later, torch.zeros(14, 16))
    refuse(r"rel_pos_w \[15, 16\] is missing", later, None)
    swins = "layers.0.blocks.0.attn.relative_position_bias_table"
    refuse(r"relative_position_bias_table \[49, 1\] is unexpected", swins, torch.zeros(49, 1))
    refuse(r"pos_embed \[1, 256, 16\] is unexpected", "pos_embed", torch.zeros(1, 256, 16))
