"""Exported files: cached ones are repaired, damaged or hostile ones end in one line, and a batch has a time limit."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.hostile.measured import run_vitrail as run
from vitrail.data.preprocessing import Preprocessing

IMAGES = Path(__file__).parent.parent / "compatibility" / "fixtures" / "images" / "0"
MODEL = Path(__file__).parent.parent / "compatibility" / "fixtures" / "finished" / "vit" / "model.safetensors"


def predict(model: Path, out: Path, *more: str, **env: str):
    return run("predict", model, IMAGES, "--out", out, "--force", *more, env=env)


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_export_in_the_cache_is_made_anew(runtime: str, damage: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[runtime])
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert predict(MODEL, tmp_path / "a.csv", "--runtime", runtime, **env).code == 0
    suffix = {"onnx": ".onnx", "openvino": ".bin"}[runtime]
    (file,) = (tmp_path / "cache").rglob(f"model{suffix}")
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        data[middle : middle + 400] = np.random.default_rng(0).bytes(400)
        file.write_bytes(data)
    again = predict(MODEL, tmp_path / "b.csv", "--runtime", runtime, **env)
    assert again.code == 0, again.err
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    third = predict(MODEL, tmp_path / "c.csv", "--runtime", runtime, **env)
    assert "exporting" not in third.err, "repaired once"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache directory should be")
    refused = predict(MODEL, tmp_path / "a.csv", "--runtime", "onnx", XDG_CACHE_HOME=str(blocked))
    refused.assert_refused("cache")


def test_a_read_only_home_is_one_line(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    predict(MODEL, tmp_path / "a.csv", "--runtime", "onnx", HOME=str(home), XDG_CACHE_HOME="").assert_refused("home")


@pytest.mark.parametrize("name", ["R26+S/32", "conv-stem"])
def test_programs_with_batch_norm_and_group_norm_are_predicted_with(name: str, tmp_path: Path) -> None:
    if name == "conv-stem":
        model = vitrail.build(width=32, depth=1, heads=2, patch=8, embed="conv-stem", image_size=32, classes=3)
    else:
        model = vitrail.build(name, depth=1, image_size=64, classes=3)
    size = model.config.image_size
    model.preprocessing = Preprocessing(size, size)
    vitrail.save(model, tmp_path / "model.safetensors")
    done = run("export", tmp_path / "model.safetensors", tmp_path / "model.pt2", timeout=300)
    assert done.code == 0, done.err
    done = predict(tmp_path / "model.pt2", tmp_path / "a.csv")
    assert done.code == 0, done.err


def rewrite_metadata(source: Path, target: Path, change) -> Path:
    """Copy an ONNX file with other metadata."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    graph = onnx.load(source)
    for entry in graph.metadata_props:
        if entry.value.startswith("{"):
            data = json.loads(entry.value)
            change(data)
            entry.value = json.dumps(data)
    onnx.save(graph, target)
    return target


EXPORTED = Path(__file__).parent.parent / "compatibility" / "fixtures" / "exported"
METADATA = {
    "a list as type": lambda data: data["config"].update(type=[]),
    "a number of 400 digits": lambda data: data["config"]["size"].update(width=10**400),
    "a crop of 60,000 pixels": lambda data: data["preprocessing"].update(
        size=[60_000, 60_000], resize=[60_000, 60_000]
    ),
    "labels of numbers": lambda data: data.update(labels=[1, 2, 3]),
    "no preprocessing": lambda data: data.pop("preprocessing"),
}


@pytest.mark.parametrize("name", METADATA)
def test_hostile_metadata_is_one_line(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    path = rewrite_metadata(EXPORTED / "vit.onnx", tmp_path / "model.onnx", METADATA[name])
    refused = predict(path, tmp_path / "a.csv")
    refused.assert_refused("model.onnx")
    assert refused.peak_mb < 1_500


def write_onnx_with(body, path: Path) -> Path:
    """Write a graph with the metadata of an export, whose logits come from `body(helper, numpy_helper)`: nodes to insert."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    graph = onnx.load(EXPORTED / "vit.onnx")
    body(onnx, graph.graph)
    onnx.save(graph, path)
    return path


def add_endless_loop(onnx, graph) -> None:
    """Insert a loop that never ends before the logits."""
    helper = onnx.helper
    logits = graph.output[0].name
    for node in graph.node:
        for k, name in enumerate(node.output):
            if name == logits:
                node.output[k] = "before"
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition"], ["go_on"]),
            helper.make_node("Identity", ["state"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", onnx.TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", onnx.TensorProto.FLOAT, None),
        ],
    )
    graph.initializer.append(helper.make_tensor("always", onnx.TensorProto.BOOL, [], [True]))
    graph.node.append(helper.make_node("Loop", ["", "always", "before"], [logits], body=body))


def add_failing_reshape(onnx, graph) -> None:
    """Insert a reshape that fits no batch."""
    helper = onnx.helper
    logits = graph.output[0].name
    for node in graph.node:
        for k, name in enumerate(node.output):
            if name == logits:
                node.output[k] = "before"
    graph.initializer.append(helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [7, 11]))
    graph.node.append(helper.make_node("Reshape", ["before", "shape"], [logits]))


def test_an_endless_loop_meets_the_time_limit(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    path = write_onnx_with(add_endless_loop, tmp_path / "model.onnx")
    refused = predict(path, tmp_path / "a.csv", "--batch-timeout", "2")
    refused.assert_refused("model.onnx", "2 s", "--batch-timeout")


def test_a_graph_that_fails_while_it_runs_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    path = write_onnx_with(add_failing_reshape, tmp_path / "model.onnx")
    predict(path, tmp_path / "a.csv").assert_refused("model.onnx")


def test_openvino_expands_no_entities(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    text = (EXPORTED / "vit.xml").read_text()
    laughs = "".join(f'<!ENTITY a{k} "{f"&a{k - 1};" * 10}">' for k in range(1, 10))
    entities = f'<!DOCTYPE net [<!ENTITY a0 "ha"><!ENTITY file SYSTEM "file:///etc/passwd">{laughs}]>'
    start = text.index("<net")
    (tmp_path / "model.xml").write_text(text[:start] + entities + text[start:].replace('name="', 'name="&a9;&file;', 1))
    (tmp_path / "model.bin").write_bytes((EXPORTED / "vit.bin").read_bytes())
    done = predict(tmp_path / "model.xml", tmp_path / "a.csv")
    assert done.code in (0, 2), done.err
    assert done.peak_mb < 1_500
    assert "Traceback" not in done.err
    assert "root:" not in done.err + done.out
