"""Processes that were started again agree on a new name, whatever their dead predecessors left in the store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

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
