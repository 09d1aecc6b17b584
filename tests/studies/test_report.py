"""What is written of a study: its record, its page, its page for the documentation, and its charts."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_report import visit
from tests.report.test_page import HOSTILE, parsed
from tests.studies import made
from vitrail.cli import main
from vitrail.studies import NAMES
from vitrail.studies.drawing import said, svg
from vitrail.studies.drawing.bars import drawn as bars_drawn
from vitrail.studies.drawing.canvas import LIGHT, amount, shortened, width_of, wrapped
from vitrail.studies.page import write_page
from vitrail.studies.record import numbers_from, read_record
from vitrail.studies.report import write
from vitrail.studies.study import Answer, Chart, Result, Series
from vitrail.studies.sweep import Failed
from vitrail.studies.tries import tries

DOCS = Path(__file__).parents[2] / "docs"
TWO = ("none", "1-D")
BROKEN = Failed("final-1-D-x", {"positions": "1-D", "rate": 0.001, "seed": 2}, "final", "RuntimeError: out of memory")


@pytest.fixture
def small(tmp_path):
    """Two kinds of positions, three seeds, two rates; all finished."""
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup, TWO)
    return study, setup, made.made_results(study, setup)


def as_text(directory) -> str:
    return (directory / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")


def table_of(directory):
    return json.loads((directory / "study.json").read_text(encoding="utf-8"))


def test_a_finished_study_has_its_answer_on_its_page(small, tmp_path):
    study, setup, results = small
    answer = write(study, setup, results, [], tmp_path)
    assert isinstance(answer, Answer)
    text = as_text(tmp_path)
    parsed(text)
    for told in (study.question, study.where, study.found, answer.finding, answer.limits, "agrees with the paper"):
        assert told in text
    assert [cell for row in answer.rows for cell in row if cell not in text] == []
    assert re.findall(r'<section id="(\w+)"', text) == ["results", "limits", "tuning", "runs", "again"]
    assert "vitrail paper run positions --scale laptop" in text
    assert "has not finished" not in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_every_number_of_the_table_and_every_result_is_in_the_record(small, tmp_path):
    study, setup, results = small
    answer = write(study, setup, results, [], tmp_path)
    kept = table_of(tmp_path)
    assert kept["answer"]["rows"] == [list(row) for row in answer.rows]
    assert [each["numbers"] for each in kept["results"]] == [dict(each.numbers) for each in results]
    assert kept["seeds"] == [0, 1, 2]
    assert kept["seconds"] == pytest.approx(sum(each.seconds for each in results), abs=0.1)
    assert kept["runs"] == {"known": 10, "finished": 10, "failed": 0}
    assert kept["command"] == ["vitrail", "paper", "run", "positions", "--scale", "laptop"]
    assert {"processor", "cores", "GPU", "torch"} <= kept["machine"].keys()
    again = read_record(tmp_path)
    assert again.answer == answer
    assert again.results == tuple(results)


def test_the_command_tells_what_was_not_usual(small, tmp_path):
    study, setup, _ = small
    other = replace(setup, scale=replace(setup.scale, seeds=2), data=replace(setup.data, where="photos"), init="model")
    write(study, other, [], [], tmp_path, ["steps=50"])
    command = ["vitrail", "paper", "run", "positions", "--scale", "laptop"]
    assert table_of(tmp_path)["command"] == [
        *command,
        *("--data", "photos", "--init", "model", "--seeds", "2", "--set", "steps=50"),
    ]


def test_a_study_that_has_just_begun_has_a_page_and_no_answer(small, tmp_path):
    study, setup, _ = small
    assert write(study, setup, [], [], tmp_path) is None
    assert table_of(tmp_path)["answer"] is None
    text = as_text(tmp_path)
    parsed(text)
    assert "This study has not finished." in text
    assert "Nothing yet: 4 of 4 planned runs are missing, such as positions none." in text


def test_a_study_is_asked_once_every_family_has_a_result(small, tmp_path):
    study, setup, results = small
    tune = [each for each in results if each.phase == "tune"]
    final = [each for each in results if each.phase == "final"]
    one = [each for each in final if each.at["positions"] == "none"]
    assert write(study, setup, tune[:3], [], tmp_path) is None
    assert write(study, setup, [*tune, *one], [], tmp_path) is None  # nothing of the other family
    found = write(study, setup, [*tune, *one, final[3]], [], tmp_path)
    assert found is not None
    assert [row[2] for row in found.rows] == ["3", "1"]
    assert "8 of the 10 runs that are planned by now have a result" in as_text(tmp_path)


def test_what_cannot_be_read_of_a_part_is_no_error_but_of_the_whole_it_is(small, tmp_path):
    study, setup, results = small

    def picky(found, scale):
        if len(found) < 10:
            raise KeyError("seed 2")
        raise ValueError("no such column")

    picky_study = replace(study, read=picky)
    assert write(picky_study, setup, results[:-1], [], tmp_path) is None
    assert "1 of 10 planned runs are missing" in table_of(tmp_path)["why_not"]
    with pytest.raises(ValueError, match="no such column"):
        write(picky_study, setup, results, [], tmp_path)


def test_failed_runs_are_named_with_what_they_said(small, tmp_path):
    study, setup, results = small
    assert write(study, setup, results[:-1], [BROKEN], tmp_path) is not None
    text = as_text(tmp_path)
    assert "RuntimeError: out of memory" in text
    assert "final: positions 1-D, rate 0.001, seed 2" in text
    assert "1 failed" in text
    assert "The same command tries them again." in text
    assert table_of(tmp_path)["failed"][0]["line"] == BROKEN.line


def test_tries_are_shown_by_rate_and_the_best_is_marked_when_all_are_there(small):
    _, _, results = small
    found = tries(results)
    assert found.rates == [1e-3, 3e-3]
    scores = {r.at["rate"]: r.numbers["validation"] for r in results[:2]}
    assert found.chosen((("positions", "none"),)) == max(scores, key=lambda rate: scores[rate])
    part = tries(results[:3])
    assert part.chosen((("positions", "1-D"),)) is None
    assert found.names == ["positions"]


def test_a_try_that_diverged_is_called_so_and_never_chosen():
    at = {"family": "ViT", "each class": 1944}
    results = [
        Result({**at, "rate": 1e-3, "seed": 0}, "tune", {"validation": 0.5}, 1.0),
        Result({**at, "rate": 1e-1, "seed": 0}, "tune", {"validation": 0.9, "diverged": "at step 3"}, 1.0),
    ]
    found, place = tries(results), (("family", "ViT"), ("each class", 1944))
    assert (found.names, found.words(place)) == (["family", "each class"], ["ViT", "1,944"])
    assert [found.score(place, rate) for rate in found.rates] == ["50.0\u00a0%", "diverged"]
    assert found.chosen(place) == 1e-3


def test_best_rates_at_an_end_of_those_tried_are_counted():
    def best(*rates: float) -> str:
        return tries(
            [
                Result({"family": f"{k}", "rate": rate, "seed": 0}, "tune", {"validation": 0.5 + (rate == most)}, 1.0)
                for k, most in enumerate(rates)
                for rate in (1e-3, 2e-3, 4e-3)
            ]
        ).edges

    assert best(2e-3, 2e-3) == ""
    assert best(1e-3, 4e-3, 4e-3, 2e-3) == (
        "The best rate is for 1 of 4 the lowest that was tried and for 2 of 4 the highest that was tried: better ones may lie "
        "beyond."
    )


def test_tries_of_pretraining_are_of_the_first_seed():
    at = {"family": "ViT"}
    scores = {(1e-3, 0): 0.5, (3e-3, 0): 0.6, (3e-3, 1): 0.7}
    results = [
        Result({**at, "rate": rate, "seed": seed}, "base", {"validation": score}, 1.0)
        for (rate, seed), score in scores.items()
    ]
    found = tries(results, "base")
    assert found.chosen((("family", "ViT"),)) == 3e-3
    assert found.score((("family", "ViT"),), 3e-3) == "60.0\u00a0%"
    assert not tries(results).families
    assert not tries(results[1:], "base").families  # one rate is no choice


def test_families_with_rates_of_their_own_have_a_best_one_each():
    scores = {("Adam", 1e-3): 0.5, ("Adam", 3e-3): 0.6, ("SGD", 0.1): 0.7, ("SGD", 0.3): 0.4}
    results = [
        Result({"optimizer": name, "rate": rate, "seed": 0}, "tune", {"validation": score}, 1.0)
        for (name, rate), score in scores.items()
    ]
    found = tries(results)
    assert [found.chosen((("optimizer", name),)) for name in ("Adam", "SGD")] == [3e-3, 0.1]
    assert tries(results[:3]).chosen((("optimizer", "SGD"),)) is None


def test_tries_with_several_seeds_are_compared_by_their_mean():
    scores = {(0.1, 0): 0.9, (0.1, 1): 0.1, (0.2, 0): 0.6, (0.2, 1): 0.6}
    results = [
        Result({"head": "mean", "rate": rate, "seed": seed}, "tune", {"validation": value}, 1.0)
        for (rate, seed), value in scores.items()
    ]
    found, place = tries(results), (("head", "mean"),)
    assert found.chosen(place) == 0.2
    assert found.score(place, 0.1) == "50.0\u00a0%"
    assert tries(results[:3]).chosen(place) is None


def test_hostile_names_stay_text(small, tmp_path):
    study, setup, results = small
    bad = HOSTILE[0]

    def read(found, scale):
        answer = study.read(found, scale)
        values = tuple(0.5 + k / 100 for k in range(len(HOSTILE)))
        lines = tuple(Series(name, (1.0, 10.0), (0.1, 0.2)) for name in HOSTILE)
        maps = Series(bad, maps=(((0.0, 1.0), (1.0, 0.0)),))
        charts = (
            Chart(bad, "bars", (Series(bad, HOSTILE, values),), y_name=bad),
            Chart(bad, "lines", lines, x_name=bad, x_log=True),
            Chart(bad, "maps", (maps,), x_name=bad, y_name=bad),
        )
        return replace(answer, finding=bad, limits=bad, notes=(bad,), rows=((bad, *HOSTILE[1:3]),), charts=charts)

    hostile = replace(study, question=bad, where=bad, found=HOSTILE[5], read=read)
    failed = Failed(bad, {bad: bad}, "final", bad)
    write(hostile, replace(setup, data=replace(setup.data, where=bad)), results[:-1], [failed], tmp_path)
    text = as_text(tmp_path)
    tags = parsed(text)
    assert tags.seen.count("script") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]
    for chart in read_record(tmp_path).answer.charts:
        ElementTree.fromstring(svg(chart))
    written = write_page(tmp_path, tmp_path / "docs").read_text(encoding="utf-8")
    assert "<script" not in re.sub(r"```.*?```", "", written, flags=re.DOTALL)  # within, everything is text
    assert "&lt;script&gt;" in written


@pytest.mark.parametrize("make", [made.growing, made.cloud, made.distances, made.grids], ids=lambda make: make.__name__)
def test_charts_are_whole_svg_files_that_say_what_they_show(make):
    chart = make()
    light, dark = (ElementTree.fromstring(svg(chart, dark=dark)) for dark in (False, True))
    names = "".join(light.itertext())
    assert chart.title in names
    assert all(series.label in names for series in chart.series)
    grounds = [root.find("{http://www.w3.org/2000/svg}rect").get("fill") for root in (light, dark)]
    assert grounds == ["#ffffff", "#1a1920"]
    assert "var(" not in svg(chart)
    assert chart.series[0].label in said(chart)


def test_a_chart_of_nothing_says_so():
    for kind in ("lines", "dots", "bars", "maps"):
        assert "nothing to draw yet" in svg(Chart("Empty", kind, (Series("a"),)))


def ticks(chart, width=720):
    text = str(bars_drawn(chart, LIGHT, width).parts)
    return text, [float(value) for value in re.findall(r">(\d+) %<", text)]


def test_bars_begin_at_zero_and_close_values_are_dots_over_a_part_that_says_so():
    far = Chart("x", "bars", (Series("test", ("a", "b"), (0.2, 0.9), (0.1, 0.8), (0.3, 0.95)),))
    text, found = ticks(far)
    assert found[0] == 0
    assert "does not begin at zero" not in text
    assert "<rect" in text
    near = Chart("x", "bars", (Series("test", ("a", "b"), (0.84, 0.86), (0.83, 0.85), (0.85, 0.87)),))
    text, found = ticks(near)
    assert found[0] >= 80
    assert "does not begin at zero" in text
    assert "<rect" not in text


def test_points_without_an_interval_are_drawn_without_one():
    nan = math.nan
    lines = Chart("x", "lines", (Series("a", (1.0, 2.0), (0.5, 0.6), (nan, 0.55), (nan, 0.65)),))
    assert "nan" not in svg(lines)
    assert "a, 1: 50.0 %<" in svg(lines)
    assert "a, 2: 60.0 % (55.0–65.0)<" in svg(lines)


def test_numbers_that_json_does_not_know_are_null_and_come_back(small, tmp_path):
    study, setup, results = small
    chart = Chart("x", "bars", (Series("a", ("b",), (0.5,), (math.nan,), (math.nan,)),))
    write(replace(study, read=lambda r, s: replace(small[0].read(r, s), charts=(chart,))), setup, results, [], tmp_path)
    assert "NaN" not in (tmp_path / "study.json").read_text()
    assert math.isnan(read_record(tmp_path).answer.charts[0].series[0].low[0])


def test_text_is_shortened_and_wrapped_to_its_room():
    assert shortened("short", 100) == "short"
    cut = shortened("a very long name indeed", 80)
    assert cut.endswith("…")
    assert width_of(cut) <= 80
    assert wrapped("one two three four", 70) == ["one two", "three four"]
    assert len(wrapped("word " * 50, 90, most=3)) == 3


def test_numbers_are_aligned_right_and_words_are_not():
    assert numbers_from([("none", "dropout", "71.3 %"), ("light", "none", "–")]) == 2
    assert numbers_from([("none", "71.3 %", "3"), ("1-D", "–", "")]) == 1
    assert numbers_from([("a", "yes"), ("b", "no")]) == 2
    assert numbers_from([]) == 1


def test_numbers_on_axes():
    assert [amount(value) for value in (0, 0.001, 250, 60_000, 2.5e6, 1e12, 3e-5)] == [
        *("0", "0.001", "250", "60,000", "2.5M", "10¹²", "3·10⁻⁵"),
    ]


def test_the_page_of_the_documentation_holds_what_the_study_found(small, tmp_path):
    study, setup, results = small
    answer = write(study, setup, results, [], tmp_path)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "positions-7.svg").write_text("of an older study")
    (docs / "positions-other.svg").write_text("not ours")
    path = write_page(tmp_path, docs)
    assert path == docs / "positions.md"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {study.question}\n")
    for told in (study.found, answer.finding, "agrees with the paper", answer.limits, "0, 1, 2", "min"):
        assert told in text
    for row in answer.rows:
        assert f"| {' | '.join(row)} |" in text
    assert "$ vitrail paper run positions --scale laptop" in text
    assert sorted(each.name for each in docs.iterdir()) == [
        *("positions-1-dark.svg", "positions-1.svg", "positions-other.svg", "positions.md"),
    ]


def test_the_command_line_makes_the_page_of_a_study(small, tmp_path, capsys):
    study, setup, results = small
    write(study, setup, results, [], tmp_path)
    docs = tmp_path / "docs"
    assert main(["paper", "page", str(tmp_path), "--out", str(docs)]) == 0
    assert capsys.readouterr().out == f"{docs / 'positions.md'}\n"
    assert (docs / "positions-1.svg").is_file()
    assert main(["paper", "page", str(docs), "--out", str(tmp_path / "other")]) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "has no study.json" in refused


def test_a_page_without_a_study_is_refused_in_one_line(tmp_path):
    with pytest.raises(OSError, match=r"has no study\.json: vitrail paper show"):
        write_page(tmp_path, tmp_path / "docs")
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        write_page(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_the_study_that_the_documentation_writes_answers_from_its_numbers(tmp_path):
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    found: dict = {}
    exec(compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "registers.py", "exec"), found)
    study = found["STUDY"]
    setup = made.made_setup(tmp_path)
    setup = replace(setup, scale=study.scales["test"])
    results = made.made_results(study, setup)
    assert [result.phase for result in results] == ["tune"] * 4 + ["final"] * 4
    level = [replace(each, numbers=each.numbers | {"test": 0.5}) for each in results]
    assert write(study, setup, level, [], tmp_path).finding.startswith(
        "Four registers make no difference at this scale"
    )
    better = [replace(each, numbers=each.numbers | {"test": 0.5 + 0.1 * each.at["registers"]}) for each in results]
    assert write(study, setup, better, [], tmp_path).finding.startswith(
        "Four registers bring +40.0 points (+38.8 to +41.1); with 2 seeds, which cannot tell chance of training"
    )


def test_the_table_of_the_documentation_names_every_study():
    text, found = (DOCS / "paper" / "README.md").read_text(encoding="utf-8").split("## What was found")
    assert tuple(re.findall(r"^\| \W*`([\w-]+)`", text, re.MULTILINE)) == NAMES
    assert all(f"`vitrail paper run {name} --scale laptop`" in text for name in NAMES)
    shown = re.findall(r"^\| \[`([\w-]+)`\]\(([\w-]+)\.md\)", found, re.MULTILINE)
    pages = {page.stem for page in (DOCS / "paper").glob("*.md")} - {"README"}
    assert {name for name, _ in shown} == {page for _, page in shown} == pages


# Texts of the charts that are seen, which reach out of their drawing or into another text.
CLASHES = """() => [...document.querySelectorAll('.study svg')].filter(s => s.checkVisibility()).flatMap(s => {
  const frame = s.getBoundingClientRect();
  const texts = [...s.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = texts.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 ||
    b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => 'out: ' + t);
  const over = texts.flatMap(([t, a], k) => texts.slice(k + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3).map(([u]) => t + ' / ' + u));
  return [...out, ...over];
})"""


LEAST = """() => Math.min(...[...document.querySelectorAll('.study text')].filter(t => t.checkVisibility()).map(
  t => t.getBoundingClientRect().height))"""


def test_the_page_fits_a_phone_and_no_text_of_its_charts_is_cut_or_covered(browser, tmp_path):
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup)
    results = made.made_results(study, setup)
    charts = (made.growing(), made.cloud(), made.distances(), made.grids())

    def read(found, scale):
        answer = study.read(found, scale)
        return replace(answer, charts=(*answer.charts, *charts))

    answer = write(replace(study, read=read), setup, results, [], tmp_path)
    page_, complaints = visit(browser, tmp_path / "report.html", 390)
    for width in (390, 800, 1280):
        page_.set_viewport_size({"width": width, "height": 900})
        assert page_.evaluate("document.documentElement.scrollWidth") <= width
        assert page_.locator(".study svg:visible").count() == 5
        assert page_.evaluate(CLASHES) == []
        assert page_.evaluate(LEAST) > 10  # pixels, at every width
    for told in (study.question, "The paper found", "Found here", "agrees with the paper", answer.columns[0]):
        assert page_.get_by_text(told).first.is_visible()
    page_.context.close()
    assert complaints == []
