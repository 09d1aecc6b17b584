"""Studies as a user meets them: listed, run, killed, gone on with, shared by several processes, shown."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.studies import tiny
from vitrail.cli.sweeping import Sweeping
from vitrail.studies import NAMES, study_named
from vitrail.studies.jobs import environment

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 400.0  # seconds, of a machine that is busy with other things
TWO = ("run", "tiny", "--scale", "laptop", "--device", "cpu", "--out", "study")  # cells


def started(tmp: Path, *arguments: str, **extra: str) -> "subprocess.Popen[str]":
    """A process of its own."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "VITRAIL_TRACEBACK": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.studies.tiny", "paper", *arguments],
        cwd=tmp,
        env=os.environ | own | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def paper(tmp: Path, *arguments: str) -> tuple[int, str, str]:
    """The same in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(tmp), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = tiny.main(["paper", *arguments])
    return code, out.getvalue(), err.getvalue()


def until(true: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    begin = time.monotonic()
    while not true():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() - begin < PATIENCE, "waited for too long"
        time.sleep(0.01)


def numbers(study: Path) -> dict[str, Any]:
    """What every cell gave."""
    return {path.parent.name: json.loads(path.read_text())["numbers"] for path in study.glob("cells/*/result.json")}


def measured(tmp: Path) -> list[str]:
    """The cells that were finished, each as often as it was."""
    return sorted((tmp / "measured").read_text().split()[::2])


def test_a_study_says_what_will_run_what_was_found_and_where_it_lies(tmp_path: Path):
    code, out, err = paper(tmp_path, "run", "tiny", "--scale", "test", "--device", "cpu")
    assert code == 0, err
    said = err.splitlines()
    assert said[0] == "tiny at test scale on digits: Does any of this work?"
    assert said[1] == "4 cells are known; to run: 4 tries of learning rates. Others follow from their results"
    assert said[2] == "all of it takes about 30 seconds on one core (reckoned)"
    cells = [line for line in said[3:] if "/" in line.split()[0]]
    assert [line.split()[0] for line in cells] == ["1/4", "2/4", "3/6", "4/6", "5/8", "6/8", "7/8", "8/8"]
    assert ["test" in line.split("seed")[1] for line in cells] == [False] * 4 + [True] * 4
    assert "we found      4 cells are final; with 2 seeds, which cannot tell chance of training" in out
    assert "they found    Nobody looked. (nowhere)" in out
    assert "agreement     unclear" in out
    assert "report        studies/tiny-test/report.html" in out
    study = tmp_path / "studies" / "tiny-test"
    before = measured(study.parent)
    (study / "report.html").unlink()
    assert paper(tmp_path, "show", "studies/tiny-test") == (0, out, "")
    assert (study / "report.html").is_file()
    code, again, _ = paper(tmp_path, "run", "tiny", "--scale", "test", "--device", "cpu", "--json", "--quiet")
    assert code == 0
    assert json.loads(again) == json.loads((study / "study.json").read_text())
    assert measured(study.parent) == before


def test_a_killed_study_goes_on_to_the_same_numbers(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    options = (*TWO, "--set", "steps=60")
    assert paper(tmp_path / "whole", *options)[0] == 0
    process = started(tmp_path, *options, "--save-seconds", "0")
    until(lambda: list(tmp_path.glob("study/cells/*/run-*/checkpoints/step-*1?")), process)
    process.kill()
    process.wait()
    home = next(path for path in tmp_path.glob("study/cells/*") if not (path / "result.json").exists())
    code, out, _ = paper(tmp_path, "show", "study")
    assert code == 0
    assert "too little is finished to say anything yet" in out
    assert "are to be run" in out
    assert paper(tmp_path, *options)[0] == 0
    assert numbers(tmp_path / "study") == numbers(tmp_path / "whole" / "study")
    assert measured(tmp_path) == measured(tmp_path / "whole")  # the one that was killed as well: once
    assert {path.name for path in home.iterdir()} == {"claim-0", "claim-1", "run", "result.json"}
    # It went on, and did not begin again: run.json is of the process that was killed.
    assert "--save-seconds" in json.loads((home / "run" / "run.json").read_text())["command"]


def test_ctrl_c_stops_after_the_step_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hear = Sweeping.hear

    def interrupted(self: Sweeping, record: dict[str, Any]) -> None:
        hear(self, record)
        if record["kind"] == "train":
            signal.raise_signal(signal.SIGINT)

    options = (*TWO, "--set", "steps=60")
    with monkeypatch.context() as patch:
        patch.setattr(Sweeping, "hear", interrupted)
        code, out, err = paper(tmp_path, *options)
    assert code == 130
    assert out == ""
    assert err.endswith("stopped; the same command goes on; vitrail paper show study shows what is there\n")
    (claim,) = tmp_path.glob("study/cells/*/claim-*")
    assert json.loads(claim.read_text())["over"]
    assert len(list((claim.parent / "run-0" / "checkpoints").iterdir())) == 1
    assert paper(tmp_path, *options)[0] == 0
    assert len(numbers(tmp_path / "study")) == 2
    assert (claim.parent / "claim-1").is_file()


def test_a_terminal_shows_finished_cells_above_what_goes_on_now(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    live = Sweeping(runners=2)
    live.hear({"kind": "state", "known": 3, "done": 1, "failed": 1, "seconds_left": 240.0})
    about = {"cell": "a", "label": "final: pool mean"}
    live.hear({"kind": "cell", "what": "begins"} | about)
    live.hear({"kind": "begin", "steps": 50} | about)
    live.shown -= 1  # it draws ten times in a second at most
    live.hear({"kind": "train", "step": 7, "loss": 1.25} | about)
    assert screen.getvalue() == (
        "1 of 3 cells that are known, 1 failed, about 2:00 left for them\n  final: pool mean  step 7/50  loss 1.2500\n"
    )
    live.hear({"kind": "cell", "what": "done", "seconds": 65.0, "validation": 0.5, "test": 0.25} | about)
    drawn_over = screen.getvalue().split("\033[2A\033[J")[1]
    assert " ".join(drawn_over.split()) == "2/3 final: pool mean validation 50.0 % test 25.0 % 1:05"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the children of a process are found in /proc")
def test_of_two_jobs_one_is_killed_and_the_other_finishes_its_cell(tmp_path: Path):
    process = started(tmp_path, *TWO, "--set", "steps=300", "--jobs", "2")
    until(lambda: len(list(tmp_path.glob("study/cells/*/run-0/metrics.jsonl"))) == 2, process)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert "1 of 2 runners died, the first with exit code -9" in said
    assert measured(tmp_path) == sorted(numbers(tmp_path / "study"))
    assert len(measured(tmp_path)) == 2
    assert len(list(tmp_path.glob("study/cells/*/claim-1"))) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the children of a process are found in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_command_stops_its_jobs_with_everything_saved(tmp_path: Path, how: signal.Signals):
    process = started(tmp_path, *TWO, "--set", "steps=1000000", "--jobs", "2")
    until(lambda: len(list(tmp_path.glob("study/cells/*/run-0/timing.jsonl"))) == 2, process)
    workers = children(process.pid)
    process.send_signal(how)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if how == signal.SIGINT:
        assert "the same command goes on; vitrail paper show study shows what is there" in said
    begin = time.monotonic()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.05)
    saved = {path.parent for path in tmp_path.glob("study/cells/*/run-0/checkpoints/step-*")}
    assert len(saved) == 2  # a slow machine may have saved more than once by then
    assert all(json.loads(path.read_text())["over"] for path in tmp_path.glob("study/cells/*/claim-0"))


@pytest.mark.slow
def test_processes_that_torchrun_started_share_the_cells_and_join_no_group(tmp_path: Path):
    # Nobody listens at this address: whoever tried to join a group would wait there for the other.
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    both = [started(tmp_path, *TWO, RANK=str(n), LOCAL_RANK=str(n), **group) for n in range(2)]
    said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert measured(tmp_path) == sorted(numbers(tmp_path / "study"))
    assert len(measured(tmp_path)) == 2
    assert "2 cells are final" in said[0]
    assert said[1] == ""  # the first one talks


def test_torchrun_and_jobs_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = paper(tmp_path, *TWO, "--jobs", "2")
    assert code == 2
    assert "torchrun starts the processes: leave out --jobs" in err


def test_a_job_has_its_share_of_the_cores_and_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.studies.jobs.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(0, 2)["OMP_NUM_THREADS"] == "4"
    assert environment(0, 16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [environment(0, jobs)["OMP_NUM_THREADS"] for jobs in (2, 4)] == ["3", "2"]


def test_cells_that_fail_are_told_at_the_end_with_exit_code_1(tmp_path: Path):
    (tmp_path / "broken").write_text("mean")
    code, out, err = paper(tmp_path, *TWO)
    assert code == 1
    assert "failed   final: pool mean, rate 0.001, seed 0: mean is broken" in err
    assert "1 cell failed; the same command tries it again" in out
    assert len(numbers(tmp_path / "study")) == 1
    (tmp_path / "broken").unlink()
    assert paper(tmp_path, *TWO)[0] == 0
    assert len(numbers(tmp_path / "study")) == 2


def test_a_study_goes_on_with_more_seeds_and_keeps_what_it_has(tmp_path: Path):
    assert paper(tmp_path, *TWO)[0] == 0
    before = numbers(tmp_path / "study")
    code, out, err = paper(tmp_path, *TWO, "--seeds", "3")
    assert code == 0, err
    assert "6 cells are final" in out
    assert before.items() <= numbers(tmp_path / "study").items()
    assert len(set(measured(tmp_path))) == len(measured(tmp_path)) == 6  # no cell was run twice
    assert paper(tmp_path, "show", "study")[1].count("6 cells are final") == 1
    code, _, err = paper(tmp_path, *TWO, "--seeds", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert "study holds a study with another number of seeds, 3 and not 2" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "position", "--scale", "test"), "unknown study 'position': did you mean 'positions'?"),
        (("run", "tiny", "--scale", "gpu"), "tiny has no scale 'gpu'"),
        (("run", "tiny", "--scale", "test", "--jobs", "0"), "--jobs 0: use 1 or more"),
        (("run", "tiny", "--scale", "test", "--seeds", "0"), "--seeds 0: use 1 or more"),
        (("run", "tiny", "--scale", "test", "--data", "nowhere"), "nowhere"),
        (
            ("run", "tiny", "--scale", "test", "--set", "optimizer.lr=0.1"),
            "--set optimizer.lr=0.1 makes runs the same that are compared: pool class, rate 0.001, seed 0 and pool class",
        ),
        (("run", "tiny", "--scale", "test", "--split", "0.8,0.1,0.1"), "--split is about DATA"),
        (("run", "tiny", "--scale", "test", "--device", "abacus"), "unknown device 'abacus'"),
        (("show", "nowhere"), "nowhere holds no study"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, line
):
    monkeypatch.chdir(tmp_path)
    assert tiny.main(["paper", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.startswith("vitrail paper: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_every_study_is_listed_with_its_question_and_times(capsys: pytest.CaptureFixture[str]):
    assert tiny.main(["paper", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line and not line.startswith(" ")] == [*NAMES, "tiny"]
    assert "  laptop      about 60 seconds on one core (reckoned); digits, seeds: 1" in lines
    assert tiny.main(["paper", "list", "--json"]) == 0
    table = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    for name in NAMES:
        each = study_named(name)
        assert each.name == name
        assert {"test", "laptop", "gpu", "cluster"} <= set(table[name]["scales"])
        assert table[name]["found"] == each.found
