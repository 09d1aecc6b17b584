"""Run exported models with ONNX Runtime."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.graph import INPUT_NAME
from vitrail.deploy.runtimes.base import (
    METADATA_KEY,
    InputKind,
    ModelContract,
    OutputKind,
    Runtime,
    contract_from_json,
    import_onnxruntime,
)

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

NOT_FROM_VITRAIL = (
    "not exported by vitrail, so labels and preprocessing are unknown: run vitrail export on its checkpoint"
)


class ONNXRuntime:
    """An ONNX Runtime session. Several threads may call it at once."""

    name = "onnx"

    def __init__(
        self, session: "InferenceSession", contract: ModelContract, input: InputKind, output_kind: OutputKind
    ) -> None:
        self.session, self.output_kind = session, output_kind
        self.preprocessing = contract.preprocessing if input == "float" else None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or features [B, F] of uint8 pixels [B, C, H, W]."""
        outputs = self.session.run([self.output_kind], {INPUT_NAME: prepare_input(pixels, self.preprocessing)})[0]
        return np.asarray(outputs)


def prepare_input(pixels: np.ndarray, preprocessing: Preprocessing | None) -> np.ndarray:
    """Return the input of the graph: pixels normalised by `preprocessing`, or raw if that is None."""
    if preprocessing is None:
        return np.ascontiguousarray(pixels)
    return preprocessing.normalise(torch.from_numpy(np.ascontiguousarray(pixels))).numpy()


def open_onnx(
    path: Path, output_kind: OutputKind = "logits", threads: int | None = None
) -> tuple[Runtime, ModelContract]:
    """Open an ONNX file exported by vitrail; raise ValueError for any other file."""
    library = import_onnxruntime()
    check_file_exists(path)
    options = library.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # damaged files raise many types without a common base
        raise ValueError(f"{path}: not an ONNX model, or damaged ({first_error_line(error)})") from None
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    contract, input = read_contract(path, text)
    check_outputs(path, [output.name for output in session.get_outputs()], output_kind)
    check_inputs(path, [entry.name for entry in session.get_inputs()])
    return ONNXRuntime(session, contract, input, output_kind), contract


def check_file_exists(path: Path) -> None:
    """Raise FileNotFoundError if there is no such file."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")


def read_contract(path: Path, text: str | None) -> tuple[ModelContract, InputKind]:
    """Return the contract and the input kind from a file's metadata."""
    if not text:
        raise ValueError(f"{path}: {NOT_FROM_VITRAIL}")
    try:
        return contract_from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_outputs(path: Path, names: list[str], output_kind: OutputKind) -> None:
    """Raise ValueError if the graph lacks the wanted output."""
    if output_kind in names:
        return
    if output_kind == "logits" and "features" in names:
        raise ValueError(f"{path} has no classifier: its only output is features")
    raise ValueError(f"{path} has the outputs {', '.join(names)}, not {output_kind}: export the model again")


def check_inputs(path: Path, names: list[str]) -> None:
    """Raise ValueError unless pixels are the only input of the graph."""
    if names != [INPUT_NAME]:
        raise ValueError(f"{path} has the inputs {', '.join(names)}, expected {INPUT_NAME}: export the model again")


def first_error_line(error: Exception) -> str:
    """Return the first informative line of a library's error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith("Exception from")]
    return (informative or lines or [type(error).__name__])[0][:200]
