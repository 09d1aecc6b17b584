"""Contents of run pages, escaping, charts and number formats."""

import re
from html.parser import HTMLParser

import pytest

from tests.reports.made import made_run
from vitrail.reports.charts.canvas import make_scale
from vitrail.reports.charts.lines import ChartLine, downsample_points, render_line_chart
from vitrail.reports.document import render_window
from vitrail.reports.html import escape, h
from vitrail.reports.page import render_run_page
from vitrail.reports.run import read_run
from vitrail.utils.text import format_duration, format_number, format_percent

HOSTILE = (
    "<script>alert(1)</script>",
    '" onmouseover="alert(2)',
    "two\nlines",
    "عربي \u202etext",
    "🧥 coat & hat",
    "</title></style><b>",
    "\udcff broken",
)


class Tags(HTMLParser):
    """Parser that records tags and attributes and checks that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text):
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"classes": 2, "epochs": 1},
        {"classes": 100, "images": 2000, "epochs": 300},
        {"classes": 1000, "images": 3000, "epochs": 2},
        {"classes": 12, "several": True},
        {"finished": False},
        {"test": True},
    ],
    ids=str,
)
def test_page_of_every_kind_of_run(tmp_path, kinds):
    text = render_run_page(read_run(made_run(tmp_path / "run", photographs=False, **kinds)))
    tags = parsed(text)
    assert tags.seen.count("h1") == 1
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert "http" not in text.replace("http-equiv", "")
    assert len(text) < 1_500_000


def test_sections_of_the_page(tmp_path):
    text = render_run_page(read_run(made_run(tmp_path / "run", photographs=False)))
    assert re.findall(r'<section id="(\w+)"', text) == [
        *("results", "curves", "classes", "confusion", "mistakes", "calibration"),
        *("data", "model", "speed", "environment", "chosen", "recipe"),
    ]
    for part in ("truncated: 812 of 40,211 bytes", "batch size 32", "AMD EPYC", "weight_decay", "vitrail train /data"):
        assert part in text
    for label in (
        "Top-1 accuracy",
        "Top-5 accuracy",
        "Balanced accuracy",
        "Expected calibration error",
        "Learning rate",
    ):
        assert label in text
    assert re.search(r"Neither over- nor under-confident: mean confidence [\d.]+\xa0% at [\d.]+\xa0% accuracy", text)
    assert text.count("<img ") == 24


def test_multilabel_page_has_no_confusion_matrix(tmp_path):
    text = render_run_page(read_run(made_run(tmp_path / "run", classes=12, several=True)))
    assert 'id="confusion"' not in text
    assert "average precision" in text
    assert "Mean average precision (mAP)" in text


def test_many_classes_have_a_table_of_confused_pairs(tmp_path):
    text = render_run_page(read_run(made_run(tmp_path / "run", classes=100, images=1000)))
    assert 'class="matrix' not in text
    assert "predicted class" in text


def test_page_without_errors(tmp_path):
    text = render_run_page(read_run(made_run(tmp_path / "run", classes=3, images=30, skill=40)))
    assert "None: all 30 validation images are classified correctly." in text


def test_hostile_names_stay_text(tmp_path):
    made = made_run(
        tmp_path / "run",
        classes=HOSTILE,
        names=list(HOSTILE) * 40,
        skipped=((HOSTILE[0], HOSTILE[1]),),
        photographs=False,
    )
    text = render_run_page(read_run(made))
    tags = parsed(text)
    assert tags.seen.count("script") == 1
    assert tags.seen.count("title") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert "two⏎lines" in text
    text.encode("utf-8")


def test_text_is_escaped_once():
    assert escape("<a&'\">") == "&lt;a&amp;&#x27;&quot;&gt;"
    assert h("p", h("b", "<"), "\x00", class_='"') == '<p class="&quot;"><b>&lt;</b>�</p>'


def test_invalid_thumbnails_are_not_embedded(tmp_path):
    made = made_run(tmp_path / "run", photographs=False)
    for path in (made / "evaluation" / "pictures").iterdir():
        path.write_bytes(b"<svg onload=alert(1)>")
    text = render_run_page(read_run(made))
    assert "<img" not in text
    assert "image not stored" in text


def test_number_formats():
    assert format_percent(0.99999) == "99.9\u00a0%"
    assert (format_percent(1.0), format_percent(float("nan"))) == ("100.0\u00a0%", "–")
    assert (format_number(0.41234), format_number(1234.5), format_number(1.23e-5)) == ("0.412", "1,234", "1.2e-05")
    assert [format_duration(s).replace("\u00a0", " ") for s in (3.21, 59.7, 312, 12_000)] == [
        "3.2 s",
        "1 min",
        "5 min 12 s",
        "3 h 20 min",
    ]


def test_ticks_are_round_and_cover_all_values():
    assert make_scale([0.13, 2.71]).ticks == (0, 1, 2, 3)
    assert make_scale([5, 5]).low < 5 < make_scale([5, 5]).high
    assert make_scale([1, 300], integer=True, tight=True, tick_count=5).ticks == (100, 200, 300)
    assert make_scale([]).ticks[0] == 0


def test_downsampling_keeps_the_mean():
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    fewer = downsample_points(points)
    assert len(fewer) == 400
    assert sum(y for _, y in fewer) / 400 == pytest.approx(sum(y for _, y in points) / 10_000)


def test_a_chart_without_points_is_none_and_one_point_is_a_dot():
    assert render_line_chart("x", [ChartLine("a", [])], x_label="epoch") is None
    assert 'class="dot' in str(render_line_chart("x", [ChartLine("a", [(1.0, 2.0)])], x_label="epoch"))


def test_the_same_recipe_has_the_same_window():
    assert render_window("a") == render_window("a") != render_window("b")
