"""Memory, communication and time of a training on many GPUs, computed from the cost of the model.

P parameters, N GPUs, G in a host, H = N/G hosts. Weights, gradients, Adam's two moments and the EMA are 32-bit floats, as the
trainer has them; under autocast (bf16, fp16) the products also keep a 16-bit copy of each weight until the backward pass.
Collectives are counted as rings: an all-gather or reduce-scatter of B bytes sends B·(N-1)/N from each GPU, an all-reduce twice
as much, and as much crosses the network from each host. Nothing is measured here.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vitrail.models.base import ModelConfig
from vitrail.models.flops import FLOAT, count

FLOPS_PER_MAC = 6  # a multiply-add is 2, the backward pass costs twice the forward pass
AUTOCAST_ACTIVATIONS = 0.64  # of the bytes in fp32, of a ViT: products keep 16 bits, residual stream and norms 32
LAYOUTS = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class Cluster:
    """GPUs, the batch that they share, and what is assumed of them."""

    gpus: int = 8
    gpus_per_host: int = 8
    batch_size: int = 1024  # images of a step, on all GPUs
    accumulate: int = 1
    precision: str = "bf16"
    ema: bool = True
    tflops: float | None = None  # published peak of a GPU
    utilisation: float = 0.4  # assumed share of the peak
    network: float | None = None  # GB/s that a host sends
    images: int | None = None  # of an epoch
    epochs: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_host", "batch_size", "accumulate", "tflops", "network", "images", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation must be > 0 and <= 1, got {self.utilisation}")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"precision must be fp32, bf16 or fp16, got {self.precision}")
        if self.gpus % self.host_size:
            raise ValueError(f"{self.gpus} GPUs cannot be divided by gpus_per_host={self.gpus_per_host}")
        if self.batch_size % (self.gpus * self.accumulate):
            parts = f"{self.gpus} GPUs" + (f" and accumulate={self.accumulate}" if self.accumulate > 1 else "")
            raise ValueError(f"batch_size={self.batch_size} cannot be divided by {parts}")

    @property
    def host_size(self) -> int:
        """Return G, the GPUs of a host."""
        return min(self.gpus_per_host, self.gpus)

    @property
    def local_batch(self) -> int:
        """Return the images that a GPU computes at a time."""
        return self.batch_size // (self.gpus * self.accumulate)


@dataclass(frozen=True)
class LayoutCost:
    """Bytes of one GPU, and bytes that it and its host send in a step, with one layout of the weights."""

    layout: str
    weights: int
    gradients: int
    moments: int
    ema: int
    working: int  # DDP's buckets, or the layers that FSDP has put together; 16-bit copies under autocast
    activations: int
    sent_by_gpu: int
    sent_by_host: int  # to other hosts
    network_seconds: float | None

    @property
    def total(self) -> int:
        """Return the memory of a GPU, without the CUDA context, the allocator's gaps and the inputs."""
        return self.weights + self.gradients + self.moments + self.ema + self.working + self.activations


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a training of one model on a cluster."""

    cluster: Cluster
    parameters: int
    flops_per_image: int  # forward and backward
    step_seconds: float | None  # at the assumed share of the peak
    images_per_second: float | None
    steps: int | None
    hours: float | None
    layouts: tuple[LayoutCost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        layouts = [asdict(layout) | {"total": layout.total} for layout in self.layouts]
        return asdict(self) | {"local_batch": self.cluster.local_batch, "layouts": layouts}


def estimate_training(config: ModelConfig, cluster: Cluster) -> TrainingCost:
    """Return the cost of training a model on a cluster."""
    cost = count(config, cluster.local_batch)
    flops = FLOPS_PER_MAC * cost.macs // cluster.local_batch
    step = images = steps = hours = None
    if cluster.tflops is not None:
        step = flops * cluster.batch_size / (cluster.gpus * cluster.tflops * 1e12 * cluster.utilisation)
        images = cluster.batch_size / step
    if cluster.images is not None:
        steps = max(1, round(cluster.epochs * (cluster.images // cluster.batch_size)))
        hours = None if step is None else steps * step / 3600
    blocks = [stage.params for stage in cost.stages if stage.name.startswith("layer ")]
    largest = max(blocks, default=cost.params)
    # Weights of a block and of the next one, gradients of one. What is no block stays together until the backward pass.
    gathered = FLOAT * (3 * largest + cost.params - sum(blocks))
    autocast = cluster.precision != "fp32"
    activations = round(cost.activation_bytes * (AUTOCAST_ACTIVATIONS if autocast else 1))
    layouts = tuple(estimate_layout(layout, cluster, cost.params, gathered, activations) for layout in LAYOUTS)
    return TrainingCost(cluster, cost.params, flops, step, images, steps, hours, layouts)


def estimate_layout(layout: str, cluster: Cluster, params: int, gathered: int, activations: int) -> LayoutCost:
    """Return the memory and the communication of one layout of the weights."""
    n, g = cluster.gpus, cluster.host_size
    hosts, whole = n // g, FLOAT * params
    shards = {"ddp": 1, "fsdp": n, "hsdp": g}[layout]
    share = -(-whole // shards)
    working = 0 if n == 1 else whole if layout == "ddp" else gathered
    if cluster.precision != "fp32":
        working += whole // 2
    reduce_scatter, all_reduce = ring(whole, shards), 2 * ring(share, n // shards)
    gathers = 2 * cluster.accumulate * ring(whole, shards)  # forward and backward, of each micro-batch
    sent_by_gpu = gathers + reduce_scatter + all_reduce
    # A ring crosses the network once in each host; with hsdp each GPU of a host has a ring of its own for its share.
    crossing = 0 if hosts == 1 else g * all_reduce if layout == "hsdp" else sent_by_gpu
    seconds = None if cluster.network is None else crossing / (cluster.network * 1e9)
    ema = share if cluster.ema else 0
    return LayoutCost(layout, share, share, 2 * share, ema, working, activations, sent_by_gpu, crossing, seconds)


def ring(nbytes: int, members: int) -> int:
    """Return the bytes that each member of a ring sends to gather or to scatter so many."""
    return nbytes * (members - 1) // members
