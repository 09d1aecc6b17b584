"""Export of every model variant: outputs equal PyTorch's, or the variant is rejected by name."""

import json
import os
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.exports import LABELS, by_pytorch, contract_of, pixels, saved, shaken, shared, tiny
from tests.variants import SMALL, VIT_SLOTS
from vitrail.cli import main
from vitrail.deploy.export.export import SUFFIXES, convert_onnx, export, open_own_file
from vitrail.deploy.export.graph import ExportGraph
from vitrail.deploy.export.torch_program import open_program
from vitrail.deploy.runtimes.base import contract_from_json, contract_to_json
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.registry import build_from
from vitrail.models.vit_config import RESAMPLINGS
from vitrail.nn.embed import Patches
from vitrail.nn.head import Projection
from vitrail.nn.position import Learned1D, Relative, RelativeMLP

pytest.importorskip("onnxruntime")

# Together they have everything that a graph can look like; which table of positions it holds is tried without one, below.
MODELS = {
    "paper": {},
    "normed patches, relative, registers, parallel, SwiGLU, QK norm, layer scale, class and mean": {
        "embed": Patches(8, normed=True),
        "position": "relative",
        "registers": 2,
        "block": "parallel",
        "mlp": "swiglu",
        "qk_norm": True,
        "layer_scale": 0.1,
        "pool": "class+mean",
    },
    "conv stem, sin-cos shared, mean, tanh GELU": {
        "embed": "conv-stem",
        "position": "sincos2d@shared",
        "pool": "mean",
        "mlp": "gelu-tanh",
    },
    "rotary, distillation, quick GELU, token norm, wide heads": {
        "position": "rotary2d",
        "prefix": "class+distillation",
        "mlp": "gelu-quick",
        "token_norm": True,
        "head_width": 24,
    },
    "grey, no positions, no bias, post-norm with ReLU, attention pooling, pre-logits": {
        "channels": 1,
        "position": "none",
        "embed": Patches(8, bias=False),
        "block": "post",
        "pool": "map",
        "head": "pre-logits",
    },
    "1-D at every layer, norm after the mean, projection": {
        "position": "learned1d@every",
        "pool": "mean-norm",
        "head": Projection(12),
        "classes": None,
    },
}


def small_hybrid():
    return shaken(build_from(replace(tiny().config, embed=Hybrid((1,), 2))))


def small_bit():
    return shaken(build_from(BiTConfig((1, 1), 0.25, classes=5, image_size=(16, 24))))


def same_as_pytorch(model, path, **options):
    """Export, open the file, and compare every output."""
    to = {ending: name for name, ending in SUFFIXES.items()}[path.suffix]
    export(model, contract_of(model), path, target=to, **options)
    return opened_gives_the_same(model, path)


def opened_gives_the_same(model, path):
    contract, images = contract_of(model), pixels(model)
    found = open_deployed_model(path, output_kind="features" if model.config.classes is None else "logits")
    assert found.contract.labels == contract.labels
    assert found.contract.preprocessing == contract.preprocessing
    assert found.contract.config == contract.config
    wanted = by_pytorch(model, contract, images)
    np.testing.assert_allclose(found.runtime(images), wanted, atol=1e-4)
    np.testing.assert_allclose(found.runtime(images[:1]), wanted[:1], atol=1e-4)  # any number of pictures
    assert np.abs(wanted).max() > 0.1
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_variant_matches_pytorch_in_onnx_and_some_in_openvino(name, tmp_path):
    model, uint8 = tiny(**MODELS[name]), "grey" in name
    found = same_as_pytorch(model, tmp_path / "model.onnx", uint8=uint8)
    if name.startswith(("paper", "rotary", "grey")):
        pytest.importorskip("openvino")
        convert_onnx(tmp_path / "model.onnx", found.contract, tmp_path / "model.xml", "openvino", uint8)
        opened_gives_the_same(model, tmp_path / "model.xml")
    if model.config.classes is not None:
        saved(model, tmp_path / "model.safetensors")
        headless = vitrail.load(tmp_path / "model.safetensors", classes=None)
        features, _ = open_own_file(tmp_path / "model.onnx", "features")
        wanted = by_pytorch(headless, found.contract, pixels(model))
        np.testing.assert_allclose(features(pixels(model)), wanted, atol=1e-4)


@pytest.mark.parametrize("make", [small_hybrid, small_bit])
def test_resnets_match_pytorch_in_onnx(make, tmp_path):
    same_as_pytorch(make(), tmp_path / "model.onnx")


def test_exported_program_matches_pytorch():
    path = shared() / "model.pt2"
    found = opened_gives_the_same(tiny(), path)
    program, _ = open_own_file(path)
    np.testing.assert_allclose(program(pixels(tiny())), found.runtime(pixels(tiny())), atol=1e-6)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_every_variant_is_unchanged_by_preparation_for_tracing(slots):
    model = shaken(vitrail.build(**(SMALL | slots)))
    contract = replace(contract_of(model), config={})
    images = pixels(model, 2)
    graph = ExportGraph(model.with_constants(), contract.preprocessing, uint8=True)
    wanted = by_pytorch(model, contract, images)
    with torch.inference_mode():
        found = graph(torch.from_numpy(images))
    np.testing.assert_allclose(found[0].numpy(), wanted, atol=1e-5)
    assert len(found) == (1 if model.config.classes is None else 2)


SIZES = ((16, 24), (40, 16), (32, 56))


@pytest.mark.parametrize(
    "make",
    [
        tiny,
        lambda: tiny(position="relative"),
        lambda: tiny(position="relative1d", registers=1),
        lambda: tiny(position="relative-mlp", registers=1, pool="mean"),
        lambda: tiny(position=Relative(absolute=Learned1D()), resampling="timm-relative", pool="mean"),
        lambda: tiny(resampling="dino"),
        small_bit,
    ],
    ids=["learned", "relative", "relative 1-D", "relative MLP", "BEiT's rule", "DINO's rule", "BiT"],
)
def test_dynamic_size_resamples_positions_in_the_graph(make, tmp_path):
    model = make()
    contract, path = contract_of(model), tmp_path / "model.onnx"
    export(model, contract, path, target="onnx", dynamic_size=True)
    runtime, report = open_own_file(path)
    assert report.any_size
    pytest.importorskip("openvino")
    convert_onnx(path, report, path.with_suffix(".xml"), "openvino", False)
    runtimes = (runtime, open_own_file(path.with_suffix(".xml"))[0])
    for size in SIZES:
        images = pixels(model, 2, size)
        for each in runtimes:
            np.testing.assert_allclose(each(images), by_pytorch(model, contract, images), atol=1e-4)


@pytest.mark.parametrize(
    "position",
    [
        *("learned1d@every", "learned2d", "learned2d@shared", "relative@shared", "relative1d", "rotary2d"),
        *("rotary-dinov3", "rotary-eva02"),
        *("relative-mlp", RelativeMLP("shared", scaled=True), Relative(absolute=Learned1D())),
    ],
)
def test_dynamic_positions_equal_the_model(position):
    model = tiny(position=position, registers=1, pool="mean", prefix="class")  # all patches are read
    other, contract = model.with_constants(any_size=True), contract_of(model)
    for size in SIZES:
        images = pixels(model, 1, size)
        wanted = by_pytorch(model, contract, images)
        np.testing.assert_allclose(by_pytorch(other, contract, images), wanted, atol=1e-5)


@pytest.mark.parametrize("name", RESAMPLINGS)
def test_graphs_of_any_size_resample_by_the_rule_of_the_model(name):
    slots = {"position": "relative" if name.endswith("relative") else "learned1d", "pool": "mean", "prefix": "class"}
    model, images = tiny(resampling=name, **slots), {size: pixels(tiny(), 1, size) for size in SIZES}
    other, contract = model.with_constants(any_size=True), contract_of(model)
    wanted = {size: by_pytorch(model, contract, images[size]) for size in SIZES}
    for size in SIZES:
        np.testing.assert_allclose(by_pytorch(other, contract, images[size]), wanted[size], atol=1e-5)
    if name != "timm":  # otherwise the rule would not matter
        by_timm = by_pytorch(tiny(resampling="timm", **slots), contract, images[SIZES[1]])
        assert np.abs(by_timm - wanted[SIZES[1]]).max() > 1e-3


def test_variants_without_dynamic_size_are_rejected_by_name(tmp_path):
    for model, name in (
        (small_hybrid(), "Hybrid"),
        (tiny(embed="conv-stem"), "ConvStem"),
        (tiny(embed=Patches(8, overlap=2)), "overlap"),
    ):
        with pytest.raises(ValueError, match=f"dynamic_size= does not support {name}"):
            export(model, contract_of(model), tmp_path / "a.onnx", target="onnx", dynamic_size=True)
    model = tiny()
    with pytest.raises(ValueError, match="--merge and --dynamic-size exclude each other"):
        export(model, contract_of(model), tmp_path / "a.onnx", target="onnx", dynamic_size=True, merge=1)
    with pytest.raises(ValueError, match="ResNet"):
        export(small_bit(), contract_of(small_bit()), tmp_path / "a.onnx", target="onnx", merge=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_token_merging_in_every_runtime(to, tmp_path):
    model = tiny(depth=2, image_size=32)
    contract, path = contract_of(model), tmp_path / f"model{SUFFIXES[to]}"
    files = [(path, export(model, contract, path, target=to, merge=3))]
    if to == "onnx":
        pytest.importorskip("openvino")
        files.append((path.with_suffix(".xml"), files[0][1]))
        convert_onnx(path, files[0][1], path.with_suffix(".xml"), "openvino", False)
    wanted, images = by_pytorch(model.merge_tokens(3), contract, pixels(model)), pixels(model)
    assert np.abs(wanted - by_pytorch(model, contract, images)).max() > 1e-3
    for file, report in files:
        found = open_deployed_model(file)
        assert found.contract == report
        assert report.merge == 3
        np.testing.assert_allclose(found.runtime(images), wanted, atol=1e-4)


def test_positions_of_one_size_are_shared_constants():
    model = tiny(position="sincos2d@shared", depth=2)
    buffers = dict(model.with_constants().position.named_buffers())
    assert [tuple(buffer.shape) for buffer in buffers.values()] == [(1, 7, 32)]
    assert dict(tiny(position="relative", depth=2).with_constants().position.named_buffers()).keys() == {
        "table_0",
        "table_1",
    }


def test_exported_files_hold_no_machine_paths():
    content = (shared() / "model.onnx").read_bytes()
    assert os.getcwd().encode() not in content
    assert b"site-packages" not in content
    assert b"blocks.0.msa.qkv/MatMul" in content
    with zipfile.ZipFile(shared() / "model.pt2") as archive:
        for name in archive.namelist():
            text = archive.read(name)
            for path in (os.getcwd(), "site-packages", "torch_program.py"):
                assert path.encode() not in text, name


def test_contract_round_trip():
    contract = replace(contract_of(tiny()), several=True, merge=4, precision="bf16", any_size=True)
    assert contract.labels == LABELS
    assert contract_from_json(contract_to_json(contract, "uint8")) == (contract, "uint8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "unsupported metadata format 2"),
        ({"input": "bytes"}, "must be uint8 or float, got 'bytes'"),
        ({"labels": ["a"]}, "1 labels for 5 classes"),
        ({"labels": "abcde"}, "labels is 'abcde'"),
        ({"merge": -1}, "merged tokens must be >= 0, got -1"),
        ({"merge": True}, "merge is True"),
        ({"precision": "int4"}, "unknown precision 'int4'"),
        ({"config": {}}, "config"),
        ({"config": None}, "config"),
        ({"preprocessing": {"type": "Preprocessing", "mean": [0.5], "std": [0.5]}}, "gives 1 channels"),
        ({"preprocessing": {"type": "Preprocessing", "std": [0, 0, 0]}}, "must be finite and > 0"),
    ],
)
def test_damaged_contract_gives_one_line(change, message):
    report = json.loads(contract_to_json(contract_of(tiny()), "float")) | change
    with pytest.raises(ValueError, match=message) as error:
        contract_from_json(json.dumps(report))
    assert "\n" not in str(error.value)
    for text in ("{", "[]", "[" * 10_000, json.dumps({"format": 1})):
        with pytest.raises(ValueError, match="vitrail metadata"):
            contract_from_json(text)


def test_user_errors_give_one_line(tmp_path, capsys):
    source = str(saved(tiny(), tmp_path / "model.safetensors"))
    for arguments, message in (
        (["out.txt"], "unknown suffix, use .onnx, .xml, .pt2"),
        (["out.pt2", "--to", "onnx"], "must be .onnx"),
        (["no/such/out.onnx"], "there is no directory"),
        (["out.onnx", "--calibrate", "digits"], "--calibrate needs --int8"),
        (["out.onnx", "--map", "index"], "--map needs --verify DATA"),
        (["out.pt2", "--int8"], "int8 needs ONNX Runtime or OpenVINO"),
        (["out.onnx", "--limit", "0"], "--limit must be >= 1, got 0"),
        (["out.onnx", "--tolerance", "-1"], "--tolerance must be >= 0 and finite, got -1"),
    ):
        where = tmp_path / arguments[0]
        assert main(["export", source, str(where), *arguments[1:]]) == 2
        error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
        assert len(error) == 1, error
        assert message in error[0]
        assert not where.exists()


def test_opening_a_program_does_not_execute_it(monkeypatch):
    monkeypatch.setattr(torch.export, "load", None)
    runtime, _ = open_program(shared() / "model.pt2")
    assert runtime(pixels(tiny())).shape == (3, 5)
