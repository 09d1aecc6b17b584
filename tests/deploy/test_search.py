"""`vitrail search`: neighbours, updates, damaged indexes and the contact sheet."""

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
from vitrail.deploy.search.index import read_index
from vitrail.deploy.search.neighbours import ExactSearch, build_graph, normalise_rows

SIZE = 32


def model(path: Path, seed: int = 0) -> Path:
    """Save a small classifier."""
    torch.manual_seed(seed)
    made = package.build(patch=8, width=32, depth=2, heads=2, image_size=SIZE, classes=3, init="deit")
    package.save(made, path, labels=("a", "b", "c"), preprocessing=Preprocessing((SIZE, SIZE), (SIZE, SIZE)))
    return path


def image_file(path: Path, colour: tuple[int, int, int], seed: int = 0) -> Path:
    """Save an image of one colour with noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-12, 13, (40, 48, 3))
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create a model and a folder of 15 images in three colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model(Path("model.safetensors"))
    for number, (name, colour) in enumerate(COLOURS.items()):
        for seed in range(5):
            image_file(Path("photos", name, f"{seed}.png"), colour, 10 * number + seed)
    return tmp_path


def search(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["search", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def indexed(capsys, *more, out="index") -> dict:
    code, output, error = search(
        capsys, "index", "model.safetensors", "photos", "--out", out, "--runtime", "torch", "--json", *more
    )
    assert code == 0, error
    return json.loads(output)


def found(capsys, *arguments) -> list[dict]:
    code, output, error = search(capsys, "find", *arguments, "--json")
    assert code == 0, error
    return json.loads(output)["answers"]


def refused(capsys, *arguments) -> str:
    """Return the one-line error message."""
    code, _, error = search(capsys, *arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


# --- what is found ---


def test_neighbours_have_the_largest_cosines(place, capsys):
    report = indexed(capsys)
    assert (report["images"], report["values"], report["added"]) == (15, 32, 15)
    query = image_file(Path("query.png"), (210, 45, 35), 99)
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


def test_query_is_not_its_own_neighbour_but_its_copy_is(place, capsys):
    shutil.copy("photos/red/0.png", "photos/blue/copy.png")
    indexed(capsys)
    (answer,) = found(capsys, "index", "photos/red/0.png", "--top", 99)
    paths = [Path(each["path"]) for each in answer["neighbours"]]
    assert len(paths) == 15
    assert paths[0] == Path("photos/blue/copy.png").resolve()
    assert answer["neighbours"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert Path("photos/red/0.png").resolve() not in paths


def test_index_works_from_another_directory(place, capsys, monkeypatch):
    indexed(capsys)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert len(found(capsys, "../index", "../photos/red/0.png", "../photos/blue/1.png", "--top", 3)) == 2


def test_blocks_equal_one_product(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, queries = normalise_rows(rng.normal(size=(500, 16))), normalise_rows(rng.normal(size=(9, 16)))
    vectors[400] = vectors[30]  # equally near: the first in order comes first
    queries[0] = vectors[30]
    monkeypatch.setattr("vitrail.deploy.search.neighbours.BLOCK_ROWS", 64)
    monkeypatch.setattr("vitrail.deploy.search.neighbours.QUERY_BLOCK", 4)
    cosines, places = ExactSearch(vectors)(queries, 20)
    assert np.array_equal(places, np.argsort(-(queries @ vectors.T), 1, kind="stable")[:, :20])
    assert np.array_equal(places[0, :2], [30, 400])
    assert (np.diff(cosines, axis=1) <= 0).all()


def test_faiss_reports_its_recall(place, capsys, monkeypatch):
    pytest.importorskip("faiss", reason="it is not installed: pip install 'vitrail[faiss]'")
    report = indexed(capsys, "--index", "faiss")
    assert report["recall"]["share"] == 1.0  # so few that the graph cannot miss one
    query = image_file(Path("query.png"), (60, 200, 60), 99)
    (graph,), (exact,) = found(capsys, "index", query), found(capsys, "index", query, "--exact")
    assert [each["path"] for each in graph["neighbours"]] == [each["path"] for each in exact["neighbours"]]
    for one, other in zip(graph["neighbours"], exact["neighbours"], strict=True):
        assert one["cosine"] == pytest.approx(other["cosine"], abs=2e-6)  # each adds in an order of its own
    vectors = normalise_rows(np.random.default_rng(0).normal(size=(3000, 24)))
    monkeypatch.setattr(
        "vitrail.deploy.search.neighbours.EF_SEARCH_CANDIDATES", (1,)
    )  # as narrow as can be: it must miss some, and say so
    _, narrow = build_graph(vectors)
    monkeypatch.setattr("vitrail.deploy.search.neighbours.EF_SEARCH_CANDIDATES", (1, 1024))
    _, wide = build_graph(vectors)
    assert narrow.share < 0.9
    assert wide.share >= 0.99
    assert (wide.looked, wide.queries, wide.neighbours) == (1024, 200, 10)


def test_missing_faiss_is_an_error(place, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    error = refused(capsys, "index", "model.safetensors", "photos", "--out", "index", "--index", "faiss")
    assert "pip install 'vitrail[faiss]'" in error
    assert not Path("index").exists()


# --- what changes ---


def test_update_computes_new_and_changed_images_only(place, capsys, monkeypatch):
    indexed(capsys)
    before = read_index(Path("index"))
    image_file(Path("photos/new/1.png"), (250, 250, 10), 5)
    image_file(Path("photos/red/0.png"), (10, 250, 250), 6)
    os.utime("photos/red/0.png", ns=(1, 1))
    Path("photos/blue/4.png").unlink()
    asked = []
    from vitrail.inference import TorchRuntime

    whole = TorchRuntime.__call__
    monkeypatch.setattr(TorchRuntime, "__call__", lambda self, pixels: asked.append(len(pixels)) or whole(self, pixels))
    report = indexed(capsys, "--update")
    assert sum(asked) == 2
    assert {key: report[key] for key in ("added", "changed", "removed", "kept", "images")} == {
        "added": 1,
        "changed": 1,
        "removed": 1,
        "kept": 13,
        "images": 15,
    }
    after = read_index(Path("index"))
    old, new = ({p.path: v for p, v in zip(i.images, i.vectors, strict=True)} for i in (before, after))
    assert not np.allclose(old["red/0.png"], new["red/0.png"], atol=1e-4)
    for path in set(old) & set(new) - {"red/0.png"}:
        assert np.array_equal(old[path], new[path])
    indexed(capsys, out="anew")
    anew = read_index(Path("anew"))
    for p, v in zip(anew.images, anew.vectors, strict=True):
        assert np.allclose(new[p.path], v, atol=1e-6)
    assert sorted(p.name for p in Path("index").iterdir()) == sorted(
        ["index.json", *(p.name for p in after.files.values())]
    )


def test_unreadable_images_are_listed_and_retried(place, capsys):
    Path("photos/broken.jpg").write_bytes(b"no picture")
    Path("photos/nothing.png").symlink_to("nowhere.png")
    report = indexed(capsys)
    assert set(report["unreadable"]) == {"broken.jpg", "nothing.png"}
    assert report["images"] == 15
    code, out, error = search(capsys, "index", "model.safetensors", "photos", "--out", "other", "--runtime", "torch")
    assert code == 0
    assert "left out: broken.jpg: " in error
    assert out.splitlines()[-1] == "other"
    image_file(Path("photos/broken.png"), (9, 9, 9)).rename("photos/broken.jpg")
    report = indexed(capsys, "--update")
    assert set(report["unreadable"]) == {"nothing.png"}
    assert (report["added"], report["images"]) == (1, 16)


def test_names_with_any_bytes(place, capsys):
    odd = Path(os.fsdecode("photos/h\xe9.png".encode("latin-1")))
    image_file(odd, (200, 200, 0))
    Path("photos/<b>&.png").write_bytes(Path("photos/red/0.png").read_bytes())
    indexed(capsys)
    (answer,) = found(capsys, "index", odd, "photos/red/1.png")[:1]
    assert len(answer["neighbours"]) == 10
    code, out, _ = search(capsys, "find", "index", image_file(Path("q.png"), (200, 200, 0), 3), "--top", 1)
    assert code == 0
    assert "h\\xe9.png" in out


def test_interrupted_update_keeps_the_old_index(place, capsys, monkeypatch):
    indexed(capsys)
    (query,) = found(capsys, "index", "photos/red/0.png")
    image_file(Path("photos/new.png"), (1, 1, 1))

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.deploy.search.index.write_header", stop)
        assert main(["search", "index", "model.safetensors", "photos", "--out", "index", "--update"]) == 130
    capsys.readouterr()
    assert found(capsys, "index", "photos/red/0.png") == [query]
    report = indexed(capsys, "--update")
    assert report["added"] == 1
    assert len(list(Path("index").iterdir())) == 3  # what was left behind is gone


# --- what is refused ---


def test_query_with_another_model_is_an_error(place, capsys):
    indexed(capsys)
    model(Path("other.safetensors"), 7)
    assert "in weights" in refused(capsys, "find", "index", "photos/red/0.png", "--model", "other.safetensors")
    assert "in weights" in refused(
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
    assert "in token merging" in refused(capsys, *merging)
    Path("model.safetensors").rename("moved.safetensors")
    assert "--model" in refused(capsys, "find", "index", "photos/red/0.png")
    assert len(found(capsys, "index", "photos/red/0.png", "--model", "moved.safetensors")) == 1


def test_token_merging_of_an_index_is_used_for_queries(place, capsys):
    report = indexed(capsys, "--merge", "3")
    assert report["notes"] == ["input tokens per layer with merging: 17 14 (91 % of all)"]
    assert read_index(Path("index")).model.merge == 3
    (answer,) = found(capsys, "index", image_file(Path("q.png"), COLOURS["green"], 11), "--top", 1)
    assert answer["neighbours"][0]["cosine"] > 0.9


def test_empty_folders_and_existing_outputs_are_errors(place, capsys):
    make = ("index", "model.safetensors")
    Path("empty").mkdir()
    assert "no images in empty" in refused(capsys, *make, "empty", "--out", "index")
    assert "nowhere does not exist" in refused(capsys, *make, "nowhere", "--out", "index")
    Path("bad").mkdir()
    Path("bad/1.jpg").write_bytes(b"")
    assert "no image in bad can be read" in refused(capsys, *make, "bad", "--out", "index", "--runtime", "torch")
    assert not Path("index").exists()
    assert not list(place.glob(".index*"))
    assert "is not a search index: omit --update" in refused(capsys, *make, "photos", "--out", "index", "--update")
    assert "exists and is not empty" in refused(capsys, *make, "photos", "--out", "photos")
    indexed(capsys)
    assert "add --update" in refused(capsys, *make, "photos", "--out", "index")
    assert "is an index of" in refused(capsys, *make, "photos/red", "--out", "index", "--update")


def test_invalid_queries_are_errors(place, capsys):
    indexed(capsys)
    Path("text.jpg").write_text("text")
    assert "text.jpg" in refused(capsys, "find", "index", "text.jpg")
    assert "nowhere.jpg does not exist" in refused(capsys, "find", "index", "nowhere.jpg")
    assert "photos is a folder" in refused(capsys, "find", "index", "photos")
    assert "--top must be >= 1, got 0" in refused(capsys, "find", "index", "photos/red/0.png", "--top", 0)
    assert "must end in .html" in refused(capsys, "find", "index", "photos/red/0.png", "--out", "sheet.pdf")
    assert "is not a search index: run" in refused(capsys, "find", "photos", "photos/red/0.png")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def turned(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, turned, Path.unlink])
@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_damaged_index_is_an_error(place, capsys, kind, harm):
    indexed(capsys)
    harm(next(Path("index").glob(f"{kind}-*")))
    assert "damaged search index" in refused(capsys, "find", "index", "photos/red/0.png")


def test_damaged_header_is_an_error(place, capsys):
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
        assert "damaged search index" in refused(capsys, "find", "index", "photos/red/0.png")


# --- the sheet ---


def test_contact_sheet_is_self_contained(place, capsys):
    playwright = pytest.importorskip("playwright.sync_api", reason="it is not installed: pip install 'vitrail[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    hostile = Path("photos/<img src=x onerror=alert(1)>.png")
    shutil.copy("photos/red/0.png", hostile)
    indexed(capsys)
    Path("photos/red/1.png").unlink()
    query = image_file(Path("query.png"), COLOURS["red"], 99)
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
        assert page.locator(".near").get_by_text("file missing").count() == 1
        assert page.get_by_text(hostile.name, exact=True).count() == 1
        assert page.evaluate("[...document.images].every(i => i.alt)")
        browser.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
