"""Opening of models: all runtimes give the same outputs, and `auto` takes the fastest."""

import json

import numpy as np
import pytest

from tests.deploy.asked import CLASSES, images, model, read, vitrail
from tests.deploy.exports import saved, tiny
from vitrail.deploy.runtimes import select as choosing
from vitrail.deploy.runtimes.base import random_pixels
from vitrail.deploy.runtimes.open import clone_runtime, open_deployed_model
from vitrail.deploy.runtimes.select import select_runtime


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("opening")
    model(root / "model.safetensors")
    images(root / "photos", 6)
    return root


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """Share one cache: exporting is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_contract_of_a_checkpoint(place):
    found = open_deployed_model(place / "model.safetensors", runtime="torch")
    assert found.contract.labels == CLASSES
    assert found.contract.preprocessing.size == (8, 8)
    assert found.contract.several is False
    assert len(found.contract.checksum) == 64
    assert found.contract.config["classes"] == 7
    assert found.name == place.name  # as for vitrail evaluate, where the file is called as all are
    logits = found.runtime(random_pixels(found.contract.preprocessing, 3))
    assert (logits.shape, logits.dtype) == ((3, 7), np.float32)
    features = open_deployed_model(place / "model.safetensors", runtime="torch", output_kind="features")
    assert features.runtime(random_pixels(found.contract.preprocessing, 3)).shape == (3, 16)


def test_size_changes_the_preprocessing(place):
    found = open_deployed_model(place / "model.safetensors", runtime="torch", size=(16, 16))
    assert found.contract.preprocessing.size == (16, 16)
    assert found.runtime(random_pixels(found.contract.preprocessing, 1)).shape == (1, 7)


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_runtimes_match_pytorch_and_export_once(place, runtime):
    for package in choosing.REQUIRED_PACKAGES[runtime]:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'vitrail[onnx,openvino]'")
    report = []
    found = open_deployed_model(place / "model.safetensors", runtime=runtime, threads=1, report=report.append)
    plain = open_deployed_model(place / "model.safetensors", runtime="torch")
    pixels = random_pixels(found.contract.preprocessing, 3)
    assert found.runtime.name == runtime
    assert found.contract.labels == CLASSES
    assert np.abs(found.runtime(pixels) - plain.runtime(pixels)).max() < 1e-3
    assert np.abs(clone_runtime(found, 1)(pixels) - plain.runtime(pixels)).max() < 1e-3
    assert len(report) == 1
    features = open_deployed_model(
        place / "model.safetensors", runtime=runtime, output_kind="features", report=report.append
    )
    wanted = open_deployed_model(place / "model.safetensors", runtime="torch", output_kind="features").runtime(pixels)
    assert np.abs(features.runtime(pixels) - wanted).max() < 1e-3
    assert len(report) == 1, "exported a second time"
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


def test_fixed_options_of_an_exported_file_are_errors(place):
    (place / "x.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="merge= is fixed in the exported file"):
        open_deployed_model(place / "x.onnx", merge=2)
    with pytest.raises(ValueError, match="is a file for onnx: omit runtime='openvino'"):
        open_deployed_model(place / "x.onnx", runtime="openvino")


def test_options_of_pytorch_only(place):
    with pytest.raises(ValueError, match="precision='bf16' needs PyTorch"):
        open_deployed_model(place / "model.safetensors", runtime="onnx", precision="bf16")
    with pytest.raises(ValueError, match="unknown runtime 'tensorrt'"):
        open_deployed_model(place / "model.safetensors", runtime="tensorrt")


def test_auto_measures_once_and_takes_the_fastest(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "vitrail" / "exported").mkdir(parents=True)
    times = []

    def measured(deployed, installed, threads, tell, *_):
        times.append(installed)
        return {"torch": 0.04, "openvino": 0.02}, "; onnx failed: no", True

    monkeypatch.setattr(choosing, "measure_runtimes", measured)
    monkeypatch.setattr(choosing, "find_spec", lambda name: True)
    plain = open_deployed_model(place / "model.safetensors", runtime="torch")
    assert select_runtime(plain, 1, 10)[0] == "torch"
    assert select_runtime(plain, 1, 100)[0] == "torch"
    assert not times, "measured for a few images"
    runtime, why = select_runtime(plain, 1, 10_000)
    assert runtime == "openvino"
    assert "openvino 20.0, torch 40.0; onnx failed: no" in why
    assert select_runtime(plain, 1, 10_000) == select_runtime(plain, 1, 100) == (runtime, why)
    assert len(times) == 1
    assert (
        select_runtime(open_deployed_model(place / "model.safetensors", runtime="torch", merge=1), 1, 10_000)[0]
        == "openvino"
    )
    assert len(times) == 2, "another model is measured by itself"


def test_auto_does_not_remember_a_failure_that_may_pass(place, tmp_path, monkeypatch):
    """A full disk or an unreadable file is not the runtime's fault."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def fail(deployed, target, report=None):
        asked.append(target)
        raise OSError("no space left on device")

    monkeypatch.setattr(choosing, "get_or_export", fail)
    monkeypatch.setattr(choosing, "find_spec", lambda name: True)
    plain = open_deployed_model(place / "model.safetensors", runtime="torch")
    for _ in range(2):
        assert select_runtime(plain, 1, 10_000)[0] == "torch"
    assert asked == ["onnx", "openvino"] * 2


def test_auto_takes_pytorch_without_other_runtimes(place, monkeypatch):
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    runtime, why = select_runtime(open_deployed_model(place / "model.safetensors", runtime="torch"), 1, None)
    assert runtime == "torch"
    assert "vitrail[onnx,openvino]" in why


def test_runtime_with_different_outputs_is_rejected(place, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install 'vitrail[onnx]'")
    from vitrail.deploy.export import export

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(export, "export", lambda model, contract, path, **how: path.write_bytes(b""))
    monkeypatch.setattr(choosing, "open_exported_file", lambda *how: (lambda pixels: np.zeros((len(pixels), 7)), None))
    with pytest.raises(ValueError, match=r"onnx outputs of .* differ by .*: use runtime='torch'"):
        open_deployed_model(place / "model.safetensors", runtime="onnx")
    assert not list(tmp_path.rglob("*.onnx"))


def test_evaluate_compares_a_merged_model_with_itself(place, capsys):
    arguments = (place / "model.safetensors", "digits", "--map", translation(place), "--limit", 30, "--json")
    assert vitrail("evaluate", *arguments, "--merge", 1, "--against", place / "model.safetensors") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["runtime"] == "torch"
    assert "runtime" not in report["against"][0]["model"]
    assert report["loss"] != report["against"][0]["loss"]
    assert [report["comparisons"][0][which] for which in ("first", "second")] == [f"{place.name}, merge 1", place.name]


def test_evaluate_notes_the_choice_of_auto(place, capsys, monkeypatch):
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    arguments = (place / "model.safetensors", "digits", "--map", translation(place), "--limit", 30)
    assert vitrail("evaluate", *arguments, "--runtime", "auto") == 0
    assert "  torch: no other runtime is installed" in capsys.readouterr().out


def test_merged_file_notes_its_token_counts(tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install 'vitrail[onnx]'")
    source, out = saved(tiny(depth=2, image_size=32), tmp_path / "model.safetensors"), tmp_path / "merged.onnx"
    line = "input tokens per layer with merging: 17 14 (91 % of all)"
    assert vitrail("export", source, out, "--merge", 3) == 0
    assert f"note: {line}" in capsys.readouterr().err
    assert vitrail("predict", out, images(tmp_path / "photos", 2), "--out", tmp_path / "rows.csv") == 0
    assert line in capsys.readouterr().out
