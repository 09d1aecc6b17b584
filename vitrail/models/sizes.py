"""Published model sizes as tables, from which names such as "B/16" and "R50x1" are parsed."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A row of the paper's table 1: layers, width D, MLP width, heads. `head` overrides the head width D/heads."""

    depth: int
    width: int
    mlp: int
    heads: int
    head: int | None = None


SIZES = {
    "Ti": Size(12, 192, 768, 3),  # DeiT, AugReg
    "S": Size(12, 384, 1536, 6),  # DeiT, AugReg
    "B": Size(12, 768, 3072, 12),  # the paper's table 1
    "L": Size(24, 1024, 4096, 16),
    "H": Size(32, 1280, 5120, 16),
    "g": Size(40, 1408, 6144, 16),  # Scaling Vision Transformers
    "G": Size(48, 1664, 8192, 16),
    "H+": Size(32, 1280, 5120, 20),  # DINOv3
    "7B": Size(40, 4096, 8192, 32),
}

# Blocks in each stage.
RESNETS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

# The names of each slot of a Vision Transformer, and what the slot decides. `vit_config.py` gives each name its object;
# the help texts of the command line read the names without importing PyTorch.
POSITION_NAMES = (
    *("none", "learned1d", "learned2d", "relative", "relative1d", "relative-mlp"),
    *("sincos2d", "sinusoid1d", "rotary2d", "rotary-dinov3", "rotary-eva02"),
    *("factorised", "rotary3d"),  # of clips
)
SLOT_NAMES = {
    "embed": (("patches", "conv-stem", "conv-pool"), "patch embedding"),
    "prefix": (("none", "class", "class+distillation"), "tokens before the patch tokens"),
    "pool": (
        ("class", "mean", "mean-norm", "class+mean", "map", "output-mean"),
        "pooling of the tokens into one vector",
    ),
    "block": (("pre", "post", "parallel", "res-post", "divided"), "order of norm, attention and MLP in a block"),
    "mlp": (("gelu", "gelu-tanh", "gelu-quick", "relu", "swiglu"), "MLP and its activation"),
    "head": (("linear", "pre-logits", "norm-linear"), "classifier after the pooling"),
    "position": (POSITION_NAMES, "position embedding"),
}

DECODER_NAMES = ("linear", "linear-4", "upernet", "eomt")  # of segmentation models; `segmenter.py` has their objects

# Rules to resample position tables, by the project that uses them; `vit_config.py` gives each name its object.
RESAMPLING_NAMES = (
    *("timm", "transformers", "dino", "torchvision", "google"),
    *("timm-relative", "transformers-relative"),  # of tables of offsets
    *("timesformer", "ast"),
)


def closest(name: str, known: list[str]) -> str:
    """Return the known names for an error message, with the most likely one first."""
    likely = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    likely = likely or [k for k in known if k.lower() == name.lower()]
    return (f"did you mean {likely[0]!r}? " if likely else "") + f"Known: {', '.join(known)}"
