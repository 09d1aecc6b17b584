"""A teacher: a frozen model that takes the student's images and returns logits, features or score maps.

Score maps are class scores at every cell of an image, stored sparsely and aligned with the student's patches.

B images, C channels, K classes of the student, F values of a vector, h×w cells of the teacher's grid, k classes kept of each,
N patches of the student.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.cache import MapShape
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.pipeline import IDENTITY_TRANSFORM, convert_channels
from vitrail.models.base import Model
from vitrail.nn.shape import Grid
from vitrail.utils.devices import constant_tensor

ChannelValues = Sequence[float]  # a number for each channel
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey: ITU-R 601, as in Pillow


class Teacher:
    """A frozen model. It is not a module, so a loss module that holds it does not train, shard or save it.

    `order` is the teacher's output index of each of the student's classes; None if they are the same. The methods take
    images [B, C, H, W], or clips [B, C, T, H, W], as the student gets them, normalised with its `mean` and `std`.
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
            raise ValueError("the teacher has no classifier: use distil='features'")
        return logits if self.order is None else logits[..., self.order.to(logits.device)]

    def convert_images(self, images: Tensor, mean: ChannelValues, std: ChannelValues) -> Tensor:
        """Return the student's images or clips at the teacher's size, with its channels and normalisation."""
        if images.ndim == 5:  # clips: frame by frame
            frames = self.convert_images(images.transpose(1, 2).flatten(0, 1), mean, std)
            return frames.unflatten(0, (len(images), -1)).transpose(1, 2)
        pipeline = self.preprocessing
        if next(self.model.parameters()).device != images.device:
            self.model.to(images.device)
        if (tuple(images.shape[-2:]), tuple(mean), tuple(std)) == (pipeline.size, pipeline.mean, pipeline.std):
            return images
        values = images.float() * channel_column(std, images) + channel_column(mean, images)
        values = convert_channels(values, pipeline.channels, weigh_colours, opaque=1)
        if tuple(values.shape[-2:]) != pipeline.size:
            # No crop: the images are crops already. Clamped, because bicubic overshoots at sharp edges.
            mode = "bicubic" if pipeline.interpolation in ("bicubic", "lanczos") else "bilinear"
            values = F.interpolate(values, size=pipeline.size, mode=mode, antialias=True).clamp(0, 1)
        return (values - channel_column(pipeline.mean, values)) / channel_column(pipeline.std, values)


def channel_column(values: ChannelValues, like: Tensor) -> Tensor:
    """Return a number for each channel, to be broadcast over images, [C, 1, 1]."""
    return constant_tensor(tuple(values), like.device).view(-1, 1, 1)


def weigh_colours(colours: Tensor) -> Tensor:
    """Return the luma of colours [B, 3, H, W], [B, 1, H, W]."""
    return (colours * channel_column(LUMA, colours)).sum(1, keepdim=True)


# --- score maps ---


def map_shape(teacher: Teacher, top: int) -> MapShape:
    """Return the grid and classes of a teacher's score maps that keep the `top` classes of each cell."""
    config, classes = teacher.model.config, teacher.classes
    if classes is None:
        raise ValueError("the teacher has no classifier: use distil='features'")
    return MapShape(config.grid_of(teacher.preprocessing.size), min(top, classes), classes)


def top_scores(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the top classes of each cell and their probabilities among them, [B, h, w, k], from logits [B, h, w, K].

    The published maps keep logits, with 0 for all other classes. That suits logits around 0, but not a teacher trained with
    sigmoids, whose logits are all far below 0. Probabilities do not depend on such an offset, and a mean of two cells is a
    distribution too.
    """
    probabilities, classes = logits.float().softmax(-1).topk(top, dim=-1)
    return classes, probabilities / probabilities.sum(-1, keepdim=True)


def align_labels(classes: Tensor, scores: Tensor, transforms: Tensor, grid: Grid, count: int) -> Tensor:
    """Return the soft label of each patch, [B, N, K], of samples whose points `transforms` [B, 2, 3] map into their images.

    RoIAlign (He et al. 2017): a patch's label is the mean of a few points in it, each interpolated between the centres of the
    four cells around it and clamped at the border. There are as many points along a side as the map has cells for a patch of
    the whole image, so no cell is skipped.
    """
    b, h, w, _ = classes.shape
    points = tuple(math.ceil(cells / patches) for cells, patches in zip((h, w), grid, strict=True))
    x, y = (sample_coordinates(transforms, axis, grid, points) for axis in (0, 1))  # [B, N, points]
    rows, columns = neighbour_cells(y, h), neighbour_cells(x, w)
    labels = torch.zeros((b, grid[0] * grid[1], count), device=scores.device)
    image = torch.arange(b, device=scores.device)[:, None]
    # One neighbour of one point at a time: a cell has every class once, so sums have the same order on every device.
    for point in range(points[0] * points[1]):
        for row, down in rows:
            for column, across in columns:
                cell = (image, row[..., point], column[..., point])
                share = (down * across)[..., point, None] / (points[0] * points[1])  # [B, N, 1]
                labels.scatter_add_(2, classes[cell], scores[cell].float() * share)
    return labels / labels.sum(2, keepdim=True)  # scores are stored in half precision


def sample_coordinates(transforms: Tensor, axis: int, grid: Grid, points: tuple[int, ...]) -> Tensor:
    """Return the image coordinates along an axis (0 for x, 1 for y) of the points of each patch, 0 to 1, [B, N, points]."""
    counts = (patches * inside for patches, inside in zip(grid, points, strict=True))
    height, width = ((torch.arange(n, device=transforms.device) + 0.5) / n for n in counts)
    y, x = torch.meshgrid(height, width, indexing="ij")
    a, b, c = transforms[:, axis, :, None, None].unbind(1)  # [B, 1, 1] each
    coordinates = a * x + b * y + c  # [B, h·points, w·points]
    patches = coordinates.unflatten(2, (grid[1], points[1])).unflatten(1, (grid[0], points[0]))
    return patches.transpose(2, 3).flatten(3).flatten(1, 2)


def neighbour_cells(coordinates: Tensor, cells: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the cells before and after each point along an axis, each with its interpolation weight."""
    position = (coordinates * cells - 0.5).clamp(0, cells - 1)
    before = position.floor().long().clamp(max=max(0, cells - 2))
    after = (before + 1).clamp(max=cells - 1)
    weight = position - before
    return (before, 1 - weight), (after, weight)


def identity_transforms(count: int, device: torch.device) -> Tensor:
    """Return the transforms of samples that show the whole image, [B, 2, 3]."""
    return torch.tensor(IDENTITY_TRANSFORM, device=device).expand(count, -1, -1)
