"""A teacher's answers at every cell of a picture, kept in short, and brought to where a student's patches are.

B pictures, h·w cells of the teacher, k classes kept of each, K classes, N patches of the student.
"""

import math

import torch
from torch import Tensor

from vitrail.data.maps import MapShape
from vitrail.data.places import WHOLE
from vitrail.models.bit import BiTConfig
from vitrail.nn.shape import Grid
from vitrail.objectives.teacher import Teacher


def map_shape(teacher: Teacher, top: int) -> MapShape:
    """What the maps of a teacher look like, with the best few of its classes kept."""
    config, classes = teacher.model.config, teacher.classes
    if classes is None:
        raise ValueError("the teacher ends in features and has no classes to answer in: use --distil features")
    if isinstance(config, BiTConfig):
        halvings = len(config.stages) - 1 + (2 if config.root == "large" else 0)
        height, width = (-(-side // 2**halvings) for side in teacher.preprocessing.size)
        return MapShape((height, width), min(top, classes), classes)
    stride = config.embed.stride
    height, width = teacher.preprocessing.size
    return MapShape((height // stride, width // stride), min(top, classes), classes)


def best(answers: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The likeliest classes of each cell and how likely each is among them, [B, h, w, k], of logits [B, h, w, K].

    The published maps keep logits, with 0 for every class that is left out: right for a teacher whose logits are about 0, and
    wrong for one that answers with sigmoids, whose logits are all far below. Shares do not depend on where logits lie, and
    a mean of them, as between two cells, is a distribution too.
    """
    chances, classes = answers.float().softmax(-1).topk(top, dim=-1)
    return classes, chances / chances.sum(-1, keepdim=True)


def aligned(classes: Tensor, scores: Tensor, places: Tensor, grid: Grid, count: int) -> Tensor:
    """The soft label of each patch of samples that show these places of their pictures, [B, N, K].

    RoIAlign (He et al. 2017): a patch's label is the mean of a few points in it, each read between the middles of the four
    cells around it; beyond the outermost middles, the map goes on as it ends. There are as many points along a side as
    the map has cells for a patch of the whole picture, so that no cell is passed over.
    """
    b, h, w, _ = classes.shape
    points = tuple(math.ceil(cells / patches) for cells, patches in zip((h, w), grid, strict=True))
    x, y = (looked_at(places, axis, grid, points) for axis in (0, 1))  # [B, N, points]
    rows, columns = between(y, h), between(x, w)
    labels = torch.zeros((b, grid[0] * grid[1], count), device=scores.device)
    each = torch.arange(b, device=scores.device)[:, None]
    # One neighbour of one point at a time: within a cell every class stands once, so sums have one order on every device.
    for point in range(points[0] * points[1]):
        for row, down in rows:
            for column, across in columns:
                cell = (each, row[..., point], column[..., point])
                share = (down * across)[..., point, None] / (points[0] * points[1])  # [B, N, 1]
                labels.scatter_add_(2, classes[cell], scores[cell].float() * share)
    return labels / labels.sum(2, keepdim=True)  # scores are kept in half precision


def looked_at(places: Tensor, axis: int, grid: Grid, points: tuple[int, ...]) -> Tensor:
    """Where the points of each patch are in the picture along an axis (0 for x, 1 for y), its side being 1: [B, N, points]."""
    height, width = (
        (torch.arange(n * p, device=places.device) + 0.5) / (n * p) for n, p in zip(grid, points, strict=True)
    )
    y, x = torch.meshgrid(height, width, indexing="ij")
    a, b, c = places[:, axis, :, None, None].unbind(1)  # [B, 1, 1] each
    found = a * x + b * y + c  # [B, h·points, w·points]
    apart = found.unflatten(2, (grid[1], points[1])).unflatten(1, (grid[0], points[0]))
    return apart.transpose(2, 3).flatten(3).flatten(1, 2)


def between(where: Tensor, cells: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The cells before and after each point along an axis, each with its weight."""
    place = (where * cells - 0.5).clamp(0, cells - 1)
    before = place.floor().long().clamp(max=max(0, cells - 2))
    after = (before + 1).clamp(max=cells - 1)
    weight = place - before
    return (before, 1 - weight), (after, weight)


def whole(count: int, device: torch.device) -> Tensor:
    """The places of samples that show all of what the teacher saw, [B, 2, 3]."""
    return torch.tensor(WHOLE, device=device).expand(count, -1, -1)
