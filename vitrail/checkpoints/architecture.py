"""Detection of an architecture from tensor names and shapes, with the assumptions for facts that they do not determine."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vitrail.checkpoints.keys import KeyTable
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import SIZES
from vitrail.models.vit_config import GELUS
from vitrail.nn.mlp import MLPSlot
from vitrail.nn.position import Learned1D
from vitrail.nn.shape import Grid

# Widths whose heads do not have 64 values: the named sizes, SigLIP's So400m, big_vision's mu and e.
HEADS_BY_WIDTH = {size.width: size.heads for size in SIZES.values()} | {1152: 16, 32: 2, 1792: 16}
MAX_LAYERS = 1_000  # more than any trained model has
FILE_NAME_KEY = "the file's name"  # among a source's settings: the file name without its extension
Shapes = Mapping[str, tuple[int, ...]]


class FormatMismatchError(ValueError):
    """The tensors are not those of the expected format."""


class TensorNames:
    """Names and shapes of the tensors of a checkpoint."""

    def __init__(self, shapes: Shapes, root: str = "") -> None:
        self.shapes, self.root = shapes, root

    def __contains__(self, name: str) -> bool:
        return self.root + name in self.shapes

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a required tensor with this number of dimensions."""
        if name not in self:
            raise FormatMismatchError(f"there is no {self.root}{name}")
        shape = self.shapes[self.root + name]
        if len(shape) != dims or 0 in shape:
            raise FormatMismatchError(f"{self.root}{name} has the shape {list(shape)}, expected {dims} dimensions")
        return shape

    def find(self, pattern: str) -> str | None:
        """Return the first name that matches a pattern with `*`; all layers are assumed alike."""
        full = self.root + pattern
        return next((name[len(self.root) :] for name in self.shapes if fnmatchcase(name, full)), None)

    def layer_shape(self, pattern: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor that every layer has, from the first layer that has it."""
        return self.shape(self.find(pattern) or pattern, dims)

    def output_dim(self, layer: str, dims: int = 2) -> int | None:
        """Return the number of outputs of a last layer, if it exists: from its bias, which cannot be transposed."""
        if f"{layer}.bias" in self:
            return self.shape(f"{layer}.bias", 1)[0]
        return self.shape(f"{layer}.weight", dims)[0] if f"{layer}.weight" in self else None

    def count_layers(self, pattern: str, start: int = 0) -> int:
        """Return the number of numbered parts, from the highest number in a name that matches."""
        before, after = (re.escape(self.root + pattern).replace(r"\{\}", "{}")).split("{}")
        regex = re.compile(f"{before}(\\d{{1,9}}){after}")
        numbers = [int(match[1]) for name in self.shapes if (match := regex.match(name))]
        count = max(numbers, default=start - 1) + 1 - start
        if count > MAX_LAYERS:
            raise FormatMismatchError(f"too many layers: {count:,} of {pattern}")
        return count


@dataclass
class Assumptions:
    """Facts that tensors do not determine, with their source: given by the user, or a default. Used ones are reported."""

    given: dict[str, tuple[Any, str]] = field(default_factory=dict)
    used: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def resolve(self, name: str, default: Any, why: str) -> Any:
        """Return a given fact or its default, and record it with its reason; raise if there is neither."""
        value, source = self.given.get(name, (default, why))
        if value is None:
            raise FormatMismatchError(f"tensors do not determine {name} ({why}): give it with --assume {name}=…")
        self.used[name] = (value, source)
        return value

    def resolve_heads(self, width: int, format: str) -> int:
        """Return the number of heads of a model of this width."""
        if width in HEADS_BY_WIDTH:
            return self.resolve("heads", HEADS_BY_WIDTH[width], f"the published number for the width {width}")
        default = width // 64 if width % 64 == 0 else None
        return self.resolve("heads", default, f"{format}'s default, 64 values per head")

    def resolve_gelu(self, default: str, why: str) -> MLPSlot:
        name = self.resolve("gelu", default, why)
        if name not in GELUS:
            raise FormatMismatchError(f"unknown gelu {name!r}: known are {', '.join(GELUS)}")
        return GELUS[name]

    def resolve_grid(self, patches: int, stride: int) -> Grid:
        """Return the rows and columns of this number of patches: square unless the image size was given."""
        if "size" in self.given:
            height, width = self.resolve("size", None, "")
            if height % stride or width % stride or (height // stride) * (width // stride) != patches:
                raise FormatMismatchError(
                    f"an image of {height}×{width} does not have the checkpoint's {patches} patches of {stride}×{stride}"
                )
            return height // stride, width // stride
        side = math.isqrt(patches)
        if side * side != patches or not side:
            raise FormatMismatchError(f"{patches} positions are no square grid: give --assume size=HEIGHTxWIDTH")
        self.used["size"] = ((side * stride, side * stride), "a square grid of positions")
        return side, side

    def resolve_image_size(self, stride: int, why: str) -> tuple[int, int]:
        """Return the image size of a model without a position table."""
        default = (224, 224) if 224 % stride == 0 else (stride * 16, stride * 16)
        height, width = self.resolve("size", default, why)
        return height, width


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints: how it is detected and read, and its default preprocessing."""

    name: str
    title: str
    required_keys: tuple[str, ...]  # names after the root, with * for any layer, that every such checkpoint has
    read_config: Callable[[TensorNames, Assumptions], ModelConfig]
    build_table: Callable[[Any, str], KeyTable]  # for a configuration and a prefix of the names
    default_preprocessing: Callable[
        [ModelConfig, str], tuple[Preprocessing, str]
    ]  # for a configuration and a file name
    roots: tuple[str, ...] = ("",)
    parse_settings: Callable[[Mapping[str, Any]], dict[str, tuple[Any, str]]] = lambda settings: {}
    example: Mapping[str, Any] = field(default_factory=dict)  # options of a model in this format


def list_commonly_unsupported(config: TokenConfig) -> list[str]:
    """Return why a format with only the paper's positions and heads cannot express a model."""
    reasons = []
    if not isinstance(config.position, Learned1D) or config.position.at != "stem":
        reasons.append("it only has learned 1-D positions at the stem")
    if config.size.head is not None:
        reasons.append("its heads divide the width evenly")
    return reasons


def get_patch_size(shape: tuple[int, ...], name: str) -> int:
    """Return the side of a square patch, from the last two dimensions of its projection."""
    if shape[-1] != shape[-2]:
        raise FormatMismatchError(f"{name} has patches of {shape[-2]}×{shape[-1]}: only square patches are supported")
    return shape[-1]


def split_position_rows(rows: int, patches_of: Callable[[int], bool], choices: dict[str, int]) -> tuple[str, int]:
    """Return the prefix tokens that a position table covers, and its patches: the first choice that leaves a grid."""
    for which, covered in choices.items():
        if rows - covered > 0 and patches_of(rows - covered):
            return which, rows - covered
    which, covered = next(iter(choices.items()))
    return which, rows - covered


def is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number
