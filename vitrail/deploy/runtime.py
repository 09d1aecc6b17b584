"""What runs a model, and what goes with its weights wherever they go.

B pictures, C channels of H×W pixels, K classes, F features.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT

Gives = Literal["logits", "features"]
RUNTIMES = ("torch", "onnx", "openvino")


class Runtime(Protocol):
    """Pictures in, numbers out; safe to be called from one thread at a time."""

    name: str  # one of RUNTIMES

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, C, H, W], resized and cropped, to float32: logits [B, K], or features [B, F]."""
        ...


@dataclass(frozen=True)
class Contract:
    """What a model promises: stored in the model file, and written into every file that is exported from it."""

    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None  # None for a model that ends in features
    several: bool = False  # whether a picture may have several labels: each is then judged alone
    merge: int = 0  # tokens that are merged in each layer
    precision: str = "fp32"
    config: dict[str, Any] = field(default_factory=dict)  # of the model, as JSON
    name: str = ""  # of the model it was made from
    checksum: str = ""  # SHA-256 of that model's weights
    any_size: bool = False  # whether it takes pictures of every size that its patches divide


@dataclass(frozen=True)
class Deployed:
    """A model that is ready to answer, whatever runs it."""

    where: str  # as the user wrote it
    name: str  # what to call it
    contract: Contract
    runtime: Runtime
    gives: Gives = "logits"
    model: ViT | BiT | None = None  # where PyTorch runs it: for those who look inside
    notes: tuple[str, ...] = ()  # what a user should know, such as how the runtime was chosen
    file: str | None = None  # the exported file that is run, where it is one
