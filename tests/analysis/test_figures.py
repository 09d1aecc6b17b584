"""Figures: their sizes, that they show what the arrays say, and that no word lies on another."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.analysis.figure_data import made_distances, made_filters, made_positions, made_shown
from vitrail.analysis import extract_positions
from vitrail.analysis.figures import attention, heads, tokens
from vitrail.analysis.figures import attention as explained
from vitrail.analysis.figures import heads as distance
from vitrail.analysis.figures import tokens as patches
from vitrail.analysis.figures import weights as filtered
from vitrail.analysis.figures import weights as placed
from vitrail.analysis.figures.overlay import outline_patch, overlay_heat, resize_blocks, resize_smooth
from vitrail.analysis.figures.sheet import DPI, Sheet, shorten_name
from vitrail.analysis.inspect import plan_figures
from vitrail.analysis.page import page as worded
from vitrail.reports.colours import DIVERGING_CMAP, HEAT_CMAP, SIMILARITY_CMAP, apply_cmap, colour_table, rescale


def pixels_of(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


KINDS = {
    "attention": lambda s: attention.draw_attention(s),
    "attention of a patch": lambda s: attention.draw_attention(s, at=True),
    "rollout": explained.draw_rollout,
    "relevance": explained.draw_relevance,
    "tokens": lambda s: tokens.draw_tokens(s),
    "heads": heads.draw_heads,
    "patches": patches.draw_patches,
}
SIZES = {
    "tiny": {"layers": 12, "heads": 3},
    "large": {"layers": 24, "heads": 16, "between": False},
    "odd": {"layers": 2, "heads": 1, "grid": (3, 7), "patch": 32},
}


@pytest.fixture
def sheets(monkeypatch):
    """Every sheet that is finished, so that its words can be measured."""
    seen = []
    png = Sheet.to_png

    def kept(sheet):
        seen.append(sheet)
        return png(sheet)

    monkeypatch.setattr(Sheet, "to_png", kept)
    return seen


def clashes(sheet: Sheet) -> list[tuple[str, str]]:
    """Pairs of words that lie on each other, and words that leave the sheet."""
    renderer = sheet.canvas.get_renderer()
    words = [text for text in sheet.figure.texts if text.get_text().strip()]
    for axes in sheet.figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            words += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
        words += axes.get_legend().get_texts() if axes.get_legend() else []
    boxes = [(word.get_text(), word.get_window_extent(renderer)) for word in words if word.get_text().strip()]
    width, height = sheet.figure.bbox.width, sheet.figure.bbox.height
    found = [(a, "the edge") for a, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    for index, (a, one) in enumerate(boxes):
        for b, other in boxes[index + 1 :]:
            if one.x0 < other.x1 - 1 and other.x0 < one.x1 - 1 and one.y0 < other.y1 - 1 and other.y0 < one.y1 - 1:
                found.append((a, b))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_word_lies_on_another_and_the_sheet_is_as_large_as_it_says(sheets, kind, size):
    png = KINDS[kind](made_shown("a photograph with a rather long name.jpeg", **SIZES[size]))
    made = pixels_of(png)
    assert clashes(sheets[0]) == []
    assert abs(made.shape[1] - sheets[0].width * DPI) <= 1
    assert abs(made.shape[0] - sheets[0].height * DPI) <= 1
    assert made.shape[1] < 4200  # fits a page at print quality
    assert made.std() > 20
    assert Image.open(io.BytesIO(png)).info["dpi"] == pytest.approx((DPI, DPI), abs=1)


@pytest.mark.parametrize("kind", ["added", "bias", "rotary"])
@pytest.mark.parametrize("grid", [(3, 8), (24, 24)])
def test_positions_of_every_kind_and_grid_are_drawn(sheets, kind, grid):
    drawn = placed.draw_positions(made_positions(kind, grid), "a model")
    assert drawn is not None
    assert clashes(sheets[0]) == []
    assert pixels_of(drawn).std() > 20


def test_a_model_without_positions_has_no_figure():
    assert placed.draw_positions(made_positions("none"), "a model") is None


@pytest.mark.parametrize(("layers", "many"), [(12, 3), (24, 16), (1, 1)])
def test_distances_are_drawn(sheets, layers, many):
    assert pixels_of(distance.draw_distance(made_distances(layers, many), "a model", 16)).std() > 10
    assert clashes(sheets[0]) == []


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_filters_are_drawn_with_any_channels(sheets, channels):
    assert pixels_of(filtered.draw_filters(made_filters(28, 16, channels), "a model")).std() > 10
    assert clashes(sheets[0]) == []


def test_a_bright_spot_of_attention_is_bright_in_its_place_and_nowhere_else():
    shown = made_shown(layers=3, heads=2, grid=(4, 6), patch=8, at=(0, 0))
    attention_maps = shown.trace.attention
    attention_maps[:] = 0.001
    attention_maps[1, 1, 2, 4] = 0.9  # layer 2, head 2
    made = attention.overlay_maps(shown, [1, 2, 3], 60)
    tile_h, tile_w = made.tile
    top, left = round(made.rows[2] - tile_h / 2), round(made.columns[1] - tile_w / 2)
    tile = made.pixels[top : top + tile_h, left : left + tile_w].astype(float).sum(-1)
    block = tile_h // 4
    means = tile.reshape(4, block, 6, block).mean((1, 3))
    assert np.unravel_index(means.argmax(), means.shape) == (2, 4)
    assert means[2, 4] > 1.5 * np.sort(means.ravel())[-2]


def test_figures_change_with_what_was_seen():
    a, b = (made_shown(seed=seed, layers=2, grid=(4, 4)) for seed in (1, 2))
    views = ("rollout", "tokens", "patches")
    for name, draw in plan_figures(a, views).items():
        assert draw() != plan_figures(b, views)[name](), name


def test_the_same_is_drawn_the_same():
    assert attention.draw_attention(made_shown(layers=2)) == attention.draw_attention(made_shown(layers=2))


def test_layers_are_chosen():
    few, all_of_them = (pixels_of(attention.draw_attention(made_shown(), layers)) for layers in ([1, 12], None))
    assert few.shape[1] < all_of_them.shape[1]


def test_only_what_was_seen_becomes_a_figure():
    whole = set(plan_figures(made_shown(), ("attention", "rollout", "tokens", "heads", "patches")))
    assert {"attention-at.png", "relevance.png"} <= whole
    featureless = made_shown(at=None, classes=None)
    assert set(plan_figures(featureless, ("attention", "rollout"))) == {"attention.png", "rollout.png"}
    assert plan_figures(made_shown(), ("filters",)) == {}


def test_names_in_any_letters_are_drawn_and_never_read_as_formulas():
    shown = made_shown("$\\frac{1}{0}$ \x1b[31m 犬 שמלה.png")
    assert pixels_of(explained.draw_rollout(shown)).std() > 20


def test_names_are_shortened_in_the_middle():
    assert shorten_name("a" * 50 + ".jpeg", 20) == "aaaaaaaaa…aaaaa.jpeg"
    assert shorten_name("short") == "short"


def test_the_image_stays_legible_under_a_map():
    image = np.repeat(np.random.default_rng(0).integers(0, 256, (32, 32, 1), dtype=np.uint8), 3, axis=2)
    heat = np.full((32, 32), 0.5)
    drawn, full = (overlay_heat(image, heat, strength=strength).astype(float) for strength in (0.6, 1.0))
    assert (drawn == overlay_heat(image, heat)).all()
    assert np.corrcoef(drawn.mean(-1).ravel(), image[..., 0].ravel())[0, 1] > 0.99
    assert drawn.mean(-1).std() > 1.4 * full.mean(-1).std()
    assert (overlay_heat(image, heat, strength=0.0) == image).all()


def test_blocks_keep_patches_apart_and_soft_maps_do_not_overshoot():
    values = np.eye(3)
    assert (resize_blocks(values, (6, 6)) == np.kron(values, np.ones((2, 2)))).all()
    assert resize_blocks(np.arange(64.0).reshape(8, 8), (4, 4))[0, 0] == pytest.approx(4.5)
    smooth = resize_smooth(values, (30, 30))
    assert smooth.min() >= 0
    assert smooth.max() <= 1


def test_a_patch_is_outlined_around_its_pixels():
    black = np.zeros((40, 40, 3), dtype=np.uint8)
    drawn = outline_patch(black, (0.25, 0.5, 0.25, 0.25))
    assert (drawn[20:30, 10:20] == 0).all()
    assert (drawn[19, 10:20] == 255).all()
    assert (drawn[20:30, 9] == 255).all()
    assert (outline_patch(black, None) == 0).all()


def test_scales_begin_and_end_where_they_say():
    assert rescale(np.array([2.0, 4.0, 6.0])).tolist() == [0, 0.5, 1]
    assert rescale(np.array([3.0, 3.0])).tolist() == [0, 0]
    assert rescale(np.array([-5.0, 5.0]), 0.0).tolist() == [0, 1]
    assert (apply_cmap(np.array([np.nan, 0.0, 1.0]), HEAT_CMAP) == colour_table(HEAT_CMAP)[[0, 0, 255]]).all()


def test_colours_rise_in_lightness_so_that_everybody_can_read_them():
    for name in (HEAT_CMAP, SIMILARITY_CMAP):
        light = colour_table(name) @ np.array([0.299, 0.587, 0.114])
        assert (np.diff(light) > -1).all(), name
    middle = colour_table(DIVERGING_CMAP)[127].astype(int)
    assert middle.min() > 240  # nothing is white


def test_long_tokens_are_found():
    norms = made_shown(layers=4).trace.norms
    far = tokens.find_outliers(norms)
    assert far.sum() == 3
    assert far[2:, -1, -1].all()


def test_the_picture_is_cut_with_every_patch_in_its_place():
    shown = made_shown(grid=(2, 3), patch=10)
    shown.pixels[:] = 0
    shown.pixels[10:, 20:] = 200
    cut = patches.cut_patches(shown, (120, 180), (0, 0, 0)).mean(-1)
    assert cut[70:110, 130:170].min() > 150
    assert cut[:50].max() < 20


def test_of_a_large_grid_only_the_positions_that_are_drawn_are_coloured(monkeypatch):
    counted = []
    monkeypatch.setattr(
        placed, "apply_cmap", lambda values, name: counted.append(values.size) or apply_cmap(values, name)
    )
    found = made_positions(grid=(32, 32))
    tiles = placed.tile_positions(found, 32, gap=0, max_positions=4)
    assert counted == [4 * 4 * 32 * 32]
    expected = apply_cmap(
        rescale(found.similarity[10, 21], -1.0, 1.0), SIMILARITY_CMAP
    )  # second row, third column of 0, 10, 21, 31
    np.testing.assert_array_equal(tiles.pixels[32:64, 64:96], expected)


POSITIONS = {
    "learned1d": "learned without information on the grid",
    "learned2d": "one vector per row and one per column",
    "sincos2d": "fixed sines and cosines",
    "relative": "that one head adds to its attention scores",
    "relative-mlp": "that one head adds to its attention scores",
    "relative1d": "the product of the query with a learned vector",
    "rotary2d": "Queries and keys are rotated",
    "none": "The model has no position embedding",
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_words_about_positions_are_true_of_the_model(kind):
    model = vitrail.build(patch=8, width=24, depth=1, heads=2, image_size=32, position=kind, pool="mean")
    said = worded.make_positions_figure(extract_positions(model), model.position, None).caption
    assert [text for text in dict.fromkeys(POSITIONS.values()) if text in said] == [POSITIONS[kind]]


def test_words_about_filters_are_true_of_the_model():
    assert "the pixels of a patch to a token" in worded.make_filters_figure(made_filters(), b"").caption
    said = worded.make_filters_figure(replace(made_filters(patch=3), source="first convolution"), b"").caption
    assert "of the first convolution, 3×3 pixels" in said


def test_principal_colours_are_alike_for_vectors_that_are():
    vectors = np.zeros((2, 4, 8), dtype=np.float32)
    vectors[:, 2:] = np.arange(8)
    drawn = patches.colour_by_components(vectors).astype(int)
    assert np.ptp(drawn[:, :2], axis=(0, 1)).max() == 0
    assert np.abs(drawn[0, 0] - drawn[0, 3]).max() > 200


def test_a_model_that_judges_each_class_by_itself_is_quoted_so():
    shown = made_shown(classes=3)
    shown.trace.logits[:] = [0.0, 3.0, -3.0]
    assert shown.top_predictions(1)[0][2] == pytest.approx(np.exp(3) / (1 + np.exp(3) + np.exp(-3)))
    several = replace(shown, is_sigmoid=True)
    assert [name for _, name, _ in several.top_predictions()] == ["kind 1", "kind 0", "kind 2"]
    assert [odds for _, _, odds in several.top_predictions()] == pytest.approx([0.9526, 0.5, 0.0474], abs=1e-4)
