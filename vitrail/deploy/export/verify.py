"""Export a model and verify the file: it replaces the target only if its outputs match the model's."""

import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.deploy.export import comparison, export, quantise
from vitrail.deploy.export.comparison import VerificationImages, VerificationReport, compare_outputs
from vitrail.deploy.export.graph import ExportGraph, name_outputs, write_metadata, write_onnx
from vitrail.deploy.export.torch_program import run_with_torch
from vitrail.deploy.runtimes.base import ModelContract, OutputKind, Runtime
from vitrail.deploy.runtimes.exported import open_exported_file, prepare_input
from vitrail.deploy.runtimes.int8 import record_export
from vitrail.inference import TorchRuntime, run_pixels
from vitrail.models.base import Model
from vitrail.tasks.comparison import OutputComparison, compare_features
from vitrail.utils.files import stage_output
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
    search_seconds: float = quantise.SENSITIVITY_SECONDS  # limit for measuring the sensitivity of layers to int8
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
    calibration: np.ndarray | None = None,  # uint8 images for int8
    bytes_before: int = 0,
    progress: ProgressCallback | None = None,
) -> VerificationReport:
    """Write the file and return the report; raise `VerificationError` if it fails."""
    if request.uint8 and contract.media == "sound":
        raise ValueError("uint8=True is for pixels, and this model takes log-mel spectrograms: leave it out")
    int8, limits = request.precision == "int8", comparison.tolerances_for(request.precision, request.tolerance)
    export.check_export(
        path, request.target, "fp32" if int8 else request.precision, request.merge, request.dynamic_size
    )
    if int8 and request.target == "torch":
        raise ValueError("int8 needs ONNX Runtime or OpenVINO: use --to onnx or --to openvino")
    if int8 and calibration is None:
        raise ValueError("int8 needs calibration images: give --calibrate")
    contract = replace(contract, merge=request.merge, precision=request.precision, any_size=request.dynamic_size)
    verified = VerifiedExport(model, contract, request, images, limits, progress)
    nbytes = export.estimate_bytes(model, request.precision)
    with stage_output(path, nbytes) as staged, tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
        float_file = None if request.precision == "fp32" else verified.write_float_file(Path(directory))
        quantised = None
        if int8 and calibration is not None:
            quantised = verified.write_int8(Path(directory) / "float.onnx", staged, calibration)
        else:
            export.write_model(model, contract, staged, request.target, request.uint8)
        compared = verified.compare_file(staged)
        runtimes = {MODEL_NAME: verified.original, FILE_NAME: verified.open_file(staged)}
        if float_file is not None:
            runtimes[FLOAT_FILE_NAME] = verified.open_file(float_file)
        report = VerificationReport(
            str(path),
            request.target,
            request.precision,
            len(images.pixels),
            images.source,
            compared,
            verified.compare_features(staged) if verified.has_features else None,
            sum(file.stat().st_size for file in staged.parent.iterdir()),
            bytes_before,
            comparison.measure_speeds(runtimes, images.pixels, request.timing_seconds, verified.batch_size),
            (*limits.find_violations(compared), *verified.reopen(staged)),
            verified.compare_unmerged() if request.merge else None,
            verified.compare_at_sizes(runtimes[FILE_NAME]) if request.dynamic_size else (),
            quantised.float_layers if quantised else (),
            quantised.notes if quantised else (),
            verified.batch_size,
            contract.media,
        )
        report = complete_report(report, quantised, limits)
        if not report.passed and not request.force:
            raise VerificationError(report)
    if int8 and report.passed:
        record_export(path, contract, *compared.measure_loss(), len(images.pixels))
    return report


def complete_report(
    report: VerificationReport, quantised: quantise.QuantisedGraph | None, limits: comparison.Tolerances
) -> VerificationReport:
    """Return the report with notes for the user and the violations of features and other sizes."""
    notes, refusals = list(report.notes), list(report.refusals)
    if quantised is not None:
        notes.append(f"{quantised.n_layers - len(quantised.float_layers)} of {quantised.n_layers} layers use int8")
    if report.precision != "fp32":
        slow = comparison.describe_missing_speedup(report.speeds, FILE_NAME, FLOAT_FILE_NAME, report.precision)
        notes += [slow] if slow else []
    else:  # the images below are too few to estimate how many predictions change in lower precision
        refusals += limits.find_violations(report.features) if report.features is not None else []
        for other in report.at_sizes:
            reasons = limits.find_violations(other.compared)
            refusals += [f"at {other.size[0]}×{other.size[1]} {reason}" for reason in reasons]
    return replace(report, refusals=tuple(refusals), notes=tuple(notes))


@dataclass(frozen=True)
class VerifiedExport:
    """An export, and the images on which its file is compared with the model."""

    model: Model
    contract: ModelContract
    request: ExportRequest
    images: VerificationImages
    limits: comparison.Tolerances
    progress: ProgressCallback | None

    @property
    def output(self) -> OutputKind:
        """Return the first output of the exported file."""
        return "features" if self.model.config.classes is None else "logits"

    @property
    def has_features(self) -> bool:
        """Return whether the file has features beside its logits."""
        return self.output == "logits" and "features" in name_outputs(self.model.config)

    @property
    def batch_size(self) -> int:
        return comparison.choose_batch_size(self.contract)

    @cached_property
    def original(self) -> Runtime:
        """Return the PyTorch runtime of the model, with merged tokens if requested."""
        merged = self.model.merge_tokens(self.contract.merge) if self.contract.merge else self.model
        return TorchRuntime(merged, self.contract.preprocessing)

    @cached_property
    def expected(self) -> Any:
        """Return what is kept of the outputs of the model."""
        return self.run(self.original, "running the model")

    def run(self, runtime: Runtime, stage: str) -> Any:
        """Return what is kept of the outputs for all images."""
        task, parts = self.contract.task, list[Any]()

        def keep(pixels: np.ndarray) -> np.ndarray:
            parts.append(task.keep_outputs(runtime(pixels)))
            return pixels.reshape(len(pixels), -1)[:, 0]  # the outputs are in the list

        run_pixels(keep, self.images.pixels, self.batch_size, self.progress, stage)
        return task.join_outputs(parts)

    def open_file(self, file: Path, output: OutputKind | None = None) -> Runtime:
        return export.open_own_file(file, output or self.output, self.request.threads)[0]

    def compare(self, first: Any, second: Any) -> OutputComparison:
        return compare_outputs(self.contract, self.output, first, second, self.images.targets)

    def compare_file(self, file: Path) -> OutputComparison:
        """Compare the model and a file."""
        return self.compare(self.expected, self.run(self.open_file(file), "running the file"))

    def reopen(self, file: Path) -> list[str]:
        """Open the file as its users will, and return how its outputs differ; a PyTorch program is rebuilt then."""
        if self.request.target != "torch":
            return []  # opened as such before
        try:
            outputs = self.run(open_exported_file(file, self.output, self.request.threads)[0], "opening the file again")
        except ValueError as error:
            return [f"it cannot be opened again ({error})"]
        return [
            f"opened again: {reason}" for reason in self.limits.find_violations(self.compare(self.expected, outputs))
        ]

    def compare_unmerged(self) -> OutputComparison:
        """Compare the model without and with token merging."""
        unmerged = TorchRuntime(self.model, self.contract.preprocessing)
        return self.compare(self.run(unmerged, "running the unmerged model"), self.expected)

    def compare_features(self, file: Path) -> OutputComparison:
        """Compare the features, the second output of the file, on a few images."""
        pixels, preprocessing = self.images.pixels[: self.batch_size], self.contract.preprocessing
        graph = ExportGraph(self.model, preprocessing, False, self.contract.merge)
        expected = run_with_torch(graph, graph.output_names, preprocessing, "features")(pixels)
        return compare_features(expected, self.open_file(file, "features")(pixels))

    def compare_at_sizes(self, runtime: Runtime) -> tuple[comparison.SizeComparison, ...]:
        """Compare the model and the file on generated images of other sizes."""
        comparisons, sizes = [], other_sizes(self.model, self.contract.preprocessing.size)
        for number, size in enumerate(sizes, start=1):
            pixels = comparison.generate_images(self.contract.preprocessing.with_size(size), IMAGES_PER_SIZE)
            first, second = (self.contract.task.keep_outputs(run(pixels)) for run in (self.original, runtime))
            compared = compare_outputs(self.contract, self.output, first, second)
            comparisons.append(comparison.SizeComparison(size, compared))
            if self.progress:
                self.progress("comparing other sizes", number, len(sizes))
        return tuple(comparisons)

    def write_float_file(self, directory: Path) -> Path:
        """Write the same file in fp32 for the comparison of speed; for int8 it is made from float.onnx beside it."""
        target, uint8 = self.request.target, self.request.uint8
        contract, path = replace(self.contract, precision="fp32"), directory / f"float{export.SUFFIXES[target]}"
        if target == "torch":
            export.write_model(self.model, contract, path, target, uint8)
            return path
        export.write_fp32_onnx(self.model, contract, directory / "float.onnx", uint8)
        if target == "openvino":
            export.convert_onnx(directory / "float.onnx", contract, path, target, uint8)
        return path

    def write_int8(self, onnx_path: Path, file: Path, calibration: np.ndarray) -> quantise.QuantisedGraph:
        """Write the file in int8, with as few layers in fp32 as the tolerance allows."""
        uint8, int8_path = self.request.uint8, onnx_path.with_stem("int8")

        def write(proto: "ModelProto") -> None:
            write_metadata(proto, self.contract, "uint8" if uint8 else "float")
            write_onnx(proto, int8_path)
            export.convert_onnx(int8_path, self.contract, file, self.request.target, uint8)

        def is_accepted(proto: "ModelProto") -> bool:
            write(proto)
            return not self.limits.find_violations(self.compare_file(file))

        inputs = prepare_input(calibration, None if uint8 else self.contract.preprocessing)
        sampled = min(quantise.SENSITIVITY_IMAGES, self.batch_size)  # whose outputs are kept in memory
        quantiser, sample = quantise.Quantiser(onnx_path, inputs), inputs[:sampled]
        limit = self.request.search_seconds
        quantised = quantise.quantise_graph(quantiser, sample, self.output, is_accepted, self.progress, limit)
        write(quantised.proto)
        return quantised


def other_sizes(model: Model, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return a smaller and a larger size, neither square, so that a graph that swaps the sides is detected."""
    stride = model.config.stride if model.config.has_tokens else RESNET_STRIDE
    h, w = (max(MIN_PATCHES, side // stride) for side in size)
    smaller = max(MIN_PATCHES, h // 2), max(MIN_PATCHES, 2 * w // 3)
    larger = h + max(1, h // 4), w + max(2, w // 3)
    return [(stride * h, stride * w) for h, w in (smaller, larger)]
