"""Two models side by side as figures: a panel for each measure, one to a file, and all of them on one sheet.

The panels are narrow and their words large, so that each can be read on a phone. The models differ in colour, in the shape of
their marks and in their lines, so that no figure depends on colours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitrail.report.markup import plain
from vitrail.views.colours import BLUE, INK, ORANGE, QUIET
from vitrail.views.compared import Comparison, Side
from vitrail.views.sheet import MARGIN, SERIF, Sheet, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, HIGH = 4.8, 4.7  # inches of a panel by itself
DOTTED = (0, (1.2, 2.2))
LEFT, TOP, RIGHT, BOTTOM = 0.72, 1.5, 0.28, 0.68  # inches around its plot


class Style(NamedTuple):
    """How a model is drawn."""

    colour: str
    mark: str
    line: Any
    aside: float  # of its heads' marks, in layers, so that one model's do not hide the other's

    def curve(self) -> dict[str, Any]:
        """What its lines look like."""
        return {
            "color": self.colour,
            "linestyle": self.line,
            "linewidth": 1.9,
            "marker": self.mark,
            "markersize": 5.2,
            "markeredgewidth": 0,
        }


STYLES = (Style(BLUE, "o", "-", -0.14), Style(ORANGE, "^", (0, (5, 1.6)), 0.14))


@dataclass(frozen=True)
class Panel:
    """One measure: its file, what it is called, what its axis says, and how it is drawn."""

    file: str
    title: str
    unit: str
    draw: Callable[["Axes"], None]
    reference: tuple[float, str] | None = None  # a quiet line across, and what it stands for


def panels(found: Comparison) -> list[Panel]:
    """What there is to draw."""
    pixels = "mean attention distance, " + ("pixels" if found.one_size else "% of the picture’s width")
    made = [
        Panel(
            "distance.png",
            "How far attention reaches",
            pixels,
            lambda axes: _distance(axes, found),
            _everywhere(found),
        ),
        Panel(
            "diversity.png",
            "How unlike the heads are",
            "1 − cosine of two heads’ attention",
            lambda axes: _diversity(axes, found),
        ),
        Panel(
            "mutual.png",
            "How unlike the queries are",
            "normalised mutual information, query and key",
            lambda axes: _mutual(axes, found),
        ),
        Panel(
            "frequencies.png",
            "High frequencies by depth",
            f"log amplitude at {_highest(found)}, less that at 0",
            lambda axes: _high(axes, found),
        ),
        Panel(
            "spectrum.png",
            "Frequencies after the last layer",
            "log amplitude, less that of frequency 0",
            lambda axes: _spectrum(axes, found),
        ),
    ]
    probe = found.sides[0].probe
    if probe is not None:
        common = (100 * probe.commonest, "the commonest class")
        title = "What a linear probe reads"
        made.append(Panel("probe.png", title, "top-1 accuracy, %", lambda axes: _probe(axes, found), common))
    return made


def draw(panel: Panel, found: Comparison) -> bytes:
    """A panel by itself, with the models' names."""
    sheet = Sheet(WIDE, HIGH)
    sheet.text(LEFT - 0.42, 0.36, panel.title, size=16, font=SERIF, baseline="center")
    _names(sheet, found, LEFT - 0.42, 0.68)
    _place(sheet, panel, LEFT, TOP, WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM)
    return sheet.png()


def draw_all(found: Comparison) -> bytes:
    """All panels on one sheet, for a slide or a paper."""
    made, columns, head = panels(found), 3, 1.25
    plot, gap, before = (3.35, 2.6), 0.5, LEFT - 0.3  # inches: a plot, what is between two, and what its numbers take
    across, down = before + plot[0] + gap, plot[1] + 1.4
    sheet = Sheet(2 * MARGIN + columns * across - gap, head + 2 * down + 0.05, "Two models, layer by layer")
    _names(sheet, found, MARGIN, 0.72)
    sheet.text(sheet.width - MARGIN, 0.36, about(found), size=9, colour=QUIET, align="right", baseline="center")
    for place in range(2 * columns):
        left, top = MARGIN + place % columns * across, head + place // columns * down + 0.25
        if place >= len(made):
            sheet.text(left, top, "What a linear probe reads", size=13, font=SERIF, baseline="center")
            for row, line in enumerate(wrap(f"Left out: {plain(found.no_probe)}.", 46)):
                sheet.text(left, top + 0.3 + 0.19 * row, line, size=9, colour=QUIET)
            continue
        sheet.text(left, top, made[place].title, size=13, font=SERIF, baseline="center")
        _place(sheet, made[place], left + before, top + 0.48, *plot)
    return sheet.png()


def about(found: Comparison) -> str:
    """How many pictures were looked at, and how many a probe had."""
    counted = f"{found.pictures:,} picture{'' if found.pictures == 1 else 's'}"
    probe = found.sides[0].probe
    return counted if probe is None else f"{counted}  ·  probes fitted to {probe.fitted:,}, judged on {probe.judged:,}"


def _names(sheet: Sheet, found: Comparison, left: float, top: float) -> None:
    """Which line is whose, one under the other."""
    from matplotlib.lines import Line2D

    for side, style in zip(found.sides, STYLES, strict=True):
        across = [(left + along) / sheet.width for along in (0, 0.19, 0.38)]
        down = [1 - top / sheet.height] * 3
        sheet.figure.add_artist(Line2D(across, down, markevery=[1], **style.curve()))
        sheet.text(left + 0.5, top, f"{side.letter}  {shortened(side.name, 44)}", size=9.5, baseline="center")
        top += 0.24


def _place(sheet: Sheet, panel: Panel, left: float, top: float, width: float, height: float) -> None:
    """The plot, with what its axis says over it."""
    axes = sheet.axes(left, top, width, height)
    axes.tick_params(labelsize=9)
    panel.draw(axes)
    axes.set_xlabel(axes.get_xlabel(), fontsize=9.5, color=INK)
    sheet.text(left - 0.42, top - 0.21, panel.unit, size=8.8, colour=QUIET, baseline="center")
    if panel.reference is not None:
        at, word = panel.reference
        axes.axhline(at, color=QUIET, linewidth=1.1, linestyle=DOTTED, zorder=1)
        sheet.text(left + width, top - 0.21, f"····  {word}", size=8.8, colour=QUIET, align="right", baseline="center")


def _depths(found: Comparison, side: Side, first: int) -> np.ndarray:
    """Where the layers from the first on are drawn: by number, or in per cent of the depth where that differs."""
    layers = np.arange(first, side.depth + 1)
    return layers if found.one_depth else 100 * layers / side.depth


def _by_depth(axes: "Axes", found: Comparison, first: int) -> None:
    """The axis across."""
    if found.one_depth:
        depth = found.sides[0].depth
        axes.set_xlim(first - 0.5, depth + 0.5)
        step = next(step for step in (1, 2, 4, 8, 16, 32, 10**6) if depth / step <= 12)
        axes.set_xticks([1, *range(step if step > 1 else 2, depth + 1, step)] if first else range(0, depth + 1, step))
        axes.set_xlabel("layer" if first else "layer (0: before the first)")
    else:
        edge = 50 / min(side.depth for side in found.sides)
        axes.set_xlim((0 if first else -edge), 100 + edge)
        axes.set_xticks([0, 25, 50, 75, 100])
        depths = " and ".join(str(side.depth) for side in found.sides)
        axes.set_xlabel(f"depth, % of {depths} layers")
    axes.grid(axis="x", visible=False)


def _heads(axes: "Axes", found: Comparison, values: Callable[[Side], np.ndarray]) -> float:
    """A dot for each head, a line for their mean; gives the largest value."""
    largest = 0.0
    for side, style in zip(found.sides, STYLES, strict=True):
        each, across = values(side), _depths(found, side, 1)
        step = 1 if found.one_depth else 100 / side.depth
        beside = np.repeat(across + style.aside * step, each.shape[1])
        axes.plot(beside, each.ravel(), style.mark, color=style.colour, markersize=3.4, markeredgewidth=0, alpha=0.38)
        axes.plot(across, each.mean(1), **style.curve())
        if np.isfinite(each).any():
            largest = max(largest, float(np.nanmax(each)))
    _by_depth(axes, found, 1)
    return largest


def _everywhere(found: Comparison) -> tuple[float, str] | None:
    """How far attention reaches that is the same everywhere, where that is one number for both."""
    first, second = (side.profile for side in found.sides)
    same = (first.grid, first.size) == (second.grid, second.size)
    return (first.everywhere, "everywhere alike") if same else None


def _distance(axes: "Axes", found: Comparison) -> None:
    largest = _heads(axes, found, found.reach)
    common = _everywhere(found)
    largest = largest if common is None else max(largest, common[0])
    axes.set_ylim(0, 1.06 * largest or 1.0)


def _diversity(axes: "Axes", found: Comparison) -> None:
    largest = _heads(axes, found, lambda side: side.profile.diversity)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.05 else 0.05)
    alone = [side.letter for side in found.sides if side.heads == 1]
    if alone:
        said = f"{' and '.join(alone)}: one head, nothing to differ from"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, fontsize=9, color=QUIET, ha="center", va="center")


def _mutual(axes: "Axes", found: Comparison) -> None:
    largest = _heads(axes, found, lambda side: side.profile.mutual)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.01 else 0.01)


def _line(axes: "Axes", across: np.ndarray, values: np.ndarray, around: np.ndarray, style: Style) -> None:
    """A curve with its mark at every point, and a pale band around it, [n, 2]."""
    axes.fill_between(across, around[:, 0], around[:, 1], color=style.colour, alpha=0.13, linewidth=0)
    axes.plot(across, values, **style.curve())


def _high(axes: "Axes", found: Comparison) -> None:
    for side, style in zip(found.sides, STYLES, strict=True):
        spread = side.profile.spectrum_spread[:, -1]
        around = np.stack((side.high - spread, side.high + spread), 1)
        _line(axes, _depths(found, side, 0), side.high, around, style)
    _by_depth(axes, found, 0)


def _highest(found: Comparison) -> str:
    """The highest frequency that both have, as it is written."""
    highest = {round(float(side.profile.frequencies[-1]), 2) for side in found.sides}
    return "frequency π" if highest == {1.0} else "the highest frequency"


def _spectrum(axes: "Axes", found: Comparison) -> None:
    for side, style in zip(found.sides, STYLES, strict=True):
        last, spread = side.profile.spectrum[-1], side.profile.spectrum_spread[-1]
        _line(axes, side.profile.frequencies, last, np.stack((last - spread, last + spread), 1), style)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼ π", "½ π", "¾ π", "π"])
    axes.set_xlabel("frequency, for a step of one patch")


def _probe(axes: "Axes", found: Comparison) -> None:
    for side, style in zip(found.sides, STYLES, strict=True):
        assert side.probe is not None
        _line(axes, _depths(found, side, 0), 100 * side.probe.top1, 100 * side.probe.intervals, style)
    _by_depth(axes, found, 0)
    most = max(float(side.probe.intervals.max()) for side in found.sides if side.probe is not None)
    axes.set_ylim(0, min(102.0, 106 * most))
