"""Process groups: restarted processes agree on a new name, and leaving a group never hangs."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.groups import run_processes
from tests.training.runs import environment
from vitrail.training.distributed import Parallel, agree_on_group_name, join_process_group
from vitrail.training.runs.record import check_shared
from vitrail.training.train import agree_to_resume


def test_restarted_processes_agree_on_a_new_group_name() -> None:
    store, names = dist.HashStore(), set()
    for last in (0, 1, 2, 0):  # which of the three arrives late, and finds or leaves an old offer
        with ThreadPoolExecutor(3) as pool:

            def join(rank: int, late: int = last) -> str:
                time.sleep(0.3 if rank == late else 0)
                return agree_on_group_name(store, rank, 3)

            agreed = set(pool.map(join, range(3), timeout=30))
        assert len(agreed) == 1
        assert not agreed & names
        names |= agreed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_waits_for_the_others(rank: int) -> None:
    """Not the first one without the others, and not another one on the word of a first one that is dead."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: agree_on_group_name(store, rank, 2), range(2)))
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(agree_on_group_name, store, rank, 2)
        time.sleep(0.4)
        assert not early.done()
        assert pool.submit(agree_on_group_name, store, 1 - rank, 2).result(30) == early.result(30)


def see_directory(shared: Path, own: list[Path]) -> None:
    """Check a directory that all processes share, and then one of each."""
    with join_process_group("cpu") as team:
        check_shared(shared, team)
        with pytest.raises(ValueError, match="use out=RUN on a file system that all hosts share"):
            check_shared(own[team.rank], team, seconds=0.3)
        assert not agree_to_resume(team, shared, team.rank == 1)  # nothing was begun
        team.barrier()
        if team.is_main:
            (shared / "recipe.json").touch()
        assert agree_to_resume(team, shared, team.rank == 1)
        assert not agree_to_resume(team, shared, False)


def test_processes_agree_on_one_directory_and_on_resuming(tmp_path: Path) -> None:
    """Of two hosts, one may have its own disk, or a torchrun that was started again with --resume."""
    folders = [tmp_path / name for name in ("shared", "host1", "host2")]
    for folder in folders:
        folder.mkdir()
    run_processes(see_directory, 2, folders[0], folders[1:])
    assert [file.name for folder in folders for file in folder.iterdir()] == ["recipe.json"]


def join_differently() -> None:
    """Join with another layout in each process."""
    parallel: list[Parallel] = ["ddp", "fsdp"]
    with (
        pytest.raises(ValueError, match="different parallel= or shard_size="),
        join_process_group("cpu", parallel[int(os.environ["RANK"])]),
    ):
        pytest.fail("it was not noticed")


def test_processes_have_the_same_layout() -> None:
    run_processes(join_differently, 2)


LEAVE_GROUPS = """
import torch
from vitrail.training.distributed import join_process_group

def fail_inside_group():
    with join_process_group("cpu") as team:
        wrapped = team.wrap(torch.nn.Linear(2, 2))  # refers to the group as long as the traceback refers to it
        team.gather_objects(list(range(100)))
        raise KeyError(wrapped)

for _ in range(60):
    try:
        fail_inside_group()
    except KeyError:
        pass
"""


@pytest.mark.slow
def test_a_group_is_not_destroyed_while_its_threads_free_tensors(tmp_path: Path) -> None:
    """Its destructor joins the threads with the GIL held: one that waits for the GIL would never end."""
    (tmp_path / "leave_groups.py").write_text(LEAVE_GROUPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [*torchrun, str(tmp_path / "leave_groups.py")]
    assert subprocess.run(program, env=environment(tmp_path), capture_output=True, timeout=240).returncode == 0
