"""What a model costs before it exists: shapes, parameters, multiply-adds and bytes for each stage of the way through it.

The model is laid out on PyTorch's meta device, where tensors have shapes but no memory, and an image of that kind is sent
through it. Hooks on the layers that multiply count as they are passed, so the numbers follow the code that really runs.

B images, N tokens, D width, H heads, d = D/H.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.bit import BiTConfig
from vitrail.models.build import Config, build_from
from vitrail.models.vit import ViT
from vitrail.nn.attention import MSA
from vitrail.nn.pool import AttentionPool

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
    stages: list[Stage]
    params: int
    macs: int  # of the batch, forward
    macs_every_token: int  # the same if the last layer computed tokens that the pooling never reads, as others count
    inference_bytes: int  # weights, and the most that is alive at once
    training_bytes: int  # weights, gradients, two moments of Adam, and what is kept for the backward pass
    weight_bytes: int
    activation_bytes: int
    tokens: int = 0  # of one image, prefix included
    attention_entries: int = 0  # of one attention matrix between patches
    attention_bytes_per_matrix: int = 0
    attention_bytes_total: int = 0  # of all layers and heads, for one image, if they were stored
    attention_matrices: int = 0
    slots: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def count(config: Config, batch: int = 1) -> Cost:
    """Sends a batch of the configured size through the model, without memory, and counts."""
    if batch < 1:
        raise ValueError(f"batch {batch}: it must be at least 1")
    with torch.device("meta"):
        model = build_from(config).train()
        image = torch.empty(batch, config.channels, *config.image_size)
    stages = _vit_stages(model, image) if isinstance(model, ViT) else _bit_stages(model, image)
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
        layers = [stage for stage in stages if stage.name.startswith("layer ")]
        cost.macs_every_token = macs - layers[-1].macs + max(layers[-1].macs, layers[0].macs)
        cost.tokens = shape.prefix + shape.patches
        cost.attention_entries = shape.patches**2
        cost.attention_bytes_per_matrix = shape.patches**2 * FLOAT
        cost.attention_matrices = size.depth * size.heads
        cost.attention_bytes_total = cost.attention_matrices * cost.attention_bytes_per_matrix
    return cost


class Counter:
    """Multiply-adds, and bytes kept for the backward pass, of what has run since it was last asked."""

    def __init__(self) -> None:
        self.macs = 0
        self.bytes = 0
        self.kept: set[int] = set()
        self.alive: list[Tensor] = []  # so that no address is used twice

    def keep(self, tensor: Tensor) -> None:
        """This tensor's memory is needed again; counted once however often it is needed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept:
            self.kept.add(storage._cdata)
            self.alive.append(tensor)
            self.bytes += storage.nbytes()

    def linear(self, module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.macs += output.numel() * module.in_features
        self.keep(inputs[0])

    def convolution(self, module: nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.macs += output.numel() * module.weight[0].numel()
        self.keep(inputs[0])

    def elementwise(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.keep(inputs[0])

    def attention(self, queries: int, tokens: int, width: int, batch: int) -> None:
        """q kᵀ and the weighted sum of v: two products of N×N×d for each head."""
        self.macs += 2 * batch * queries * tokens * width

    def msa(self, module: MSA, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, read = inputs[0], inputs[2] if len(inputs) > 2 else None
        b, tokens, width = x.shape
        self.attention(read or tokens, tokens, width, b)
        self.bytes += 3 * x.numel() * FLOAT  # q, k and v; the fused kernel keeps one number for each row besides
        self.bytes += b * module.heads * tokens * FLOAT

    def pool(self, module: AttentionPool, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        b, tokens, width = inputs[0].shape
        self.attention(1, tokens - module.prefix, width, b)
        self.bytes += 2 * inputs[0].numel() * FLOAT

    def take(self) -> tuple[int, int]:
        """What was counted, and start again."""
        counted = self.macs, self.bytes
        self.macs = self.bytes = 0
        return counted

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator["Counter"]:
        """Counts while the model runs."""
        handles = []
        for module in model.modules():
            for kind, hook in (
                (nn.Linear, self.linear),
                (nn.Conv2d, self.convolution),
                ((nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, nn.GELU, nn.ReLU), self.elementwise),
                (MSA, self.msa),
                (AttentionPool, self.pool),
            ):
                if isinstance(module, kind):
                    handles.append(module.register_forward_hook(hook))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


def _parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _vit_stages(model: ViT, image: Tensor) -> list[Stage]:
    """The way through a Vision Transformer, equation by equation."""
    grid = model.embed.grid(image)
    stages: list[Stage] = []
    with torch.no_grad(), Counter().watch(model) as counter:

        def add(name: str, value: Tensor, *modules: nn.Module) -> None:
            macs, kept = counter.take()
            stages.append(Stage(name, tuple(value.shape), _parameters(*modules), macs, kept))

        add("image", image)
        patches = model.embed(image)
        add("patches x_p E", patches, model.embed)
        z = model.tokens(image)
        counter.take()
        add("tokens z_0 (eq. 1)", z, model.prefix, model.position)
        last = len(model.blocks)
        for layer, (block, place) in enumerate(zip(model.blocks, model.position.layers(grid, None), strict=True), 1):
            z = block(z, place, model.pool.reads if layer == last else None)
            add(f"layer {layer} (eq. 2, 3)", z, block)
        y = model.pool(z)
        add("pooling y (eq. 4)", y, model.pool)
        add("head" if model.config.classes is not None else "features", model.head(y), model.head)
    return stages


def _bit_stages(model: Any, image: Tensor) -> list[Stage]:
    """The way through a ResNet, stage by stage."""
    stages: list[Stage] = []
    outputs: dict[int, Tensor] = {}

    def after(index: int):
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            macs, kept = counter.take()
            outputs[index] = output
            stages.append(Stage(names[index], tuple(output.shape), _parameters(parts[index]), macs, kept))

        return hook

    parts = [model.root, *model.stages, model.norm, model.head]
    names = ["root", *(f"stage {i + 1}" for i in range(len(model.stages))), "norm", "head"]
    with torch.no_grad(), Counter().watch(model) as counter:
        handles = [part.register_forward_hook(after(index)) for index, part in enumerate(parts)]
        model(image)
        for handle in handles:
            handle.remove()
    return [Stage("image", tuple(image.shape)), *stages]
