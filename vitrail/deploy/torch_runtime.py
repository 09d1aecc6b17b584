"""PyTorch runs the model.

B pictures, C channels of H×W pixels, K classes, F features.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Gives

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *HALVES)


class TorchRuntime:
    """A module as it is loaded. It keeps nothing between calls, so any number of threads may call it at once."""

    name = "torch"

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        gives: Gives = "logits",
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a value)
        precision: str = "fp32",
    ) -> None:
        """`model` is one that ends in what is wanted: for features, one without classes."""
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}: use {', '.join(PRECISIONS)}")
        self.model, self.preprocessing = model, preprocessing
        self.gives: Gives = gives
        self.device, self.precision = device, precision

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, C, H, W] to float32: logits [B, K], or features [B, F]."""
        image = torch.from_numpy(pixels).to(self.device, non_blocking=True)
        with self.half():
            found = self.model(self.preprocessing.normalise(image))
        return found.flatten(1).float().cpu().numpy()  # a distilled model's features are [B, 2, D]

    def half(self) -> AbstractContextManager[object]:
        """Matrix products in half precision, where that is asked for."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, HALVES[self.precision])
