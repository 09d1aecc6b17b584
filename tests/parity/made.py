"""Checkpoints as others make them: by their own libraries, or in their exact names, with what the peer answers to an image.

Each maker takes a folder and gives a `Made`: the path, the assumptions, the image, and the peer's outputs.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity.peers import spread

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import timm
import transformers
from safetensors.torch import save_file
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos

SMALL = {"embed_dim": 192, "depth": 2, "num_heads": 3, "img_size": 64, "patch_size": 16, "num_classes": 7}


@dataclass
class Made:
    """A checkpoint on disk and the outputs of its project's code for an image."""

    path: Path
    image: Tensor
    answer: Tensor
    assume: dict[str, Any] = field(default_factory=dict)
    peer: Any = None  # the model that made it, where its makers' code is to open what we write


@dataclass(frozen=True)
class Case:
    """A row of the table: how to make it, its detected format, and the formats it converts to."""

    make: Callable[[Path], Made]
    form: str
    targets: str  # besides vitrail
    left_out: tuple[str, ...] = ()


@torch.inference_mode()
def answer(model: Any, image: Tensor) -> Tensor:
    return model.eval()(image)


def images(model_size: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, model_size, model_size, generator=torch.Generator().manual_seed(1))


def saved(folder: Path, state: dict[str, Tensor], name: str = "weights.safetensors") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file({key: value.detach().clone().contiguous() for key, value in state.items()}, path)
    else:
        torch.save(state, path)
    return path


# --- timm ---


def timm_vit(**arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model = spread(VisionTransformer(**{**SMALL, **arguments}))
        image = images(channels=arguments.get("in_chans", 3))
        assume = {"gelu": "tanh"} if arguments.get("act_layer") == "gelu_tanh" else {}
        return Made(saved(folder, model.state_dict()), image, answer(model, image), assume)

    return make


def timm_named(name: str, size: int = 64, **arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model = spread(timm.create_model(name, **arguments), 0.02)
        image = images(size)
        return Made(saved(folder, model.state_dict()), image, answer(model, image), peer=model)

    return make


def timm_distilled(folder: Path) -> Made:
    model = spread(VisionTransformerDistilled(**SMALL))
    return Made(saved(folder, model.state_dict()), images(), answer(model, images()))


def timm_relative(folder: Path) -> Made:
    model = VisionTransformerRelPos(**SMALL, rel_pos_type="bias", class_token=False, global_pool="avg", fc_norm=True)
    return Made(saved(folder, spread(model).state_dict()), images(), answer(model, images()), peer=model)


def timm_computed_bias(**arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model = spread(VisionTransformerRelPos(**SMALL, **arguments))
        path = saved(folder, model.state_dict())
        return Made(path, images(), answer(model, images()), {"size": 64}, model)

    return make


def timm_beit(shared: bool = False) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        scope = {"use_rel_pos_bias": not shared, "use_shared_rel_pos_bias": shared}
        model = spread(Beit(**SMALL, init_values=0.1, use_abs_pos_emb=False, **scope))
        return Made(saved(folder, model.state_dict()), images(), answer(model, images()), peer=model)

    return make


def timm_pre_logits(folder: Path) -> Made:
    """timm removed this layer; its old files have it between the norm and the head."""
    model = spread(VisionTransformer(**SMALL))
    hidden = spread(torch.nn.Linear(192, 192))
    with torch.inference_mode():
        features = model.eval().forward_head(model.forward_features(images()), pre_logits=True)
        expected = model.head(torch.tanh(hidden(features)))
    state = model.state_dict() | {f"pre_logits.fc.{name}": value for name, value in hidden.state_dict().items()}
    return Made(saved(folder, state), images(), expected)


# --- research releases ---


def deit(folder: Path) -> Made:
    model = spread(VisionTransformer(**SMALL))
    path = saved(folder, {"model": model.state_dict()}, "deit_tiny.pth")
    return Made(path, images(), answer(model, images()))


def deit3(folder: Path) -> Made:
    model = spread(VisionTransformer(**SMALL, init_values=1e-4, no_embed_class=True))
    state = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in model.state_dict().items()}
    path = saved(folder, {"model": state}, "deit_3.pth")
    return Made(path, images(), answer(model, images()))


def mae(folder: Path) -> Made:
    """A pre-training checkpoint: encoder, decoder, and the arguments of the run."""
    model = spread(VisionTransformer(**{**SMALL, "num_classes": 0}))
    decoder = {
        "mask_token": torch.randn(1, 1, 32),
        "decoder_pos_embed": torch.randn(1, 17, 32),
        "decoder_embed.weight": torch.randn(32, 192),
        "decoder_embed.bias": torch.randn(32),
        "decoder_blocks.0.norm1.weight": torch.randn(32),
        "decoder_norm.weight": torch.randn(32),
        "decoder_pred.weight": torch.randn(768, 32),
    }
    state = {"model": model.state_dict() | decoder, "epoch": 799, "args": argparse.Namespace(model="mae_vit", lr=1e-3)}
    return Made(saved(folder, state, "mae.pth"), images(), answer(model, images()))


def dino(folder: Path) -> Made:
    """Student and teacher, each a backbone and a head, as its training saves them."""
    teacher = spread(VisionTransformer(**{**SMALL, "num_classes": 0}))
    student = spread(VisionTransformer(**{**SMALL, "num_classes": 0}))
    head = {"head.mlp.0.weight": torch.randn(64, 192), "head.last_layer.weight_g": torch.randn(100, 1)}
    state = {
        "student": {f"module.backbone.{name}": value for name, value in student.state_dict().items()}
        | {f"module.{name}": value for name, value in head.items()},
        "teacher": {f"backbone.{name}": value for name, value in teacher.state_dict().items()} | head,
        "optimizer": {"state": {0: {"exp_avg": torch.randn(4)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small"),
        "dino_loss": {"center": torch.randn(1, 100)},
    }
    return Made(saved(folder, state, "dino.pth"), images(), answer(teacher, images()))


def dinov2(registers: int, gated: bool) -> Callable[[Path], Made]:
    """timm's own function converts the names, so timm is the reference."""

    def make(folder: Path) -> Made:
        arguments: dict[str, Any] = {**SMALL, "num_classes": 0, "init_values": 1e-5}
        if registers:
            arguments |= {"reg_tokens": registers, "no_embed_class": True}
        if gated:
            from timm.layers import SwiGLUPacked

            arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU, "mlp_ratio": 1024.5 / 192}
        model = spread(VisionTransformer(**arguments))
        state = model.state_dict() | {"mask_token": torch.randn(1, 192)}
        if gated:
            state = {name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): v for name, v in state.items()}
        if registers:
            state["register_tokens"] = state.pop("reg_token")
            state["pos_embed"] = torch.cat((torch.randn(1, 1, 192), state["pos_embed"]), 1)
        path = saved(folder, state, "dinov2.pth")
        model.load_state_dict(checkpoint_filter_fn({name: value.clone() for name, value in state.items()}, model))
        return Made(path, images(), answer(model, images()))

    return make


def dinov3(naming: str, **arguments: Any) -> Callable[[Path], Made]:
    """timm's class is the reference; Meta's names come from it, with the biases' masks and periods in float32."""

    def make(folder: Path) -> Made:
        from timm.models.eva import Eva

        given = {**SMALL, "num_classes": 0, "init_values": 1e-5, "dynamic_img_size": True, "num_reg_tokens": 4}
        given |= {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
        given |= {"use_abs_pos_emb": False, "use_fc_norm": False, **arguments}
        model = spread(Eva(**given, norm_layer=partial(torch.nn.LayerNorm, eps=1e-5)))
        state = model.state_dict()
        if naming == "timm":
            assume = {"pool": "class"} if arguments.get("global_pool") == "token" else {}
            return Made(saved(folder, state), images(), answer(model, images()), assume, model)
        for name in [name for name in state if name.endswith("q_bias")]:
            q, v = state.pop(name), state.pop(name.replace("q_bias", "v_bias"))
            state[name.replace("q_bias", "qkv.bias")] = torch.cat((q, torch.zeros(192), v))
            state[name.replace("q_bias", "qkv.bias_mask")] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(192)
        state["storage_tokens"] = state.pop("reg_token")
        names = {"fc1_g": "w1", "fc1_x": "w2"} | ({"fc2": "w3"} if arguments.get("swiglu_mlp") else {})
        for old, new in names.items():
            state = {name.replace(f"mlp.{old}.", f"mlp.{new}."): value for name, value in state.items()}
        state = {re.sub(r"gamma_(\d)", r"ls\1.gamma", name): value for name, value in state.items()}
        state |= {"rope_embed.periods": 100 ** (torch.arange(16) / 16), "mask_token": torch.randn(1, 192)}
        return Made(saved(folder, state, "dinov3_vitt16.pth"), images(), answer(model, images()))

    return make


def eva(**arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        from timm.models.eva import Eva

        model = spread(Eva(**{**SMALL, **arguments}))
        return Made(saved(folder, model.state_dict()), images(), answer(model, images()), peer=model)

    return make


EVA02 = {"swiglu_mlp": True, "mlp_ratio": 4 * 2 / 3, "use_rot_pos_emb": True, "ref_feat_shape": (16, 16)}
EVA02_LARGE = {**EVA02, "qkv_fused": False, "scale_mlp": True}


# --- CLIP ---


def openclip(folder: Path) -> Made:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed: pip install 'vitrail[peers]'")
    vision = {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    model = spread(open_clip.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text))
    path = saved(folder, model.state_dict(), "open_clip_model.safetensors")
    return Made(path, images(), answer(model.visual, images()), peer=model.visual)


def openai_clip(folder: Path) -> Made:
    """OpenAI's: half-precision matrices, QuickGELU, and three extra scalars."""
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed: pip install 'vitrail[peers]'")
    from open_clip.model import convert_weights_to_lp

    vision = {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    model = spread(open_clip.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text, quick_gelu=True))
    convert_weights_to_lp(model, torch.float16)
    state = dict(model.state_dict())
    state |= {"input_resolution": torch.tensor(64), "context_length": torch.tensor(8), "vocab_size": torch.tensor(50)}
    path = saved(folder, state, "ViT-tiny.pt")
    return Made(path, images(), answer(model.float().visual, images()), peer=model.float().visual)


# --- transformers ---

HF = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 7,
}


def hugging(
    kind: str, read: Callable[[Any, Tensor], Tensor] = lambda model, image: model(image).logits, **settings: Any
) -> Callable[[Path], Made]:
    shards = settings.pop("max_shard_size", "10GB")
    alone = settings.pop("alone", False)

    def make(folder: Path) -> Made:
        family = kind.partition("For")[0].removesuffix("Model")
        config = getattr(transformers, f"{family}Config")(**{**HF, **settings})
        model = spread(getattr(transformers, kind)(config)).eval()
        target = folder / "model"
        model.save_pretrained(target, max_shard_size=shards)
        with torch.inference_mode():
            expected = read(model, images())
        if not alone:
            return Made(target, images(), expected)
        path = folder / "alone.safetensors"
        (target / "model.safetensors").rename(path)
        return Made(path, images(), expected, {"eps": config.layer_norm_eps})

    return make


def pooled(model: Any, image: Tensor) -> Tensor:
    return model(image).pooler_output


def class_token(model: Any, image: Tensor) -> Tensor:
    return model(image).last_hidden_state[:, 0]


def mae_encoder(model: Any, image: Tensor) -> Tensor:
    """Return the encoder's output for all patches in order."""
    encoder = getattr(model, "vit", model)
    encoder.config.mask_ratio = 0.0
    encoder.embeddings.config.mask_ratio = 0.0
    patches = (image.shape[-1] // 16) ** 2
    return encoder(image, noise=torch.arange(patches).float().repeat(len(image), 1)).last_hidden_state[:, 0]


# --- Google ---


def flax(
    *,
    prefix: str = "",
    big_vision: bool = False,
    scanned: bool = False,
    pool: str = "class",
    pre_logits: bool = False,
    hybrid: tuple[int, ...] | None = None,
    old_norms: bool = False,
) -> Callable[[Path], Made]:
    """Arrays with Flax's names and shapes, loaded by timm's own loader, with Flax's GELU."""

    def make(folder: Path) -> Made:
        random = np.random.default_rng(0)
        width, heads, depth, mlp, stride = 192, 3, 2, 768, 16
        attention, dense, second = (0, 0, 1) if big_vision else (1, 3, 2)
        arrays: dict[str, np.ndarray] = {}

        def put(name: str, *shape: int, std: float = 0.05, around: float = 0.0) -> None:
            arrays[name] = (around + std * random.standard_normal(shape)).astype(np.float32)

        def norm(name: str, size: int, *stack: int) -> None:
            put(f"{name}/scale", *stack, size, around=1.0)
            put(f"{name}/bias", *stack, size)

        def mha(name: str, *stack: int) -> None:
            for part in ("query", "key", "value"):
                put(f"{name}/{part}/kernel", *stack, width, heads, width // heads)
                put(f"{name}/{part}/bias", *stack, heads, width // heads)
            put(f"{name}/out/kernel", *stack, heads, width // heads, width)
            put(f"{name}/out/bias", *stack, width)

        def mlp_block(name: str, *stack: int) -> None:
            for index, (into, out) in enumerate(((width, mlp), (mlp, width))):
                put(f"{name}/Dense_{index}/kernel", *stack, into, out)
                put(f"{name}/Dense_{index}/bias", *stack, out)

        patch, channels = stride, 3
        if hybrid is not None:
            patch, channels, inputs = 1, 64 * 4 * 2 ** (len(hybrid) - 1), 64
            put("conv_root/kernel", 7, 7, 3, 64)
            norm("gn_root", 64)
            for stage, units in enumerate(hybrid):
                outputs = 256 * 2**stage
                for unit in range(units):
                    name, middle = f"block{stage + 1}/unit{unit + 1}", outputs // 4
                    put(f"{name}/conv1/kernel", 1, 1, inputs, middle)
                    put(f"{name}/conv2/kernel", 3, 3, middle, middle)
                    put(f"{name}/conv3/kernel", 1, 1, middle, outputs)
                    for index, size in enumerate((middle, middle, outputs)):
                        norm(f"{name}/gn{index + 1}", size)
                    if unit == 0:
                        put(f"{name}/conv_proj/kernel", 1, 1, inputs, outputs)
                        norm(f"{name}/gn_proj", outputs)
                    inputs = outputs
        put("embedding/kernel", patch, patch, channels, width)
        put("embedding/bias", width)
        if pool == "class":
            put("cls", 1, 1, width)
        rows = 16 + (1 if pool == "class" and not big_vision else 0)
        put("pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding", 1, rows, width)
        stack = (depth,) if scanned else ()
        for block in ["encoderblock"] if scanned else [f"encoderblock_{i}" for i in range(depth)]:
            norm(f"Transformer/{block}/LayerNorm_0", width, *stack)
            mha(f"Transformer/{block}/MultiHeadDotProductAttention_{attention}", *stack)
            norm(f"Transformer/{block}/LayerNorm_{second}", width, *stack)
            mlp_block(f"Transformer/{block}/MlpBlock_{dense}", *stack)
        norm("Transformer/encoder_norm", width)
        if pool == "map":
            put("MAPHead_0/probe", 1, 1, width)
            mha("MAPHead_0/MultiHeadDotProductAttention_0")
            norm("MAPHead_0/LayerNorm_0", width)
            mlp_block("MAPHead_0/MlpBlock_0")
        if pre_logits:
            put("pre_logits/kernel", width, width)
            put("pre_logits/bias", width)
        put("head/kernel", width, 7)
        put("head/bias", 7)
        if old_norms:
            arrays = {name: v.reshape(1, 1, 1, -1) if "/gn" in f"/{name}" else v for name, v in arrays.items()}
        arrays = {prefix + name: value for name, value in arrays.items()}
        if prefix == "params/img/":
            arrays |= {"params/txt/head/kernel": np.ones((4, 4), np.float32), "params/t": np.ones(1, np.float32)}
        path = folder / "flax.npz"
        np.savez(path, **arrays)

        arguments: dict[str, Any] = {**SMALL, "act_layer": "gelu_tanh"}
        if pool == "map":
            arguments |= {"class_token": False, "global_pool": "map"}
        elif pool == "mean":
            arguments |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
        if big_vision and pool == "class":
            arguments["no_embed_class"] = True
        if hybrid is not None:
            from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2

            arguments["embed_layer"] = lambda **kw: HybridEmbed(backbone=_resnetv2(hybrid), **kw)
            arguments["patch_size"] = 1
        model = VisionTransformer(**arguments)
        model.load_pretrained(str(path), prefix=prefix)
        expected = answer(model, images())
        if pre_logits:
            with torch.inference_mode():
                features = model.forward_head(model.forward_features(images()), pre_logits=True)
                kernel, bias = (torch.from_numpy(arrays[f"{prefix}pre_logits/{part}"]) for part in ("kernel", "bias"))
                expected = model.head(torch.tanh(features @ kernel + bias))
        return Made(path, images(), expected)

    return make


# --- torchvision, vit-pytorch ---


def torchvision_vit(old: bool = False, hidden: int | None = None) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
        model = torchvision.models.VisionTransformer(64, 16, 2, 3, 192, 768, num_classes=7, representation_size=hidden)
        state = spread(model).state_dict()
        if old:
            state = {
                k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()
            }
        return Made(saved(folder, state, "vit_tiny.pth"), images(), answer(model, images()))

    return make


def vit_pytorch(kind: str, **arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        module = pytest.importorskip("vit_pytorch", reason="vit-pytorch is not installed")
        given = {
            "image_size": 64,
            "patch_size": 16,
            "num_classes": 7,
            "dim": 96,
            "depth": 2,
            "heads": 3,
            "mlp_dim": 128,
        }
        model = spread(getattr(module, kind)(**{**given, **arguments}))
        assume = {"size": 64} if kind == "SimpleViT" else {}
        return Made(saved(folder, model.state_dict(), "vit.pt"), images(), answer(model, images()), assume, model)

    return make


MLP_HEADLESS = {"num_classes": 0}
PLAIN = "timm hf big_vision torchvision"

CASES: dict[str, Case] = {
    "timm AugReg": Case(timm_vit(), "timm", PLAIN),
    "timm grey": Case(timm_vit(in_chans=1), "timm", PLAIN),
    "timm distilled DeiT": Case(timm_distilled, "timm", "timm hf"),
    "timm DeiT III": Case(timm_vit(init_values=1e-4, no_embed_class=True), "timm", "timm"),
    "timm MAE fc_norm": Case(timm_vit(global_pool="avg", fc_norm=True), "timm", "timm"),
    "timm mean without class token": Case(
        timm_vit(global_pool="avg", class_token=False, fc_norm=False), "timm", "timm big_vision"
    ),
    "timm DINO": Case(timm_vit(**MLP_HEADLESS), "timm", PLAIN),
    "timm DINOv2": Case(timm_vit(init_values=1e-5, **MLP_HEADLESS), "timm", "timm hf dinov2"),
    "timm registers": Case(
        timm_vit(init_values=1e-5, reg_tokens=4, no_embed_class=True, **MLP_HEADLESS), "timm", "timm hf dinov2"
    ),
    "timm registers with positions": Case(timm_vit(reg_tokens=4), "timm", "timm"),
    "timm SigLIP": Case(timm_vit(class_token=False, global_pool="map", **MLP_HEADLESS), "timm", "timm big_vision"),
    "timm CLIP": Case(timm_vit(pre_norm=True, num_classes=24, norm_layer=torch.nn.LayerNorm), "timm", "timm"),
    "timm q/k norm": Case(timm_vit(qk_norm=True), "timm", "timm"),
    "timm pre-logits": Case(timm_pre_logits, "timm", "big_vision torchvision"),
    "timm relative positions": Case(timm_relative, "timm", "timm"),
    "timm vit_relpos": Case(timm_computed_bias(qkv_bias=False, fc_norm=True), "timm", "timm"),
    "timm vit_srelpos": Case(timm_computed_bias(qkv_bias=False, shared_rel_pos=True, rel_pos_dim=96), "timm", "timm"),
    "timm vit_relpos rpn": Case(timm_computed_bias(block_fn=ResPostRelPosBlock), "timm", "timm"),
    "timm BEiT": Case(timm_beit(), "beit", "timm hf"),
    "timm BEiT, shared positions": Case(timm_beit(shared=True), "beit", "timm hf"),
    "timm R26+S/32": Case(
        timm_named("vit_small_r26_s32_224", depth=1, img_size=64, num_classes=7), "timm", "timm big_vision"
    ),
    "timm R50+B/16": Case(
        timm_named("vit_base_r50_s16_224", depth=1, img_size=64, num_classes=7), "timm", "timm big_vision"
    ),
    "timm R+Ti/16": Case(
        timm_named("vit_tiny_r_s16_p8_224", depth=1, img_size=64, num_classes=7), "timm", "timm big_vision"
    ),
    "timm BiT R50x1": Case(timm_named("resnetv2_50x1_bit", num_classes=7), "timm bit", "timm"),
    "DeiT": Case(deit, "timm", PLAIN),
    "DeiT III": Case(deit3, "deit3", "timm"),
    "MAE": Case(mae, "timm", PLAIN, ("MAE decoder", "used in pre-training only")),
    "DINO": Case(dino, "timm", PLAIN, ("DINO head",)),
    "DINOv2": Case(dinov2(0, False), "dinov2", "timm hf dinov2", ("used in pre-training only",)),
    "DINOv2 giant": Case(dinov2(0, True), "dinov2", "timm hf dinov2", ("used in pre-training only",)),
    "DINOv2 with registers": Case(dinov2(4, False), "dinov2", "timm hf dinov2", ("used in pre-training only",)),
    "timm DINOv3": Case(dinov3("timm", num_classes=7), "timm dinov3", "timm"),
    "timm DINOv3, class token": Case(dinov3("timm", global_pool="token"), "timm dinov3", "timm hf dinov3"),
    "timm DINOv3 SwiGLU, no bias": Case(
        dinov3("timm", global_pool="token", qkv_bias=False, swiglu_mlp=True, swiglu_align_to=8),
        "timm dinov3",
        "timm hf dinov3",
    ),
    "DINOv3": Case(dinov3("meta", global_pool="token"), "dinov3", "timm hf dinov3", ("used in pre-training only",)),
    "DINOv3 SwiGLU": Case(
        dinov3("meta", global_pool="token", swiglu_mlp=True, swiglu_align_to=8),
        "dinov3",
        "timm hf dinov3",
        ("used in pre-training only",),
    ),
    "timm EVA": Case(eva(), "timm eva", "timm"),
    "timm EVA-02": Case(eva(**EVA02), "timm eva", "timm"),
    "timm EVA-02 large": Case(eva(**EVA02_LARGE), "timm eva, split", "timm"),
    "timm EVA-02 CLIP": Case(eva(**EVA02_LARGE, scale_attn_inner=True, global_pool="token"), "timm eva, split", "timm"),
    "OpenCLIP": Case(openclip, "clip", "timm clip", ("text tower",)),
    "OpenAI CLIP": Case(openai_clip, "clip", "timm clip", ("text tower",)),
    "transformers ViT": Case(hugging("ViTForImageClassification"), "transformers vit", PLAIN),
    "transformers ViT, one file": Case(hugging("ViTForImageClassification", alone=True), "transformers vit", PLAIN),
    "transformers ViT, shards": Case(
        hugging("ViTForImageClassification", max_shard_size="300KB"), "transformers vit", PLAIN
    ),
    "transformers ViTModel": Case(hugging("ViTModel", pooled), "transformers vit", "hf big_vision torchvision"),
    "transformers ViTMAE": Case(
        hugging("ViTMAEForPreTraining", mae_encoder, decoder_hidden_size=32, decoder_num_attention_heads=2),
        "transformers vit",
        PLAIN,
        ("MAE decoder",),
    ),
    "transformers ViTMAEModel": Case(hugging("ViTMAEModel", mae_encoder), "transformers vit", PLAIN),
    "transformers ViTMSN": Case(hugging("ViTMSNForImageClassification"), "transformers vit_msn", PLAIN),
    "transformers ViTMSNModel": Case(hugging("ViTMSNModel", class_token), "transformers vit", PLAIN),
    "transformers DeiT with teacher": Case(
        hugging("DeiTForImageClassificationWithTeacher"), "transformers deit", "timm hf"
    ),
    "transformers DeiT": Case(hugging("DeiTForImageClassification"), "transformers deit", "timm hf"),
    "transformers DeiTModel": Case(hugging("DeiTModel", pooled), "transformers deit", "hf"),
    "transformers DINOv2": Case(
        hugging("Dinov2ForImageClassification"), "transformers dinov2", "hf", ("used in pre-training only",)
    ),
    "transformers DINOv2 giant": Case(
        hugging("Dinov2Model", pooled, use_swiglu_ffn=True),
        "transformers dinov2",
        "timm hf dinov2",
        ("used in pre-training only",),
    ),
    "transformers DINOv2 with registers": Case(
        hugging("Dinov2WithRegistersModel", pooled),
        "transformers dinov2_with_registers",
        "timm hf dinov2",
        ("used in pre-training only",),
    ),
    "transformers BEiT": Case(
        hugging("BeitForImageClassification", use_relative_position_bias=True), "transformers beit", "timm hf"
    ),
    "transformers BeitModel": Case(
        hugging("BeitModel", pooled, use_shared_relative_position_bias=True), "transformers beit", "timm hf"
    ),
    "transformers Data2VecVision": Case(
        hugging("Data2VecVisionForImageClassification", use_relative_position_bias=True),
        "transformers data2vec_vision",
        "timm hf",
    ),
    "transformers DINOv3": Case(
        hugging("DINOv3ViTModel", pooled, num_register_tokens=4, num_labels=2),
        "transformers dinov3_vit",
        "timm hf dinov3",
        ("used in pre-training only",),
    ),
    "transformers DINOv3 SwiGLU": Case(
        hugging("DINOv3ViTModel", pooled, num_register_tokens=4, num_labels=2, use_gated_mlp=True, hidden_act="silu"),
        "transformers dinov3_vit",
        "timm hf dinov3",
        ("used in pre-training only",),
    ),
    "vision_transformer": Case(flax(), "vision_transformer", PLAIN),
    "vision_transformer, fine-tuned": Case(flax(prefix="opt/target/"), "vision_transformer", PLAIN),
    "vision_transformer, pre-logits": Case(flax(pre_logits=True), "vision_transformer", "big_vision torchvision"),
    "vision_transformer, hybrid": Case(flax(hybrid=(2, 2, 2)), "vision_transformer", "timm big_vision"),
    "vision_transformer, hybrid, old": Case(
        flax(hybrid=(2, 2, 2), old_norms=True), "vision_transformer", "timm big_vision"
    ),
    "big_vision": Case(flax(big_vision=True, prefix="params/", pool="mean"), "big_vision", "timm big_vision"),
    "big_vision, class token": Case(flax(big_vision=True, prefix="params/"), "big_vision", PLAIN),
    "big_vision, scanned": Case(
        flax(big_vision=True, scanned=True, prefix="params/", pool="mean"), "big_vision scanned", "timm big_vision"
    ),
    "big_vision, SigLIP": Case(
        flax(big_vision=True, prefix="params/img/", pool="map"), "big_vision", "timm big_vision", ("text tower",)
    ),
    "torchvision": Case(torchvision_vit(), "torchvision", PLAIN),
    "torchvision, old names": Case(torchvision_vit(old=True), "torchvision old", PLAIN),
    "torchvision, pre-logits": Case(torchvision_vit(hidden=64), "torchvision", "big_vision torchvision"),
    "vit-pytorch": Case(vit_pytorch("ViT"), "vit-pytorch", "vit-pytorch"),
    "vit-pytorch, mean": Case(vit_pytorch("ViT", pool="mean"), "vit-pytorch", "vit-pytorch"),
    "vit-pytorch SimpleViT": Case(vit_pytorch("SimpleViT"), "vit-pytorch simple", "vit-pytorch"),
}


def labelled(folder: Path, names: list[str]) -> Path:
    """Write a transformers directory with labels and a processor."""
    config = transformers.ViTConfig(**{**HF, "num_labels": len(names)})
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    settings = {"size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(settings | {"do_center_crop": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]})
    )
    return folder
