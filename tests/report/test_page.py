"""What a run's page holds, and that nothing in a run can be more than text on it."""

import re
from html.parser import HTMLParser

import pytest

from tests.report.made import made_run
from vitrail.report.charts import Line, line_chart, thinned
from vitrail.report.markup import escape, h
from vitrail.report.page import page
from vitrail.report.run import read_run
from vitrail.report.scale import scale
from vitrail.report.window import window
from vitrail.report.words import duration, number, percent

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
    """Whether every tag is closed, and which there are."""

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
def test_every_kind_of_run_has_a_whole_page(tmp_path, kinds):
    text = page(read_run(made_run(tmp_path / "run", photographs=False, **kinds)))
    tags = parsed(text)
    assert tags.seen.count("h1") == 1
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert "http" not in text.replace("http-equiv", "")
    assert len(text) < 1_500_000


def test_parts_are_all_there(tmp_path):
    text = page(read_run(made_run(tmp_path / "run", photographs=False)))
    assert re.findall(r'<section id="(\w+)"', text) == [
        *("results", "curves", "classes", "confusion", "mistakes", "calibration"),
        *("data", "model", "speed", "environment", "chosen", "recipe"),
    ]
    for said in ("truncated: 812 of 40,211 bytes", "batch size 32", "AMD EPYC", "weight_decay", "vitrail train /data"):
        assert said in text
    assert text.count("<img ") == 24


def test_several_labels_have_no_confusion_matrix(tmp_path):
    text = page(read_run(made_run(tmp_path / "run", classes=12, several=True)))
    assert 'id="confusion"' not in text
    assert "average precision" in text


def test_many_classes_have_pairs_instead_of_a_matrix(tmp_path):
    text = page(read_run(made_run(tmp_path / "run", classes=100, images=1000)))
    assert 'class="matrix' not in text
    assert "was taken for" in text


def test_no_mistakes_are_said(tmp_path):
    text = page(read_run(made_run(tmp_path / "run", classes=3, images=30, skill=40)))
    assert "There are none: all 30 validation pictures are right" in text


def test_hostile_names_stay_text(tmp_path):
    made = made_run(
        tmp_path / "run",
        classes=HOSTILE,
        names=list(HOSTILE) * 40,
        skipped=((HOSTILE[0], HOSTILE[1]),),
        photographs=False,
    )
    text = page(read_run(made))
    tags = parsed(text)
    assert tags.seen.count("script") == 1
    assert tags.seen.count("title") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert "two⏎lines" in text
    text.encode("utf-8")


def test_text_is_escaped_and_markup_is_not_twice():
    assert escape("<a&'\">") == "&lt;a&amp;&#x27;&quot;&gt;"
    assert h("p", h("b", "<"), "\x00", class_='"') == '<p class="&quot;"><b>&lt;</b>�</p>'


def test_thumbnails_that_are_no_pictures_are_not_embedded(tmp_path):
    made = made_run(tmp_path / "run", photographs=False)
    for path in (made / "evaluation" / "pictures").iterdir():
        path.write_bytes(b"<svg onload=alert(1)>")
    text = page(read_run(made))
    assert "<img" not in text
    assert "no picture kept" in text


def test_numbers_read_well():
    assert percent(0.99999) == "99.9\u00a0%"
    assert (percent(1.0), percent(float("nan"))) == ("100.0\u00a0%", "–")
    assert (number(0.41234), number(1234.5), number(1.23e-5)) == ("0.412", "1,234", "1.2e-05")
    assert [duration(s).replace("\u00a0", " ") for s in (3.21, 59.7, 312, 12_000)] == [
        "3.2 s",
        "1 min",
        "5 min 12 s",
        "3 h 20 min",
    ]


def test_ticks_are_round_and_hold_all_values():
    found = scale([0.13, 2.71])
    assert found.ticks == (0, 1, 2, 3)
    assert scale([5, 5]).low < 5 < scale([5, 5]).high
    assert scale([1, 300], whole=True, tight=True, parts=5).ticks == (100, 200, 300)
    assert scale([]).ticks[0] == 0


def test_long_lines_are_thinned_without_changing_their_mean():
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    less = thinned(points)
    assert len(less) == 400
    assert sum(y for _, y in less) / 400 == pytest.approx(sum(y for _, y in points) / 10_000)


def test_a_chart_without_points_is_none_and_one_point_is_a_dot():
    assert line_chart("x", [Line("a", [])], x_name="epoch") is None
    assert 'class="dot' in str(line_chart("x", [Line("a", [(1.0, 2.0)])], x_name="epoch"))


def test_the_same_recipe_has_the_same_window():
    assert window("a") == window("a") != window("b")
