"""Write a model to a file for ONNX Runtime, OpenVINO or PyTorch. `verify.py` compares the file with the model."""

import tempfile
from dataclasses import replace
from pathlib import Path

from vitrail.deploy import RUNTIME_SUFFIXES, SUFFIXES
from vitrail.deploy.export.graph import ExportGraph, store_half, to_onnx, write_metadata, write_onnx
from vitrail.deploy.export.torch_program import load_program, write_program
from vitrail.deploy.runtimes import exported
from vitrail.deploy.runtimes.base import InputKind, ModelContract, OutputKind
from vitrail.models.base import Model
from vitrail.utils.files import stage_output
from vitrail.utils.precision import FLOAT_PRECISIONS, check_precision, torch_dtype


def export(
    model: Model,
    contract: ModelContract,
    path: Path,
    *,
    target: str,
    uint8: bool = False,
    dynamic_size: bool = False,
    merge: int = 0,
    precision: str = "fp32",
) -> ModelContract:
    """Write the model for a runtime atomically, and return the contract stored in the file."""
    check_export(path, target, precision, merge, dynamic_size)
    contract = replace(contract, merge=merge, precision=precision, any_size=dynamic_size)
    with stage_output(path, estimate_bytes(model, precision)) as staged:
        write_model(model, contract, staged, target, uint8)
    return contract


def check_export(path: Path, target: str, precision: str, merge: int, dynamic_size: bool) -> None:
    """Raise ValueError for unsupported options, before anything is computed."""
    if target not in SUFFIXES:
        raise ValueError(f"unknown runtime {target!r}: use {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give a file name")
    if path.suffix != SUFFIXES[target]:
        raise ValueError(f"{path}: the suffix of a file for {target} must be {SUFFIXES[target]}")
    check_precision(precision, FLOAT_PRECISIONS)
    if merge and dynamic_size:
        raise ValueError("--merge and --dynamic-size exclude each other: merging needs a fixed number of tokens")
    if target == "openvino":
        exported.import_openvino()
        if precision == "bf16":
            exported.check_bf16_supported()


def write_model(model: Model, contract: ModelContract, path: Path, target: str, uint8: bool) -> None:
    """Write the file described by the contract."""
    if target == "torch":
        whole = model.for_tracing(contract.any_size)
        graph = ExportGraph(whole, contract.preprocessing, uint8, contract.merge, torch_dtype(contract.precision))
        write_program(graph, contract, path)
        return
    with tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
        onnx_path = Path(directory) / "float.onnx"
        write_fp32_onnx(model, contract, onnx_path, uint8)
        convert_onnx(onnx_path, contract, path, target, uint8)


def write_fp32_onnx(model: Model, contract: ModelContract, path: Path, uint8: bool) -> None:
    """Write the fp32 ONNX file from which the other files are made."""
    contract = replace(contract, precision="fp32")
    fixed = model.with_constants(contract.any_size, contract.preprocessing.shape[1:])
    write_onnx(to_onnx(ExportGraph(fixed, contract.preprocessing, uint8, contract.merge), contract), path)


def convert_onnx(onnx_path: Path, contract: ModelContract, path: Path, target: str, uint8: bool) -> None:
    """Convert an fp32 ONNX file to the contract's precision and runtime."""
    input: InputKind = "uint8" if uint8 else "float"
    if target == "openvino":
        exported.convert_to_openvino(onnx_path, contract, input, path)
        return
    import onnx

    proto = onnx.load_model(onnx_path)
    if contract.precision in ("bf16", "fp16"):
        proto = store_half(proto, contract.precision)
    write_metadata(proto, contract, input)
    write_onnx(proto, path)


def open_own_file(path: Path, output_kind: OutputKind = "logits", threads: int | None = None) -> exported.Opened:
    """Open a file just written by this process: a PyTorch program is executed, not rebuilt from its weights."""
    if RUNTIME_SUFFIXES[path.suffix] == "torch":
        return load_program(path, output_kind)
    return exported.open_exported_file(path, output_kind, threads)


def estimate_bytes(model: Model, precision: str) -> int:
    """Return the least size of an exported file."""
    bits = {"fp32": 32, "int8": 8}.get(precision, 16)
    return sum(parameter.numel() for parameter in model.parameters()) * bits // 8
