"""Quantise an ONNX graph to int8, with ranges calibrated on images; sensitive layers stay in fp32.

Weights have one scale per output channel, activations one per tensor (`QuantizeLinear` and `DequantizeLinear` around products).
Only products with weights are quantised: attention's products, norms and softmax stay in fp32.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitrail.deploy.export.graph import silence_exporter
from vitrail.deploy.runtimes.exported import INPUT_NAME, import_onnxruntime, start_session
from vitrail.utils.progress import ProgressCallback

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

QUANTISED_OPS = ("MatMul", "Gemm", "Conv")
SENSITIVITY_IMAGES = 16  # on which the sensitivity of layers is measured
SENSITIVITY_SECONDS = 300.0  # limit for measuring it


@dataclass(frozen=True)
class QuantisedGraph:
    """A graph in int8, and its layers left in fp32."""

    proto: "ModelProto"
    float_layers: tuple[str, ...]
    n_layers: int  # that can be quantised
    notes: tuple[str, ...] = ()


class CalibrationReader:
    """Calibration images in batches, with the interface of onnxruntime's CalibrationDataReader."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.batches = iter([{INPUT_NAME: pixels[start : start + 4]} for start in range(0, len(pixels), 4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.batches


class Quantiser:
    """A graph with the ranges of its activations, of which any subset of layers can be quantised."""

    def __init__(self, path: Path, pixels: np.ndarray) -> None:
        """Calibrate on `pixels`, the input of the graph [B, C, H, W]: uint8 or normalised."""
        import_onnxruntime()
        from onnxruntime.quantization import CalibrationMethod, create_calibrator
        from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

        with silence_exporter(), tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
            self.proto = load_model_with_shape_infer(path)
            augmented, method = str(Path(directory) / "augmented.onnx"), CalibrationMethod.MinMax
            calibrator = create_calibrator(path, list(QUANTISED_OPS), augmented, calibrate_method=method)
            calibrator.collect_data(cast(Any, CalibrationReader(pixels)))
            self.ranges = calibrator.compute_data()
        # not stacks of matrices (the relative positions of MViT), which onnxruntime cannot multiply in int8
        weights = {tensor.name for tensor in self.proto.graph.initializer if len(tensor.dims) != 3}
        self.layer_names = [node.name for node in self.proto.graph.node if is_weight_product(node, weights)]
        self.reduce_range = not has_vnni()

    def quantise_layers(self, names: Sequence[str]) -> "ModelProto":
        """Return the graph with these layers in int8."""
        import onnx
        from onnxruntime.quantization import QDQQuantizer, QuantType

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        if not names:
            return proto
        with silence_exporter():
            options = {"OpTypesToExcludeOutputQuantization": list(QUANTISED_OPS), "QuantizeBias": False}
            kinds = QuantType.QInt8, QuantType.QUInt8  # of weights, with a scale per channel, and of activations
            layers = list(names), [], list(QUANTISED_OPS)
            quantizer = QDQQuantizer(proto, True, self.reduce_range, *kinds, self.ranges, *layers, options)
            quantizer.quantize_model()
        return quantizer.model.model

    def measure_sensitivity(
        self,
        pixels: np.ndarray,
        output: str,
        progress: ProgressCallback | None = None,
        seconds: float = SENSITIVITY_SECONDS,
    ) -> dict[str, float]:
        """Return the mean squared change of the output with each layer quantised alone; stop after `seconds`."""
        expected, sensitivity = run_graph(self.proto, pixels, output), {}
        deadline = time.monotonic() + seconds
        for number, name in enumerate(self.layer_names, start=1):
            change = run_graph(self.quantise_layers([name]), pixels, output) - expected
            sensitivity[name] = float(np.square(change).mean())
            if progress:
                progress("measuring layers", number, len(self.layer_names))
            if time.monotonic() > deadline:
                break
        return sensitivity


def is_weight_product(node: "NodeProto", weights: set[str]) -> bool:
    """Return True for a product with weights."""
    return node.op_type in QUANTISED_OPS and len(node.input) > 1 and node.input[1] in weights


def run_graph(proto: "ModelProto", pixels: np.ndarray, output: str) -> np.ndarray:
    """Return an output of a graph in memory."""
    session = start_session(proto.SerializeToString())
    parts = [session.run([output], {INPUT_NAME: pixels[start : start + 8]})[0] for start in range(0, len(pixels), 8)]
    return np.concatenate([np.asarray(part) for part in parts])


def quantise_graph(
    quantiser: Quantiser,
    pixels: np.ndarray,
    output: str,
    is_accepted: Callable[["ModelProto"], bool],
    progress: ProgressCallback | None = None,
    seconds: float = SENSITIVITY_SECONDS,
) -> QuantisedGraph:
    """Return the graph with as many layers in int8 as `is_accepted` allows.

    All layers are tried first. If that fails, the sensitivity of each is measured and the most sensitive stay in fp32: 1, 2, 4
    and so on until the graph is accepted, then the smallest such number by bisection.
    """
    names, notes = quantiser.layer_names, []
    if not names:
        raise ValueError("this graph has no layer that can be quantised to int8")
    if quantiser.reduce_range:
        notes.append("weights use 7 bits, because 8-bit products overflow on processors without VNNI, such as this one")

    def without(count: int, order: list[str]) -> "ModelProto":
        return quantiser.quantise_layers([name for name in names if name not in order[:count]])

    whole = quantiser.quantise_layers(names)
    if is_accepted(whole):
        return QuantisedGraph(whole, (), len(names), tuple(notes))
    sensitivity = quantiser.measure_sensitivity(pixels, output, progress, seconds)
    if len(sensitivity) < len(names):
        notes.append(f"time limit reached after {len(sensitivity)} of {len(names)} layers: the others stay in fp32")
    # Layers that were not measured count as the most sensitive.
    order = sorted(names, key=lambda name: -sensitivity.get(name, float("inf")))
    count = max(1, len(names) - len(sensitivity))
    fails, works, best = count - 1, 0, None
    while best is None and count < len(names):
        if is_accepted(proto := without(count, order)):
            works, best = count, proto
        else:
            fails, count = count, 2 * count
    if best is None:
        remedy = "calibrate on more of your images (--calibrate), raise --tolerance, or use fp32"
        raise ValueError(f"int8 exceeds the tolerance even with most of the {len(names)} layers in fp32: {remedy}")
    while works - fails > 1:
        middle = (works + fails) // 2
        if is_accepted(proto := without(middle, order)):
            works, best = middle, proto
        else:
            fails = middle
        if progress:
            progress("choosing fp32 layers", works, len(names))
    return QuantisedGraph(best, tuple(name.partition("/")[0] for name in order[:works]), len(names), tuple(notes))


def has_vnni() -> bool:
    """Return True if the processor accumulates int8 products in 32 bits."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True  # not Linux: most such processors do
    return "vnni" in flags or "aarch64" in flags or "asimddp" in flags
