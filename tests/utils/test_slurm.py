"""Tasks of srun: host lists, variables as SLURM 22.05 sets them, and what stays a single process."""

import re
import signal
import subprocess
import sys

import pytest

from vitrail.cli import main
from vitrail.utils import slurm
from vitrail.utils.devices import available_cores, count_cores
from vitrail.utils.slurm import REQUEUE_CODE, adopt_step, expand_hostlist, read_step, stop_code

# The last of four tasks on two nodes, and the batch script that called srun.
TASK = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
BATCH = {name: value for name, value in TASK.items() if "STEP" not in name} | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login2", "login2"),
        ("gpu[001-004,007],login2", "gpu001 gpu002 gpu003 gpu004 gpu007 login2"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-102]", "n098 n099 n100 n101 n102"),
        ("rack[1-2]-n[01,3]-ib", "rack1-n01-ib rack1-n3-ib rack2-n01-ib rack2-n3-ib"),
        ("a1,b[2],c", "a1 b2 c"),
        ("127.0.0.[1-2]", "127.0.0.1 127.0.0.2"),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text",
    ["", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "a,,b", "n[[1]]", "n[1-]", "n[1-99999999]", "n[1-400]" * 2],
)
def test_broken_host_lists_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="host list") as caught:
        expand_hostlist(text)
    assert "\n" not in str(caught.value)


def test_a_task_of_srun_gets_the_variables_of_torchrun() -> None:
    environment = dict(TASK)
    adopt_step(environment)
    added = {name: value for name, value in environment.items() if name not in TASK}
    assert added.pop("MASTER_PORT").isdecimal()
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert added == ranks | {"MASTER_ADDR": "node1"}


def test_ports_are_those_of_the_job_and_step() -> None:
    def port(**changes: str) -> int:
        step = read_step(TASK | changes)
        assert step is not None
        assert 10_000 <= step.port < 30_000
        return step.port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_JOB_ID="2"), port(SLURM_STEP_ID="1")}) == 3
    assert port(SLURM_JOB_ID="4294967295")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,  # a batch script without srun
        BATCH | {"SLURM_NTASKS": "1"},
        TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        TASK
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # --preserve-env keeps SLURM_NTASKS of the allocation
        TASK | {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        TASK | {"SLURM_PTY_PORT": "4711"},  # srun --pty
        TASK | {"RANK": "0", "WORLD_SIZE": "1"},  # torchrun, or a cell of a study
    ],
)
def test_others_stay_single_processes(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt_step(environment)
    assert environment == before


def test_variables_of_torchrun_win() -> None:
    environment = TASK | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    before = dict(environment)
    adopt_step(environment)
    assert environment == before


def test_address_and_port_of_the_batch_script_are_kept() -> None:
    environment = TASK | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    adopt_step(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == ("head", "29500", "3")


def test_one_node_uses_the_loopback_address_and_a_bound_gpu_is_the_first() -> None:
    one = {"SLURM_STEP_NODELIST": "gpu007", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"}
    environment = TASK | one | {"CUDA_VISIBLE_DEVICES": "3"}
    adopt_step(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("0", "4")
    environment = TASK | one | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    adopt_step(environment)
    assert environment["LOCAL_RANK"] == "3"


def test_nodes_may_have_different_numbers_of_tasks() -> None:
    uneven = {"SLURM_STEP_NODELIST": "a[1-3]", "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    counts = [read_step(TASK | uneven | {"SLURM_NODEID": str(node)}) for node in range(3)]
    assert [step and step.local_tasks for step in counts] == [4, 4, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' must be a whole number"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 must be < 4"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "host list 'n[1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "SLURM_STEP_TASKS_PER_NODE='2(y2)'"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 has no entry"),
    ],
)
def test_broken_variables_are_one_line(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        adopt_step(TASK | changes)
    assert "\n" not in str(caught.value)


def test_every_command_is_a_task_of_srun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in (TASK | {"SLURM_PROCID": "x"}).items():
        monkeypatch.setenv(name, value)
    assert main(["recipes"]) == 2
    said = "vitrail recipes: SLURM_PROCID='x' must be a whole number: start vitrail with srun, which sets it\n"
    assert capsys.readouterr() == ("", said)


def test_cores_of_a_task_are_those_that_slurm_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert available_cores() == count_cores()  # outside srun
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("vitrail.utils.devices.count_cores", lambda: 6)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert available_cores() == 4
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    assert available_cores() == 6
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert available_cores() == 3


def test_both_signals_requeue_a_task_of_srun() -> None:
    assert stop_code(signal.SIGUSR1, {}) == stop_code(signal.SIGUSR1, TASK) == REQUEUE_CODE == 138
    assert stop_code(signal.SIGTERM, TASK) == REQUEUE_CODE
    assert stop_code(signal.SIGTERM, TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == REQUEUE_CODE
    assert stop_code(signal.SIGTERM, {}) == stop_code(signal.SIGTERM, BATCH) == 143
    assert stop_code(signal.SIGINT, TASK) == 130


def test_the_module_needs_no_pytorch() -> None:
    program = f"import sys, {slurm.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
