"""Tables and MLPs of relative positions in the names of timm (`vit_relpos_*`) and of BEiT, read and written."""

import math
from collections.abc import Sequence

import torch

from vitrail.checkpoints import keys
from vitrail.checkpoints.formats import Assumptions, TensorNames
from vitrail.checkpoints.keys import KeyMapping, Rules, Tensors, TensorTransform
from vitrail.models.base import TokenConfig
from vitrail.models.vit_config import BLOCKS
from vitrail.nn.block import PreNorm
from vitrail.nn.position import PositionSlot, Relative, RelativeMLP
from vitrail.nn.position.base import PositionScope

TABLE = "relative_position_bias_table"
# The modules of timm's `VisionTransformerRelPos` that hold a table or an MLP: of every layer, or shared.
MODULES: dict[PositionScope, str] = {"every": "blocks.{}.attn.rel_pos", "shared": "shared_rel_pos"}


def list_modules(config: TokenConfig, every: str, shared: str) -> list[str]:
    """Return the names of the modules that hold the relative positions of a model; `every` has a {} for the layer."""
    assert isinstance(config.position, Relative | RelativeMLP)
    return [shared] if config.position.at == "shared" else [every.format(layer) for layer in range(config.depth)]


def map_relative(config: TokenConfig, modules: Sequence[str]) -> KeyMapping:
    """Map our [tables, H, 2h-1, 2w-1] and [tables, H, 3] to their flat [offsets (+3), H], per layer or shared."""
    (h, w), heads = config.shape.grid, config.size.heads
    offsets = (2 * h - 1) * (2 * w - 1)

    def read(tables: Tensors) -> Tensors:
        stacked = torch.stack(tables).transpose(1, 2)  # [tables, H, offsets (+3)]
        grids = stacked[..., :offsets].reshape(-1, heads, 2 * h - 1, 2 * w - 1)
        return [grids, stacked[..., offsets:].contiguous()] if config.prefix.count else [grids]

    def write(ours: Tensors) -> Tensors:
        stacked = torch.cat([ours[0].flatten(2), *ours[1:]], -1)
        return [table.contiguous() for table in stacked.transpose(1, 2).unbind()]

    ours = ("position.offsets", "position.prefix") if config.prefix.count else ("position.offsets",)
    return keys.map_key(ours, tuple(f"{module}.{TABLE}" for module in modules), TensorTransform(read, write))


def list_mlp_rules(modules: Sequence[str]) -> Rules:
    """Return the rules of the MLPs that compute a bias."""
    rules: Rules = {}
    for index, module in enumerate(modules):
        ours, theirs = f"position.mlps.{index}", f"{module}.mlp"
        rules |= {f"{ours}.fc1.*": f"{theirs}.fc1.*", f"{ours}.fc2.weight": f"{theirs}.fc2.weight"}
        rules |= {f"?{ours}.fc2.bias": f"{theirs}.fc2.bias"}
    return rules


def find_scope(names: TensorNames, every: str, shared: str) -> PositionScope | None:
    """Return whether every layer has these relative positions, or all share them; None if there are none."""
    has_every, has_shared = (names.find(name) is not None for name in (every, shared))
    if has_every and has_shared:
        raise ValueError("it has relative positions of every layer and shared ones: only one of both is supported")
    return "every" if has_every else "shared" if has_shared else None


def read_offset_size(table: str, names: TensorNames, prefix: int, stride: int, known: Assumptions) -> tuple[int, int]:
    """Return the image size of a table of relative offsets: square unless it was given."""
    rows = names.shape(table, 2)[0] - (3 if prefix else 0)
    side = (math.isqrt(max(rows, 0)) + 1) // 2 * stride
    height, width = known.resolve("size", (side, side), "a square grid of relative offsets")
    if rows < 1 or (2 * (height // stride) - 1) * (2 * (width // stride) - 1) != rows:
        image = f"{height}×{width}"
        raise ValueError(f"{rows} relative offsets do not match an image of {image}: give assume={{'size': 'HxW'}}")
    return height, width


def read_timm_position(
    names: TensorNames, assumptions: Assumptions, prefix: int, stride: int
) -> tuple[PositionSlot, tuple[int, int]] | None:
    """Return the relative positions of timm's `VisionTransformerRelPos` and its image size; None if there are none."""
    every, shared = MODULES["every"].format("*"), MODULES["shared"]
    if at := find_scope(names, f"{every}.{TABLE}", f"{shared}.{TABLE}"):
        table = names.find(f"{MODULES[at].format('*')}.{TABLE}") or ""
        size = read_offset_size(table, names, prefix, stride, assumptions)
        resampling = assumptions.resolve_resampling("timm", "vitrail's default; timm does not resample a bias")
        return Relative(at, resampling=resampling), size
    if at := find_scope(names, f"{every}.mlp.fc1.weight", f"{shared}.mlp.fc1.weight"):
        module = MODULES[at].format("*")
        hidden = names.layer_shape(f"{module}.mlp.fc1.weight", 2)[0]
        scaled = names.find(f"{module}.mlp.fc2.bias") is None
        size = assumptions.resolve_image_size(stride, "a bias is computed for any size")
        return RelativeMLP(at, hidden, scaled), size
    return None


def count_timm_heads(names: TensorNames) -> int | None:
    """Return the number of heads of a model with relative positions: one bias each; None if it has none."""
    every, shared = MODULES["every"].format("*"), MODULES["shared"]
    for name, dim in ((TABLE, 1), ("mlp.fc2.weight", 0)):
        found = names.find(f"{every}.{name}") or names.find(f"{shared}.{name}")
        if found is not None:
            return names.shape(found, 2)[dim]
    return None


def choose_timm_block(position: PositionSlot, has_scale: bool, assumptions: Assumptions) -> type[PreNorm]:
    """Return the kind of layer: timm's models with the norm at the end of each branch (`rpn`) have the same names.

    They have no LayerScale. Without a given kind, only a computed bias tells them.
    """
    computed, table = isinstance(position, RelativeMLP), isinstance(position, Relative)
    if has_scale or not (computed or table or "block" in assumptions.given):
        return PreNorm
    why = "timm's models with computed biases and no LayerScale (rpn)" if computed else "timm's default"
    name = assumptions.resolve("block", "res-post" if computed else "pre", why)
    if name not in ("pre", "res-post"):
        raise ValueError(f"block must be pre or res-post, got {name}")
    return type(BLOCKS[name])
