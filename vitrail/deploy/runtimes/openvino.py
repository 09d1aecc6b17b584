"""Run and write models with OpenVINO."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.deploy.export.graph import INPUT_NAME
from vitrail.deploy.runtimes.base import (
    METADATA_KEY,
    InputKind,
    ModelContract,
    OutputKind,
    Runtime,
    contract_to_json,
    import_openvino,
)
from vitrail.deploy.runtimes.onnx import (
    check_file_exists,
    check_inputs,
    check_outputs,
    first_error_line,
    prepare_input,
    read_contract,
)

if TYPE_CHECKING:
    from openvino import CompiledModel, Model

DEVICE = "CPU"


class OpenVINORuntime:
    """A compiled OpenVINO model with one inference request, for one thread at a time."""

    name = "openvino"

    def __init__(
        self, compiled: "CompiledModel", contract: ModelContract, input: InputKind, output_kind: OutputKind
    ) -> None:
        self.compiled, self.output_kind = compiled, output_kind
        self.request = compiled.create_infer_request()
        self.output = compiled.output(output_kind)
        self.preprocessing = contract.preprocessing if input == "float" else None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or features [B, F] of uint8 pixels [B, C, H, W]."""
        outputs = self.request.infer({INPUT_NAME: prepare_input(pixels, self.preprocessing)}, share_inputs=True)
        return np.array(outputs[self.output])


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core, one per process.

    Its CPU plugin gives the loading thread an alternate signal stack, and unmaps it with the last core. If another thread did
    that, the next signal in the first thread (Ctrl-C, an ended child) would crash the process. So the core is kept.
    """
    return import_openvino().Core()


def open_openvino(
    path: Path, output_kind: OutputKind = "logits", threads: int | None = None
) -> tuple[Runtime, ModelContract]:
    """Open an OpenVINO model exported by vitrail, an .xml and its .bin; raise ValueError for any other file."""
    reader = openvino_core()
    check_file_exists(path)
    if not path.with_suffix(".bin").is_file():
        raise FileNotFoundError(f"{path.with_suffix('.bin')} is missing: it holds the weights of {path.name}")
    try:
        model = reader.read_model(str(path))
    except Exception as error:
        raise ValueError(f"{path}: not an OpenVINO model, or damaged ({first_error_line(error)})") from None
    text = str(model.get_rt_info([METADATA_KEY]).astype(str)) if model.has_rt_info([METADATA_KEY]) else None
    contract, input = read_contract(path, text)
    check_outputs(path, [name for output in model.outputs for name in sorted(output.names)], output_kind)
    check_inputs(path, [name for entry in model.inputs for name in sorted(entry.names)])
    try:
        compiled = reader.compile_model(model, DEVICE, compile_settings(contract, threads))
    except Exception as error:
        raise ValueError(f"{path}: OpenVINO cannot run it here ({first_error_line(error)})") from None
    return OpenVINORuntime(compiled, contract, input, output_kind), contract


def compile_settings(contract: ModelContract, threads: int | None) -> dict[str, Any]:
    """Return settings for low latency in the contract's precision; some processors would use a lower one by default."""
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if contract.precision == "bf16" else "f32",
    }
    if threads is None:
        return settings
    # Without pinning: it would pin the models of all workers to the first core.
    return settings | {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}


def check_bf16_supported() -> None:
    """Raise ValueError where OpenVINO would silently compute in another precision than bf16."""
    supported = list(openvino_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))
    if "BF16" not in supported:
        raise ValueError(
            f"OpenVINO supports {', '.join(supported)} on this processor, not BF16: use --fp16 to halve the file"
        )


def read_onnx_model(path: Path) -> "Model":
    """Convert an ONNX file to an OpenVINO model."""
    ov = import_openvino()
    try:
        return ov.convert_model(str(path))
    except Exception as error:
        raise ValueError(
            f"OpenVINO cannot convert this model ({first_error_line(error)}): export it --to onnx"
        ) from None


def write_openvino(model: "Model", contract: ModelContract, input: InputKind, path: Path) -> None:
    """Write the .xml and its .bin, with the contract in the metadata."""
    ov = import_openvino()
    model.set_rt_info(contract_to_json(contract, input), [METADATA_KEY])
    ov.save_model(model, str(path), compress_to_fp16=contract.precision == "fp16")
