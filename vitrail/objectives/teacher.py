"""A teacher: a frozen model, what it is shown of a student's pictures, and what it says of them.

An objective that is taught is built by `spec.build(model, weights, teacher, preprocessing)`, where `preprocessing` is the
student's: its mean and std tell what the student's normalised pictures looked like.

B pictures, C channels, K classes of the student, F values of a vector, a grid of h×w patches.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.nn.head import Projection, TanhHead

Colour = Sequence[float]  # a number for each channel
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey: ITU-R 601, as Pillow mixes them


class Teacher:
    """What teaches. It is no module, so nobody who holds it trains it, shards it, or writes it into a checkpoint.

    `order` has the place of each of the student's classes among the teacher's outputs; None where they are the same.
    The methods take the student's pictures as its model gets them, normalised with its `mean` and `std`.
    """

    def __init__(self, model: ViT | BiT, preprocessing: Preprocessing, order: Sequence[int] | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.preprocessing = preprocessing
        self.order = None if order is None else torch.as_tensor(order)
        self.width = vector_width(model)  # F

    @property
    def classes(self) -> int | None:
        """How many of its classes are asked about; None for a model that ends in features."""
        return self.model.config.classes if self.order is None else len(self.order)

    @torch.no_grad()
    def logits(self, images: Tensor, mean: Colour, std: Colour) -> Tensor:
        """What it answers, in the student's classes, [B, K]."""
        return self.sorted(self.model(self.shown(images, mean, std)))

    @torch.no_grad()
    def features(self, images: Tensor, mean: Colour, std: Colour) -> Tensor:
        """The vector that comes to its head, [B, F]."""
        return vectors(self.model, self.shown(images, mean, std))

    @torch.no_grad()
    def maps(self, images: Tensor, mean: Colour, std: Colour) -> Tensor:
        """What it answers at every place of its grid, in the student's classes, [B, h, w, K]."""
        return self.sorted(score_maps(self.model, self.shown(images, mean, std)))

    def sorted(self, answers: Tensor) -> Tensor:
        """The last axis from its own classes to the student's."""
        if self.model.config.classes is None:
            raise ValueError("the teacher ends in features and has no classes to answer in: use --distil features")
        return answers if self.order is None else answers[..., self.order.to(answers.device)]

    def shown(self, images: Tensor, mean: Colour, std: Colour) -> Tensor:
        """The student's pictures as this model takes them: at its size, in its channels, normalised with its numbers."""
        pipeline = self.preprocessing
        if self.device != images.device:
            self.model.to(images.device)
        if (tuple(images.shape[-2:]), tuple(mean), tuple(std)) == (pipeline.size, pipeline.mean, pipeline.std):
            return images
        values = images.float() * column(std, images) + column(mean, images)
        values = in_channels(values, pipeline.channels)
        if tuple(values.shape[-2:]) != pipeline.size:
            # All of it: it is the student's crop already. Bicubic goes beyond what a picture can hold, at sharp edges.
            mode = "bicubic" if pipeline.interpolation in ("bicubic", "lanczos") else "bilinear"
            values = F.interpolate(values, size=pipeline.size, mode=mode, antialias=True).clamp(0, 1)
        return (values - column(pipeline.mean, values)) / column(pipeline.std, values)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def column(values: Colour, like: Tensor) -> Tensor:
    """A number for each channel, to be broadcast over pictures, [C, 1, 1]."""
    return torch.tensor(list(values), device=like.device).view(-1, 1, 1)


def in_channels(pixels: Tensor, channels: int) -> Tensor:
    """Pictures of 1, 3 or 4 channels in another of these numbers, as Pillow converts them; values are 0 to 1."""
    there = pixels.shape[1]
    if there == channels:
        return pixels
    colours = pixels.expand(-1, 3, -1, -1) if there == 1 else pixels[:, :3]
    if channels == 1:
        return (colours * column(LUMA, pixels)).sum(1, keepdim=True)
    return colours if channels == 3 else torch.cat((colours, torch.ones_like(colours[:, :1])), 1)  # opaque


def vector_width(model: ViT | BiT) -> int:
    """How many values `vectors` gives for a picture."""
    if isinstance(model, BiT):
        return model.features_width
    if isinstance(model.head, TanhHead):
        return model.head.pre_logits.out_features
    if isinstance(model.config.head, Projection):
        return model.config.head.width
    return model.pool.vectors * model.pool.features


def vectors(model: ViT | BiT, images: Tensor) -> Tensor:
    """What comes to a model's last layer, [B, F]: of a distilled model, both tokens side by side."""
    if isinstance(model, BiT):
        return model.pooled(model.grids(images))
    y = model.pool(model.encode(model.tokens(images), model.embed.grid(images), read=model.pool.reads))
    if isinstance(model.head, TanhHead):
        return torch.tanh(model.head.pre_logits(y))
    if isinstance(model.config.head, Projection):
        return model.head(y)
    return y.flatten(1)


def score_maps(model: ViT | BiT, images: Tensor) -> Tensor:
    """A model's answer at every place, [B, h, w, K]: each patch is pooled and read as if the whole picture were like it.

    Where the answer is the patches' mean before a linear head, and for a ResNet, the mean of the map is the answer itself.
    """
    if isinstance(model, BiT):
        return model.head(F.relu(model.norm(model.grids(images))).permute(0, 2, 3, 1))
    grid, prefix = model.embed.grid(images), model.config.prefix.count
    patches = model.encode(model.tokens(images), grid)[:, prefix:]  # [B, N, D]
    alone = patches.reshape(-1, 1, patches.shape[-1]).expand(-1, prefix + 1, -1)  # in the place of every token
    return model.head(model.pool(alone)).unflatten(0, (len(images), *grid))
