"""What is exported: pixels in; logits, and the features that come to the head, out.

B pictures, C channels of H×W pixels, K classes, F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.merging import merged
from vitrail.models.vit import ViT
from vitrail.nn.head import TanhHead

INPUT = "pixels"


class Graph(nn.Module):
    """A model with its preprocessing in front, where bytes come in, and both of its answers behind."""

    def __init__(
        self,
        model: ViT | BiT,
        preprocessing: Preprocessing,
        uint8: bool,
        merge: int = 0,
        kind: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model, self.uint8, self.kind = model.to(kind), uint8, kind
        if merge and not isinstance(model, ViT):
            raise ValueError("tokens are merged in Vision Transformers, and this is a ResNet: leave merging out")
        self.merged = merged(model, merge) if merge and isinstance(model, ViT) else None
        # (x / 255 - mean) / std as one product and one sum
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.scale: Tensor
        self.shift: Tensor

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of what comes out, in order."""
        return ("features",) if self.model.config.classes is None else ("logits", "features")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        image = pixels.to(torch.float32) * self.scale + self.shift if self.uint8 else pixels
        features = self.features(image.to(self.kind))
        found = features.flatten(1).float()  # a distilled model's two tokens stand side by side
        return (found,) if len(self.gives) == 1 else (self.logits(features).float(), found)

    def features(self, image: Tensor) -> Tensor:
        """What comes to the head: [B, F], or [B, 2, D] with a distillation token."""
        model = self.model
        if self.merged is not None:
            return self.merged.features(image)
        if isinstance(model, BiT):
            return model.pooled(model.stages(rooted(model, image)))
        if model.config.classes is None:
            return model(image)
        y = model.pool(model.encode(model.tokens(image), model.embed.grid(image), read=model.pool.reads))
        return torch.tanh(model.head.pre_logits(y)) if isinstance(model.head, TanhHead) else y

    def logits(self, features: Tensor) -> Tensor:
        """The head alone, [B, K]."""
        head = self.model.head
        return head.linear(features) if isinstance(head, TanhHead) else head(features)


def rooted(model: BiT, image: Tensor) -> Tensor:
    """`BiT.rooted` with its zeros joined to the map instead of padded.

    ONNX Runtime (1.31) merges a padding with zeros into the pooling that follows, where the border then never is the maximum.
    """
    x = model.root(image)
    if model.config.root == "small":
        return x
    row = torch.zeros_like(x[:, :, :1])
    x = torch.cat((row, x, row), 2)
    column = torch.zeros_like(x[:, :, :, :1])
    return F.max_pool2d(torch.cat((column, x, column), 3), 3, 2)
