"""`vitrail embed`: features in every file format."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as package
from tests.data.making import tree
from tests.deploy.asked import images, model, read, vitrail


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("embed")
    model(root / "model.safetensors")
    images(root / "photos", 5)
    tree(root, {"photos/0002.png": b""})
    return root


def expected(path) -> np.ndarray:
    net = package.load(path.parents[1] / "model.safetensors", classes=None)
    with Image.open(path) as image, torch.inference_mode():
        return net(net.preprocessing(image)[None])[0].numpy()


@pytest.mark.parametrize("form", ["npy", "parquet", "jsonl", "csv"])
def test_features_and_errors_have_rows(place, form):
    out = place / f"features.{form}"
    assert vitrail("embed", place / "model.safetensors", place / "photos", "--out", out) == 0
    rows = read(out)
    assert [row["path"] for row in rows] == [f"{place}/photos/{number:04d}.png" for number in range(5)]
    for number, row in enumerate(rows):
        found = row["features"] if form != "csv" else [row[f"f{place}"] for place in range(16)]
        if number == 2:
            assert "not an image" in row["error"]
            assert found in (None, [None] * 16)
        else:
            assert row["error"] is None
            wanted = expected(place / "photos" / f"{number:04d}.png")
            assert np.asarray(found, dtype=np.float32) == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_npy_file_has_a_list_of_paths(place):
    out = place / "array.npy"
    assert vitrail("embed", place / "model.safetensors", place / "photos", "--out", out) == 0
    values = np.load(out, allow_pickle=False)
    assert (values.shape, values.dtype) == ((5, 16), np.float32)
    assert np.isnan(values[2]).all()
    assert len((place / "array.npy.paths.csv").read_text().splitlines()) == 6


def test_model_without_classifier_embeds_only(place, capsys):
    net = package.load(place / "model.safetensors", classes=None)
    package.save(net, place / "headless.safetensors")
    assert vitrail("embed", place / "headless.safetensors", place / "photos", "--out", place / "h.npy") == 0
    assert np.load(place / "h.npy").shape == (5, 16)
    assert vitrail("predict", place / "headless.safetensors", place / "photos", "--out", place / "h.csv") == 2
    assert "has no classifier: use vitrail embed for its features" in capsys.readouterr().err


def test_embed_lists_its_formats(place, capsys):
    assert vitrail("embed", place / "model.safetensors", place / "photos", "--out", place / "a.xlsx") == 2
    assert "use --format or a file suffix of csv, jsonl, parquet, npy" in capsys.readouterr().err
