"""Several processes train one model: the same result as one, sharded or copied, and after a process dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.training.runs import environment, last, newest, summary, train, trained

# Without stochastic depth: what modules draw is drawn by each process for itself.
SMALL = ("--batch-size", "32", "--set", "model.size.depth=2", "--set", "ema=EMA", "--steps", "24")
# An optimiser that would show it if gradients were summed instead of averaged.
PLAIN = ("--set", "optimizer=SGD", "--set", "optimizer.lr=0.05")
LINEAR = (*PLAIN, "--set", "model.embed=Patches")  # without ReLU, whose gradient jumps: many steps stay near
pytestmark = pytest.mark.slow


def torchrun(tmp: Path, processes: int, *arguments: str, restarts: int = 0, verb: str = "train") -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        "-m",
        "vitrail",
        verb,
        *arguments,
    ]


def run(tmp: Path, processes: int, *arguments: str, verb: str = "train") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        torchrun(tmp, processes, *arguments, verb=verb),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp,
        env=environment(tmp),
    )
    assert done.returncode == 0, done.stderr
    return done


LEAVING = """
import atexit
from vitrail.__main__ import exit_process

class Held:
    def __del__(self):
        print("taken apart")

held = Held()
atexit.register(print, "written")
exit_process(3)
"""


def test_one_of_several_processes_exits_after_writing_everything():
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (3, "written\n", "")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(tmp: Path) -> Path:
    trained(tmp, "digits", "--out", "alone", *SMALL, *LINEAR)
    return tmp / "alone"


def assert_near(run: Path, other: Path) -> None:
    """Equal but for the order in which numbers were added."""
    ours, theirs = last(run), last(other)
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_two_processes_train_with_muon_and_batch_statistics(tmp: Path) -> None:
    """The default recipe: matrices are put together to be orthogonalised."""
    run(tmp, 2, "digits", "--out", "muon", "--parallel", "fsdp", *SMALL, "--steps", "60")
    assert summary(tmp / "muon")["top1"] > 0.5


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_result_of_one(tmp: Path, alone: Path, parallel: str) -> None:
    run(tmp, 2, "digits", "--out", parallel, "--parallel", parallel, *SMALL, *LINEAR)
    assert_near(tmp / parallel, alone)
    assert len(list((tmp / parallel / "checkpoints" / f"step-{newest(tmp / parallel):08d}").glob("*.distcp"))) == 2
    assert (tmp / parallel / "report.html").is_file()


def test_batch_statistics_are_those_of_both_processes(tmp: Path) -> None:
    options = (*SMALL, *PLAIN, "--steps", "4")  # the last one counts
    trained(tmp, "digits", "--out", "stem-alone", *options)
    run(tmp, 2, "digits", "--out", "stem", *options)
    assert_near(tmp / "stem", tmp / "stem-alone")


def test_two_processes_train_on_videos_as_one(tmp: Path) -> None:
    options = ("moving-digits:64", *SMALL, *PLAIN, "--steps", "4")  # the last one counts
    trained(tmp, *options, "--out", "clips-alone")
    run(tmp, 2, *options, "--out", "clips")
    assert_near(tmp / "clips", tmp / "clips-alone")


def test_run_of_two_resumes_on_one(tmp: Path, alone: Path) -> None:
    first = ("--set", "schedule=Constant", "--set", "validate_every=0.25")
    trained(tmp, "digits", "--out", "one", *SMALL, *LINEAR, *first)
    process = subprocess.Popen(
        torchrun(tmp, 2, "digits", "--out", "two", "--parallel", "fsdp", *SMALL, *LINEAR, *first),
        cwd=tmp,
        env=environment(tmp),
        stderr=subprocess.DEVNULL,
    )
    wait_for(tmp / "two", 10, process)
    for worker in (process.pid, *workers(process)):
        os.kill(worker, signal.SIGKILL)
    process.wait(30)
    stood = newest(tmp / "two")
    assert 10 <= stood < 24
    done = trained(tmp, "--resume", "two")
    assert f"resuming at step {stood}" in done.stderr
    assert_near(tmp / "two", tmp / "one")


def test_killed_worker_is_restarted_and_the_run_ends_with_the_same_weights(tmp: Path, alone: Path) -> None:
    frequent = ("--save-seconds", "0")
    run(tmp, 2, "digits", "--out", "pair", *SMALL, *LINEAR)
    with (tmp / "hurt.err").open("w") as said:
        process = subprocess.Popen(
            torchrun(tmp, 2, "digits", "--out", "hurt", *SMALL, *LINEAR, *frequent, restarts=1),
            cwd=tmp,
            env=environment(tmp),
            stderr=said,
        )
        wait_for(tmp / "hurt", 5, process)
        os.kill(workers(process)[1], signal.SIGKILL)
        assert process.wait(240) == 0, (tmp / "hurt.err").read_text()
    ours, theirs = last(tmp / "hurt"), last(tmp / "pair")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp / "hurt" / "metrics.jsonl").read_bytes() == (tmp / "pair" / "metrics.jsonl").read_bytes()


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that torchrun started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == process.pid:
            found.append(int(status.parent.name))
    assert len(found) == 2
    return sorted(found)


def wait_for(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic()
    while newest(run) < step:
        assert process.poll() is None, "ended too soon"
        assert time.monotonic() - begin < 120
        time.sleep(0.02)


def test_several_processes_need_an_output_directory(tmp: Path) -> None:
    done = train(
        tmp, "digits", *SMALL, WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_RANK="0"
    )
    assert done.returncode == 2
    assert "--out" in done.stderr
