"""The 1,797 handwritten digits that come with the package: real 8×8 scans, in 10 classes.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, CC BY 4.0. These are the pictures of its test file, as scikit-learn's `load_digits` gives them.
`digits.png` holds them in that order, 40 to a row; a pixel's value v of 0 to 16 is written as round(255 v / 16), which
round(16 p / 255) undoes. The labels are beside them in `digits.txt`, one character each.
"""

from importlib.resources import files

import numpy as np
from PIL import Image

from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import parts
from vitrail.data.sources.pixels import Pixels

FRACTIONS: parts.Fractions = (0.7, 0.15, 0.15)
SIDE, ACROSS = 8, 40


def read(where: str, fractions: parts.Fractions | None, progress: parts.Progress | None) -> Dataset:
    """The digits, in three parts by content."""
    labels = (files("vitrail.data") / "digits.txt").read_text(encoding="ascii").split()
    targets = np.array([int(label) for label in "".join(labels)], dtype=np.int64)
    with (files("vitrail.data") / "digits.png").open("rb") as file, Image.open(file) as sheet:
        pixels = np.asarray(sheet)  # [45·8, 40·8]
    tiles = pixels.reshape(-1, SIDE, ACROSS, SIDE).swapaxes(1, 2).reshape(-1, SIDE, SIDE)[: len(targets)]
    store = Pixels(np.ascontiguousarray(tiles), ((0, "digits"),))
    pictures = Pictures(store, np.arange(len(targets)), targets, tuple("0123456789"), "train")
    shares = parts.checked(fractions or FRACTIONS)
    return Dataset(where, "digits", parts.divided(pictures, shares, progress), (parts.in_words(shares),))
