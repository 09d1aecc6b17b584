"""One encoder for several modalities: images, clips, sounds and texts become tokens of one width, and the same layers read them.

Each modality is an ordinary model, a Vision Transformer or a text tower, with an embedding, positions, a class token, a final
norm and a projection of its own. Their layers are one module, so a step on any modality trains it for all. The class token and
the positions tell the layers which modality they read: a further vector that is added to all tokens of a modality would be
absorbed by its positions, or by the bias of its embedding. The features of all modalities have one width, so that they can be
compared.

B samples, F features.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import ModelConfig, refuse
from vitrail.models.init import build_and_fill, initialise
from vitrail.models.text import PairLogits, TextConfig, TextEncoder
from vitrail.models.two_towers import TwoTowers, TwoTowersConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.head import Projection

ModalityConfig = ViTConfig | TextConfig
LAYERS = "blocks"  # the part that all modalities share
RESERVED = (LAYERS, "logits", "tokenizer")


@dataclass(frozen=True)
class Modality:
    """The model of one modality by its name."""

    name: str
    model: ModalityConfig


@dataclass(frozen=True)
class SharedEncoderConfig:
    """A shared encoder as a value: the models of its modalities, with one size, one kind of layer and one number of features."""

    EVERY_FIELD_WRITTEN: ClassVar[bool] = True

    modalities: tuple[Modality, ...]
    logit_bias: bool = False

    def __post_init__(self) -> None:
        names = [modality.name for modality in self.modalities]
        if not names:
            raise ValueError("a shared encoder needs at least one modality, such as images")
        for name in names:
            if not name.isidentifier() or name in RESERVED:
                raise ValueError(f"invalid modality {name!r}: use a name of letters, digits and _, such as images")
            if names.count(name) > 1:
                raise ValueError(f"two modalities are named {name!r}: rename one")
        first, wanted = self.modalities[0], list_layer_facts(self.modalities[0].model)
        for modality in self.modalities:
            if isinstance(modality.model, ViTConfig) and modality.model.classes is not None:
                raise ValueError(
                    f"{modality.name} must end in features, got {modality.model.classes} classes: use None"
                )
            for fact, value in list_layer_facts(modality.model).items():
                if value != wanted[fact]:
                    differ = f"{fact} of {first.name} is {wanted[fact]}, of {modality.name} {value}"
                    raise ValueError(f"{differ}: layers that are shared must be equal")

    @property
    def models(self) -> dict[str, ModalityConfig]:
        """Return the configurations of the models by the names of the modalities."""
        return {modality.name: modality.model for modality in self.modalities}


def list_layer_facts(config: ModalityConfig) -> dict[str, object]:
    """Return the facts that determine the layers of a model."""
    size = config.size
    facts: dict[str, object] = {
        "depth": size.depth,
        "width": size.width,
        "MLP width": size.mlp,
        "heads": size.heads,
        "head width": size.head,
    }
    facts |= {"kind of layer": config.block, "eps": config.eps}
    with_rates = isinstance(config, ViTConfig)
    dropout, stochastic_depth = (config.dropout, config.stochastic_depth) if with_rates else (0.0, 0.0)
    return facts | {"dropout": dropout, "stochastic depth": stochastic_depth}


def configure_shared(
    models: Mapping[str, ModelConfig | TextConfig], features: int | None = None, logit_bias: bool = False
) -> SharedEncoderConfig:
    """Return the configuration of a shared encoder of these models; `features` sets the width of all projections."""
    modalities = []
    for name, config in models.items():
        if not isinstance(config, ViTConfig | TextConfig):
            raise refuse(config, f"a shared encoder ({name})")
        modalities.append(Modality(name, config if features is None else with_projection(config, features)))
    return SharedEncoderConfig(tuple(modalities), logit_bias)


def with_projection(config: ModalityConfig, features: int) -> ModalityConfig:
    """Return the configuration with a projection to so many features."""
    if isinstance(config, TextConfig):
        return replace(config, features=features)
    return replace(config, head=Projection(features), classes=None)


class SharedEncoder(nn.Module):
    """Models of several modalities around the same layers; `shared["images"]` is that of one of them."""

    tokenizer: Callable[[Any], Tensor] | None = None  # texts to token ids [B, T]

    def __init__(self, config: SharedEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.models = nn.ModuleDict({name: lay_out_modality(model) for name, model in config.models.items()})
        widths = {name: self[name].feature_dim for name in self}
        if len(set(widths.values())) > 1:
            listed = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise ValueError(f"modalities must have the same number of features, got {listed}: use features=")
        for model in self.models.values():
            model.blocks = self.blocks
        self.logits = PairLogits(config.logit_bias)

    @classmethod
    def build(
        cls, models: Mapping[str, ModelConfig | TextConfig], *, features: int | None = None, logit_bias: bool = False
    ) -> "SharedEncoder":
        """Return a shared encoder with fresh weights; `models` has the configuration of each modality by its name.

        `features` gives all of them a projection to that many features.
        """
        config = configure_shared(models, features, logit_bias)
        return build_and_fill(lambda: cls(config), initialise_shared)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the modalities."""
        return iter(self.config.models)

    def __getitem__(self, name: str) -> Any:  # a ViT, or a TextEncoder
        """Return the model of a modality. It shares its weights with this module."""
        if name not in self.models:
            raise KeyError(f"unknown modality {name!r}: known are {', '.join(self)}")
        return self.models[name]

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the layers that all modalities share."""
        return self[self.config.modalities[0].name].blocks

    def forward(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the features of a mixed batch: of each modality [B, F] unit vectors."""
        return {name: self.encode(name, batch) for name, batch in batches.items()}

    def encode(self, name: str, batch: Tensor) -> Tensor:
        """Return the features of a batch of one modality as unit vectors, [B, F]."""
        model = self[name]
        return F.normalize(model(batch) if isinstance(model, TextEncoder) else model.embed_images(batch), dim=-1)

    def towers(self, images: str, texts: str) -> TwoTowers:
        """Return two towers of an image modality and a text modality, which share their weights with this module."""
        image, text = self[images], self[texts]
        if not isinstance(image, ViT) or not isinstance(text, TextEncoder):
            raise ValueError(f"towers need images and texts, got {images!r} and {texts!r}: swap or replace them")
        with torch.device("meta"):
            towers = TwoTowers(TwoTowersConfig(image.config, text.config, self.config.logit_bias), image)
        towers.text, towers.logits = text, self.logits
        towers.preprocessing, towers.tokenizer = image.preprocessing, self.tokenizer
        return towers.train(self.training)


def lay_out_modality(config: ModalityConfig) -> ViT | TextEncoder:
    """Return the model of a modality, whose weights are not initialised."""
    return TextEncoder(config) if isinstance(config, TextConfig) else ViT(config)


def initialise_shared(shared: SharedEncoder) -> None:
    """Fill the models one after another; the layers as those of a Vision Transformer, if there is one."""
    models = shared.config.models
    for name in sorted(models, key=lambda name: isinstance(models[name], ViTConfig)):  # Vision Transformers last
        config = models[name]
        part = nn.ModuleList([shared[name]])  # not the model itself, whose head would be a classifier of zeros
        initialise(part, config.init if isinstance(config, ViTConfig) else "vit")
    initialise(shared.logits, "vit")


def strip_modality(name: str) -> str:
    """Return the name of a tensor in a file: the layers once, all others under the name of their modality."""
    name = name.removeprefix("models.")
    modality, _, rest = name.partition(".")
    return rest if rest.startswith(f"{LAYERS}.") else f"{modality}.{rest}"
