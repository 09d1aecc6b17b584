"""Views in a terminal: as wide as it is, in as many colours as it has."""

import io
import re

import numpy as np
import pytest

from tests.analysis.figure_data import made_distances, made_filters, made_positions, made_shown
from vitrail.analysis.figures import terminal as in_terminal
from vitrail.analysis.figures.terminal import detect_colour_depth, nearest_colour_index, render_dot_plot, render_pixels

ESCAPES = re.compile(r"\033\[[0-9;]*m")


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "depth"),
    [
        (Screen(), {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "true"),
        (Screen(), {"TERM": "xterm-direct"}, "true"),
        (Screen(), {"TERM": "xterm-256color"}, "256"),
        (Screen(), {"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "none"),
        (Screen(), {"TERM": "dumb", "COLORTERM": "truecolor"}, "none"),
        (Screen(), {}, "none"),
        (io.StringIO(), {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "none"),
    ],
)
def test_colours_are_those_that_the_terminal_has(stream, environment, depth):
    assert detect_colour_depth(stream, environment) == depth


def test_a_character_is_two_pixels():
    pixels = np.array([[[255, 0, 0], [0, 0, 255]], [[0, 255, 0], [0, 255, 0]]], dtype=np.uint8)
    assert render_pixels(pixels, 80, "true") == ["\033[38;2;255;0;0m\033[48;2;0;255;0m▀\033[38;2;0;0;255m▀\033[0m"]
    assert render_pixels(pixels, 80, "256") == ["\033[38;5;196m\033[48;5;46m▀\033[38;5;21m▀\033[0m"]


def test_without_colours_light_is_dense():
    pixels = np.repeat(np.array([[0, 140, 255]], dtype=np.uint8)[..., None], 3, axis=2)
    assert render_pixels(np.repeat(pixels, 2, axis=0), 80, "none") == [" +@"]


@pytest.mark.parametrize("value", [(0, 0, 0), (255, 255, 255), (128, 128, 128), (95, 135, 215), (200, 10, 60)])
def test_the_nearest_of_256_colours_is_near(value):
    index = nearest_colour_index(list(value))
    levels = (0, 95, 135, 175, 215, 255)
    cube = [levels[(index - 16) // 36 % 6], levels[(index - 16) // 6 % 6], levels[(index - 16) % 6]]
    colour = [8 + 10 * (index - 232)] * 3 if index >= 232 else cube
    assert max(abs(a - b) for a, b in zip(colour, value, strict=True)) <= 40


@pytest.mark.parametrize(("depth", "wide"), [("true", 160), ("256", 79), ("none", 40)])
@pytest.mark.parametrize(
    "view", [view for view in in_terminal.TERMINAL_VIEWS if view not in ("distance", "positions", "filters")]
)
def test_every_view_of_a_picture_fits_and_has_a_legend(view, wide, depth):
    for size in (
        {"layers": 12, "heads": 3},
        {"layers": 24, "heads": 16, "between": False},
        {"layers": 2, "heads": 2, "grid": (3, 9)},
    ):
        lines = in_terminal.render_image_view(made_shown(**size), view, wide, depth)
        assert len(lines) > 2
        assert max(len(ESCAPES.sub("", line)) for line in lines[:-1]) <= wide
        assert "\033" not in lines[-1]
        if depth == "none":
            assert not any("\033" in line for line in lines)


@pytest.mark.parametrize(
    "found",
    [made_distances(), made_filters(), *(made_positions(kind) for kind in ("added", "bias", "rotary"))],
    ids=lambda found: type(found).__name__,
)
def test_every_view_of_a_model_fits(found):
    for wide in (40, 79):
        lines = in_terminal.render_model_view(found, wide, "true")
        assert max(len(ESCAPES.sub("", line)) for line in lines[:-1]) <= wide
    assert in_terminal.render_model_view(made_positions("none"), 79, "true")[0].startswith(
        "this model has no position embedding"
    )


def test_dots_lie_where_the_values_do():
    lines = render_dot_plot(np.array([[0.0, 50.0], [100.0, 100.0]]), 61, "pixels")
    room = lines[0][10:-8]
    assert [k for k, cell in enumerate(room) if cell == "●"] == [0, 19]
    assert lines[0].endswith("25.0")
    assert "100 pixels" in lines[-1]


def test_an_axis_of_zeros_can_be_read():
    lines = render_dot_plot(np.zeros((2, 3)), 61, "pixels")
    assert lines[-1].split() == ["0", "1", "pixels", "mean"]
    assert lines[0][10] == "●"
