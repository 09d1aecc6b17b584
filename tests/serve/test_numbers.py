"""Numbers over HTTP: POST /predict of a regression model, its refusals, and the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

import vitrail
from tests.deploy.numbers import TARGETS, save_regressor, write_table
from tests.serve.made import FORM, Client, form, picture, serving


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("numbers")
    save_regressor(root / "prices.safetensors")
    write_table(root / "photos", 2)
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    with serving(f"prices={place / 'prices.safetensors'}") as running:
        yield running


def test_predict_returns_the_numbers_by_name(client: Client, place: Path) -> None:
    path = place / "photos" / "000.png"
    status, said, _ = client.ask("POST", "/predict", path.read_bytes(), Content_Type="image/png")
    assert status == 200
    (found,) = said["predictions"]
    (row,) = vitrail.predict(place / "prices.safetensors", path, device="cpu")
    assert list(found["values"]) == list(TARGETS)
    assert found["values"] == pytest.approx(dict(row.values), rel=1e-5)
    assert "answers" not in found


def test_a_bad_part_of_a_form_has_an_error_instead(client: Client) -> None:
    body = form(("a.png", picture()), ("b.png", b"no image"))
    status, said, _ = client.ask("POST", "/predict", body, Content_Type=FORM)
    assert status == 200
    good, bad = said["predictions"]
    assert set(good["values"]) == set(TARGETS)
    assert "values" not in bad
    assert bad["error"]


def test_models_say_that_they_predict_numbers(client: Client) -> None:
    _, said, _ = client.ask("GET", "/models")
    (model,) = said["models"]
    assert (model["numbers"], model["masks"], model["labels"]) == (True, False, list(TARGETS))
    status, said, _ = client.ask("POST", "/segment", picture(), Content_Type="image/png")
    assert (status, said["error"]) == (409, "'prices' predicts numbers: use POST /predict")
    status, said, _ = client.ask("POST", "/attention", picture(), Content_Type="image/png")
    assert (status, said["answers"]) == (200, [])


def test_the_page_shows_the_numbers(client: Client, browser) -> None:
    from tests.serve.test_page import file, give, visiting

    _, said, _ = client.ask("POST", "/predict", picture(), Content_Type="image/png")
    values = said["predictions"][0]["values"]
    with visiting(browser, f"http://127.0.0.1:{client.port}") as page:
        give(page, file("house.png", picture(), "image/png"))
        assert page.locator(".pane.a .verdict b").inner_text() == "2 numbers"
        assert page.locator(".pane.a .scores .label").all_inner_texts() == list(TARGETS)
        shown = [float(text) for text in page.locator(".pane.a .scores .share").all_inner_texts()]
        assert shown == pytest.approx(list(values.values()), rel=1e-3)
        assert "2 numbers" in page.locator("body").inner_text()
        assert "classes" not in page.locator("header").inner_text()
