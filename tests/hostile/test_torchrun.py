"""Processes whose torchrun is killed save and stop; resumed, they end as if they had been left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import assert_same, environment, newest

TRAIN = (
    *("--batch-size", "32", "--steps", "400", "--save-seconds", "0.2", "--workers", "0", "--device", "cpu"),
    *("--set", "model.size.depth=1", "--set", "model.size.width=16", "--set", "model.size.heads=2"),
    *("--set", "model.size.mlp=32", "--set", "ema=EMA"),
)
SECONDS = 300  # on a busy machine
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died"),
]


def start(tmp: Path, *arguments: str) -> subprocess.Popen:
    """Start two training processes; they write to a file, which a killed torchrun does not close."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "vitrail"]
    with open(tmp / "log", "a") as log:
        return subprocess.Popen([*program, "train", *arguments], cwd=tmp, env=environment(tmp), stdout=log, stderr=log)


def finish(tmp: Path, *arguments: str) -> None:
    assert start(tmp, *arguments).wait(SECONDS) == 0, (tmp / "log").read_text()


def list_children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_until(holds, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_workers_of_a_killed_torchrun_save_stop_and_resume(tmp_path: Path) -> None:
    finish(tmp_path, "digits", "--out", "alone", *TRAIN)
    run = tmp_path / "run"
    torchrun = start(tmp_path, "digits", "--out", "run", *TRAIN)
    wait_until(lambda: newest(run) > 0 or torchrun.poll() is not None)
    workers = list_children(torchrun.pid)
    assert len(workers) == 2, (tmp_path / "log").read_text()
    os.kill(torchrun.pid, signal.SIGKILL)
    torchrun.wait()
    wait_until(lambda: not any(map(is_running, workers)))
    stopped_at = newest(run)
    assert 0 < stopped_at < 400
    assert not list(run.rglob("*.partial"))
    finish(tmp_path, "--resume", "run")
    assert_same(run, tmp_path / "alone")
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()
