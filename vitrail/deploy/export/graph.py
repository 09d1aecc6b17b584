"""The exported module: pixels in, logits and features out.

B images, C channels of H×W pixels, K classes, F features.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model

INPUT_NAME = "pixels"


class ExportGraph(nn.Module):
    """A model that returns logits and features, with normalisation in front if its input is uint8."""

    def __init__(
        self,
        model: Model,
        preprocessing: Preprocessing,
        uint8: bool,
        merge: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model, self.uint8, self.dtype = model.to(dtype), uint8, dtype
        self.merged = cast(Any, model.merge_tokens(merge)) if merge else None
        # (x / 255 - mean) / std as one product and one sum
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.scale: Tensor
        self.shift: Tensor

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs, in order."""
        return ("features",) if self.model.config.classes is None else ("logits", "features")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        image = pixels.to(torch.float32) * self.scale + self.shift if self.uint8 else pixels
        features = self.compute_features(image.to(self.dtype))
        flat = features.flatten(1).float()  # a distilled model has [B, 2, D]
        return (flat,) if len(self.output_names) == 1 else (self.compute_logits(features).float(), flat)

    def compute_features(self, image: Tensor) -> Tensor:
        """Return the input of the head: [B, F], or [B, 2, D] with a distillation token."""
        if self.merged is not None:
            return self.merged.features(image)
        return self.model.compute_pre_logits(image)

    def compute_logits(self, features: Tensor) -> Tensor:
        """Return the logits of features, [B, K]."""
        return self.model.classify(features)
