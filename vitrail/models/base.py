"""The interface of every model family, used by training, checkpoints, export, analysis and the service.

`Model` is the interface of all families. `TokenModel` adds the interface of families with patch tokens: equation 1 is
separate from equations 2 and 3, so that masking, distillation and attention maps work for every such family. `Unsupported`
is raised for a capability that a family lacks.

B images, C channels, T tokens, D width, K classes, a grid of h×w cells. Models of clips take [B, C, T, H, W] and have a grid
of t×h×w.
"""

import copy
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

import vitrail
from vitrail.nn.block import RecomputeModule
from vitrail.nn.recording import AttentionLayer
from vitrail.nn.shape import EncoderShape, FeatureShape, Grid
from vitrail.utils.files import WEIGHT_SUFFIXES

if TYPE_CHECKING:
    from vitrail.models.eomt import QueryDecoder, QueryLogits
    from vitrail.models.segmenter import DecoderSlot
    from vitrail.models.sizes import Size
    from vitrail.models.text import TextConfig
    from vitrail.models.two_towers import TwoTowers
    from vitrail.models.vit_config import EmbedSlot
    from vitrail.nn.block import BlockSlot
    from vitrail.nn.embed import Embedding, Prefix, PrefixTokens
    from vitrail.nn.head import HeadSlot
    from vitrail.nn.pool import Pool, PoolSlot
    from vitrail.nn.position import PositionEmbedding, PositionSlot
    from vitrail.nn.resampling import Resampling

State = dict[str, Tensor]
HUB_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


class Unsupported(ValueError):
    """A capability that a model family lacks."""


def refuse(config: "ModelConfig", purpose: str, remedy: str = "use a Vision Transformer, such as S/16") -> Unsupported:
    """Return the error for a family that lacks what `purpose` needs."""
    return Unsupported(f"{purpose} does not support {config.title}: {remedy}")


@dataclass(frozen=True)
class ModelConfig:
    """A model as a value: comparable, stored as JSON, with all facts that do not need the weights."""

    family: ClassVar[str]  # the name it is registered under
    title: ClassVar[str]  # the family in messages, in the plural
    EVERY_FIELD_WRITTEN: ClassVar[bool] = True  # in JSON: a model file without a field is refused (utils/json.py)
    ABSTRACT: ClassVar[bool] = True  # not a value by itself
    frames: ClassVar[int | None] = None  # of a clip, a field of families that take clips; None for models of images
    output_kind: ClassVar[str] = "classes"  # "classes": logits [B, K]; "masks": logits [B, K, H, W] for every pixel

    if TYPE_CHECKING:  # fields of every family, declared there
        classes: int | None  # None for a model that ends in features
        image_size: tuple[int, int]  # height and width
        channels: int
        init: str

    @property
    def input_size(self) -> tuple[int, ...]:
        """Return (height, width), or (frames, height, width) of models that take clips [B, C, T, H, W]."""
        return self.image_size if self.frames is None else (self.frames, *self.image_size)

    @property
    def image_tower(self) -> "ModelConfig":
        """Return the configuration of the tower that reads images: this one, unless the model has a text tower too."""
        return self

    @property
    def text_tower(self) -> "TextConfig | None":
        """Return the configuration of the text tower; None without one."""
        return None

    def find_decoder(self) -> "DecoderSlot | None":
        """Return the decoder of a segmentation model; None for other families."""
        return None

    @property
    def has_queries(self) -> bool:
        """Return whether the model predicts by queries, and so segments of images (EoMT)."""
        return False

    @property
    def depth(self) -> int:
        """Return the number of layers between the embedding and the head."""
        return 1

    @property
    def stride(self) -> int:
        """Return the number of pixels per cell of the last grid."""
        return 1

    @property
    def size_rule(self) -> tuple[int, int]:
        """Return (step, least): image sides are multiples of `step` pixels, at least `least` steps."""
        return self.stride, 1

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        """Return the grid of the last feature map for images of this size."""
        return tuple(side // self.stride for side in size)

    def describe(self) -> str:
        """Return the published name, or the sizes if there is none."""
        return self.family

    def facts(self) -> dict[str, str]:
        """Return the facts that distinguish this model within its family, for cards and `vitrail describe`."""
        return {}

    @property
    def overlap(self) -> int:
        """Return the number of pixels that neighbouring patches share."""
        return 0

    @property
    def has_tokens(self) -> bool:
        """Return whether the family computes patch tokens."""
        return False

    @property
    def can_drop_patches(self) -> bool:
        """Return whether the model computes some patches without the others."""
        return False

    def require_tokens(self, purpose: str, clips: bool = False) -> "TokenConfig":
        """Return this configuration if it has patch tokens, of images unless `clips` are allowed; else raise Unsupported."""
        raise refuse(self, purpose)

    def check_any_size(self) -> None:
        """Raise Unsupported if the model cannot be exported for images of any size."""

    def matches_option(self, name: str, value: Any) -> bool:
        """Return whether a fact given by hand (heads, eps, size, …) is that of the configuration."""
        return (name, value) in (("size", self.image_size), ("channels", self.channels))

    @property
    def resampling(self) -> "Resampling | None":
        """Return the rule that resamples positions to other image sizes; None if no table is resampled."""
        return None

    def with_resampling(self, resampling: "str | Resampling") -> Self:
        """Return the configuration with another rule, or the name of one, to resample positions."""
        raise refuse(self, "resampling of positions", "leave out resampling")

    # The model as a backbone, for decoders.

    def as_backbone(self) -> Self:
        """Return the configuration without parameters that feature maps do not need: no head, no learned pooling."""
        return self.with_classes(None)

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        """Return the layers whose feature maps make a pyramid: the last layer of each stage."""
        raise refuse(self, "segmentation")

    def feature_shape(self, layer: int) -> FeatureShape:
        """Return the channels and the stride of the feature map after a layer, 0 for the embedding."""
        raise refuse(self, "segmentation")

    def resolve_layers(self, layers: Sequence[int], first: str = "the embedding") -> list[int]:
        """Return layers counted from 0, the input of the first one, with negative ones counted from the last."""
        depth = self.depth
        for layer in layers:
            if not -depth - 1 <= layer <= depth:
                raise ValueError(f"layer {layer} of {depth}: use 0 ({first}) to {depth}, or -1 for the last")
        return [layer % (depth + 1) for layer in layers]

    # A trained model for another task, as configuration and tensors; see models/adapt.py.

    def with_image_size(self, size: tuple[int, int]) -> Self:
        """Return the configuration for another image size."""
        return replace(self, image_size=size)  # type: ignore[call-arg]

    def with_frames(self, frames: int) -> Self:
        """Return the configuration for clips of another number of frames."""
        raise refuse(self, "frames=", "make a model of clips with model.inflate(frames=…)")

    def with_channels(self, channels: int) -> Self:
        """Return the configuration for images of this number of channels."""
        return replace(self, channels=channels)  # type: ignore[call-arg]

    def with_classes(self, classes: int | None) -> Self:
        """Return the configuration with a head for this number of classes; None ends the model in features."""
        return replace(self, classes=classes)  # type: ignore[call-arg]

    def with_similarity(self, classes: int) -> "ModelConfig":
        """Return the configuration of a classifier by cosine similarity on the features of this image tower."""
        raise refuse(self, "zero-shot classification")

    def drop_classifier(self, state: State, classes: int | None) -> State:
        """Return the tensors that the model with this number of classes takes over: all but those of the classifier."""
        return {name: tensor for name, tensor in state.items() if not is_classifier(name)}

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        """Return these tensors for another input size: height and width, of clips frames, height and width."""
        return state

    def input_weight(self) -> str:
        """Return the name of the weight that reads the image's channels."""
        raise refuse(self, "another number of channels", f"use images of {self.channels}")


@dataclass(frozen=True)
class TokenConfig(ModelConfig):
    """The configuration of a family with patch tokens."""

    ABSTRACT: ClassVar[bool] = True

    if TYPE_CHECKING:
        size: Size
        embed: EmbedSlot
        position: PositionSlot
        prefix: Prefix
        block: BlockSlot
        pool: PoolSlot
        head: HeadSlot
        dropout: float
        stochastic_depth: float
        eps: float
        token_norm: bool

    @property
    def shape(self) -> EncoderShape:
        """Return the sizes that all parts share; raise ValueError if they do not fit together."""
        grid, size, prefix = self.grid_of(self.input_size), self.size, self.prefix
        return EncoderShape(
            size.width, size.depth, size.heads, grid, size.mlp, prefix.outputs, prefix.registers, self.eps, size.head
        )

    @property
    def has_tokens(self) -> bool:
        return True

    @property
    def can_drop_patches(self) -> bool:
        return not self.block.is_divided

    def require_tokens(self, purpose: str, clips: bool = False) -> "TokenConfig":
        if self.frames is not None and not clips:
            raise Unsupported(f"{purpose} does not support models of clips: use a model of images")
        return self

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        """Return four layers, evenly spaced: the grid is the same after each, decoders rescale it."""
        return tuple(max(1, self.depth * quarter // 4) for quarter in (1, 2, 3, 4))

    def feature_shape(self, layer: int) -> FeatureShape:
        return FeatureShape(self.size.width, self.stride)


def check_common(config: ModelConfig) -> None:
    """Raise ValueError for an invalid number of classes or channels or an invalid image size."""
    if config.classes is not None and config.classes < 1:
        raise ValueError(f"classes must be at least 1, or None for a model that ends in features, got {config.classes}")
    if config.channels < 1:
        raise ValueError(f"channels must be at least 1, got {config.channels}")
    if not config.image_size or min(config.image_size) < 1:
        raise ValueError(f"each side of the image size must be at least 1 pixel, got {config.image_size}")


def image_sides(value: int | tuple[int, ...]) -> tuple[int, int]:
    """Return (height, width); one number is used for both."""
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ValueError(f"image size must be a number or (height, width), got {value!r}")
    return value[0], value[1]


class ForwardStage(NamedTuple):
    """One stage of a forward pass: its name, its output, and the modules whose parameters it uses."""

    name: str
    value: Tensor
    modules: tuple[nn.Module, ...] = ()


class Layer(NamedTuple):
    """One layer by the prefix of its parameters' names."""

    name: str
    module: nn.Module


def is_classifier(name: str) -> bool:
    """Return whether a parameter of this name turns features into logits: it belongs to the head, but not to pre-logits."""
    return name.startswith("head.") and not name.startswith("head.pre_logits")


def remove_calibration(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card of a model whose classifier was replaced: without the temperature that was in its weights."""
    return {name: value for name, value in card.items() if name != "calibration"}


class Model(RecomputeModule, ABC):
    """A model with its labels, preprocessing and card."""

    labels: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Callable[[Any], Tensor] | None = None  # a PIL image to the normalised [C, H, W]
    tokenizer: Callable[[Any], Tensor] | None = None  # texts to token ids [B, T], of models with a text tower
    card: Mapping[str, Any] = MappingProxyType({})  # recipe, metrics, provenance, licence

    if TYPE_CHECKING:
        config: ModelConfig  # pyright: ignore[reportUninitializedInstanceVariable]
        head: nn.Module  # pyright: ignore[reportUninitializedInstanceVariable]

    # --- forward ---

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K], or features without classes."""
        return self.forward_head(self.forward_features(images))

    @abstractmethod
    def forward_features(self, images: Tensor) -> Tensor:
        """Return the last layer's tokens [B, T, D], or its feature map [B, D, h, w]."""

    @abstractmethod
    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the output of `forward_features`, then apply the head; `pre_logits` stops before the classifier."""

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits of pre-logits: the classifier only."""
        return self.head(features)

    def classify_embedded(self, features: Tensor) -> Tensor:
        """Return the logits of the vectors of `embed_images`, [B, feature_dim]."""
        return self.classify(features)

    def compute_pre_logits(self, images: Tensor) -> Tensor:
        """Return the input of the classifier: [B, D], or [B, 2, D] with a distillation token."""
        return self.forward_head(self.forward_features(images), pre_logits=True)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return one feature vector per image, [B, feature_dim]: the flattened pre-logits."""
        return self.compute_pre_logits(images).flatten(1)

    def sample_outputs(self, images: Tensor) -> Tensor:
        """Return outputs to compare two copies of a model by: its logits, or features without classes."""
        return self(images)

    @torch.no_grad()
    def divide_logits(self, temperature: float) -> None:
        """Divide the weights and biases of the classifier, and with them all logits, by a temperature."""
        for name, parameter in self.named_parameters():
            if is_classifier(name):
                parameter.div_(temperature)

    @torch.no_grad()
    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        """Set the classifier to a linear function of `embed_images`: weight [K, feature_dim], bias [K]."""
        modules = ((f"head.{name}", module) for name, module in self.head.named_modules())
        layers = [module for name, module in modules if isinstance(module, nn.Linear) and is_classifier(name)]
        for layer, part in zip(layers, weight.chunk(len(layers), 1), strict=True):  # two heads are averaged
            layer.weight.copy_(len(layers) * part)
            layer.bias.copy_(bias)

    def dense_logits(self, images: Tensor) -> Tensor:
        """Return logits at every cell of the last grid, [B, h, w, K]."""
        raise refuse(self.config, "token labelling")

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """Return the feature maps [B, C, h, w] after these layers: the model as a backbone."""
        if tuple(layers) != (-1,):
            raise refuse(self.config, f"features of layers {list(layers)}", "use the last one, -1")
        return [self.forward_features(images)]

    @property
    def final_norm(self) -> nn.Module:
        """Return the norm after the last layer."""
        raise refuse(self.config, "the norm of feature maps")

    def normalise_map(self, features: Tensor) -> Tensor:
        """Return a feature map [B, C, h, w] or [B, C, t, h, w] after the final norm, which `feature_maps` leaves out."""
        return self.final_norm(features.movedim(1, -1)).movedim(-1, 1)

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Return the number of values per image that `embed_images` returns."""

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model stage by stage, for cost counting; `every_token` computes all tokens in the last layer."""
        yield ForwardStage("image", images)
        body = tuple(module for name, module in self.named_children() if name != "head")
        features = self.forward_features(images)
        yield ForwardStage("features", features, body)
        yield ForwardStage("head", self.forward_head(features), (self.head,))

    # --- layers and parameters ---

    @abstractmethod
    def layers(self) -> list[Layer]:
        """Return the layers in order: units of layer decay, freezing, compilation and sharding."""

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        """Return how to record the attention of each layer for inputs of this size, as in `config.input_size`."""
        raise refuse(self.config, "recording attention")

    def resolve_layers(self, layers: Sequence[int], first: str) -> list[int]:
        """Return layers counted from 0, the input of the first one, with negative ones counted from the last."""
        return self.config.resolve_layers(layers, first)

    def layer_index(self, parameter: str) -> int:
        """Return 0 for parameters before the first layer, 1 to L for the layers', L + 1 for those after the last."""
        for index, layer in enumerate(self.layers(), start=1):
            if parameter.startswith(f"{layer.name}."):
                return index
        return 0 if parameter.startswith(self.STEM) else self.config.depth + 1

    @property
    def min_batch(self) -> int:
        """Return the least number of images of a training step."""
        return 1

    STEM: ClassVar[tuple[str, ...]] = ()  # prefixes of parameters before the first layer
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ()  # prefixes of tables and tokens without weight decay

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Return whether weight decay applies to a parameter: to matrices and filters, not to norms, biases and tables."""
        table = name.startswith(self.NO_WEIGHT_DECAY) or name.endswith(("probe", "mask_token"))
        return parameter.ndim >= 2 and not table

    def lora_modules(self) -> list[nn.Linear]:
        """Return the matrices that low-rank adaptation (LoRA) adds to."""
        raise refuse(self.config, "tune='lora'", "use head, last-N or full")

    def start_from(self, source: "Model", keep_classifier: bool) -> None:
        """Copy the weights of a trained model, of a segmentation model those of its backbone; raise ValueError if tensors differ.

        The classifier is copied too, or else starts at zero: one for other classes is of no use.
        """
        if source.config.output_kind != self.config.output_kind:
            source = source.replace_head(None)  # the backbone
        if source.config.classes != self.config.classes:
            source, keep_classifier = source.replace_head(self.config.classes), False
        state = source.state_dict()
        self.check_names(state, self.state_dict())
        if not keep_classifier:
            kept = source.config.drop_classifier(state, self.config.classes)
            state = {name: kept.get(name, torch.zeros_like(tensor)) for name, tensor in state.items()}
        self.load_state_dict(state)

    @staticmethod
    def check_names(found: State, wanted: State) -> None:
        """Raise ValueError unless the tensors have the wanted names and shapes."""
        names = {*found, *wanted}
        differ = sorted(n for n in names if n not in found or n not in wanted or found[n].shape != wanted[n].shape)
        if differ:
            raise ValueError(f"{len(differ)} tensors differ, e.g. {', '.join(differ[:3])}")

    # --- files and the Hub, in the words of the ecosystem ---

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Load a model from a file, a directory, `hf://owner/name` or a name of `vitrail models`, as `vitrail.load` does.

        `owner/name` is a repository on the Hub unless there is such a path. `options` are those of `vitrail.load`.
        """
        where = os.fspath(name_or_path)
        if HUB_REPOSITORY.fullmatch(where) and not where.endswith(WEIGHT_SUFFIXES) and not os.path.exists(where):
            where = f"hf://{where}"
        model = vitrail.load(where, **options)
        if not isinstance(model, cls):
            raise ValueError(f"{where} is a {type(model).__name__}, not a {cls.__name__}: use vitrail.load")
        return model

    def save_pretrained(self, directory: str | os.PathLike[str], **card: Any) -> None:
        """Save the model as `model.safetensors` in a directory, as `vitrail.save` does; `from_pretrained` reads it."""
        folder = Path(directory)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: give a directory, or use vitrail.save")
        folder.mkdir(parents=True, exist_ok=True)
        vitrail.save(self, folder / "model.safetensors", **card)

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Upload the model with its card to `owner/name` on the Hub, as `vitrail.push` does; return the commit's address."""
        return vitrail.push(self, repo, **options)

    # --- other forms of the same model ---

    def require_tokens(self, purpose: str, clips: bool = False) -> "TokenModel":
        """Return this model if it has patch tokens, of images unless `clips` are allowed; else raise Unsupported."""
        raise refuse(self.config, purpose)

    def require_towers(self, purpose: str) -> "TwoTowers":
        """Return this model if it has a text tower; raise Unsupported otherwise."""
        raise refuse(self.config, purpose, "use a model with a text tower, such as load_towers gives")

    def require_queries(self, purpose: str) -> "QueryDecoder":
        """Return the decoder of a segmentation model that predicts by queries (EoMT); raise Unsupported otherwise."""
        raise refuse(self.config, purpose, "use a segmentation model with decoder='eomt'")

    def predict_queries(self, images: Tensor, masked: Tensor | None = None) -> "list[QueryLogits]":
        """Return the masks and classes of EoMT's queries: see `QueryDecoder.predict_layers`."""
        raise refuse(self.config, "a prediction of objects", "use a segmentation model with decoder='eomt'")

    def merge_tokens(self, r: int) -> "nn.Module":
        """Return this model with r tokens merged in each layer."""
        raise refuse(self.config, "merge=", "leave it out, or use a Vision Transformer")

    def for_tracing(self, any_size: bool = False) -> Self:
        """Return a copy in evaluation mode whose graph is traceable and whose weights keep their names."""
        if any_size:
            self.config.check_any_size()
        return copy.deepcopy(self).eval().requires_grad_(False)

    def with_constants(self, any_size: bool = False, size: tuple[int, ...] | None = None) -> Self:
        """Return a copy for tracing in which everything independent of the image is a constant."""
        return self.for_tracing(any_size)

    def resize(
        self,
        image_size: tuple[int, int] | None = None,
        resampling: "str | Resampling | None" = None,
        *,
        frames: int | None = None,
    ) -> "Model":
        """Return the model for another image size, positions resampled (section 3.2), or for clips of other `frames`.

        `resampling` replaces the model's rule, now and for further sizes: "timm", "transformers", "dino", "torchvision",
        "google" or a `Resampling`. Along time, positions are interpolated linearly.
        """
        changes = {"image_size": image_size, "resampling": resampling, "frames": frames}
        return self._adapt(**{name: value for name, value in changes.items() if value is not None})

    def inflate(self, frames: int, tubelet: int = 2, mode: str = "mean", attention: str | None = None) -> "Model":
        """Return a model of clips with the weights of this model of images; see `vitrail.models.inflate`."""
        raise refuse(self.config, "inflate")

    def take_spectrograms(self, image_size: tuple[int, int] = (128, 1024), overlap: int | None = None) -> "Model":
        """Return a model of spectrograms with the weights of this model of images; see `vitrail.models.spectrograms`."""
        raise refuse(self.config, "take_spectrograms")

    def replace_head(self, classes: int | None) -> "Model":
        """Return the model with a new zero head for this number of classes (section 3.2); None returns features."""
        return self._adapt(classes=classes)

    def adapt_channels(self, channels: int) -> "Model":
        """Return the model for images of this number of channels."""
        return self._adapt(channels=channels)

    def _adapt(self, **changes: Any) -> "Model":
        from vitrail.models.adapt import adapt_model

        return adapt_model(self, **changes)


class TokenModel(Model):
    """A model that cuts the image into patch tokens and runs a Transformer encoder over them."""

    if TYPE_CHECKING:
        config: TokenConfig  # pyright: ignore[reportIncompatibleVariableOverride]
        embed: Embedding
        prefix: PrefixTokens
        position: PositionEmbedding
        token_norm: nn.Module
        blocks: nn.ModuleList
        pool: Pool

    def require_tokens(self, purpose: str, clips: bool = False) -> "TokenModel":
        self.config.require_tokens(purpose, clips)
        return self

    @abstractmethod
    def tokens(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return z_0 of equation 1, [B, T, D]; `keep`, [B, n], selects patches for each image."""

    @abstractmethod
    def add_positions(self, x: Tensor, grid: Grid, keep: Tensor | None = None) -> Tensor:
        """Return z_0 of embedded patches x, [B, n, D]: prefix tokens before them, positions added."""

    def encode(
        self, z: Tensor, grid: Grid | None = None, keep: Tensor | None = None, n_outputs: int | None = None
    ) -> Tensor:
        """Return z_L of equations 2 and 3: [B, T, D], or the first `n_outputs` tokens of it."""
        for z_l in self.layer_outputs(z, grid, keep, n_outputs):
            z = z_l
        return z

    @abstractmethod
    def layer_outputs(
        self, z: Tensor, grid: Grid | None = None, keep: Tensor | None = None, n_outputs: int | None = None
    ) -> Iterator[Tensor]:
        """Yield z_1 to z_L, one after the other."""

    def hidden_states(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """Return the tokens z_l after these layers, [B, T, D] each: 0 is the embedding, -1 the last layer."""
        wanted, z = self.resolve_layers(layers, "the embedding"), self.tokens(images)
        outputs = self.layer_outputs(z, self.embed.grid(images))
        states = {0: z, **dict(zip(range(1, max(wanted, default=0) + 1), outputs, strict=False))}
        return [states[layer] for layer in wanted]

    @abstractmethod
    def apply_pre_logits(self, y: Tensor) -> Tensor:
        """Return the input of the classifier for pooled tokens y."""

    def pool_tokens(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the pooled tokens of equation 4, computing only the tokens that the pooling reads."""
        z = self.encode(self.tokens(images, keep), self.embed.grid(images), keep, n_outputs=self.pool.n_inputs)
        return self.pool(z)


def count_parameters(*modules: nn.Module, trainable: bool = False) -> int:
    """Return the number of parameter values in these modules."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad or not trainable)
