"""A comparison of two models as one page: the figures with how to read them, and every number below."""

import base64
from collections.abc import Mapping

from vitrail.report.markup import Markup, h, name, table
from vitrail.report.page import document
from vitrail.views.compared import READ, Comparison
from vitrail.views.comparison import Panel
from vitrail.views.comparison_table import about, columns, rows, told

Figures = Mapping[str, bytes]  # PNG by file
DISTANCE = (
    "Each small mark is a head: the mean distance between a patch and what it looks at. The lines are the means of the heads, "
    "and the dotted line is attention that looks everywhere alike. Park et al. found that models which learnt from contrasts "
    "look far in their later layers, and those which learnt to fill in masked patches look nearby."
)
ALIKE = (
    "First, how unlike the attention of the heads is: 0 where all heads look at the same. Then, how much of what is looked at "
    "depends on who looks, as mutual information of query and key: 0 where all patches look at the same. Near 0, attention has "
    "collapsed into one map for everybody."
)
FREQUENCIES = (
    "Token maps as waves: how much weaker their highest frequency is than their mean, layer by layer; then all frequencies after "
    "the last layer. Higher means more detail and texture, lower means smoother maps and more of shapes. Bands are one standard "
    "deviation over pictures."
)
PROBE = (
    f"A linear classifier, fitted to the {READ} of each layer. Where the curve is highest, classes are easiest to read. Bands "
    "are 95 % intervals (Wilson) for the pictures that it was judged on; they do not say how far another draw of training "
    "pictures would move it."
)
PARTS = (
    ("distance", "Distance", "How far attention reaches", DISTANCE, ("distance.png",)),
    ("heads", "Diversity", "How unlike heads and queries are", ALIKE, ("diversity.png", "mutual.png")),
    ("spectrum", "Frequencies", "Which frequencies are kept", FREQUENCIES, ("frequencies.png", "spectrum.png")),
    ("probe", "Probe", "What a linear probe reads", PROBE, ("probe.png",)),
)


def page(found: Comparison, panels: list[Panel], drawn: Figures) -> str:
    """The page; `drawn` has each panel's figure."""
    first, second = (side.name for side in found.sides)
    titles = {panel.file: f"{panel.title}: {panel.unit}" for panel in panels}
    top = [
        h("p", [h("span", fact) for fact in ("side by side", *told(found)[:1])], class_="kicker"),
        h("h1", name(first), " and ", name(second)),
        h("p", [h("span", about(side), style="display:block") for side in found.sides], class_="lead"),
    ]
    parts = []
    for key, short, title, words, files in PARTS:
        figures = [_figure(drawn[file], titles[file]) for file in files if file in drawn]
        if not figures:
            words = f"Left out: {found.no_probe}."
        shown = h("div", figures, class_="charts") if figures else None
        parts.append((key, short, title, [h("p", words), shown]))
    parts.append(("numbers", "Numbers", "Layer by layer", [_numbers(found), *_notes(found)]))
    return document(f"{first} and {second}, layer by layer", f"{first} {second}", top, parts, "the models’ names")


def _figure(png: bytes, title: str) -> Markup:
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    image = h("img", src=source, alt=title, style="display:block;width:100%;height:auto")
    return h("figure", image, class_="chart", style="background:#fff;padding:.4rem;max-width:34rem")


def _numbers(found: Comparison) -> Markup:
    """The means of the heads, and the probes, as a table."""
    head = ["layer" if found.one_depth else "depth"]
    head += [f"{title} {side.letter}" for title, *_ in columns(found) for side in found.sides]
    return table(head, [list(row) for row in rows(found)], caption="Both models, layer by layer", numbers=1)


def _notes(found: Comparison) -> list[Markup]:
    files = "Every head’s number is in comparison.json and, as arrays, in comparison.npz beside this page."
    return [h("p", line, class_="note") for line in (*told(found), files)]
