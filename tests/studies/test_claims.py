"""Two runners never own a cell, and a dead runner's cell is taken again: shown with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitrail.studies.claims import Lost, Owner, Watcher, gone, myself, newest

CELLS = 12

# A process that goes over the cells until all have a result. In each it leaves a line when it begins, and one when it is done.
RACER = """
import os, sys, time
from pathlib import Path
from vitrail.studies.claims import Watcher
place, seconds = Path(sys.argv[1]), float(sys.argv[2])
watcher = Watcher(beat=0.05)
cells = [place / f"cell-{n}" for n in range(int(sys.argv[3]))]
(place / f"ready-{os.getpid()}").touch()
while not (place / "go").exists():
    time.sleep(0.001)
while left := [cell for cell in cells if not (cell / "result").exists()]:
    for cell in left:
        claim = watcher.take(cell)
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
    """Processes that begin at the same moment."""
    command = [sys.executable, "-c", RACER, str(place), str(seconds), str(cells)]
    started = [subprocess.Popen(command) for _ in range(number)]
    until(lambda: len(list(place.glob("ready-*"))) == number)
    (place / "go").touch()
    return started


def until(true, seconds: float = 30.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, "waited for too long"
        time.sleep(0.005)


def test_each_of_many_cells_is_run_once_by_one_of_many_processes(tmp_path: Path):
    for number in range(0, CELLS, 2):  # some had an owner, who let go: all see that at the same time
        foreign(tmp_path / f"cell-{number}", 0, over=True)
    started = racers(tmp_path, 6, 0.01)
    assert [process.wait(60) for process in started] == [0] * 6
    logs = [(tmp_path / f"cell-{number}" / "log").read_text().split() for number in range(CELLS)]
    assert all(len(log) == 4 and log[1] == log[3] for log in logs)
    assert len({log[1] for log in logs}) > 1  # several had a share in it


def test_a_killed_process_leaves_its_cell_to_another_at_once(tmp_path: Path):
    started = racers(tmp_path, 2, 1.5, cells=2)
    logs = [tmp_path / f"cell-{number}" / "log" for number in range(2)]
    until(lambda: all(log.exists() and log.read_text() for log in logs))
    victim = started[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert started[1].wait(30) == 0
    theirs = next(log.read_text().split() for log in logs if f"begin {victim.pid}" in log.read_text())
    assert theirs == ["begin", str(victim.pid), "begin", str(started[1].pid), "end", str(started[1].pid)]


def test_a_living_owner_keeps_its_cell(tmp_path: Path):
    claim = Watcher(beat=0.02).take(tmp_path / "cell")
    assert claim is not None
    other = Watcher(patience=0.2)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.6:
        assert other.take(tmp_path / "cell") is None
        time.sleep(0.01)
    claim.check_now()
    claim.release()
    again = other.take(tmp_path / "cell")
    assert again is not None
    assert again.number == 1
    again.release()


def test_a_claim_of_another_machine_is_dead_when_its_time_does_not_change(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    os.utime(cell / "claim-0", (4e9, 4e9))  # its clock is far ahead: only change counts
    watcher = Watcher(patience=0.2, beat=10)
    begin = time.monotonic()
    while (claim := watcher.take(cell)) is None:
        time.sleep(0.01)
    assert 0.2 <= time.monotonic() - begin < 5
    assert claim.number == 1
    claim.release()


def test_a_touch_by_another_machine_counts_from_the_beginning(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    watcher = Watcher(patience=0.3)
    for stamp in range(40):
        os.utime(cell / "claim-0", (stamp, stamp))
        assert watcher.take(cell) is None
        time.sleep(0.02)


def test_one_look_after_a_long_sleep_is_not_enough(tmp_path: Path):
    cell = tmp_path / "cell"
    foreign(cell, 0)
    watcher = Watcher(patience=0.1)
    assert watcher.take(cell) is None
    time.sleep(0.3)  # as if the watcher, and the owner with it, had been stopped
    assert watcher.take(cell) is None


def test_a_half_written_claim_is_somebodys(tmp_path: Path):
    cell = tmp_path / "cell"
    cell.mkdir()
    (cell / "claim-0").write_text('{"machine": "a')
    assert Watcher().take(cell) is None


def test_an_owner_who_was_overtaken_finds_out_and_stops(tmp_path: Path):
    cell = tmp_path / "cell"
    claim = Watcher(beat=0.02).take(cell)
    assert claim is not None
    claim.check()
    foreign(cell, 1)
    until(lambda: claim.lost)
    with pytest.raises(Lost):
        claim.check()
    with pytest.raises(Lost):
        claim.check_now()
    claim.release()
    assert newest(cell) == 1


def test_being_overtaken_is_seen_before_the_next_touch(tmp_path: Path):
    claim = Watcher(beat=60).take(tmp_path / "cell")
    assert claim is not None
    foreign(tmp_path / "cell", 1)
    claim.check()
    with pytest.raises(Lost):
        claim.check_now()
    claim.release()


def test_a_process_with_the_number_of_an_earlier_one_is_not_it():
    me = myself()
    assert not gone(me)
    assert gone(Owner(me.machine, me.pid, "earlier"))
    assert not gone(Owner("elsewhere", me.pid, "earlier"))


def foreign(cell: Path, number: int, over: bool = False) -> None:
    """A claim of a process on some other machine."""
    cell.mkdir(exist_ok=True)
    (cell / f"claim-{number}").write_text(json.dumps({"machine": "elsewhere", "pid": 1, "id": "x", "over": over}))
