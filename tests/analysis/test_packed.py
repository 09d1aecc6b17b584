"""What a page holds of the arrays: bytes with a bounded error."""

import base64
import json

import numpy as np
import pytest

from tests.analysis.figure_data import made_shown
from vitrail.analysis.heads import coarsen_grid
from vitrail.analysis.page.data import choose_cells, encode_image, pack_image, quantise_rows


def unpacked(rows, *shape):
    codes = np.frombuffer(base64.b64decode(rows["codes"]), dtype=np.uint8).reshape(shape)
    largest = np.frombuffer(base64.b64decode(rows["largest"]), dtype="<f4").reshape(shape[:-1])
    return codes / 255 * largest[..., None]


def test_a_value_is_off_by_half_a_step_of_its_row_at_most():
    values = np.random.default_rng(0).exponential(size=(3, 4, 500)).astype(np.float32)
    codes, largest = quantise_rows(values)
    assert codes.dtype == np.uint8
    back = codes / 255 * largest[..., None].astype(np.float64)
    assert (np.abs(back - values) <= largest[..., None] / 510 * (1 + 1e-4)).all()


def test_a_row_of_zeros_stays_zeros():
    codes, largest = quantise_rows(np.zeros((2, 5)))
    assert not codes.any()
    assert not largest.any()


def test_attention_between_patches_is_on_the_page():
    shown = made_shown(layers=2, heads=3, grid=(4, 5), patch=8)
    packed = pack_image(shown)
    between = shown.trace.between.astype(np.float32)
    back = unpacked(packed["between"], 2, 3, 20, 20)
    assert np.abs(back - between).max() <= between.max() / 510 * 1.01
    assert (packed["grid"], packed["cells"], packed["side"]) == ([4, 5], [4, 5], 1)


def test_norms_and_similarity_keep_their_minimum():
    shown = made_shown(layers=2, heads=1, grid=(4, 5), patch=8)
    packed = pack_image(shown)
    for name in ("norms", "similar"):
        values = getattr(shown.trace, name).reshape(3, 20)
        back = unpacked(packed[name], 3, 20) + np.array(packed[name]["low"])[:, None]
        assert np.abs(back - values).max() <= np.ptp(values, axis=1).max() / 500


@pytest.mark.parametrize("grid", [(9, 9), (10, 10), (64, 64), (20, 33), (7, 50)])
@pytest.mark.parametrize("cells", [4, 9, 16, 256])
def test_the_side_of_a_cell_is_found_again_from_the_grid(grid, cells):
    cells_grid, side = coarsen_grid(grid, cells)
    packed = pack_image(made_shown(layers=1, heads=1, grid=grid, patch=2, coarse=cells_grid))
    assert packed["side"] == side


def test_what_was_not_looked_at_is_not_there_and_all_of_it_is_json():
    packed = pack_image(made_shown(layers=1, heads=1, grid=(3, 3), at=None, classes=None))
    assert not {"relevance", "similar", "target"} & set(packed)
    assert packed["predictions"] == []
    assert json.loads(json.dumps(packed)) == packed


@pytest.mark.parametrize("pictures", [1, 4, 12, 60])
@pytest.mark.parametrize(("layers", "heads", "side"), [(12, 3, 14), (12, 12, 14), (12, 12, 64), (32, 16, 16)])
def test_attention_of_all_pictures_fits_on_a_page(pictures, layers, heads, side):
    cells = choose_cells(pictures, layers, heads, (side, side))
    assert 16 <= cells <= 256
    a, b = coarsen_grid((side, side), cells)[0]
    between = layers * heads * ((a * b) ** 2 + 4 * a * b)
    rest = side * side * (layers * heads + 5 * (layers + 1))
    assert cells == 16 or pictures * (between + rest) * 4 / 3 < 40_000_000


def test_few_pictures_keep_the_grid_of_patches():
    assert coarsen_grid((14, 14), choose_cells(4, 12, 12, (14, 14)))[1] == 1
    assert coarsen_grid((14, 14), choose_cells(12, 12, 12, (14, 14)))[1] == 2


def test_small_pictures_stay_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assert encode_image(pixels).startswith("data:image/png;base64,")
    assert encode_image(np.zeros((300, 300, 3), dtype=np.uint8)).startswith("data:image/jpeg;base64,")
