"""Open exported files with ONNX Runtime, OpenVINO or PyTorch, by their suffix."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy import RUNTIME_SUFFIXES
from vitrail.deploy.runtimes import base
from vitrail.deploy.runtimes.base import BATCH_SECONDS, METADATA_KEY, InputKind, ModelContract, OutputKind, Runtime
from vitrail.utils.files import check_free_space

if TYPE_CHECKING:
    from openvino import Model

INPUT_NAME = "pixels"  # of every exported graph
DEVICE = "CPU"
NOT_FROM_VITRAIL = (
    "not exported by vitrail, so labels and preprocessing are unknown: run vitrail export on its checkpoint"
)
Opened = tuple[Runtime, ModelContract]


@dataclass
class GraphRuntime:
    """An exported graph, run by its library. Several threads may call it at once, except with OpenVINO."""

    name: str
    file: Path
    run: Callable[[np.ndarray], np.ndarray]  # of the graph's input to the wanted output
    preprocessing: Preprocessing | None  # that normalises the input; None if the graph takes uint8 pixels
    precision: str = "fp32"  # of the computation

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or features [B, F] of uint8 pixels [B, C, H, W]."""
        array = prepare_input(pixels, self.preprocessing)
        try:
            return self.run(array)
        except TimeoutError as error:
            limit = f"{error.args[0]:g} s"
            raise ValueError(f"{self.file}: a batch took longer than {limit}: raise batch_timeout=") from None
        except Exception as error:  # libraries raise many types without a common base
            raise ValueError(f"{self.file}: {self.name} failed while running it ({first_error_line(error)})") from error


def prepare_input(pixels: np.ndarray, preprocessing: Preprocessing | None) -> np.ndarray:
    """Return the input of the graph: pixels normalised by `preprocessing`, or raw if that is None."""
    pixels = np.ascontiguousarray(pixels)
    return pixels if preprocessing is None else preprocessing.normalise(torch.from_numpy(pixels)).numpy()


def is_exported(where: str | Path) -> bool:
    """Return True if the name is that of an exported file."""
    return Path(where).suffix.lower() in RUNTIME_SUFFIXES and not str(where).startswith("hf://")


def open_exported_file(
    path: Path,
    output_kind: OutputKind = "logits",
    threads: int | None = None,
    timeout: float = BATCH_SECONDS,
    precision: str | None = None,
) -> Opened:
    """Return the runtime of an exported file and its contract; raise ValueError for a file not exported by vitrail.

    OpenVINO computes an fp32 file in bf16 if that is the `precision`. A batch may take `timeout` seconds. A PyTorch program has
    no limit: it is rebuilt from its weights, nothing in it is run.
    """
    match RUNTIME_SUFFIXES[path.suffix.lower()]:
        case "onnx":
            return open_onnx(path, output_kind, threads, timeout)
        case "openvino":
            return open_openvino(path, output_kind, threads, timeout, precision)
        case _:
            from vitrail.deploy.export.torch_program import open_program

            return open_program(path, output_kind, threads)


def read_exported_contract(path: Path) -> ModelContract:
    """Return the contract of an exported file without preparing its graph to run."""
    match RUNTIME_SUFFIXES[path.suffix.lower()]:
        case "onnx":
            return read_contract(path, read_onnx_metadata(start_onnx(path, optimise=False)))[0]
        case "openvino":
            return read_contract(path, read_openvino_metadata(read_openvino(path)))[0]
        case _:
            from vitrail.deploy.export.torch_program import read_program

            return read_program(path, weights=False)[0]


def open_onnx(
    path: Path, output_kind: OutputKind = "logits", threads: int | None = None, timeout: float = BATCH_SECONDS
) -> Opened:
    """Open an ONNX file with ONNX Runtime."""
    session = start_onnx(path, threads)
    contract, preprocessing = read_contract(path, read_onnx_metadata(session))
    inputs, outputs = ([entry.name for entry in part] for part in (session.get_inputs(), session.get_outputs()))
    check_graph(path, inputs, outputs, output_kind)

    def run(array: np.ndarray) -> np.ndarray:
        options = import_onnxruntime().RunOptions()
        timer = threading.Timer(timeout, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            return np.asarray(session.run([output_kind], {INPUT_NAME: array}, options)[0])
        except Exception:
            if options.terminate:
                raise TimeoutError(timeout) from None
            raise
        finally:
            timer.cancel()

    return GraphRuntime("onnx", path, run, preprocessing, contract.precision), contract


def start_onnx(path: Path, threads: int | None = None, optimise: bool = True) -> Any:
    """Return an ONNX Runtime session of a file; raise ValueError if it is damaged."""
    import_onnxruntime()  # if it is missing, the file is not to blame
    check_file_exists(path)
    try:
        return start_session(str(path), threads, optimise)
    except Exception as error:  # damaged files raise many types without a common base
        raise ValueError(f"{path}: not an ONNX model, or damaged ({first_error_line(error)})") from None


def read_onnx_metadata(session: Any) -> str | None:
    return session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)


def start_session(model: str | bytes, threads: int | None = None, optimise: bool = True) -> Any:
    """Return an ONNX Runtime session of a file or of a serialised graph."""
    library = import_onnxruntime()
    options = library.SessionOptions()
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    return library.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_openvino(
    path: Path,
    output_kind: OutputKind = "logits",
    threads: int | None = None,
    timeout: float = BATCH_SECONDS,
    precision: str | None = None,  # of the computation; None for that of the file
) -> Opened:
    """Open an OpenVINO model, an .xml and its .bin."""
    model = read_openvino(path)
    contract, preprocessing = read_contract(path, read_openvino_metadata(model))
    inputs, outputs = ([name for port in part for name in sorted(port.names)] for part in (model.inputs, model.outputs))
    check_graph(path, inputs, outputs, output_kind)
    precision = precision or runnable_precision(contract.precision)
    try:
        compiled = openvino_core().compile_model(model, DEVICE, compile_settings(precision, threads))
    except Exception as error:
        raise ValueError(f"{path}: OpenVINO cannot run it here ({first_error_line(error)})") from None
    request, output = compiled.create_infer_request(), compiled.output(output_kind)

    def run(array: np.ndarray) -> np.ndarray:
        request.start_async({INPUT_NAME: array}, share_inputs=True)
        if not request.wait_for(round(1000 * timeout)):
            request.cancel()
            raise TimeoutError(timeout)
        return np.array(request.results[output])

    return GraphRuntime("openvino", path, run, preprocessing, precision), contract


def read_openvino(path: Path) -> Any:
    """Return the model of an .xml and its .bin; raise ValueError if they are damaged."""
    reader = openvino_core()
    check_file_exists(path)
    if not path.with_suffix(".bin").is_file():
        raise FileNotFoundError(f"{path.with_suffix('.bin')} is missing: it holds the weights of {path.name}")
    try:
        return reader.read_model(str(path))
    except Exception as error:
        raise ValueError(f"{path}: not an OpenVINO model, or damaged ({first_error_line(error)})") from None


def read_openvino_metadata(model: Any) -> str | None:
    return str(model.get_rt_info([METADATA_KEY]).astype(str)) if model.has_rt_info([METADATA_KEY]) else None


def compile_settings(precision: str, threads: int | None) -> dict[str, Any]:
    """Return settings for low latency in this precision; some processors would use a lower one by default."""
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32"}
    if threads is None:
        return settings
    # Without pinning: it would pin the models of all workers to the first core.
    return settings | {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}


def check_file_exists(path: Path) -> None:
    """Raise FileNotFoundError if there is no such file."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")


def read_contract(path: Path, text: str | None) -> tuple[ModelContract, Preprocessing | None]:
    """Return the contract in a file's metadata, and the preprocessing that normalises its input; None for uint8."""
    if not text:
        raise ValueError(f"{path}: {NOT_FROM_VITRAIL}")
    try:
        contract, input = base.contract_from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return contract, contract.preprocessing if input == "float" else None


def check_graph(path: Path, inputs: list[str], outputs: list[str], output_kind: OutputKind) -> None:
    """Raise ValueError if the graph lacks the wanted output, or if pixels are not its only input."""
    if output_kind not in outputs:
        if output_kind == "logits" and "features" in outputs:
            raise ValueError(f"{path} has no classifier: its only output is features")
        raise ValueError(f"{path} has the outputs {', '.join(outputs)}, not {output_kind}: export the model again")
    if inputs != [INPUT_NAME]:
        raise ValueError(f"{path} has the inputs {', '.join(inputs)}, expected {INPUT_NAME}: export the model again")


def first_error_line(error: Exception) -> str:
    """Return the first informative line of a library's error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith("Exception from")]
    return (informative or lines or [type(error).__name__])[0][:200]


def import_onnxruntime() -> Any:
    """Return ONNX Runtime, with its telemetry off unless the user set ORT_DISABLE_TELEMETRY."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        raise ValueError("ONNX Runtime is not installed: pip install 'vitrail[onnx]'") from None
    return onnxruntime


def import_openvino() -> Any:
    """Return OpenVINO. Its telemetry, which sends data on import, is hidden from it; it works without."""
    telemetry = "openvino_telemetry"
    hide = "openvino" not in sys.modules and telemetry not in sys.modules
    if hide:
        sys.modules[telemetry] = None  # type: ignore[assignment]
    try:
        import openvino
    except ImportError:
        raise ValueError("OpenVINO is not installed: pip install 'vitrail[openvino]'") from None
    finally:
        if hide:
            del sys.modules[telemetry]
    return openvino


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core, one per process.

    Its CPU plugin gives the loading thread an alternate signal stack, and unmaps it with the last core. If another thread did
    that, the next signal in the first thread (Ctrl-C, an ended child) would crash the process. So the core is kept.
    """
    return import_openvino().Core()


def openvino_precisions() -> list[str]:
    """Return the names of what OpenVINO computes natively on this processor, such as FP32, BF16 and INT8."""
    return list(openvino_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def runnable_precision(precision: str) -> str:
    """Return the precision in which OpenVINO computes a file here: fp32 in place of bf16 without native products."""
    return "fp32" if precision == "bf16" and "BF16" not in openvino_precisions() else precision


def check_bf16_supported() -> None:
    """Raise ValueError where OpenVINO would silently compute in another precision than bf16."""
    supported = openvino_precisions()
    if "BF16" not in supported:
        raise ValueError(
            f"OpenVINO supports {', '.join(supported)} on this processor, not BF16: use --fp16 to halve the file"
        )


def convert_to_openvino(onnx_path: Path, contract: ModelContract, input: InputKind, path: Path) -> None:
    """Convert an ONNX file to an .xml and its .bin, with the contract in the metadata."""
    library = import_openvino()
    try:
        model: Model = library.convert_model(str(onnx_path))
    except Exception as error:
        raise ValueError(
            f"OpenVINO cannot convert this model ({first_error_line(error)}): export it --to onnx"
        ) from None
    model.set_rt_info(base.contract_to_json(contract, input), [METADATA_KEY])
    try:
        library.save_model(model, str(path), compress_to_fp16=contract.precision == "fp16")
    except RuntimeError as error:  # OpenVINO's error for a write that failed, also on a full disk
        check_free_space(path, onnx_path.stat().st_size)
        raise OSError(f"OpenVINO cannot write {path.name} ({first_error_line(error)})") from None
