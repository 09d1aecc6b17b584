"""The registry of model families: builds models from names and configurations.

A family is registered once; building, loading, JSON, `vitrail describe` and the recipes go through this table. Adding one
touches `models/`, `checkpoints/formats/`, tests and docs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitrail.models.base import Model, ModelConfig, TokenConfig, refuse
from vitrail.models.bit import BIT_NAME, BiT, BiTConfig, configure_bit
from vitrail.models.init import build_and_fill, initialise
from vitrail.models.mvit import MViT
from vitrail.models.mvit_config import MVIT_NAME, MVIT_OPTIONS, MViTConfig, configure_mvit
from vitrail.models.recurrent import (
    RECURRENT_NAME,
    RECURRENT_OPTIONS,
    Recurrent,
    RecurrentConfig,
    configure_recurrent,
)
from vitrail.models.segmenter import DECODERS, DecoderSlot, Segmenter, SegmenterConfig
from vitrail.models.sizes import SIZES
from vitrail.models.swin import SWIN_NAME, SWIN_OPTIONS, Swin, SwinConfig, configure_swin
from vitrail.models.text import TextConfig
from vitrail.models.two_towers import TwoTowers, TwoTowersConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import VIT_NAME, ViTConfig, configure_vit, get_slot
from vitrail.utils.json import value_from_json


@dataclass(frozen=True)
class Family:
    """A family: its name, the class of its configurations, and the functions that build both."""

    name: str
    config: type[ModelConfig]
    layout: Callable[[Any], Model]  # returns a model whose weights are not initialised
    configure: Callable[..., ModelConfig]  # from a model's name and its options
    matches: Callable[[str], object]  # true if a model's name belongs to this family
    options: frozenset[str] | None = None  # options of `configure`; None: `configure` checks them
    example: str = ""  # a model's name, for messages


FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family to the table: its configurations can then be built, saved, loaded and named."""
    known = FAMILIES.get(family.name)
    if known is not None and known.config is not family.config:
        raise ValueError(f"model family {family.name!r} is already registered by {known.config.__name__}")
    FAMILIES[family.name] = family


def unregister(name: str) -> None:
    """Remove a family from the table."""
    del FAMILIES[name]


def configure(name: str | None = None, *, family: str | None = None, **options: Any) -> ModelConfig:
    """Return the configuration that a name and its options describe.

    Without a name, the options describe a model of `family` (default: a Vision Transformer).
    """
    if name is None:
        return FAMILIES[family or "vit"].configure(None, **options)
    if not isinstance(name, str):
        raise TypeError(
            f"a model's name must be a string like 'B/16', got {type(name).__name__}: see build_from(config)"
        )
    known = FAMILIES[family] if family else find_family(name)
    if known.options is not None and (extra := set(options) - known.options):
        raise ValueError(f"{known.config.title} do not support {', '.join(sorted(extra))} (model {name})")
    return known.configure(name, **options)


def find_family(name: str) -> Family:
    """Return the family that a model's name belongs to."""
    for family in FAMILIES.values():
        if family.matches(name):
            return family
    sizes = ", ".join(SIZES)
    names = "'B/16', 'R50+B/16', 'R50x1', 'Swin-T', 'MViTv2-T' or 'LSTM-Ti/16'"
    raise ValueError(f"unknown model {name!r}: use a name like {names}. Sizes: {sizes}")


def configure_tokens(name: str | None = None, *, purpose: str = "this recipe", **options: Any) -> TokenConfig:
    """Return the configuration of a model with patch tokens; refuse the name of a family without them."""
    if name is not None and not issubclass((known := find_family(name)).config, TokenConfig):
        raise refuse(known.configure(name), f"{purpose} (model={name!r})")
    return configure(name, **options).require_tokens(purpose, clips=True)


def build(name: str | None = None, **options: Any) -> Model:
    """Return a model with fresh weights from a name and its options; see `configure_vit` and `configure_bit`.

    >>> build("S/16", position="sincos2d", pool="mean", registers=4, channels=1, image_size=(160, 224), classes=10)
    """
    return build_from(configure(name, **options))


def build_from(config: ModelConfig) -> Model:
    """Return a model with fresh weights from its configuration."""
    return build_and_fill(lambda: lay_out(config), lambda model: initialise(model, config.init))


def lay_out(config: ModelConfig) -> Model:
    """Return a model whose weights are not initialised."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family.layout(config)
    raise ValueError(f"{type(config).__name__} belongs to no registered model family: known are {', '.join(FAMILIES)}")


def parse_decoder(decoder: str | DecoderSlot) -> DecoderSlot:
    """Return the decoder that a short string names: linear, linear-4, upernet or eomt."""
    return get_slot("decoder", decoder, DECODERS) if isinstance(decoder, str) else decoder


def configure_segmenter(
    name: str | None = None, *, decoder: str | DecoderSlot = "linear", classes: int, **options: Any
) -> SegmenterConfig:
    """Return a segmentation model on the backbone that a name and its options describe; see `configure`."""
    return SegmenterConfig(configure(name, classes=None, **options).as_backbone(), parse_decoder(decoder), classes)


def build_segmenter(
    name: str | None = None, *, decoder: str | DecoderSlot = "linear", classes: int, **options: Any
) -> Segmenter:
    """Return a segmentation model with fresh weights.

    >>> build_segmenter("S/16", decoder="upernet", classes=21, image_size=512)
    """
    model = build_from(configure_segmenter(name, decoder=decoder, classes=classes, **options))
    assert isinstance(model, Segmenter)
    return model


def lay_out_segmenter(config: SegmenterConfig) -> Segmenter:
    return Segmenter(config, lay_out(config.backbone))


def configure_two_towers(
    name: str | None = None, *, text: TextConfig, logit_bias: bool = False, **options: Any
) -> TwoTowersConfig:
    """Return two towers with the image tower that a name and its options describe; see `configure`."""
    return TwoTowersConfig(configure(name, classes=None, **options), text, logit_bias)


def lay_out_two_towers(config: TwoTowersConfig) -> TwoTowers:
    return TwoTowers(config, lay_out(config.image))


def config_from_json(data: Any) -> ModelConfig:
    """Return the configuration that `to_json` wrote."""
    return value_from_json(data, ModelConfig, "config")


BIT_OPTIONS = frozenset({"classes", "image_size", "channels", "root"})
register(Family("vit", ViTConfig, ViT, configure_vit, VIT_NAME.fullmatch, None, "S/16"))
register(Family("bit", BiTConfig, BiT, configure_bit, BIT_NAME.fullmatch, BIT_OPTIONS, "R50x1"))
register(Family("swin", SwinConfig, Swin, configure_swin, SWIN_NAME.fullmatch, SWIN_OPTIONS, "Swin-T"))
register(Family("mvit", MViTConfig, MViT, configure_mvit, MVIT_NAME.fullmatch, MVIT_OPTIONS, "MViTv2-T"))
register(Family("segmenter", SegmenterConfig, lay_out_segmenter, configure_segmenter, lambda name: False))
register(Family("two_towers", TwoTowersConfig, lay_out_two_towers, configure_two_towers, lambda name: False))
recurrent = (configure_recurrent, RECURRENT_NAME.fullmatch, RECURRENT_OPTIONS, "LSTM-Ti/16")
register(Family("recurrent", RecurrentConfig, Recurrent, *recurrent))
