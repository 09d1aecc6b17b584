"""An export with proof: written to a hidden place, run beside the model, and put in its place if it passes the gate."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.deploy import gate
from vitrail.deploy.export import ENDINGS, check, derive, neighbour, opened_file, write, write_float
from vitrail.deploy.exported_torch import ProgramRuntime
from vitrail.deploy.gate import BATCH, Compared, Limits, Proof, Shown, answers, compare
from vitrail.deploy.graph import Graph
from vitrail.deploy.onnx_export import told as describe
from vitrail.deploy.onnx_export import write_onnx
from vitrail.deploy.onnx_runtime import taken
from vitrail.deploy.quantise import FEW, SECONDS, Quantised, Quantiser, quantised
from vitrail.deploy.runtime import Contract, Gives, Runtime
from vitrail.deploy.sized import beside_at_others
from vitrail.deploy.torch_runtime import TorchRuntime
from vitrail.models.bit import BiT
from vitrail.models.merging import merged
from vitrail.models.vit import ViT

if TYPE_CHECKING:
    from onnx import ModelProto

Told = Callable[[str, int, int], None]
MODEL, FILE, PLAIN = "model", "file", "file in float"  # what the speeds are of


@dataclass(frozen=True)
class Asked:
    """What is to be written, and how much it may differ."""

    to: str  # onnx, openvino, torch
    uint8: bool = False
    dynamic_size: bool = False
    merge: int = 0
    precision: str = "fp32"
    tolerance: float | None = None
    force: bool = False
    threads: int | None = None
    searching: float = SECONDS  # at most, for the layers that int8 harms
    measuring: float = 10.0  # seconds, for speeds


class Refused(ValueError):
    """The file did not pass the gate, and is not in its place."""

    def __init__(self, proof: Proof) -> None:
        said = "; ".join(proof.refusals)
        super().__init__(
            f"{proof.file} was not written: {said}. --force writes it nevertheless, --tolerance allows more"
        )
        self.proof = proof


def export_with_proof(
    model: ViT | BiT,
    contract: Contract,
    path: Path,
    asked: Asked,
    shown: Shown,
    *,
    calibration: np.ndarray | None = None,
    bytes_before: int = 0,
    told: Told | None = None,
) -> Proof:
    """Writes the file if it passes; raises `Refused` with the proof if it does not. `calibration`, uint8, is for int8."""
    int8, limits = asked.precision == "int8", gate.limits(asked.precision, asked.tolerance)
    check(path, asked.to, "fp32" if int8 else asked.precision, asked.merge, asked.dynamic_size)
    if int8 and asked.to == "torch":
        raise ValueError("int8 is for ONNX Runtime and OpenVINO: use --to onnx or openvino")
    if int8 and calibration is None:
        raise ValueError("int8 needs pictures to measure its ranges on: give --calibrate")
    contract = replace(contract, merge=asked.merge, precision=asked.precision, any_size=asked.dynamic_size)
    what: Gives = "features" if model.config.classes is None else "logits"
    before = original(model, contract)
    wanted = answers(before, shown.pixels, told, "asking the model")

    def beside(place: Path) -> Compared:
        found = answers(opened_file(place, what, asked.threads)[0], shown.pixels, told, "asking the file")
        return compare(wanted, found, shown.targets, contract.several, what)

    with neighbour(path) as place, tempfile.TemporaryDirectory(prefix="vitrail-") as aside:
        made, plain = None, None
        if asked.precision != "fp32":
            plain = written_in_float(model, contract, Path(aside), asked)
        if int8:
            assert calibration is not None
            given = taken(calibration, None if asked.uint8 else contract.preprocessing)
            between = Path(aside) / "float.onnx"
            made = in_int8(
                between, contract, place, asked, what, given, lambda: not limits.refusals(beside(place)), told
            )
        else:
            write(model, contract, place, asked.to, asked.uint8)
        compared = beside(place)
        runtimes = {MODEL: before, FILE: opened_file(place, what, asked.threads)[0]}
        if plain is not None:
            runtimes[PLAIN] = opened_file(plain, what, asked.threads)[0]
        proof = Proof(
            str(path),
            asked.to,
            asked.precision,
            len(shown.pixels),
            shown.source,
            compared,
            features_beside(model, contract, place, shown, asked) if what == "logits" else None,
            sum(file.stat().st_size for file in place.parent.iterdir()),
            bytes_before,
            gate.measured(runtimes, shown.pixels, asked.measuring),
            tuple(limits.refusals(compared)),
            against_unmerged(model, contract, shown, wanted, told) if asked.merge else None,
            beside_at_others(model, contract, before, runtimes[FILE], told) if asked.dynamic_size else (),
            made.kept if made else (),
            made.notes if made else (),
        )
        proof = finished(proof, made, limits)
        if not proof.passed and not asked.force:
            raise Refused(proof)
    return proof


def finished(proof: Proof, made: Quantised | None, limits: Limits) -> Proof:
    """With what a user should know of it."""
    notes = list(proof.notes)
    if made is not None:
        notes.append(f"{made.layers - len(made.kept)} of {made.layers} layers are in int8")
    if proof.precision != "fp32" and (slow := gate.not_faster(proof.speeds, FILE, PLAIN, proof.precision)):
        notes.append(slow)
    refusals = list(proof.refusals)
    if proof.precision == "fp32":  # a few pictures say nothing of how many answers rounding changes
        refusals += limits.refusals(proof.features) if proof.features is not None else []
        for each in proof.at_sizes:
            refusals += [f"at {each.size[0]}×{each.size[1]} {said}" for said in limits.refusals(each.compared)]
    return replace(proof, refusals=tuple(refusals), notes=tuple(notes))


def original(model: ViT | BiT, contract: Contract) -> Runtime:
    """The model as PyTorch runs it, merged where the file is."""
    running = merged(model, contract.merge) if contract.merge and isinstance(model, ViT) else model
    return TorchRuntime(running, contract.preprocessing)


def features_beside(model: ViT | BiT, contract: Contract, place: Path, shown: Shown, asked: Asked) -> Compared:
    """What comes to the head, of a few pictures: the file gives it too."""
    graph, few = Graph(model, contract.preprocessing, False, contract.merge), shown.pixels[:BATCH]
    first = ProgramRuntime(graph, graph.gives, contract, "float", "features")(few)
    return compare(first, opened_file(place, "features", asked.threads)[0](few), what="features")


def against_unmerged(
    model: ViT | BiT, contract: Contract, shown: Shown, wanted: np.ndarray, told: Told | None
) -> Compared:
    """What merging itself changed."""
    what: Gives = "features" if model.config.classes is None else "logits"
    whole = answers(original(model, replace(contract, merge=0)), shown.pixels, told, "asking the model unmerged")
    return compare(whole, wanted, shown.targets, contract.several, what)


def written_in_float(model: ViT | BiT, contract: Contract, aside: Path, asked: Asked) -> Path:
    """The same file in float, to hold what is rounded against; for int8 beside the ONNX file that it is made from."""
    contract, plain = replace(contract, precision="fp32"), aside / f"float{ENDINGS[asked.to]}"
    if asked.to == "torch":
        write(model, contract, plain, asked.to, asked.uint8)
        return plain
    between = aside / "float.onnx"
    write_float(model, contract, between, asked.uint8)
    if asked.to == "openvino":
        derive(between, contract, plain, asked.to, asked.uint8)
    return plain


def in_int8(
    between: Path,
    contract: Contract,
    place: Path,
    asked: Asked,
    output: str,
    given: np.ndarray,  # the pictures of the calibration, as the graph takes them
    passes: Callable[[], bool],
    told: Told | None,
) -> Quantised:
    """Writes the file in int8, with as many layers in float as the tolerance needs."""

    def put(proto: "ModelProto") -> None:
        rounded = between.with_stem("int8")
        describe(proto, contract, "uint8" if asked.uint8 else "float")
        write_onnx(proto, rounded)
        derive(rounded, contract, place, asked.to, asked.uint8)

    def holds(proto: "ModelProto") -> bool:
        put(proto)
        return passes()

    quantiser = Quantiser(between, given)
    found = quantised(quantiser, given[:FEW], output, holds, told, asked.searching)
    put(found.proto)
    return found
