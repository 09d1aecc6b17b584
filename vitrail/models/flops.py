"""Cost of a model before it is built: shapes, parameters, multiply-adds and bytes of each stage.

The model runs on PyTorch's meta device, where tensors have shapes but no memory. Multiplications are counted as they are
called, so the numbers follow the code that runs.

B images, N tokens, D width, H heads, d = D/H.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.models.base import Model, ModelConfig, TokenConfig, count_parameters
from vitrail.models.registry import build_from
from vitrail.nn.shape import Grid

FLOAT = 4  # bytes of a value


@dataclass
class Stage:
    """One row of the cost table."""

    name: str
    shape: tuple[int, ...]  # of its output
    params: int = 0
    macs: int = 0
    activation_bytes: int = 0  # stored for the backward pass


@dataclass
class Cost:
    """A model's cost for one batch of images of one size, in 32-bit floats."""

    batch: int
    image_size: tuple[int, int]
    params: int
    macs: int  # of the batch, forward
    macs_every_token: int  # with all tokens computed in the last layer, as other tools count
    inference_bytes: int  # weights, and the largest activations alive at once
    training_bytes: int  # weights, gradients, two moments of Adam, and activations stored for the backward pass
    weight_bytes: int
    activation_bytes: int
    stages: list[Stage]
    tokens: int = 0  # of one image, prefix included
    attention_entries: int = 0  # of one attention matrix between patches, the largest if there are several kinds
    attention_bytes_per_matrix: int = 0
    attention_bytes_total: int = 0  # of all layers and heads, for one image, if stored
    attention_matrices: int = 0
    frames: int | None = None  # of a clip

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, the stages last."""
        values = asdict(self)
        if self.frames is None:
            del values["frames"]
        return values | {"stages": values.pop("stages")}


def count(config: ModelConfig, batch: int = 1) -> Cost:
    """Return the cost of a batch of images or clips of the configured size, without allocating memory."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    with torch.device("meta"):
        model = build_from(config).train()
        image = torch.empty(batch, config.channels, *config.input_size)
    stages = _count_stages(model, image)
    params = count_parameters(model)
    assert params == sum(stage.params for stage in stages), "every parameter belongs to one stage"
    macs = sum(stage.macs for stage in stages)
    kept = sum(stage.activation_bytes for stage in stages)
    weights = params * FLOAT
    # at inference a layer's input, its widest intermediate value and its output are alive together
    alive = max(stage.activation_bytes for stage in stages) + image.numel() * FLOAT
    cost = Cost(
        batch=batch,
        image_size=config.image_size,
        frames=config.frames,
        stages=stages,
        params=params,
        macs=macs,
        macs_every_token=macs,
        weight_bytes=weights,
        activation_bytes=kept,
        inference_bytes=weights + alive,
        training_bytes=4 * weights + kept + image.numel() * FLOAT,
    )
    if isinstance(config, TokenConfig):
        shape, size = config.shape, config.size
        matrices = config.block.count_attention(shape.grid)
        cost.macs_every_token = sum(stage.macs for stage in _count_stages(model, image, every_token=True))
        cost.tokens = shape.prefix + shape.patches
        cost.attention_entries = max(matrices) ** 2
        cost.attention_bytes_per_matrix = cost.attention_entries * FLOAT
        cost.attention_matrices = size.depth * size.heads * sum(matrices.values())
        entries = sum(patches**2 * number for patches, number in matrices.items())
        cost.attention_bytes_total = size.depth * size.heads * entries * FLOAT
    return cost


class Counter(TorchFunctionMode):
    """A replacement for functions that multiply or normalise: counts each call and returns an empty tensor of its shape.

    Other functions (sums, copies, reshapes) run on the meta device. `bytes` counts the tensors that autograd would store
    for the backward pass: the inputs of these functions, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = self.bytes = 0
        self.kept: dict[int, Tensor] = {}  # by storage; holding the tensor prevents reuse of its address
        self.rules: dict[Callable[..., Any], Callable[..., Any]] = {
            F.linear: self.linear,
            **dict.fromkeys((F.conv2d, F.conv3d), self.convolution),
            F.conv_transpose2d: self.conv_transpose2d,
            **{function: partial(self.max_pool, function) for function in (F.max_pool2d, F.max_pool3d)},
            F.adaptive_avg_pool2d: self.average_pool,
            F.interpolate: self.interpolate,
            F.scaled_dot_product_attention: self.attention,
            torch.bmm: self.bmm,
            **dict.fromkeys((torch.lstm, torch.rnn_tanh), self.recurrent_layer),
            torch.lstm_cell: self.lstm_cell,
            **dict.fromkeys((F.layer_norm, F.group_norm, F.batch_norm, F.gelu, F.silu), self.keeps_input),
            **dict.fromkeys((F.relu, torch.tanh, Tensor.sigmoid, Tensor.softmax), self.keeps_output),
            **dict.fromkeys((Tensor.clamp, Tensor.log), self.keeps_input),
            Tensor.add: self.broadcast,
            Tensor.mul: self.multiply,
            torch.addcmul: lambda _, a, b: self.multiply(a, b),
            F.dropout: self.dropout,
            torch.cat: self.cat,
            Tensor.gather: self.gather,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.rules.get(func, func)(*args, **(kwargs or {}))

    def keep(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that the backward pass needs, once per storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = tensor
            self.bytes += storage.nbytes()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.keep(x)
        if not self.is_weight(weight):  # put together from several tables
            self.keep(weight)
        self.macs += x.numel() * weight.shape[0]
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Grid, padding: Grid, *_: Any
    ) -> Tensor:
        self.keep(x)
        if not self.is_weight(weight):  # standardised in each step, and stored
            self.keep(weight)
        sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
        output = x.new_empty(x.shape[0], weight.shape[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in sides))
        self.macs += output.numel() * weight[0].numel()
        return output

    def conv_transpose2d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], *_: Any
    ) -> Tensor:
        """Count a transposed convolution without padding and groups; its weight is [inputs, outputs, k, k]."""
        self.keep(x)
        sides = zip(x.shape[2:], weight.shape[2:], stride, strict=True)
        self.macs += x.numel() * weight[0].numel()
        return x.new_empty(x.shape[0], weight.shape[1], *((n - 1) * s + k for n, k, s in sides))

    def average_pool(self, x: Tensor, output_size: int) -> Tensor:
        self.keep(x)
        return x.new_empty(*x.shape[:2], output_size, output_size)

    def interpolate(self, x: Tensor, size: tuple[int, int], **_: Any) -> Tensor:
        return x.new_empty(*x.shape[:2], *size)

    def max_pool(self, function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Count what max pooling stores: its input, and the 64-bit index of each maximum."""
        self.keep(x)
        output = function(x, *args, **options)  # on the meta device
        self.bytes += output.numel() * 8
        return output

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        """Count q kᵀ and the weighted sum of v: two products of N×N×d per head. The fused kernel stores q, k, v, the
        result and one number per row, never the N×N matrix; with a learned bias PyTorch's fallback stores the matrix."""
        for tensor in (q, k, v):
            self.keep(tensor)
        rows = q.numel() // q.shape[3]
        self.macs += 2 * q.numel() * k.shape[2]
        self.bytes += rows * FLOAT * (1 if attn_mask is None else k.shape[2])
        return q.new_empty(q.shape)

    def bmm(self, x: Tensor, other: Tensor) -> Tensor:
        """Count products of matrices that are both computed: [b, n, d] and [b, d, m]."""
        for tensor in (x, other):
            self.keep(tensor)
        self.macs += x.numel() * other.shape[2]
        return x.new_empty(*x.shape[:2], other.shape[2])

    def recurrent_layer(self, x: Tensor, state: Any, weights: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
        """Count a layer of a recurrent network over [B, N, D]: in each step and direction, the products of its matrices with
        the token and with the state. The values of all gates and states are stored."""
        self.keep(x)
        matrices = [weight for weight in weights if weight.ndim == 2]
        steps = x.numel() // x.shape[-1]
        self.macs += steps * sum(matrix.numel() for matrix in matrices)
        hidden = matrices[1::2]  # [gates·H, H], of each direction
        outputs = sum(matrix.shape[1] for matrix in hidden)
        self.bytes += steps * FLOAT * (sum(matrix.shape[0] for matrix in hidden) + outputs)
        last = x.new_empty(len(hidden), x.shape[0], hidden[0].shape[1])
        return x.new_empty(*x.shape[:-1], outputs), last, last

    def lstm_cell(self, x: Tensor, state: Any, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """Count one step of an LSTM: [B, D] and its state [B, H]."""
        hidden, cell = state
        self.keep(x)
        matrices = [weight for weight in weights if weight.ndim == 2]
        self.macs += x.shape[0] * sum(matrix.numel() for matrix in matrices)
        self.bytes += FLOAT * x.shape[0] * (matrices[0].shape[0] + 2 * hidden.shape[1])
        return hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)

    def keeps_input(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self.is_weight(x):
            self.keep(x)
        return x.new_empty(x.shape)

    def keeps_output(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        output = x.new_empty(x.shape)
        self.keep(output)
        return output

    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        self.keep(index)
        return x.new_empty(index.shape)

    # These multiply little or nothing, but PyTorch's own meta versions import its compiler, which takes longer than
    # everything else together.

    def cat(self, tensors: tuple[Tensor, ...], dim: int = 0) -> Tensor:
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        return tensors[0].new_empty(shape)

    def broadcast(self, a: Tensor, b: Tensor | float) -> Tensor:
        other = b.shape if isinstance(b, Tensor) else ()
        sides = zip_longest(reversed(a.shape), reversed(other), fillvalue=1)
        return a.new_empty([max(pair) for pair in sides][::-1])

    def multiply(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Store each factor if the other is learned. A smaller factor that is no weight (mask, cosine) is not learned."""
        if isinstance(b, Tensor):
            if self.is_weight(b) or a.shape == b.shape:
                self.keep(a)
            if not self.is_weight(b):
                self.keep(b)
        return self.broadcast(a, b)

    def dropout(self, x: Tensor, p: float, **_: Any) -> Tensor:
        if p == 0.0:
            return x
        self.bytes += x.numel() * FLOAT  # the mask
        return x.new_empty(x.shape)

    @staticmethod
    def is_weight(x: Tensor) -> bool:
        """Return whether x is a parameter or a view of one; its memory is counted with the weights."""
        return isinstance(x if x._base is None else x._base, nn.Parameter)

    def take(self) -> tuple[int, int]:
        """Return the counts since the last call, and reset them."""
        counted, self.macs, self.bytes = (self.macs, self.bytes), 0, 0
        return counted


def _count_stages(model: Model, images: Tensor, every_token: bool = False) -> list[Stage]:
    """Return the cost of a model stage by stage."""
    stages: list[Stage] = []
    with torch.no_grad(), Counter() as counter:
        for name, value, modules in model.run_stages(images, every_token):
            stages.append(Stage(name, tuple(value.shape), count_parameters(*modules), *counter.take()))
    return stages
