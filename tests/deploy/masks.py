"""A tiny segmentation model with random weights, and images for it."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.eomt import EoMT
from vitrail.models.registry import build_segmenter
from vitrail.models.segmenter import DecoderSlot, Segmenter

LABELS = ("sky", "road", "car", "été")
COLOURS = ("#102030", "#ff0000", "#00ff00", "#0000ff")
SIDE = 32


def segmenter(decoder: str | DecoderSlot = "linear", labels: tuple[str, ...] = LABELS) -> Segmenter:
    """Return a model whose masks have several classes."""
    torch.manual_seed(0)
    options = {"patch": 8, "width": 32, "depth": 2, "heads": 2, "image_size": (SIDE, SIDE)}
    model = build_segmenter(decoder=decoder, classes=len(labels), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.labels = labels
    model.preprocessing = Preprocessing((SIDE, SIDE), (SIDE, SIDE), fit="squash", turn=True)
    return model.eval()


def save_segmenter(path: Path) -> Path:
    """Save such a model with its colours."""
    vitrail.save(segmenter(), path, colours=list(COLOURS))
    return path


def photos(root: Path, count: int = 6, size: tuple[int, int] = (60, 96)) -> Path:
    """Create images of large squares, every other one in a folder below."""
    rng = np.random.default_rng(0)
    for number in range(count):
        cells = rng.integers(0, 256, (6, 8, 3))
        pixels = np.kron(cells, np.ones((size[0] // 6, size[1] // 8, 1))).astype(np.uint8)
        path = root / ("below" if number % 2 else "") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def eomt_segmenter() -> Segmenter:
    """Return an EoMT whose queries are confident, so that images have several segments."""
    model = segmenter(EoMT(queries=12, blocks=1, upscales=1))
    decoder = model.require_queries("a test")
    with torch.no_grad():
        decoder.classifier.weight.mul_(6)
        decoder.queries.mul_(2)
    return model


def save_eomt(path: Path, **card: object) -> Path:
    """Save such a model."""
    vitrail.save(eomt_segmenter(), path, colours=list(COLOURS), **card)
    return path
