"""Reading an architecture from names and shapes, and keeping account of what these cannot tell."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vitrail.checkpoints.keys import Table
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import MLPS, Config
from vitrail.models.sizes import SIZES
from vitrail.models.vit import ViTConfig
from vitrail.nn.mlp import MLPSlot
from vitrail.nn.position import Learned1D
from vitrail.nn.shape import Grid

# Widths whose heads are not of 64 values: the named sizes, SigLIP's So400m, big_vision's mu and e.
HEADS = {size.width: size.heads for size in SIZES.values()} | {1152: 16, 32: 2, 1792: 16}
GELUS: dict[str, MLPSlot] = {"exact": MLPS["gelu"], "tanh": MLPS["gelu-tanh"], "quick": MLPS["gelu-quick"]}
MOST_LAYERS = 1_000  # of a model that anybody has trained
FILE_NAME = "the file's name"  # among a source's settings: what the file is called, without its ending
Shapes = Mapping[str, tuple[int, ...]]


class Differs(ValueError):
    """The tensors are not those of the form that they were taken for."""


class Names:
    """Names and shapes of a checkpoint, asked for by those who know what to expect."""

    def __init__(self, shapes: Shapes, root: str = "") -> None:
        self.shapes, self.root = shapes, root

    def __contains__(self, name: str) -> bool:
        return self.root + name in self.shapes

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there, with so many dimensions."""
        if name not in self:
            raise Differs(f"there is no {self.root}{name}")
        shape = self.shapes[self.root + name]
        if len(shape) != dims or 0 in shape:
            raise Differs(f"{self.root}{name} has the shape {list(shape)}, and should have {dims} dimensions")
        return shape

    def anywhere(self, pattern: str) -> str | None:
        """The first name that fits a pattern with `*`: what one layer has, all are taken to have."""
        full = self.root + pattern
        return next((name[len(self.root) :] for name in self.shapes if fnmatchcase(name, full)), None)

    def layer_shape(self, pattern: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that every layer has, from the first that has it."""
        return self.shape(self.anywhere(pattern) or pattern, dims)

    def outputs(self, layer: str, dims: int = 2) -> int | None:
        """How many values a last layer gives, if there is anything of it: by its bias, which cannot lie on its side."""
        if f"{layer}.bias" in self:
            return self.shape(f"{layer}.bias", 1)[0]
        return self.shape(f"{layer}.weight", dims)[0] if f"{layer}.weight" in self else None

    def count(self, pattern: str, start: int = 0) -> int:
        """How many of a numbered part there are, by the highest number on a name that begins so."""
        before, after = (re.escape(self.root + pattern).replace(r"\{\}", "{}")).split("{}")
        fits = re.compile(f"{before}(\\d{{1,9}}){after}")
        numbers = [int(found[1]) for name in self.shapes if (found := fits.match(name))]
        count = max(numbers, default=start - 1) + 1 - start
        if count > MOST_LAYERS:
            raise Differs(f"{count:,} of {pattern} are more than a model has")
        return count


@dataclass
class Facts:
    """What tensors cannot tell: who told it, or whose default it is. All that is asked for is kept for the report."""

    told: dict[str, tuple[Any, str]] = field(default_factory=dict)
    used: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def ask(self, name: str, default: Any, why: str) -> Any:
        """A fact that was told, or the default and why it is the default. Without either, an error."""
        value, source = self.told.get(name, (default, why))
        if value is None:
            raise Differs(f"the tensors do not tell {name} ({why}): say it with --assume {name}=…")
        self.used[name] = (value, source)
        return value

    def heads(self, width: int, format: str) -> int:
        """Heads of a model of this width."""
        if width in HEADS:
            return self.ask("heads", HEADS[width], f"the published number for the width {width}")
        default = width // 64 if width % 64 == 0 else None
        return self.ask("heads", default, f"{format}'s default, 64 values a head")

    def gelu(self, default: str, why: str) -> MLPSlot:
        name = self.ask("gelu", default, why)
        if name not in GELUS:
            raise Differs(f"gelu={name}: known are {', '.join(GELUS)}")
        return GELUS[name]

    def grid(self, patches: int, stride: int) -> Grid:
        """Rows and columns of so many patches: square unless the image size was told."""
        if "size" in self.told:
            height, width = self.ask("size", None, "")
            if height % stride or width % stride or (height // stride) * (width // stride) != patches:
                raise Differs(
                    f"an image of {height}×{width} does not have {patches} patches of {stride}×{stride}, "
                    "which is how many positions the checkpoint has"
                )
            return height // stride, width // stride
        side = math.isqrt(patches)
        if side * side != patches or not side:
            raise Differs(f"{patches} positions are no square grid: say --assume size=HEIGHTxWIDTH")
        self.used["size"] = ((side * stride, side * stride), "a square grid of positions")
        return side, side

    def free_size(self, stride: int, why: str) -> tuple[int, int]:
        """The image size of a model that has no table of positions."""
        default = (224, 224) if 224 % stride == 0 else (stride * 16, stride * 16)
        height, width = self.ask("size", default, why)
        return height, width


@dataclass(frozen=True)
class Form:
    """One way in which checkpoints are named: how it is known, how it is read, and how its own pipeline treats images."""

    name: str
    title: str
    telling: tuple[str, ...]  # names, with * for any layer, that every such checkpoint has, after its root
    look: Callable[[Names, Facts], Config]
    table: Callable[[Any, str], Table]  # for a configuration, and what stands before the names
    preprocessing: Callable[[Config, str], tuple[Preprocessing, str]]  # for a configuration, and the name of the file
    roots: tuple[str, ...] = ("",)
    told: Callable[[Mapping[str, Any]], dict[str, tuple[Any, str]]] = lambda settings: {}
    example: Mapping[str, Any] = field(default_factory=dict)  # slots of a model that has this form


def usual_reasons(config: ViTConfig) -> list[str]:
    """Why projects that have the paper's positions and heads, and no others, cannot express a model."""
    found = []
    if not isinstance(config.position, Learned1D) or config.position.at != "stem":
        found.append("its positions are learned in one dimension, at the stem")
    if config.size.head is not None:
        found.append("its heads share the width among them")
    return found


def square(shape: tuple[int, ...], name: str) -> int:
    """The side of a square patch, from the last two dimensions of its projection."""
    if shape[-1] != shape[-2]:
        raise Differs(f"{name} has patches of {shape[-2]}×{shape[-1]}, and ours are square")
    return shape[-1]


def prefix_rows(rows: int, patches_of: Callable[[int], bool], choices: dict[str, int]) -> tuple[str, int]:
    """Which prefix tokens a table of positions covers: the first choice that leaves a grid, with the patches left."""
    for which, covered in choices.items():
        if rows - covered > 0 and patches_of(rows - covered):
            return which, rows - covered
    which, covered = next(iter(choices.items()))
    return which, rows - covered


def is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number
