"""`vitrail embed --plot`: projections, columns, thumbnails, and bad input through the command line."""

import builtins
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA

import vitrail
from tests.deploy.test_search import COLOURS, image_file, model
from vitrail.cli import main
from vitrail.deploy.map import projection
from vitrail.deploy.map.atlas import build_atlas, choose_size, order_on_curve
from vitrail.deploy.map.columns import MISSING, merge_columns, predict_columns, read_table_columns, text_column
from vitrail.deploy.map.write import find_point_neighbours
from vitrail.deploy.search.neighbours import normalise_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Create a model and a folder of 12 images in three classes and two splits, and embed it."""
    root = tmp_path_factory.mktemp("map")
    model(root / "model.safetensors")
    for number, (name, colour) in enumerate(COLOURS.items()):
        for seed in range(4):
            split = "train" if seed < 3 else "validation"
            label = "abc"[number]
            image_file(root / "photos" / split / label / f"{name} {seed}.png", colour, 10 * number + seed)
    return root


@pytest.fixture
def embedded(place, monkeypatch, tmp_path_factory):
    """Enter the folder of the images, with their features in features.npy."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    if not Path("features.npy").exists():
        assert main(["embed", "model.safetensors", "photos", "--out", "features.npy", "--precision", "fp32"]) == 0
    return place


def embed(capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["embed", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def refused(capsys, *arguments) -> str:
    """Return the only line on standard error of a command that fails."""
    code, _, error = embed(capsys, *arguments)
    lines = [line for line in error.splitlines() if line]
    assert code == 2
    assert len(lines) == 1, error
    return lines[0]


def meta_of(page: Path) -> dict:
    found = re.search(r'id="data-meta">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def write_features(path: Path, vectors: np.ndarray, names: list[str] | None = None) -> Path:
    """Write a file of features as `vitrail embed` does."""
    np.save(path, vectors.astype(np.float32))
    names = names or [f"{number}.png" for number in range(len(vectors))]
    lines = ["path,error", *(f"{name}," for name in names)]
    path.with_name(f"{path.name}.paths.csv").write_text("\n".join(lines) + "\n")
    return path


# --- projections ---


@pytest.mark.parametrize(("count", "width"), [(300, 20), (12, 40), (2, 5), (6, 1)])
def test_pca_equals_that_of_scikit_learn(count, width):
    vectors = np.random.default_rng(0).standard_normal((count, width)) * np.linspace(3, 1, width)
    ours = projection.project(vectors.astype(np.float32))
    theirs = PCA(min(2, count, width), svd_solver="full").fit(vectors)
    expected = theirs.transform(vectors)
    assert ours.explained is not None
    for axis in range(expected.shape[1]):
        if theirs.explained_variance_ratio_[axis] < 1e-9:  # of two points the second axis is rounding
            continue
        sign = np.sign(ours.points[:, axis] @ expected[:, axis])
        np.testing.assert_allclose(ours.points[:, axis], sign * expected[:, axis], atol=2e-5)
        assert ours.explained[axis] == pytest.approx(theirs.explained_variance_ratio_[axis], abs=1e-6)


def test_randomized_pca_finds_the_same_axes_in_blocks(monkeypatch):
    generator = np.random.default_rng(1)
    vectors = generator.standard_normal((400, 60)) * np.concatenate([[9, 5], np.ones(58)])
    exact = projection.project(vectors)
    monkeypatch.setattr(projection, "MAX_EXACT_WIDTH", 10)
    monkeypatch.setattr(projection, "BLOCK_ROWS", 37)
    approximate = projection.project(vectors)
    assert (exact.parameters, approximate.parameters) == ({"solver": "exact"}, {"solver": "randomized"})
    np.testing.assert_allclose(approximate.points, exact.points, atol=1e-3)
    assert approximate.explained == pytest.approx(exact.explained, abs=1e-5)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_projections_repeat(method):
    vectors = normalise_rows(np.random.default_rng(2).standard_normal((40, 16)))
    seen: list[tuple] = []
    first, second = (projection.project(vectors, method, 3, lambda *call: seen.append(call)) for _ in range(2))
    assert all(done <= total for _, done, total in seen)
    assert seen[-1] == ({"pca": ("computing PCA", 40, 40), "tsne": ("computing t-SNE, iterations", 1000, 1000)}[method])
    np.testing.assert_array_equal(first.points, second.points)
    assert first.points.shape == (40, 2)
    assert np.isfinite(first.points).all()


def test_umap_repeats_and_separates_groups():
    pytest.importorskip("umap", reason="umap-learn is not installed: pip install 'vitrail[umap]'")
    generator = np.random.default_rng(0)
    vectors = np.concatenate([generator.standard_normal((30, 8)) * 0.05 + 5 * np.eye(8)[group] for group in range(2)])
    first, second = (projection.project(vectors, "umap").points for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.linalg.norm(first[:30].mean(0) - first[30:].mean(0)) > first[:30].std()


def test_neighbours_are_the_nearest_other_vectors():
    vectors = normalise_rows(np.random.default_rng(4).standard_normal((50, 6)))
    vectors[7] = vectors[3]  # a copy is a neighbour, the point itself is none
    near, cosines = find_point_neighbours(vectors, 5)
    products = vectors @ vectors.T
    np.fill_diagonal(products, -2)
    np.testing.assert_allclose(cosines, np.sort(products, 1)[:, :-6:-1], atol=1e-6)
    assert (near != np.arange(50)[:, None]).all()
    assert near[3, 0] == 7
    some, _ = find_point_neighbours(vectors, 5, max_pairs=500)
    assert (some[:, 0] >= 0).sum() == 10


def test_many_copies_of_a_vector_have_neighbours():
    near, cosines = find_point_neighbours(np.tile([[1.0, 0.0]], (9, 1)).astype(np.float32), 3)
    assert (near >= 0).all()
    assert (near != np.arange(9)[:, None]).all()
    assert (cosines == 1).all()


# --- columns ---


def test_margin_is_negative_for_wrong_predictions():
    class Identity:
        def classify_embedded(self, features):
            return features

    logits = np.array([[4, 0, 0], [0, 3, 1], [2, 0, 1], [0, 0, 5]], np.float32)
    classes = text_column("class", ["a", "b", "b", None])
    columns = {column.name: column for column in predict_columns(Identity(), ("a", "b", "c"), logits, classes)}  # type: ignore[arg-type]
    assert columns["prediction"].texts() == ["a", "b", "a", "c"]
    assert columns["correctness"].texts() == ["correct", "correct", "wrong", None]
    margin = columns["margin"].numbers
    assert margin is not None
    assert (np.sign(margin[:3]) == [1, 1, -1]).all()
    assert np.isnan(margin[3])
    others = predict_columns(Identity(), ("x", "y", "z"), logits, classes)  # type: ignore[arg-type]
    assert "correctness" not in {column.name for column in others}  # classes that the model does not know


@pytest.mark.parametrize("prefix", ["class", "class+distillation"])
def test_stored_features_give_the_logits_of_the_model(prefix):
    size = {"patch": 8, "width": 32, "depth": 1, "heads": 2, "image_size": 16, "classes": 3}
    made = vitrail.build(**size, prefix=prefix, init="deit").eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(made.classify_embedded(made.embed_images(images)), made(images))


def test_tables_join_by_path(tmp_path):
    names = [str(tmp_path / "photos" / f"{k}.jpg") for k in range(4)]
    table = tmp_path / "table.csv"
    table.write_text("path,score,group,comment\nphotos/0.jpg,0.5,x,one\n3.jpg,,y,two\nother.jpg,1,z,three\n")
    columns, count = read_table_columns(table, names, [str(tmp_path / "photos")])
    assert count == 2
    score, group = columns[:2]
    assert score.numbers is not None
    np.testing.assert_array_equal(score.numbers, np.array([0.5, np.nan, np.nan, np.nan], np.float32))
    assert group.texts() == ["x", None, None, "y"]
    assert group.codes is not None
    assert group.codes.tolist() == [0, MISSING, MISSING, 1]


def test_a_table_of_predictions_gives_correctness(tmp_path):
    table = tmp_path / "predictions.csv"
    table.write_text("path,label,score,error\n0.jpg,cat,0.9,\n1.jpg,cat,0.6,\n")
    names = [str(tmp_path / "0.jpg"), str(tmp_path / "1.jpg")]
    columns, _ = read_table_columns(table, names)
    merged = merge_columns([text_column("class", ["cat", "dog"])], columns)
    assert [column.name for column in merged] == ["class", "prediction", "correctness", "score"]
    assert merged[2].texts() == ["correct", "wrong"]


# --- thumbnails ---


NOISE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)


class Squares:
    """A store of noise, one item of which is unreadable."""

    media = "image"

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def name(self, item: int) -> str:
        return str(item)

    def open(self, item: int) -> Image.Image:
        if item == self.bad:
            raise ValueError("unreadable")
        return Image.fromarray(NOISE[item % 20 :][:40])


def test_sheets_stay_below_their_limit():
    points = np.random.default_rng(0).standard_normal((1200, 2))
    atlas = build_atlas(Squares(1200, bad=5), np.arange(1200), points, size=128, max_bytes=1_500_000)  # type: ignore[arg-type]
    assert 0 < atlas.nbytes <= 1_500_000
    assert 100 < atlas.count < 1200
    shown = atlas.cells >= 0
    assert (atlas.shapes[shown] == [80, 40]).all()
    assert len(np.unique(atlas.cells[shown])) == shown.sum()
    left, right = points[shown][:, 0] < 0, points[shown][:, 0] >= 0
    assert 0.4 < left.sum() / right.sum() < 2.5  # what is left out is left out everywhere


def test_thumbnails_shrink_with_their_number():
    assert [choose_size(count) for count in (100, 5_000, 10_000, 50_000, 100_000)] == [128, 96, 64, 32, 32]
    atlas = build_atlas(Squares(20), np.arange(20), np.random.default_rng(0).random((20, 2)), limit=7)  # type: ignore[arg-type]
    assert atlas.count == 7
    order = np.argsort(order_on_curve(np.array([[0, 0], [9, 9], [0.1, 0], [9, 8.9]])))
    assert {tuple(sorted(order[:2].tolist())), tuple(sorted(order[2:].tolist()))} == {(0, 2), (1, 3)}


# --- the command ---


def test_map_of_a_model_and_its_images(embedded, capsys):
    Path("map.npy").unlink(missing_ok=True)
    code, output, _ = embed(
        capsys, "model.safetensors", "photos", "--plot", "map.html", "--colour-by", "correctness", "--json", "--force"
    )
    assert code == 0
    result = json.loads(output)
    assert (result["images"], result["points"], result["thumbnails"]) == (12, 12, 12)
    assert result["columns"] == ["class", "prediction", "correctness", "split", "margin", "confidence"]
    meta = meta_of(Path("map.html"))
    assert meta["names"][0] == "train/a/red 0.png"
    assert meta["columns"][meta["colour"]]["name"] == "correctness"
    assert np.load("map.npy").shape == (12, 32)
    page = Path("map.html").read_text()
    assert "of the variance" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "exists: draw it with vitrail embed map.npy photos --plot map.html" in refused(
        capsys, "model.safetensors", "photos", "--plot", "map.html"
    )


def test_maps_of_features_and_of_an_index(embedded, capsys):
    code, output, _ = embed(capsys, "features.npy", "--plot", "plain.html", "--json")
    assert code == 0
    assert json.loads(output)["columns"] == ["folder"]  # without PATHS only the folders are known
    code, output, _ = embed(capsys, "features.npy", "photos", "--plot", "data.html", "--projection", "tsne", "--json")
    assert json.loads(output)["columns"] == ["class", "split"]
    assert "do not read the distance between two groups" in Path("data.html").read_text()
    assert main(["search", "index", "model.safetensors", "photos", "--out", "photos.index"]) == 0
    code, output, _ = embed(capsys, "photos.index", "--plot", "index.html", "--json")
    assert json.loads(output)["columns"] == ["class", "split"]
    for suffix in ("csv", "jsonl"):
        written = f"features.{suffix}"
        assert main(["embed", "model.safetensors", "photos", "--out", written, "--precision", "fp32"]) == 0
        code, output, _ = embed(capsys, written, "--plot", "other.html", "--json")
        assert json.loads(output)["explained"] == pytest.approx(
            json.loads(embed(capsys, "features.npy", "--plot", "plain.html", "--json")[1])["explained"], abs=1e-4
        )


def test_images_given_as_files_are_no_datasets(embedded, capsys):
    files = sorted(Path("photos/train").rglob("*.png"))
    assert (
        main(["embed", "model.safetensors", *map(str, files), "--out", "some.npy", "--precision", "fp32", "--force"])
        == 0
    )
    code, output, _ = embed(capsys, "some.npy", *files, "--plot", "files.html", "--json")
    result = json.loads(output)
    assert (code, result["columns"], result["notes"]) == (0, ["folder"], [])
    other = sorted(Path("photos/validation").rglob("*.png"))
    assert "some.npy is of other images" in refused(capsys, "some.npy", *other, "--plot", "files.html")


def test_page_is_the_same_each_time(embedded, capsys):
    pages = []
    for name in ("one", "two"):
        Path(name).mkdir(exist_ok=True)
        assert embed(capsys, "features.npy", "--plot", f"{name}/map.html")[0] == 0
        pages.append(Path(name, "map.html").read_bytes())
    assert pages[0] == pages[1]


def test_too_few_or_useless_vectors_are_refused(embedded, capsys, tmp_path):
    one = write_features(tmp_path / "one.npy", np.ones((1, 4)))
    assert "needs at least 2 vectors, got 1" in refused(capsys, one, "--plot", tmp_path / "map.html")
    two = write_features(tmp_path / "two.npy", np.array([[1, 0], [0, 1]]))
    code, output, _ = embed(capsys, two, "--plot", tmp_path / "map.html")
    assert code == 0
    assert "2 images by pca, 100.0 % and 0.0 % of the variance" in output
    least = refused(capsys, two, "--plot", tmp_path / "map.html", "--projection", "tsne")
    assert "--projection tsne needs at least 5 vectors, got 2" in least
    equal = write_features(tmp_path / "equal.npy", np.full((6, 4), 0.3))
    assert "all 6 vectors are equal" in refused(capsys, equal, "--plot", tmp_path / "map.html")
    bad = write_features(tmp_path / "bad.npy", np.array([[1, 0], [np.nan, 1], [0, 1]]))
    assert "1 of 3 vectors are not finite (NaN), first that of 1.png" in refused(capsys, bad, "--plot", "map2.html")
    assert not Path("map2.html").exists()


def test_unreadable_images_are_left_out(embedded, capsys, tmp_path):
    vectors = np.array([[1, 0], [np.nan, np.nan], [0, 1]], np.float32)
    np.save(tmp_path / "f.npy", vectors)
    (tmp_path / "f.npy.paths.csv").write_text("path,error\na.png,\nb.png,not an image\nc.png,\n")
    code, output, _ = embed(capsys, tmp_path / "f.npy", "--plot", tmp_path / "map.html", "--json")
    assert code == 0
    assert (json.loads(output)["points"], json.loads(output)["unreadable"]) == (2, 1)


def test_bad_options_are_one_line(embedded, capsys, tmp_path):
    assert "nothing to write: give --out FILE" in refused(capsys, "model.safetensors", "photos")
    assert "--projection needs --plot" in refused(
        capsys, "model.safetensors", "photos", "--out", "x.npy", "--projection", "pca"
    )
    assert "must end in .html" in refused(capsys, "features.npy", "--plot", "map.png")
    assert "there is no directory" in refused(capsys, "features.npy", "--plot", "nowhere/map.html")
    assert "PATHS is missing" in refused(capsys, "model.safetensors", "--plot", "new.html")
    assert "--out is for images" in refused(capsys, "features.npy", "--plot", "map.html", "--out", "y.npy")
    assert "--nearest must be >= 0, got -1" in refused(capsys, "features.npy", "--plot", "m.html", "--nearest", -1)
    table = tmp_path / "table.csv"
    assert "no such file" in refused(capsys, "features.npy", "--plot", "map.html", "--table", table)
    table.write_text("path,score\nother.png,1\n")
    assert "has none of the images: it has other.png" in refused(
        capsys, "features.npy", "--plot", "map.html", "--table", table
    )
    table.write_text("path,score\nphotos/train/a/red 0.png,1\n")
    assert "no column 'suspicion' to colour by: the columns are folder, score" in refused(
        capsys, "features.npy", "--plot", "map.html", "--table", table, "--colour-by", "suspicion"
    )
    (tmp_path / "broken.npy").write_bytes(b"no array")
    (tmp_path / "broken.npy.paths.csv").write_text("path,error\n")
    assert "is not a file of vitrail embed" in refused(capsys, tmp_path / "broken.npy", "--plot", "map.html")


def test_missing_umap_names_the_command(embedded, capsys, monkeypatch):
    original = builtins.__import__

    def without_umap(name, *arguments, **keywords):
        if name == "umap":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_umap)
    line = refused(capsys, "features.npy", "--plot", "map.html", "--projection", "umap")
    assert "pip install 'vitrail[umap]'" in line


def test_sounds_have_spectrograms_as_thumbnails(tmp_path, capsys, monkeypatch):
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")
    monkeypatch.chdir(tmp_path)
    names = []
    for number in range(3):
        names.append(f"{number}.wav")
        soundfile.write(names[-1], np.sin(np.arange(8000) * 0.05 * (number + 1)), 8000)
    features = write_features(Path("sounds.npy"), np.random.default_rng(0).standard_normal((3, 4)), names)
    code, output, _ = embed(capsys, features, "--plot", "map.html", "--json")
    assert code == 0
    assert json.loads(output)["thumbnails"] == 3
    assert meta_of(Path("map.html"))["media"] == "sound"


def test_names_of_files_cannot_break_the_page(tmp_path, capsys):
    hostile = "</script><script>alert(1)</script>.png"
    features = write_features(tmp_path / "f.npy", np.random.default_rng(0).standard_normal((3, 4)), [hostile, "b", "c"])
    assert embed(capsys, features, "--plot", tmp_path / "map.html")[0] == 0
    assert "<script>alert" not in (tmp_path / "map.html").read_text()
    with (tmp_path / "f.npy.paths.csv").open() as file:
        assert next(csv.DictReader(file))["path"] == hostile
