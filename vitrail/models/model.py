"""What every model carries besides its weights: the data contract that it was trained under."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vitrail.nn.recompute import Recomputing


class Model(Recomputing):
    """A model with the names of its classes, what is to be done to an image first, and where it comes from."""

    labels: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Callable[[Any], Tensor] | None = None  # a PIL image to the normalised [C, H, W]
    card: Mapping[str, Any] = MappingProxyType({})  # recipe, metrics, provenance, licence
