"""Two models side by side: figures, table and page from numbers that are known."""

import json

import numpy as np
import pytest

from tests.analysis.figure_data import made_comparison
from tests.analysis.test_figures import clashes, pixels_of, sheets  # noqa: F401 (a fixture)
from vitrail.analysis.comparison import comparison_to_arrays, comparison_to_dict
from vitrail.analysis.figures import comparison
from vitrail.analysis.figures.sheet import DPI
from vitrail.analysis.page.comparison import build_rows, format_model_comparison, render_model_comparison_page
from vitrail.reports.colours import BLUE, ORANGE

KINDS = {
    "alike": {"depths": (12, 12), "heads": (3, 3)},
    "other depths and sizes": {"depths": (12, 24), "heads": (6, 16), "sizes": ((224, 224), (384, 384))},
    "tiny, without a probe": {"depths": (1, 2), "heads": (1, 2), "probe": False},
    "deep": {"depths": (48, 48), "heads": (16, 16), "probe": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_panel_is_drawn_and_no_word_lies_on_another(sheets, kind):  # noqa: F811
    found = made_comparison(**KINDS[kind])
    made = comparison.build_panels(found)
    assert ("probe.png" in {panel.file for panel in made}) == KINDS[kind].get("probe", True)
    for panel in made:
        assert pixels_of(comparison.draw_panel(panel, found)).std() > 8
        assert clashes(sheets[-1]) == [], panel.file
        assert sheets[-1].width < 5  # inches: words of 9 points are legible when it is as wide as a phone
        for axes in sheets[-1].figure.axes:
            words = (*sheets[-1].figure.texts, *axes.texts, axes.xaxis.label, *axes.get_xticklabels())
            assert min(word.get_fontsize() for word in words) >= 8.8
    whole = pixels_of(comparison.draw_comparison(found))
    assert clashes(sheets[-1]) == []
    assert abs(whole.shape[1] - sheets[-1].width * DPI) <= 1
    assert whole.shape[1] < 4200


def test_the_two_models_are_told_apart_without_colours():
    first, second = comparison.MODEL_STYLES
    assert (first.colour, second.colour) == (BLUE, ORANGE)
    assert first.marker != second.marker
    assert first.line != second.line
    grey = [
        [int(style.colour[k : k + 2], 16) for k in (1, 3, 5)] @ np.array([0.299, 0.587, 0.114])
        for style in (first, second)
    ]
    assert abs(grey[0] - grey[1]) > 25  # of 255


def test_curves_are_drawn_where_the_numbers_are(sheets):  # noqa: F811
    found = made_comparison(depths=(4, 8))
    for panel in comparison.build_panels(found):
        comparison.draw_panel(panel, found)
        lines = [line for line in sheets[-1].figure.axes[0].lines if line.get_linewidth() == 1.9]
        assert len(lines) == 2
        for side, line in zip(found.sides, lines, strict=True):
            layers = np.arange(1, side.depth + 1)
            across, up = {
                "distance.png": (layers / side.depth * 100, side.profile.distance.mean(1)),
                "diversity.png": (layers / side.depth * 100, side.profile.diversity.mean(1)),
                "mutual.png": (layers / side.depth * 100, side.profile.mutual.mean(1)),
                "frequencies.png": (np.arange(side.depth + 1) / side.depth * 100, side.profile.spectrum[:, -1]),
                "spectrum.png": (side.profile.frequencies, side.profile.spectrum[-1]),
                "probe.png": (np.arange(side.depth + 1) / side.depth * 100, 100 * side.probe.top1),
            }[panel.file]
            np.testing.assert_allclose(line.get_xdata(), across)
            np.testing.assert_allclose(line.get_ydata(), up)


def test_a_name_with_signs_of_formulas_is_written_as_it_is(sheets):  # noqa: F811
    found = made_comparison(names=("a$x_1$\n", "^{b}$"))
    comparison.draw_panel(comparison.build_panels(found)[0], found)
    assert any("a$x_1$⏎" in text.get_text() for text in sheets[-1].figure.texts)


def test_the_table_has_a_row_for_each_layer_and_both_models_beside_each_other():
    found = made_comparison(depths=(3, 3))
    made = build_rows(found)
    assert [row[0] for row in made] == ["0", "1", "2", "3"]
    assert made[0][1:7] == ["·"] * 6  # before the first layer there is no attention
    assert float(made[2][1]) == pytest.approx(found.sides[0].profile.distance[1].mean(), abs=0.5)
    assert float(made[2][2]) == pytest.approx(found.sides[1].profile.distance[1].mean(), abs=0.5)
    assert float(made[3][10]) == pytest.approx(100 * found.sides[1].probe.top1[3], abs=0.05)
    assert "−" in made[1][7]
    lines = format_model_comparison(found)
    assert max(map(len, lines)) < 110
    assert max(len(line) for line in lines[2:10]) < 80
    assert any("120 test images" in line for line in lines)
    assert "best layer of A: 3 of 3, top-1 accuracy 75.0 % (66.6–81.9)" in lines
    assert "accuracy of always predicting the most frequent class: 12.0 %" in lines


def test_where_depths_differ_rows_are_relative_and_what_a_model_has_not_is_left_open():
    made = build_rows(made_comparison(depths=(2, 3)))
    assert [row[0] for row in made] == ["0 %", "33 %", "50 %", "67 %", "100 %"]
    assert [(row[1] != "·", row[2] != "·") for row in made] == [
        (False, False),
        (False, True),
        (True, False),
        (False, True),
        (True, True),
    ]


def test_where_sizes_differ_distances_are_shares_of_the_width():
    found = made_comparison(sizes=((224, 224), (32, 64)))
    np.testing.assert_allclose(found.comparable_distance(found.sides[1]), 100 * found.sides[1].profile.distance / 64)
    assert "% of the image width" in comparison.build_panels(found)[0].unit
    assert any("% of width" in line for line in format_model_comparison(found))


def test_numbers_for_machines_are_all_of_them_and_json():
    found = made_comparison(depths=(2, 3), heads=(1, 2))
    told = json.loads(json.dumps(comparison_to_dict(found), allow_nan=False))
    first, second = told["models"]
    assert first["diversity"]["heads"] == [[None], [None]]  # one head has no other to differ from
    assert np.shape(second["mutual_information"]["heads"]) == (3, 2)
    assert second["depth"] == [0, 0.333333, 0.666667, 1]
    np.testing.assert_allclose(second["spectrum"]["high"], found.sides[1].profile.spectrum[:, -1], rtol=1e-4)
    assert len(second["probe"]["intervals"]) == 4
    assert all(
        low <= top <= high
        for top, (low, high) in zip(second["probe"]["top1"], second["probe"]["intervals"], strict=True)
    )
    stored = comparison_to_arrays(found)
    np.testing.assert_array_equal(stored["B.distance"], found.sides[1].profile.distance)
    assert stored["A.probe"].shape == (3,)


def test_the_page_holds_everything_and_asks_for_nothing():
    found = made_comparison(names=("<b>mae</b>", "dino"))
    panels = comparison.build_panels(found)
    text = render_model_comparison_page(found, panels, {panel.file: b"png" for panel in panels})
    assert "<b>mae" not in text
    assert "&lt;b&gt;mae" in text
    assert text.count("<img") == 6
    assert "http://" not in text
    assert "https://" not in text
    assert all(f'id="{part}"' in text for part in ("distance", "heads", "spectrum", "probe", "numbers"))
    without = made_comparison(probe=False)
    panels = comparison.build_panels(without)
    assert "Skipped: no labels." in render_model_comparison_page(
        without, panels, {panel.file: b"png" for panel in panels}
    )
