"""Pictures for those who have none at hand: flat colours, slopes, waves, boxes and noise, always the same ones.

They show whether two runtimes compute the same. They do not show how good a model is.
"""

import numpy as np

from vitrail.data.preprocessing import Preprocessing


def generated(preprocessing: Preprocessing, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, C, H, W]."""
    chance = np.random.default_rng(seed)
    height, width = preprocessing.size
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pictures = np.empty((count, preprocessing.channels, height, width), np.uint8)
    for place in range(count):
        for channel in range(preprocessing.channels):
            slope, wave = chance.normal(size=2), chance.uniform(2, 40, size=2)
            values = 128 + 60 * (slope[0] * y + slope[1] * x)
            values += chance.uniform(0, 50) * np.sin(wave[0] * y + wave[1] * x + chance.uniform(0, 6))
            values += chance.uniform(0, 40) * chance.normal(size=values.shape)
            pictures[place, channel] = values.clip(0, 255)
        for _ in range(chance.integers(1, 5)):  # boxes in one colour over all channels
            top, left = chance.integers(height), chance.integers(width)
            below, right = top + 1 + chance.integers(height), left + 1 + chance.integers(width)
            pictures[place, :, top:below, left:right] = chance.integers(256, size=(preprocessing.channels, 1, 1))
    return pictures
