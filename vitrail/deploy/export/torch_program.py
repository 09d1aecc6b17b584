"""Write and open PyTorch's exported programs (`.pt2`), without executing the content of a file.

`torch.export.load` unpickles data and evaluates expressions from the file, so an untrusted file could run code. The file is a
zip archive of raw weights with a JSON table. Only these are read, and the model is rebuilt from the configuration in the
metadata. Only a file just written by this process is loaded as a program.
"""

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import CheckpointContract as Stored
from vitrail.checkpoints.load import assemble_model
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.graph import ExportGraph, name_outputs, silence_exporter, trace_graph
from vitrail.deploy.runtimes import exported
from vitrail.deploy.runtimes.base import METADATA_KEY, ModelContract, OutputKind, contract_to_json
from vitrail.deploy.runtimes.exported import GraphRuntime, Opened, read_contract
from vitrail.models.registry import config_from_json
from vitrail.utils.precision import FLOAT_PRECISIONS, torch_dtype

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
DTYPE_CODES = {5: torch.int64, 7: torch.float32, 6: torch.float16, 13: torch.bfloat16}  # PyTorch's, in the table
ARCHIVE_ERRORS = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError)  # RuntimeError: encrypted
NOT_A_PROGRAM = "not an exported PyTorch program, or damaged"
MAX_TEXT_BYTES = 2**26  # of a JSON member


def run_with_torch(
    call: Any,
    names: tuple[str, ...],
    preprocessing: Preprocessing | None,
    output_kind: OutputKind,
    file: Path = Path(),
    precision: str = "fp32",
) -> GraphRuntime:
    """Return the runtime of an export graph, or of the program exported from it, with these outputs."""
    index = names.index(output_kind)

    @torch.inference_mode()
    def run(array: np.ndarray) -> np.ndarray:
        return call(torch.from_numpy(array))[index].numpy()

    return GraphRuntime("torch", file, run, preprocessing, precision)


def write_program(graph: ExportGraph, contract: ModelContract, path: Path) -> None:
    """Write the program with its contract, without a pickle (example inputs) and without paths of this machine."""
    program = trace_graph(graph, contract)
    program._example_inputs = None
    remove_stack_traces(program)
    metadata = contract_to_json(contract, "uint8" if graph.uint8 else "float")
    whole = io.BytesIO()  # PyTorch aborts the process if the disk fills while it writes
    with silence_exporter():
        torch.export.save(program, whole, extra_files={METADATA_KEY: metadata})
    path.write_bytes(whole.getbuffer())


def remove_stack_traces(program: torch.export.ExportedProgram) -> None:
    """Remove the stack traces of nodes, which hold absolute paths of the source code."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def load_program(path: Path, output_kind: OutputKind = "logits") -> Opened:
    """Load the program of a file just written by this process: loading executes its content."""
    with zipfile.ZipFile(path) as archive:
        contract, preprocessing = read_contract(path, _read_text(path, archive, f"extra/{METADATA_KEY}"))
    with silence_exporter():
        call = torch.export.load(path).module()
    names = name_outputs(config_from_json(contract.config))
    return run_with_torch(call, names, preprocessing, output_kind, path, contract.precision), contract


def open_program(path: Path, output_kind: OutputKind = "logits", threads: int | None = None) -> Opened:
    """Open a `.pt2` exported by vitrail from its weights and contract; the program in it is not executed."""
    contract, preprocessing, state = read_program(path)
    if contract.precision not in FLOAT_PRECISIONS:
        raise ValueError(f"{path}: unsupported precision {contract.precision}: export the model again")
    graph = rebuild_graph(path, contract, state, uint8=preprocessing is None)
    exported.check_graph(path, [exported.INPUT_NAME], list(graph.output_names), output_kind)
    if threads is not None:
        torch.set_num_threads(threads)
    return run_with_torch(graph, graph.output_names, preprocessing, output_kind, path, contract.precision), contract


def read_program(path: Path, weights: bool = True) -> tuple[ModelContract, Preprocessing | None, dict[str, Tensor]]:
    """Return the contract of a program, the preprocessing that normalises its input, and its weights, unless left out."""
    exported.check_file_exists(path)
    try:
        archive = zipfile.ZipFile(path)
    except (*ARCHIVE_ERRORS, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {NOT_A_PROGRAM} ({error})") from None
    try:
        with archive:
            contract, preprocessing = read_contract(path, _read_text(path, archive, f"extra/{METADATA_KEY}"))
            return contract, preprocessing, read_weights(path, archive) if weights else {}
    except ARCHIVE_ERRORS as error:
        raise ValueError(f"{path}: {NOT_A_PROGRAM} ({error})") from None


def rebuild_graph(path: Path, contract: ModelContract, state: dict[str, Tensor], uint8: bool) -> ExportGraph:
    """Build the exported graph from its configuration and weights."""
    config, dtype = config_from_json(contract.config), torch_dtype(contract.precision)
    if (layers := config.depth) > len(state):
        raise ValueError(f"{path}: its configuration has {layers:,} layers, but it holds only {len(state):,} weights")
    try:
        model = assemble_model(Stored(config, contract.labels, contract.preprocessing, {}), state, dtype)
    except (KeyError, AssertionError, StopIteration) as error:
        raise ValueError(f"{path}: its weights do not match its configuration ({error})") from None
    model = model.for_tracing(contract.any_size)
    return ExportGraph(model, contract.preprocessing, uint8, contract.merge, dtype).eval()


def read_weights(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """Return every weight by the model's parameter name."""
    try:
        config = json.loads(_read_text(path, archive, WEIGHTS_CONFIG) or "{}")
    except RecursionError:
        config = None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: invalid table of weights ({error})") from None
    table = config.get("config") if isinstance(config, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path}: it has no table of weights")
    weights = {}
    for name, entry in table.items():
        try:
            weights[_model_key(name)] = _read_tensor(path, archive, name, entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: incomplete entry of the weight {name!r} ({error})") from None
    return weights


def _model_key(name: str) -> str:
    """Return the parameter name without the prefixes of the traced modules."""
    for prefix in ("model.", "merged.vit."):
        name = name.removeprefix(prefix)
    return name.replace("position.of.", "position.")


def _read_tensor(path: Path, archive: zipfile.ZipFile, name: str, entry: dict[str, Any]) -> Tensor:
    """Return one contiguous weight; raise ValueError if it is stored otherwise or incomplete."""
    meta, member = entry["tensor_meta"], entry["path_name"]
    dtype, shape = DTYPE_CODES.get(meta["dtype"]), [size["as_int"] for size in meta["sizes"]]
    strides, offset = [stride["as_int"] for stride in meta["strides"]], meta["storage_offset"]["as_int"]
    contiguous = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if entry["use_pickle"] or dtype is None or offset != 0 or strides != contiguous:
        raise ValueError(f"{path}: the weight {name!r} is not stored as raw contiguous values")
    info = _find_member(archive, f"data/weights/{member}")
    count = math.prod(shape)
    if info is None or count < 1 or info.file_size != count * dtype.itemsize:
        raise ValueError(f"{path}: the weight {name!r} is missing or has the wrong size")
    return torch.frombuffer(bytearray(archive.read(info)), dtype=dtype).reshape(shape)


def _find_member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """Return an uncompressed member by its path below the archive's top folder, or None."""
    stored = (info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED)
    return next((info for info in stored if info.filename.partition("/")[2] == name), None)


def _read_text(path: Path, archive: zipfile.ZipFile, name: str) -> str | None:
    info = _find_member(archive, name)
    if info is None:
        return None
    if info.file_size > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: {name} has {info.file_size:,} bytes, more than {MAX_TEXT_BYTES:,}")
    try:
        return archive.read(info).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: {name} is not UTF-8 text") from None
