"""Masks of served segmentation models, encoded in the worker: run lengths or a PNG are much smaller than maps of logits.

K classes, H×W pixels of an image, h×w of the model.
"""

from typing import Any

import numpy as np
import torch

from vitrail.deploy.predict.masks import describe_classes
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.deploy.runtimes.masks import class_colours
from vitrail.reports.masks import encode_palette_png
from vitrail.serve.limits import RequestRefused
from vitrail.tasks.masks import predict_mask

MAX_MASK_VALUES = 2**30  # classes × pixels of a mask: a few seconds of work


def encode_mask(logits: np.ndarray, size: tuple[int, int], contract: ModelContract, as_png: bool) -> Any:
    """Return the mask of logits [K, h, w] at the size of its image, as a palette PNG or as an object for JSON."""
    height, width = size
    if len(logits) * height * width > MAX_MASK_VALUES:
        limit = MAX_MASK_VALUES / len(logits) / 1e6
        raise RequestRefused(
            413, f"{width}×{height} pixels, the limit for {len(logits)} classes is {limit:.1f} million"
        )
    mask, colours = predict_mask(torch.from_numpy(logits), size), class_colours(contract)
    if as_png:
        return encode_palette_png(mask, colours)
    return {"height": height, "width": width, "classes": describe_classes(mask, contract.labels or (), colours)}
