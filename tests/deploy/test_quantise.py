"""Quantisation to int8 with sensitive layers in fp32, and half precision."""

import shutil
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.data.making import tree
from tests.deploy.exports import by_pytorch, contract_of, pixels, saved, tiny
from vitrail.cli.export_images import load_calibration_images
from vitrail.deploy.export import export as exporting
from vitrail.deploy.export.comparison import VerificationImages
from vitrail.deploy.export.export import convert_onnx, open_own_file, write_fp32_onnx
from vitrail.deploy.export.graph import store_half, write_onnx
from vitrail.deploy.export.quantise import Quantiser, quantise_graph, run_graph
from vitrail.deploy.export.verify import ExportRequest, export_and_verify
from vitrail.deploy.runtimes.exported import open_onnx
from vitrail.deploy.runtimes.open import open_checkpoint

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model, its ONNX file, images, and a quantiser calibrated on them."""
    model = tiny(depth=2)
    path = tmp_path_factory.mktemp("int8") / "float.onnx"
    write_fp32_onnx(model, contract_of(model), path, uint8=True)
    images = pixels(model, 12)
    return model, path, images, Quantiser(path, images)


def test_only_products_with_weights_are_quantised(made):
    _, _, _, quantiser = made
    layers = [name.partition("/")[0] for name in quantiser.layer_names]
    assert len(layers) == 1 + 2 * 4 + 1
    assert {"embed.projection", "blocks.0.msa.qkv", "blocks.1.mlp.fc2", "head"} <= set(layers)


def test_int8_is_close_and_small(made):
    model, _, images, quantiser = made
    wanted = by_pytorch(model, contract_of(model), images)
    whole = quantiser.quantise_layers(quantiser.layer_names)
    found = run_graph(whole, images, "logits")
    assert 1e-4 < np.abs(found - wanted).max() < 0.2 * np.abs(wanted).max()
    kinds = [tensor.data_type for tensor in whole.graph.initializer if len(tensor.dims) == 2]
    assert kinds.count(onnx.TensorProto.INT8) == len(quantiser.layer_names)
    scales = [tensor for tensor in whole.graph.initializer if tensor.name.endswith("_scale") and tensor.dims]
    assert sorted(scale.dims[0] for scale in scales) == sorted([32, *2 * [96, 32, 128, 32], 5])  # one for each channel


def test_only_sensitive_layers_stay_in_fp32(made):
    _, _, images, quantiser = made
    moved = quantiser.measure_sensitivity(images[:4], "logits")
    worst = sorted(moved, key=moved.get)[-3:]

    def holds(proto):
        rounded = {node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
        products = {node.name for node in proto.graph.node if node.input and set(node.input) & rounded}
        return not products & set(worst)

    found = quantise_graph(quantiser, images[:4], "logits", holds)
    assert sorted(found.float_layers) == sorted(name.partition("/")[0] for name in worst)
    assert found.n_layers == len(quantiser.layer_names)


def test_all_layers_accepted_and_none_accepted(made):
    _, _, images, quantiser = made
    assert quantise_graph(quantiser, images[:4], "logits", lambda _: True).float_layers == ()
    with pytest.raises(ValueError, match="int8 exceeds the tolerance"):
        quantise_graph(quantiser, images[:2], "logits", lambda _: False)


def test_unmeasured_layers_stay_in_fp32(made):
    _, _, images, quantiser = made
    found = quantise_graph(quantiser, images[:2], "logits", Second(), seconds=0)
    assert len(found.float_layers) == len(quantiser.layer_names) - 1
    assert any("time limit reached after 1 of" in note for note in found.notes)


class Second:
    """Accepts from the second call on."""

    asked = 0

    def __call__(self, proto) -> bool:
        self.asked += 1
        return self.asked > 1


def test_int8_file_is_verified_and_opened(made, tmp_path, monkeypatch):
    model, source, images, _ = made
    path = tmp_path / "model.onnx"
    # The fp32 file exists already.
    monkeypatch.setattr(exporting, "write_fp32_onnx", lambda _, contract, place, uint8: shutil.copy(source, place))
    asked = ExportRequest("onnx", uint8=True, precision="int8", tolerance=30.0, timing_seconds=0.1)
    proof = export_and_verify(
        model, contract_of(model), path, asked, VerificationImages(images, "made"), calibration=images
    )
    assert proof.passed
    assert set(proof.speeds) == {"model", "file", "file in float"}
    assert any("layers use int8" in note for note in proof.notes)
    assert near(model, path, images) == "int8"


def test_openvino_reads_int8(made, tmp_path):
    pytest.importorskip("openvino")
    model, _, images, quantiser = made
    write_onnx(quantiser.quantise_layers(quantiser.layer_names), tmp_path / "int8.onnx")
    contract = replace(contract_of(model), precision="int8")
    convert_onnx(tmp_path / "int8.onnx", contract, tmp_path / "model.xml", "openvino", True)
    assert near(model, tmp_path / "model.xml", images) == "int8"


def near(model, path, images) -> str:
    """Check that outputs are close to PyTorch's but not equal; return the precision of the file."""
    runtime, contract = open_own_file(path)
    wanted = by_pytorch(model, contract_of(model), images)
    assert 1e-4 < np.abs(runtime(images) - wanted).max() < 0.3 * np.abs(wanted).max()
    return contract.precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_halves_the_weights_and_keeps_predictions(made, precision, tmp_path):
    model, path, images, _ = made
    proto = onnx.load_model(path)
    small = store_half(proto, precision)
    (tmp_path / "half.onnx").write_bytes(small.SerializeToString())
    wanted = by_pytorch(model, contract_of(model), images)
    found = open_onnx(tmp_path / "half.onnx")[0](images)
    assert 0 < np.abs(found - wanted).max() < 0.05
    stored = [sum(len(tensor.raw_data) for tensor in each.graph.initializer) for each in (proto, small)]
    assert stored[1] < 0.6 * stored[0]


def test_overflow_in_fp16_is_an_error(made):
    _, path, _, _ = made
    proto = onnx.load_model(path)
    large = next(tensor for tensor in proto.graph.initializer if np.prod(tensor.dims) >= 1024)
    large.raw_data = (1e6 * np.ones(tuple(large.dims), np.float32)).tobytes()
    with pytest.raises(ValueError, match="overflow in fp16"):
        store_half(proto, "fp16")
    store_half(proto, "bf16")


def test_calibration_needs_no_labels(tmp_path):
    tree(tmp_path / "judging", {f"{number}_x.png": number for number in range(5)})
    tree(tmp_path / "plain", {f"photo-{number}.png": 10 + number for number in range(9)})
    source = saved(tiny(), tmp_path / "model.safetensors")
    found = open_checkpoint(source, torch.device("cpu"), None, 0, None, None, None, "fp32")
    options = Namespace(calibration=4, verify=str(tmp_path / "judging"), label_from=r"^(\d+)_", calibrate=None)
    judged_by = {str(tmp_path / "judging" / f"{number}_x.png") for number in range(5)}
    options.calibrate = str(tmp_path / "plain")
    images, notes = load_calibration_images(options, found, judged_by, lambda *_: None)
    assert (images.shape, notes) == ((4, 3, 16, 24), [])
    options.calibrate = None
    _, (note,) = load_calibration_images(options, found, judged_by, lambda *_: None)
    assert note.startswith("4 images are used for both calibration and verification")
    # Of the same folder, those that do not judge are taken where there are enough.
    _, notes = load_calibration_images(options, found, {str(tmp_path / "judging" / "0_x.png")}, lambda *_: None)
    assert notes == []
