"""A trained model for another task: other classes, another image size, other channels. And the same model said otherwise.

Each function takes a configuration and its tensors and gives both anew; nothing is changed in place.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.models.bit import BiTConfig
from vitrail.models.build import Config, build_from
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import ConvStem, Patches
from vitrail.nn.head import Linear, Projection
from vitrail.nn.position import Added, Learned1D, Learned2D, Relative, SinCos2D, Sinusoid1D, resample

State = dict[str, Tensor]


def with_classes(config: Config, state: State, classes: int | None) -> tuple[Config, State]:
    """A new head for so many classes, zero as the paper begins fine-tuning (section 3.2); None leaves features.

    CLIP's projection is replaced: classes are read from the features before it.
    """
    changes: dict[str, Any] = {"classes": classes}
    if isinstance(config, ViTConfig) and isinstance(config.head, Projection):
        changes["head"] = Linear()
    new = replace(config, **changes)
    with torch.device("meta"):
        wanted = build_from(new).state_dict()
    one = next(iter(state.values()))
    made: State = {}
    for name, like in wanted.items():
        old = state.get(name)
        last = name.startswith("head.") and not name.startswith("head.pre_logits")
        keep = old is not None and old.shape == like.shape and not last
        made[name] = old if keep and old is not None else one.new_zeros(like.shape)
        assert keep or last, name
    return new, made


def with_size(config: Config, state: State, size: tuple[int, int]) -> tuple[Config, State]:
    """Positions resampled to the grid of another image size (section 3.2), for good."""
    new = replace(config, image_size=size)
    if isinstance(config, BiTConfig) or isinstance(new, BiTConfig):
        return new, state
    old_grid, grid = config.shape.grid, new.shape.grid
    state = dict(state)
    if isinstance(config.position, Learned1D):
        covered = covered_by(config)
        table = state["position.weight"]
        prefix, patches = table[:, :covered], table[:, covered:]
        patches = resample(patches.transpose(1, 2).unflatten(2, old_grid), grid).flatten(2).transpose(1, 2)
        state["position.weight"] = torch.cat((prefix, patches), 1)
    elif isinstance(config.position, Learned2D):
        for name, length in (("rows_weight", (grid[0], 1)), ("columns_weight", (grid[1], 1))):
            table = state[f"position.{name}"].transpose(1, 2).unsqueeze(-1)
            state[f"position.{name}"] = resample(table, length).squeeze(-1).transpose(1, 2).contiguous()
    elif isinstance(config.position, Relative):
        state["position.offsets"] = resample(state["position.offsets"], (2 * grid[0] - 1, 2 * grid[1] - 1))
    return new, state


def with_channels(config: Config, state: State, channels: int) -> tuple[Config, State]:
    """The first projection for other channels: summed for one, else begun again from the first and scaled down.

    A grey model then does with a grey image what the old one did with its three equal channels.
    """
    new = replace(config, channels=channels)
    if isinstance(config, BiTConfig):
        name = "root.weight"
    elif isinstance(config.embed, Patches):
        if config.embed.normed:
            raise ValueError("patches that are normed before they are projected cannot take other channels")
        name = "embed.projection.weight"
    elif isinstance(config.embed, ConvStem):
        name = "embed.layers.0.weight"
    else:
        assert isinstance(config.embed, Hybrid)
        name = "embed.trunk.root.weight"
    weight = state[name]
    old = weight.unflatten(1, (config.channels, -1)) if weight.ndim == 2 else weight
    if channels == 1:
        fresh = old.float().sum(1, keepdim=True)
    else:
        repeated = old.float().repeat(1, -(-channels // config.channels), *[1] * (old.ndim - 2))[:, :channels]
        fresh = repeated * (config.channels / channels)
    fresh = fresh.to(weight.dtype)
    return new, state | {name: fresh.flatten(1) if weight.ndim == 2 else fresh}


# --- the same model said otherwise ---


def with_projection_as_classes(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """CLIP's projection as a linear head whose bias is zero, for formats that know no other."""
    if not isinstance(config.head, Projection):
        return config, state
    weight = state["head.weight"]
    new = replace(config, head=Linear(), classes=config.head.width)
    return new, state | {"head.bias": weight.new_zeros(weight.shape[0])}


def covered_by(config: ViTConfig) -> int:
    """Prefix tokens that have a position of their own in a learned table."""
    if not isinstance(config.position, Learned1D):
        return 0
    return {"outputs": config.prefix.outputs, "none": 0, "all": config.prefix.count}[config.position.prefix]


def with_learned_positions(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """Fixed positions at the stem written down as a table, for formats that know no other."""
    if not isinstance(config.position, SinCos2D | Sinusoid1D) or config.position.at != "stem":
        return config, state
    position = config.position.build(config.shape)
    assert isinstance(position, Added)
    rows = position.rows(0, config.shape.grid, None).to(next(iter(state.values())).dtype)  # [1, T, D]
    return replace(config, position=Learned1D(prefix="all")), state | {"position.weight": rows}


def with_positions_for(config: ViTConfig, state: State, which: Any) -> tuple[ViTConfig, State]:
    """Positions for these prefix tokens alone: what others had is added to the tokens; what is new is zero."""
    position = config.position
    if not isinstance(position, Learned1D) or position.at != "stem" or position.prefix == which:
        return config, state
    new = replace(config, position=replace(position, prefix=which))
    before, after = covered_by(config), covered_by(new)
    if before == after:
        return new, state
    state, table = dict(state), state["position.weight"]
    rows, patches = table[:, :before], table[:, before:]
    if after > before:
        rows = torch.cat((rows, table.new_zeros(1, after - before, table.shape[2])), 1)
    outputs = config.prefix.outputs
    for name, start, end in (("prefix.outputs", 0, outputs), ("prefix.registers", outputs, config.prefix.count)):
        lost = rows[:, max(start, after) : end]
        if lost.shape[1] and name in state:
            tokens = state[name].clone()
            tokens[:, tokens.shape[1] - lost.shape[1] :] += lost
            state[name] = tokens
    state["position.weight"] = torch.cat((rows[:, :after], patches), 1)
    return new, state
