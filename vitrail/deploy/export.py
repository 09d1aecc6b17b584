"""A model to a file for another runtime. What is written is proven by the gate, next door."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vitrail.deploy.exported_torch import KINDS, load_own, write_exported
from vitrail.deploy.graph import Graph
from vitrail.deploy.half import halved
from vitrail.deploy.metadata import Input
from vitrail.deploy.onnx_export import to_onnx, told, write_onnx
from vitrail.deploy.onnx_runtime import open_onnx
from vitrail.deploy.openvino_runtime import check_bf16, from_onnx, open_openvino, openvino, write_openvino
from vitrail.deploy.runtime import Contract, Gives, Runtime
from vitrail.deploy.settled import settled, with_weights
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
HALVES = ("fp16", "bf16")
FLOATS = ("fp32", *HALVES)


def export(
    model: ViT | BiT,
    contract: Contract,
    path: Path,
    *,
    to: str,
    uint8: bool = False,
    dynamic_size: bool = False,
    merge: int = 0,
    precision: str = "fp32",
) -> Contract:
    """Writes the model for a runtime, whole or not at all, and gives the contract that stands in the file."""
    check(path, to, precision, merge, dynamic_size)
    contract = replace(contract, merge=merge, precision=precision, any_size=dynamic_size)
    with neighbour(path) as place:
        write(model, contract, place, to, uint8)
    return contract


def check(path: Path, to: str, precision: str, merge: int, dynamic_size: bool) -> None:
    """Refuses what cannot be, before anything is computed."""
    if to not in ENDINGS:
        raise ValueError(f"unknown runtime {to!r}: use {', '.join(ENDINGS)}")
    if path.suffix != ENDINGS[to]:
        raise ValueError(f"{path}: a file for {to} is known by its ending {ENDINGS[to]}")
    if precision not in FLOATS:
        raise ValueError(f"precision {precision!r}: use {', '.join(FLOATS)}")
    if merge and dynamic_size:
        raise ValueError("tokens are merged by their number, which a graph for any size does not know: choose one")
    if to == "openvino":
        openvino()
        if precision == "bf16":
            check_bf16()


def write(model: ViT | BiT, contract: Contract, path: Path, to: str, uint8: bool) -> None:
    """The file as the contract says."""
    if to == "torch":
        whole = with_weights(model, contract.any_size)
        graph = Graph(whole, contract.preprocessing, uint8, contract.merge, KINDS[contract.precision])
        write_exported(graph, contract, path)
        return
    with tempfile.TemporaryDirectory(prefix="vitrail-") as aside:
        between = Path(aside) / "float.onnx"
        write_float(model, contract, between, uint8)
        derive(between, contract, path, to, uint8)


def write_float(model: ViT | BiT, contract: Contract, path: Path, uint8: bool) -> None:
    """The ONNX file in float that every other is made from."""
    contract = replace(contract, precision="fp32")
    graph = Graph(
        settled(model, contract.any_size, contract.preprocessing.size), contract.preprocessing, uint8, contract.merge
    )
    write_onnx(to_onnx(graph, contract), path)


def derive(between: Path, contract: Contract, path: Path, to: str, uint8: bool) -> None:
    """An ONNX file in float to what the contract says."""
    input: Input = "uint8" if uint8 else "float"
    if to == "openvino":
        write_openvino(from_onnx(between), contract, input, path)
        return
    import onnx

    proto = onnx.load_model(between)
    if contract.precision in HALVES:
        proto = halved(proto, contract.precision)
    told(proto, contract, input)
    write_onnx(proto, path)


def opened_file(path: Path, gives: Gives = "logits", threads: int | None = None) -> tuple[Runtime, Contract]:
    """A file that was written here a moment ago, run by what it was written for."""
    if path.suffix == ".pt2":
        return load_own(path, gives)
    return (open_onnx if path.suffix == ".onnx" else open_openvino)(path, gives, threads)


@contextmanager
def neighbour(path: Path) -> Iterator[Path]:
    """A hidden place beside a file's own; all that lies there in the end takes its place, the file itself last."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")
    around = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield around / path.name
        for file in sorted(around.iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.parent / file.name)
    except OSError as error:
        raise OSError(f"{path} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(around, ignore_errors=True)
