"""Weights of an ONNX graph in half the bytes, and computed with in float.

ONNX Runtime has no kernels for half precision on processors: a graph in fp16 would be cast back before every operation. Here
each weight is cast once, when the file is opened.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from onnx import ModelProto

LEAST = 1024  # values: what is smaller stays as it is, biases and norms among it


def halved(proto: "ModelProto", precision: str) -> "ModelProto":
    """The same graph with its large weights stored in fp16 or bf16."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    kind, code = {
        "fp16": (torch.float16, TensorProto.FLOAT16),
        "bf16": (torch.bfloat16, TensorProto.BFLOAT16),
    }[precision]
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    casts = []
    for tensor in made.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < LEAST:
            continue
        values = torch.from_numpy(numpy_helper.to_array(tensor).copy()).to(kind)
        if not torch.isfinite(values).all():
            raise ValueError(f"the weight {tensor.name} has values too large for {precision}: use --bf16, or neither")
        name = tensor.name
        stored = helper.make_tensor(
            f"{name}.{precision}", code, list(tensor.dims), values.view(torch.uint8).numpy().tobytes(), raw=True
        )
        tensor.CopyFrom(stored)
        casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.float", to=TensorProto.FLOAT))
    nodes = [*casts, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made
