"""`vitrail search`: what is found is what is nearest, an index is whole or refused, and a sheet shows it."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as package
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.nearest import Exact, build_graph, unit
from vitrail.deploy.search_index import read_index

SIZE = 32


def model(path: Path, seed: int = 0) -> Path:
    """A small model with classes, in a file."""
    torch.manual_seed(seed)
    made = package.build(patch=8, width=32, depth=2, heads=2, image_size=SIZE, classes=3, init="deit")
    package.save(made, path, labels=("a", "b", "c"), preprocessing=Preprocessing((SIZE, SIZE), (SIZE, SIZE)))
    return path


def picture(path: Path, colour: tuple[int, int, int], seed: int = 0) -> Path:
    """One colour with a bit of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-12, 13, (40, 48, 3))
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A model and a folder of 15 pictures in three colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model(Path("model.safetensors"))
    for number, (name, colour) in enumerate(COLOURS.items()):
        for seed in range(5):
            picture(Path("photos", name, f"{seed}.png"), colour, 10 * number + seed)
    return tmp_path


def search(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["search", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def indexed(capsys, *more, out="index") -> dict:
    code, said, error = search(
        capsys, "index", "model.safetensors", "photos", "--out", out, "--runtime", "torch", "--json", *more
    )
    assert code == 0, error
    return json.loads(said)


def found(capsys, *arguments) -> list[dict]:
    code, said, error = search(capsys, "find", *arguments, "--json")
    assert code == 0, error
    return json.loads(said)["answers"]


def refused(capsys, *arguments) -> str:
    """The one line of a refusal."""
    code, _, error = search(capsys, *arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


# --- what is found ---


def test_the_nearest_are_those_whose_features_are_nearest(place, capsys):
    told = indexed(capsys)
    assert (told["pictures"], told["values"], told["added"]) == (15, 32, 15)
    query = picture(Path("query.png"), (210, 45, 35), 99)
    (answer,) = found(capsys, "index", query, "--top", 6)
    bare = package.load("model.safetensors", classes=None).eval()
    assert bare.preprocessing is not None

    def seen(path):
        with torch.inference_mode():
            values = bare(bare.preprocessing(Image.open(path))[None])[0].double().numpy()
        return values / np.linalg.norm(values)

    files = [Path("photos", name, f"{seed}.png") for name in COLOURS for seed in range(5)]
    cosines = {str(file.resolve()): float(seen(file) @ seen(query)) for file in files}
    wanted = sorted(cosines, key=lambda path: -cosines[path])[:6]
    assert [each["path"] for each in answer["neighbours"]] == wanted
    assert [each["rank"] for each in answer["neighbours"]] == list(range(1, 7))
    for each in answer["neighbours"]:
        assert each["cosine"] == pytest.approx(cosines[each["path"]], abs=1e-5)


def test_a_picture_of_the_index_is_not_its_own_neighbour_and_its_copy_is_the_nearest(place, capsys):
    shutil.copy("photos/red/0.png", "photos/blue/copy.png")
    indexed(capsys)
    (answer,) = found(capsys, "index", "photos/red/0.png", "--top", 99)
    paths = [Path(each["path"]) for each in answer["neighbours"]]
    assert len(paths) == 15
    assert paths[0] == Path("photos/blue/copy.png").resolve()
    assert answer["neighbours"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert Path("photos/red/0.png").resolve() not in paths


def test_an_index_is_asked_from_another_place_with_the_model_it_names(place, capsys, monkeypatch):
    indexed(capsys)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert len(found(capsys, "../index", "../photos/red/0.png", "../photos/blue/1.png", "--top", 3)) == 2


def test_blocks_give_what_all_at_once_gives(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng.normal(size=(500, 16))), unit(rng.normal(size=(9, 16)))
    vectors[400] = vectors[30]  # equally near: the first in order comes first
    queries[0] = vectors[30]
    monkeypatch.setattr("vitrail.deploy.nearest.BLOCK", 64)
    monkeypatch.setattr("vitrail.deploy.nearest.QUERIES", 4)
    cosines, places = Exact(vectors)(queries, 20)
    assert np.array_equal(places, np.argsort(-(queries @ vectors.T), 1, kind="stable")[:, :20])
    assert np.array_equal(places[0, :2], [30, 400])
    assert (np.diff(cosines, axis=1) <= 0).all()


def test_faiss_says_how_many_of_the_true_neighbours_it_finds(place, capsys, monkeypatch):
    pytest.importorskip("faiss", reason="it is not installed: pip install 'vitrail[faiss]'")
    told = indexed(capsys, "--index", "faiss")
    assert told["recall"]["share"] == 1.0  # so few that the graph cannot miss one
    query = picture(Path("query.png"), (60, 200, 60), 99)
    (graph,), (exact,) = found(capsys, "index", query), found(capsys, "index", query, "--exact")
    assert [each["path"] for each in graph["neighbours"]] == [each["path"] for each in exact["neighbours"]]
    for one, other in zip(graph["neighbours"], exact["neighbours"], strict=True):
        assert one["cosine"] == pytest.approx(other["cosine"], abs=2e-6)  # each adds in an order of its own
    vectors = unit(np.random.default_rng(0).normal(size=(3000, 24)))
    monkeypatch.setattr("vitrail.deploy.nearest.LOOKED", (1,))  # as narrow as can be: it must miss some, and say so
    _, narrow = build_graph(vectors)
    monkeypatch.setattr("vitrail.deploy.nearest.LOOKED", (1, 1024))
    _, wide = build_graph(vectors)
    assert narrow.share < 0.9
    assert wide.share >= 0.99
    assert (wide.looked, wide.queries, wide.neighbours) == (1024, 200, 10)


def test_without_faiss_a_line_says_how_to_get_it(place, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    error = refused(capsys, "index", "model.safetensors", "photos", "--out", "index", "--index", "faiss")
    assert "pip install 'vitrail[faiss]'" in error
    assert not Path("index").exists()


# --- what changes ---


def test_an_update_computes_what_is_new_or_changed_and_drops_what_is_gone(place, capsys, monkeypatch):
    indexed(capsys)
    before = read_index(Path("index"))
    picture(Path("photos/new/1.png"), (250, 250, 10), 5)
    picture(Path("photos/red/0.png"), (10, 250, 250), 6)
    os.utime("photos/red/0.png", ns=(1, 1))
    Path("photos/blue/4.png").unlink()
    asked = []
    from vitrail.deploy.torch_runtime import TorchRuntime

    whole = TorchRuntime.__call__
    monkeypatch.setattr(TorchRuntime, "__call__", lambda self, pixels: asked.append(len(pixels)) or whole(self, pixels))
    told = indexed(capsys, "--update")
    assert sum(asked) == 2
    assert {key: told[key] for key in ("added", "changed", "removed", "kept", "pictures")} == {
        "added": 1,
        "changed": 1,
        "removed": 1,
        "kept": 13,
        "pictures": 15,
    }
    after = read_index(Path("index"))
    old, new = ({p.path: v for p, v in zip(i.pictures, i.vectors, strict=True)} for i in (before, after))
    assert not np.allclose(old["red/0.png"], new["red/0.png"], atol=1e-4)
    for path in set(old) & set(new) - {"red/0.png"}:
        assert np.array_equal(old[path], new[path])
    indexed(capsys, out="anew")
    anew = read_index(Path("anew"))
    for p, v in zip(anew.pictures, anew.vectors, strict=True):
        assert np.allclose(new[p.path], v, atol=1e-6)
    assert sorted(p.name for p in Path("index").iterdir()) == sorted(
        ["index.json", *(p.name for p in after.parts.values())]
    )


def test_what_cannot_be_read_is_listed_and_tried_again(place, capsys):
    Path("photos/broken.jpg").write_bytes(b"no picture")
    Path("photos/nothing.png").symlink_to("nowhere.png")
    told = indexed(capsys)
    assert set(told["unreadable"]) == {"broken.jpg", "nothing.png"}
    assert told["pictures"] == 15
    code, out, error = search(capsys, "index", "model.safetensors", "photos", "--out", "other", "--runtime", "torch")
    assert code == 0
    assert "left out: broken.jpg: " in error
    assert out.splitlines()[-1] == "other"
    picture(Path("photos/broken.png"), (9, 9, 9)).rename("photos/broken.jpg")
    told = indexed(capsys, "--update")
    assert set(told["unreadable"]) == {"nothing.png"}
    assert (told["added"], told["pictures"]) == (1, 16)


def test_names_in_any_bytes_are_indexed_and_found(place, capsys):
    odd = Path(os.fsdecode("photos/h\xe9.png".encode("latin-1")))
    picture(odd, (200, 200, 0))
    Path("photos/<b>&.png").write_bytes(Path("photos/red/0.png").read_bytes())
    indexed(capsys)
    (answer,) = found(capsys, "index", odd, "photos/red/1.png")[:1]
    assert len(answer["neighbours"]) == 10
    code, out, _ = search(capsys, "find", "index", picture(Path("q.png"), (200, 200, 0), 3), "--top", 1)
    assert code == 0
    assert "h\\xe9.png" in out


def test_a_stopped_update_leaves_the_old_index(place, capsys, monkeypatch):
    indexed(capsys)
    (query,) = found(capsys, "index", "photos/red/0.png")
    picture(Path("photos/new.png"), (1, 1, 1))

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.deploy.searching.write_head", stop)
        assert main(["search", "index", "model.safetensors", "photos", "--out", "index", "--update"]) == 130
    capsys.readouterr()
    assert found(capsys, "index", "photos/red/0.png") == [query]
    told = indexed(capsys, "--update")
    assert told["added"] == 1
    assert len(list(Path("index").iterdir())) == 3  # what was left behind is gone


# --- what is refused ---


def test_a_query_by_another_model_is_refused(place, capsys):
    indexed(capsys)
    model(Path("other.safetensors"), 7)
    assert "other weights" in refused(capsys, "find", "index", "photos/red/0.png", "--model", "other.safetensors")
    assert "other weights" in refused(
        capsys, "index", "other.safetensors", "photos", "--out", "index", "--update", "--runtime", "torch"
    )
    merging = (
        "index",
        "model.safetensors",
        "photos",
        "--out",
        "index",
        "--update",
        "--merge",
        "2",
        "--runtime",
        "torch",
    )
    assert "other token merging" in refused(capsys, *merging)
    Path("model.safetensors").rename("moved.safetensors")
    assert "--model" in refused(capsys, "find", "index", "photos/red/0.png")
    assert len(found(capsys, "index", "photos/red/0.png", "--model", "moved.safetensors")) == 1


def test_an_index_with_merged_tokens_is_asked_with_merged_tokens(place, capsys):
    told = indexed(capsys, "--merge", "3")
    assert told["notes"] == ["tokens that come into the layers, merged: 17 14 (91 % of all)"]
    assert read_index(Path("index")).model.merge == 3
    (answer,) = found(capsys, "index", picture(Path("q.png"), COLOURS["green"], 11), "--top", 1)
    assert answer["neighbours"][0]["cosine"] > 0.9


def test_folders_without_pictures_and_places_that_are_taken_are_refused(place, capsys):
    make = ("index", "model.safetensors")
    Path("empty").mkdir()
    assert "empty holds no pictures" in refused(capsys, *make, "empty", "--out", "index")
    assert "nowhere is not there" in refused(capsys, *make, "nowhere", "--out", "index")
    Path("bad").mkdir()
    Path("bad/1.jpg").write_bytes(b"")
    assert "no picture in bad could be read" in refused(capsys, *make, "bad", "--out", "index", "--runtime", "torch")
    assert not Path("index").exists()
    assert not list(place.glob(".index*"))
    assert "is no index to update" in refused(capsys, *make, "photos", "--out", "index", "--update")
    assert "is there and not empty" in refused(capsys, *make, "photos", "--out", "photos")
    indexed(capsys)
    assert "add --update" in refused(capsys, *make, "photos", "--out", "index")
    assert "is an index of" in refused(capsys, *make, "photos/red", "--out", "index", "--update")


def test_queries_that_are_none_are_refused(place, capsys):
    indexed(capsys)
    Path("text.jpg").write_text("text")
    assert "text.jpg" in refused(capsys, "find", "index", "text.jpg")
    assert "nowhere.jpg is not there" in refused(capsys, "find", "index", "nowhere.jpg")
    assert "photos is a folder" in refused(capsys, "find", "index", "photos")
    assert "--top 0" in refused(capsys, "find", "index", "photos/red/0.png", "--top", 0)
    assert "ends in .html" in refused(capsys, "find", "index", "photos/red/0.png", "--out", "sheet.pdf")
    assert "make one with" in refused(capsys, "find", "photos", "photos/red/0.png")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def turned(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, turned, Path.unlink])
@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_a_damaged_index_is_refused(place, capsys, kind, harm):
    indexed(capsys)
    harm(next(Path("index").glob(f"{kind}-*")))
    assert "damaged index" in refused(capsys, "find", "index", "photos/red/0.png")


def test_a_damaged_head_is_refused_whatever_it_says(place, capsys):
    indexed(capsys)
    head = Path("index/index.json")
    whole = json.loads(head.read_text())
    outside = {**whole["files"], "vectors": {"name": "../model.safetensors", "sha256": "0"}}
    changes = [
        {"version": 2},
        {"model": {}},
        {"files": {}},
        {"files": outside},
        {"preprocessing": {"type": "x"}},
        {"folder": 3},
    ]
    for text in ("", "[]", "{}", *(json.dumps(whole | change) for change in changes)):
        head.write_text(text)
        assert "damaged index" in refused(capsys, "find", "index", "photos/red/0.png")


# --- the sheet ---


def test_the_sheet_is_one_page_that_asks_nobody_for_anything(place, capsys):
    playwright = pytest.importorskip("playwright.sync_api", reason="it is not installed: pip install 'vitrail[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    hostile = Path("photos/<img src=x onerror=alert(1)>.png")
    shutil.copy("photos/red/0.png", hostile)
    indexed(capsys)
    Path("photos/red/1.png").unlink()
    query = picture(Path("query.png"), COLOURS["red"], 99)
    code, out, _ = search(capsys, "find", "index", query, "--top", 8, "--out", "sheet.html")
    assert code == 0
    assert out.splitlines()[-1] == "sheet.html"
    assert len(out.splitlines()) == 11
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page, complaints, asked = browser.new_page(viewport={"width": 390, "height": 900}), [], []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(Path("sheet.html").resolve().as_uri())
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("header .asked img").count() == 1
        assert page.locator(".near figure").count() == 8
        assert page.locator(".near img").count() == 7
        assert page.locator(".near").get_by_text("no longer there").count() == 1
        assert page.get_by_text(hostile.name, exact=True).count() == 1
        assert page.evaluate("[...document.images].every(i => i.alt)")
        browser.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
