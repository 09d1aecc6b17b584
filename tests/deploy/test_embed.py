"""What a model makes of pictures before its head, in every form."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as package
from tests.data.making import tree
from tests.deploy.asked import model, pictures, read, vitrail


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("embed")
    model(root / "model.safetensors")
    pictures(root / "photos", 5)
    tree(root, {"photos/0002.png": b""})
    return root


def expected(path) -> np.ndarray:
    net = package.load(path.parents[1] / "model.safetensors", classes=None)
    with Image.open(path) as image, torch.inference_mode():
        return net(net.preprocessing(image)[None])[0].numpy()


@pytest.mark.parametrize("form", ["npy", "parquet", "jsonl", "csv"])
def test_features_are_what_comes_to_the_head_and_errors_have_their_rows(place, form):
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


def test_numpy_reads_the_array_and_the_list_beside_it_has_as_many_lines(place):
    out = place / "array.npy"
    assert vitrail("embed", place / "model.safetensors", place / "photos", "--out", out) == 0
    values = np.load(out, allow_pickle=False)
    assert (values.shape, values.dtype) == ((5, 16), np.float32)
    assert np.isnan(values[2]).all()
    assert len((place / "array.npy.paths.csv").read_text().splitlines()) == 6


def test_a_model_without_classes_is_embedded_and_not_predicted(place, capsys):
    net = package.load(place / "model.safetensors", classes=None)
    package.save(net, place / "headless.safetensors")
    assert vitrail("embed", place / "headless.safetensors", place / "photos", "--out", place / "h.npy") == 0
    assert np.load(place / "h.npy").shape == (5, 16)
    assert vitrail("predict", place / "headless.safetensors", place / "photos", "--out", place / "h.csv") == 2
    assert "has no classes: it gives features, which vitrail embed writes" in capsys.readouterr().err


def test_embed_names_its_forms(place, capsys):
    assert vitrail("embed", place / "model.safetensors", place / "photos", "--out", place / "a.xlsx") == 2
    assert "the forms are csv, jsonl, parquet, npy" in capsys.readouterr().err
