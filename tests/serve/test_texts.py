"""Words in requests: classes that a request names, and the search of an index by text."""

from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")

import io

import vitrail
from tests.checkpoints.towers_made import make_towers
from tests.serve.made import FORM, Client, form, picture, serving, tiny
from tests.serve.test_page import until, visiting
from vitrail.deploy.search.search import build_index
from vitrail.serve.texts import KEPT, IndexSearch, TextTower

NAMES = ["a cat", "a dog", "photo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, bias in (("clip", False), ("siglip", True)):
        vitrail.save(make_towers(bias), folder / f"{name}.safetensors")
    tiny(folder / "tiny.safetensors")
    (folder / "photos").mkdir()
    for number in range(5):
        (folder / "photos" / f"{number}.png").write_bytes(picture(number))
    build_index(str(folder / "clip.safetensors"), folder / "photos", folder / "clip.index")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path):
    models = [f"{name}={folder / name}.safetensors" for name in ("clip", "siglip", "tiny")]
    with serving(*models) as running:
        running.service.texts.index = IndexSearch(folder / "clip.index")
        yield running


def ask(client: Client, classes: str, model: str = "clip", **more: str) -> tuple[int, dict]:
    query = "".join(f"&{name}={quote(value)}" for name, value in more.items())
    status, said, _ = client.post(f"/predict?model={model}&top=9&classes={quote(classes)}{query}", picture(1))
    return status, said


@pytest.mark.parametrize("model", ["clip", "siglip"])
def test_classes_of_a_request_are_predicted_as_by_the_zero_shot_classifier(client: Client, folder: Path, model: str):
    towers = vitrail.load_towers(folder / f"{model}.safetensors")
    classifier = vitrail.zero_shot(towers, NAMES, "{} outdoors")
    image = Image.open(io.BytesIO(picture(1)))
    with torch.inference_mode():
        expected = classifier(classifier.preprocessing(image)[None])[0].softmax(0)
    for _ in range(2):  # the second time the classifier is kept
        status, said = ask(client, " a cat , a dog,photo", model, template="{} outdoors")
        assert status == 200, said
        scores = {answer["label"]: answer["score"] for answer in said["predictions"][0]["answers"]}
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert [scores[name] for name in NAMES] == pytest.approx(expected.tolist(), abs=1e-5)


def test_several_images_get_the_same_classes(client: Client):
    body = form(("a.png", picture(1)), ("b.png", b"words"), ("c.png", picture(2)))
    status, said, _ = client.post("/predict?classes=cat,dog", body, FORM)
    assert status == 200
    assert [("answers" in row, row["name"]) for row in said["predictions"]] == [
        (True, "a.png"),
        (False, "b.png"),
        (True, "c.png"),
    ]


@pytest.mark.parametrize(
    ("classes", "more", "status", "words"),
    [
        ("cat", {}, 422, "classes= needs at least two names, got cat"),
        ("", {}, 422, "classes= needs at least two names, got none"),
        ("cat,,dog", {}, 422, "classes= has an empty name at position 2: remove it"),
        ("cat,dog, cat", {}, 422, "classes= lists 'cat' twice: remove one"),
        ("cat,dog", {"template": "no place"}, 422, "a template must have {} where the name goes, got 'no place'"),
        (",".join(map(str, range(201))), {}, 413, "classes has 201 names, at most 200 are accepted"),
        ("cat,dog", {"model": "tiny"}, 409, "'tiny' has no text tower: leave out classes"),
        ("x" * 4_001, {}, 422, "classes: String should have at most 4000 characters"),
    ],
)
def test_classes_that_cannot_be_used_are_one_line(client: Client, classes: str, more: dict, status: int, words: str):
    assert ask(client, classes, **more) == (status, {"error": words})


def test_a_model_with_a_text_tower_asks_for_classes(client: Client):
    status, said, _ = client.post("/predict", picture(1))
    assert status == 409
    assert said["error"] == "'clip' has no classes: name them in classes=, or use POST /embed"
    _, said, _ = client.ask("GET", "/models")
    assert {model["name"]: model["texts"] for model in said["models"]} == {"clip": True, "siglip": True, "tiny": False}
    assert said["index"] == "clip.index"


def test_names_are_never_read_as_paths(client: Client, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("one\ntwo\n")
    assert ask(client, str(secret))[1]["error"].startswith("classes= needs at least two names")
    assert [row["label"] for row in ask(client, f"{secret},imagenet")[1]["predictions"][0]["answers"]]


def test_the_index_is_searched_by_text_as_on_the_command_line(client: Client, folder: Path):
    status, said, _ = client.ask("GET", f"/search?text={quote('a photo of the dog')}&top=3&thumbnails=true")
    assert status == 200
    assert said["images"] == 5
    towers = vitrail.load_towers(folder / "clip.safetensors")
    assert towers.tokenizer is not None
    with torch.inference_mode():
        text = towers.encode_texts(towers.tokenizer(["a photo of the dog"]))
        paths = sorted((folder / "photos").iterdir())
        images = towers.encode_images(torch.stack([towers.preprocessing(path) for path in paths]))
        cosines = (images @ text.T)[:, 0]
    nearest = cosines.argsort(descending=True)[:3]
    assert [row["image"] for row in said["neighbours"]] == [paths[index].name for index in nearest]
    assert [row["cosine"] for row in said["neighbours"]] == pytest.approx(cosines[nearest].tolist(), abs=1e-4)
    assert all(row["thumbnail"].startswith("data:image/") for row in said["neighbours"])


def test_searches_that_cannot_be_answered_are_one_line(client: Client, folder: Path):
    assert client.ask("GET", "/search?text=%20")[:2] == (
        422,
        {"error": "the text is empty: give words, such as 'red shoes'"},
    )
    assert client.ask("GET", "/search")[:2] == (422, {"error": "text: Field required"})
    _, said, _ = client.ask("GET", f"/search?text={quote('cat ' * 100)}")
    assert said["notes"][0].startswith("only the first 16 tokens of a text of 400 characters are read: cat cat")
    with serving(f"tiny={folder / 'tiny.safetensors'}", tokens=("secret-token",)) as other:
        assert other.ask("GET", "/search?text=cat")[0] == 401
        status, said, _ = other.ask("GET", "/search?text=cat", Authorization="Bearer secret-token")
        assert (status, said["error"]) == (409, "there is no index to search: start the service with --index INDEX")


def test_the_latest_classifiers_are_kept():
    tower = TextTower(make_towers())
    first = tower.classify("cat,dog", "{}")
    assert tower.classify("cat,dog", "{}") is first
    for number in range(KEPT):
        tower.classify(f"cat,dog{number}", "{}")
    assert len(tower.kept) == KEPT
    assert tower.classify("cat,dog", "{}") is not first


def test_typing_words_on_the_page_moves_the_bars_and_the_search_page_shows_images(client: Client, browser):
    address = f"http://127.0.0.1:{client.port}"
    bars = "[...document.querySelectorAll('.scores li')].map((each) => each.textContent).join('; ')"
    with visiting(browser, address, quiet=False) as page:
        page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": picture(1)})
        page.locator("#words").wait_for()
        page.fill("#words", "a cat, a dog, the photo")
        until(page, f"{bars}.includes('the photo')")
        page.fill("#words", "a cat, a cat")
        until(page, "document.querySelector('#words-note').textContent.includes(\"lists 'a cat' twice\")")
        page.fill("#words", "two cats, of a dog")
        until(page, f"{bars}.includes('two cats') && !document.querySelector('#words-note').textContent")
        page.locator("#find").click()
        page.locator("#text").fill("a cat")
        page.locator("#form button").click()
        until(page, "document.querySelectorAll('#found img').length === 5")
        assert "The nearest 5 of 5 images" in page.locator("#status").text_content()
