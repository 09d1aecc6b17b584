"""DINOv3 in three namings: the logits and gradients of timm, of transformers and of Meta's formula, at any image size."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitrail
from tests.parity.peers import assert_same, relative_difference, saved_state, spread
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.formats import dinov3
from vitrail.checkpoints.keys import export_state
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm
from vitrail.nn.position import RotaryDINOv3

eva = pytest.importorskip("timm.models.eva", reason="timm is not installed: pip install 'vitrail[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")

OURS = {"patch": 16, "width": 192, "depth": 3, "heads": 3, "image_size": 64, "classes": None, "registers": 4}
OURS |= {"position": "rotary-dinov3", "layer_scale": 1.0, "eps": 1e-5, "key_bias": False}
SIZES = [(64, 64), (32, 32), (112, 112), (48, 80)]  # its own, a smaller, a larger and a non-square one


def make_timm(**options):
    given = {"img_size": 64, "embed_dim": 192, "depth": 3, "num_heads": 3, "init_values": 1.0, "dynamic_img_size": True}
    rotary = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
    given |= {"use_abs_pos_emb": False, "num_reg_tokens": 4, "use_fc_norm": False, **rotary, **options}
    return eva.Eva(**given, norm_layer=partial(torch.nn.LayerNorm, eps=1e-5))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["gelu, bias of q and v", "swiglu, no bias"])
def test_timms_logits_and_gradients(size, variant):
    if variant.startswith("gelu"):
        theirs = make_timm(num_classes=7)
        config = configure(**{**OURS, "classes": 7}, pool="mean", prefix="class")
    else:
        theirs = make_timm(num_classes=0, global_pool="token", qkv_bias=False, swiglu_mlp=True, swiglu_align_to=8)
        block = PreNorm(qkv_bias=False, key_bias=False)
        config = configure(**OURS, block=block, mlp="swiglu")
    table = dinov3.build_table(config, "", dinov3.TIMM)
    assert_same(vitrail.build_from(config), spread(theirs), table, torch.randn(2, 3, *size))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["gelu", "swiglu", "bias of the keys too"])
def test_transformers_logits_and_gradients(size, variant):
    gated = variant == "swiglu"
    settings = transformers.DINOv3ViTConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=768,
        num_register_tokens=4,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
        key_bias=variant.startswith("bias"),
    )
    config = configure(**OURS | {"key_bias": settings.key_bias}, mlp="swiglu" if gated else "gelu")
    theirs, image = spread(transformers.DINOv3ViTModel(settings)), torch.randn(2, 3, *size)
    table = dinov3.build_table(config, "", dinov3.TRANSFORMERS)
    assert_same(vitrail.build_from(config), theirs, table, image, saved_state, lambda answer: answer.pooler_output)


# --- Meta's release ---


def compute_by_formula(state: dict[str, Tensor], image: Tensor, heads: int) -> Tensor:
    """Return the normalised class token, from tensors in the names of Meta's release, in plain PyTorch."""
    patches = F.conv2d(image, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16)
    b, width, h, w = patches.shape
    tokens = (state["cls_token"].expand(b, -1, -1), state["storage_tokens"].expand(b, -1, -1))
    z = torch.cat((*tokens, patches.flatten(2).transpose(1, 2)), 1)
    ys, xs = (torch.tensor([(2 * i + 1) / side - 1 for i in range(side)]) for side in (h, w))
    angles = [[*(y / state["rope_embed.periods"]), *(x / state["rope_embed.periods"])] for y in ys for x in xs]
    turn = torch.polar(torch.ones(h * w, width // heads // 2), 2 * math.pi * torch.tensor(angles))  # e^{i angle}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"] * state.get(f"{name}.bias_mask", torch.ones(()))

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.complex(x[:, :, 5:, :half], x[:, :, 5:, half:]) * turn
        return torch.cat((x[:, :, :5], torch.cat((turned.real, turned.imag), -1)), 2)

    for layer in range(3):
        name = f"blocks.{layer}"
        parts = linear(norm(z, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        attention = (rotate(q) @ rotate(k).transpose(2, 3) / math.sqrt(width // heads)).softmax(-1)
        mixed = linear((attention @ v).transpose(1, 2).flatten(2), f"{name}.attn.proj")
        z = z + state[f"{name}.ls1.gamma"] * mixed
        x = norm(z, f"{name}.norm2")
        if f"{name}.mlp.w1.weight" in state:
            y = linear(F.silu(linear(x, f"{name}.mlp.w1")) * linear(x, f"{name}.mlp.w2"), f"{name}.mlp.w3")
        else:
            y = linear(F.gelu(linear(x, f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
        z = z + state[f"{name}.ls2.gamma"] * y
    return norm(z, "norm")[:, 0]


def make_release(folder: Path, precision: str = "bfloat16", mlp: str = "gelu") -> tuple[Path, dict[str, Tensor]]:
    """Write a file in the names of Meta's release, with the tensors that only pre-training uses."""
    torch.manual_seed(0)
    model = spread(vitrail.build(**OURS | {"position": RotaryDINOv3(precision=precision)}, mlp=mlp))
    state = export_state(dinov3.map_vit(model.config, dinov3.META), dict(model.named_parameters()))
    state = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    unused = {"mask_token": torch.randn(1, 192), "local_cls_norm.weight": torch.ones(192)}
    save_file(state | unused, folder / "dinov3_vits16.safetensors")
    return folder / "dinov3_vits16.safetensors", state


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_release_computes_metas_formula_with_the_stored_periods(tmp_path, precision, mlp):
    path, state = make_release(tmp_path, precision, mlp)
    model = vitrail.load(path)
    assert model.config.position == RotaryDINOv3(precision=precision)
    assert (model.config.size.heads, model.config.block.key_bias, model.config.block.qkv_bias) == (3, False, True)
    for size in SIZES:
        image = torch.randn(2, 3, *size)
        assert relative_difference(model(image), compute_by_formula(state, image, 3)) <= 1e-4


def test_gradients_of_metas_formula(tmp_path):
    path, state = make_release(tmp_path)
    model, image = vitrail.load(path), torch.randn(2, 3, 48, 80)
    for name in state:
        state[name].requires_grad_("periods" not in name and "mask" not in name)
    direction = torch.randn(2, 192)
    (compute_by_formula(state, image, 3) * direction).sum().backward()
    (model(image) * direction).sum().backward()
    expected = state["blocks.1.attn.qkv.bias"].grad
    assert relative_difference(model.blocks[1].msa.qkv.bias.grad, torch.cat((expected[:192], expected[384:]))) <= 1e-4
    assert not expected[192:384].any()  # of the keys
    weight = state["blocks.1.attn.qkv.weight"].grad
    assert relative_difference(model.blocks[1].msa.qkv.weight.grad, weight) <= 1e-4
    assert relative_difference(model.prefix.registers.grad, state["storage_tokens"].grad) <= 1e-4


def test_periods_in_bfloat16_are_reported_and_kept(tmp_path):
    path, state = make_release(tmp_path)
    assert not torch.equal(state["rope_embed.periods"], torch.tensor(RotaryDINOv3().compute_periods(64)))
    with inspect_checkpoint(path) as found:
        value, source = found.detection.assumptions["periods"]
        assert found.detection.ignored == dict.fromkeys(("mask_token", "local_cls_norm.weight"), dinov3.UNUSED)
    assert value == "bfloat16"
    assert source == "rope_embed.periods; angles differ by up to 0.0085 from those of float32"
    convert(path, tmp_path / "back.safetensors", "dinov3")
    back = load_file(tmp_path / "back.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_other_projects_compute_periods_in_float32_and_the_report_says_so(tmp_path):
    path, state = make_release(tmp_path)
    report = convert(path, tmp_path / "timm.safetensors", "timm")
    note = (
        "timm computes the periods of the rotation in float32, here they are in bfloat16: angles differ by up to 0.0085"
    )
    assert note in report.notes
    assert "timm's models with a bias of q and v end in _qkvb" in report.notes
    assert "the file does not record class token pooling, bfloat16 periods: give it when loading" in report.notes
    report = convert(path, tmp_path / "hf", "hf")
    assert note.replace("timm", "transformers' dinov3_vit") in report.notes

    image = torch.randn(2, 3, 64, 64)
    theirs = make_timm(num_classes=0, global_pool="token").eval()
    theirs.load_state_dict(load_file(tmp_path / "timm.safetensors"), strict=True)
    ours = vitrail.load(tmp_path / "timm.safetensors", assume={"pool": "class"})
    assert relative_difference(ours(image), theirs(image)) <= 1e-4
    rounded = vitrail.load(tmp_path / "timm.safetensors", assume={"pool": "class", "periods": "bfloat16"})
    assert relative_difference(rounded(image), compute_by_formula(state, image, 3)) <= 1e-4
    assert relative_difference(rounded(image), ours(image)) > 1e-6


def test_a_model_without_a_bias_gets_zeros_for_metas_code(tmp_path):
    block = PreNorm(qkv_bias=False, key_bias=False)
    vitrail.save(spread(vitrail.build(**OURS, block=block)), tmp_path / "model.safetensors")
    report = convert(tmp_path / "model.safetensors", tmp_path / "meta.safetensors", "dinov3")
    assert "q and v get a bias of zeros, which they do not have here" in report.notes
    state = load_file(tmp_path / "meta.safetensors")
    assert not state["blocks.0.attn.qkv.bias"].any()
    report = convert(tmp_path / "meta.safetensors", tmp_path / "timm.safetensors", "timm")
    assert "timm's models with a bias of q and v end in _qkvb: here all of it is zero" in report.notes


def change(state, **changes):
    return {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rope_embed.periods", None, "there is no rope_embed.periods"),
        ("rope_embed.periods", torch.arange(1.0, 17.0), r"periods are not powers of a base such as 100: 1\.0"),
        ("rope_embed.periods", torch.ones(5), r"rope_embed\.periods has 5 values, which do not divide the width 192"),
        ("rope_embed.periods", torch.full((16,), math.nan), r"periods are not powers of a base such as 100: nan"),
        ("storage_tokens", None, "there is no storage_tokens"),
        ("blocks.1.ls2.gamma", None, r"blocks\.1\.ls2\.gamma \[192\] is missing"),
        ("blocks.1.attn.qkv.bias_mask", torch.ones(576), "bias_mask must be 1 for queries and values and 0 for keys"),
        ("blocks.1.attn.qkv.bias", torch.ones(384), r"blocks\.1\.attn\.qkv\.bias is \[384\], expected \[576\]"),
        ("cls_norm.weight", torch.ones(192), r"cls_norm\.weight \[192\] is unexpected"),
        ("pos_embed", torch.ones(1, 17, 192), r"pos_embed \[1, 17, 192\] is unexpected"),
    ],
)
def test_a_changed_release_is_refused_by_the_name_of_the_tensor(tmp_path, name, tensor, message):
    _, state = make_release(tmp_path)
    save_file(change(state, **{name: tensor}), tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match=message):
        vitrail.load(tmp_path / "changed.safetensors")


def test_a_gated_mlp_with_another_activation_is_refused(tmp_path):
    settings = transformers.DINOv3ViTConfig(
        hidden_size=192, num_hidden_layers=1, num_attention_heads=3, num_register_tokens=4, use_gated_mlp=True
    )
    transformers.DINOv3ViTModel(settings).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"unsupported hidden_act 'gelu' in config\.json: a gated MLP needs silu"):
        vitrail.load(tmp_path / "model")


def test_names_of_transformers_5_modules_are_read_too(tmp_path):
    settings = transformers.DINOv3ViTConfig(
        hidden_size=192, num_hidden_layers=1, num_attention_heads=3, num_register_tokens=4
    )
    model = transformers.DINOv3ViTModel(settings).eval()
    save_file(model.state_dict(), tmp_path / "modules.safetensors")
    image = torch.randn(1, 3, 32, 64)
    ours = vitrail.load(tmp_path / "modules.safetensors")
    assert relative_difference(ours(image), model(image).pooler_output) <= 1e-4


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        ({"registers": 0}, "timm", "its models have a class token and registers"),
        ({"key_bias": True}, "timm", "its keys have no bias"),
        ({"position": RotaryDINOv3(theta=50.0)}, "timm", "its rotation has the base 100"),
        ({"classes": 3}, "hf", "its models have no classes: --classes none"),
        ({"pool": "mean", "prefix": "class"}, "dinov3", "its models return their class token: --assume pool=class"),
        ({"layer_scale": None}, "dinov3", "its models have LayerScale"),
        ({"mlp": "gelu-tanh"}, "dinov3", "its MLP has the exact GELU or SwiGLU"),
        ({}, "dinov2", "it only has learned 1-D positions at the stem"),
        ({"position": "learned1d"}, "dinov3", "its positions are rotary"),
    ],
)
def test_what_a_naming_cannot_express_is_named(tmp_path, options, to, message):
    vitrail.save(vitrail.build(**OURS | options), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "model.safetensors", tmp_path / ("out" if to == "hf" else "out.safetensors"), to)
