"""Precision in which an exported file computes: bf16 if the processor multiplies it, it is faster, and the outputs agree."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.deploy.export.comparison import VerificationImages, VerificationReport, tolerances_for
from vitrail.deploy.export.export import check_export, write_model
from vitrail.deploy.export.verify import ExportRequest, VerifiedExport, export_and_verify
from vitrail.deploy.runtimes import exported
from vitrail.deploy.runtimes.base import ModelContract, Runtime
from vitrail.deploy.runtimes.precision import measure_runtimes
from vitrail.models.base import Model
from vitrail.utils.devices import processor_name
from vitrail.utils.precision import PrecisionChoice, multiplies_bf16


def export_in_fastest_precision(
    model: Model, contract: ModelContract, path: Path, request: ExportRequest, images: VerificationImages, **more: Any
) -> VerificationReport:
    """Write a file that computes in bf16 if that pays, else in fp32, and return the report with a note on the choice.

    The tolerance of the request is that of bf16, in points; in fp32 logits have the default limit.
    """
    check_computed_precision(request.target, "auto")
    fp32 = replace(request, precision="fp32", tolerance=None)
    check_export(path, fp32.target, fp32.precision, fp32.merge, fp32.dynamic_size)
    limits = tolerances_for("bf16", request.tolerance)
    trial = replace(contract, merge=request.merge, any_size=request.dynamic_size)
    verified = VerifiedExport(model, trial, fp32, images, limits, more.get("progress"))
    with tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
        choice = choose_precision(verified, Path(directory))
    chosen = replace(request, precision="bf16") if choice.precision == "bf16" else fp32
    report = export_and_verify(model, contract, path, chosen, images, **more)
    return replace(report, notes=(str(choice), *report.notes))


def check_computed_precision(target: str, precision: str) -> None:
    """Raise ValueError for a runtime whose precision cannot be chosen."""
    if target == "onnx" and precision != "fp32":
        message = f"--precision {precision} is for .xml and .pt2: ONNX Runtime computes in fp32 on CPUs"
        raise ValueError(f"{message} (--bf16 and --fp16 halve the file)")


def computes_bf16(target: str) -> bool:
    """Return whether a runtime computes bf16 natively on this processor."""
    return "BF16" in exported.openvino_precisions() if target == "openvino" else multiplies_bf16(torch.device("cpu"))


def choose_precision(verified: VerifiedExport, directory: Path) -> PrecisionChoice:
    """Return bf16 if it is native, measured to be faster, and its outputs are within the limits; else fp32; and why.

    `verified` is the export in fp32 with the limits of bf16; `directory` receives the files that are measured.
    """
    if not computes_bf16(verified.request.target):
        return PrecisionChoice("fp32", f"{processor_name()} does not multiply bf16 natively")
    runtimes = open_candidates(verified, directory)
    choice = measure_runtimes(runtimes, verified.contract)
    if choice.precision == "fp32":
        return choice
    compared = verified.compare(verified.expected, verified.run(runtimes["bf16"], "running the file in bf16"))
    checked = f"on {len(verified.images.pixels)} images"
    if violations := verified.limits.find_violations(compared):
        return PrecisionChoice("fp32", f"bf16 refused {checked}: {violations[0]}")
    return PrecisionChoice("bf16", f"{choice.why}; {compared.describe()} {checked}")


def open_candidates(verified: VerifiedExport, directory: Path) -> dict[str, Runtime]:
    """Return the runtimes of the file in fp32 and in bf16: of one file for OpenVINO, which computes it in either, else of two."""
    request, file = verified.request, verified.write_float_file(directory)
    files = {"fp32": file, "bf16": file}
    if request.target == "torch":
        files["bf16"] = file.with_stem("bf16")
        lower = replace(verified.contract, precision="bf16")
        write_model(verified.model, lower, files["bf16"], request.target, request.uint8)
    opened = {
        name: exported.open_exported_file(path, verified.output, request.threads, precision=name)
        for name, path in files.items()
    }
    return {name: runtime for name, (runtime, _) in opened.items()}
