"""Weights between those of two models: fine-tuning that keeps what the first could do (WiSE-FT, Wortsman et al. 2022)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.artifact import CheckpointContract
from vitrail.checkpoints.checkpoint import open_and_detect
from vitrail.checkpoints.load import find_weights
from vitrail.data.labels import format_names
from vitrail.models.base import ModelConfig, State, remove_calibration
from vitrail.utils.json import to_json

TRAINING_SETTINGS = ("dropout", "stochastic_depth", "init", "resampling")  # of which no weight depends


def interpolate_with(
    contract: CheckpointContract, state: State, other: str | Path, alpha: float
) -> tuple[CheckpointContract, State]:
    """Return a model with weights between those of another and its own; raise ValueError if they are not the same model."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha= must be from 0 to 1, got {alpha:g}")
    both = contract.config.text_tower is not None
    with open_and_detect(find_weights(other, towers=both), towers=both) as checkpoint:
        theirs = checkpoint.contract
        if theirs.labels != contract.labels:
            mine, others = (
                "none" if names is None else format_names(names) for names in (contract.labels, theirs.labels)
            )
            raise ValueError(f"{other} has other classes, {others}, not {mine}: interpolate models of the same classes")
        own, their = describe_shape(contract.config), describe_shape(theirs.config)
        if own != their:
            differ = next(name for name in own if own[name] != their.get(name))
            raise ValueError(
                f"{other} differs in {differ}: {their.get(differ)}, not {own[differ]}: interpolate a model and its start"
            )
        before = checkpoint.read_state()
    if set(before) != set(state) or any(before[name].shape != tensor.shape for name, tensor in state.items()):
        raise ValueError(f"{other} has tensors of other shapes: interpolate a model and the one it was fine-tuned from")
    mixed = {name: interpolate_tensors(before[name], tensor, alpha) for name, tensor in state.items()}
    card = remove_calibration(contract.card) | {"interpolated": {"with": str(other), "alpha": alpha}}
    return replace(contract, card=card), mixed


def describe_shape(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model that its weights depend on, as JSON values by name: not those of training alone."""
    return dict(list_settings(to_json(config)))


def list_settings(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in a configuration and its parts, `image.size`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from list_settings(value, f"{path}{name}.")
        elif name not in TRAINING_SETTINGS:
            yield f"{path}{name}", value


def interpolate_tensors(first: Tensor, second: Tensor, alpha: float) -> Tensor:
    """Return (1 - alpha) first + alpha second; exactly one of them at the ends."""
    if alpha == 1 or not second.is_floating_point():
        return second
    if alpha == 0:
        return first.to(second.dtype)
    return torch.lerp(first.double(), second.double(), alpha).to(second.dtype)
