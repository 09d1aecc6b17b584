"""The page of a diagnosis, in the style of the reports: verdict, problems, self-test with charts, facts."""

import json
from collections.abc import Mapping
from typing import Any

from vitrail.doctor import summary
from vitrail.doctor.diagnosis import Diagnosis
from vitrail.doctor.packages import REQUIRED
from vitrail.reports.charts import canvas
from vitrail.reports.charts.bars import draw_bars
from vitrail.reports.charts.canvas import Chart, Series
from vitrail.reports.charts.figure import describe_chart
from vitrail.reports.document import PageSection, read_resource, render_document, render_heading
from vitrail.reports.html import Markup, h, isolate, render_table
from vitrail.reports.summary import render_tile, render_tiles
from vitrail.utils.text import format_bytes, format_datetime, format_number

CHART_WIDTH = 330  # pixels: three charts stand side by side


def render_page(facts: Diagnosis) -> str:
    """Return the page as HTML."""
    title = "vitrail doctor: " + summary.format_headline(facts)
    software = [facts["software"]["vitrail"], str(facts["software"]["torch"].get("version"))]
    kicker = (f"vitrail {software[0]}", f"PyTorch {software[1]}", format_datetime(facts["created"]) + " UTC")
    warned = any(problem["severity"] == "warning" for problem in facts["problems"])
    verdict = "Something does not work" if not facts["ok"] else "It works, with warnings" if warned else "All is well"
    top = [*render_heading(kicker, verdict, render_lead(facts)), render_doctor_tiles(facts)]
    sections: list[PageSection] = [
        ("problems", "Problems", "Problems", [render_problems(facts)]),
        ("tests", "Self-test", "Self-test", [render_tests(facts), render_charts(facts)]),
        ("device", "Device", "Chosen for a run", [render_rows(summary.describe_device(facts))]),
        ("software", "Software", "Software", render_software(facts)),
        ("machine", "Machine", "Machine", [render_rows(summary.describe_machine(facts))]),
        ("storage", "Storage", "Storage", [render_storage(facts)]),
        ("variables", "Variables", "Environment variables", [render_variables(facts)]),
    ]
    seed = json.dumps([facts["machine"]["processor"]["model"], *software])
    style = read_resource("vitrail.doctor", "page.css")
    return render_document(title, seed, top, sections, "processor and versions", style)


def render_lead(facts: Diagnosis) -> str:
    """Return the headline as a sentence, with what the page leaves out."""
    headline = summary.format_headline(facts)
    private = "Home directory and user name are ~; host name, tokens and proxies are left out."
    return f"{headline[0].upper()}{headline[1:]}. {private}"


def render_doctor_tiles(facts: Diagnosis) -> Markup | None:
    """Return tiles of the device, memory, speed of training and of loading."""
    device, processor = facts["device"]["name"] or "none", facts["machine"]["processor"]
    gpus = facts["software"]["torch"].get("gpus") or []
    memory = gpus[0]["memory"] if gpus else facts["machine"]["memory"]["total"]
    available = format_bytes(facts["machine"]["memory"]["available"])
    cores = summary.count_words(processor["usable_cores"], "usable core")
    tiles: list[Markup | None] = [
        render_tile(
            "Device of a run", device, None, None, gpus[0]["name"] if gpus else f"{processor['model']}, {cores}"
        ),
        render_tile(
            "Memory of the GPU" if gpus else "Memory",
            format_bytes(memory),
            None,
            None,
            f"{available} of the host available",
        ),
    ]
    speeds = (
        ("vit", "training_images_per_second", "ViT-S/16, training", "images/s"),
        ("vit", "prediction_images_per_second", "ViT-S/16, prediction", "images/s"),
        ("loader", "images_per_second", "Loading JPEG files", "images/s"),
    )
    for test, key, label, unit in speeds:
        values: Mapping[str, float] = summary.find_values(facts, test).get(key, {})
        if values:
            best = max(values, key=lambda name: values[name])
            how = f"{unit} with {summary.count_words(int(best), 'worker')}" if test == "loader" else f"{unit} in {best}"
            tiles.append(render_tile(label, format_number(values[best]), None, None, how))
    return render_tiles(*tiles)


def render_problems(facts: Diagnosis) -> Markup:
    """Return the problems with their remedies, the worst first."""
    if not facts["problems"]:
        return h("p", "No problems were found.")
    items = []
    for problem in facts["problems"]:
        mark = h("span", problem["severity"], class_=f"mark {problem['severity']}")
        text = h("p", mark, " ", isolate(problem["text"]))
        items.append(h("li", text, h("p", problem["remedy"], class_="remedy"), class_=f"is-{problem['severity']}"))
    return h("ul", items, class_="problems")


def render_tests(facts: Diagnosis) -> Markup | None:
    """Return the table of the self-test."""
    rows = [
        [
            h("code", test["name"]),
            test["title"],
            h("span", test["status"], class_=f"mark {test['status']}"),
            f"{test['seconds']:.1f} s",
            isolate(test["detail"]),
        ]
        for test in facts["tests"]
    ]
    head = ["step", "what it tests", "result", "time", "measured"]
    return h("div", render_table(head, rows, caption="Steps of the self-test"), class_="steps") if rows else None


def render_charts(facts: Diagnosis) -> Markup | None:
    """Return bar charts of the measured speeds."""
    loader = summary.find_values(facts, "loader").get("images_per_second", {})
    by_workers = {summary.count_words(int(workers), "worker"): speed for workers, speed in loader.items()}
    products = summary.find_values(facts, "matmul")
    model = summary.find_values(facts, "vit")
    purposes = {name: model.get(f"{name}_images_per_second", {}) for name in ("prediction", "training")}
    charts = [
        build_chart("ViT-S/16, images per second", purposes),
        build_chart("Loading JPEGs, images per second", {"": by_workers}),
        build_chart("Matrix products, GFLOP/s", {"": products.get("gflops", {})}),
    ]
    figures = [render_bar_figure(chart) for chart in charts if chart is not None]
    return h("div", figures, class_="speeds") if figures else None


def build_chart(title: str, groups: Mapping[str, Mapping[str, float]]) -> Chart | None:
    """Return a chart of bars, one series for each group; None without values."""
    series = tuple(Series(name, tuple(values), tuple(values.values())) for name, values in groups.items() if values)
    return Chart(title, "bars", series, percent=False, from_zero=True) if series else None


def render_bar_figure(chart: Chart) -> Markup:
    """Return a chart as a part of the page, with one drawing for all screens."""
    inside = draw_bars(chart, canvas.PAGE, CHART_WIDTH)
    box = f"0 0 {CHART_WIDTH} {inside.height:.0f}"
    about = {"role": "img", "aria_label": describe_chart(chart)}
    drawing = h("svg", inside.parts, viewBox=box, font_size=canvas.FONT_SIZE, **about)
    return h("figure", h("figcaption", h("h3", chart.title)), drawing, class_="chart study")


def render_rows(rows: summary.Rows) -> Markup:
    """Return labels and values as a definition list."""
    return h("dl", [h("div", h("dt", label), h("dd", isolate(value))) for label, value in rows], class_="facts")


def render_software(facts: Diagnosis) -> list[Markup | None]:
    """Return versions, and the extras with what they enable."""
    rows: list[list[Any]] = []
    for group in facts["software"]["packages"]:
        if group["name"] != REQUIRED:
            name, enables, versions = summary.describe_extra(group)
            shown = h("code", versions) if group["install"] == versions else versions
            rows.append([h("code", name), enables, shown])
    head = ["extra", "enables", "installed, or how to install it"]
    table = render_table(head, rows, caption="Extras") if rows else None
    return [render_rows(summary.describe_software(facts)), table]


def render_storage(facts: Diagnosis) -> Markup:
    """Return the table of folders with their sizes and free space."""
    rows = [list(summary.describe_storage(folder)) for folder in facts["storage"]]
    shown = [[name, h("code", isolate(path)), size, free] for name, path, size, free in rows]
    return render_table(["folder", "path", "size", "free"], shown, caption="Folders", numeric_from=2)


def render_variables(facts: Diagnosis) -> Markup:
    """Return the environment variables that matter."""
    if not facts["environment"]:
        return h("p", "None of those that matter is set.")
    rows = [[h("code", name), h("code", isolate(value))] for name, value in facts["environment"].items()]
    return render_table(["variable", "value"], rows, caption="Environment variables", fit=True)
