"""The page of a map in Chromium: thumbnails, legend, selection, keyboard, and 50,000 points."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.deploy.map.columns import text_column
from vitrail.deploy.map.features import MapPoints
from vitrail.deploy.map.write import MapOptions, write_map

GROUPS = {"cat": (220, 30, 30), "dog": (30, 200, 40), "owl, grey": (20, 40, 230)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write a map of 60 images in three groups that are far apart, with a column of scores."""
    root = tmp_path_factory.mktemp("map-page")
    generator = np.random.default_rng(0)
    names, vectors, rows = [], [], ["path,error"]
    for group, (name, colour) in enumerate(GROUPS.items()):
        folder = root / "photos" / name
        folder.mkdir(parents=True)
        for number in range(20):
            path = folder / f"{number:02d}.png"
            Image.new("RGB", (60, 40), colour).save(path)
            names.append(str(path))
            vectors.append(4 * np.eye(8)[group] + 0.3 * generator.standard_normal(8))
            rows.append(f'"{path}",')
    np.save(root / "features.npy", np.array(vectors, np.float32))
    (root / "features.npy.paths.csv").write_text("\n".join(rows) + "\n")
    scores = [f'"{name}",{number / 60:.3f}' for number, name in enumerate(names)]
    (root / "scores.csv").write_text("\n".join(["path,score", *scores]) + "\n")
    code = main(
        [
            "embed",
            f"{root}/features.npy",
            f"{root}/photos",
            "--plot",
            f"{root}/map.html",
            "--table",
            f"{root}/scores.csv",
        ]
    )
    assert code == 0
    return root


@pytest.fixture
def page(browser, place):
    """Open the map; fail on messages of the console and on requests."""
    opened, complaints = browser.new_page(viewport={"width": 1200, "height": 1100}), []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: request.url[:4] in ("http", "ws:/") and complaints.append(request.url))
    opened.goto((place / "map.html").as_uri())
    opened.wait_for_function("image !== null")
    yield opened
    opened.close()
    assert not complaints


def screen(page, point: int) -> tuple[float, float]:
    """Return where a point is in the window."""
    box = page.locator("#map-stage").bounding_box()
    x, y = page.evaluate(f"[toScreenX({point}), toScreenY({point})]")
    return box["x"] + 1 + x, box["y"] + 1 + y  # with the border


def test_hover_shows_the_thumbnail_of_the_image(page):
    page.mouse.move(*screen(page, 25))
    page.wait_for_selector("#map-tip-image[data-painted=yes]", timeout=10_000)
    assert page.locator("#map-tip-name").inner_text() == page.evaluate("fileOf(state.hover)")
    assert page.locator("#map-tip-value").inner_text() == "class: dog"
    red, green, blue = page.evaluate("[...tipImage.getContext('2d').getImageData(40, 20, 1, 1).data].slice(0, 3)")
    assert green > 150 > max(red, blue)


def test_legend_hides_and_shows_classes(page):
    colours = "[...new Set(Array.from(pixels))].length"
    shown = page.evaluate(colours)
    page.get_by_role("checkbox", name="cat").uncheck()
    assert page.locator("#map-counts").inner_text() == "40 of 60 images shown"
    page.evaluate("drawMap()")
    assert page.evaluate(colours) < shown
    page.mouse.move(*screen(page, 5))
    assert page.locator("#map-tip").is_hidden()
    page.get_by_role("button", name="None", exact=True).click()
    assert page.locator("#map-counts").inner_text() == "0 of 60 images shown"
    page.get_by_role("button", name="All", exact=True).click()
    assert page.locator("#map-counts").inner_text() == "60 images"


@pytest.mark.parametrize("tool", ["Rectangle", "Lasso"])
def test_selection_exports_the_paths_inside(page, place, tool):
    page.get_by_role("radio", name=tool).check(force=True)
    places = [screen(page, point) for point in range(40, 60)]
    left, top = (min(values) - 8 for values in zip(*places, strict=True))
    right, bottom = (max(values) + 8 for values in zip(*places, strict=True))
    corners = (
        [(left, top), (right, top), (right, bottom), (left, bottom)]
        if tool == "Lasso"
        else [(left, top), (right, bottom)]
    )
    page.mouse.move(*corners[0])
    page.mouse.down()
    for corner in corners[1:]:
        page.mouse.move(*corner, steps=3)
    page.mouse.up()
    assert page.locator("#map-selected").inner_text() == "20 images selected"
    with page.expect_download(timeout=10_000) as download:
        page.get_by_role("button", name="Export CSV").click()
    assert download.value.suggested_filename == "map-selection.csv"
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == {f"{place}/photos/owl, grey/{number:02d}.png" for number in range(20)}
    assert {row["class"] for row in rows} == {"owl, grey"}
    assert float(rows[0]["score"]) == pytest.approx(0.6667, abs=1e-3)


def test_keyboard_opens_points_and_their_neighbours(page):
    page.locator("#map-stage").focus()
    scale = page.evaluate("view.scale")
    page.keyboard.press("+")
    assert page.evaluate("view.scale") > scale
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    first = page.evaluate("state.current")
    assert page.locator("#map-point-path").inner_text() == page.evaluate(f"pathOf({first})")
    assert page.locator("#map-near button").count() == 5
    wanted = page.evaluate(f"near[5 * {first}]")
    page.locator("#map-near button").first.press("Enter")
    assert page.evaluate("state.current") == wanted
    assert page.evaluate(f"columns[0].values[{wanted}] === columns[0].values[{first}]")  # of the same group
    page.locator("#map-stage").focus()
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate(f"points[2 * state.current] > points[2 * {wanted}]")


def test_search_finds_names_and_numbers_have_limits(page):
    page.locator("#map-search").fill("dog/03")
    page.keyboard.press("Enter")
    assert page.evaluate("pathOf(state.current)").endswith("dog/03.png")
    page.locator("#map-search").fill("OWL")
    page.get_by_role("button", name="Select 20 images").click()
    assert page.locator("#map-selected").inner_text() == "20 images selected"
    page.locator("#map-colour").select_option("score")
    page.get_by_label("at least").fill("500")
    assert page.locator("#map-counts").inner_text() == "30 of 60 images shown"


def test_wheel_zooms_to_thumbnails_around_the_pointer(page):
    x, y = map(int, screen(page, 10))
    page.mouse.move(x, y)
    left, top = page.evaluate("(() => { const b = stage.getBoundingClientRect(); return [b.left + 1, b.top + 1]; })()")
    under = f"[({x - left} - view.x) / view.scale, (view.y - {y - top}) / view.scale]"
    before = page.evaluate(under)
    for _ in range(12):
        page.mouse.wheel(0, -240)
    page.wait_for_function("view.scale > 20 * view.fitted")
    assert page.evaluate(under) == pytest.approx(before, abs=1e-6)
    page.wait_for_function("drawnThumbnails > 0")


def test_two_fingers_zoom_and_one_moves(page):
    session = page.context.new_cdp_session(page)
    x, y = map(int, screen(page, 10))
    scale, left = page.evaluate("[view.scale, view.x]")

    def touch(kind: str, *places: int) -> None:
        fingers = [{"x": x + place, "y": y, "id": number} for number, place in enumerate(places)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})

    touch("touchStart", 0)
    touch("touchMove", 30)
    touch("touchMove", 60)
    touch("touchEnd")
    page.wait_for_function(f"view.x > {left} + 25 && view.scale === {scale}")
    touch("touchStart", -20, 20)
    touch("touchMove", -45, 45)
    touch("touchMove", -80, 80)
    touch("touchEnd")
    page.wait_for_function(f"view.scale > 1.7 * {scale}")


def test_page_fits_a_phone_in_the_dark(browser, place):
    opened = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    opened.goto((place / "map.html").as_uri())
    opened.wait_for_function("image !== null")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.evaluate("theme.classes[0] === meta.palettes.dark.classes[0]")
    opened.close()


def test_fifty_thousand_points_and_a_thousand_classes_load(browser, tmp_path):
    count = 50_000
    generator = np.random.default_rng(0)
    names = [f"/data/{number:05d}.jpg" for number in range(count)]
    vectors = generator.standard_normal((count, 4)).astype(np.float32)
    points = MapPoints(names, vectors, None, np.full(count, -1), "image", "random", (), count)
    classes = text_column("class", [f"class {number % 1000:03d}" for number in range(count)])
    summary = write_map(points, [classes], tmp_path / "map.html", "Many", MapOptions(nearest=0))
    assert summary.nbytes < 8e6
    page, complaints = browser.new_page(viewport={"width": 1200, "height": 1100}), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "map.html").as_uri())
    page.wait_for_function("image !== null")
    assert page.evaluate("drawPoints()") > 0.99 * count
    assert page.locator("#map-legend li").count() == 400
    page.locator("#map-legend-filter").fill("class 987")
    page.get_by_role("button", name="Colour class 987").click()
    assert page.evaluate("state.colourOf.has(987)")
    assert page.evaluate("state.colourOf.size") == 10
    page.get_by_role("button", name="None", exact=True).click()
    assert page.locator("#map-counts").inner_text() == "49,950 of 50,000 images shown"
    page.close()
    assert not complaints
    assert json.dumps(summary.as_dict())
