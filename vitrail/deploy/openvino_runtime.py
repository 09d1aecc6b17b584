"""OpenVINO runs the model, and writes it."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.deploy.graph import INPUT
from vitrail.deploy.libraries import openvino
from vitrail.deploy.metadata import KEY, Input, to_json
from vitrail.deploy.onnx_runtime import check_inputs, check_outputs, described, line, taken, there
from vitrail.deploy.runtime import Contract, Gives, Runtime

if TYPE_CHECKING:
    from openvino import CompiledModel, Model

DEVICE = "CPU"


class OpenVINORuntime:
    """A compiled model with one request: for one thread at a time."""

    name = "openvino"

    def __init__(self, compiled: "CompiledModel", contract: Contract, input: Input, gives: Gives) -> None:
        self.compiled, self.gives = compiled, gives
        self.request = compiled.create_infer_request()
        self.output = compiled.output(gives)
        self.preprocessing = contract.preprocessing if input == "float" else None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, C, H, W] to float32: logits [B, K], or features [B, F]."""
        found = self.request.infer({INPUT: taken(pixels, self.preprocessing)}, share_inputs=True)
        return np.array(found[self.output])


@cache
def core() -> Any:
    """OpenVINO's one core, kept while the process lives.

    Its CPU plugin gives the thread that loads it a stack of its own for signals, and unmaps that stack with the last core.
    Were that to happen in another thread, the next signal the first one handles (Ctrl-C, an ended child) would end the process.
    """
    return openvino().Core()


def open_openvino(path: Path, gives: Gives = "logits", threads: int | None = None) -> tuple[Runtime, Contract]:
    """An OpenVINO model that vitrail exported, an .xml beside its .bin; any other is refused in one line."""
    reader = core()
    there(path)
    if not path.with_suffix(".bin").is_file():
        raise FileNotFoundError(f"{path.with_suffix('.bin')} is missing: the weights of {path.name} lie beside it")
    try:
        model = reader.read_model(str(path))
    except Exception as error:  # whatever a damaged file sets off
        raise ValueError(f"{path}: not an OpenVINO model, or a damaged one ({line(error)})") from None
    text = str(model.get_rt_info([KEY]).astype(str)) if model.has_rt_info([KEY]) else None
    contract, input = described(path, text)
    check_outputs(path, [name for output in model.outputs for name in sorted(output.names)], gives)
    check_inputs(path, [name for entry in model.inputs for name in sorted(entry.names)])
    try:
        compiled = reader.compile_model(model, DEVICE, settings(contract, threads))
    except Exception as error:  # a graph that can be read and not be run
        raise ValueError(f"{path}: OpenVINO cannot run it here ({line(error)})") from None
    return OpenVINORuntime(compiled, contract, input, gives), contract


def settings(contract: Contract, threads: int | None) -> dict[str, Any]:
    """One answer after the other as quickly as can be, in the precision that was promised: some processors would take less."""
    found: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if contract.precision == "bf16" else "f32",
    }
    if threads is None:
        return found
    # Not tied to a core: models of several lanes would all be tied to the first one.
    return found | {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}


def check_bf16() -> None:
    """Refuses bf16 where OpenVINO would compute in something else without a word."""
    can = list(core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))
    if "BF16" not in can:
        raise ValueError(
            f"bf16: OpenVINO computes in {', '.join(can)} on this processor, not in BF16; use --fp16 to halve the file"
        )


def from_onnx(path: Path) -> "Model":
    """An ONNX file as OpenVINO's model."""
    ov = openvino()
    try:
        return ov.convert_model(str(path))
    except Exception as error:  # it names what it cannot convert
        raise ValueError(f"OpenVINO cannot take this model ({line(error)}): export it --to onnx") from None


def write_openvino(model: "Model", contract: Contract, input: Input, path: Path) -> None:
    """The .xml and its .bin, with the contract inside."""
    ov = openvino()
    model.set_rt_info(to_json(contract, input), [KEY])
    ov.save_model(model, str(path), compress_to_fp16=contract.precision == "fp16")
