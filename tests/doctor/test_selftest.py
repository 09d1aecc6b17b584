"""The self-test: steps that fail, crash or hang do not stop the others; an interrupt keeps what is known."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.doctor import made
from vitrail.doctor import STEP_NAMES, selftest
from vitrail.doctor.selftest import STEPS, SelfTest


def run(*names, seconds=60.0, **more):
    tests = SelfTest(names, steps=made.steps(*names, seconds=seconds), **more)
    return {result["name"]: result for result in tests.run()}


def test_the_table_of_steps_has_the_names_of_the_command_line():
    assert tuple(STEPS) == STEP_NAMES


def test_a_step_that_fails_or_crashes_does_not_stop_the_others():
    results = run("fail", "crash", "succeed")
    assert {name: result["status"] for name, result in results.items()} == {
        "fail": "failed",
        "crash": "failed",
        "succeed": "ok",
    }
    assert results["fail"]["detail"] == "ValueError: two words"
    assert results["crash"]["detail"] == "the process crashed (SIGABRT): last words"
    assert results["succeed"]["values"]["pid"] != os.getpid()


def test_a_step_has_a_time_limit_and_its_process_is_ended():
    names = ("hang", "succeed")
    tests = SelfTest(names, steps=made.steps(*names), limit=1.0)
    reported, processes = [], []

    def remember(number: int, count: int, name: str, text: str) -> None:
        reported.append((number, count, name, text))
        if name == "hang" and text.startswith("/"):
            processes.append(int(Path(text, "pid").read_text()))

    results = {result["name"]: result for result in tests.run(remember)}
    assert results["hang"]["status"] == "timeout"
    assert results["hang"]["detail"] == "did not end within 1 s"
    assert results["hang"]["seconds"] < 30
    assert results["succeed"]["status"] == "ok"
    assert (2, 2, "succeed", "succeeding") in reported
    assert not made.is_running(processes[0])


def test_an_interrupt_keeps_what_is_known():
    names = ("succeed", "hang", "fail")
    tests = SelfTest(names, steps=made.steps(*names))

    def interrupt(number: int, count: int, name: str, text: str) -> None:
        if name == "hang" and text.startswith("/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tests.run(interrupt)
    assert [result["status"] for result in tests.results] == ["ok", "stopped", "skipped"]


def test_steps_do_not_see_the_group_of_torchrun_nor_the_users_cache():
    environment = os.environ | {"RANK": "3", "WORLD_SIZE": "4", "XDG_CACHE_HOME": "/the/users"}
    tests = SelfTest(["show_environment"], steps=made.steps("show_environment"))
    (result,) = tests.run(environment=environment)
    assert result["values"]["RANK"] is None
    assert result["values"]["WORLD_SIZE"] is None
    assert result["values"]["XDG_CACHE_HOME"] != "/the/users"


def test_a_process_that_cannot_start_fails_once(monkeypatch):
    monkeypatch.setattr(selftest, "START_SECONDS", 0.0)
    results = run("succeed", "fail")
    assert [result["status"] for result in results.values()] == ["failed", "skipped"]
    assert "did not start within 0 s" in results["succeed"]["detail"]


def test_steps_for_a_gpu_are_left_out_without_one_and_shared_ones_come_first_in_a_group():
    assert "copies" not in SelfTest(device="cpu").steps
    assert "copies" in SelfTest(device="cuda:0").steps
    assert next(iter(SelfTest(group={"RANK": "0", "WORLD_SIZE": "2"}).steps)) == "collectives"


ABANDONED = """
from tests.doctor import made
from vitrail.doctor.selftest import SelfTest
SelfTest(["hang"], steps=made.steps("hang")).run(lambda *words: print(words[-1], flush=True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_of_the_steps_ends_with_the_command(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = subprocess.Popen([sys.executable, "-c", ABANDONED], stdout=subprocess.PIPE, text=True, env=environment)
    assert command.stdout is not None
    folder = next(line.strip() for line in command.stdout if line.startswith("/"))
    worker = int(Path(folder, "pid").read_text())
    command.send_signal(signal.SIGKILL)
    command.wait()
    deadline = time.monotonic() + 30
    while made.is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_results_are_json():
    assert json.loads(json.dumps(run("succeed")))["succeed"]["title"] == "to succeed"
