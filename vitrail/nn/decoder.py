"""Decoders: from a backbone's feature maps to logits of every class at every cell, for segmentation.

A decoder reads the maps after some layers. `norm` is its treatment of them: the maps of a backbone are those before its
final norm.

| norm | what it does |
|---|---|
| `last` | the backbone's final norm on the map of the last layer, the others as they are |
| `all`  | the final norm on every map, as DINOv2's protocol does with several layers of a plain ViT |
| `new`  | a new LayerNorm for every map, as UPerNet on Swin has |
| `none` | the maps as they are, as UPerNet on BEiT has |

B images, C channels, K classes, grids of h×w cells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.shape import FeatureShape

NormRule = Literal["last", "all", "new", "none"]


class BackboneConfig(Protocol):
    """The facts of a backbone that decoders are built from."""

    @property
    def depth(self) -> int: ...

    @property
    def pyramid_layers(self) -> tuple[int, ...]: ...

    def feature_shape(self, layer: int) -> FeatureShape: ...

    def resolve_layers(self, layers: Sequence[int]) -> list[int]: ...


class Backbone(Protocol):
    """A model that gives feature maps."""

    def feature_maps(self, images: Tensor, layers: Sequence[int]) -> list[Tensor]: ...

    def normalise_map(self, features: Tensor) -> Tensor: ...


def resize_map(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return a map [B, C, h, w] at another height and width, bilinear."""
    if tuple(x.shape[2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class Decoder(nn.Module):
    """A module that turns images into logits of their cells by means of a backbone."""

    classifier: nn.Conv2d | nn.Linear  # the last layer: its outputs are the classes
    last_layer: int  # of the backbone that is read
    reads_final_norm: bool = True
    min_batch: ClassVar[int] = 1  # images of a training step: batch statistics of one value are undefined

    def reset_parameters(self) -> None:
        """Fill the classifier, and parameters and buffers that belong to no other module, as mmsegmentation does."""
        nn.init.normal_(self.classifier.weight, std=0.01)
        if self.classifier.bias is not None:
            nn.init.zeros_(self.classifier.bias)

    def decode(self, backbone: Backbone, images: Tensor) -> Tensor:
        """Return logits [B, K, h, w] at the resolution of the decoder."""
        raise NotImplementedError

    def run_stages(self, backbone: Backbone, images: Tensor) -> Iterator[tuple[str, Tensor, tuple[object, ...]]]:
        """Yield the stages of `decode`, for cost counting: name, output, and the modules whose parameters they use."""
        yield "backbone and decoder", self.decode(backbone, images), (backbone, self)


class MapDecoder(Decoder):
    """A decoder that reads feature maps of some layers, after a norm."""

    def __init__(self, config: BackboneConfig, layers: Sequence[int], norm: NormRule) -> None:
        super().__init__()
        self.layers = config.resolve_layers(layers)
        self.shapes = [config.feature_shape(layer) for layer in self.layers]
        self.last_layer = max(self.layers)
        last, width = config.depth, config.feature_shape(config.depth).channels
        if norm == "all" and any(shape.channels != width for shape in self.shapes):
            raise ValueError("norm='all' needs layers of one width: use norm='last' or norm='new'")
        self.normalised = [norm == "all" or (norm == "last" and layer == last) for layer in self.layers]
        self.reads_final_norm = any(self.normalised)
        widths = [shape.channels for shape in self.shapes] if norm == "new" else []
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def read_maps(self, backbone: Backbone, images: Tensor) -> list[Tensor]:
        """Return the feature maps that the decoder reads, normalised."""
        maps = backbone.feature_maps(images, self.layers)
        if len(self.norms):
            return [norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for norm, x in zip(self.norms, maps, strict=True)]
        pairs = zip(self.normalised, maps, strict=True)
        return [backbone.normalise_map(x) if normalised else x for normalised, x in pairs]

    def decode(self, backbone: Backbone, images: Tensor) -> Tensor:
        return self(self.read_maps(backbone, images))

    def run_stages(self, backbone: Backbone, images: Tensor) -> Iterator[tuple[str, Tensor, tuple[object, ...]]]:
        maps = self.read_maps(backbone, images)
        yield "backbone", maps[-1], (backbone,)
        yield "decoder", self(maps), (self,)


class LinearMaps(MapDecoder):
    """BatchNorm, then a linear classifier of every cell; maps of several layers are concatenated at the finest grid."""

    def __init__(self, slot: "LinearDecoder", config: BackboneConfig, classes: int) -> None:
        super().__init__(config, slot.layers, slot.norm)
        width = sum(shape.channels for shape in self.shapes)
        self.finest = min(range(len(self.shapes)), key=lambda index: self.shapes[index].stride)
        self.batch_norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout2d(slot.dropout)
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        size = maps[self.finest].shape[2:]
        x = torch.cat([resize_map(x, size) for x in maps], 1) if len(maps) > 1 else maps[0]
        return self.classifier(self.dropout(self.batch_norm(x)))


class ConvNorm(nn.Sequential):
    """A convolution without bias that keeps the grid, BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def build_rescaling(width: int) -> nn.ModuleList:
    """Return the modules that make four scales of four maps of one grid: ×4, ×2, as it is, and half (BEiT's)."""
    first = nn.ConvTranspose2d(width, width, 2, stride=2), nn.ConvTranspose2d(width, width, 2, stride=2)
    four = nn.Sequential(first[0], nn.BatchNorm2d(width), nn.GELU(), first[1])
    two = nn.ConvTranspose2d(width, width, 2, stride=2)
    return nn.ModuleList((four, two, nn.Identity(), nn.MaxPool2d(2)))


class Pyramid(MapDecoder):
    """UPerNet (Xiao et al. 2018): pyramid pooling of the coarsest map, then a feature pyramid from coarse to fine."""

    min_batch: ClassVar[int] = 2  # the map is pooled to one cell

    def __init__(self, slot: "UPerNet", config: BackboneConfig, classes: int) -> None:
        super().__init__(config, slot.layers or config.pyramid_layers, slot.norm)
        widths, channels = [shape.channels for shape in self.shapes], slot.channels
        strides = [shape.stride for shape in self.shapes]
        if strides != sorted(strides):
            raise ValueError(f"UPerNet reads layers from fine to coarse, got {slot.layers}")
        self.rescaled = len(strides) == 4 and len(set(strides)) == 1  # a plain ViT
        self.rescaling = build_rescaling(widths[0]) if self.rescaled else nn.ModuleList()
        self.scales = slot.scales
        self.pools = nn.ModuleList(ConvNorm(widths[-1], channels, 1) for _ in slot.scales)
        self.bottleneck = ConvNorm(widths[-1] + len(slot.scales) * channels, channels, 3)
        self.laterals = nn.ModuleList(ConvNorm(width, channels, 1) for width in widths[:-1])
        self.outputs = nn.ModuleList(ConvNorm(channels, channels, 3) for _ in widths[:-1])
        self.fusion = ConvNorm(len(widths) * channels, channels, 3)
        self.dropout = nn.Dropout2d(slot.dropout)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def pool_pyramid(self, x: Tensor) -> Tensor:
        """Return the coarsest map with its averages over grids of 1, 2, 3 and 6 cells a side (PSPNet)."""
        pools = zip(self.scales, self.pools, strict=True)
        pooled = [resize_map(pool(F.adaptive_avg_pool2d(x, scale)), x.shape[2:]) for scale, pool in pools]
        return self.bottleneck(torch.cat([x, *pooled], 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        if self.rescaled:
            maps = [rescale(x) for rescale, x in zip(self.rescaling, maps, strict=True)]
        x = self.pool_pyramid(maps[-1])
        levels = [x]  # from coarse to fine
        for lateral, fine in zip(reversed(self.laterals), reversed(maps[:-1]), strict=True):
            x = lateral(fine) + resize_map(x, fine.shape[2:])
            levels.append(x)
        fine = [output(level) for output, level in zip(self.outputs, reversed(levels[1:]), strict=True)]
        fused = torch.cat([resize_map(level, maps[0].shape[2:]) for level in (*fine, levels[0])], 1)
        return self.classifier(self.dropout(self.fusion(fused)))


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout of a decoder must be at least 0 and below 1, got {dropout}")


@dataclass(frozen=True)
class LinearDecoder:
    """The linear protocol of DINO: BatchNorm and a 1×1 convolution; DINOv2's reads the last four layers, norm="all"."""

    layers: tuple[int, ...] = (-1,)  # 0 is the embedding, 1 to L the layers, -1 the last
    norm: NormRule = "last"
    dropout: float = 0.0  # of whole channels
    any_size: ClassVar[bool] = True  # whether an exported graph can take images of any size

    def __post_init__(self) -> None:
        check_dropout(self.dropout)
        if not self.layers:
            raise ValueError("a linear decoder needs at least one layer, -1 for the last")

    def build(self, config: BackboneConfig, classes: int) -> Decoder:
        return LinearMaps(self, config, classes)


@dataclass(frozen=True)
class UPerNet:
    """A feature pyramid of the stages' maps; of a plain ViT, of four evenly spaced layers rescaled to four grids."""

    channels: int = 512
    scales: tuple[int, ...] = (1, 2, 3, 6)  # cells a side of the pooled grids
    layers: tuple[int, ...] | None = None  # from fine to coarse; None for those of the family
    norm: NormRule = "last"
    dropout: float = 0.0  # of whole channels
    any_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_dropout(self.dropout)
        if self.channels < 1 or min(self.scales, default=0) < 1 or self.layers == ():
            raise ValueError(f"{self}: channels, scales and layers must be at least 1")

    def build(self, config: BackboneConfig, classes: int) -> Decoder:
        return Pyramid(self, config, classes)
