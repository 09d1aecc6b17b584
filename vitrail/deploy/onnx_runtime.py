"""ONNX Runtime runs the model."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.graph import INPUT
from vitrail.deploy.libraries import onnxruntime
from vitrail.deploy.metadata import KEY, Input, from_json
from vitrail.deploy.runtime import Contract, Gives, Runtime

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FOREIGN = (
    "it was not exported by vitrail: it does not say which labels it has and how pictures are prepared for it; "
    "export the checkpoint it was made from with vitrail export"
)


class ONNXRuntime:
    """A session, which any number of threads may use."""

    name = "onnx"

    def __init__(self, session: "InferenceSession", contract: Contract, input: Input, gives: Gives) -> None:
        self.session, self.gives = session, gives
        self.preprocessing = contract.preprocessing if input == "float" else None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, C, H, W] to float32: logits [B, K], or features [B, F]."""
        found = self.session.run([self.gives], {INPUT: taken(pixels, self.preprocessing)})[0]
        return np.asarray(found)


def taken(pixels: np.ndarray, preprocessing: Preprocessing | None) -> np.ndarray:
    """What the graph takes: bytes, or normalised beforehand."""
    if preprocessing is None:
        return np.ascontiguousarray(pixels)
    return preprocessing.normalise(torch.from_numpy(np.ascontiguousarray(pixels))).numpy()


def open_onnx(path: Path, gives: Gives = "logits", threads: int | None = None) -> tuple[Runtime, Contract]:
    """An ONNX file that vitrail exported; any other is refused in one line."""
    library = onnxruntime()
    there(path)
    options = library.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever a damaged file sets off: its kinds have no common name
        raise ValueError(f"{path}: not an ONNX model, or a damaged one ({line(error)})") from None
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    contract, input = described(path, text)
    check_outputs(path, [output.name for output in session.get_outputs()], gives)
    check_inputs(path, [entry.name for entry in session.get_inputs()])
    return ONNXRuntime(session, contract, input, gives), contract


def there(path: Path) -> None:
    """Refuses what is no file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")


def described(path: Path, text: str | None) -> tuple[Contract, Input]:
    """The contract in a file's metadata."""
    if not text:
        raise ValueError(f"{path}: {FOREIGN}")
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_outputs(path: Path, names: list[str], gives: Gives) -> None:
    """Refuses what the graph does not give."""
    if gives in names:
        return
    if gives == "logits" and "features" in names:
        raise ValueError(f"{path} has no classes: it gives features")
    raise ValueError(f"{path}: its graph gives {', '.join(names)} and no {gives}: export the model anew")


def check_inputs(path: Path, names: list[str]) -> None:
    """Refuses a graph that takes anything but pixels."""
    if names != [INPUT]:
        raise ValueError(f"{path}: its graph takes {', '.join(names)} and not {INPUT} alone: export the model anew")


def line(error: Exception) -> str:
    """The first line of what a library says that says anything."""
    lines = [each.strip() for each in str(error).splitlines() if each.strip()]
    telling = [each for each in lines if not each.startswith("Exception from")]
    return (telling or lines or [type(error).__name__])[0][:200]
