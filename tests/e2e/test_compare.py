"""Tests of `vitrail inspect --compare`."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.analysis.made import DEIT, with_real_files
from tests.data.spoilt import encoded, photograph, put
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing

SMALL = {"patch": 8, "width": 24, "depth": 3, "heads": 2, "image_size": 32, "classes": 3}
FILES = {"index.html", "inspect.json", "comparison.npz", "comparison.json", "comparison.png", "distance.png"}
FILES |= {"diversity.png", "mutual.png", "frequencies.png", "spectrum.png"}


def saved(path, seed=0, **given):
    torch.manual_seed(seed)
    options = SMALL | given
    size = options["image_size"]
    vitrail.save(vitrail.build(**options), path, preprocessing=Preprocessing((size, size), (size, size)))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save two models of one configuration and a third with another depth, size and head."""
    root = tmp_path_factory.mktemp("models")
    other = {"depth": 2, "heads": 4, "image_size": 48, "classes": None, "pool": "mean"}
    return (
        saved(root / "a.safetensors"),
        saved(root / "b.safetensors", 1),
        saved(root / "other.safetensors", 2, **other),
    )


def coloured(seed: int, colour: tuple[int, int, int]) -> bytes:
    """Return a photograph with a colour cast, which a probe can classify."""
    tint = Image.new("RGB", (40, 30), colour)
    return encoded(Image.blend(photograph(seed, (40, 30)), tint, 0.7), "PNG")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Create two splits of two classes that differ in colour."""
    root = tmp_path_factory.mktemp("labelled")
    for split, count in (("train", 12), ("validation", 8)):
        for name, colour in (("red", (220, 20, 20)), ("blue", (20, 20, 220))):
            for number in range(count):
                put(root / split / name / f"{number}.png", coloured(number + 100 * len(name), colour))
    return root


def ran(*arguments, capsys):
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_comparison_on_a_dataset_writes_page_figures_and_arrays(models, labelled, tmp_path):
    out = tmp_path / "out"
    arguments = ["inspect", "--compare", models[0], models[2], labelled, "--out", out, "--json"]
    result = subprocess.run([sys.executable, "-m", "vitrail", *arguments], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert {path.name for path in out.iterdir()} == FILES | {"probe.png"}
    assert report["pictures"] == 16  # all of the validation split
    first, second = report["models"]
    assert (first["name"], second["name"]) == ("a", "other")
    assert (first["layers"], second["layers"], second["heads"]) == (3, 2, 4)
    for model in report["models"]:
        layers, heads = model["layers"], model["heads"]
        for view in ("distance", "diversity", "mutual_information"):
            assert np.shape(model[view]["heads"]) == (layers, heads)
            np.testing.assert_allclose(np.mean(model[view]["heads"], 1), model[view]["mean"], rtol=1e-4)
        assert len(model["spectrum"]["high"]) == layers + 1
        assert (model["probe"]["fitted"], model["probe"]["judged"], model["probe"]["classes"]) == (24, 16, 2)
        assert max(model["probe"]["top1"]) > 0.9  # red and blue
        assert model["probe"]["read"] == "mean of the patch tokens"
    stored = np.load(out / "comparison.npz")
    np.testing.assert_allclose(stored["B.distance"], second["distance"]["heads"], rtol=1e-4)
    assert json.loads((out / "comparison.json").read_text()).keys() <= report.keys()
    page = (out / "index.html").read_text()
    assert page.count("data:image/png") == 6
    for file in out.glob("*.png"):
        with Image.open(file) as image:
            assert np.asarray(image.convert("L")).std() > 8


def test_a_model_equals_itself(models, labelled, capsys):
    code, stdout, stderr = ran("--compare", models[0], models[0], labelled, "--limit", "12", "--json", capsys=capsys)
    assert (code, stderr) == (0, "")
    first, second = json.loads(stdout)["models"]
    assert first["pictures"] == 12
    assert first["probe"]["fitted"] == first["probe"]["judged"] == 12
    assert {**first, "letter": ""} == {**second, "letter": ""}


def test_images_without_labels_give_a_table_without_probe(models, tmp_path, capsys):
    for number in range(3):
        put(tmp_path / "flat" / f"{number}.jpg", encoded(photograph(number)))
    for given in ([tmp_path / "flat"], [tmp_path / "flat" / "0.jpg", tmp_path / "flat" / "1.jpg"]):
        code, stdout, stderr = ran("--compare", models[0], models[1], *given, capsys=capsys)
        assert (code, stderr) == (0, "")
        lines = stdout.splitlines()
        assert lines[0] == "A  a: 3 layers of 2 heads, 32×32 pixels"
        assert lines[1].startswith("B  b: ")
        assert "no probe: the images have no labels: give one folder that has a folder for each class" in lines
        assert sum(line.split()[:1] == [str(layer)] for layer in range(4) for line in lines) == 4


def test_too_few_images_for_a_probe_are_reported(models, labelled, tmp_path, capsys):
    code, stdout, _ = ran("--compare", models[0], models[1], labelled, "--limit", "9", capsys=capsys)
    assert code == 0
    assert "no probe: 9 training and 9 test images are too few for 2 classes: it needs 4 and 10" in stdout
    assert "over 9 images" in stdout
    for number in range(12):
        put(tmp_path / "one" / "red" / f"{number}.png", coloured(number, (200, 0, 0)))
    code, stdout, _ = ran("--compare", models[0], models[1], tmp_path / "one", capsys=capsys)
    assert code == 0
    assert "over 12 images" in stdout
    assert "no probe: the images have no labels" in stdout  # one class is not enough for a probe


def test_class_folders_without_splits_are_divided(models, labelled, capsys):
    code, stdout, _ = ran("--compare", models[0], models[1], labelled / "train", "--json", capsys=capsys)
    report = json.loads(stdout)
    assert code == 0
    assert report["pictures"] == 24
    probe = report["models"][0]["probe"]
    assert report["no_probe"] is not None or probe["fitted"] + probe["judged"] == 24


def test_unreadable_images_are_listed_once_and_skipped_for_both_models(models, tmp_path, capsys):
    put(tmp_path / "in" / "good.jpg", encoded(photograph(1)))
    put(tmp_path / "in" / "short.jpg", encoded(photograph(2))[:-2000])
    code, stdout, stderr = ran("--compare", models[0], models[1], tmp_path / "in", "--json", capsys=capsys)
    report = json.loads(stdout)
    assert code == 1
    assert [model["pictures"] for model in report["models"]] == [1, 1]
    assert len(report["skipped"]) == 1
    assert stderr.startswith(f"vitrail inspect: skipped {tmp_path / 'in' / 'short.jpg'}")
    assert len(stderr.splitlines()) == 1
    (tmp_path / "in" / "good.jpg").unlink()
    code, stdout, stderr = ran("--compare", models[0], models[1], tmp_path / "in", capsys=capsys)
    assert (code, stdout) == (2, "")
    assert "no image could be read" in stderr


def test_user_errors_are_one_line_and_write_nothing(models, labelled, tmp_path, capsys):
    first, second, _ = models
    resnet = tmp_path / "r.safetensors"
    vitrail.save(
        vitrail.build("R26x0.25", classes=3, image_size=32), resnet, preprocessing=Preprocessing((32, 32), (32, 32))
    )
    broken = tmp_path / "broken.safetensors"
    model = vitrail.load(second)
    with torch.no_grad():
        model.blocks[0].mlp.fc2.bias.fill_(3e38)
    vitrail.save(model, broken)
    put(tmp_path / "taken" / "file", b"mine")
    for arguments, message in (
        ([first, second], "no images: write vitrail inspect --compare"),
        ([first, resnet, labelled], "does not support BiT ResNets"),
        ([first, broken, labelled], "broken: the tokens of this model are not finite after layer 2"),
        ([first, second, labelled, "--at", "1,1"], "--at applies to one model: leave it out with --compare"),
        ([first, second, labelled, "--terminal"], "--terminal applies to one model"),
        ([first, tmp_path / "gone.safetensors", labelled], "gone.safetensors"),
        ([first, second, tmp_path / "nowhere"], "nowhere"),
        ([first, second, labelled, "--size", "33"], "33"),
        ([first, second, labelled, "--out", tmp_path / "taken"], "not written by an inspection"),
    ):
        out = [] if "--out" in arguments else ["--out", tmp_path / "new"]
        code, stdout, stderr = ran("--compare", *arguments, *out, capsys=capsys)
        assert (code, stdout) == (2, ""), arguments
        assert len(stderr.splitlines()) == 1, stderr
        assert message in stderr
        assert not (tmp_path / "new").exists()


def test_an_inspection_replaces_a_comparison(models, labelled, tmp_path, capsys):
    out, image = tmp_path / "out", labelled / "train" / "red" / "0.png"
    code, stdout, _ = ran(models[0], models[1], image, "--compare", "--out", out, capsys=capsys)
    assert code == 0
    assert stdout.splitlines()[-1] == str(out / "index.html")
    assert {path.name for path in out.iterdir()} == FILES
    assert ran(models[0], image, "--out", out, "--view", "rollout", capsys=capsys)[0] == 0
    assert not (out / "comparison.npz").exists()
    assert (out / "0" / "rollout.png").is_file()


@with_real_files
def test_a_trained_model_has_local_heads_and_an_untrained_one_has_not(tmp_path, capsys):
    """The first layers of DeiT-Ti have local heads; attention of an untrained model is uniform."""
    torch.manual_seed(0)
    fresh = tmp_path / "fresh.safetensors"
    vitrail.save(vitrail.build("Ti/16", classes=None), fresh, preprocessing=vitrail.load(DEIT).preprocessing)
    samples = sorted((DEIT.parents[1] / "data" / "imagenet-samples").glob("*.JPEG"))[:4]
    code, stdout, _ = ran("--compare", DEIT, fresh, *samples, "--json", capsys=capsys)
    assert code == 0
    trained, untrained = json.loads(stdout)["models"]
    assert trained["size"] == untrained["size"]
    np.testing.assert_allclose(untrained["distance"]["mean"], untrained["distance"]["everywhere"], rtol=0.03)
    assert min(min(heads) for heads in trained["distance"]["heads"][:4]) < 40
    assert max(untrained["mutual_information"]["mean"]) < 0.1 < 0.4 < max(trained["mutual_information"]["mean"])
    assert untrained["spectrum"]["high"][-1] < trained["spectrum"]["high"][-1] - 1
