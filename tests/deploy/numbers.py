"""A tiny regression model, and images whose numbers it was not trained on."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.objectives.regression import unscale_outputs

TARGETS = ("price", "age")
MEAN, STD = (2_000_000.0, 40.0), (300_000.0, 12.5)


def save_regressor(path: Path) -> Path:
    """Save a model of two targets with different units."""
    torch.manual_seed(0)
    model = vitrail.build(patch=8, width=24, depth=2, heads=2, classes=2, image_size=32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    unscale_outputs(model, MEAN, STD)
    pipeline, statistics = Preprocessing((32, 32), (32, 32)), {"mean": MEAN, "std": STD}
    vitrail.save(model, path, labels=TARGETS, preprocessing=pipeline, targets=statistics)
    return path


def write_table(root: Path, count: int = 12) -> Path:
    """Write photographs of noise and a CSV of their numbers."""
    rng, lines = np.random.default_rng(0), ["path,price,age"]
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(root / f"{number:03}.png")
        price, age = (rng.normal(mean, std) for mean, std in zip(MEAN, STD, strict=True))
        lines.append(f"{number:03}.png,{price:.0f},{age:.2f}")
    (root / "table.csv").write_text("\n".join(lines) + "\n")
    return root / "table.csv"
