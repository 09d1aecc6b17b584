"""A real SLURM: jobs that are signalled, preempted and requeued end as if nothing had happened.

    make test-cluster

starts a cluster of two nodes on this host (`cluster.py`). Skipped where SLURM is not installed.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, missing_requirement, wait_until
from tests.training.runs import SMALL, assert_same, command, environment, newest, trained
from tests.training.test_distributed import run as torchrun

MISSING = missing_requirement()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]
STEPS = 60
LENGTH = ("--steps", str(STEPS), "--save-seconds", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a place 100% shared")  # for quotes and %-signs in the script


def submit(cluster: Cluster, tmp: Path, slurm: str, *arguments: str) -> str:
    """Write a script with `--slurm`, submit it and return the number of the job."""
    done = subprocess.run(
        [*command(verb=arguments[0]), *arguments[1:], "--slurm", slurm, "--submit", "--json"],
        cwd=tmp,
        env=environment(tmp) | cluster.environment | {"XDG_CACHE_HOME": str(tmp / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job"]


def read_log(tmp: Path, run: str) -> str:
    log = tmp / f"{run}.slurm.log"
    return log.read_text() if log.exists() else ""


def hold(cluster: Cluster, tmp: Path, run: str, processes: int = 1) -> None:
    """Stop the processes of a run in the middle, so that it does not end too soon; SLURM wakes them with its signals."""
    wait_until(lambda: newest(tmp / run) >= 10, 200, lambda: f"{cluster.describe()}\n{read_log(tmp, run)}", 0.02)
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")
            here = os.readlink(path.with_name("cwd")) == str(tmp.resolve())  # not a run of the same name elsewhere
            if here and b"vitrail" in words and run.encode() in words and b"srun" not in words[0]:
                found.append(int(path.parent.name))
    assert len(found) == processes
    for process in found:
        os.kill(process, signal.SIGSTOP)
    assert newest(tmp / run) < STEPS


def wait(cluster: Cluster, tmp: Path, job: str, run: str, seconds: float = 300) -> dict[str, str]:
    """Wait for the end of a job, print its log, and return its state."""
    state = cluster.wait_for_end(job, seconds)
    print(read_log(tmp, run))
    print({name: state.get(name) for name in ("JobState", "Restarts", "ExitCode", "NodeList", "NumTasks")})
    return state


def test_a_job_is_signalled_before_its_time_limit_and_requeued(cluster: Cluster, tmp: Path) -> None:
    trained(tmp, "digits", "--out", "whole", *SMALL, *LENGTH)
    job = submit(cluster, tmp, "time=20,signal=100", "train", "digits", "--out", "limited", *SMALL, *LENGTH)
    hold(cluster, tmp, "limited")
    # One to two minutes are left then. SLURM looks every 30 seconds whether it has to signal before its next look.
    hours, minutes, _ = (int(part) for part in cluster.state(job)["RunTime"].split(":"))
    cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    wait_until(lambda: cluster.state(job)["Restarts"] == "1", 120, cluster.describe)
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    state = wait(cluster, tmp, job, "limited")
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1")
    log = read_log(tmp, "limited")
    assert "stopped by SIGUSR1" in log
    assert "resuming at step" in log
    assert_same(tmp / "limited", tmp / "whole")
    assert (tmp / "limited/model.safetensors").read_bytes() == (tmp / "whole/model.safetensors").read_bytes()


def test_two_tasks_on_two_nodes_are_preempted_and_end_as_under_torchrun(cluster: Cluster, tmp: Path) -> None:
    torchrun(tmp, 2, "digits", "--out", "torchrun", *SMALL, *LENGTH)
    job = submit(cluster, tmp, "nodes=2,time=20,partition=low", "train", "digits", "--out", "pair", *SMALL, *LENGTH)
    hold(cluster, tmp, "pair", processes=2)
    urgent = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert cluster.wait_for_end(cluster.ask("sbatch", "--parsable", *urgent), 90)["JobState"] == "COMPLETED"
    state = wait(cluster, tmp, job, "pair")
    assert (state["JobState"], state["Restarts"], state["NumTasks"]) == ("COMPLETED", "1", "2")
    log = read_log(tmp, "pair")
    assert "stopped by SIGTERM" in log
    assert "resuming at step" in log
    assert json.loads((tmp / "pair/run.json").read_text())["environment"]["processes"] == 2
    assert_same(tmp / "pair", tmp / "torchrun")
    assert (tmp / "pair/model.safetensors").read_bytes() == (tmp / "torchrun/model.safetensors").read_bytes()


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp: Path) -> None:
    job = submit(cluster, tmp, "time=20", "train", "digits", "--out", "cancelled", *SMALL, *LENGTH)
    hold(cluster, tmp, "cancelled")
    cluster.ask("scancel", job)
    assert wait(cluster, tmp, job, "cancelled", 60)["JobState"] == "CANCELLED"
    wait_until(lambda: "stopped by SIGTERM" in read_log(tmp, "cancelled"), 30, lambda: read_log(tmp, "cancelled"))
    wait_until(lambda: not cluster.ask("squeue", "-h"), 30, cluster.describe)  # no job is completing or pending


def test_the_cells_of_a_study_are_a_job_array(cluster: Cluster, tmp: Path) -> None:
    study = ("paper", "run", "head", "--scale", "test", "--out", "study")
    job = submit(cluster, tmp, "array=2,time=20", *study)
    numbers = [f"{job}_{task}" for task in (1, 2)]
    for number in numbers:
        assert cluster.wait_for_end(number, 300)["JobState"] == "COMPLETED"
    logs = [(tmp / f"study.slurm-{task}.log").read_text() for task in (1, 2)]
    print(*logs, sep="\n----\n")
    cells = [re.findall(r"^ +\d+/\d+  (.+?)  +validation", log, re.MULTILINE) for log in logs]
    assert len(cells[0] + cells[1]) == len({*cells[0], *cells[1]}) == 6  # each cell was run once
    assert (tmp / "study/report.html").is_file()
