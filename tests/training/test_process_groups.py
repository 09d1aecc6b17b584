"""Process groups: restarted processes agree on a new name, and leaving a group never hangs."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.runs import environment
from vitrail.training.distributed import agree_on_group_name


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
