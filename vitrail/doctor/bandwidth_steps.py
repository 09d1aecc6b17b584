"""Steps of the self-test that measure bandwidth: between processes, and between host and GPU.

`python -m vitrail.doctor.bandwidth_steps DEVICE SECONDS` is one of two local processes.
"""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.doctor.worker import Context, last_line
from vitrail.training.distributed import Team, join_process_group
from vitrail.utils.devices import synchronise
from vitrail.utils.precision import measure_interleaved

REDUCED_BYTES = {"1 MB": 2**20, "25 MB": 25 * 2**20}  # 25 MB: a bucket of DDP
COPIED_BYTES = 64 * 2**20


def measure_collectives(context: Context) -> tuple[str, dict[str, Any]]:
    """Return the bandwidth of all_reduce: over the processes of torchrun or srun if this is one, else over two local ones."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with join_process_group("auto") as team:
            return describe_collectives(measure_reduction(team, context.seconds))
    backend = "cuda" if context.device.startswith("cuda") and torch.cuda.device_count() > 1 else "cpu"
    context.report("starting two processes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "vitrail.doctor.bandwidth_steps", backend, str(context.seconds)]
    threads = {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | group | threads | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a process ended with exit code {process.returncode}: {last_line(errors)}")
    return describe_collectives(json.loads(outputs[0][0].splitlines()[-1]))


def describe_collectives(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a sentence on measured collectives, and their values."""
    speeds = ", ".join(f"{size} {speed:.2f} GB/s" for size, speed in values["gigabytes_per_second"].items())
    latency = f"latency {values['latency_us']:,.0f} µs"
    return f"{values['processes']} processes with {values['backend']}: {speeds}, {latency}", values


def measure_reduction(team: Team, seconds: float) -> dict[str, Any]:
    """Return the bus bandwidth of all_reduce by size, and the latency of a single number."""
    speeds: dict[str, float] = {}
    share = 2 * (team.world_size - 1) / team.world_size  # of the bytes, that each process sends
    for name, nbytes in REDUCED_BYTES.items():
        speeds[name] = 1e-9 * share * nbytes / time_reduction(team, nbytes, seconds / 3)
    latency = 1e6 * time_reduction(team, 4, seconds / 3)
    facts = {"processes": team.world_size, "backend": dist.get_backend(), "device": team.device.type}
    return facts | {"gigabytes_per_second": speeds, "latency_us": latency}


def time_reduction(team: Team, nbytes: int, seconds: float) -> float:
    """Return the seconds of an all_reduce; all processes do as many. Raise AssertionError for a wrong sum."""
    values = torch.full((nbytes // 4,), float(team.rank + 1), device=team.device)
    start = time.perf_counter()
    dist.all_reduce(values)
    synchronise(team.device)
    expected = team.world_size * (team.world_size + 1) / 2
    if not bool((values == expected).all()):
        raise AssertionError(f"all_reduce of {team.world_size} processes gave {float(values[0])}, expected {expected}")
    values.zero_()
    count = team.broadcast_object(max(2, min(2000, int(seconds / (time.perf_counter() - start)))))
    team.barrier()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(values)
    synchronise(team.device)
    return (time.perf_counter() - start) / count


def measure_copies(context: Context) -> tuple[str, dict[str, Any]]:
    """Return the bandwidth of copies between host and GPU, from pageable and from pinned memory, in GB/s."""
    device = torch.device(context.device)
    host, pinned = torch.ones(COPIED_BYTES, dtype=torch.uint8), torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    there = host.to(device)

    def copy(source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        synchronise(device)

    runs = {"host to device": lambda: copy(host, there), "pinned host to device": lambda: copy(pinned, there)}
    runs["device to pinned host"] = lambda: copy(there, pinned)
    taken = measure_interleaved(runs, context.seconds)
    speeds = {name: 1e-9 * COPIED_BYTES / seconds for name, seconds in taken.items()}
    return ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items()), {"gigabytes_per_second": speeds}


def main() -> None:
    """Measure collectives as one of two processes; the first prints the values."""
    with join_process_group(sys.argv[1]) as team:
        values = measure_reduction(team, float(sys.argv[2]))
        if team.is_main:
            print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of the process group would abort during the interpreter's shutdown
