"""Same weights, same outputs as each project at image sizes other than the checkpoint's own.

Projects that resize while they load are compared with a model of theirs built for the size. Meta's and Google's code is not
installed: their formula resizes the table, and timm computes the rest.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import transformers
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

import vitrail
from tests.parity.made import HF, SMALL, flax, saved
from tests.parity.peers import relative_difference, spread
from vitrail.checkpoints.convert import SAMPLE_IMAGE, convert

Size = tuple[int, int]
Peer = Callable[[Tensor], Tensor]  # images to outputs
SQUARE: tuple[Size, ...] = ((64, 64), (48, 48), (96, 96))  # the checkpoint's own, smaller, larger; patches of 16
SIZES: tuple[Size, ...] = (*SQUARE, (48, 96))
WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"


def images(size: Size) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def assert_same_at(path: Path, peer_at: Callable[[Size], Peer], sizes: tuple[Size, ...], rule: str) -> None:
    """Assert the peer's outputs at every size, from a model that runs at it and from one loaded for it."""
    flexible, by_timm = vitrail.load(path), vitrail.load(path, assume={"resampling": "timm"})
    for size in sizes:
        expected = peer_at(size)(images(size))
        fixed = vitrail.load(path, image_size=size)
        assert fixed.config.image_size == size
        for model in (flexible, fixed):
            assert relative_difference(model(images(size)), expected) <= 1e-4, size
        if rule != "timm" and size != (64, 64):  # the other rule would be seen
            assert relative_difference(by_timm(images(size)), expected) > 1e-3, size


def spread_positions(model: Any) -> Any:
    """Randomise all weights, and the positions more, so that the rule is seen in the outputs."""
    with torch.no_grad():
        for name, parameter in spread(model).named_parameters():
            if "pos" in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def build_timm_at(state: dict[str, Tensor], size: Size, **arguments: Any) -> VisionTransformer:
    model = VisionTransformer(**{**SMALL, "img_size": size, **arguments}).eval()
    model.load_state_dict(state)
    return model


# --- timm, transformers, torchvision, OpenCLIP: their own code ---


@pytest.mark.parametrize("arguments", [{}, {"init_values": 1.0, "reg_tokens": 4, "no_embed_class": True}])
def test_timm_at_other_sizes(arguments, tmp_path):
    peer = spread_positions(VisionTransformer(**SMALL, **arguments, dynamic_img_size=True)).eval()
    path = saved(tmp_path, peer.state_dict())

    def loaded_at(size: Size) -> Peer:
        model = VisionTransformer(**{**SMALL, **arguments, "img_size": size}).eval()
        model.load_state_dict(checkpoint_filter_fn(dict(peer.state_dict()), model))
        return model

    assert_same_at(path, lambda size: peer, SIZES, "timm")
    assert_same_at(path, loaded_at, SIZES, "timm")


PLAIN = {"interpolate_pos_encoding": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ViT": ("ViTForImageClassification", PLAIN, "transformers"),
    "DeiT": ("DeiTForImageClassification", PLAIN, "transformers"),
    "DeiT with teacher": ("DeiTForImageClassificationWithTeacher", PLAIN, "transformers"),
    "ViTMSN": ("ViTMSNForImageClassification", PLAIN, "transformers"),
    "DINOv2": ("Dinov2ForImageClassification", {}, "transformers"),
    "DINOv2 with registers": ("Dinov2WithRegistersForImageClassification", {}, "timm"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_at_other_sizes(name, tmp_path):
    kind, options, rule = FAMILIES[name]
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**HF)
    peer = spread_positions(getattr(transformers, kind)(config)).eval()
    peer.save_pretrained(tmp_path)
    assert_same_at(tmp_path, lambda size: lambda image: peer(image, **options).logits, SIZES, rule)


def test_masked_autoencoder_of_transformers_at_other_sizes(tmp_path):
    """The encoder, with all patches in order."""
    peer = spread_positions(transformers.ViTMAEModel(transformers.ViTMAEConfig(**HF, mask_ratio=0.0))).eval()
    peer.save_pretrained(tmp_path)

    def encode(image: Tensor) -> Tensor:
        noise = torch.arange(image.shape[2] * image.shape[3] // 256).float().repeat(len(image), 1)
        return peer(image, noise=noise, **PLAIN).last_hidden_state[:, 0]

    assert_same_at(tmp_path, lambda size: encode, SIZES, "transformers")


def test_torchvision_at_other_sizes(tmp_path):
    """interpolate_embeddings takes square sizes only."""
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    from torchvision.models.vision_transformer import interpolate_embeddings

    def build(side: int) -> Any:
        return torchvision.models.VisionTransformer(side, 16, 2, 3, 192, 768, num_classes=7).eval()

    state = spread_positions(build(64)).state_dict()

    def loaded_at(size: Size) -> Peer:
        model = build(size[0])
        model.load_state_dict(interpolate_embeddings(size[0], 16, dict(state)))
        return model

    assert_same_at(saved(tmp_path, state), loaded_at, SQUARE, "torchvision")


def test_openclip_at_other_sizes(tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed: pip install 'vitrail[peers]'")
    from open_clip.model import resize_pos_embed

    def build(size: Size) -> Any:
        vision = {"image_size": size, "layers": 2, "width": 128, "patch_size": 16}
        text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
        return open_clip.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text).eval()

    state = spread_positions(build((64, 64))).state_dict()

    def loaded_at(size: Size) -> Peer:
        model, resized = build(size), dict(state)
        resize_pos_embed(resized, model)
        model.load_state_dict(resized)
        return model.visual

    assert_same_at(saved(tmp_path, state), loaded_at, SIZES, "timm")


# --- Meta and Google: their formula ---


def interpolate(table: Tensor, prefix: int, size: Size, **options: Any) -> Tensor:
    """Return a table [1, prefix + N, D] with its N rows, a square grid, resized by F.interpolate."""
    rows = table[:, prefix:]
    side = math.isqrt(rows.shape[1])
    grid = (size[0] // 16, size[1] // 16)
    if grid == (side, side):
        return table
    if offset := options.pop("offset", 0.0):
        scale: dict[str, Any] = {"scale_factor": tuple((count + offset) / side for count in grid)}
    else:
        scale = {"size": grid}
    rows = F.interpolate(rows.reshape(1, side, side, -1).permute(0, 3, 1, 2), mode="bicubic", **scale, **options)
    assert tuple(rows.shape[-2:]) == grid
    return torch.cat((table[:, :prefix], rows.flatten(2).transpose(1, 2)), 1)


HEADLESS: dict[str, Any] = {"num_classes": 0}
DINO_OPTIONS = {"offset": 0.1, "antialias": False}  # DINO, DINOv2: interpolate_offset=0.1
RELEASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Size, ...], str]] = {
    # file, timm's arguments, options of F.interpolate, sizes, rule
    "DINO": ("dino_vitsmall16_pretrain.pth", HEADLESS, DINO_OPTIONS, SIZES, "dino"),
    "DINOv2": ("a.pth", {**HEADLESS, "init_values": 1.0}, DINO_OPTIONS, SIZES, "dino"),
    "DINOv2 with registers": (  # interpolate_antialias=True, interpolate_offset=0.0
        "a.pth",
        {**HEADLESS, "init_values": 1.0, "reg_tokens": 4, "no_embed_class": True},
        {"antialias": True},
        SIZES,
        "timm",
    ),
    "MAE": ("mae_pretrain_vit.pth", HEADLESS, {"align_corners": False}, SQUARE, "transformers"),  # square only
    "DeiT III": ("a.pth", {"init_values": 1.0, "no_embed_class": True}, {}, SQUARE, "transformers"),  # square only
}


@pytest.mark.parametrize("name", RELEASES)
def test_releases_of_meta_at_other_sizes(name, tmp_path):
    file, arguments, options, sizes, rule = RELEASES[name]
    prefix = 0 if arguments.get("no_embed_class") else 1
    state = spread_positions(VisionTransformer(**{**SMALL, **arguments})).state_dict()
    theirs = dict(state)
    if name.startswith("DINOv2"):
        theirs["mask_token"] = torch.zeros(1, 192)
        if "reg_token" in theirs:  # the release adds the class token's position, timm's files have it in the token
            theirs["register_tokens"] = theirs.pop("reg_token")
            theirs["pos_embed"] = torch.cat((torch.zeros(1, 1, 192), theirs["pos_embed"]), 1)
    if name == "DeiT III":
        theirs = {key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for key, v in state.items()}

    def at(size: Size) -> Peer:
        table = interpolate(state["pos_embed"], prefix, size, **options)
        return build_timm_at({**state, "pos_embed": table}, size, **arguments)

    assert_same_at(saved(tmp_path, theirs, file), at, sizes, rule)


@pytest.mark.parametrize("big_vision", [False, True])
def test_checkpoints_of_google_at_other_sizes(big_vision, tmp_path):
    """Both projects zoom a square grid with SciPy while they load."""
    zoom = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed").zoom
    made = flax(big_vision=big_vision, pool="mean" if big_vision else "class")(tmp_path)
    arrays = dict(np.load(made.path))
    name = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    prefix, arguments = 1, {"act_layer": "gelu_tanh"}
    if big_vision:
        prefix, arguments = 0, {**arguments, "class_token": False, "global_pool": "avg", "fc_norm": False}

    def at(size: Size) -> Peer:
        side, table = size[0] // 16, arrays[name]
        grid = zoom(table[0, prefix:].reshape(4, 4, -1), (side / 4, side / 4, 1), order=1).reshape(1, side * side, -1)
        resized = tmp_path / f"{side}.npz"
        np.savez(resized, **{**arrays, name: np.concatenate((table[:, :prefix], grid), 1)})
        model = VisionTransformer(**{**SMALL, "img_size": size, **arguments}).eval()
        model.load_pretrained(str(resized))
        return model

    assert_same_at(made.path, at, SQUARE, "google")


# --- real weights ---


@pytest.mark.skipif(not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)")
def test_real_deit_tiny_gives_the_logits_of_transformers_at_other_sizes(tmp_path):
    """DeiT-Ti as transformers' ViT; docs/weights.md has the differences that this test prints with -s."""
    convert(WEIGHTS, tmp_path / "hf", "hf")
    peer = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf").eval()
    ours, by_timm = vitrail.load(tmp_path / "hf"), vitrail.load(tmp_path / "hf", assume={"resampling": "timm"})
    for size in ((224, 224), (160, 160), (384, 384), (160, 224)):
        with torch.inference_mode(), Image.open(SAMPLE_IMAGE) as photograph:
            image = ours.preprocessing.with_size(size)(photograph).unsqueeze(0)
            expected = peer(image, interpolate_pos_encoding=True).logits
            found, before = (float((model(image) - expected).abs().max()) for model in (ours, by_timm))
        print(f"{size}: largest logit {expected.abs().max():.2f}, difference {found:.1e}, antialiased {before:.2g}")
        assert found <= 1e-4 * float(expected.abs().max())
        assert (before > 0.01) == (size != (224, 224))
