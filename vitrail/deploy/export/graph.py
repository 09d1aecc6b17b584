"""The exported module (pixels in, logits and features out; of masks logits alone), its trace, and its ONNX graph.

B images, C channels of H×W pixels, K classes, F features. Graphs of models of clips take [B, C, T, H, W].
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import METADATA_KEY, InputKind, ModelContract, contract_to_json
from vitrail.deploy.runtimes.exported import INPUT_NAME
from vitrail.models.base import Model, ModelConfig

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OPSET = 20  # the first with a GELU operator
MAX_PROTOBUF_BYTES = 2**31 - 2**24  # protobuf's sizes are 32-bit
MIN_HALVED_VALUES = 1024  # smaller tensors (biases, norms) stay in fp32


class ExportGraph(nn.Module):
    """A model that returns logits and features, with normalisation in front if its input is uint8."""

    def __init__(
        self,
        model: Model,
        preprocessing: Preprocessing,
        uint8: bool,
        merge: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model, self.uint8, self.dtype = model.to(dtype), uint8, dtype
        self.merged = cast(Any, model.merge_tokens(merge)) if merge else None
        # (x / 255 - mean) / std as one product and one sum
        shape = (-1, *[1] * (len(preprocessing.shape) - 1))
        mean, std = (torch.tensor(values).view(shape) for values in (preprocessing.mean, preprocessing.std))
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.scale: Tensor
        self.shift: Tensor

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs, in order."""
        return name_outputs(self.model.config)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        image = pixels.to(torch.float32) * self.scale + self.shift if self.uint8 else pixels
        if self.output_names == ("logits",):
            return (self.model(image.to(self.dtype)).float(),)
        features = self.compute_features(image.to(self.dtype))
        flat = features.flatten(1).float()  # a distilled model has [B, 2, D]
        return (flat,) if len(self.output_names) == 1 else (self.model.classify(features).float(), flat)

    def compute_features(self, image: Tensor) -> Tensor:
        """Return the input of the head: [B, F], or [B, 2, D] with a distillation token."""
        if self.merged is not None:
            return self.merged.features(image)
        return self.model.compute_pre_logits(image)


def name_outputs(config: ModelConfig) -> tuple[str, ...]:
    """Return the outputs of the exported graph of a model. The features of a segmentation model would run its backbone twice."""
    if config.classes is None:
        return ("features",)
    return ("logits",) if config.output_kind == "masks" else ("logits", "features")


def store_half(proto: "ModelProto", precision: str) -> "ModelProto":
    """Return the graph with its large weights stored in fp16 or bf16 and cast to fp32."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    is_fp16 = precision == "fp16"
    dtype, code = (torch.float16, TensorProto.FLOAT16) if is_fp16 else (torch.bfloat16, TensorProto.BFLOAT16)
    halved = onnx.ModelProto()
    halved.CopyFrom(proto)
    casts = []
    for tensor in halved.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < MIN_HALVED_VALUES:
            continue
        values = torch.from_numpy(numpy_helper.to_array(tensor).copy()).to(dtype)
        if not torch.isfinite(values).all():
            raise ValueError(f"values of {tensor.name} overflow in {precision}: use --bf16, or fp32")
        name, data = tensor.name, values.view(torch.uint8).numpy().tobytes()
        tensor.CopyFrom(helper.make_tensor(f"{name}.{precision}", code, list(tensor.dims), data, raw=True))
        casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.float", to=TensorProto.FLOAT))
    nodes = [*casts, *halved.graph.node]
    del halved.graph.node[:]
    halved.graph.node.extend(nodes)
    return halved


def trace_graph(graph: ExportGraph, contract: ModelContract) -> torch.export.ExportedProgram:
    """Trace the graph for any batch size, and for any size divisible by the stride if the contract allows it."""
    config, (*frames, height, width) = graph.model.config, contract.preprocessing.shape[1:]
    shape: dict[int, Any] = {0: torch.export.Dim("batch")}
    if contract.any_size:
        stride, least = config.size_rule
        # The example's grid differs from the model's and is not square, so that no side is specialised.
        height, width = height + stride * least, height + width + 2 * stride * least
        shape |= {2: _dynamic_side("rows", stride, least), 3: _dynamic_side("columns", stride, least)}
    dtype = torch.uint8 if graph.uint8 else torch.float32
    example = torch.zeros(2, config.channels, *frames, height, width, dtype=dtype)
    with silence_exporter(), torch.no_grad():
        return torch.export.export(graph.eval(), (example,), dynamic_shapes={INPUT_NAME: shape}, strict=False)


def _dynamic_side(name: str, stride: int, minimum: int) -> Any:
    """Return the dynamic dimension of a side, a multiple of the stride; one patch would be traced as a special case."""
    patches = torch.export.Dim(name, min=minimum, max=2**16 // stride)
    return patches if stride == 1 else stride * patches


def to_onnx(graph: ExportGraph, contract: ModelContract) -> "ModelProto":
    """Return the ONNX graph with the contract in its metadata."""
    check_onnx_installed()
    program = trace_graph(graph, contract)
    with silence_exporter():
        names: dict[str, Any] = {"input_names": [INPUT_NAME], "output_names": list(graph.output_names)}
        exported = torch.onnx.export(program, **names, opset_version=OPSET, external_data=False, verbose=False)
    assert exported is not None
    proto = exported.model_proto
    proto.producer_name = METADATA_KEY
    clean_metadata(proto)
    write_metadata(proto, contract, "uint8" if graph.uint8 else "float")
    return proto


def clean_metadata(proto: "ModelProto") -> None:
    """Name nodes after their layers, and remove the exporter's metadata, which holds paths of this machine."""
    seen: dict[str, int] = {}
    for node in proto.graph.node:
        name = f"{layer_name(node)}/{node.op_type}"
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


def layer_name(node: "NodeProto") -> str:
    """Return the innermost module of a node, such as blocks.0.msa.qkv."""
    for prop in node.metadata_props:
        if prop.key == "namespace":
            parts = [part.partition(":")[0].strip() for part in prop.value.split("/")]
            inside = [part.removeprefix("model.") for part in parts if part.startswith(("model.", "merged."))]
            return inside[-1] if inside else "graph"
    return "graph"


def check_onnx_installed() -> None:
    """Raise ValueError if the packages that write ONNX are missing."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'vitrail[onnx]'") from None


def write_metadata(proto: "ModelProto", contract: ModelContract, input: InputKind) -> None:
    """Write the contract into the metadata, replacing an earlier one."""
    for index in reversed([i for i, prop in enumerate(proto.metadata_props) if prop.key == METADATA_KEY]):
        del proto.metadata_props[index]
    proto.metadata_props.add(key=METADATA_KEY, value=contract_to_json(contract, input))


def write_onnx(proto: "ModelProto", path: Path) -> None:
    """Write one file, with the weights in a second file if it would exceed 2 GB."""
    import onnx

    if proto.ByteSize() < MAX_PROTOBUF_BYTES:
        path.write_bytes(proto.SerializeToString(deterministic=True))
    else:
        onnx.save_model(proto, path, save_as_external_data=True, location=f"{path.name}.data")


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Suppress warnings and log messages of the exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
