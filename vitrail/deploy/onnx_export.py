"""A model as an ONNX graph."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.deploy.graph import INPUT, Graph
from vitrail.deploy.metadata import KEY, Input, to_json
from vitrail.deploy.runtime import Contract
from vitrail.models.bit import BiT

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OPSET = 20  # the first with GELU in one piece
MOST = 2**31 - 2**24  # bytes of a file in one piece: protobuf counts them with 32 bits


def traced(graph: Graph, contract: Contract) -> torch.export.ExportedProgram:
    """The graph for any number of pictures, of one size or of any that the patches divide."""
    config, (height, width) = graph.model.config, contract.preprocessing.size
    shape: dict[int, Any] = {0: torch.export.Dim("batch")}
    if contract.any_size:
        stride, least = (
            (1, halvings(graph.model) + 1) if isinstance(graph.model, BiT) else (graph.model.embed.stride, 2)
        )
        # An example of a grid that is not the model's, and whose sides are not taken for one and the same.
        height, width = height + stride * least, height + width + 2 * stride * least
        shape |= {2: _sides("rows", stride, least), 3: _sides("columns", stride, least)}
    kind = torch.uint8 if graph.uint8 else torch.float32
    example = torch.zeros(2, config.channels, height, width, dtype=kind)
    with quiet(), torch.no_grad():
        return torch.export.export(graph.eval(), (example,), dynamic_shapes={INPUT: shape}, strict=False)


def halvings(model: BiT) -> int:
    """The pixels that one place of a ResNet's last map stands for along a side."""
    return (4 if model.config.root == "large" else 1) * 2 ** (len(model.config.stages) - 1)


def _sides(name: str, stride: int, least: int) -> Any:
    """A side of the picture: so many patches, and more than one, which would be traced as a case of its own."""
    patches = torch.export.Dim(name, min=least, max=2**16 // stride)
    return patches if stride == 1 else stride * patches


def to_onnx(graph: Graph, contract: Contract) -> "ModelProto":
    """The graph with its contract in its metadata."""
    needed()
    program = traced(graph, contract)
    with quiet():
        made = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=list(graph.gives),
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    assert made is not None
    proto = made.model_proto
    proto.producer_name = KEY
    cleaned(proto)
    told(proto, contract, "uint8" if graph.uint8 else "float")
    return proto


def cleaned(proto: "ModelProto") -> None:
    """Nodes called by the layers they are of, and without the exporter's notes: they hold paths of the machine it ran on."""
    seen: dict[str, int] = {}
    for node in proto.graph.node:
        name = f"{layer_of(node)}/{node.op_type}"
        seen[name] = seen.get(name, 0) + 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"
        del node.metadata_props[:]
        node.doc_string = ""
    graph = proto.graph
    del graph.metadata_props[:]
    for value in (*graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del value.metadata_props[:]
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == batch:
                dim.dim_param = "batch"


def layer_of(node: "NodeProto") -> str:
    """The innermost module that a node comes from: blocks.0.msa.qkv."""
    for prop in node.metadata_props:
        if prop.key == "namespace":
            parts = [part.partition(":")[0].strip() for part in prop.value.split("/")]
            inside = [part.removeprefix("model.") for part in parts if part.startswith(("model.", "merged."))]
            return inside[-1] if inside else "graph"
    return "graph"


def needed() -> None:
    """Refuses where what writes ONNX is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed, which writes ONNX: pip install 'vitrail[onnx]'") from None


def told(proto: "ModelProto", contract: Contract, input: Input) -> None:
    """Writes the contract into the metadata."""
    for place in reversed([i for i, prop in enumerate(proto.metadata_props) if prop.key == KEY]):
        del proto.metadata_props[place]
    proto.metadata_props.add(key=KEY, value=to_json(contract, input))


def write_onnx(proto: "ModelProto", path: Path) -> None:
    """One file; beyond what one can hold, the weights beside it."""
    import onnx

    if proto.ByteSize() < MOST:
        path.write_bytes(proto.SerializeToString(deterministic=True))
    else:
        onnx.save_model(proto, path, save_as_external_data=True, location=f"{path.name}.data")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporter's parts tell their own authors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
