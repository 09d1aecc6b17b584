"""Tests of `vitrail report` and of its pages in Chromium."""

import json
from pathlib import Path

import pytest

from tests import forked
from tests.reports.made import made_run
from vitrail.reports.compare import render_comparison
from vitrail.reports.document import write_html
from vitrail.reports.page import write_report
from vitrail.reports.run import read_run
from vitrail.reports.summary import format_headline

NAMES = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror=alert(1)>',
    "שמלה",
    "a" * 90,
    "🧥 coat",
    "hat",
)


def vitrail(*arguments, check=True):
    result = forked.run(*map(str, arguments))
    if check:
        assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write pages of every kind and return their paths by name."""
    root = tmp_path_factory.mktemp("runs")
    kinds = {
        "usual": {},
        "two": {"classes": 2, "epochs": 1},
        "thirty": {"classes": tuple(f"a rather long class name {k}" for k in range(30)), "images": 900},
        "thousand": {"classes": 1000, "images": 3000, "epochs": 300},
        "several": {"classes": 20, "several": True},
        "unfinished": {"finished": False},
        "hostile": {"classes": NAMES, "names": list(NAMES) * 50, "skipped": tuple((name, name) for name in NAMES)},
        "tested": {"test": True, "seed": 5, "lr": 1e-3, "skill": 2.5},
    }
    pages = {name: write_report(made_run(root / name, **given)) for name, given in kinds.items()}
    pages["comparison"] = root / "comparison.html"
    write_html(render_comparison([root / "usual", root / "tested", root / "unfinished"]), pages["comparison"])
    return pages


def visit(browser, path: Path, width: int, scheme="light"):
    """Open a page and return it with the list of its console messages, errors and network requests."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, messages = context.new_page(), []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(f"dialog {dialog.message}"))
    page.on(
        "request", lambda asked: messages.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    page.goto(path.as_uri())
    return page, messages


KINDS = ["usual", "two", "thirty", "thousand", "several", "unfinished", "hostile", "tested", "comparison"]


@pytest.mark.parametrize("kind", KINDS)
def test_pages_fit_the_screen_without_errors(browser, pages, kind):
    page, messages = visit(browser, pages[kind], 390)
    assert page.locator("h1").count() == 1
    assert page.locator("h2").count() >= 4
    assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
    for width in (390, 820, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{kind} is {wide} wide at {width}"
    assert messages == []
    page.context.close()


def test_images_of_mistakes_are_shown(browser, pages):
    page, _ = visit(browser, pages["usual"], 1280)
    assert page.locator("#mistakes img").count() == 24
    assert all(page.locator("#mistakes img").evaluate_all("images => images.map(i => i.naturalWidth > 50)"))
    page.context.close()


def test_class_names_are_escaped(browser, pages):
    page, messages = visit(browser, pages["hostile"], 390)
    page.wait_for_timeout(200)
    assert page.title().startswith("Ti/16")
    assert page.locator("#classes").get_by_text(NAMES[0], exact=True).count() == 1
    assert messages == []
    page.context.close()


def test_click_sorts_the_classes(browser, pages):
    page, _ = visit(browser, pages["usual"], 1280)

    def column(n):
        return page.locator("#classes tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{n}].dataset.by)")

    page.locator("#classes thead button").nth(1).click()
    most = [int(value) for value in column(1)]
    assert most == sorted(most, reverse=True)
    page.locator("#classes thead button").nth(0).click()
    assert column(0) == sorted(column(0))
    page.context.close()


def test_hover_shows_values(browser, pages):
    page, _ = visit(browser, pages["usual"], 1280)
    strip = page.locator("#curves .strip").nth(5)
    strip.hover()
    tip = strip.locator(".tip")
    assert tip.is_visible()
    assert "epoch 6" in tip.inner_text()
    page.context.close()


def test_text_has_enough_contrast(browser, pages):
    for scheme in ("light", "dark"):
        page, _ = visit(browser, pages["usual"], 1280, scheme)
        poor = page.evaluate(CONTRAST)
        assert poor == [], scheme
        page.context.close()


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => v <= 10 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = read(getComputedStyle(node).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const written = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!written || !node.offsetParent || node.closest("svg,script,.unseen")) continue;
    const [a, b] = [light(read(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push(node.className + " " + node.textContent.slice(0, 30) + " " + ratio.toFixed(2));
  }
  return poor;
}"""


def test_command_writes_a_page_and_prints_the_headline(tmp_path):
    made = made_run(tmp_path / "run", photographs=False, epochs=2)
    lines = vitrail("report", made).stdout.splitlines()
    assert lines == [format_headline(read_run(made)).replace("\u00a0", " "), str(made / "report.html")]
    assert lines[0].startswith("Ti/16 fine-tuned on clothing: top-1 accuracy 8")
    record = json.loads(vitrail("report", made, "--json", "--out", tmp_path / "page.html").stdout)
    assert record["measures"]["validation"] == read_run(made).evaluations["validation"].metrics
    assert (tmp_path / "page.html").is_file()


def test_command_compares_runs(tmp_path):
    made = [
        made_run(tmp_path / name, photographs=False, epochs=2, seed=k, lr=1e-4 * (k + 1)) for k, name in enumerate("ab")
    ]
    out = tmp_path / "both.html"
    output = vitrail("report", *made, "--out", out).stdout
    assert output.splitlines()[0].split() == ["run", "metric", "score", "95", "%", "time", "images/s", "steps"]
    assert "optimizer.lr  0.0001  0.0002" in output
    assert "McNemar’s mid-p" in output
    assert out.is_file()
    record = json.loads(vitrail("report", *made, "--out", out, "--json").stdout)
    assert [run["differs"]["optimizer.lr"] for run in record["runs"]] == [1e-4, 2e-4]


def test_command_refuses_other_directories(tmp_path):
    result = vitrail("report", tmp_path, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"vitrail report: {tmp_path} is not a run directory: it has none of run.json, recipe.json, metrics.jsonl, summary.json"
    ]
