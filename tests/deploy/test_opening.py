"""A model opened for any runtime gives the same answers, and `auto` takes the quickest that is there."""

import json

import numpy as np
import pytest

from tests.deploy.asked import CLASSES, model, pictures, read, vitrail
from tests.deploy.exports import saved, tiny
from vitrail.deploy import choosing
from vitrail.deploy.choosing import chosen
from vitrail.deploy.exported_files import some_pixels
from vitrail.deploy.opening import another, opened


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("opening")
    model(root / "model.safetensors")
    pictures(root / "photos", 6)
    return root


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """One cache for all: exporting takes the most time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_checkpoint_says_what_it_promises(place):
    found = opened(place / "model.safetensors", runtime="torch")
    assert found.contract.labels == CLASSES
    assert found.contract.preprocessing.size == (8, 8)
    assert found.contract.several is False
    assert len(found.contract.checksum) == 64
    assert found.contract.config["classes"] == 7
    assert found.name == place.name  # as for vitrail evaluate, where the file is called as all are
    logits = found.runtime(some_pixels(found.contract, 3))
    assert (logits.shape, logits.dtype) == ((3, 7), np.float32)
    features = opened(place / "model.safetensors", runtime="torch", gives="features")
    assert features.runtime(some_pixels(found.contract, 3)).shape == (3, 16)


def test_another_size_is_another_preprocessing(place):
    found = opened(place / "model.safetensors", runtime="torch", size=(16, 16))
    assert found.contract.preprocessing.size == (16, 16)
    assert found.runtime(some_pixels(found.contract, 1)).shape == (1, 7)


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_other_runtimes_give_the_same_and_their_file_is_made_once(place, runtime):
    for package in choosing.NEEDS[runtime]:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'vitrail[onnx,openvino]'")
    told = []
    found = opened(place / "model.safetensors", runtime=runtime, threads=1, tell=told.append)
    plain = opened(place / "model.safetensors", runtime="torch")
    pixels = some_pixels(found.contract, 3)
    assert found.runtime.name == runtime
    assert found.contract.labels == CLASSES
    assert np.abs(found.runtime(pixels) - plain.runtime(pixels)).max() < 1e-3
    assert np.abs(another(found, 1)(pixels) - plain.runtime(pixels)).max() < 1e-3
    assert len(told) == 1
    features = opened(place / "model.safetensors", runtime=runtime, gives="features", tell=told.append)
    wanted = opened(place / "model.safetensors", runtime="torch", gives="features").runtime(pixels)
    assert np.abs(features.runtime(pixels) - wanted).max() < 1e-3
    assert len(told) == 1, "exported a second time"
    # The file by itself is predicted with and judged, in every command the same.
    assert found.file is not None
    for commands in (("predict", "--out", place / f"{runtime}.csv"), ("evaluate", "--json")):
        wanted = place / "photos" if commands[0] == "predict" else "digits"
        extra = () if commands[0] == "predict" else ("--map", translation(place), "--limit", 20)
        assert vitrail(commands[0], found.file, wanted, *commands[1:], *extra) == 0
    assert (
        vitrail("predict", place / "model.safetensors", place / "photos", "--out", place / f"{runtime}-torch.csv") == 0
    )
    ours, theirs = (read(place / name) for name in (f"{runtime}-torch.csv", f"{runtime}.csv"))
    assert [row["label"] for row in ours] == [row["label"] for row in theirs]
    assert [float(row["score"]) for row in ours] == pytest.approx([float(row["score"]) for row in theirs], abs=1e-3)


def translation(place):
    path = place / "map.json"
    path.write_text(json.dumps({str(digit): CLASSES[digit % 7] for digit in range(10)}))
    return path


def test_what_is_settled_in_an_exported_file_is_not_asked_for(place):
    (place / "x.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="--merge is settled in it"):
        opened(place / "x.onnx", merge=2)
    with pytest.raises(ValueError, match="is a file for onnx: leave out --runtime openvino"):
        opened(place / "x.onnx", runtime="openvino")


def test_what_is_pytorchs_alone_is_said(place):
    with pytest.raises(ValueError, match="--precision bf16 is PyTorch's"):
        opened(place / "model.safetensors", runtime="onnx", precision="bf16")
    with pytest.raises(ValueError, match="unknown runtime 'tensorrt'"):
        opened(place / "model.safetensors", runtime="tensorrt")


def test_auto_measures_once_takes_the_quickest_and_says_so(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "vitrail" / "exported").mkdir(parents=True)
    times = []

    def measured(deployed, installed, threads, tell):
        times.append(installed)
        return {"torch": 0.04, "openvino": 0.02}, "; onnx cannot: no"

    monkeypatch.setattr(choosing, "measured", measured)
    monkeypatch.setattr(choosing, "find_spec", lambda name: True)
    plain = opened(place / "model.safetensors", runtime="torch")
    assert chosen(plain, 1, 10)[0] == "torch"
    assert chosen(plain, 1, 100)[0] == "torch"
    assert not times, "measured for a few pictures"
    runtime, why = chosen(plain, 1, 10_000)
    assert runtime == "openvino"
    assert "openvino 20.0, torch 40.0; onnx cannot: no" in why
    assert chosen(plain, 1, 10_000) == chosen(plain, 1, 100) == (runtime, why)
    assert len(times) == 1
    assert chosen(opened(place / "model.safetensors", runtime="torch", merge=1), 1, 10_000)[0] == "openvino"
    assert len(times) == 2, "another model is measured by itself"


def test_auto_takes_pytorch_where_nothing_else_is_installed(place, monkeypatch):
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    runtime, why = chosen(opened(place / "model.safetensors", runtime="torch"), 1, None)
    assert runtime == "torch"
    assert "vitrail[onnx,openvino]" in why


def test_a_runtime_that_answers_otherwise_is_refused(place, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install 'vitrail[onnx]'")
    from vitrail.deploy import export, exported_files

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(export, "export", lambda model, contract, path, **how: path.write_bytes(b""))
    monkeypatch.setattr(exported_files, "open_file", lambda *how: (lambda pixels: np.zeros((len(pixels), 7)), None))
    with pytest.raises(ValueError, match=r"onnx gives other answers for .*: use --runtime torch"):
        opened(place / "model.safetensors", runtime="onnx")
    assert not list(tmp_path.rglob("*.onnx"))


def test_evaluate_judges_a_merged_model_beside_itself(place, capsys):
    arguments = (place / "model.safetensors", "digits", "--map", translation(place), "--limit", 30, "--json")
    assert vitrail("evaluate", *arguments, "--merge", 1, "--against", place / "model.safetensors") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["runtime"] == "torch"
    assert "runtime" not in told["against"][0]["model"]
    assert told["loss"] != told["against"][0]["loss"]
    assert [told["comparisons"][0][which] for which in ("first", "second")] == [f"{place.name}, merge 1", place.name]


def test_evaluate_says_what_auto_chose(place, capsys, monkeypatch):
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    arguments = (place / "model.safetensors", "digits", "--map", translation(place), "--limit", 30)
    assert vitrail("evaluate", *arguments, "--runtime", "auto") == 0
    assert "  torch: no other runtime is installed" in capsys.readouterr().out


def test_a_merged_file_says_how_many_tokens_are_left(tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install 'vitrail[onnx]'")
    source, out = saved(tiny(depth=2, image_size=32), tmp_path / "model.safetensors"), tmp_path / "merged.onnx"
    line = "tokens that come into the layers, merged: 17 14 (91 % of all)"
    assert vitrail("export", source, out, "--merge", 3) == 0
    assert f"note: {line}" in capsys.readouterr().err
    assert vitrail("predict", out, pictures(tmp_path / "photos", 2), "--out", tmp_path / "rows.csv") == 0
    assert line in capsys.readouterr().out
