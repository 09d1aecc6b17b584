"""Colours of classes: contrast with the page, and apart from each other also with colour blindness."""

import re
from itertools import combinations

import numpy as np
import pytest

from vitrail.reports.colours import CLASS_COLOURS, RAMP_NAME, RAMP_PARTS, colour_table
from vitrail.reports.document import read_resource
from vitrail.utils.colours import parse_colour

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
MIN_DISTANCE = 15  # in CIELAB; about 2 is just noticeable


def linear(colours) -> np.ndarray:
    values = np.array(colours) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(rgb.clip(0, 1) @ TO_XYZ.T / WHITE).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


def contrast(colour, background) -> float:
    bright, dark = sorted((float(linear(c) @ TO_XYZ[1]) for c in (colour, background)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def background(theme: str) -> tuple[int, int, int]:
    light, dark = re.findall(r"--sheet: (#\w{6})", read_resource("vitrail.reports", "page.css"))
    return parse_colour(light if theme == "light" else dark)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ten_classes_are_distinct_on_both_themes(theme):
    colours = [parse_colour(colour) for colour in CLASS_COLOURS[theme]]
    assert len(colours) == 10
    assert min(contrast(colour, background(theme)) for colour in colours) >= 3
    for name, matrix in BLINDNESS.items():
        seen = lab(linear(colours) @ np.array(matrix).T)
        distance, first, second = min(
            (float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in combinations(range(len(colours)), 2)
        )
        assert distance >= MIN_DISTANCE, (name, CLASS_COLOURS[theme][first], CLASS_COLOURS[theme][second])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_have_contrast(theme):
    low, high = (round(255 * part) for part in RAMP_PARTS[theme])
    rows = colour_table(RAMP_NAME)[low : high + 1].tolist()
    assert min(contrast(row, background(theme)) for row in rows) >= 3
