"""Shared parts of masked objectives: checks of the encoder, and images of their input and prediction.

B images of C channels, N patches in a grid of h×w, P pixels along each.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import StepRandom
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.nn.head import Linear
from vitrail.nn.pool import MAP
from vitrail.nn.shape import Grid
from vitrail.objectives.base import Losses, LossModule, Reconstruction
from vitrail.objectives.teacher import ChannelValues


def check_encoder(config: ModelConfig, method: str, clips: bool = False) -> TokenConfig:
    """Return the configuration, or raise ValueError without patches to hide or with modules that would not be trained."""
    config = config.require_tokens(method, clips)
    if config.classes is not None or not isinstance(config.head, Linear):
        raise ValueError(f"{method} trains a model that ends in features: set model.classes=none and model.head=Linear")
    if isinstance(config.pool, MAP):
        raise ValueError(f"{method} does not use the attention pool, which would not be trained: set model.pool=Mean")
    if config.shape.patches < 2:
        (h, w), p = config.image_size, config.embed.stride
        raise ValueError(f"{method} needs several patches: {h}×{w} images are one {p}×{p} patch, use a smaller one")
    return config


class PatchPrediction(NamedTuple):
    """Normalised patches, [B, N, C·P²]: the model's input, where it is hidden (bool [B, N]), and the prediction."""

    input: Tensor
    hidden: Tensor
    predicted: Tensor


class PatchLoss(LossModule):
    """A loss module that predicts patches and can show them as images."""

    reconstructs: ClassVar[bool] = True

    def predict_patches(self, images: Tensor, draw: StepRandom) -> PatchPrediction:
        """Return input and prediction of a normalised batch."""
        raise NotImplementedError

    @torch.no_grad()
    def signals(self, images: Any, draw: StepRandom, memo: dict[str, Tensor] | None = None) -> Losses:
        return self(images, None, draw)

    def reconstruct(self, images: Tensor, draw: StepRandom, mean: ChannelValues, std: ChannelValues) -> Reconstruction:
        """Return normalised images [B, C, H, W] with their masked and predicted versions, in evaluation mode."""
        prediction, (_, c, height, width) = self.predict_patches(images, draw), images.shape
        patch = round((prediction.input.shape[2] // c) ** 0.5)
        grid = (height // patch, width // patch)
        scale, shift = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (std, mean))
        masked = to_uint8(unpatchify(prediction.input, grid, c) * scale + shift)
        grey = unpatchify(prediction.hidden.unsqueeze(-1).expand(-1, -1, prediction.input.shape[2]), grid, c)
        return Reconstruction(
            original=to_uint8(images * scale + shift),
            masked=masked.masked_fill(grey, 128),
            reconstructed=to_uint8(unpatchify(prediction.predicted, grid, c) * scale + shift),
        )


def unpatchify(patches: Tensor, grid: Grid, channels: int) -> Tensor:
    """Return the images [B, C, H, W] that `patchify` cut into patches [B, N, C·P²]."""
    b, (h, w) = patches.shape[0], grid
    patch = round((patches.shape[2] // channels) ** 0.5)
    x = patches.reshape(b, h, w, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)  # [B, C, h, P, w, P]
    return x.reshape(b, channels, h * patch, w * patch)


def to_uint8(pixels: Tensor) -> Tensor:
    """Return values from 0 to 1 as bytes, clipped."""
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
