"""Processes that prepare images are killed during training: the run continues, or stops after a checkpoint."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.training.runs import assert_same, command, environment, newest
from vitrail.training import trainer
from vitrail.training.recipe import Machine
from vitrail.training.trainer import Stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
KILLED = "a process that prepares images was killed, probably out of memory"
STEPS = 24
OPTIONS = ("--steps", str(STEPS), "--batch-size", "4", "--set", "model.size.depth=1", "--set", "ema=EMA")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small folder of images, large enough to be read from their files in every epoch."""
    tmp = tmp_path_factory.mktemp("killed")
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name in ("a", "b"):
            (tmp / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                image = Image.fromarray(pixels).resize((300, 300))
                image.save(tmp / "photos" / split / name / f"{number}.jpg")
    return tmp


def train(tmp: Path, out: str, *listeners: Callable[[dict[str, Any]], None]) -> Path:
    settings = ["model.size.depth=1", "ema=EMA"]
    overrides = {"steps": STEPS, "batch_size": 4}
    machine = Machine(workers=2, save_seconds=1000)
    run, _ = vitrail.train(
        str(tmp / "photos"), out=tmp / out, settings=settings, overrides=overrides, machine=machine, listeners=listeners
    )
    return run


@pytest.fixture(scope="module")
def whole(tmp: Path) -> Path:
    return train(tmp, "whole")


class Killer:
    """A listener that kills a loading process after some steps, and keeps the notes."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.notes = steps, list[str]()

    def __call__(self, record: dict[str, Any]) -> None:
        if record["kind"] == "timing" and record["step"] in self.steps:
            process = multiprocessing.active_children()[0]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        elif record["kind"] == "note" and "process that prepares" in record["text"]:
            self.notes.append(record["text"])


def test_one_death_changes_no_bit(tmp: Path, whole: Path) -> None:
    killer = Killer(7)
    run = train(tmp, "once", killer)
    assert killer.notes == [f"{KILLED}: replaced once; fewer --workers need less"]
    assert_same(run, whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_second_death_saves_and_the_resumed_run_changes_no_bit(tmp: Path, whole: Path) -> None:
    killer = Killer(3, 9)
    with pytest.raises(
        Stopped, match=f"^{KILLED}: use fewer --workers or a smaller image size; checkpoint saved"
    ) as error:
        train(tmp, "twice", killer)
    assert (error.value.exit_code, error.value.options) == (1, " --workers 1")
    assert 9 <= newest(tmp / "twice") < STEPS
    assert not multiprocessing.active_children()
    run, _ = vitrail.resume(tmp / "twice", changes={"workers": 0})
    assert_same(run, whole)


def children(parent: int) -> list[int]:
    """Return the processes that a process started and that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return sorted(found)


def kill_whenever_it_loads(process: subprocess.Popen[str], find: Callable[[], int | None], run: Path) -> None:
    """Kill the loading processes of a trainer again and again, once it has a checkpoint, until the command ends."""
    begin = time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begin < 120
        if newest(run) and (pid := find()) is not None:
            for child in children(pid):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.2)


@pytest.mark.slow
def test_command_ends_with_one_line_and_the_command_that_resumes(tmp: Path) -> None:
    arguments = command(
        "photos", "--out", "cli", "--workers", "2", *OPTIONS[2:], "--steps", "2000", "--save-seconds", "0"
    )
    process = subprocess.Popen(arguments, cwd=tmp, env=environment(tmp), stderr=subprocess.PIPE, text=True)
    kill_whenever_it_loads(process, lambda: process.pid, tmp / "cli")
    assert process.stderr is not None
    lines = process.stderr.read().splitlines()
    assert process.returncode == 1
    assert lines[-1] == (
        f"{KILLED}: use fewer --workers or a smaller image size; checkpoint saved in "
        f"cli/checkpoints/step-{newest(tmp / 'cli'):08d}. Continue with: vitrail train --resume cli --workers 1"
    )
    assert sum(KILLED in line for line in lines) == 2
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_all_processes_save_and_stop_when_one_loses_its_workers(tmp: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    arguments = [*torchrun, *command("photos", "--out", "two", "--workers", "1", *OPTIONS[2:], "--steps", "2000")[2:]]
    process = subprocess.Popen(
        [*arguments, "--save-seconds", "0"], cwd=tmp, env=environment(tmp), stderr=subprocess.PIPE, text=True
    )

    def second() -> int | None:
        found = children(process.pid)
        return found[1] if len(found) == 2 else None

    kill_whenever_it_loads(process, second, tmp / "two")
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.returncode == 1
    assert f"{KILLED}: replaced once" in errors
    assert re.search(f"{KILLED}: use fewer .* Continue with: vitrail train --resume two --workers 0", errors)
    assert len(list((tmp / "two" / "checkpoints" / f"step-{newest(tmp / 'two'):08d}").glob("*.distcp"))) == 2


def test_first_checkpoint_is_early_and_the_next_after_save_seconds(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "FIRST_SAVE_SECONDS", 0.0)
    saved = dict[int, int]()

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "timing":
            saved[record["step"]] = newest(tmp / "early")

    train(tmp, "early", note)
    assert (saved[1], saved[2], saved[6]) == (0, 1, 1)  # step 6 ends the first epoch and is validated after that
