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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from vitrail.training.batch_norm import synchronise_batch_norm
from vitrail.training.heartbeat import Heartbeat, first_beat, heartbeat_key
from vitrail.utils.devices import pick_device
from vitrail.utils.slurm import adopt_step

Parallel = Literal["ddp", "fsdp", "hsdp"]
GROUP_TIMEOUT = timedelta(hours=6)  # the other processes wait while the main one audits a large dataset
JOIN_TIMEOUT = timedelta(minutes=10)  # between the start of the first process and that of the last

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
    shard_size: int | None = None  # processes that share one copy of the model, with hsdp

    @property
    def is_main(self) -> bool:
        """Return True if this process writes files and messages."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Return True if a process has only a part of each weight."""
        return self.world_size > 1 and self.parallel != "ddp"

    @property
    def has_buckets(self) -> bool:
        """Return True if gradients are added in an order that DDP chooses; two numbers have one sum."""
        return self.world_size > 2 and self.parallel == "ddp"

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """Return the loss module wrapped in DDP or FSDP2: its gradients and batch statistics are those of all processes."""
        if self.world_size == 1:
            return loss_module
        synchronise_batch_norm(loss_module)
        if self.is_sharded:
            from torch.distributed.fsdp import fully_shard

            mesh = self.build_mesh()
            for module in list(loss_module.modules()):  # of the model, a decoder, a momentum teacher
                for block in getattr(module, "blocks", ()):
                    fully_shard(block, mesh=mesh)
            fully_shard(loss_module, mesh=mesh)
            return loss_module
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(loss_module, device_ids=device_ids, broadcast_buffers=False)

    def build_mesh(self) -> DeviceMesh:
        """Return the mesh that shards the model: one row of all processes, or with hsdp a row for each copy of the model."""
        if self.shard_size is None or self.parallel != "hsdp":
            return init_device_mesh(self.device.type, (self.world_size,))
        rows = torch.arange(self.world_size).view(-1, self.shard_size)
        groups: list[Any] = [  # those of `init_device_mesh` would have PyTorch's timeout
            dist.new_subgroups_by_enumeration(lists, timeout=GROUP_TIMEOUT)[0]
            for lists in (rows.T.tolist(), rows.tolist())
        ]
        _left_groups.extend(groups)
        return DeviceMesh.from_group(groups, self.device.type, rows, mesh_dim_names=("replicate", "shard"))

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Synchronise gradients only with the last micro-batch."""
        if self.is_sharded:
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
        store.set(heartbeat_key(name, 0), first_beat())
        store.set("vitrail-offer", name)
        signatures = [store.get(f"{name}-signed-{other}").decode() for other in range(1, world)]
        store.set(f"{name}-confirmed", " ".join(signatures))
        return name
    mine = uuid4().hex
    while True:
        name = store.get("vitrail-offer").decode()
        store.set(heartbeat_key(name, rank), first_beat())
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


def choose_shard_size(parallel: Parallel, given: int | None, world: int) -> int | None:
    """Return the number of processes that share one copy of the model: those of a host, unless another number is given."""
    if parallel != "hsdp":
        if given is not None:
            raise ValueError(f"shard_size={given} is for parallel='hsdp': leave it out with parallel={parallel!r}")
        return None
    size = given or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % size:
        found = "" if given else ", the processes of this host"
        raise ValueError(f"{world} processes cannot be divided by shard_size={size}{found}: give shard_size=")
    return size


@contextmanager
def join_process_group(
    device: str = "auto", parallel: Parallel = "ddp", shard_size: int | None = None, lost_after: float = 60.0
) -> Iterator[Team]:
    """Join the process group of `torchrun` or `srun`; a team of one without it.

    With parallel="hsdp", each group of `shard_size` consecutive processes shares one copy of the model [the processes of a
    host]. A process of which nothing is heard for `lost_after` seconds ends all others.
    """
    world = count_processes()
    chosen = pick_device(device)
    if world == 1:
        yield Team(0, 1, chosen, parallel)
        return
    if chosen.type == "mps":
        raise ValueError("PyTorch does not support several processes on Metal: use device='cpu'")
    shard_size = choose_shard_size(parallel, shard_size, world)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    stop_with_parent()
    store, rank, world = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
    name = agree_on_group_name(store, rank, world)
    heartbeat = Heartbeat(store, name, rank, world, lost_after)
    store.set_timeout(GROUP_TIMEOUT)
    try:
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=GROUP_TIMEOUT,
        )
        _left_groups.append(dist.group.WORLD)
        hosts = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if chosen.type == "cuda" else None
        team = Team(dist.get_rank(), world, chosen, parallel, hosts, shard_size)
        if len(set(team.gather_objects((parallel, shard_size)))) > 1:
            raise ValueError("the processes have different parallel= or shard_size=: give the same to all")
        yield team
        dist.barrier()  # no process leaves while another still writes
    finally:
        heartbeat.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
        time.sleep(0.01)  # releases the GIL: the group's threads free the tensors of the last collectives
