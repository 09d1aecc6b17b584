"""Models like CLIP and SigLIP: an image tower and a text tower whose features are compared.

The image tower is a model of any family without classes. As a `Model`, two towers are their image tower: images to features.
With texts they return the logits of every pair.

B images, N texts, F features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, ModelConfig, State, TokenConfig, TokenModel, refuse
from vitrail.models.segmenter import select_prefix
from vitrail.models.text import PairLogits, TextConfig, TextEncoder
from vitrail.nn.recording import AttentionLayer
from vitrail.nn.resampling import Resampling
from vitrail.nn.shape import FeatureShape, Grid


@dataclass(frozen=True)
class TwoTowersConfig(ModelConfig):
    """Two towers as a value. `logit_bias` is added to all logits, as the sigmoid loss needs."""

    family: ClassVar[str] = "two_towers"
    title: ClassVar[str] = "models with a text tower"

    image: ModelConfig
    text: TextConfig
    logit_bias: bool = False

    if TYPE_CHECKING:  # the fields that every family declares are here those of the image tower

        def __init__(self, image: ModelConfig, text: TextConfig, logit_bias: bool = False) -> None: ...

    def __post_init__(self) -> None:
        if self.image.classes is not None or self.image.output_kind != "classes":
            raise ValueError("an image tower returns features: use a configuration with classes=None")
        if self.image.image_tower is not self.image:
            raise ValueError("an image tower has no text tower of its own: use config.image")

    @property
    def image_tower(self) -> ModelConfig:
        return self.image

    @property
    def text_tower(self) -> TextConfig:
        return self.text

    # --- facts of the image tower ---

    @property
    def classes(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None

    @property
    def frames(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.image.frames

    @property
    def image_size(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.image.image_size

    @property
    def channels(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.image.channels

    @property
    def init(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.image.init

    @property
    def depth(self) -> int:
        return self.image.depth

    @property
    def stride(self) -> int:
        return self.image.stride

    @property
    def size_rule(self) -> tuple[int, int]:
        return self.image.size_rule

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return self.image.grid_of(size)

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        return self.image.pyramid_layers

    def feature_shape(self, layer: int) -> FeatureShape:
        return self.image.feature_shape(layer)

    def describe(self) -> str:
        return f"{self.image.describe()} with a text tower"

    def facts(self) -> dict[str, str]:
        bias = " and bias" if self.logit_bias else ""
        return {**self.image.facts(), "text tower": self.text.describe(), "logits": f"learned scale{bias}"}

    @property
    def has_tokens(self) -> bool:
        return self.image.has_tokens

    def require_tokens(self, purpose: str, clips: bool = False) -> TokenConfig:
        return self.image.require_tokens(purpose, clips)

    def check_any_size(self) -> None:
        self.image.check_any_size()

    def matches_option(self, name: str, value: Any) -> bool:
        if name.startswith("text_"):
            return {"text_heads": self.text.size.heads, "text_eps": self.text.eps}.get(name) == value
        return self.image.matches_option(name, value)

    @property
    def resampling(self) -> Resampling | None:
        return self.image.resampling

    # --- other configurations ---

    def with_resampling(self, resampling: str | Resampling) -> Self:
        return replace(self, image=self.image.with_resampling(resampling))

    def with_image_size(self, size: tuple[int, int]) -> Self:
        return replace(self, image=self.image.with_image_size(size))

    def with_frames(self, frames: int) -> Self:
        return replace(self, image=self.image.with_frames(frames))

    def with_channels(self, channels: int) -> Self:
        return replace(self, image=self.image.with_channels(channels))

    def with_classes(self, classes: int | None) -> ModelConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the configuration of a classifier on the image tower; None ends the image tower in features."""
        return self.image.with_classes(classes)

    def as_backbone(self) -> ModelConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.image.as_backbone()

    def drop_classifier(self, state: State, classes: int | None) -> State:
        """Return the tensors of the image tower that a model with this number of classes takes over."""
        return self.image.drop_classifier(select_prefix(state, "image."), classes)

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        resized = self.image.resize_state(select_prefix(state, "image."), size)
        return state | {f"image.{name}": tensor for name, tensor in resized.items()}

    def input_weight(self) -> str:
        return f"image.{self.image.input_weight()}"


class TwoTowers(Model):
    """Images and texts to unit vectors of one space; their products, scaled, are the logits of the pairs."""

    if TYPE_CHECKING:
        config: TwoTowersConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: TwoTowersConfig, image: Model) -> None:
        super().__init__()
        self.config = config  # pyright: ignore[reportIncompatibleVariableOverride]
        self.image = image
        self.text = TextEncoder(config.text)
        if image.feature_dim != self.text.feature_dim:
            widths = f"images have {image.feature_dim} features, texts {self.text.feature_dim}"
            raise ValueError(f"{widths}: give both towers a projection of one width")
        self.logits = PairLogits(config.logit_bias)
        self.STEM = tuple(f"image.{prefix}" for prefix in image.STEM)  # pyright: ignore[reportAttributeAccessIssue]

    # --- both towers ---

    def forward(self, images: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return the logits of every image with every text, [B, N]; without texts, the features of the images."""
        if tokens is None:
            return self.image(images)
        return self.logits(self.encode_images(images), self.encode_texts(tokens))

    def encode_images(self, images: Tensor) -> Tensor:
        """Return the features of images as unit vectors, [B, F]."""
        return F.normalize(self.image.embed_images(images), dim=-1)

    def encode_texts(self, tokens: Tensor) -> Tensor:
        """Return the features of texts as unit vectors, [N, F], from their token ids [N, T]."""
        return F.normalize(self.text(tokens), dim=-1)

    def sample_outputs(self, images: Tensor) -> Tensor:
        """Return the logits of images and of two texts, then the features of both: they depend on every weight."""
        text = self.config.text
        tokens = torch.arange(2 * text.context, device=images.device).remainder(text.vocabulary).view(2, -1)
        with_images, with_texts = self.image.embed_images(images), self.text(tokens)
        return torch.cat((self(images, tokens).flatten(), with_images.flatten(), with_texts.flatten()))

    # --- as a model of images: the image tower ---

    def forward_features(self, images: Tensor) -> Tensor:
        return self.image.forward_features(images)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.image.forward_head(features, pre_logits)

    def classify(self, features: Tensor) -> Tensor:
        return features

    def compute_pre_logits(self, images: Tensor) -> Tensor:
        return self.image.compute_pre_logits(images)

    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        raise refuse(self.config, "a linear classifier of images", "use replace_head or zero_shot first")

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        return self.image.feature_maps(images, layers)

    @property
    def final_norm(self) -> nn.Module:
        return self.image.final_norm

    def normalise_map(self, features: Tensor) -> Tensor:
        return self.image.normalise_map(features)

    @property
    def feature_dim(self) -> int:
        return self.image.feature_dim

    def require_towers(self, purpose: str) -> "TwoTowers":
        return self

    def require_tokens(self, purpose: str, clips: bool = False) -> TokenModel:
        return self.image.require_tokens(purpose, clips)

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        return self.image.run_stages(images, every_token)

    # --- layers and parameters ---

    def layers(self) -> list[Layer]:
        return [Layer(f"image.{name}", module) for name, module in self.image.layers()]

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        return self.image.attention_layers(size)

    def layer_index(self, parameter: str) -> int:
        """Return the layer of the image tower; parameters of the text tower count as after the last layer."""
        if parameter.startswith("image."):
            return self.image.layer_index(parameter.removeprefix("image."))
        return self.config.depth + 1

    def decays(self, name: str, parameter: Tensor) -> bool:
        if name.startswith("image."):
            return self.image.decays(name.removeprefix("image."), parameter)
        return super().decays(name, parameter) and name != "text.position"

    def lora_modules(self) -> list[nn.Linear]:
        return self.image.lora_modules()

    # --- other forms of the same model ---

    def for_tracing(self, any_size: bool = False) -> Self:
        model = super().for_tracing(any_size)
        model.image = self.image.for_tracing(any_size)
        return model

    def with_constants(self, any_size: bool = False, size: tuple[int, ...] | None = None) -> Self:
        model = super().for_tracing(any_size)
        model.image = self.image.with_constants(any_size, size)
        return model
