"""PyTorch's own exported program, a `.pt2`: written for other programs, and opened here without running what is in it.

`torch.export.load` unpickles, and evaluates expressions that stand in the file: opening a stranger's file so would be running a
stranger's program. The file is a zip archive with the weights as plain bytes and a JSON table of them; they are read as that,
and the model is built anew from its configuration in the metadata. Only what was written a moment ago is loaded as a program.
"""

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import Contract as Stored
from vitrail.checkpoints.loading import assembled
from vitrail.deploy.graph import Graph
from vitrail.deploy.metadata import KEY, Input, to_json
from vitrail.deploy.onnx_export import quiet, traced
from vitrail.deploy.onnx_runtime import check_outputs, described, taken, there
from vitrail.deploy.runtime import Contract, Gives, Runtime
from vitrail.deploy.settled import live
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import from_json

TABLE = "data/weights/model_weights_config.json"
KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CODES = {7: torch.float32, 6: torch.float16, 13: torch.bfloat16}  # PyTorch's numbers in the table
DAMAGED = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError)  # the last: encrypted
NOT_ONE = "not an exported program of PyTorch's, or a damaged one"
LARGEST = 2**26  # bytes of a table or a description


class ProgramRuntime:
    """A graph as PyTorch runs it, or the program that was exported from it."""

    name = "torch"

    def __init__(self, call: Any, names: tuple[str, ...], contract: Contract, input: Input, gives: Gives) -> None:
        self.call, self.place, self.gives = call, names.index(gives), gives
        self.preprocessing = contract.preprocessing if input == "float" else None

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, C, H, W] to float32: logits [B, K], or features [B, F]."""
        return self.call(torch.from_numpy(taken(pixels, self.preprocessing)))[self.place].numpy()


def write_exported(graph: Graph, contract: Contract, path: Path) -> None:
    """The program with its contract, and without a pickle: its example of pixels would be one."""
    program = traced(graph, contract)
    program._example_inputs = None
    with quiet():
        torch.export.save(program, path, extra_files={KEY: to_json(contract, "uint8" if graph.uint8 else "float")})


def load_own(path: Path, gives: Gives = "logits") -> tuple[Runtime, Contract]:
    """The program itself, for a file that this process has just written: loading runs what is in it."""
    with zipfile.ZipFile(path) as archive:
        contract, input = described(path, _text(path, archive, f"extra/{KEY}"))
    with quiet():
        call = torch.export.load(path).module()
    names = ("features",) if contract.config["classes"] is None else ("logits", "features")
    return ProgramRuntime(call, names, contract, input, gives), contract


def open_exported(path: Path, gives: Gives = "logits", threads: int | None = None) -> tuple[Runtime, Contract]:
    """A `.pt2` that vitrail exported, by its weights and its contract; the program inside is not run."""
    there(path)
    try:
        archive = zipfile.ZipFile(path)
    except (*DAMAGED, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {NOT_ONE} ({error})") from None
    try:
        with archive:
            contract, input = described(path, _text(path, archive, f"extra/{KEY}"))
            state = weights(path, archive)
    except DAMAGED as error:
        raise ValueError(f"{path}: {NOT_ONE} ({error})") from None
    if contract.precision not in KINDS:
        raise ValueError(f"{path}: a program of PyTorch's is not in {contract.precision}: export the model anew")
    graph = rebuilt(path, contract, state, input)
    check_outputs(path, list(graph.gives), gives)
    if threads is not None:
        torch.set_num_threads(threads)
    return ProgramRuntime(graph, graph.gives, contract, input, gives), contract


def rebuilt(path: Path, contract: Contract, state: dict[str, Tensor], input: Input) -> Graph:
    """The graph that was exported, from its configuration and its weights."""
    config, kind = from_json(contract.config), KINDS[contract.precision]
    if (layers := config.size.depth if isinstance(config, ViTConfig) else sum(config.stages)) > len(state):
        raise ValueError(f"{path}: its configuration has {layers:,} layers, and the file {len(state):,} weights")
    try:
        model = assembled(Stored(config, contract.labels, contract.preprocessing, {}), state, kind)
    except (KeyError, AssertionError, StopIteration) as error:
        raise ValueError(f"{path}: its weights are not those of its configuration ({error})") from None
    if contract.any_size and isinstance(model, ViT):
        model.position = live(model.position)
    return Graph(model, contract.preprocessing, input == "uint8", contract.merge, kind).eval()


def weights(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """Every weight by the model's own name, from plain bytes."""
    try:
        told = json.loads(_text(path, archive, TABLE) or "{}")
    except RecursionError:
        told = None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: its table of weights is not readable ({error})") from None
    table = told.get("config") if isinstance(told, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path}: there is no table of weights in it")
    found = {}
    for name, about in table.items():
        try:
            found[_own(name)] = _tensor(path, archive, name, about)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: what it says of the weight {name!r} is not complete ({error})") from None
    return found


def _own(name: str) -> str:
    """The model's name of a weight, without those that hold it while it is traced."""
    for before in ("model.", "merged.vit."):
        name = name.removeprefix(before)
    return name.replace("position.of.", "position.")


def _tensor(path: Path, archive: zipfile.ZipFile, name: str, about: dict[str, Any]) -> Tensor:
    """One weight, whole and in order, or refused."""
    meta, member = about["tensor_meta"], about["path_name"]
    kind, shape = CODES.get(meta["dtype"]), [size["as_int"] for size in meta["sizes"]]
    strides, offset = [stride["as_int"] for stride in meta["strides"]], meta["storage_offset"]["as_int"]
    if about["use_pickle"] or kind is None or offset != 0 or strides != _contiguous(shape):
        raise ValueError(f"{path}: the weight {name!r} is not stored as plain numbers, and is not read")
    info = _member(archive, f"data/weights/{member}")
    count = math.prod(shape)
    if info is None or count < 1 or info.file_size != count * kind.itemsize:
        raise ValueError(f"{path}: the weight {name!r} is missing or of another size than the file says")
    return torch.frombuffer(bytearray(archive.read(info)), dtype=kind).reshape(shape)


def _contiguous(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for place in reversed(range(len(shape) - 1)):
        strides[place] = strides[place + 1] * shape[place + 1]
    return strides


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """A member by its path below the archive's own folder; only as PyTorch writes it, uncompressed."""
    for info in archive.infolist():
        if info.filename.partition("/")[2] == name and info.compress_type == zipfile.ZIP_STORED:
            return info
    return None


def _text(path: Path, archive: zipfile.ZipFile, name: str) -> str | None:
    info = _member(archive, name)
    if info is None:
        return None
    if info.file_size > LARGEST:
        raise ValueError(f"{path}: {name} in it takes {info.file_size:,} bytes, which no description does")
    try:
        return archive.read(info).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: {name} in it is not text") from None
