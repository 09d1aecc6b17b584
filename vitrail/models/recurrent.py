"""Recurrent networks over the patches of an image: what the Vision Transformer is compared with in the study `ancestors`.

The same patches as a Vision Transformer's, an encoder that reads them one after the other (`nn/recurrent.py`), and a linear
classifier on its last output. There are no position embeddings: the order of reading is the position.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, ModelConfig, Unsupported, check_common, image_sides
from vitrail.models.sizes import SIZES, closest
from vitrail.nn.embed import Patches
from vitrail.nn.linear import LinearLayer
from vitrail.nn.recurrent import LSTM, RNN, EncoderSlot, RecurrentEncoder, TuringMachine
from vitrail.nn.shape import Grid

ENCODERS: dict[str, EncoderSlot] = {"rnn": RNN(), "lstm": LSTM(), "ntm": TuringMachine()}
RECURRENT_NAME = re.compile(r"(?P<encoder>RNN|LSTM|NTM)-(?P<size>[A-Za-z]+\+?)/(?P<patch>\d+)")
RECURRENT_OPTIONS = frozenset({"encoder", "width", "layers", "patch", "classes", "image_size", "channels"})


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """A recurrent network by the width and number of its layers and the encoder in its slot."""

    family: ClassVar[str] = "recurrent"
    title: ClassVar[str] = "recurrent networks"
    init: ClassVar[str] = "vit"  # pyright: ignore[reportIncompatibleVariableOverride]

    width: int
    layers: int = 1
    encoder: EncoderSlot = LSTM()
    embed: Patches = Patches(16)
    channels: int = 3
    classes: int | None = 1000
    image_size: tuple[int, int] = (224, 224)

    def __post_init__(self) -> None:
        check_common(self)
        if min(self.width, self.layers) < 1:
            raise ValueError(f"width and layers must be at least 1, got {self.width} and {self.layers}")
        most = self.encoder.max_layers
        if most is not None and self.layers > most:
            raise ValueError(f"{type(self.encoder).__name__} has one layer, got layers={self.layers}: leave it out")
        self.encoder.check(self.width)
        self.embed.grid_of(self.image_size)  # raises unless whole patches cover the image

    @property
    def depth(self) -> int:
        return self.layers

    @property
    def stride(self) -> int:
        return self.embed.stride

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return self.embed.grid_of(size)

    def describe(self) -> str:
        layers = f"{self.layers} layers" if self.layers > 1 else "1 layer"
        return f"{type(self.encoder).__name__} of width {self.width}, {layers}, patch {self.embed.patch}"

    def facts(self) -> dict[str, str]:
        return {"encoder": str(self.encoder), "patches": "×".join(map(str, self.grid_of(self.image_size)))}

    def check_any_size(self) -> None:
        raise Unsupported("dynamic_size= does not support recurrent networks: use size=")

    def input_weight(self) -> str:
        return f"embed.{self.embed.input_weight}"


class Recurrent(Model):
    """Image to logits: patches, the encoder's last output, norm, classifier."""

    STEM: ClassVar[tuple[str, ...]] = ("embed.",)

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config.channels, config.width)
        self.encoder = config.encoder.build(config.width, config.layers)
        self.norm = nn.LayerNorm(self.encoder.feature_dim, eps=1e-6)
        width = self.encoder.feature_dim
        self.head = nn.Identity() if config.classes is None else LinearLayer(width, config.classes)

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the output after each patch, [B, N, F]."""
        self.embed.grid(images)  # raises for an unsupported shape
        return self.encoder(self.embed(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = self.norm(self.encoder.last_output(features))
        return y if pre_logits else self.head(y)

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """Return the outputs of the encoder as a map, [B, F, h, w]."""
        if tuple(layers) != (-1,):
            raise Unsupported(f"features of layers {list(layers)} do not support recurrent networks: use the last, -1")
        return [self.forward_features(images).transpose(1, 2).unflatten(2, self.embed.grid(images))]

    @property
    def final_norm(self) -> nn.Module:
        return self.norm

    @property
    def feature_dim(self) -> int:
        return self.encoder.feature_dim

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        yield ForwardStage("image", images)
        x = self.embed(images)
        yield ForwardStage("patches x_p E", x, (self.embed,))
        features = self.encoder(x)
        yield ForwardStage("encoder", features, (self.encoder,))
        y = self.forward_head(features, pre_logits=True)
        yield ForwardStage("last output", y, (self.norm,))
        yield ForwardStage("head" if self.config.classes is not None else "features", self.head(y), (self.head,))

    def layers(self) -> list[Layer]:
        if isinstance(self.encoder, RecurrentEncoder):
            return [Layer(f"encoder.layers.{index}", layer) for index, layer in enumerate(self.encoder.layers)]
        return [Layer("encoder", self.encoder)]


def configure_recurrent(
    name: str | None = None,
    *,
    encoder: str | EncoderSlot | None = None,
    width: int | None = None,
    layers: int | None = None,
    patch: int | None = None,
    classes: int | None = 1000,
    image_size: int | tuple[int, ...] = 224,
    channels: int = 3,
) -> RecurrentConfig:
    """Return the configuration of a recurrent network from its name, "LSTM-Ti/16", or from width, layers and patch.

    A name has the width of the Vision Transformer of that size, and one layer. `encoder` is rnn, lstm, ntm or an object.
    """
    if name is not None:
        match = RECURRENT_NAME.fullmatch(name)
        if match is None or match["size"] not in SIZES:
            sizes = ", ".join(SIZES)
            raise ValueError(f"unknown recurrent network {name!r}: use a name like 'LSTM-Ti/16'. Sizes: {sizes}")
        encoder = encoder or match["encoder"].lower()
        width, patch = width or SIZES[match["size"]].width, patch or int(match["patch"])
    if width is None or patch is None:
        raise ValueError("without a name like 'LSTM-Ti/16', give width and patch")
    encoder = encoder or "lstm"
    if isinstance(encoder, str) and encoder not in ENCODERS:
        raise ValueError(f"unknown encoder {encoder!r}: {closest(encoder, list(ENCODERS))}")
    return RecurrentConfig(
        width=width,
        layers=layers or 1,
        encoder=ENCODERS[encoder] if isinstance(encoder, str) else encoder,
        embed=Patches(patch),
        classes=classes,
        image_size=image_sides(cast(Any, image_size)),
        channels=channels,
    )
