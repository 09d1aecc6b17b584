"""Every slot of the family is exported and answers as PyTorch does, or is refused by its name."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.exports import LABELS, by_pytorch, contract_of, pixels, saved, shaken, shared, tiny
from tests.variants import SMALL, VIT_SLOTS
from vitrail.cli import export as command
from vitrail.cli import main
from vitrail.deploy.export import ENDINGS, derive, export, opened_file
from vitrail.deploy.exported_torch import open_exported
from vitrail.deploy.graph import Graph
from vitrail.deploy.metadata import from_json, to_json
from vitrail.deploy.opening import opened
from vitrail.deploy.settled import bicubic, settled
from vitrail.models.bit import BiTConfig
from vitrail.models.build import build_from
from vitrail.models.hybrid import Hybrid
from vitrail.models.merging import merged
from vitrail.nn.embed import Patches
from vitrail.nn.head import Projection
from vitrail.nn.position import resample

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


def test_the_command_knows_the_endings_of_the_library():
    assert command.ENDINGS == ENDINGS


def same_as_pytorch(model, path, **options):
    """Exports, opens as a stranger would, and compares whatever the graph gives."""
    to = {ending: name for name, ending in ENDINGS.items()}[path.suffix]
    export(model, contract_of(model), path, to=to, **options)
    return opened_gives_the_same(model, path)


def opened_gives_the_same(model, path):
    contract, pictures = contract_of(model), pixels(model)
    found = opened(path, gives="features" if model.config.classes is None else "logits")
    assert found.contract.labels == contract.labels
    assert found.contract.preprocessing == contract.preprocessing
    assert found.contract.config == contract.config
    wanted = by_pytorch(model, contract, pictures)
    np.testing.assert_allclose(found.runtime(pictures), wanted, atol=1e-4)
    np.testing.assert_allclose(found.runtime(pictures[:1]), wanted[:1], atol=1e-4)  # any number of pictures
    assert np.abs(wanted).max() > 0.1
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_slot_answers_in_onnx_as_in_pytorch_and_some_in_openvino(name, tmp_path):
    model, uint8 = tiny(**MODELS[name]), "grey" in name
    found = same_as_pytorch(model, tmp_path / "model.onnx", uint8=uint8)
    if name.startswith(("paper", "rotary", "grey")):
        pytest.importorskip("openvino")
        derive(tmp_path / "model.onnx", found.contract, tmp_path / "model.xml", "openvino", uint8)
        opened_gives_the_same(model, tmp_path / "model.xml")
    if model.config.classes is not None:
        saved(model, tmp_path / "model.safetensors")
        headless = vitrail.load(tmp_path / "model.safetensors", classes=None)
        features, _ = opened_file(tmp_path / "model.onnx", "features")
        wanted = by_pytorch(headless, found.contract, pixels(model))
        np.testing.assert_allclose(features(pixels(model)), wanted, atol=1e-4)


@pytest.mark.parametrize("make", [small_hybrid, small_bit])
def test_resnets_answer_in_onnx_as_in_pytorch(make, tmp_path):
    same_as_pytorch(make(), tmp_path / "model.onnx")


def test_a_program_of_pytorchs_is_opened_by_its_weights_and_gives_the_same():
    path = shared() / "model.pt2"
    found = opened_gives_the_same(tiny(), path)
    program, _ = opened_file(path)
    np.testing.assert_allclose(program(pixels(tiny())), found.runtime(pixels(tiny())), atol=1e-6)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_every_slot_is_the_same_when_it_is_made_ready_for_a_graph(slots):
    model = shaken(vitrail.build(**(SMALL | slots)))
    contract = replace(contract_of(model), config={})
    pictures = pixels(model, 2)
    graph = Graph(settled(model), contract.preprocessing, uint8=True)
    wanted = by_pytorch(model, contract, pictures)
    with torch.inference_mode():
        found = graph(torch.from_numpy(pictures))
    np.testing.assert_allclose(found[0].numpy(), wanted, atol=1e-5)
    assert len(found) == (1 if model.config.classes is None else 2)


SIZES = ((16, 24), (40, 16), (32, 56))


@pytest.mark.parametrize(
    "make", [tiny, lambda: tiny(position="relative"), small_bit], ids=["learned", "relative", "BiT"]
)
def test_any_size_has_its_positions_resampled_inside_the_graph(make, tmp_path):
    model = make()
    contract, path = contract_of(model), tmp_path / "model.onnx"
    export(model, contract, path, to="onnx", dynamic_size=True)
    runtime, told = opened_file(path)
    assert told.any_size
    pytest.importorskip("openvino")
    derive(path, told, path.with_suffix(".xml"), "openvino", False)
    runtimes = (runtime, opened_file(path.with_suffix(".xml"))[0])
    for size in SIZES:
        pictures = pixels(model, 2, size)
        for each in runtimes:
            np.testing.assert_allclose(each(pictures), by_pytorch(model, contract, pictures), atol=1e-4)


@pytest.mark.parametrize(
    "position", ["learned1d@every", "learned2d", "learned2d@shared", "relative@shared", "rotary2d"]
)
def test_positions_for_any_size_are_those_of_the_model(position):
    model = tiny(position=position, registers=1)
    other, contract = settled(model, any_size=True), contract_of(model)
    for size in SIZES:
        pictures = pixels(model, 1, size)
        wanted = by_pytorch(model, contract, pictures)
        np.testing.assert_allclose(by_pytorch(other, contract, pictures), wanted, atol=1e-5)


@pytest.mark.parametrize("sizes", [(14, 14), (14, 9), (7, 16), (3, 20), (27, 13)])
def test_the_weights_of_resampling_are_pytorchs(sizes):
    source, count = sizes
    table = torch.randn(5, source, 1)
    expected = resample(table, (count, 1))
    torch.testing.assert_close(bicubic(source, count, table) @ table, expected, atol=1e-5, rtol=0)


def test_what_cannot_take_any_size_is_refused_by_its_name(tmp_path):
    for model, name in ((small_hybrid(), "Hybrid"), (tiny(embed="conv-stem"), "ConvStem")):
        with pytest.raises(ValueError, match=f"the embedding {name} cannot be exported for pictures of any size"):
            export(model, contract_of(model), tmp_path / "a.onnx", to="onnx", dynamic_size=True)
    model = tiny()
    with pytest.raises(ValueError, match="merged by their number"):
        export(model, contract_of(model), tmp_path / "a.onnx", to="onnx", dynamic_size=True, merge=1)
    with pytest.raises(ValueError, match="ResNet"):
        export(small_bit(), contract_of(small_bit()), tmp_path / "a.onnx", to="onnx", merge=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_merged_tokens_are_merged_in_every_runtime(to, tmp_path):
    model = tiny(depth=2, image_size=32)
    contract, path = contract_of(model), tmp_path / f"model{ENDINGS[to]}"
    files = [(path, export(model, contract, path, to=to, merge=3))]
    if to == "onnx":
        pytest.importorskip("openvino")
        files.append((path.with_suffix(".xml"), files[0][1]))
        derive(path, files[0][1], path.with_suffix(".xml"), "openvino", False)
    wanted, pictures = by_pytorch(merged(model, 3), contract, pixels(model)), pixels(model)
    assert np.abs(wanted - by_pytorch(model, contract, pictures)).max() > 1e-3
    for file, told in files:
        found = opened(file)
        assert found.contract == told
        assert told.merge == 3
        np.testing.assert_allclose(found.runtime(pictures), wanted, atol=1e-4)


def test_positions_of_one_size_are_constants_that_layers_share():
    model = tiny(position="sincos2d@shared", depth=2)
    buffers = dict(settled(model).position.named_buffers())
    assert [tuple(buffer.shape) for buffer in buffers.values()] == [(1, 7, 32)]
    assert dict(settled(tiny(position="relative", depth=2)).position.named_buffers()).keys() == {"table_0", "table_1"}


def test_the_file_holds_nothing_of_the_machine_it_was_made_on():
    content = (shared() / "model.onnx").read_bytes()
    assert os.getcwd().encode() not in content
    assert b"site-packages" not in content
    assert b"blocks.0.msa.qkv/MatMul" in content


def test_a_contract_comes_back_as_it_was_written():
    contract = replace(contract_of(tiny()), several=True, merge=4, precision="bf16", any_size=True)
    assert contract.labels == LABELS
    assert from_json(to_json(contract, "uint8")) == (contract, "uint8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has the form 2"),
        ({"input": "bytes"}, "neither uint8 nor float"),
        ({"labels": ["a"]}, "1 labels for 5 classes"),
        ({"labels": "abcde"}, "labels is 'abcde'"),
        ({"merge": -1}, "merges -1 tokens"),
        ({"merge": True}, "merge is True"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"config": {}}, "config"),
        ({"config": None}, "config"),
        ({"preprocessing": {"type": "Preprocessing", "mean": [0.5], "std": [0.5]}}, "gives 1 channels"),
        ({"preprocessing": {"type": "Preprocessing", "std": [0, 0, 0]}}, "must be above 0"),
    ],
)
def test_a_damaged_contract_is_refused_in_one_line(change, message):
    told = json.loads(to_json(contract_of(tiny()), "float")) | change
    with pytest.raises(ValueError, match=message) as error:
        from_json(json.dumps(told))
    assert "\n" not in str(error.value)
    for text in ("{", "[]", "[" * 10_000, json.dumps({"format": 1})):
        with pytest.raises(ValueError, match="its description"):
            from_json(text)


def test_mistakes_are_one_line(tmp_path, capsys):
    source = str(saved(tiny(), tmp_path / "model.safetensors"))
    for arguments, message in (
        (["out.txt"], "ends in none of .onnx, .xml, .pt2"),
        (["out.pt2", "--to", "onnx"], "known by its ending .onnx"),
        (["no/such/out.onnx"], "there is no directory"),
        (["out.onnx", "--calibrate", "digits"], "--calibrate is for --int8"),
        (["out.onnx", "--map", "index"], "--map is of the pictures for --verify"),
        (["out.pt2", "--int8"], "int8 is for ONNX Runtime and OpenVINO"),
        (["out.onnx", "--limit", "0"], "--limit 0"),
        (["out.onnx", "--tolerance", "-1"], "--tolerance -1"),
    ):
        where = tmp_path / arguments[0]
        assert main(["export", source, str(where), *arguments[1:]]) == 2
        error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
        assert len(error) == 1, error
        assert message in error[0]
        assert not where.exists()


def test_opening_a_program_does_not_load_it(monkeypatch):
    monkeypatch.setattr(torch.export, "load", None)
    runtime, _ = open_exported(shared() / "model.pt2")
    assert runtime(pixels(tiny())).shape == (3, 5)
