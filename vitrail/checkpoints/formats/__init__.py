"""Formats of checkpoints, one module per project: its key table, used both ways, and the detection of its architecture.

This module has what they share: tensor names and shapes, and assumptions for the facts that those do not determine.
"""

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
from vitrail.models.vit_config import GELUS, parse_resampling
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import MLPSlot
from vitrail.nn.position import Learned1D
from vitrail.nn.resampling import Resampling

# Widths whose heads do not have 64 values: the named sizes (of H and H+, H), SigLIP's So400m, big_vision's mu and e.
HEADS_BY_WIDTH = {size.width: size.heads for size in SIZES.values()} | {1280: 16, 1152: 16, 32: 2, 1792: 16}
MAX_LAYERS = 1_000  # more than any trained model has
FILE_NAME_KEY = "the file's name"  # among a source's settings: the file name without its extension
PERIODS_KEY = "the file's periods"  # among a source's settings: the values of rope_embed.periods
Shapes = Mapping[str, tuple[int, ...]]
LabelsAndPreprocessing = tuple[tuple[str, ...] | None, Preprocessing | None]
SIN_COS_LIMIT = "its sin-cos positions have the frequencies of end=True"
Reasons = dict[str, bool]  # why a format cannot express a model, and whether that is so


class TensorNames:
    """Names and shapes of the tensors of a checkpoint."""

    def __init__(self, shapes: Shapes, root: str = "") -> None:
        self.shapes, self.root = shapes, root

    def __contains__(self, name: str) -> bool:
        return self.root + name in self.shapes

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a required tensor with this number of dimensions."""
        if name not in self:
            raise ValueError(f"there is no {self.root}{name}")
        shape = self.shapes[self.root + name]
        if len(shape) != dims or 0 in shape:
            raise ValueError(f"{self.root}{name} has the shape {list(shape)}, expected {dims} dimensions")
        return shape

    def patch_shape(self, name: str, sides: tuple[int, int] = (2, 3)) -> tuple[int, ...]:
        """Return the shape of a patch projection; raise unless these two dimensions are equal."""
        shape = self.shape(name, 4)
        height, width = (shape[side] for side in sides)
        if height != width:
            raise ValueError(f"{name} has patches of {height}×{width}: only square patches are supported")
        return shape

    def tubelet_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a projection of tubelets, [D, C, F, P, P]; raise unless the patches are square."""
        shape = self.shape(name, 5)
        if shape[3] != shape[4]:
            raise ValueError(f"{name} has patches of {shape[3]}×{shape[4]}: only square patches are supported")
        return shape

    def find(self, pattern: str) -> str | None:
        """Return the first name that matches a pattern with `*`, or one of several between `|`; all layers are alike."""
        for part in pattern.split("|"):
            full = self.root + part
            if found := next((name[len(self.root) :] for name in self.shapes if fnmatchcase(name, full)), None):
                return found
        return None

    def layer_shape(self, pattern: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor that every layer has, from one that has it; deeper parts of a layer come last."""
        patterns = [self.root + part for part in pattern.split("|")]
        found = [name for name in self.shapes if any(fnmatchcase(name, part) for part in patterns)]
        return self.shape(min(found, key=len)[len(self.root) :] if found else pattern, dims)

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
            raise ValueError(f"at most {MAX_LAYERS:,} layers are supported, got {count:,} named {pattern.format('N')}")
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
            raise ValueError(f"tensors do not determine {name} ({why}): give it with assume={{{name!r}: …}}")
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
            raise ValueError(f"unknown gelu {name!r}: known are {', '.join(GELUS)}")
        return GELUS[name]

    def resolve_resampling(self, default: str, why: str) -> Resampling:
        """Return the rule that resamples the positions to other image sizes."""
        return parse_resampling(self.resolve("resampling", default, why))

    def resolve_table_size(self, patches: int, stride: int) -> tuple[int, int]:
        """Return the image size of a model with positions for this number of patches: square unless it was given."""
        if "size" in self.given:
            height, width = self.resolve("size", None, "")
            if height % stride or width % stride or (height // stride) * (width // stride) != patches:
                patches_and_remedy = f"{patches} patches of {stride}×{stride}: give another assume={{'size': 'HxW'}}"
                raise ValueError(f"an image of {height}×{width} does not have the checkpoint's {patches_and_remedy}")
            return height, width
        side = math.isqrt(patches)
        if side * side != patches or not side:
            raise ValueError(f"{patches} positions are no square grid: give assume={{'size': 'HEIGHTxWIDTH'}}")
        return self.resolve("size", (side * stride, side * stride), "a square grid of positions")

    def resolve_image_size(self, stride: int, why: str) -> tuple[int, int]:
        """Return the image size of a model without a position table."""
        default = (224, 224) if 224 % stride == 0 else (stride * 16, stride * 16)
        return self.resolve("size", default, why)


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints: how it is detected and read, and its default preprocessing."""

    name: str
    title: str
    required_keys: tuple[str, ...]  # names after the root, with * for any layer, that every such checkpoint has
    read_config: Callable[[TensorNames, Assumptions], ModelConfig]
    build_table: Callable[[Any, str], KeyTable]  # for a configuration and a prefix of the names
    default_preprocessing: Callable[[Any, str], tuple[Preprocessing, str]]  # for a model and its file name
    roots: tuple[str, ...] = ("",)
    parse_settings: Callable[[dict[str, Any]], dict[str, tuple[Any, str]]] = lambda settings: {}
    example: Mapping[str, Any] = field(default_factory=dict)  # options of a model in this format
    dimensions: Mapping[str, int] = field(default_factory=dict)  # of tensors, where names do not tell clips from images

    def matches(self, names: TensorNames) -> bool:
        """Return whether a checkpoint has the required tensors."""
        dims = ((names.shapes.get(names.root + name, ()), count) for name, count in self.dimensions.items())
        return all(names.find(name) for name in self.required_keys) and all(len(shape) == n for shape, n in dims)


def list_common_limits(config: TokenConfig) -> Reasons:
    """Return the limits of a format with only the paper's positions and heads."""
    learned = isinstance(config.position, Learned1D) and config.position.at == "stem"
    return {
        "it only has learned 1-D positions at the stem": not learned,
        "its heads divide the width evenly": config.size.head is not None,
    }


def require_patches(format: str, config: TokenConfig, subject: str = "it", overlaps: bool = False) -> int:
    """Return the patch size of a model with linear patches; raise for other embeddings, which the format lacks."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"{format} cannot express this model: {subject} has no {type(config.embed).__name__}")
    if config.embed.overlap and not overlaps:
        raise ValueError(f"{format} cannot express this model: {subject} has no overlapping patches")
    return config.embed.patch


def choose_head(hidden: int | None, width: int) -> Linear | PreLogits:
    """Return the head with a hidden layer of this width, or without one."""
    return Linear() if hidden is None else PreLogits(None if hidden == width else hidden)


def get_object(data: Any, *names: str) -> dict[str, Any]:
    """Return the JSON object under these names, or an empty one."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}
