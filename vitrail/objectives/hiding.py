"""What objectives that hide patches ask of a model, before training starts."""

from vitrail.models.bit import BiTConfig
from vitrail.models.vit import ViTConfig
from vitrail.nn.head import Linear
from vitrail.nn.pool import MAP


def check_encoder(config: ViTConfig | BiTConfig, method: str) -> ViTConfig:
    """The configuration, if it has patches to hide and nothing in it that would never learn."""
    if not isinstance(config, ViTConfig):
        raise ValueError(f"{method} hides patches, and a ResNet has none: use a Vision Transformer")
    if config.classes is not None or not isinstance(config.head, Linear):
        raise ValueError(f"{method} trains a model that ends in features: set model.classes=none and model.head=Linear")
    if isinstance(config.pool, MAP):
        raise ValueError(f"{method} does not read the attention pool, which would learn nothing: set model.pool=Mean")
    if config.shape.patches < 2:
        h, w = config.image_size
        raise ValueError(
            f"pictures of {h}×{w} are one patch of {config.embed.stride}×{config.embed.stride}, and {method} hides some and "
            "shows others: use a smaller patch or a larger size"
        )
    return config


def check_share(name: str, share: float, what: str) -> None:
    """A share of the patches that leaves some of both kinds."""
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}: it is the share of patches {what}, above 0 and below 1")
