"""The contact sheet in Chromium: decisions by mouse and keyboard, kept over a reload, saved as CSV."""

import csv
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.labelling.made import label
from vitrail.labelling.sheet import Sheet, SheetCard, build_suspect_sheet, render_sheet, write_sheet
from vitrail.labelling.suspects import LabelErrors, Suspect


def make_sheet(folder: Path, given: bool = True) -> Sheet:
    """Create images and return their sheet; one image is missing, one name is hostile."""
    names = ("1.jpg", "2.jpg", '<img src=x onerror="alert(1)">.jpg', "gone.jpg")
    for name in names[:3]:
        Image.new("RGB", (90, 60), (10, 120, 200)).save(folder / name)
    cards = tuple(
        SheetCard(str(folder / name), "cat" if given else "", "dog", name, (("suspicion", 0.9, "0.90"),))
        for name in names
    )
    return Sheet("4 suspects", ("kicker",), "lead", (("a", "1", "b"),), ("cat", "dog", 'a "b", c'), cards, "saved.csv")


@pytest.fixture
def opened(tmp_path, browser):
    """Open a sheet from the disk, and collect whatever a page may complain about or ask for."""
    write_sheet(make_sheet(tmp_path), tmp_path / "sheet.html")
    context = browser.new_context(accept_downloads=True, viewport={"width": 1100, "height": 900})
    page, complaints, asked = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "sheet.html").as_uri())
    yield page
    context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def save(page) -> list[dict[str, str]]:
    """Press the button and return the rows of the file."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save decisions").click()
    assert download.value.suggested_filename == "saved.csv"
    return list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))


def test_decisions_by_mouse_and_keyboard_are_saved(opened, tmp_path):
    page, cards = opened, opened.locator(".card")
    assert cards.count() == 4
    assert page.get_by_role("button", name="Save decisions").is_disabled()
    assert page.get_by_text("file missing").count() == 1
    cards.nth(0).get_by_role("button", name="Accept").click()
    assert page.evaluate("document.activeElement === document.querySelectorAll('.card')[1]")
    page.keyboard.press("c")
    page.keyboard.type("bird")
    page.keyboard.press("Enter")
    assert page.locator("#decided").inner_text() == "1", "bird is no class"
    page.locator(".other:visible").fill('a "b", c')
    page.keyboard.press("Enter")
    page.keyboard.press("d")
    page.keyboard.press("x")
    assert page.locator("#decided").inner_text() == "4"
    rows = save(page)
    assert [row["decision"] for row in rows] == ["accept", "correct", "dismiss", "remove"]
    assert [row["label"] for row in rows] == ["dog", 'a "b", c', "cat", ""]
    assert rows[2]["path"] == str(tmp_path / '<img src=x onerror="alert(1)">.jpg')
    assert {row["given_label"] for row in rows} == {"cat"}


def test_decisions_survive_a_reload_and_can_be_undone(opened):
    page = opened
    page.keyboard.press("a")
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Undecided").click()
    assert page.locator(".card:visible").count() == 3
    page.on("dialog", lambda dialog: dialog.accept())  # the page asks before unsaved decisions are left
    page.reload()
    assert page.locator("#decided").inner_text() == "1"
    assert page.locator('.card[data-decision="accept"] .stamp').inner_text() == "dog"
    page.locator(".card").first.click(position={"x": 20, "y": 20})
    page.keyboard.press("u")
    assert page.locator("#decided").inner_text() == "0"


def test_the_page_fits_a_telephone(opened):
    opened.set_viewport_size({"width": 390, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390


def test_images_without_labels_have_no_label_to_keep(tmp_path):
    html = render_sheet(make_sheet(tmp_path, given=False))
    assert 'data-action="dismiss"' not in html
    assert 'data-action="dismiss"' in render_sheet(make_sheet(tmp_path))


def test_the_page_says_when_it_shows_only_the_first_suspects(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    suspect = Suspect(1, str(tmp_path / "a.png"), "a", "b", 0.9, 0.9, 0.1, -0.8, 0.1, 0.1, "train")
    errors = LabelErrors("photos", "model", ("a", "b"), (suspect,) * 3, 10, 0.2, {}, ())
    sheet = build_suspect_sheet(errors, "decisions.csv", limit=2)
    assert len(sheet.cards) == 2
    assert any("the first 2 of 3 suspects" in note for note in sheet.notes)


def test_help_teaches(capsys):
    code, out, _ = label(capsys, "suspects", "--help")
    assert code == 0
    assert "near-duplicates are in one fold" in " ".join(out.split())
