"""Segmentation: a backbone of any family, and a decoder that turns its features into logits of every pixel.

B images, C channels, K classes, H×W pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, ModelConfig, State, Unsupported, check_common, refuse
from vitrail.models.eomt import EoMT, QueryDecoder, QueryLogits
from vitrail.nn.decoder import Decoder, LinearDecoder, UPerNet, resize_map
from vitrail.nn.recording import AttentionLayer
from vitrail.nn.resampling import Resampling
from vitrail.nn.shape import FeatureShape, Grid

DecoderSlot = LinearDecoder | UPerNet | EoMT
DECODERS: dict[str, DecoderSlot] = {
    "linear": LinearDecoder(),
    "linear-4": LinearDecoder(layers=(-4, -3, -2, -1), norm="all"),  # DINOv2's multi-layer protocol
    "upernet": UPerNet(),
    "eomt": EoMT(),
}


@dataclass(frozen=True)
class SegmenterConfig(ModelConfig):
    """A segmentation model as a value: the backbone, the decoder and the number of classes."""

    family: ClassVar[str] = "segmenter"
    title: ClassVar[str] = "segmentation models"
    output_kind: ClassVar[str] = "masks"

    backbone: ModelConfig
    decoder: DecoderSlot
    classes: int  # pyright: ignore[reportIncompatibleVariableOverride]

    if TYPE_CHECKING:  # the fields that every family declares are here those of the backbone

        def __init__(self, backbone: ModelConfig, decoder: DecoderSlot, classes: int) -> None: ...

    def __post_init__(self) -> None:
        check_common(self)
        if self.backbone.output_kind != "classes" or self.backbone.frames is not None:
            raise refuse(self.backbone, "segmentation", "use a model of images")
        if self.backbone != self.backbone.as_backbone():
            raise ValueError("the backbone of a segmentation model ends in features: use config.as_backbone()")
        with torch.device("meta"):
            self.decoder.build(self.backbone, self.classes)  # raises for a decoder that does not fit

    def find_decoder(self) -> DecoderSlot:
        return self.decoder

    @property
    def has_queries(self) -> bool:
        return isinstance(self.decoder, EoMT)

    # --- facts of the backbone ---

    @property
    def image_size(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.image_size

    @property
    def channels(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.channels

    @property
    def init(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.init

    @property
    def depth(self) -> int:
        return self.backbone.depth

    @property
    def stride(self) -> int:
        return self.backbone.stride

    @property
    def size_rule(self) -> tuple[int, int]:
        return self.backbone.size_rule

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return self.backbone.grid_of(size)

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        return self.backbone.pyramid_layers

    def feature_shape(self, layer: int) -> FeatureShape:
        return self.backbone.feature_shape(layer)

    def describe(self) -> str:
        return f"{self.backbone.describe()} with {type(self.decoder).__name__}"

    def facts(self) -> dict[str, str]:
        return {**self.backbone.facts(), "decoder": str(self.decoder)}

    def check_any_size(self) -> None:
        self.backbone.check_any_size()
        if not self.decoder.any_size:
            name = type(self.decoder).__name__
            raise Unsupported(f"dynamic_size= does not support {name}: its pooling depends on the size, use size=")

    def matches_option(self, name: str, value: Any) -> bool:
        return self.backbone.matches_option(name, value)

    @property
    def resampling(self) -> Resampling | None:
        return self.backbone.resampling

    # --- other configurations ---

    def with_resampling(self, resampling: str | Resampling) -> Self:
        return replace(self, backbone=self.backbone.with_resampling(resampling))

    def with_image_size(self, size: tuple[int, int]) -> Self:
        return replace(self, backbone=self.backbone.with_image_size(size))

    def with_channels(self, channels: int) -> Self:
        return replace(self, backbone=self.backbone.with_channels(channels))

    def as_backbone(self) -> ModelConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.backbone

    def with_classes(self, classes: int | None) -> ModelConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the configuration with another number of classes; None returns the backbone."""
        return self.backbone if classes is None else replace(self, classes=classes)

    def drop_classifier(self, state: State, classes: int | None) -> State:
        """Return the tensors without those of the last layer of the decoder; without classes, those of the backbone."""
        if classes is None:
            return select_prefix(state, "backbone.")
        return {name: tensor for name, tensor in state.items() if not name.startswith("head.classifier.")}

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        resized = self.backbone.resize_state(select_prefix(state, "backbone."), size)
        return state | {f"backbone.{name}": tensor for name, tensor in resized.items()}

    def input_weight(self) -> str:
        return f"backbone.{self.backbone.input_weight()}"


def select_prefix(state: State, prefix: str) -> State:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


class Segmenter(Model):
    """Image to logits of every pixel. Features of images and of cells are those of the backbone."""

    if TYPE_CHECKING:
        config: SegmenterConfig  # pyright: ignore[reportIncompatibleVariableOverride]
        head: Decoder  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: SegmenterConfig, backbone: Model) -> None:
        super().__init__()
        self.config = config  # pyright: ignore[reportIncompatibleVariableOverride]
        self.backbone = backbone
        self.head = config.decoder.build(  # pyright: ignore[reportIncompatibleVariableOverride]
            config.backbone, config.classes
        )
        self.STEM = tuple(f"backbone.{prefix}" for prefix in backbone.STEM)  # pyright: ignore[reportAttributeAccessIssue]
        # What the decoder does not read has no gradient: frozen, so that DDP does not wait for one.
        unread = [layer.module for layer in backbone.layers()[self.head.last_layer :]]
        for module in unread if self.head.reads_final_norm else (*unread, backbone.final_norm):
            module.requires_grad_(False)

    # --- forward ---

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, H, W] at the size of the images."""
        return resize_map(self.head.decode(self.backbone, images), images.shape[2:])

    def forward_features(self, images: Tensor) -> Tensor:
        return self.backbone.forward_features(images)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        if not pre_logits:
            raise refuse(self.config, "the head on the last features alone", "call the model on images")
        return self.backbone.forward_head(features, pre_logits=True)

    def compute_pre_logits(self, images: Tensor) -> Tensor:
        return self.backbone.compute_pre_logits(images)

    def classify(self, features: Tensor) -> Tensor:
        raise refuse(self.config, "the classifier on features of images", "call the model on images")

    def require_queries(self, purpose: str) -> QueryDecoder:
        """Return the decoder if it predicts by queries; raise Unsupported otherwise."""
        if not isinstance(self.head, QueryDecoder):
            raise Unsupported(f"{purpose} needs queries: use decoder='eomt', got {type(self.config.decoder).__name__}")
        return self.head

    def predict_queries(self, images: Tensor, masked: Tensor | None = None) -> list[QueryLogits]:
        return self.require_queries("a prediction of objects").predict_layers(self.backbone, images, masked)

    @torch.no_grad()
    def divide_logits(self, temperature: float) -> None:
        if isinstance(self.head, QueryDecoder):
            raise Unsupported("calibration does not support EoMT: its logits are scores of masks, use another decoder")
        for parameter in self.head.classifier.parameters():
            parameter.div_(temperature)

    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        raise refuse(self.config, "a linear classifier of images", "use replace_head(None), then one of images")

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        return self.backbone.feature_maps(images, layers)

    @property
    def final_norm(self) -> nn.Module:
        return self.backbone.final_norm

    def normalise_map(self, features: Tensor) -> Tensor:
        return self.backbone.normalise_map(features)

    @property
    def feature_dim(self) -> int:
        return self.backbone.feature_dim

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model stage by stage: the backbone, the decoder, and the resizing to the image."""
        yield ForwardStage("image", images)
        logits = images
        for name, logits, modules in self.head.run_stages(self.backbone, images):
            yield ForwardStage(name, logits, cast(tuple[nn.Module, ...], modules))
        yield ForwardStage("logits", resize_map(logits, images.shape[2:]))

    # --- layers and parameters ---

    @property
    def min_batch(self) -> int:
        return self.head.min_batch

    def layers(self) -> list[Layer]:
        return [Layer(f"backbone.{name}", module) for name, module in self.backbone.layers()]

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        return self.backbone.attention_layers(size)

    def layer_index(self, parameter: str) -> int:
        if parameter.startswith("backbone."):
            return self.backbone.layer_index(parameter.removeprefix("backbone."))
        return self.config.depth + 1

    def decays(self, name: str, parameter: Tensor) -> bool:
        if name.startswith("backbone."):
            return self.backbone.decays(name.removeprefix("backbone."), parameter)
        return super().decays(name, parameter) and name != "head.queries"

    def lora_modules(self) -> list[nn.Linear]:
        return self.backbone.lora_modules()

    def start_from(self, source: Model, keep_classifier: bool) -> None:
        """Copy the weights of a segmentation model with the same decoder, or those of another model into the backbone alone."""
        if source.config.find_decoder() == self.config.decoder:
            super().start_from(source, keep_classifier)
        else:
            from vitrail.models.adapt import take_backbone

            _, state = take_backbone(source)
            self.check_names(state, self.backbone.state_dict())
            self.backbone.load_state_dict(state)

    # --- other forms of the same model ---

    def for_tracing(self, any_size: bool = False) -> Self:
        model = super().for_tracing(any_size)
        model.backbone = self.backbone.for_tracing(any_size)
        return model

    def with_constants(self, any_size: bool = False, size: tuple[int, ...] | None = None) -> Self:
        model = super().for_tracing(any_size)
        model.backbone = self.backbone.with_constants(any_size, size)
        return model
