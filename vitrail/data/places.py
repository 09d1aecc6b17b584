"""Which part of a picture each training sample shows: the way back through flip, shift, turn and crop.

A place is a matrix [2, 3]. A point of the sample, its sides measured from 0 to 1, is at `place @ (x, y, 1)` in the picture,
whose sides are measured from 0 to 1 as well. It is a function of (seed, epoch, index) and of the picture's size, as the sample
itself is: nobody has to be told, and nothing has to be decoded again. Steps that move no pixels have no `moves`.
"""

import numpy as np

from vitrail.data.chance import Chance, Chances
from vitrail.data.decode import opened
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Training
from vitrail.data.preprocessing import Pair

WHOLE = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))  # the place of a sample that shows all of its picture


def places(prepare: Training, sizes: np.ndarray, chances: Chances) -> np.ndarray:
    """The places of samples of pictures of these sizes (height and width, [B, 2]), float64 [B, 2, 3]."""
    found = np.zeros((len(sizes), 3, 3))
    for row, (index, (height, width)) in enumerate(zip(chances.indices.tolist(), sizes.tolist(), strict=True)):
        chance = Chance(chances.seed, chances.epoch, index, 0)
        top, left, tall, wide = prepare.crop.part(height, width, chance)
        found[row] = ((wide, 0, left), (0, tall, top), (0, 0, 1))
    for stream, step in prepare.changes:  # the last step is the first on the way back
        if hasattr(step, "moves"):
            found = found @ step.moves(prepare.size, chances.of(stream))  # pyright: ignore[reportAttributeAccessIssue]
    return found[:, :2]


def size_of(pictures: Pictures, index: int, turn: bool) -> Pair:
    """Height and width of a picture as training sees it, from its header alone."""
    with pictures.open(index) as image:
        return opened(image, 3, turn).size
