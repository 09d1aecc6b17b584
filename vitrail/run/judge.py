"""A model's answers on a split, from however many processes, in the order of the split."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import Loader
from vitrail.engine.distributed import Team


@torch.no_grad()
def answers(
    model: Callable[[Tensor], Tensor], loader: Loader, normalise: Callable[[Tensor], Tensor], team: Team
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, K] for every picture of the split, on every process; and which pictures could be read, [n]."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in loader.once():
        # A sharded model computes on all processes or on none, so one without a picture left computes on a blank one.
        pixels = batch.pixels if len(batch.pixels) else torch.zeros((1, *batch.pixels.shape[1:]), dtype=torch.uint8)
        logits = model(normalise(pixels.to(team.device, non_blocking=True))).float().cpu().numpy()
        found.append((batch.indices.numpy(), logits[: len(batch.indices)]))
    parts = [part for some in team.everybody(found) for part in some]
    logits = np.zeros((len(loader.pictures), parts[0][1].shape[1]), dtype=np.float32)
    read = np.zeros(len(loader.pictures), dtype=bool)
    for places, values in parts:
        logits[places], read[places] = values, True
    return logits, read
