"""Colours of classes, overlays, outlines, legends and palette files."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vitrail.metrics.segmentation import IGNORED
from vitrail.reports.charts.canvas import LIGHT
from vitrail.reports.masks import (
    FIRST_COLOURS,
    append_legend,
    choose_colours,
    encode_palette_png,
    find_outline,
    format_colour,
    make_palette,
    measure_shares,
    overlay_mask,
    parse_colour,
    render_legend,
    to_oklab,
)

# Linear sRGB as seen with complete protanopia and deuteranopia (Machado et al. 2009, table 1).
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def see(colours: np.ndarray, vision: str) -> np.ndarray:
    share = np.asarray(colours) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ np.array(VISION[vision]).T
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def smallest_distance(colours: np.ndarray) -> float:
    lab = to_oklab(colours)
    distance = np.linalg.norm(lab[:, None] - lab, axis=2)
    return float(distance[~np.eye(len(lab), dtype=bool)].min())


@pytest.mark.parametrize("vision", VISION)
def test_the_first_colours_are_distinct_with_colour_blindness(vision: str) -> None:
    assert smallest_distance(see(np.array(make_palette(8)), vision)) > 0.07  # a just noticeable difference is 0.02


def test_palettes_are_distinct_and_stable_by_index() -> None:
    largest = make_palette(255)
    assert len(set(largest)) == 255
    assert smallest_distance(np.array(make_palette(32))) > 0.06
    for count in (0, 1, 8, 9, 40):
        assert make_palette(count) == largest[:count]
    assert largest[:8] == tuple(map(parse_colour, FIRST_COLOURS))


def test_oklab_of_known_colours() -> None:
    """White and red as published: L 1, and L 0.628, a 0.225, b 0.126."""
    lab = to_oklab(np.array([[255, 255, 255], [255, 0, 0]]))
    np.testing.assert_allclose(lab, [[1, 0, 0], [0.628, 0.225, 0.126]], atol=5e-4)


def test_colours_have_the_hues_of_the_charts() -> None:
    for ours, charts in zip(make_palette(5), LIGHT.colours, strict=False):
        a, b = to_oklab(np.array([ours, parse_colour(charts)]))[:, 1:]
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.9


def test_background_is_grey_and_does_not_move_the_other_colours() -> None:
    with_background = choose_colours(["cat", "Background", "dog"])
    assert (with_background[0], with_background[2]) == make_palette(3)[::2]
    assert format_colour(with_background[1]) == LIGHT.colours[-1]


@pytest.mark.parametrize("text", ["#12345", "123456", "#12345g", "red", "#+12345", "#1234567"])
def test_texts_that_are_no_colours_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a colour must be #rrggbb, got "):
        parse_colour(text)


def test_overlay_mixes_the_colour_and_leaves_ignored_and_hidden_pixels() -> None:
    image = np.random.default_rng(0).integers(256, size=(2, 4, 3), dtype=np.uint8)
    mask = np.array([[0, 0, 1, IGNORED]] * 2, np.uint8)
    colours = ((255, 0, 0), (0, 255, 0))
    drawn = overlay_mask(image, mask, colours, 0.25, outline=0, hidden=[1])
    np.testing.assert_allclose(drawn[:, :2], 0.75 * image[:, :2] + 0.25 * np.array(colours[0]), atol=0.51)
    np.testing.assert_array_equal(drawn[:, 2:], image[:, 2:])
    np.testing.assert_array_equal(overlay_mask(image, mask, colours, 0, outline=0), image)
    assert (overlay_mask(image, mask, colours, 1, outline=0)[:, 2] == colours[1]).all()


def test_edges_are_lines_in_full_colour_on_the_drawn_side() -> None:
    image, mask = np.zeros((40, 40, 3), np.uint8), np.zeros((40, 40), np.uint8)
    mask[:, 20:], mask[20:, 20:] = 1, IGNORED
    drawn = overlay_mask(image, mask, ((200, 100, 0), (0, 0, 200)), 0.5)
    assert drawn[5, [18, 19, 20, 21]].tolist() == [[100, 50, 0], [200, 100, 0], [0, 0, 200], [0, 0, 100]]
    assert (drawn[20:, 20:] == 0).all()


@pytest.mark.parametrize(("width", "columns"), [(1, [4]), (2, [3, 4]), (3, [3, 4, 5]), (4, [2, 3, 4, 5])])
def test_lines_lie_between_two_regions(width: int, columns: list[int]) -> None:
    mask = np.zeros((3, 8), np.uint8)
    mask[:, 4:] = 7
    assert np.flatnonzero(find_outline(mask, width)[1]).tolist() == columns
    np.testing.assert_array_equal(find_outline(mask.T, width), find_outline(mask, width).T)
    assert not find_outline(np.full((5, 5), 3, np.uint8), width).any()


@pytest.mark.parametrize(
    ("shape", "count", "opacity", "message"),
    [
        ((4, 5, 3), 2, 0.5, r"the image is \[4, 5, 3\] and the mask \[4, 4\]"),
        ((4, 4, 3), 2, 1.5, "opacity must be 0 to 1, got 1.5"),
        ((4, 4, 3), 256, 0.5, "a mask has at most 255 classes, got 256 colours"),
    ],
)
def test_overlays_that_make_no_sense_are_refused(shape, count, opacity, message) -> None:
    with pytest.raises(ValueError, match=message):
        overlay_mask(np.zeros(shape, np.uint8), np.zeros((4, 4), np.uint8), ((0, 0, 0),) * count, opacity)


@pytest.mark.parametrize("classes", [1, 3, 255])
def test_palette_files_hold_the_values_and_the_colours(classes: int) -> None:
    mask = np.random.default_rng(0).integers(classes, size=(9, 7)).astype(np.uint8)
    mask[0, :2], colours = (classes - 1, IGNORED), make_palette(classes)
    with Image.open(BytesIO(encode_palette_png(mask, colours))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "P", (7, 9))
        np.testing.assert_array_equal(np.asarray(image), mask)
        assert image.convert("RGB").getpixel((0, 0)) == colours[classes - 1]
        assert image.convert("RGB").getpixel((1, 0)) == (229, 225, 216)


def test_palette_files_of_a_mask_that_is_not_contiguous() -> None:
    mask = np.arange(12, dtype=np.uint8).reshape(3, 4).T
    with Image.open(BytesIO(encode_palette_png(mask, make_palette(12)))) as image:
        np.testing.assert_array_equal(np.asarray(image), mask)


def test_shares_are_of_counted_pixels_and_ordered() -> None:
    assert measure_shares(np.array([[2, 2, 0, IGNORED, 2]], np.uint8)) == {2: 0.75, 0: 0.25}
    assert measure_shares(np.full((2, 2), IGNORED, np.uint8)) == {}


def test_legend_names_the_classes_and_escapes_them() -> None:
    labels, colours = ["<b>cat</b>", "dog"], ((255, 0, 0), (0, 255, 0))
    whole = render_legend(labels, colours)
    assert "&lt;b&gt;cat&lt;/b&gt;" in whole
    assert "background:#ff0000" in whole
    assert "%" not in whole.replace("100%", "")
    some = render_legend(labels, colours, {1: 0.25})
    assert "cat" not in some
    assert "25.0" in some


@pytest.mark.parametrize("width", [24, 400])
def test_a_legend_is_added_below_the_image(width: int) -> None:
    image, colours = np.full((100, width, 3), 7, np.uint8), make_palette(30)
    labels = [f"class with a rather long name {k}" for k in range(30)]
    drawn = append_legend(image, labels, colours, dict.fromkeys(range(30), 1 / 30))
    np.testing.assert_array_equal(drawn[:100], image)
    assert drawn.shape[1:] == (width, 3)
    below = {tuple(pixel) for pixel in drawn[100:].reshape(-1, 3).tolist()}
    assert set(colours) <= below
    np.testing.assert_array_equal(append_legend(image, labels, colours, {}), image)
