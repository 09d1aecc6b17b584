"""Forked processes that form a process group: quick, because they have imported everything already."""

import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = 240  # seconds, on a busy machine


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_processes(function: Callable[..., None], world: int, *arguments: Any, per_host: int | None = None) -> None:
    """Run a function in `world` processes with the variables of torchrun, `per_host` on each "host"."""
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [
        context.Process(target=enter, args=(function, rank, world, per_host or world, port, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * world


def enter(
    function: Callable[..., None], rank: int, world: int, per_host: int, port: int, arguments: tuple[Any, ...]
) -> None:
    """Run the function as one of the processes, and exit without the interpreter's shutdown."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE - 10)  # where it hangs
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
