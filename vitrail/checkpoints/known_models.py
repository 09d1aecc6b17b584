"""Public checkpoints by a short name: the table of `vitrail models`, and the directory that can stand in for the Hub.

This module imports no PyTorch, so the table is listed at once. Parameters are those of vitrail's model of the checkpoint; a
test builds each one. Accuracies are quoted as published, with their source; they are None where none was found for exactly
these weights. Licences are those of the repository's card.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitrail.utils.files import WEIGHT_SUFFIXES

MODELS_VARIABLE = "VITRAIL_MODELS"  # environment: a directory of weights that is searched before the Hub
NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")  # a path has a suffix or a separator
TIMM_RESULTS = "timm, results/results-imagenet.csv"
DINO_README = "README of facebookresearch/dino"
DINOV2_README = "README of facebookresearch/dinov2"
OPENCLIP_DOCS = "open_clip, docs/PRETRAINED.md"
SWIN_README = "README of microsoft/Swin-Transformer"


@dataclass(frozen=True)
class KnownModel:
    """A public checkpoint. `architecture` and `options` describe it in the words of `vitrail.configure`."""

    name: str
    repo: str  # on the Hugging Face Hub
    architecture: str
    parameters: int
    training: str  # data and method
    size: int = 224  # pixels per side of its images
    classes: int | None = 1000  # None: it returns features
    accuracy: float | None = None  # on ImageNet-1k, in per cent, as published
    measure: str = "top-1"  # top-1 of its own classifier, or of features: linear, zero-shot
    source: str | None = None  # of the accuracy
    licence: str = "apache-2.0"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Return the address that `vitrail.load` takes."""
        return f"hf://{self.repo}"


def _timm(name: str, tag: str, architecture: str, params: int, training: str, top1: float, **more: Any) -> KnownModel:
    """Return a classifier of timm, with the accuracy of timm's table at the same size."""
    facts = {"accuracy": top1, "source": TIMM_RESULTS, **more}
    return KnownModel(name, f"timm/{tag}", architecture, params, training, **facts)


def _features(name: str, repo: str, architecture: str, params: int, training: str, **more: Any) -> KnownModel:
    """Return a model without a classifier."""
    return KnownModel(name, repo, architecture, params, training, classes=None, **more)


def _dino(name: str, tag: str, architecture: str, params: int, linear: float) -> KnownModel:
    """Return a DINO, with the accuracy of a linear classifier on its features."""
    facts: dict[str, Any] = {"accuracy": linear, "measure": "linear", "source": DINO_README}
    return _features(name, f"timm/{tag}", architecture, params, "DINO on ImageNet-1k, no labels", **facts)


def _dinov2(name: str, repo: str, architecture: str, params: int, linear: float, **options: Any) -> KnownModel:
    """Return a DINOv2; its positions are for images of 518 pixels."""
    facts: dict[str, Any] = {"accuracy": linear, "measure": "linear", "source": DINOV2_README, "size": 518}
    facts["options"] = {"layer_scale": 1.0, **options}
    return _features(name, f"facebook/{repo}", architecture, params, "DINOv2 on LVD-142M, no labels", **facts)


def _dinov3(name: str, tag: str, architecture: str, params: int, **options: Any) -> KnownModel:
    """Return a DINOv3, in transformers' format. The repositories are gated: their licence has to be accepted on the Hub."""
    data = "SAT-493M" if tag.endswith("sat493m") else "LVD-1689M"
    facts: dict[str, Any] = {"licence": "dinov3-license", "options": {**DINOV3, **options}}
    return _features(name, f"facebook/dinov3-{tag}", architecture, params, f"DINOv3 on {data}, no labels", **facts)


def _dinov3_timm(name: str, tag: str, architecture: str, params: int, **options: Any) -> KnownModel:
    """Return a DINOv3 in timm's format: without the biases of q and v, which are zero, and with mean pooling."""
    facts = {"licence": "dinov3-license", "size": 256, "options": {**DINOV3_TIMM, **options}}
    repo = f"timm/vit_{tag}_patch16_dinov3.lvd1689m"
    return _features(name, repo, architecture, params, "DINOv3 on LVD-1689M, no labels", **facts)


def _eva02(name: str, tag: str, architecture: str, params: int, mlp_width: int, size: int) -> KnownModel:
    """Return an EVA-02 of timm, pre-trained on ImageNet-22k; its larger models have a norm in the MLP."""
    facts = {"options": {**EVA02, "mlp_width": mlp_width, "mlp_norm": size == 448}, "size": size, "licence": "mit"}
    return KnownModel(name, f"timm/{tag}", architecture, params, "ImageNet-22k (EVA-02), then ImageNet-1k", **facts)


def _openclip(name: str, repo: str, architecture: str, params: int, zero_shot: float, width: int) -> KnownModel:
    """Return the visual tower of an OpenCLIP, with the zero-shot accuracy of both towers."""
    facts: dict[str, Any] = {"accuracy": zero_shot, "measure": "zero-shot", "source": OPENCLIP_DOCS, "licence": "mit"}
    facts["options"] = {**CLIP, "projection": width}
    return _features(name, f"laion/{repo}", architecture, params, "CLIP on LAION-2B", **facts)


def _swin(name: str, size: str, architecture: str, params: int, top1: float) -> KnownModel:
    """Return a Swin Transformer of Microsoft, in transformers' format."""
    facts: dict[str, Any] = {"accuracy": top1, "source": SWIN_README}
    return KnownModel(
        name, f"microsoft/swin-{size}-patch4-window7-224", architecture, params, "ImageNet-1k (Swin)", **facts
    )


def _beit(
    name: str, tag: str, architecture: str, params: int, training: str, top1: float | None, **more: Any
) -> KnownModel:
    """Return a BEiT of timm or of Microsoft, which stands in transformers' format."""
    owner, source = ("timm", TIMM_RESULTS) if top1 is not None else ("microsoft", None)
    facts: dict[str, Any] = {"accuracy": top1, "source": source, "options": BEIT_BLOCKS, **more}
    return KnownModel(name, f"{owner}/{tag}", architecture, params, training, **facts)


AUGREG, ORIGINAL = "ImageNet-21k, then ImageNet-1k (AugReg)", "ImageNet-21k, then ImageNet-1k (the paper)"
AUGREG2 = "ImageNet-21k (AugReg), then ImageNet-1k (timm)"
BIT = "ImageNet-21k, then ImageNet-1k (BiT-M)"
DEIT, DISTILLED = "ImageNet-1k (DeiT)", "ImageNet-1k, distilled (DeiT)"
DEIT3 = "ImageNet-22k, then ImageNet-1k (DeiT III)"
BEIT = "BEiT on ImageNet-22k, then ImageNet-22k and ImageNet-1k"
BEITV2, BEITV2_22K = (
    "BEiT v2 on ImageNet-1k, then ImageNet-1k",
    "BEiT v2 on ImageNet-1k, then ImageNet-22k and ImageNet-1k",
)
RELPOS = "ImageNet-1k (timm)"
MAE, SIGLIP = "MAE on ImageNet-1k, no labels", "SigLIP on WebLI"
LAION_TUNED = "CLIP on LAION-2B, then ImageNet-12k and ImageNet-1k"
NONCOMMERCIAL = "cc-by-nc-4.0"
# Options in words for slots that have no short name: the test that counts parameters gives them their objects.
DISTILLED_PREFIX = {"prefix": "class+distillation"}
DEIT3_BLOCKS = {"layer_scale": 1e-6, "class_position": False}
GIANT = {"patch": 14, "width": 1536, "depth": 40, "heads": 24, "mlp": "swiglu", "mlp_width": 4096}
DINOV3 = {"position": "rotary-dinov3", "registers": 4, "layer_scale": 1e-5, "eps": 1e-5, "key_bias": False}
DINOV3_TIMM = {**DINOV3, "qkv_bias": False, "pool": "mean", "prefix": "class"}
EVA02 = {"position": "rotary-eva02", "key_bias": False, "mlp": "swiglu", "pool": "mean-norm", "prefix": "class"}
CLIP = {"token_norm": True, "patch_bias": False}
ATTENTION_POOL = {"pool": "map"}
RELATIVE_MLP = {"layer_scale": 1e-6, "qkv_bias": False, "pool": "mean-norm", "position": "relative-mlp"}
BEIT_BLOCKS = {"layer_scale": 0.1, "key_bias": False, "pool": "mean-norm", "prefix": "class", "position": "relative"}
BEIT_PRETRAINED = {**BEIT_BLOCKS, "pool": "mean", "position": "relative@shared"}
PRE_LOGITS = {"head": "pre-logits"}

KNOWN_MODELS = (
    _timm("vit-tiny", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Ti/16", 5_717_416, AUGREG, 75.452),
    _timm("vit-small", "vit_small_patch16_224.augreg_in21k_ft_in1k", "S/16", 22_050_664, AUGREG, 81.402),
    _timm("vit-small-32", "vit_small_patch32_224.augreg_in21k_ft_in1k", "S/32", 22_878_952, AUGREG, 76.010),
    _timm("vit-base", "vit_base_patch16_224.augreg2_in21k_ft_in1k", "B/16", 86_567_656, AUGREG2, 85.108),
    _timm("vit-base-augreg", "vit_base_patch16_224.augreg_in21k_ft_in1k", "B/16", 86_567_656, AUGREG, 84.534),
    _timm("vit-base-32", "vit_base_patch32_224.augreg_in21k_ft_in1k", "B/32", 88_224_232, AUGREG, 80.732),
    _timm("vit-base-8", "vit_base_patch8_224.augreg2_in21k_ft_in1k", "B/8", 86_576_872, AUGREG2, 86.252),
    _timm("vit-large", "vit_large_patch16_224.augreg_in21k_ft_in1k", "L/16", 304_326_632, AUGREG, 85.856),
    _timm("vit-tiny-384", "vit_tiny_patch16_384.augreg_in21k_ft_in1k", "Ti/16", 5_790_376, AUGREG, 78.438, size=384),
    _timm("vit-small-384", "vit_small_patch16_384.augreg_in21k_ft_in1k", "S/16", 22_196_584, AUGREG, 83.814, size=384),
    _timm("vit-base-384", "vit_base_patch16_384.augreg_in21k_ft_in1k", "B/16", 86_859_496, AUGREG, 86.010, size=384),
    _timm("vit-large-384", "vit_large_patch16_384.augreg_in21k_ft_in1k", "L/16", 304_715_752, AUGREG, 87.096, size=384),
    _timm(
        "vit-large-32-384", "vit_large_patch32_384.orig_in21k_ft_in1k", "L/32", 306_632_680, ORIGINAL, 81.508, size=384
    ),
    KnownModel("vit-base-google", "google/vit-base-patch16-224", "B/16", 86_567_656, ORIGINAL),
    KnownModel("vit-large-google", "google/vit-large-patch16-224", "L/16", 304_326_632, ORIGINAL),
    _features(
        "vit-base-in21k",
        "google/vit-base-patch16-224-in21k",
        "B/16",
        86_389_248,
        "ImageNet-21k (the paper)",
        options=PRE_LOGITS,
    ),
    _timm("hybrid-tiny", "vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k", "R+Ti/16", 6_337_704, AUGREG, 71.800),
    _timm("hybrid-r26-small", "vit_small_r26_s32_224.augreg_in21k_ft_in1k", "R26+S/32", 36_431_912, AUGREG, 81.856),
    _timm("hybrid-r50-large", "vit_large_r50_s32_224.augreg_in21k_ft_in1k", "R50+L/32", 328_994_856, AUGREG, 84.434),
    _timm(
        "hybrid-r50-base-384",
        "vit_base_r50_s16_384.orig_in21k_ft_in1k",
        "R50+B/16",
        98_950_952,
        ORIGINAL,
        84.988,
        size=384,
    ),
    _timm("bit-r50x1", "resnetv2_50x1_bit.goog_in21k_ft_in1k", "R50x1", 25_549_352, BIT, 80.386, size=448),
    _timm("bit-r50x3", "resnetv2_50x3_bit.goog_in21k_ft_in1k", "R50x3", 217_319_080, BIT, 83.982, size=448),
    _timm("bit-r101x1", "resnetv2_101x1_bit.goog_in21k_ft_in1k", "R101x1", 44_541_480, BIT, 82.332, size=448),
    _timm("bit-r152x2", "resnetv2_152x2_bit.goog_in21k_ft_in1k", "R152x2", 236_335_208, BIT, 84.468, size=448),
    _timm("deit-tiny", "deit_tiny_patch16_224.fb_in1k", "Ti/16", 5_717_416, DEIT, 72.190),
    _timm("deit-small", "deit_small_patch16_224.fb_in1k", "S/16", 22_050_664, DEIT, 79.856),
    _timm("deit-base", "deit_base_patch16_224.fb_in1k", "B/16", 86_567_656, DEIT, 81.980),
    _timm("deit-base-384", "deit_base_patch16_384.fb_in1k", "B/16", 86_859_496, DEIT, 83.108, size=384),
    _timm(
        "deit-tiny-distilled",
        "deit_tiny_distilled_patch16_224.fb_in1k",
        "Ti/16",
        5_910_800,
        DISTILLED,
        74.538,
        options=DISTILLED_PREFIX,
    ),
    _timm(
        "deit-small-distilled",
        "deit_small_distilled_patch16_224.fb_in1k",
        "S/16",
        22_436_432,
        DISTILLED,
        81.204,
        options=DISTILLED_PREFIX,
    ),
    _timm(
        "deit-base-distilled",
        "deit_base_distilled_patch16_224.fb_in1k",
        "B/16",
        87_338_192,
        DISTILLED,
        83.384,
        options=DISTILLED_PREFIX,
    ),
    _timm(
        "deit3-small",
        "deit3_small_patch16_224.fb_in22k_ft_in1k",
        "S/16",
        22_059_496,
        DEIT3,
        83.082,
        options=DEIT3_BLOCKS,
    ),
    _timm(
        "deit3-base", "deit3_base_patch16_224.fb_in22k_ft_in1k", "B/16", 86_585_320, DEIT3, 85.728, options=DEIT3_BLOCKS
    ),
    _timm(
        "deit3-large",
        "deit3_large_patch16_224.fb_in22k_ft_in1k",
        "L/16",
        304_374_760,
        DEIT3,
        86.990,
        options=DEIT3_BLOCKS,
    ),
    _dino("dino-small", "vit_small_patch16_224.dino", "S/16", 21_665_664, 77.0),
    _dino("dino-small-8", "vit_small_patch8_224.dino", "S/8", 21_670_272, 79.7),
    _dino("dino-base", "vit_base_patch16_224.dino", "B/16", 85_798_656, 78.2),
    _dino("dino-base-8", "vit_base_patch8_224.dino", "B/8", 85_807_872, 80.1),
    _dinov2("dinov2-small", "dinov2-small", "S/14", 22_056_192, 81.1),
    _dinov2("dinov2-base", "dinov2-base", "B/14", 86_579_712, 84.5),
    _dinov2("dinov2-large", "dinov2-large", "L/14", 304_367_616, 86.3),
    _dinov2("dinov2-giant", "dinov2-giant", "g/14", 1_136_479_232, 86.5, **GIANT),
    _dinov2("dinov2-small-registers", "dinov2-with-registers-small", "S/14", 22_057_728, 80.9, registers=4),
    _dinov2("dinov2-base-registers", "dinov2-with-registers-base", "B/14", 86_582_784, 84.6, registers=4),
    _dinov2("dinov2-large-registers", "dinov2-with-registers-large", "L/14", 304_371_712, 86.7, registers=4),
    _dinov3("dinov3-small", "vits16-pretrain-lvd1689m", "S/16", 21_596_160),
    _dinov3("dinov3-small-plus", "vits16plus-pretrain-lvd1689m", "S/16", 28_692_480, mlp="swiglu"),
    _dinov3("dinov3-base", "vitb16-pretrain-lvd1689m", "B/16", 85_659_648),
    _dinov3("dinov3-large", "vitl16-pretrain-lvd1689m", "L/16", 303_128_576),
    _dinov3("dinov3-large-satellite", "vitl16-pretrain-sat493m", "L/16", 303_128_576),
    _dinov3("dinov3-huge-plus", "vith16plus-pretrain-lvd1689m", "H+/16", 840_591_360, mlp="swiglu"),
    _dinov3("dinov3-7b", "vit7b16-pretrain-lvd1689m", "7B/16", 6_716_030_976, mlp="swiglu", qkv_bias=False),
    _dinov3_timm("dinov3-small-timm", "small", "S/16", 21_586_944),
    _dinov3_timm("dinov3-small-plus-timm", "small_plus", "S/16", 28_683_264, mlp="swiglu"),
    _dinov3_timm("dinov3-base-timm", "base", "B/16", 85_641_216),
    _dinov3_timm("dinov3-large-timm", "large", "L/16", 303_079_424),
    _dinov3_timm("dinov3-huge-plus-timm", "huge_plus", "H+/16", 840_509_440, mlp="swiglu"),
    _dinov3_timm("dinov3-7b-timm", "7b", "7B/16", 6_716_030_976, mlp="swiglu"),
    _eva02("eva02-tiny", "eva02_tiny_patch14_336.mim_in22k_ft_in1k", "Ti/14", 5_756_584, 512, 336),
    _eva02("eva02-small", "eva02_small_patch14_336.mim_in22k_ft_in1k", "S/14", 22_129_000, 1024, 336),
    _eva02("eva02-base", "eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", "B/14", 87_117_544, 2048, 448),
    _eva02("eva02-large", "eva02_large_patch14_448.mim_in22k_ft_in22k_in1k", "L/14", 305_080_232, 2730, 448),
    _features("mae-base", "timm/vit_base_patch16_224.mae", "B/16", 85_798_656, MAE, licence=NONCOMMERCIAL),
    _features("mae-large", "timm/vit_large_patch16_224.mae", "L/16", 303_301_632, MAE, licence=NONCOMMERCIAL),
    _openclip("openclip-base-32", "CLIP-ViT-B-32-laion2B-s34B-b79K", "B/32", 87_849_216, 66.6, 512),
    _openclip("openclip-large-14", "CLIP-ViT-L-14-laion2B-s32B-b82K", "L/14", 303_966_208, 75.3, 768),
    _openclip("openclip-huge-14", "CLIP-ViT-H-14-laion2B-s32B-b79K", "H/14", 632_076_800, 78.0, 1024),
    _timm(
        "clip-base-32",
        "vit_base_patch32_clip_224.laion2b_ft_in12k_in1k",
        "B/32",
        88_225_000,
        LAION_TUNED,
        83.304,
        options=CLIP,
    ),
    _timm(
        "clip-base",
        "vit_base_patch16_clip_224.laion2b_ft_in12k_in1k",
        "B/16",
        86_568_424,
        LAION_TUNED,
        86.204,
        options=CLIP,
    ),
    _timm(
        "clip-large-14",
        "vit_large_patch14_clip_224.laion2b_ft_in12k_in1k",
        "L/14",
        304_204_776,
        LAION_TUNED,
        87.900,
        options=CLIP,
    ),
    _features(
        "siglip-base", "timm/vit_base_patch16_siglip_224.webli", "B/16", 92_884_224, SIGLIP, options=ATTENTION_POOL
    ),
    _features(
        "siglip-base-384",
        "timm/vit_base_patch16_siglip_384.webli",
        "B/16",
        93_176_064,
        SIGLIP,
        size=384,
        options=ATTENTION_POOL,
    ),
    _timm(
        "relpos-small", "vit_relpos_small_patch16_224.sw_in1k", "S/16", 21_983_920, RELPOS, 81.476, options=RELATIVE_MLP
    ),
    _timm(
        "relpos-base", "vit_relpos_base_patch16_224.sw_in1k", "B/16", 86_429_560, RELPOS, 82.482, options=RELATIVE_MLP
    ),
    _timm(
        "relpos-base-class",
        "vit_relpos_base_patch16_clsgap_224.sw_in1k",
        "B/16",
        86_430_328,
        RELPOS,
        82.758,
        options={**RELATIVE_MLP, "prefix": "class"},
    ),
    _beit("beit-base", "beit_base_patch16_224.in22k_ft_in22k_in1k", "B/16", 86_530_984, BEIT, 85.238),
    _beit("beit-base-384", "beit_base_patch16_384.in22k_ft_in22k_in1k", "B/16", 86_744_104, BEIT, 86.814, size=384),
    _beit("beit-large", "beit_large_patch16_224.in22k_ft_in22k_in1k", "L/16", 304_430_568, BEIT, 87.486),
    _beit("beit-large-384", "beit_large_patch16_384.in22k_ft_in22k_in1k", "L/16", 304_998_888, BEIT, 88.380, size=384),
    _beit("beit-large-512", "beit_large_patch16_512.in22k_ft_in22k_in1k", "L/16", 305_674_728, BEIT, 88.576, size=512),
    _beit("beitv2-base", "beitv2_base_patch16_224.in1k_ft_in22k_in1k", "B/16", 86_530_984, BEITV2_22K, 86.494),
    _beit("beitv2-base-in1k", "beitv2_base_patch16_224.in1k_ft_in1k", "B/16", 86_530_984, BEITV2, 85.596),
    _beit("beitv2-large", "beitv2_large_patch16_224.in1k_ft_in22k_in1k", "L/16", 304_430_568, BEITV2_22K, 88.406),
    _beit("beitv2-large-in1k", "beitv2_large_patch16_224.in1k_ft_in1k", "L/16", 304_430_568, BEITV2, 87.414),
    _beit("beit-base-microsoft", "beit-base-patch16-224", "B/16", 86_530_984, BEIT, None),
    _beit("beit-large-microsoft", "beit-large-patch16-224", "L/16", 304_430_568, BEIT, None),
    _beit(
        "beit-base-in22k",
        "beit-base-patch16-224-pt22k-ft22k",
        "B/16",
        102_557_713,
        "BEiT on ImageNet-22k, then ImageNet-22k",
        None,
        classes=21_841,
    ),
    _beit(
        "beit-base-pretrained",
        "beit-base-patch16-224-pt22k",
        "B/16",
        85_665_360,
        "BEiT on ImageNet-22k, no labels",
        None,
        classes=None,
        options=BEIT_PRETRAINED,
    ),
    _swin("swin-tiny", "tiny", "Swin-T", 28_288_354, 81.2),
    _swin("swin-small", "small", "Swin-S", 49_606_258, 83.2),
    _swin("swin-base", "base", "Swin-B", 87_768_224, 83.5),
)
MODELS_BY_NAME = {model.name: model for model in KNOWN_MODELS}


def expand_name(path: str) -> str:
    """Return `hf://owner/name` for the name of a known model, and every other path as it is; an existing file goes first."""
    known = MODELS_BY_NAME.get(path)
    return path if known is None or os.path.exists(path) else known.address


def check_known(path: str) -> None:
    """Raise FileNotFoundError with the closest name for a word that is neither a file nor a known model."""
    if NAME_PATTERN.fullmatch(path) is None or os.path.exists(path):
        return
    near = get_close_matches(path.lower().replace("_", "-"), MODELS_BY_NAME, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise FileNotFoundError(f"{path}: no such file or model name: {hint}`vitrail models` lists the names")


def find_local_model(repo: str) -> Path | None:
    """Return the weights of a repository in the directory VITRAIL_MODELS: a directory or a file; None if they are not there.

    They are under owner/name, or under the model's name, with or without a suffix.
    """
    home = os.environ.get(MODELS_VARIABLE)
    if not home:
        return None
    if not os.path.isdir(home):
        raise ValueError(f"{MODELS_VARIABLE}={home} is not a directory: create it, or unset the variable")
    names = [repo, *(model.name for model in KNOWN_MODELS if model.repo == repo)]
    for name in names:
        for suffix in ("", *WEIGHT_SUFFIXES):
            path = Path(home) / f"{name}{suffix}"
            if path.is_dir() or (suffix and path.is_file()):
                return path
    return None


def describe_offline(repo: str) -> str:
    """Return how weights are used without the network."""
    name = next((model.name for model in KNOWN_MODELS if model.repo == repo), repo)
    return f"load it once with the network, or set {MODELS_VARIABLE} to a directory with {name}.safetensors"
