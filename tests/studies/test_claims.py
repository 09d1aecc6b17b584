"""Claims on cells with real processes: one owner at a time, and a dead owner's cell is claimed again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitrail.studies.cells import CellClaimer, ClaimLost, ClaimOwner, current_owner, is_dead, latest_claim

CELLS = 12

# A process that claims cells until all have a result. It logs a line at the start and at the end of each cell.
RACER = """
import os, sys, time
from pathlib import Path
from vitrail.studies.cells import CellClaimer
directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
claimer = CellClaimer(heartbeat_seconds=0.05)
cells = [directory / f"cell-{n}" for n in range(int(sys.argv[3]))]
(directory / f"ready-{os.getpid()}").touch()
while not (directory / "go").exists():
    time.sleep(0.001)
while left := [cell for cell in cells if not (cell / "result").exists()]:
    for cell in left:
        claim = claimer.claim(cell)
        if claim is None:
            continue
        if not (cell / "result").exists():
            with open(cell / "log", "a") as file:
                file.write(f"begin {os.getpid()}\\n")
            time.sleep(seconds)
            claim.check_now()
            with open(cell / "log", "a") as file:
                file.write(f"end {os.getpid()}\\n")
            (cell / "result").touch()
        claim.release()
    time.sleep(0.005)
"""


def racers(place: Path, number: int, seconds: float, cells: int = CELLS) -> list[subprocess.Popen[bytes]]:
    """Start processes that begin at the same moment."""
    command = [sys.executable, "-c", RACER, str(place), str(seconds), str(cells)]
    started = [subprocess.Popen(command) for _ in range(number)]
    until(lambda: len(list(place.glob("ready-*"))) == number, 300.0)
    (place / "go").touch()
    return started


def until(true, seconds: float = 30.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, "waited for too long"
        time.sleep(0.005)


def test_each_cell_runs_once_among_many_processes(tmp_path: Path):
    for number in range(0, CELLS, 2):  # some cells have a released claim
        foreign(tmp_path / f"cell-{number}", 0, over=True)
    started = racers(tmp_path, 6, 0.01)
    assert [process.wait(60) for process in started] == [0] * 6
    logs = [(tmp_path / f"cell-{number}" / "log").read_text().split() for number in range(CELLS)]
    assert all(len(log) == 4 and log[1] == log[3] for log in logs)
    assert len({log[1] for log in logs}) > 1  # several processes ran cells


def test_killed_process_loses_its_cell_at_once(tmp_path: Path):
    started = racers(tmp_path, 2, 1.5, cells=2)
    logs = [tmp_path / f"cell-{number}" / "log" for number in range(2)]
    until(lambda: all(log.exists() and log.read_text() for log in logs))
    victim = started[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert started[1].wait(30) == 0
    theirs = next(log.read_text().split() for log in logs if f"begin {victim.pid}" in log.read_text())
    assert theirs == ["begin", str(victim.pid), "begin", str(started[1].pid), "end", str(started[1].pid)]


def test_live_owner_keeps_its_cell(tmp_path: Path):
    claim = CellClaimer(heartbeat_seconds=0.02).claim(tmp_path / "cell")
    assert claim is not None
    other = CellClaimer(stale_seconds=0.2)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.6:
        assert other.claim(tmp_path / "cell") is None
        time.sleep(0.01)
    claim.check_now()
    claim.release()
    again = other.claim(tmp_path / "cell")
    assert again is not None
    assert again.number == 1
    again.release()


def test_remote_claim_is_stale_without_heartbeat(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    os.utime(cell / "claim-0", (4e9, 4e9))  # its clock is far ahead: only changes count
    watcher = CellClaimer(stale_seconds=0.2, heartbeat_seconds=10)
    begin = time.monotonic()
    while (claim := watcher.claim(cell)) is None:
        time.sleep(0.01)
    assert 0.2 <= time.monotonic() - begin < 5
    assert claim.number == 1
    claim.release()


def test_remote_heartbeat_resets_the_timeout(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    watcher = CellClaimer(stale_seconds=0.3)
    for stamp in range(40):
        os.utime(cell / "claim-0", (stamp, stamp))
        assert watcher.claim(cell) is None
        time.sleep(0.02)


def test_one_observation_after_a_long_sleep_is_not_enough(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    watcher = CellClaimer(stale_seconds=0.1)
    assert watcher.claim(cell) is None
    time.sleep(0.3)  # as if this process and the owner had been suspended
    assert watcher.claim(cell) is None


def test_partially_written_claim_is_respected(tmp_path: Path):
    cell = tmp_path / "cell"
    cell.mkdir()
    (cell / "claim-0").write_text('{"machine": "a')
    assert CellClaimer().claim(cell) is None


def test_overtaken_owner_detects_the_loss(tmp_path: Path):
    cell = tmp_path / "cell"
    claim = CellClaimer(heartbeat_seconds=0.02).claim(cell)
    assert claim is not None
    claim.check()
    foreign(cell, 1)
    until(lambda: claim.is_lost)
    with pytest.raises(ClaimLost):
        claim.check()
    with pytest.raises(ClaimLost):
        claim.check_now()
    claim.release()
    assert latest_claim(cell) == 1


def test_check_now_detects_the_loss_before_the_next_heartbeat(tmp_path: Path):
    claim = CellClaimer(heartbeat_seconds=60).claim(tmp_path / "cell")
    assert claim is not None
    foreign(tmp_path / "cell", 1)
    claim.check()
    with pytest.raises(ClaimLost):
        claim.check_now()
    claim.release()


def test_reused_pid_is_not_the_owner():
    me = current_owner()
    assert not is_dead(me)
    assert is_dead(ClaimOwner(me.machine, me.pid, "earlier"))
    assert not is_dead(ClaimOwner("elsewhere", me.pid, "earlier"))


def foreign(cell: Path, number: int, over: bool = False) -> None:
    """Write a claim of a process on another machine."""
    cell.mkdir(exist_ok=True)
    (cell / f"claim-{number}").write_text(json.dumps({"machine": "elsewhere", "pid": 1, "id": "x", "over": over}))
