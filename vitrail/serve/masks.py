"""Masks and segments of served models, encoded in the worker: run lengths or a PNG are much smaller than maps of logits.

K classes, Q queries of N values, H×W pixels of an image, h×w of the model.
"""

from typing import Any

import numpy as np
import torch

from vitrail.deploy.predict.masks import describe_classes
from vitrail.deploy.predict.panoptic import describe_segments
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.deploy.runtimes.masks import class_colours
from vitrail.deploy.runtimes.panoptic import PanopticReader
from vitrail.reports.masks import encode_palette_png, format_colour
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


def encode_segments(
    packed: np.ndarray, size: tuple[int, int], reader: PanopticReader, contract: ModelContract
) -> dict[str, Any]:
    """Return the segments of packed queries [Q, N] at the size of their image, as an object for JSON."""
    try:
        output = reader.find(packed, size, MAX_MASK_VALUES)
    except ValueError as error:
        raise RequestRefused(413, str(error)) from None
    colours = class_colours(contract)
    segments = [
        item | {"colour": format_colour(colours[segment.index])}
        for item, segment in zip(describe_segments(output.ids, output.segments), output.segments, strict=True)
    ]
    return {"height": size[0], "width": size[1], "segments": segments}
