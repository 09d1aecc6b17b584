"""Search by text through the command line: cosines of both towers, the contact sheet, refusals in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import make_towers
from tests.deploy.test_search import found, image_file, model, refused, search


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create two towers, a classifier, and an index of both of the same six images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vitrail.save(make_towers(), "towers.safetensors")
    model(Path("classifier.safetensors"))
    for number in range(6):
        image_file(Path("photos", f"{number}.png"), (40 * number, 20, 200 - 30 * number), number)
    return tmp_path


def build(capsys, where: str, out: str) -> None:
    code, _, error = search(capsys, "index", where, "photos", "--out", out, "--runtime", "torch")
    assert code == 0, error


def test_images_are_found_by_the_cosine_with_a_text(place, capsys) -> None:
    build(capsys, "towers.safetensors", "index")
    one, two = found(capsys, "index", "--text", "a cat", "--text", "two dogs", "--top", 3)
    towers = vitrail.load_towers("towers.safetensors")
    assert towers.preprocessing is not None
    assert towers.tokenizer is not None
    files = sorted(Path("photos").iterdir())
    with torch.inference_mode():
        images = towers.encode_images(torch.stack([towers.preprocessing(Image.open(path)) for path in files]))
        cosines = (images @ towers.encode_texts(towers.tokenizer(["a cat", "two dogs"])).T).numpy()
    for answer, column, query in ((one, cosines[:, 0], "a cat"), (two, cosines[:, 1], "two dogs")):
        order = np.argsort(-column)[:3]
        assert answer["query"] == query
        assert [Path(item["path"]).name for item in answer["neighbours"]] == [files[k].name for k in order]
        assert [item["cosine"] for item in answer["neighbours"]] == pytest.approx(column[order].tolist(), abs=1e-5)


def test_texts_and_images_are_queries_together_and_drawn(place, capsys) -> None:
    build(capsys, "towers.safetensors", "index")
    answers = found(capsys, "index", "photos/0.png", "--text", "a cat", "--out", "sheet.html")
    assert [Path(answer["query"]).name for answer in answers] == ["a cat", "0.png"]
    page = Path("sheet.html").read_text()
    assert "Nearest to a cat" in page
    assert "Nearest to 2 queries" in page
    found(capsys, "index", "--text", "<b>bold</b>", "--out", "alone.html")
    assert "<b>bold</b>" not in Path("alone.html").read_text()


def test_index_of_another_model_is_refused_by_name(place, capsys) -> None:
    build(capsys, "classifier.safetensors", "plain")
    message = refused(capsys, "find", "plain", "--text", "a cat")
    assert "plain was made with classifier (" in message
    assert "which has no text tower: index the folder with a model such as CLIP" in message
    vitrail.save(make_towers(seed=1), "other.safetensors")
    build(capsys, "towers.safetensors", "index")
    message = refused(capsys, "find", "index", "--text", "a cat", "--model", "other.safetensors")
    assert "other.safetensors differs from towers, the model of index, in weights" in message


def test_bad_texts_are_named_in_one_line(place, capsys) -> None:
    build(capsys, "towers.safetensors", "index")
    assert "the text is empty: give words" in refused(capsys, "find", "index", "--text", " ")
    assert "no query: give an image, or --text WORDS" in refused(capsys, "find", "index")
    assert "--tokenizer needs --text" in refused(capsys, "find", "index", "photos/0.png", "--tokenizer", "x")
    long = "x" * 1_000_001
    assert "texts must have at most 1,000,000 characters" in refused(capsys, "find", "index", "--text", long)
    code, out, error = search(capsys, "find", "index", "--text", "cat " * 25_000, "--json")
    assert code == 0
    assert error.startswith("only the first 16 tokens of a text of 100,000 characters are read: cat cat")
    assert len(error.strip().splitlines()) == 1
    assert json.loads(out)["answers"][0]["neighbours"]
    code, _, error = search(capsys, "find", "index", "--text", "漢字 🐈", "--json")
    assert (code, error) == (0, "")


def test_model_without_a_tokeniser_needs_one(place, capsys) -> None:
    bare = make_towers()
    bare.tokenizer = None
    vitrail.save(bare, "bare.safetensors")
    build(capsys, "bare.safetensors", "index")
    assert "has no tokeniser: give one with --tokenizer" in refused(capsys, "find", "index", "--text", "a cat")
    Path("merges.txt").write_text("#version\nc a\nca t</w>\nd o\ndo g</w>\np h\no f</w>\n")
    assert found(capsys, "index", "--text", "a cat", "--tokenizer", "merges.txt")
