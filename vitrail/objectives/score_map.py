"""Score maps: a teacher's class scores at every cell of an image, stored sparsely and aligned with a student's patches.

B images, h·w cells of the teacher, k classes kept of each, K classes, N patches of the student.
"""

import math

import torch
from torch import Tensor

from vitrail.data.cache import MapShape
from vitrail.data.transforms.pipeline import IDENTITY_TRANSFORM
from vitrail.nn.shape import Grid
from vitrail.objectives.teacher import Teacher


def map_shape(teacher: Teacher, top: int) -> MapShape:
    """Return the grid and classes of a teacher's score maps that keep the `top` classes of each cell."""
    config, classes = teacher.model.config, teacher.classes
    if classes is None:
        raise ValueError("the teacher has no classifier: use --distil features")
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
    height, width = (
        (torch.arange(n * p, device=transforms.device) + 0.5) / (n * p) for n, p in zip(grid, points, strict=True)
    )
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
