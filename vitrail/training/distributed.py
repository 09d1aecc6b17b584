"""Process groups, DDP and FSDP2: the only module that knows of them."""

import ctypes
import os
import signal
import sys
import threading
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

from vitrail.training.batch_norm import synchronise_batch_norm
from vitrail.utils.devices import pick_device
from vitrail.utils.slurm import adopt_step

Parallel = Literal["ddp", "fsdp"]
GROUP_TIMEOUT = timedelta(hours=6)  # the other processes wait while the main one audits a large dataset

# Groups that were left. The destructor of a Gloo group joins its threads; called with the GIL held, it waits for ever for
# a thread that needs the GIL to free a tensor. A traceback or DDP may hold the last reference, so it is held here instead.
_left_groups: list[Any] = []


@dataclass(frozen=True)
class Team:
    """This process and the others of its process group; a single process has no group."""

    rank: int
    world_size: int
    device: torch.device
    parallel: Parallel = "ddp"
    host_group: Any = None  # of tensors on the host; None for the default group

    @property
    def is_main(self) -> bool:
        """Return True if this process writes files and messages."""
        return self.rank == 0

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """Return the loss module wrapped in DDP or FSDP2: its gradients and batch statistics are those of all processes."""
        if self.world_size == 1:
            return loss_module
        synchronise_batch_norm(loss_module)
        if self.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.world_size,))
            for module in list(loss_module.modules()):  # of the model, a decoder, a momentum teacher
                for block in getattr(module, "blocks", ()):
                    fully_shard(block, mesh=mesh)
            fully_shard(loss_module, mesh=mesh)
            return loss_module
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(loss_module, device_ids=device_ids, broadcast_buffers=False)

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Synchronise gradients only with the last micro-batch."""
        if self.world_size > 1 and self.parallel == "fsdp":
            getattr(wrapped, "set_requires_gradient_sync")(last)  # noqa: B009
            yield
        else:
            accumulate = self.world_size > 1 and not last
            with getattr(wrapped, "no_sync")() if accumulate else nullcontext():  # noqa: B009
                yield

    @contextmanager
    def unsharded(self, loss_module: nn.Module) -> Iterator[None]:
        """Unshard all modules of the loss module, so that parts of it can be called."""
        from torch.distributed.fsdp import FSDPModule

        sharded = (
            [module for module in loss_module.modules() if isinstance(module, FSDPModule)]
            if self.world_size > 1
            else []
        )
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()

    def any_process(self, *flags: bool) -> tuple[bool, ...]:
        """Return each flag, true if it is true on any process."""
        if self.world_size == 1:
            return flags
        agreed = torch.tensor(flags, dtype=torch.int32)  # on the host: the device is not waited for
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.host_group)
        return tuple(bool(flag) for flag in agreed.tolist())

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self.world_size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        return self.all_reduce_sum(value) / self.world_size if self.world_size > 1 else value

    def broadcast_object(self, value: Any) -> Any:
        """Return the object of the main process on all."""
        if self.world_size == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, value)
        return objects

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a full one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree_on_group_name(store: Store, rank: int, world: int) -> str:
    """Return a name of the process group that the processes alive now have agreed on.

    When torchrun restarts workers it gives them the store of their predecessors, which still has the addresses of dead
    processes: a group of the same name may try to reach them. So the main process offers a new name, every other process
    signs it, and uses it once its signature is confirmed.
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


def stop_with_parent() -> None:
    """Let Linux send SIGTERM to this process when torchrun dies: it saves and stops instead of training on unattended."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        threading.Thread(target=exit_after_parent, args=(parent,), daemon=True).start()


def exit_after_parent(parent: int, seconds: float = 30.0) -> None:
    """End this process some seconds after its parent: a collective may wait for ever for a process that has stopped."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(seconds)
    os._exit(128 + signal.SIGTERM)


def count_processes() -> int:
    """Return the number of processes that torchrun started, or else `srun`, whose variables become those of torchrun."""
    adopt_step()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join_process_group(device: str = "auto", parallel: Parallel = "ddp") -> Iterator[Team]:
    """Join the process group of `torchrun`; a team of one without it."""
    world = count_processes()
    chosen = pick_device(device)
    if world == 1:
        yield Team(0, 1, chosen, parallel)
        return
    if chosen.type == "mps":
        raise ValueError("PyTorch does not support several processes on Metal: use device='cpu'")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    stop_with_parent()
    store, rank, world = next(rendezvous("env://", timeout=GROUP_TIMEOUT))
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=PrefixStore(agree_on_group_name(store, rank, world), store),
        rank=rank,
        world_size=world,
        timeout=GROUP_TIMEOUT,
    )
    _left_groups.append(dist.group.WORLD)
    try:
        hosts = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if chosen.type == "cuda" else None
        yield Team(dist.get_rank(), world, chosen, parallel, hosts)
        dist.barrier()  # no process leaves while another still writes
    finally:
        dist.destroy_process_group()
        time.sleep(0.01)  # releases the GIL: the group's threads free the tensors of the last collectives
