"""What a model costs before it exists: shapes, parameters, multiply-adds and bytes for each stage of the way through it.

The model is laid out on PyTorch's meta device, where tensors have shapes but no memory, and an image of that kind is sent
through it. What multiplies is counted as it is called, so the numbers follow the code that really runs.

B images, N tokens, D width, H heads, d = D/H.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.build import Config, build_from
from vitrail.models.vit import ViT

FLOAT = 4  # bytes of a value


@dataclass
class Stage:
    """One row of the table."""

    name: str
    shape: tuple[int, ...]  # of what it gives
    params: int = 0
    macs: int = 0
    activation_bytes: int = 0  # what it keeps for the backward pass


@dataclass
class Cost:
    """A model's cost for one batch of images of one size, in 32-bit floats."""

    batch: int
    image_size: tuple[int, int]
    params: int
    macs: int  # of the batch, forward
    macs_every_token: int  # the same if the last layer computed tokens that the pooling never reads, as others count
    inference_bytes: int  # weights, and the most that is alive at once
    training_bytes: int  # weights, gradients, two moments of Adam, and what is kept for the backward pass
    weight_bytes: int
    activation_bytes: int
    stages: list[Stage]
    tokens: int = 0  # of one image, prefix included
    attention_entries: int = 0  # of one attention matrix between patches
    attention_bytes_per_matrix: int = 0
    attention_bytes_total: int = 0  # of all layers and heads, for one image, if they were stored
    attention_matrices: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, the long list last."""
        values = asdict(self)
        return values | {"stages": values.pop("stages")}


def count(config: Config, batch: int = 1) -> Cost:
    """Sends a batch of the configured size through the model, without memory, and counts."""
    if batch < 1:
        raise ValueError(f"batch {batch}: it must be at least 1")
    with torch.device("meta"):
        model = build_from(config).train()
        image = torch.empty(batch, config.channels, *config.image_size)
    assert isinstance(model, (ViT, BiT))
    stages = _vit_stages(model, image, model.pool.reads) if isinstance(model, ViT) else _bit_stages(model, image)
    params = sum(p.numel() for p in model.parameters())
    assert params == sum(stage.params for stage in stages), "every parameter belongs to one stage"
    macs = sum(stage.macs for stage in stages)
    kept = sum(stage.activation_bytes for stage in stages)
    weights = params * FLOAT
    # at inference a layer's input, the widest thing it makes from it, and its output are alive together
    alive = max(stage.activation_bytes for stage in stages) + image.numel() * FLOAT
    cost = Cost(
        batch=batch,
        image_size=config.image_size,
        stages=stages,
        params=params,
        macs=macs,
        macs_every_token=macs,
        weight_bytes=weights,
        activation_bytes=kept,
        inference_bytes=weights + alive,
        training_bytes=4 * weights + kept + image.numel() * FLOAT,
    )
    if isinstance(model, ViT) and not isinstance(config, BiTConfig):
        shape, size = config.shape, config.size
        if model.pool.reads is not None:
            cost.macs_every_token = sum(stage.macs for stage in _vit_stages(model, image, read=None))
        cost.tokens = shape.prefix + shape.patches
        cost.attention_entries = shape.patches**2
        cost.attention_bytes_per_matrix = shape.patches**2 * FLOAT
        cost.attention_matrices = size.depth * size.heads
        cost.attention_bytes_total = cost.attention_matrices * cost.attention_bytes_per_matrix
    return cost


class Counter(TorchFunctionMode):
    """Stands in for the functions that multiply or normalise: counts them and gives an empty tensor of the right shape.

    The rest (sums, copies, reshapes) runs on the meta device as it is. `bytes` are what autograd would keep for the
    backward pass: the inputs of these functions, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = self.bytes = 0
        self.kept: dict[int, Tensor] = {}  # by storage; holding the tensor keeps its address from being used again
        self.rules: dict[Callable[..., Any], Callable[..., Tensor]] = {
            F.linear: self.linear,
            F.conv2d: self.conv2d,
            F.scaled_dot_product_attention: self.attention,
            **dict.fromkeys((F.layer_norm, F.group_norm, F.batch_norm, F.gelu, F.silu), self.keeps_input),
            **dict.fromkeys((F.relu, torch.tanh), self.keeps_output),
            Tensor.add: self.broadcast,
            Tensor.mul: self.multiply,
            F.dropout: self.dropout,
            torch.cat: self.cat,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.rules.get(func, func)(*args, **(kwargs or {}))

    def keep(self, tensor: Tensor) -> None:
        """This tensor's memory is needed again; counted once however often it is."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = tensor
            self.bytes += storage.nbytes()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.keep(x)
        self.macs += x.numel() * weight.shape[0]
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def conv2d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int], *_: Any
    ) -> Tensor:
        self.keep(x)
        if not self.is_weight(weight):  # standardised anew in each step, and kept
            self.keep(weight)
        sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
        output = x.new_empty(x.shape[0], weight.shape[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in sides))
        self.macs += output.numel() * weight[0].numel()
        return output

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        """q kᵀ and the weighted sum of v: two products of N×N×d for each head. The fused kernel keeps q, k, v, the result
        and one number for each row, never the N×N matrix; with a learned bias PyTorch falls back to one that stores it."""
        for tensor in (q, k, v):
            self.keep(tensor)
        rows = q.numel() // q.shape[3]
        self.macs += 2 * q.numel() * k.shape[2]
        self.bytes += rows * FLOAT * (1 if attn_mask is None else k.shape[2])
        return q.new_empty(q.shape)

    def keeps_input(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self.is_weight(x):
            self.keep(x)
        return x.new_empty(x.shape)

    def keeps_output(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        output = x.new_empty(x.shape)
        self.keep(output)
        return output

    # Some that multiply little or nothing, but on the meta device PyTorch's own import its compiler, which takes longer than
    # all the rest together.

    def cat(self, tensors: tuple[Tensor, ...], dim: int = 0) -> Tensor:
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        return tensors[0].new_empty(shape)

    def broadcast(self, a: Tensor, b: Tensor | float) -> Tensor:
        other = b.shape if isinstance(b, Tensor) else ()
        sides = zip_longest(reversed(a.shape), reversed(other), fillvalue=1)
        return a.new_empty([max(pair) for pair in sides][::-1])

    def multiply(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Keeps each factor if the other learns. A smaller one that is no weight (a mask, a cosine) does not learn."""
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
        """A parameter or a view of one: its memory is counted with the weights."""
        return isinstance(x if x._base is None else x._base, nn.Parameter)

    def take(self) -> tuple[int, int]:
        """What was counted since it was last asked."""
        counted, self.macs, self.bytes = (self.macs, self.bytes), 0, 0
        return counted


def _parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _vit_stages(model: ViT, image: Tensor, read: int | None) -> list[Stage]:
    """The way through a Vision Transformer, equation by equation."""
    grid = model.embed.grid(image)
    stages: list[Stage] = []

    def add(name: str, value: Tensor, *modules: nn.Module) -> None:
        stages.append(Stage(name, tuple(value.shape), _parameters(*modules), *counter.take()))

    with torch.no_grad(), Counter() as counter:
        add("image", image)
        add("patches x_p E", model.embed(image), model.embed)
        z = model.tokens(image)
        counter.take()  # the patches again
        add("tokens z_0 (eq. 1)", z, model.prefix, model.position, model.token_norm)
        states = model.states(z, grid, read=read)
        for layer, (block, z_l) in enumerate(zip(model.blocks, states, strict=True), start=1):
            add(f"layer {layer} (eq. 2, 3)", z_l, block)
            z = z_l
        y = model.pool(z)
        add("pooling y (eq. 4)", y, model.pool)
        add("head" if model.config.classes is not None else "features", model.head(y), model.head)
    return stages


def _bit_stages(model: BiT, image: Tensor) -> list[Stage]:
    """The way through a ResNet, stage by stage."""
    stages = [Stage("image", tuple(image.shape))]

    def add(name: str, value: Tensor, module: nn.Module) -> Tensor:
        stages.append(Stage(name, tuple(value.shape), _parameters(module), *counter.take()))
        return value

    with torch.no_grad(), Counter() as counter:
        x = add("root", model.rooted(image), model.root)
        for index, stage in enumerate(model.stages, start=1):
            x = add(f"stage {index}", stage(x), stage)
        y = add("pooling", model.pooled(x), model.norm)
        add("head" if model.config.classes is not None else "features", model.head(y), model.head)
    return stages
