"""A teacher: a frozen model that takes the student's images and returns logits, features or score maps.

B images, C channels, K classes of the student, F values of a vector, a grid of h×w patches.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model

ChannelValues = Sequence[float]  # a number for each channel
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey: ITU-R 601, as in Pillow


class Teacher:
    """A frozen model. It is not a module, so a task that holds it does not train, shard or save it.

    `order` is the teacher's output index of each of the student's classes; None if they are the same. The methods take
    images as the student gets them, normalised with its `mean` and `std`.
    """

    def __init__(self, model: Model, preprocessing: Preprocessing, order: Sequence[int] | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.preprocessing = preprocessing
        self.order = None if order is None else torch.as_tensor(order)
        self.width = model.feature_dim  # F

    @property
    def classes(self) -> int | None:
        """Number of classes that are used; None for a model that ends in features."""
        return self.model.config.classes if self.order is None else len(self.order)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def logits(self, images: Tensor, mean: ChannelValues, std: ChannelValues) -> Tensor:
        """Return logits in the student's classes, [B, K]."""
        return self.reorder_classes(self.model(self.convert_images(images, mean, std)))

    @torch.no_grad()
    def features(self, images: Tensor, mean: ChannelValues, std: ChannelValues) -> Tensor:
        """Return the input of the head, [B, F]."""
        return self.model.embed_images(self.convert_images(images, mean, std))

    @torch.no_grad()
    def dense_logits(self, images: Tensor, mean: ChannelValues, std: ChannelValues) -> Tensor:
        """Return logits at every cell of the grid, in the student's classes, [B, h, w, K]."""
        return self.reorder_classes(self.model.dense_logits(self.convert_images(images, mean, std)))

    def reorder_classes(self, logits: Tensor) -> Tensor:
        """Return logits with the last axis in the order of the student's classes."""
        if self.model.config.classes is None:
            raise ValueError("the teacher has no classifier: use --distil features")
        return logits if self.order is None else logits[..., self.order.to(logits.device)]

    def convert_images(self, images: Tensor, mean: ChannelValues, std: ChannelValues) -> Tensor:
        """Return the student's images at the teacher's size, with its channels and normalisation."""
        pipeline = self.preprocessing
        if self.device != images.device:
            self.model.to(images.device)
        if (tuple(images.shape[-2:]), tuple(mean), tuple(std)) == (pipeline.size, pipeline.mean, pipeline.std):
            return images
        values = images.float() * channel_column(std, images) + channel_column(mean, images)
        values = convert_channels(values, pipeline.channels)
        if tuple(values.shape[-2:]) != pipeline.size:
            # No crop: the images are crops already. Clamped, because bicubic overshoots at sharp edges.
            mode = "bicubic" if pipeline.interpolation in ("bicubic", "lanczos") else "bilinear"
            values = F.interpolate(values, size=pipeline.size, mode=mode, antialias=True).clamp(0, 1)
        return (values - channel_column(pipeline.mean, values)) / channel_column(pipeline.std, values)


def channel_column(values: ChannelValues, like: Tensor) -> Tensor:
    """Return a number for each channel, to be broadcast over images, [C, 1, 1]."""
    return torch.tensor(list(values), device=like.device).view(-1, 1, 1)


def convert_channels(pixels: Tensor, channels: int) -> Tensor:
    """Return images of 1, 3 or 4 channels with another of these numbers, as Pillow converts them; values are 0 to 1."""
    present = pixels.shape[1]
    if present == channels:
        return pixels
    colours = pixels.expand(-1, 3, -1, -1) if present == 1 else pixels[:, :3]
    if channels == 1:
        return (colours * channel_column(LUMA, pixels)).sum(1, keepdim=True)
    return colours if channels == 3 else torch.cat((colours, torch.ones_like(colours[:, :1])), 1)  # opaque
