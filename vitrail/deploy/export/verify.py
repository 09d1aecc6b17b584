"""Export a model and verify the file: it replaces the target only if its outputs match the model's."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.deploy.export import comparison
from vitrail.deploy.export.comparison import (
    BATCH_SIZE,
    OutputComparison,
    SizeComparison,
    Tolerances,
    VerificationImages,
    VerificationReport,
    compare_outputs,
    generate_images,
)
from vitrail.deploy.export.export import (
    SUFFIXES,
    check_export,
    convert_onnx,
    open_own_file,
    stage_file,
    write_fp32_onnx,
    write_model,
)
from vitrail.deploy.export.graph import ExportGraph
from vitrail.deploy.export.onnx_graph import write_metadata, write_onnx
from vitrail.deploy.export.quantise import (
    SENSITIVITY_IMAGES,
    SENSITIVITY_SECONDS,
    QuantisedGraph,
    Quantiser,
    quantise_graph,
)
from vitrail.deploy.export.torch_program import ProgramRuntime
from vitrail.deploy.runtimes.base import ModelContract, OutputKind, Runtime
from vitrail.deploy.runtimes.onnx import prepare_input
from vitrail.inference import TorchRuntime, run_pixels
from vitrail.models.base import Model
from vitrail.utils.progress import ProgressCallback

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL_NAME, FILE_NAME, FLOAT_FILE_NAME = "model", "file", "file in float"  # keys of the speeds
IMAGES_PER_SIZE = 4
RESNET_STRIDE = 8  # pixels; ResNets have no patches
MIN_PATCHES = 2  # per side; from here on positions are resampled inside the graph


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export and its tolerance."""

    target: str  # onnx, openvino, torch
    uint8: bool = False
    dynamic_size: bool = False
    merge: int = 0
    precision: str = "fp32"
    tolerance: float | None = None
    force: bool = False
    threads: int | None = None
    search_seconds: float = SENSITIVITY_SECONDS  # limit for measuring the sensitivity of layers to int8
    timing_seconds: float = 10.0  # limit for measuring speeds


class VerificationError(ValueError):
    """The outputs of the file differ too much, so it was not written."""

    def __init__(self, report: VerificationReport) -> None:
        reasons = "; ".join(report.refusals)
        super().__init__(f"{report.file} was not written: {reasons}. Use --tolerance to allow more, or --force")
        self.report = report


def export_and_verify(
    model: Model,
    contract: ModelContract,
    path: Path,
    request: ExportRequest,
    images: VerificationImages,
    *,
    calibration: np.ndarray | None = None,
    bytes_before: int = 0,
    progress: ProgressCallback | None = None,
) -> VerificationReport:
    """Write the file and return the report; raise `VerificationError` if it fails. `calibration` holds uint8 images for int8."""
    int8, limits = request.precision == "int8", comparison.tolerances_for(request.precision, request.tolerance)
    check_export(path, request.target, "fp32" if int8 else request.precision, request.merge, request.dynamic_size)
    if int8 and request.target == "torch":
        raise ValueError("int8 needs ONNX Runtime or OpenVINO: use --to onnx or --to openvino")
    if int8 and calibration is None:
        raise ValueError("int8 needs calibration images: give --calibrate")
    contract = replace(contract, merge=request.merge, precision=request.precision, any_size=request.dynamic_size)
    output = output_kind(model)
    original = torch_runtime(model, contract)
    expected = run_pixels(original, images.pixels, BATCH_SIZE, progress, "running the model")

    def compare_file(file: Path) -> OutputComparison:
        runtime = open_own_file(file, output, request.threads)[0]
        outputs = run_pixels(runtime, images.pixels, BATCH_SIZE, progress, "running the file")
        return compare_outputs(expected, outputs, images.targets, contract.several, output)

    with stage_file(path) as staged, tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
        quantised, float_file = None, None
        if request.precision != "fp32":
            float_file = write_float_file(model, contract, Path(directory), request)
        if int8:
            assert calibration is not None
            inputs = prepare_input(calibration, None if request.uint8 else contract.preprocessing)
            quantised = write_int8(
                Path(directory) / "float.onnx",
                contract,
                staged,
                request,
                output,
                inputs,
                lambda: not limits.find_violations(compare_file(staged)),
                progress,
            )
        else:
            write_model(model, contract, staged, request.target, request.uint8)
        compared = compare_file(staged)
        runtimes = {MODEL_NAME: original, FILE_NAME: open_own_file(staged, output, request.threads)[0]}
        if float_file is not None:
            runtimes[FLOAT_FILE_NAME] = open_own_file(float_file, output, request.threads)[0]
        report = VerificationReport(
            str(path),
            request.target,
            request.precision,
            len(images.pixels),
            images.source,
            compared,
            compare_features(model, contract, staged, images, request) if output == "logits" else None,
            sum(file.stat().st_size for file in staged.parent.iterdir()),
            bytes_before,
            comparison.measure_speeds(runtimes, images.pixels, request.timing_seconds),
            tuple(limits.find_violations(compared)),
            compare_unmerged(model, contract, images, expected, progress) if request.merge else None,
            compare_at_sizes(model, contract, original, runtimes[FILE_NAME], progress) if request.dynamic_size else (),
            quantised.float_layers if quantised else (),
            quantised.notes if quantised else (),
        )
        report = complete_report(report, quantised, limits)
        if not report.passed and not request.force:
            raise VerificationError(report)
    return report


def complete_report(
    report: VerificationReport, quantised: QuantisedGraph | None, limits: Tolerances
) -> VerificationReport:
    """Return the report with notes for the user and the violations of features and other sizes."""
    notes = list(report.notes)
    if quantised is not None:
        notes.append(f"{quantised.n_layers - len(quantised.float_layers)} of {quantised.n_layers} layers use int8")
    if report.precision != "fp32" and (
        slow := comparison.describe_missing_speedup(report.speeds, FILE_NAME, FLOAT_FILE_NAME, report.precision)
    ):
        notes.append(slow)
    refusals = list(report.refusals)
    if report.precision == "fp32":  # too few images to estimate how many predictions change in lower precision
        refusals += limits.find_violations(report.features) if report.features is not None else []
        for other in report.at_sizes:
            reasons = limits.find_violations(other.compared)
            refusals += [f"at {other.size[0]}×{other.size[1]} {reason}" for reason in reasons]
    return replace(report, refusals=tuple(refusals), notes=tuple(notes))


def torch_runtime(model: Model, contract: ModelContract) -> Runtime:
    """Return the PyTorch runtime of the model, with the contract's token merging."""
    return TorchRuntime(model.merge_tokens(contract.merge) if contract.merge else model, contract.preprocessing)


def output_kind(model: Model) -> OutputKind:
    """Return the first output of the exported file."""
    return "features" if model.config.classes is None else "logits"


def compare_features(
    model: Model, contract: ModelContract, file: Path, images: VerificationImages, request: ExportRequest
) -> OutputComparison:
    """Compare the features, the second output of the file, on a few images."""
    graph, pixels = ExportGraph(model, contract.preprocessing, False, contract.merge), images.pixels[:BATCH_SIZE]
    expected = ProgramRuntime(graph, graph.output_names, contract, "float", "features")(pixels)
    outputs = open_own_file(file, "features", request.threads)[0](pixels)
    return compare_outputs(expected, outputs, what="features")


def compare_unmerged(
    model: Model,
    contract: ModelContract,
    images: VerificationImages,
    merged_outputs: np.ndarray,
    progress: ProgressCallback | None,
) -> OutputComparison:
    """Compare the model without and with token merging."""
    unmerged = run_pixels(
        torch_runtime(model, replace(contract, merge=0)),
        images.pixels,
        BATCH_SIZE,
        progress,
        "running the unmerged model",
    )
    return compare_outputs(unmerged, merged_outputs, images.targets, contract.several, output_kind(model))


def write_float_file(model: Model, contract: ModelContract, directory: Path, request: ExportRequest) -> Path:
    """Write the same file in fp32 for the comparison of speed; for int8 it is made from float.onnx beside it."""
    contract, path = replace(contract, precision="fp32"), directory / f"float{SUFFIXES[request.target]}"
    if request.target == "torch":
        write_model(model, contract, path, request.target, request.uint8)
        return path
    onnx_path = directory / "float.onnx"
    write_fp32_onnx(model, contract, onnx_path, request.uint8)
    if request.target == "openvino":
        convert_onnx(onnx_path, contract, path, request.target, request.uint8)
    return path


def write_int8(
    onnx_path: Path,
    contract: ModelContract,
    file: Path,
    request: ExportRequest,
    output: str,
    calibration: np.ndarray,  # images as the graph takes them
    is_within_tolerance: Callable[[], bool],
    progress: ProgressCallback | None,
) -> QuantisedGraph:
    """Write the file in int8, with as few layers in fp32 as the tolerance allows."""

    def write(proto: "ModelProto") -> None:
        int8_path = onnx_path.with_stem("int8")
        write_metadata(proto, contract, "uint8" if request.uint8 else "float")
        write_onnx(proto, int8_path)
        convert_onnx(int8_path, contract, file, request.target, request.uint8)

    def is_accepted(proto: "ModelProto") -> bool:
        write(proto)
        return is_within_tolerance()

    quantiser = Quantiser(onnx_path, calibration)
    sample = calibration[:SENSITIVITY_IMAGES]
    quantised = quantise_graph(quantiser, sample, output, is_accepted, progress, request.search_seconds)
    write(quantised.proto)
    return quantised


def other_sizes(model: Model, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return a smaller and a larger size, neither square, so that a graph that swaps the sides is detected."""
    stride = model.config.stride if model.config.has_tokens else RESNET_STRIDE
    h, w = (max(MIN_PATCHES, side // stride) for side in size)
    smaller = max(MIN_PATCHES, h // 2), max(MIN_PATCHES, 2 * w // 3)
    larger = h + max(1, h // 4), w + max(2, w // 3)
    return [(stride * h, stride * w) for h, w in (smaller, larger)]


def compare_at_sizes(
    model: Model, contract: ModelContract, first: Runtime, second: Runtime, progress: ProgressCallback | None
) -> tuple[SizeComparison, ...]:
    """Compare the model and the file on generated images of other sizes."""
    output, comparisons = output_kind(model), []
    sizes = other_sizes(model, contract.preprocessing.size)
    for number, size in enumerate(sizes, start=1):
        pixels = generate_images(contract.preprocessing.with_size(size), IMAGES_PER_SIZE)
        compared = compare_outputs(first(pixels), second(pixels), several=contract.several, what=output)
        comparisons.append(SizeComparison(size, compared))
        if progress:
            progress("comparing other sizes", number, len(sizes))
    return tuple(comparisons)
