"""Small configurations that cover every option of every slot of a Vision Transformer."""

from typing import Any

from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Projection
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import Mean
from vitrail.nn.position import Learned1D, Relative, RelativeMLP, RotaryDINOv3

SMALL: dict[str, Any] = {"patch": 8, "width": 32, "depth": 2, "heads": 2, "image_size": (32, 48), "classes": 5}

VIT_SLOTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "normed patches": {"embed": Patches(8, normed=True)},
    "conv stem": {"embed": "conv-stem"},
    "conv pool": {"embed": "conv-pool"},
    **{f"position {name}": {"position": name} for name in ("none", "learned2d", "relative", "relative1d", "sincos2d")},
    **{
        f"position {name}": {"position": name}
        for name in ("sinusoid1d", "rotary2d", "rotary-dinov3", "rotary-eva02", "relative@shared", "relative1d@shared")
    },
    **{
        f"position {name}@{at}": {"position": f"{name}@{at}"}
        for name in ("learned1d", "learned2d")
        for at in ("every", "shared")
    },
    "position sincos2d@shared": {"position": "sincos2d@shared"},
    "position relative-mlp": {"position": "relative-mlp"},
    "position relative-mlp@shared, scaled": {"position": RelativeMLP("shared", hidden=16, scaled=True)},
    "position relative and learned": {"position": Relative(absolute=Learned1D()), "resampling": "timm-relative"},
    "distillation": {"prefix": "class+distillation"},
    "registers": {"registers": 3},
    "registers relative": {"registers": 3, "position": "relative"},
    "registers relative1d": {"registers": 3, "position": "relative1d"},
    "registers relative-mlp": {"registers": 3, "position": "relative-mlp"},
    "registers rotary": {"registers": 3, "position": "rotary2d"},
    "eva02": {
        "position": "rotary-eva02",
        "mlp": SwiGLU(normed=True),
        "block": PreNorm(key_bias=False, attention_norm=True),
        "pool": "mean-norm",
        "prefix": "class",
    },
    "dinov3": {"registers": 3, "position": RotaryDINOv3(precision="bfloat16"), "layer_scale": 0.1, "eps": 1e-5},
    "no prefix": {"pool": "mean"},
    "pool mean-norm": {"pool": "mean-norm", "prefix": "class"},
    "pool class+mean": {"pool": "class+mean"},
    "pool map": {"pool": "map"},
    "block post": {"block": "post"},
    "block parallel": {"block": "parallel"},
    "block res-post": {"block": "res-post"},
    "layer scale": {"layer_scale": 0.1},
    "stochastic depth": {"stochastic_depth": 0.2},
    "dropout": {"dropout": 0.1},
    "qk norm": {"qk_norm": True},
    "no key bias": {"block": PreNorm(key_bias=False)},
    "swiglu": {"mlp": "swiglu"},
    "gelu-tanh": {"mlp": "gelu-tanh"},
    "gelu-quick": {"mlp": "gelu-quick"},
    "wide heads": {"head_width": 24},
    "norm on z_0": {"token_norm": True},
    "patches without bias": {"embed": Patches(8, bias=False)},
    "projection": {"head": Projection(12), "classes": None},
    "pre-logits": {"head": "pre-logits"},
    "features": {"classes": None},
    "grey": {"channels": 1},
    "spectrogram": {"embed": Patches(8, overlap=1), "pool": "output-mean", "head": "norm-linear", "channels": 1},
    "deit init": {"init": "deit"},
}

# Models of clips: 4 frames of 16×24 pixels, tubelets of 2×8×8 unless a row says otherwise.
CLIP: dict[str, Any] = {**SMALL, "width": 48, "image_size": (16, 24), "frames": 4, "tubelet": 2}
DIVIDED: dict[str, Any] = {"block": "divided", "position": "factorised"}

CLIP_SLOTS: dict[str, dict[str, Any]] = {
    "ViViT": {},
    "VideoMAE": {"position": "sinusoid1d", "pool": "mean-norm", "key_bias": False},
    "TimeSformer": {**DIVIDED, "tubelet": 1},
    "divided, tubelets": DIVIDED,
    "divided, mean": {**DIVIDED, "pool": "mean"},
    "divided, class and mean": {**DIVIDED, "pool": "class+mean"},
    "divided, registers": {**DIVIDED, "registers": 2},
    "divided, distillation": {**DIVIDED, "prefix": "class+distillation"},
    "joint, factorised": {"position": "factorised"},
    "factorised@every": {"position": "factorised@every"},
    "learned1d@shared": {"position": "learned1d@shared"},
    "rotary3d": {"position": "rotary3d"},
    "rotary3d, mean": {"position": "rotary3d", "pool": "mean"},
    "no position": {"position": "none"},
    "whole clip": {"tubelet": 4},
    "norm of the mean": {"pool": Mean(norm_after=True, eps=1e-5)},
    "no norm": {"pool": Mean(normed=False), "classes": None},
}
