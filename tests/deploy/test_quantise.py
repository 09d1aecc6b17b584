"""Rounding to 8 bits: calibrated, and in float where a layer does not bear it. And half precision."""

import shutil
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.data.making import tree
from tests.deploy.exports import by_pytorch, contract_of, pixels, saved, tiny
from vitrail.cli.shown import calibrating
from vitrail.deploy import proving
from vitrail.deploy.export import derive, opened_file, write_float
from vitrail.deploy.gate import Shown
from vitrail.deploy.half import halved
from vitrail.deploy.onnx_export import write_onnx
from vitrail.deploy.onnx_runtime import open_onnx
from vitrail.deploy.opening import of_checkpoint
from vitrail.deploy.proving import Asked, export_with_proof
from vitrail.deploy.quantise import Quantiser, quantised, run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its ONNX file, pictures, and the quantiser that is calibrated on them."""
    model = tiny(depth=2)
    path = tmp_path_factory.mktemp("int8") / "float.onnx"
    write_float(model, contract_of(model), path, uint8=True)
    pictures = pixels(model, 12)
    return model, path, pictures, Quantiser(path, pictures)


def test_only_products_with_weights_are_rounded(made):
    _, _, _, quantiser = made
    layers = [name.partition("/")[0] for name in quantiser.names]
    assert len(layers) == 1 + 2 * 4 + 1
    assert {"embed.projection", "blocks.0.msa.qkv", "blocks.1.mlp.fc2", "head"} <= set(layers)


def test_int8_is_near_and_its_file_small(made):
    model, _, pictures, quantiser = made
    wanted = by_pytorch(model, contract_of(model), pictures)
    whole = quantiser.rounded(quantiser.names)
    found = run(whole, pictures, "logits")
    assert 1e-4 < np.abs(found - wanted).max() < 0.2 * np.abs(wanted).max()
    kinds = [tensor.data_type for tensor in whole.graph.initializer if len(tensor.dims) == 2]
    assert kinds.count(onnx.TensorProto.INT8) == len(quantiser.names)
    scales = [tensor for tensor in whole.graph.initializer if tensor.name.endswith("_scale") and tensor.dims]
    assert sorted(scale.dims[0] for scale in scales) == sorted([32, *2 * [96, 32, 128, 32], 5])  # one for each channel


def test_the_layers_that_it_harms_stay_in_float_and_no_others(made):
    _, _, pictures, quantiser = made
    moved = quantiser.sensitivity(pictures[:4], "logits")
    worst = sorted(moved, key=moved.get)[-3:]

    def holds(proto):
        rounded = {node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
        products = {node.name for node in proto.graph.node if node.input and set(node.input) & rounded}
        return not products & set(worst)

    found = quantised(quantiser, pictures[:4], "logits", holds)
    assert sorted(found.kept) == sorted(name.partition("/")[0] for name in worst)
    assert found.layers == len(quantiser.names)


def test_nothing_is_kept_where_all_of_it_holds_and_all_is_refused_where_nothing_does(made):
    _, _, pictures, quantiser = made
    assert quantised(quantiser, pictures[:4], "logits", lambda _: True).kept == ()
    with pytest.raises(ValueError, match="the tolerance does not hold"):
        quantised(quantiser, pictures[:2], "logits", lambda _: False)


def test_when_time_is_up_what_was_not_measured_stays_in_float(made):
    _, _, pictures, quantiser = made
    found = quantised(quantiser, pictures[:2], "logits", Second(), seconds=0)
    assert len(found.kept) == len(quantiser.names) - 1
    assert any("time was up after 1 of" in note for note in found.notes)


class Second:
    """Holds from the second question on."""

    asked = 0

    def __call__(self, proto) -> bool:
        self.asked += 1
        return self.asked > 1


def test_an_int8_file_is_proven_and_opened(made, tmp_path, monkeypatch):
    model, source, pictures, _ = made
    path = tmp_path / "model.onnx"
    # The file in float is there already.
    monkeypatch.setattr(proving, "write_float", lambda _, contract, place, uint8: shutil.copy(source, place))
    asked = Asked("onnx", uint8=True, precision="int8", tolerance=30.0, measuring=0.1)
    proof = export_with_proof(model, contract_of(model), path, asked, Shown(pictures, "made"), calibration=pictures)
    assert proof.passed
    assert set(proof.speeds) == {"model", "file", "file in float"}
    assert any("layers are in int8" in note for note in proof.notes)
    assert near(model, path, pictures) == "int8"


def test_openvino_reads_the_same_int8(made, tmp_path):
    pytest.importorskip("openvino")
    model, _, pictures, quantiser = made
    write_onnx(quantiser.rounded(quantiser.names), tmp_path / "int8.onnx")
    contract = replace(contract_of(model), precision="int8")
    derive(tmp_path / "int8.onnx", contract, tmp_path / "model.xml", "openvino", True)
    assert near(model, tmp_path / "model.xml", pictures) == "int8"


def near(model, path, pictures) -> str:
    """Close to what PyTorch says, but rounded; gives the precision that the file tells."""
    runtime, contract = opened_file(path)
    wanted = by_pytorch(model, contract_of(model), pictures)
    assert 1e-4 < np.abs(runtime(pictures) - wanted).max() < 0.3 * np.abs(wanted).max()
    return contract.precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_halves_the_weights_and_keeps_the_answers(made, precision, tmp_path):
    model, path, pictures, _ = made
    proto = onnx.load_model(path)
    small = halved(proto, precision)
    (tmp_path / "half.onnx").write_bytes(small.SerializeToString())
    wanted = by_pytorch(model, contract_of(model), pictures)
    found = open_onnx(tmp_path / "half.onnx")[0](pictures)
    assert 0 < np.abs(found - wanted).max() < 0.05
    stored = [sum(len(tensor.raw_data) for tensor in each.graph.initializer) for each in (proto, small)]
    assert stored[1] < 0.6 * stored[0]


def test_values_too_large_for_fp16_are_refused(made):
    _, path, _, _ = made
    proto = onnx.load_model(path)
    large = next(tensor for tensor in proto.graph.initializer if np.prod(tensor.dims) >= 1024)
    large.raw_data = (1e6 * np.ones(tuple(large.dims), np.float32)).tobytes()
    with pytest.raises(ValueError, match="too large for fp16"):
        halved(proto, "fp16")
    halved(proto, "bf16")


def test_calibration_needs_no_labels(tmp_path):
    tree(tmp_path / "judging", {f"{number}_x.png": number for number in range(5)})
    tree(tmp_path / "plain", {f"photo-{number}.png": 10 + number for number in range(9)})
    source = saved(tiny(), tmp_path / "model.safetensors")
    found = of_checkpoint(source, torch.device("cpu"), None, 0, None, None, None, "fp32")
    options = Namespace(calibration=4, verify=str(tmp_path / "judging"), label_from=r"^(\d+)_", calibrate=None)
    judged_by = {str(tmp_path / "judging" / f"{number}_x.png") for number in range(5)}
    options.calibrate = str(tmp_path / "plain")
    pictures, notes = calibrating(options, found, judged_by, lambda *_: None)
    assert (pictures.shape, notes) == ((4, 3, 16, 24), [])
    options.calibrate = None
    _, (note,) = calibrating(options, found, judged_by, lambda *_: None)
    assert note.startswith("4 pictures that int8 is judged by")
    # Of the same folder, those that do not judge are taken where there are enough.
    _, notes = calibrating(options, found, {str(tmp_path / "judging" / "0_x.png")}, lambda *_: None)
    assert notes == []
