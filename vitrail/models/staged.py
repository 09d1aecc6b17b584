"""What families with stages share: Swin and MViT have a grid and a width for each stage, and feature maps of every scale.

B images, a grid of h×w tokens, D width, L layers.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, ModelConfig, check_common
from vitrail.nn.shape import Grid


@dataclass(frozen=True)
class StagedConfig(ModelConfig):
    """The configuration of a family with stages."""

    ABSTRACT: ClassVar[bool] = True

    if TYPE_CHECKING:
        depths: tuple[int, ...]  # layers of each stage
        dropout: float
        attention_dropout: float
        stochastic_depth: float

    @property
    def n_stages(self) -> int:
        return len(self.depths)

    @property
    def depth(self) -> int:
        return sum(self.depths)

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """Return the number of the last layer of each stage."""
        return tuple(accumulate(self.depths))

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        return self.stage_ends

    def find_stage(self, layer: int) -> int:
        """Return the stage, counted from 0, of a layer, counted from 1; the embedding, 0, belongs to the first."""
        return next(stage for stage, end in enumerate(self.stage_ends) if layer <= end)

    @abstractmethod
    def stage_grid(self, stage: int, size: tuple[int, ...]) -> Grid:
        """Return the grid of a stage, counted from 0, for images of this size."""

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return self.stage_grid(self.n_stages - 1, size)

    def check_stages(self, stages: Mapping[str, Sequence[Any]], needs: str) -> None:
        """Raise ValueError for an invalid field of every family, or unless each stage has a value of all of `stages`."""
        check_common(self)
        if len({len(values) for values in stages.values()}) > 1 or not self.depths:
            lengths = ", ".join(f"{len(values)} {name}" for name, values in stages.items())
            raise ValueError(f"every stage needs {needs}, got {lengths}")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")


class StagedModel(Model):
    """A model whose layers stand in stages, numbered through."""

    if TYPE_CHECKING:
        config: StagedConfig  # pyright: ignore[reportIncompatibleVariableOverride]
        blocks: nn.ModuleList
        norm: nn.LayerNorm

    @abstractmethod
    def embed_patches(self, images: Tensor) -> Tensor:
        """Return the embedded patches, in the form of the family's layers."""

    @abstractmethod
    def layer_outputs(self, x: Tensor, size: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the output of each layer from the embedded patches of images of this size."""

    @abstractmethod
    def to_feature_map(self, x: Tensor, layer: int, size: tuple[int, ...]) -> Tensor:
        """Return the output of a layer, 0 for the embedding, as a map [B, D, h, w]."""

    def to_features(self, x: Tensor) -> Tensor:
        """Return the output of the last layer as `forward_features` does."""
        return x

    def stage_modules(self, stage: int) -> tuple[nn.Module, ...]:
        """Return the modules whose parameters a stage uses, counted from 0; -1 is the embedding."""
        starts = (0, *self.config.stage_ends)
        if stage < 0:
            return tuple(module for name, module in self.named_children() if f"{name}.".startswith(self.STEM))
        return tuple(self.blocks[starts[stage] : starts[stage + 1]])

    def forward_features(self, images: Tensor) -> Tensor:
        x = self.embed_patches(images)
        for output in self.layer_outputs(x, tuple(images.shape[2:])):
            x = output
        return self.to_features(x)

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Return the maps after these layers, [B, D, h, w] each; by default after the last layer of every stage.

        0 is the embedding, 1 to L the layers, -1 the last.
        """
        wanted = self.resolve_layers(self.config.stage_ends if layers is None else layers, "the embedding")
        x, size = self.embed_patches(images), tuple(images.shape[2:])
        outputs = zip(range(1, max(wanted, default=0) + 1), self.layer_outputs(x, size), strict=False)
        found = {0: x, **dict(outputs)}
        return [self.to_feature_map(found[layer], layer, size) for layer in wanted]

    @property
    def final_norm(self) -> nn.Module:
        return self.norm

    @property
    def feature_dim(self) -> int:
        return self.norm.normalized_shape[0]

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model stage by stage."""
        yield ForwardStage("image", images)
        x = self.embed_patches(images)
        yield ForwardStage("patches", x, self.stage_modules(-1))
        ends = self.config.stage_ends
        for layer, output in enumerate(self.layer_outputs(x, tuple(images.shape[2:])), start=1):
            x = output
            if layer in ends:
                stage = ends.index(layer)
                yield ForwardStage(f"stage {stage + 1}", x, self.stage_modules(stage))
        y = self.forward_head(self.to_features(x), pre_logits=True)
        yield ForwardStage("pooling", y, (self.norm,))
        yield ForwardStage("head" if self.config.classes is not None else "features", self.head(y), (self.head,))

    def layers(self) -> list[Layer]:
        return [Layer(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
