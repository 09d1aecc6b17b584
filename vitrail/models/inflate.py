"""Models of clips from trained models of images (Carreira and Zisserman 2017, "inflation"; ViViT, Arnab et al. 2021).

A clip whose frames are all the same image then has the logits of that image, so that training on videos starts from what the
model knows of images. The mean spreads the weights of a patch over the frames of a tubelet; the centre gives all of them to the
frame in its middle. Positions are repeated over time.

Where all tokens attend to all, each patch of a still clip is there once for every step in time, but a class token only once:
patches then outweigh it, and the logits differ. So a model with prefix tokens gets divided attention by default (TimeSformer,
Bertasius et al. 2021), whose attention over time starts as a copy of that over space behind a projection of zero.

D width, C channels, P pixels along a patch, F frames of a tubelet.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.models.adapt import assemble, with_learned_positions
from vitrail.models.base import Model, ModelConfig, State, TokenConfig, Unsupported
from vitrail.models.registry import lay_out
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import Divided, PreNorm
from vitrail.nn.embed import Patches, Tubelets
from vitrail.nn.position import Factorised, Learned1D, NoPosition

Parts = dict[str, Any]  # objects of slots, by their names

MODES = ("mean", "centre")
ATTENTION = ("joint", "divided")


def inflate(model: Model, frames: int, tubelet: int = 2, mode: str = "mean", attention: str | None = None) -> Model:
    """Return a model of clips of so many frames with the weights of a model of images.

    `tubelet` is the number of frames of a tubelet, `mode` "mean" or "centre". `attention` is "joint", of all patches of a
    clip to all, or "divided" into time and space; by default divided if the model has prefix tokens. The new model has no
    preprocessing: add a `clip` to the model's, and set it.
    """
    config = model.config
    if mode not in MODES:
        raise ValueError(f"mode must be {' or '.join(MODES)}, got {mode!r}")
    if not isinstance(config, ViTConfig) or not isinstance(config.embed, Patches):
        raise Unsupported(f"inflate does not support {config.describe()}: use a Vision Transformer with linear patches")
    if config.embed.normed or config.embed.overlap:
        raise Unsupported(f"inflate does not support {config.embed}: patches with a norm or overlap have no tubelets")
    attention = ("divided" if config.prefix.count else "joint") if attention is None else attention
    if attention not in ATTENTION:
        raise ValueError(f"attention must be {' or '.join(ATTENTION)}, got {attention!r}")

    embed = Tubelets(tubelet, config.embed.patch, config.embed.bias)
    steps = embed.grid_of((frames, *config.image_size))[0]
    restated, state = with_learned_positions(config, dict(model.state_dict()))
    state["embed.projection.weight"] = inflate_patches(state["embed.projection.weight"], config, tubelet, mode)
    change = divide_attention if attention == "divided" else repeat_positions
    parts, state = change(restated, state, steps)
    inflated = assemble(replace(restated, frames=frames, embed=embed, **parts), state, next(iter(model.parameters())))
    inflated.labels, inflated.card = model.labels, dict(model.card)
    return inflated.train(model.training)


def inflate_config(config: ModelConfig, frames: int, attention: str | None = None) -> ModelConfig:
    """Return the configuration of a model of images inflated to clips of so many frames."""
    with torch.device("meta"):
        model = lay_out(config)
    return model.inflate(frames, attention=attention).config


def inflate_patches(weight: Tensor, config: ViTConfig, tubelet: int, mode: str) -> Tensor:
    """Return the projection of tubelets, [D, C·F·P²], of a still clip equal to that of patches, [D, C·P²]."""
    patches = weight.unflatten(1, (config.channels, 1, -1))  # [D, C, 1, P²]
    share = torch.zeros(tubelet, 1, dtype=weight.dtype, device=weight.device)
    if mode == "mean":
        share += 1 / tubelet
    else:
        share[tubelet // 2] = 1
    return (patches * share).flatten(1)


def repeat_positions(config: TokenConfig, state: State, steps: int) -> tuple[Parts, State]:
    """Return the tensors with positions repeated over time; no slot changes."""
    position = config.position
    if isinstance(position, NoPosition):
        return {}, state
    check_learned(config)
    assert isinstance(position, Learned1D)
    table, covered = state["position.weight"], position.count_covered(config.shape)
    patches = table[:, covered:].repeat(1, steps, 1)
    return {}, state | {"position.weight": torch.cat((table[:, :covered], patches), 1)}


def divide_attention(config: TokenConfig, state: State, steps: int) -> tuple[Parts, State]:
    """Return the slots and tensors with attention over time, which starts as that over space but adds nothing yet."""
    block = config.block
    if type(block) is not PreNorm:
        raise Unsupported(f"divided attention needs pre-norm layers, got {type(block).__name__}: use attention='joint'")
    parts: Parts = {"block": Divided(**{field.name: getattr(block, field.name) for field in fields(block)})}
    if not isinstance(config.position, NoPosition):
        parts["position"], state = factorise_positions(config, state, steps)
    added = {}
    for name, tensor in state.items():
        layer, _, part = name.partition(".msa.")
        if part:
            added[f"{layer}.time_msa.{part}"] = tensor.clone()
        elif name.startswith("blocks.") and ".norm1." in name:
            added[name.replace(".norm1.", ".time_norm.")] = tensor.clone()
        elif ".branch1." in name:
            added[name.replace(".branch1.", ".time_branch.")] = tensor.clone()
    one, d = next(iter(state.values())), config.size.width
    for layer in range(config.depth):
        added[f"blocks.{layer}.time_projection.weight"] = one.new_zeros(d, d)
        added[f"blocks.{layer}.time_projection.bias"] = one.new_zeros(d)
    return parts, state | added


def factorise_positions(config: TokenConfig, state: State, steps: int) -> tuple[Factorised, State]:
    """Return the slot and the tensors with positions as those of space, and zeros as those of time."""
    check_learned(config)
    position = config.position
    assert isinstance(position, Learned1D)
    state, table = dict(state), state["position.weight"]
    tables, _, width = table.shape
    covered, outputs = position.count_covered(config.shape), config.prefix.outputs
    if covered > outputs:  # positions of registers become part of them
        state["prefix.registers"] = state["prefix.registers"] + table[:, outputs:covered]
    rows = table[:, : min(covered, outputs)]
    if covered < outputs:
        rows = table.new_zeros(tables, outputs, width)
    del state["position.weight"]
    state["position.space_weight"] = torch.cat((rows, table[:, covered:]), 1)
    state["position.time_weight"] = table.new_zeros(tables, steps, width)
    return Factorised(resampling=position.resampling), state


def check_learned(config: TokenConfig) -> None:
    """Raise Unsupported for positions that cannot be repeated over time."""
    if not isinstance(config.position, Learned1D):
        name = type(config.position).__name__
        raise Unsupported(f"inflate does not support {name} positions: use positions added to the tokens in one table")
    if config.position.at != "stem":
        raise Unsupported(f"inflate needs positions at the stem, got at={config.position.at!r}: train a new model")
