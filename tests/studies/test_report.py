"""The record, HTML report, documentation page and charts of a study."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_report import visit
from tests.reports.test_page import HOSTILE, parsed
from tests.studies import made
from vitrail.cli import main
from vitrail.reports.charts.bars import draw_bars as bars_drawn
from vitrail.reports.charts.canvas import LIGHT, format_tick, shorten_text, text_width, wrap_text
from vitrail.reports.charts.figure import describe_chart, render_svg
from vitrail.studies import STUDY_NAMES
from vitrail.studies.record import read_record
from vitrail.studies.report import TuningScores, first_numeric_column, write_page, write_report
from vitrail.studies.study import Answer, CellResult, Chart, Series
from vitrail.studies.sweep import FailedCell

DOCS = Path(__file__).parents[2] / "docs"
TWO = ("none", "1-D")
BROKEN = FailedCell(
    "final-1-D-x", {"positions": "1-D", "rate": 0.001, "seed": 2}, "final", "RuntimeError: out of memory"
)


@pytest.fixture
def small(tmp_path):
    """Return a finished study of two kinds of positions, with three seeds and two learning rates."""
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup, TWO)
    return study, setup, made.made_results(study, setup)


def as_text(directory) -> str:
    return (directory / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")


def table_of(directory):
    return json.loads((directory / "study.json").read_text(encoding="utf-8"))


def test_report_of_a_finished_study(small, tmp_path):
    study, setup, results = small
    answer = write_report(study, setup, results, [], tmp_path)
    assert isinstance(answer, Answer)
    text = as_text(tmp_path)
    parsed(text)
    texts = (study.question, study.reference, study.paper_finding, answer.finding, answer.limits)
    for expected in (*texts, "agrees with the paper"):
        assert expected in text
    assert [cell for row in answer.rows for cell in row if cell not in text] == []
    assert re.findall(r'<section id="(\w+)"', text) == ["results", "limits", "tuning", "runs", "again"]
    assert "vitrail paper run positions --scale laptop" in text
    assert "is not finished" not in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_record_has_all_numbers(small, tmp_path):
    study, setup, results = small
    answer = write_report(study, setup, results, [], tmp_path)
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


def test_command_has_non_default_options(small, tmp_path):
    study, setup, _ = small
    other = replace(setup, scale=replace(setup.scale, seeds=2), data=replace(setup.data, where="photos"), init="model")
    write_report(study, other, [], [], tmp_path, ["steps=50"])
    command = ["vitrail", "paper", "run", "positions", "--scale", "laptop"]
    assert table_of(tmp_path)["command"] == [
        *command,
        *("--data", "photos", "--init", "model", "--seeds", "2", "--set", "steps=50"),
    ]


def test_report_of_a_new_study(small, tmp_path):
    study, setup, _ = small
    assert write_report(study, setup, [], [], tmp_path) is None
    assert table_of(tmp_path)["answer"] is None
    text = as_text(tmp_path)
    parsed(text)
    assert "This study is not finished." in text
    assert "No finding yet: 4 of 4 planned runs are missing, such as positions none." in text


def test_answer_needs_a_result_of_every_family(small, tmp_path):
    study, setup, results = small
    tune = [each for each in results if each.phase == "tune"]
    final = [each for each in results if each.phase == "final"]
    one = [each for each in final if each.at["positions"] == "none"]
    assert write_report(study, setup, tune[:3], [], tmp_path) is None
    assert write_report(study, setup, [*tune, *one], [], tmp_path) is None  # no result of the other family
    found = write_report(study, setup, [*tune, *one, final[3]], [], tmp_path)
    assert found is not None
    assert [row[2] for row in found.rows] == ["3", "1"]
    assert "8 of 10 planned runs have a result" in as_text(tmp_path)


def test_interpretation_errors_are_raised_only_when_complete(small, tmp_path):
    study, setup, results = small

    def picky(found, scale):
        if len(found) < 10:
            raise KeyError("seed 2")
        raise ValueError("no such column")

    picky_study = replace(study, interpret=picky)
    assert write_report(picky_study, setup, results[:-1], [], tmp_path) is None
    assert "1 of 10 planned runs are missing" in table_of(tmp_path)["why_not"]
    with pytest.raises(ValueError, match="no such column"):
        write_report(picky_study, setup, results, [], tmp_path)


def test_report_shows_failed_runs(small, tmp_path):
    study, setup, results = small
    assert write_report(study, setup, results[:-1], [BROKEN], tmp_path) is not None
    text = as_text(tmp_path)
    assert "RuntimeError: out of memory" in text
    assert "final: positions 1-D, rate 0.001, seed 2" in text
    assert "1 failed" in text
    assert "Retry them with the same command." in text
    assert table_of(tmp_path)["failed"][0]["line"] == BROKEN.line


def test_best_lr_needs_all_tuning_runs(small):
    _, _, results = small
    found = TuningScores(results)
    assert found.lrs == [1e-3, 3e-3]
    scores = {r.at["rate"]: r.numbers["validation"] for r in results[:2]}
    assert found.best_lr((("positions", "none"),)) == max(scores, key=lambda lr: scores[lr])
    part = TuningScores(results[:3])
    assert part.best_lr((("positions", "1-D"),)) is None
    assert found.names == ["positions"]


def test_diverged_run_is_never_selected():
    at = {"family": "ViT", "each class": 1944}
    results = [
        CellResult({**at, "rate": 1e-3, "seed": 0}, "tune", {"validation": 0.5}, 1.0),
        CellResult({**at, "rate": 1e-1, "seed": 0}, "tune", {"validation": 0.9, "diverged": "at step 3"}, 1.0),
    ]
    found, place = TuningScores(results), (("family", "ViT"), ("each class", 1944))
    assert (found.names, found.family_cells(place)) == (["family", "each class"], ["ViT", "1,944"])
    assert [found.format_score(place, lr) for lr in found.lrs] == ["50.0\u00a0%", "diverged"]
    assert found.best_lr(place) == 1e-3


def test_edge_note_counts_extreme_learning_rates():
    def best(*lrs: float) -> str:
        return TuningScores(
            [
                CellResult({"family": f"{k}", "rate": lr, "seed": 0}, "tune", {"validation": 0.5 + (lr == most)}, 1.0)
                for k, most in enumerate(lrs)
                for lr in (1e-3, 2e-3, 4e-3)
            ]
        ).edge_note

    assert best(2e-3, 2e-3) == ""
    assert best(1e-3, 4e-3, 4e-3, 2e-3) == (
        "The best learning rate is the lowest tried for 1 of 4 and the highest tried for 2 of 4: better values may lie "
        "outside the range."
    )


def test_base_tuning_uses_the_first_seed():
    at = {"family": "ViT"}
    scores = {(1e-3, 0): 0.5, (3e-3, 0): 0.6, (3e-3, 1): 0.7}
    results = [
        CellResult({**at, "rate": lr, "seed": seed}, "base", {"validation": score}, 1.0)
        for (lr, seed), score in scores.items()
    ]
    found = TuningScores(results, "base")
    assert found.best_lr((("family", "ViT"),)) == 3e-3
    assert found.format_score((("family", "ViT"),), 3e-3) == "60.0\u00a0%"
    assert not TuningScores(results).families
    assert not TuningScores(results[1:], "base").families  # one learning rate is not tuned


def test_families_with_their_own_learning_rates():
    scores = {("Adam", 1e-3): 0.5, ("Adam", 3e-3): 0.6, ("SGD", 0.1): 0.7, ("SGD", 0.3): 0.4}
    results = [
        CellResult({"optimizer": name, "rate": lr, "seed": 0}, "tune", {"validation": score}, 1.0)
        for (name, lr), score in scores.items()
    ]
    found = TuningScores(results)
    assert [found.best_lr((("optimizer", name),)) for name in ("Adam", "SGD")] == [3e-3, 0.1]
    assert TuningScores(results[:3]).best_lr((("optimizer", "SGD"),)) is None


def test_tuning_uses_the_mean_over_seeds():
    scores = {(0.1, 0): 0.9, (0.1, 1): 0.1, (0.2, 0): 0.6, (0.2, 1): 0.6}
    results = [
        CellResult({"head": "mean", "rate": lr, "seed": seed}, "tune", {"validation": value}, 1.0)
        for (lr, seed), value in scores.items()
    ]
    found, place = TuningScores(results), (("head", "mean"),)
    assert found.best_lr(place) == 0.2
    assert found.format_score(place, 0.1) == "50.0\u00a0%"
    assert TuningScores(results[:3]).best_lr(place) is None


def test_hostile_names_are_escaped(small, tmp_path):
    study, setup, results = small
    bad = HOSTILE[0]

    def read(found, scale):
        answer = study.interpret(found, scale)
        values = tuple(0.5 + k / 100 for k in range(len(HOSTILE)))
        lines = tuple(Series(name, (1.0, 10.0), (0.1, 0.2)) for name in HOSTILE)
        maps = Series(bad, maps=(((0.0, 1.0), (1.0, 0.0)),))
        charts = (
            Chart(bad, "bars", (Series(bad, HOSTILE, values),), y_name=bad),
            Chart(bad, "lines", lines, x_name=bad, x_log=True),
            Chart(bad, "maps", (maps,), x_name=bad, y_name=bad),
        )
        return replace(answer, finding=bad, limits=bad, notes=(bad,), rows=((bad, *HOSTILE[1:3]),), charts=charts)

    hostile = replace(study, question=bad, reference=bad, paper_finding=HOSTILE[5], interpret=read)
    failed = FailedCell(bad, {bad: bad}, "final", bad)
    write_report(hostile, replace(setup, data=replace(setup.data, where=bad)), results[:-1], [failed], tmp_path)
    text = as_text(tmp_path)
    tags = parsed(text)
    assert tags.seen.count("script") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]
    for chart in read_record(tmp_path).answer.charts:
        ElementTree.fromstring(render_svg(chart))
    written = write_page(tmp_path, tmp_path / "docs").read_text(encoding="utf-8")
    assert "<script" not in re.sub(r"```.*?```", "", written, flags=re.DOTALL)  # code blocks are not parsed
    assert "&lt;script&gt;" in written


@pytest.mark.parametrize("make", [made.growing, made.cloud, made.distances, made.grids], ids=lambda make: make.__name__)
def test_charts_are_valid_svg_with_descriptions(make):
    chart = make()
    light, dark = (ElementTree.fromstring(render_svg(chart, dark=dark)) for dark in (False, True))
    names = "".join(light.itertext())
    assert chart.title in names
    assert all(series.label in names for series in chart.series)
    grounds = [root.find("{http://www.w3.org/2000/svg}rect").get("fill") for root in (light, dark)]
    assert grounds == ["#ffffff", "#1a1920"]
    assert "var(" not in render_svg(chart)
    assert chart.series[0].label in describe_chart(chart)


def test_empty_chart_has_a_notice():
    for kind in ("lines", "dots", "bars", "maps"):
        assert "no data yet" in render_svg(Chart("Empty", kind, (Series("a"),)))


def ticks(chart, width=720):
    text = str(bars_drawn(chart, LIGHT, width).parts)
    return text, [float(value) for value in re.findall(r">(\d+) %<", text)]


def test_bars_start_at_zero_or_become_dots():
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


def test_points_without_interval():
    nan = math.nan
    lines = Chart("x", "lines", (Series("a", (1.0, 2.0), (0.5, 0.6), (nan, 0.55), (nan, 0.65)),))
    assert "nan" not in render_svg(lines)
    assert "a, 1: 50.0 %<" in render_svg(lines)
    assert "a, 2: 60.0 % (55.0–65.0)<" in render_svg(lines)


def test_nan_round_trips_through_json(small, tmp_path):
    study, setup, results = small
    chart = Chart("x", "bars", (Series("a", ("b",), (0.5,), (math.nan,), (math.nan,)),))
    write_report(
        replace(study, interpret=lambda r, s: replace(small[0].interpret(r, s), charts=(chart,))),
        setup,
        results,
        [],
        tmp_path,
    )
    assert "NaN" not in (tmp_path / "study.json").read_text()
    assert math.isnan(read_record(tmp_path).answer.charts[0].series[0].low[0])


def test_text_is_shortened_and_wrapped():
    assert shorten_text("short", 100) == "short"
    cut = shorten_text("a very long name indeed", 80)
    assert cut.endswith("…")
    assert text_width(cut) <= 80
    assert wrap_text("one two three four", 70) == ["one two", "three four"]
    assert len(wrap_text("word " * 50, 90, max_lines=3)) == 3


def test_first_numeric_column():
    assert first_numeric_column([("none", "dropout", "71.3 %"), ("light", "none", "–")]) == 2
    assert first_numeric_column([("none", "71.3 %", "3"), ("1-D", "–", "")]) == 1
    assert first_numeric_column([("a", "yes"), ("b", "no")]) == 2
    assert first_numeric_column([]) == 1


def test_format_tick():
    assert [format_tick(value) for value in (0, 0.001, 250, 60_000, 2.5e6, 1e12, 3e-5)] == [
        *("0", "0.001", "250", "60,000", "2.5M", "10¹²", "3·10⁻⁵")
    ]


def test_documentation_page_content(small, tmp_path):
    study, setup, results = small
    answer = write_report(study, setup, results, [], tmp_path)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "positions-7.svg").write_text("of an older study")
    (docs / "positions-other.svg").write_text("not ours")
    path = write_page(tmp_path, docs)
    assert path == docs / "positions.md"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {study.question}\n")
    for expected in (study.paper_finding, answer.finding, "agrees with the paper", answer.limits, "0, 1, 2", "min"):
        assert expected in text
    for row in answer.rows:
        assert f"| {' | '.join(row)} |" in text
    assert "$ vitrail paper run positions --scale laptop" in text
    assert sorted(each.name for each in docs.iterdir()) == [
        *("positions-1-dark.svg", "positions-1.svg", "positions-other.svg", "positions.md")
    ]


def test_page_command(small, tmp_path, capsys):
    study, setup, results = small
    write_report(study, setup, results, [], tmp_path)
    docs = tmp_path / "docs"
    assert main(["paper", "page", str(tmp_path), "--out", str(docs)]) == 0
    assert capsys.readouterr().out == f"{docs / 'positions.md'}\n"
    assert (docs / "positions-1.svg").is_file()
    assert main(["paper", "page", str(docs), "--out", str(tmp_path / "other")]) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "has no study.json" in refused


def test_page_without_study_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"has no study\.json: write it with vitrail paper show"):
        write_page(tmp_path, tmp_path / "docs")
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read"):
        write_page(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_documented_study_runs(tmp_path):
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    found: dict = {}
    exec(compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "registers.py", "exec"), found)
    study = found["STUDY"]
    setup = made.made_setup(tmp_path)
    setup = replace(setup, scale=study.scales["test"])
    results = made.made_results(study, setup)
    assert [result.phase for result in results] == ["tune"] * 4 + ["final"] * 4
    level = [replace(each, numbers=each.numbers | {"test": 0.5}) for each in results]
    assert write_report(study, setup, level, [], tmp_path).finding.startswith(
        "Four registers make no clear difference at this scale"
    )
    better = [replace(each, numbers=each.numbers | {"test": 0.5 + 0.1 * each.at["registers"]}) for each in results]
    assert write_report(study, setup, better, [], tmp_path).finding.startswith(
        "Four registers raise accuracy at this scale: +40.0 points (+38.8 to +41.1); with 2 seeds, differences of 1 point or less"
    )


def test_documentation_lists_every_study():
    text, found = (DOCS / "paper" / "README.md").read_text(encoding="utf-8").split("## What was found")
    assert tuple(re.findall(r"^\| \W*`([\w-]+)`", text, re.MULTILINE)) == STUDY_NAMES
    assert all(f"`vitrail paper run {name} --scale laptop`" in text for name in STUDY_NAMES)
    shown = re.findall(r"^\| \[`([\w-]+)`\]\(([\w-]+)\.md\)", found, re.MULTILINE)
    pages = {page.stem for page in (DOCS / "paper").glob("*.md")} - {"README"}
    assert {name for name, _ in shown} == {page for _, page in shown} == pages


# Visible chart texts that overflow their drawing or overlap another text.
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


def test_report_fits_a_phone_without_overlapping_text(browser, tmp_path):
    setup = made.made_setup(tmp_path)
    study = made.made_study(setup)
    results = made.made_results(study, setup)
    charts = (made.growing(), made.cloud(), made.distances(), made.grids())

    def read(found, scale):
        answer = study.interpret(found, scale)
        return replace(answer, charts=(*answer.charts, *charts))

    answer = write_report(replace(study, interpret=read), setup, results, [], tmp_path)
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
