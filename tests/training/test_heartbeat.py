"""A process whose heartbeat stops ends the others, however long their collectives would wait."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from tests.training.groups import enter, free_port
from vitrail.training import heartbeat
from vitrail.training.distributed import join_process_group
from vitrail.training.heartbeat import EXIT_CODE, Heartbeat, describe_lost, first_beat, heartbeat_key


def start_all(store: Any, world: int, seconds: float, ends: dict[int, list[str]]) -> list[Heartbeat]:
    """Heartbeats of all processes of a group, in this one."""
    for rank in range(world):
        store.set(heartbeat_key("g", rank), first_beat())
        ends[rank] = []
    return [Heartbeat(store, "g", rank, world, seconds, ends[rank].append) for rank in range(world)]


def test_only_a_process_that_stops_counting_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    beats = start_all(HashStore(), 4, 600.0, {})  # the threads wait for 100 s
    try:
        for second in range(0, 1300, 100):
            now[0] = float(second)
            for beat in beats:
                beat.exchange()
            assert [beat.lost for beat in beats] == [[]] * 4
        for second in range(1300, 1900, 100):  # the third process is silent, for 600 s at most
            now[0] = float(second)
            for beat in (beats[3], beats[1], beats[0]):
                beat.exchange()
            assert beats[0].lost == []
        now[0] = 2000.0
        for beat in (beats[3], beats[0], beats[1]):
            beat.exchange()
        assert [beat.lost[0].partition(" on ")[0] for beat in (beats[0], beats[1])] == ["process 2"] * 2
        assert beats[3].lost == []  # it learns of the verdict with its next beat
        beats[3].exchange()
        assert beats[3].lost == beats[0].lost
    finally:
        for beat in beats:
            beat.leave()


def wait_until(holds: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_end_when_a_process_is_lost(lost: int) -> None:
    store = TCPStore("127.0.0.1", free_port(), is_master=True, timeout=timedelta(seconds=20))
    ends: dict[int, list[str]] = {}
    beats = start_all(store, 3, 0.5, ends)
    beats[lost].leave()
    others = [rank for rank in range(3) if rank != lost]
    wait_until(lambda: all(ends[rank] for rank in others))
    assert any(f"no heartbeat for 0.5 s from process {lost} on " in ends[rank][0] for rank in others)
    assert not ends[lost]
    for beat in beats:
        beat.leave()


def test_a_store_that_does_not_answer_ends_the_process() -> None:
    def fail(*values: Any) -> None:
        raise dist.DistStoreError("Connection reset by peer")

    reasons: list[str] = []
    Heartbeat(SimpleNamespace(set=fail, multi_get=fail), "g", 1, 2, 0.3, reasons.append)  # type: ignore[arg-type]
    wait_until(lambda: reasons)
    assert reasons[0].startswith("no connection for ")
    assert reasons[0].endswith("(Connection reset by peer)")


def freeze() -> None:
    """Stop the second process, as a host without network seems to be, while the first one waits for it."""
    with join_process_group("cpu", lost_after=3.0) as team:
        team.barrier()
        if team.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        team.barrier()


def test_a_process_that_waits_for_a_lost_one_exits() -> None:
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=enter, args=(freeze, rank, 2, 2, port, ())) for rank in range(2)]
    for process in processes:
        process.start()
    processes[0].join(60)
    processes[1].kill()
    assert processes[0].exitcode == EXIT_CODE


def test_lost_processes_are_listed() -> None:
    assert describe_lost(["process 1 on a"]) == "process 1 on a"
    names = [f"process {rank} on b" for rank in range(6)]
    assert describe_lost(names).endswith("process 3 on b and 2 more")
