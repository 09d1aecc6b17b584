"""A small model with two towers and a tokeniser."""

import torch

from vitrail.data.preprocessing import CLIP_STATS, Preprocessing
from vitrail.data.tokenizer import make_open_clip_tokenizer
from vitrail.models.registry import build_from, configure_two_towers
from vitrail.models.sizes import Size
from vitrail.models.text import TextConfig
from vitrail.models.two_towers import TwoTowers
from vitrail.nn.embed import Patches
from vitrail.nn.head import Projection

MERGES = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>"), ("p", "h"), ("o", "f</w>")]
CONTEXT, FEATURES = 16, 24


def make_towers(logit_bias: bool = False, seed: int = 0, **options) -> TwoTowers:
    """Return a CLIP-like model of 32×32 images with random weights."""
    torch.manual_seed(seed)
    tokenizer = make_open_clip_tokenizer(MERGES, CONTEXT)
    text = TextConfig(Size(2, 32, 64, 4), FEATURES, tokenizer.vocabulary, CONTEXT)
    image = {"patch": 16, "width": 32, "depth": 2, "heads": 4, "image_size": 32, "head": Projection(FEATURES)}
    image |= {"embed": Patches(16, bias=False), "token_norm": True, "eps": 1e-5, **options}
    model = build_from(configure_two_towers(text=text, logit_bias=logit_bias, **image))
    assert isinstance(model, TwoTowers)
    model.tokenizer = tokenizer
    model.preprocessing = Preprocessing((32, 32), (32, 32), **CLIP_STATS)
    return model.eval()
