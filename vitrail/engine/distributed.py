"""The processes that train one model together: the one place that knows of process groups, DDP and FSDP2."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from vitrail.engine.devices import pick_device

Parallel = Literal["ddp", "fsdp"]
PATIENCE = timedelta(hours=6)  # others wait while the first process checks a large dataset


@dataclass(frozen=True)
class Team:
    """This process and those it trains with; a team of one needs no process group."""

    rank: int
    world: int
    device: torch.device
    parallel: Parallel = "ddp"

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes logs and talks to people."""
        return self.rank == 0

    def wrap(self, task: nn.Module) -> nn.Module:
        """The task as it is called in training: its gradients are those of the whole batch."""
        if self.world == 1:
            return task
        if self.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.world,))
            for module in list(task.modules()):  # the model's layers, and those of a decoder or a teacher
                for block in getattr(module, "blocks", ()):
                    fully_shard(block, mesh=mesh)
            fully_shard(task, mesh=mesh)
            return task
        places = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(task, device_ids=places, broadcast_buffers=False)

    @contextmanager
    def gathering(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Gradients are exchanged with the last part of a batch only."""
        if self.world > 1 and self.parallel == "fsdp":
            getattr(wrapped, "set_requires_gradient_sync")(last)  # noqa: B009 (a method that fully_shard adds)
            yield
        else:
            apart = self.world > 1 and not last
            with getattr(wrapped, "no_sync")() if apart else nullcontext():  # noqa: B009
                yield

    @contextmanager
    def gathered(self, task: nn.Module) -> Iterator[None]:
        """Parts of the task can be called by themselves: shards are put together for as long as it lasts."""
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in task.modules() if isinstance(module, FSDPModule)] if self.world > 1 else []
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()

    def share_buffers(self, task: nn.Module) -> None:
        """Running statistics, which each process took of its own part, become their mean on all."""
        if self.world > 1:
            for buffer in task.buffers():
                if buffer.is_floating_point() and buffer.numel():
                    dist.all_reduce(buffer)
                    buffer.div_(self.world)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, raised for all if it is raised for one."""
        if self.world == 1:
            return flags
        agreed = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in agreed.tolist())

    def mean(self, value: Tensor) -> Tensor:
        """A number's mean over the processes."""
        if self.world == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    def said_by_first(self, value: Any) -> Any:
        """What the first process says, for all."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def everybody(self, value: Any) -> list[Any]:
        """What each process says, in order."""
        if self.world == 1:
            return [value]
        boxes: list[Any] = [None] * self.world
        dist.all_gather_object(boxes, value)
        return boxes

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, put together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agreed_name(store: Store, rank: int, world: int) -> str:
    """A name for the group that exactly the processes alive now have agreed on.

    When torchrun starts workers again it hands them the store of their predecessors, in which the addresses of the
    dead still stand: a group by the same name may try to reach them. So the first process offers a new name, every
    other one signs it, and it holds for whoever finds its own signature confirmed.
    """
    if rank == 0:
        name = f"vitrail-{uuid4().hex}"
        store.set("vitrail-offer", name)
        signatures = [store.get(f"{name}-signed-{other}").decode() for other in range(1, world)]
        store.set(f"{name}-confirmed", " ".join(signatures))
        return name
    mine = uuid4().hex
    while True:
        name = store.get("vitrail-offer").decode()
        store.set(f"{name}-signed-{rank}", mine)
        while store.get("vitrail-offer").decode() == name:
            if store.check([f"{name}-confirmed"]) and mine in store.get(f"{name}-confirmed").decode().split():
                return name
            time.sleep(0.05)


@contextmanager
def joined(device: str = "auto", parallel: Parallel = "ddp") -> Iterator[Team]:
    """The team that `torchrun` started this process in; a team of one without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    place = pick_device(device)
    if world == 1:
        yield Team(0, 1, place, parallel)
        return
    if place.type == "mps":
        raise ValueError("several processes on Metal are not supported by PyTorch: use --device cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=PrefixStore(agreed_name(store, rank, world), store),
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    try:
        yield Team(dist.get_rank(), world, place, parallel)
    finally:
        dist.destroy_process_group()
