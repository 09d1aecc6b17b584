"""Several runners on one machine: processes of the same command, which tell this one what they hear."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from vitrail.engine.journal import Listener

# A cell is computed by one process, whoever started it together with others.
TOGETHER = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def by_itself() -> None:
    """Leaves the group that torchrun would have this process join; LOCAL_RANK stays, which says whose GPU is whose."""
    for name in TOGETHER:
        os.environ.pop(name, None)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(number: int, jobs: int) -> dict[str, str]:
    """Of one of so many processes: its share of the cores, and a GPU where there are some."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores() // jobs)
    threads = str(min(share, int(told)) if told.isdecimal() and int(told) else share)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        os.environ
        | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        | ({"LOCAL_RANK": str(number % gpus)} if gpus else {})
    )


def run_jobs(command: Sequence[str], jobs: int, hear: Listener) -> list[int]:
    """Runs so many of this command to their end, and gives their exit codes. Whatever ends this ends them, with all saved."""
    heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
    workers: list[subprocess.Popen[str]] = []
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        for number in range(jobs):
            workers.append(_start(command, environment(number, jobs)))
            threading.Thread(target=_listen, args=(workers[-1], heard), daemon=True).start()
        left = jobs
        while left:
            record = heard.get()
            if record is None:
                left -= 1
            else:
                hear(record)
        return [worker.wait() for worker in workers]
    except BaseException:
        _stop(workers)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def tell(record: dict[str, Any]) -> None:
    """What a worker hears, as a line for the process that started it. Without that one it stops, as if asked to."""
    try:
        print(json.dumps(record, default=str), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end)
        os.kill(os.getpid(), signal.SIGTERM)


def _start(command: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    """A process in a session of its own: Ctrl-C reaches the one that started it, which then stops each of them once."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def _listen(worker: "subprocess.Popen[str]", heard: "queue.Queue[dict[str, Any] | None]") -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        heard.put(record if isinstance(record, dict) else {"kind": "note", "text": line.rstrip()})
    worker.wait()
    heard.put(None)


def _stop(workers: Sequence["subprocess.Popen[str]"]) -> None:
    """Asks all to stop after the step that they are at; a second Ctrl-C does not wait for that."""
    for worker in workers:
        worker.terminate()
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
