"""Invalid models raise a ValueError that names the value and the remedy."""

import pytest
import torch

import vitrail
from vitrail.models.hybrid import Hybrid
from vitrail.nn.embed import ConvPool, Patches
from vitrail.nn.head import PreLogits

INVALID = {
    "image not divisible": ("B/16", {"image_size": 225}, "225×225 .* patch size 16: use 224 or 240"),
    "one side not divisible": ("B/16", {"image_size": (224, 100)}, "use 96 or 112 for 100"),
    "image smaller than a patch": ("B/16", {"image_size": 8}, "use 16 for 8"),
    "heads": ("B/16", {"heads": 7}, "7 heads do not divide the width 768: use 6 or 8 heads"),
    "zero heads": ("B/16", {"heads": 0}, "heads must be at least 1, got 0"),
    "zero depth": ("B/16", {"depth": 0}, "depth must be at least 1, got 0"),
    "zero width": ("B/16", {"width": 0}, "width must be at least 1, got 0"),
    "negative image": ("B/16", {"image_size": -16}, "at least 1 pixel, got .-16, -16"),
    "image of one side": ("B/16", {"image_size": (224,)}, r"must be a number or \(height, width\)"),
    "narrow": (None, {"patch": 4, "width": 1, "depth": 1, "heads": 2}, "use 1 heads, or the width 2"),
    "nameless zero MLP": (
        None,
        {"patch": 4, "width": 4, "depth": 1, "heads": 2, "mlp_width": 0},
        "MLP width must be at least 1, got 0",
    ),
    "two patches": ("B/16", {"embed": Patches(8)}, "give the same size in both"),
    "bare ResNet": ("R50", {}, r"'R50\+B/16', 'R50x1', 'Swin-T', 'MViTv2-T' or 'LSTM-Ti/16'"),
    "zero MLP": ("B/16", {"mlp_width": 0}, "MLP width must be at least 1, got 0"),
    "unknown size": ("XL/16", {}, "unknown size 'XL': .*Ti, S, B, L, H, g, G"),
    "wrong case": ("b/16", {}, "did you mean 'B'"),
    "not a model": ("resnet50", {}, "unknown model 'resnet50': use a name like"),
    "zero patch": ("B/0", {}, "patch size must be at least 1 pixel, got 0"),
    "unknown position": ("B/16", {"position": "sincos"}, "did you mean 'sincos2d'"),
    "unknown scope": ("B/16", {"position": "learned1d@top"}, "one of stem, every, shared, got 'top'"),
    "scope of rotary": ("B/16", {"position": "rotary2d@every"}, "leave out '@every'"),
    "relative at the stem": ("B/16", {"position": "relative@stem"}, "'every' or 'shared', got 'stem'"),
    "unknown pooling": ("B/16", {"pool": "avg"}, "unknown pooling 'avg'"),
    "unknown block": ("B/16", {"block": "prenorm"}, "unknown block 'prenorm'"),
    "unknown MLP": ("B/16", {"mlp": "geglu"}, "did you mean 'gelu'|did you mean 'swiglu'"),
    "unknown head": ("B/16", {"head": "lin"}, "did you mean 'linear'"),
    "unknown prefix": ("B/16", {"prefix": "cls"}, "unknown prefix 'cls'"),
    "unknown embedding": ("B/16", {"embed": "conv_stem"}, "did you mean 'conv-stem'"),
    "unknown initialisation": ("B/16", {"init": "xavier"}, "use vit or deit"),
    "zero classes": ("B/16", {"classes": 0}, "classes must be at least 1, or None .*got 0"),
    "zero channels": ("B/16", {"channels": 0}, "channels must be at least 1, got 0"),
    "negative registers": ("B/16", {"registers": -1}, "registers must be at least 0, got -1"),
    "class pooling without a class token": ("B/16", {"prefix": "none"}, "use prefix='class' or pool='mean'"),
    "dropout of 1": ("B/16", {"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    "negative stochastic depth": ("B/16", {"stochastic_depth": -0.1}, "stochastic_depth must be .* got -0.1"),
    "conv stem of 14": ("B/14", {"embed": "conv-stem"}, "power of two, got 14: use 16"),
    "conv pool of 6": ("B/16", {"patch": 6, "embed": "conv-pool"}, "a conv-pool must be a power of two, got 6: use 8"),
    "conv stem too narrow": ("B/16", {"embed": "conv-stem", "width": 12, "heads": 2}, "divisible by 8, got 12"),
    "sin-cos width": ("B/16", {"position": "sincos2d", "width": 6, "heads": 2}, "divisible by 4, got 6: use 8"),
    "rotary head width": ("B/16", {"position": "rotary2d", "width": 12, "heads": 2}, "head width divisible by 4"),
    "hybrid patch": ("R50+B/8", {}, "must be 16 or 32, got 8"),
    "hybrid ResNet": ("R34+B/16", {}, "unknown ResNet R34"),
    "hybrid on the root": ("R+Ti/32", {}, "use /16"),
    "hybrid with a stem": ("R50+B/16", {"embed": "conv-stem"}, "leave out embed"),
    "distilled pre-logits": ("B/16", {"prefix": "class+distillation", "head": "pre-logits"}, "use head='linear'"),
    "nameless and incomplete": (None, {"width": 8}, "give patch, width, depth and heads"),
    "ResNet depth": ("R34x1", {}, "use R14, R26, R50, R101, R152"),
    "ResNet factor": ("R50x0.1", {}, "multiple of 0.25"),
    "ResNet slot": ("R50x1", {"pool": "mean"}, "BiT ResNets do not support pool"),
    "ResNet classes": ("R50x1", {"classes": 0}, "classes must be at least 1"),
    "ResNet root": ("R50x1", {"root": "tiny"}, "unknown root 'tiny'"),
}


@pytest.mark.parametrize(("name", "slots", "message"), INVALID.values(), ids=INVALID)
def test_invalid_model_error_names_the_value_and_the_remedy(name, slots, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        vitrail.build(name, **slots)


def test_image_of_wrong_shape_is_refused():
    model = vitrail.build("Ti/16", depth=1)
    with pytest.raises(ValueError, match="takes 3 channels, got images of 1"):
        model(torch.randn(2, 1, 224, 224))
    with pytest.raises(ValueError, match=r"\[B, C, H, W\], got \[3, 224, 224\]"):
        model(torch.randn(3, 224, 224))
    with pytest.raises(ValueError, match="use 208 or 224 for 220"):
        model(torch.randn(2, 3, 220, 224))
    with pytest.raises(ValueError, match=r"takes \[B, 3, H, W\]"):
        vitrail.build("R14x0.25")(torch.randn(2, 1, 64, 64))


def test_unknown_attribute_of_the_package_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'biuld'"):
        vitrail.biuld  # noqa: B018


def test_invalid_slot_is_refused_on_construction():
    with pytest.raises(ValueError, match="must be at least 1"):
        Hybrid(patch=0)
    with pytest.raises(ValueError, match="pre-logits width must be at least 1, got 0"):
        PreLogits(hidden=0)


def test_a_conv_pool_needs_a_convolution_per_resolution():
    with pytest.raises(ValueError, match="at least 1 convolution per resolution, got 0"):
        ConvPool(16, convs=0)


def test_a_configuration_in_place_of_a_name_is_explained():
    config = vitrail.configure(patch=4, width=4, depth=1, heads=2)
    with pytest.raises(TypeError, match=r"must be a string like 'B/16', got ViTConfig: see build_from\(config\)"):
        vitrail.build(config)  # pyright: ignore[reportArgumentType]
