"""Multiscale Vision Transformers of clips: logits, gradients and tensors of torchvision, at several clip shapes."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.parity.peers import assert_same, relative_difference, spread
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.detect import detect_format
from vitrail.checkpoints.keys import import_state
from vitrail.data.video import to_video
from vitrail.models.registry import build_from, configure

pytest.importorskip("torchvision", reason="torchvision is not installed: pip install 'vitrail[peers]'")
from safetensors.torch import load_file, save_file
from torchvision.models.video import mvit_v1_b, mvit_v2_s
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.transforms._presets import VideoClassification

Shape = tuple[int, int, int]
V2 = {"rel_pos_embed": True, "residual_pool": True, "proj_after_attn": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "v1": {"pools_every_query": False},
    "v2": V2,
    "v2 that grows in the MLP": {**V2, "proj_after_attn": False},
    "v1 that grows in the attention": {"proj_after_attn": True, "pools_every_query": False},
}
SHAPES: list[Shape] = [(8, 64, 64), (4, 96, 96)]
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def build_torchvision(shape: Shape, pools_every_query: bool = True, **options: Any) -> MViT:
    """Return a small model with torchvision's strides: two stages of one and two layers, 16 and 32 channels wide."""
    options = {"rel_pos_embed": False, "residual_pool": False, "proj_after_attn": False} | options
    widths = [(16, 16), (16, 32), (32, 32)] if options["proj_after_attn"] else [(16, 32), (32, 32), (32, 32)]
    kernel, still, halving = [3, 3, 3], [1, 1, 1], [1, 2, 2]
    strides = (still, halving, still)
    settings = [
        MSBlockConfig(
            num_heads=heads,
            input_channels=inputs,
            output_channels=outputs,
            kernel_q=kernel if pools_every_query or stride is halving else [],
            kernel_kv=kernel,
            stride_q=stride if pools_every_query or stride is halving else [],
            stride_kv=[1, 8, 8] if layer == 0 else [1, 4, 4],
        )
        for layer, (heads, (inputs, outputs), stride) in enumerate(zip((1, 2, 2), widths, strides, strict=True))
    ]
    torch.manual_seed(0)
    model = MViT(shape[1:], shape[0], settings, residual_with_cls_embed=False, num_classes=5, **options)
    spread(model)
    return model.eval()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def detect(tensors: dict[str, Tensor]):
    return detect_format({name: tuple(tensor.shape) for name, tensor in tensors.items()}, {}, {})


def load(tensors: dict[str, Tensor]):
    """Return our model of these tensors."""
    found = detect(tensors)
    assert found.is_complete, found.list_differences()
    ours = build_from(found.config).eval()
    ours.load_state_dict(import_state(found.table, tensors))
    return ours


@every_variant
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_gradients_and_tensors_are_torchvisions(options: dict[str, Any], shape: Shape):
    theirs = build_torchvision(shape, **options)
    found = detect(tensors_of(theirs))
    assert found.format == "torchvision mvit"
    assert found.is_complete, found.list_differences()
    assert not found.ignored
    assert found.config.input_size == shape
    assert_same(build_from(found.config), theirs, found.table, torch.randn(2, 3, *shape))


@pytest.mark.parametrize(
    ("builder", "name", "parameters"),
    [(mvit_v1_b, "MViTv1-B", 36_610_672), (mvit_v2_s, "MViTv2-S", 34_537_744)],
    ids=["v1", "v2"],
)
def test_published_models_have_the_shapes_of_torchvisions(builder: Any, name: str, parameters: int):
    with torch.device("meta"):
        theirs, ours = builder(), vitrail.build(name, frames=16)
    assert sum(p.numel() for p in ours.parameters()) == parameters == sum(p.numel() for p in theirs.parameters())
    found = detect_format({key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}, {}, {})
    assert found.is_complete, found.list_differences()
    assert found.config == ours.config == configure(name, frames=16)


@pytest.mark.parametrize("options", [VARIANTS["v2"], VARIANTS["v2 that grows in the MLP"]], ids=["v2", "v2 mlp"])
@pytest.mark.parametrize("shape", [(4, 96, 96), (16, 32, 64)], ids=str)
def test_other_clip_shapes_resample_positions_as_torchvision_does(options: dict[str, Any], shape: Shape):
    """torchvision's attention resamples tables of another size, but its constructor makes tables of its own size."""
    source, theirs = build_torchvision((8, 64, 64), **options), build_torchvision(shape, **options)
    tensors, clip = tensors_of(source), torch.randn(1, 3, *shape)
    theirs.load_state_dict({name: tensor for name, tensor in tensors.items() if "rel_pos" not in name}, strict=False)
    for block, other in zip(theirs.blocks, source.blocks, strict=True):
        for name in ("rel_pos_t", "rel_pos_h", "rel_pos_w"):
            setattr(block.attn, name, nn.Parameter(getattr(other.attn, name).detach()))
    with torch.inference_mode():
        assert relative_difference(load(tensors)(clip), theirs(clip)) <= 1e-5


def test_frames_that_are_not_square_are_read_with_the_size_that_is_given():
    theirs, clip = build_torchvision((4, 64, 96), **VARIANTS["v1"]), torch.randn(1, 3, 4, 64, 96)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    with pytest.raises(ValueError, match=r"384 positions are no square grid: give assume=\{'size'"):
        detect_format(shapes, {}, {})
    found = detect_format(shapes, {}, {"size": (64, 96)})
    assert found.is_complete, found.list_differences()
    assert_same(build_from(found.config), theirs, found.table, clip)


@every_variant
def test_files_convert_and_come_back_bit_for_bit(options: dict[str, Any], tmp_path: Path):
    tensors = tensors_of(build_torchvision((4, 32, 32), **options))
    file, own, back = (tmp_path / f"{name}.safetensors" for name in ("theirs", "ours", "back"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    convert(file, own, "vitrail")
    assert vitrail.load(own).config.input_size == (4, 32, 32)
    report = convert(own, back, "torchvision")
    assert report.largest_difference <= 1e-5 * max(1.0, report.largest_logit)
    returned = load_file(back)
    assert set(returned) == set(tensors)
    assert all(torch.equal(returned[name], tensor) for name, tensor in tensors.items())
    again = build_torchvision((4, 32, 32), **options)
    again.load_state_dict(returned)  # strict


def test_models_that_torchvision_cannot_express_are_refused(tmp_path: Path):
    small = {
        "family": "mvit",
        "width": 8,
        "depths": (1, 1),
        "heads": (1, 2),
        "classes": 3,
        "frames": 4,
        "image_size": 32,
    }
    source, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    for options, to, reason in (
        ({"image_size": (32, 64)}, "torchvision", "has tables for square frames, got 32×64: resize the model"),
        ({"image_size": 36}, "torchvision", "needs clips in multiples of 2×8×8, got 4×36×36"),
        ({"frames": 5}, "torchvision", "needs clips in multiples of 2×8×8, got 5×32×32"),
        ({"residual_pooling": "all"}, "torchvision", "stores no residual_pooling, which must be patches, got all"),
        ({"kv_stride": (1, 4, 4)}, "torchvision", r"stores no kv_stride, which must be \(1, 8, 8\)"),
        ({"q_strides": ((1, 1, 1), (2, 2, 2))}, "torchvision", "stores no q_strides"),
        ({"class_token": False}, "torchvision", "needs class_token=True, got False"),
        ({"channels": 1}, "torchvision", "needs channels=3, got 1"),
        ({"mlp_ratio": 2.0}, "torchvision", "needs mlp_ratio=4.0, got 2.0"),
        ({}, "timm", "timm's Multiscale Vision Transformer takes images, not clips: use --to torchvision"),
        ({"frames": None}, "torchvision", "takes clips, not images: use --to timm"),
    ):
        vitrail.save(build_from(configure(**small | options)), source)
        with pytest.raises(ValueError, match=reason):
            convert(source, out, to)
        assert not out.exists()


def test_damaged_files_are_refused_with_the_reason(tmp_path: Path):
    v1, v2 = (tensors_of(build_torchvision((4, 32, 32), **VARIANTS[name])) for name in ("v1", "v2"))

    def refuse(tensors: dict[str, Tensor], match: str, name: str, changed: Tensor | None) -> None:
        kept = {key: tensor for key, tensor in (tensors | {name: changed}).items() if tensor is not None}
        save_file({key: tensor.contiguous() for key, tensor in kept.items()}, tmp_path / "in.safetensors")
        with pytest.raises(ValueError, match=match):
            vitrail.load(tmp_path / "in.safetensors")

    refuse(v2, "a table of 4 relative positions fits no grid", "blocks.0.attn.rel_pos_t", torch.zeros(4, 16))
    refuse(v2, r"rel_pos_w \[7, 16\] is missing", "blocks.1.attn.rel_pos_w", None)
    refuse(v2, r"rel_pos_h is \[9, 16\], expected \[7, 16\]", "blocks.2.attn.rel_pos_h", torch.zeros(9, 16))
    refuse(v2, r"class_pos \[16\] is unexpected", "pos_encoding.class_pos", torch.zeros(16))
    refuse(v1, r"rel_pos_t \[3, 16\] is unexpected", "blocks.0.attn.rel_pos_t", torch.zeros(3, 16))
    refuse(v1, r"there is no pos_encoding.temporal_pos", "pos_encoding.temporal_pos", None)
    refuse(v1, r"class_pos \[16\] is missing", "pos_encoding.class_pos", None)
    refuse(v1, r"pool_q.pool.weight \[16, 1, 3, 3, 3\] is missing", "blocks.1.attn.pool_q.pool.weight", None)


# --- PySlowFast ---

# From torchvision's names to those of PySlowFast, whose weights torchvision ported; written by hand from its modules.
SLOWFAST_NAMES = {
    r"conv_proj\.": "patch_embed.proj.",
    r"pos_encoding\.class_token": "cls_token",
    r"pos_encoding\.(spatial|temporal|class)_pos": r"pos_embed_\1",
    r"attn\.project\.0": "attn.proj",
    r"attn\.pool_([qkv])\.pool": r"attn.pool_\1",
    r"attn\.pool_([qkv])\.norm_act\.0": r"attn.norm_\1",
    r"mlp\.0": "mlp.fc1",
    r"mlp\.3": "mlp.fc2",
    r"(blocks\.\d+)\.project": r"\1.proj",
    r"head\.1": "head.projection",
}


def to_slowfast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return torchvision's tensors under PySlowFast's names; its tokens and tables begin with axes of length 1."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("pos_encoding."):
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        for pattern, replacement in SLOWFAST_NAMES.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


@every_variant
def test_training_checkpoints_of_pyslowfast_are_read(options: dict[str, Any], tmp_path: Path):
    theirs, clip = build_torchvision((8, 32, 32), **options), torch.randn(1, 3, 8, 32, 32)
    state = to_slowfast(tensors_of(theirs))
    torch.save(
        {"epoch": 200, "model_state": state, "optimizer_state": {}, "cfg": "MODEL: MViT"}, tmp_path / "k400.pyth"
    )
    ours = vitrail.load(tmp_path / "k400.pyth").eval()
    assert detect(state).format == "pyslowfast mvit"
    with torch.inference_mode():
        assert relative_difference(ours(clip), theirs(clip)) <= 1e-5


# --- preprocessing ---


def test_every_fourth_frame_is_preprocessed_as_torchvision_does():
    config = configure("MViTv2-S", frames=16)
    with torch.device("meta"):
        theirs = mvit_v2_s()
    form = detect_format({key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}, {}, {})
    from vitrail.checkpoints.detect import FORMATS

    pipeline = next(each for each in FORMATS if each.name == form.format).default_preprocessing(config, "")[0]
    pixels = np.random.default_rng(0).integers(0, 256, (61, 300, 401, 3), dtype=np.uint8)  # one clip
    preset = partial(VideoClassification, mean=(0.45,) * 3, std=(0.225,) * 3)
    expected = preset(crop_size=(224, 224), resize_size=(256,))(torch.from_numpy(pixels[::4]).permute(0, 3, 1, 2))
    actual = pipeline(to_video(pixels))
    assert actual.shape == expected.shape == (3, 16, 224, 224)
    assert float((actual - expected).abs().max()) <= 1.01 / 255 / 0.225  # a rounding of one value
