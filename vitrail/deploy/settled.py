"""A model made ready to be written down as a graph: what does not depend on the picture becomes a constant.

At one size, positions of every kind are tables, so they are computed once and stored. At any size, learned tables are resampled
inside the graph, as products with two small matrices that hold the weights of bicubic interpolation: every runtime can multiply,
while each has its own idea of resizing. The ResNets' weights are standardised once.

T tokens, D width, h×w the table's grid, n places along one side of the picture's.
"""

import copy
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.bit import BiT, StdConv, pad_same
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViT
from vitrail.nn.embed import ConvStem, divide
from vitrail.nn.position import (
    Added,
    At,
    Learned1DTable,
    Learned2DTable,
    Place,
    Position,
    RelativeBias,
)
from vitrail.nn.shape import Grid

SHARPNESS = -0.5  # of PyTorch's bicubic filter with antialiasing


def settled(model: ViT | BiT, any_size: bool = False, size: tuple[int, int] | None = None) -> ViT | BiT:
    """A copy for tracing, in evaluation mode, with the same answers; the model is left as it is.

    `size` is that of the pictures, where it is not the model's own.
    """
    model = with_weights(model, any_size)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, StdConv):
                setattr(module, name, Standardised(child))
    if isinstance(model, ViT) and not any_size:
        model.position = Settled(model.position, divide(size or model.config.image_size, model.embed.stride))
    return model


def with_weights(model: ViT | BiT, any_size: bool = False) -> ViT | BiT:
    """A copy for tracing whose weights are still those of the model, each by its name."""
    if any_size:
        check_any_size(model)
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if isinstance(model, ViT) and any_size:
        model.position = live(model.position)
    return model


def check_any_size(model: ViT | BiT) -> None:
    """Refuses, by name, the slots whose graph is of one size."""
    if isinstance(model, ViT) and isinstance(model.config.embed, (Hybrid, ConvStem)):
        name = type(model.config.embed).__name__
        raise ValueError(
            f"the embedding {name} cannot be exported for pictures of any size: its convolutions are padded and counted "
            "for one; leave out --dynamic-size, and use --size for another"
        )


class Standardised(nn.Module):
    """A convolution of a BiT whose weights are standardised already."""

    def __init__(self, of: StdConv) -> None:
        super().__init__()
        flat = of.weight.reshape(1, of.out_channels, -1)
        with torch.no_grad():
            weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8)
        self.weight = nn.Parameter(weight.reshape_as(of.weight), requires_grad=False)
        self.kernel, self.stride, self.padding, self.same = of.kernel_size[0], of.stride[0], of.padding, of.same

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel, self.stride, 0.0) if self.same else x
        return F.conv2d(x, self.weight, None, self.stride, self.padding)  # pyright: ignore[reportArgumentType]


# --- one size ---


class Settled(Position):
    """Positions of any kind on one grid, as constants; layers that are told the same share them."""

    def __init__(self, of: Position, grid: Grid) -> None:
        super().__init__(of.shape)
        self.tables: list[Tensor] = []
        with torch.no_grad():
            self.at_stem = self.kept(of.stem(grid, None))
            self.in_layers = [
                (self.kept(place.add), self.kept(place.bias), tuple(map(self.kept, place.turn or ())))
                for place in of.layers(grid, None)
            ]
        self.tables.clear()

    def kept(self, table: Tensor | None) -> str | None:
        """The name of the buffer that holds it."""
        if table is None:
            return None
        place = next((place for place, known in enumerate(self.tables) if known is table), len(self.tables))
        if place == len(self.tables):
            self.tables.append(table)
            self.register_buffer(f"table_{place}", table.detach().contiguous())
        return f"table_{place}"

    def found(self, name: str | None) -> Tensor | None:
        return None if name is None else self.get_buffer(name)

    def stem(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return self.found(self.at_stem)

    def layers(self, grid: Grid, keep: Tensor | None) -> Iterator[Place]:
        for add, bias, turn in self.in_layers:
            both = tuple(self.get_buffer(name) for name in turn if name is not None)
            yield Place(self.found(add), self.found(bias), (both[0], both[1]) if both else None)


# --- any size ---


def live(position: Position) -> Position:
    """The same positions with tables that are resampled inside the graph; those that are computed stay as they are."""
    match position:
        case Learned1DTable():
            return LiveLearned1D(position)
        case Learned2DTable():
            return LiveLearned2D(position)
        case RelativeBias():
            return LiveRelative(position)
        case _:
            return position


class LiveLearned1D(Added):
    """A vector for each token, resampled to the grid of the picture that comes."""

    def __init__(self, of: Learned1DTable) -> None:
        super().__init__(of.shape, cast(At, of.at))
        self.of = of

    def table(self, index: int, grid: Grid) -> Tensor:
        covered, table = self.of.covered, self.of.weight[index]
        patches = stretched(table[covered:].unflatten(0, self.shape.grid), grid)
        return torch.cat((table[:covered], patches.flatten(0, 1)))


class LiveLearned2D(Added):
    """A vector for each row and one for each column, both resampled."""

    def __init__(self, of: Learned2DTable) -> None:
        super().__init__(of.shape, cast(At, of.at))
        self.of = of

    def table(self, index: int, grid: Grid) -> Tensor:
        (h, w), of = grid, self.of
        y = bicubic(self.shape.grid[0], h, of.rows_weight) @ of.rows_weight[index]  # [h, D/2]
        x = bicubic(self.shape.grid[1], w, of.columns_weight) @ of.columns_weight[index]  # [w, D/2]
        patches = torch.cat((y[:, None].expand(h, w, -1), x[None].expand(h, w, -1)), -1).flatten(0, 1)
        return torch.cat((of.prefix[index], patches))


class LiveRelative(RelativeBias):
    """A bias for each offset, the table of offsets resampled."""

    def __init__(self, of: RelativeBias) -> None:
        Position.__init__(self, of.shape)
        self.at, self.offsets, self.prefix = of.at, of.offsets, of.prefix

    def index(self, grid: Grid, keep: Tensor | None) -> Tensor:
        """As for a known grid, but without the remainder of a division, which ONNX has for known numbers alone."""
        (h, w), device = grid, self.offsets.device
        y = torch.arange(h, device=device)[:, None].expand(h, w).flatten()
        x = torch.arange(w, device=device)[None].expand(h, w).flatten()
        dy, dx = y[:, None] - y[None] + h - 1, x[:, None] - x[None] + w - 1
        return (dy * (2 * w - 1) + dx).unsqueeze(0)

    def table(self, layer: int, grid: Grid) -> Tensor:
        h, w = grid
        offsets = self.offsets[layer].permute(1, 2, 0)  # [2h-1, 2w-1, H]
        return stretched(offsets, (2 * h - 1, 2 * w - 1)).flatten(0, 1).T


def stretched(table: Tensor, grid: Grid) -> Tensor:
    """A table [h, w, D] on another grid, as `vitrail.nn.position.resample` does it."""
    h, w, _ = table.shape
    wide = bicubic(w, grid[1], table) @ table.transpose(0, 1).flatten(
        1
    )  # [w', h·D]: OpenVINO wants both to be matrices
    wide = wide.unflatten(1, (h, -1)).transpose(0, 1)  # [h, w', D]
    return (bicubic(h, grid[0], table) @ wide.flatten(1)).unflatten(1, (grid[1], -1))


def bicubic(source: int, count: int, like: Tensor) -> Tensor:
    """The weights [count, source] with which each new value is made of the old: bicubic, averaged where it shrinks."""
    steps = torch.arange(count, device=like.device, dtype=torch.float32)
    scale = source / (steps[-1:] + 1)  # the count as a tensor: a graph may not know it before a picture comes
    middle = (steps + 0.5) * scale
    places = torch.arange(source, device=like.device, dtype=torch.float32) + 0.5
    x = ((places[None] - middle[:, None]) / scale.clamp(min=1.0)).abs()
    a = SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    weight = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return (weight / weight.sum(1, keepdim=True)).to(like.dtype)
