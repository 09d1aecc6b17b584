"""The paper commands: list, run, kill, resume, several processes, show."""

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
from vitrail.cli.text.study import SweepDisplay
from vitrail.studies import STUDY_NAMES, load_study
from vitrail.studies.runner import worker_environment

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 400.0  # seconds, for a busy machine
TWO = ("run", "tiny", "--scale", "laptop", "--device", "cpu", "--out", "study")  # cells


def started(tmp: Path, *arguments: str, **extra: str) -> "subprocess.Popen[str]":
    """Start the command in a new process."""
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
    """Run the command in this process; return exit code, standard output and standard error."""
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
    """Return the numbers of every cell."""
    return {path.parent.name: json.loads(path.read_text())["numbers"] for path in study.glob("cells/*/result.json")}


def measured(tmp: Path) -> list[str]:
    """Return the finished cells, repeats included."""
    return sorted((tmp / "measured").read_text().split()[::2])


def test_run_prints_plan_finding_and_report_path(tmp_path: Path):
    code, out, err = paper(tmp_path, "run", "tiny", "--scale", "test", "--device", "cpu")
    assert code == 0, err
    said = err.splitlines()
    assert said[0] == "tiny at test scale on digits: Does any of this work?"
    assert said[1] == "4 known cells; to run: 4 learning rate trials; further cells depend on their results"
    assert said[2] == "the study takes about 30 seconds on one core (estimated)"
    cells = [line for line in said[3:] if "/" in line.split()[0]]
    assert [line.split()[0] for line in cells] == ["1/4", "2/4", "3/6", "4/6", "5/8", "6/8", "7/8", "8/8"]
    assert ["test" in line.split("seed")[1] for line in cells] == [False] * 4 + [True] * 4
    assert "finding       4 cells are final; with 2 seeds, differences of 1 point or less" in out
    assert "paper         Not studied. (nowhere)" in out
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


def test_resume_after_kill_gives_equal_numbers(tmp_path: Path):
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
    assert "no finding yet: too few cells are finished" in out
    assert " to run" in out
    assert paper(tmp_path, *options)[0] == 0
    assert numbers(tmp_path / "study") == numbers(tmp_path / "whole" / "study")
    assert measured(tmp_path) == measured(tmp_path / "whole")  # the killed one as well: once
    assert {path.name for path in home.iterdir()} == {"claim-0", "claim-1", "run", "result.json"}
    # It resumed and did not restart: run.json is of the killed process.
    assert "--save-seconds" in json.loads((home / "run" / "run.json").read_text())["command"]


def test_ctrl_c_stops_and_the_same_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hear = SweepDisplay.on_record

    def interrupted(self: SweepDisplay, record: dict[str, Any]) -> None:
        hear(self, record)
        if record["kind"] == "train":
            signal.raise_signal(signal.SIGINT)

    options = (*TWO, "--set", "steps=60")
    with monkeypatch.context() as patch:
        patch.setattr(SweepDisplay, "on_record", interrupted)
        code, out, err = paper(tmp_path, *options)
    assert code == 130
    assert out == ""
    assert err.endswith("stopped; the same command continues; vitrail paper show study shows the results so far\n")
    (claim,) = tmp_path.glob("study/cells/*/claim-*")
    assert json.loads(claim.read_text())["over"]
    assert len(list((claim.parent / "run-0" / "checkpoints").iterdir())) == 1
    assert paper(tmp_path, *options)[0] == 0
    assert len(numbers(tmp_path / "study")) == 2
    assert (claim.parent / "claim-1").is_file()


def test_terminal_shows_finished_cells_above_progress(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    live = SweepDisplay(runners=2)
    live.on_record({"kind": "state", "known": 3, "done": 1, "failed": 1, "seconds_left": 240.0})
    about = {"cell": "a", "label": "final: pool mean"}
    live.on_record({"kind": "cell", "what": "begins"} | about)
    live.on_record({"kind": "begin", "steps": 50} | about)
    live.last_shown -= 1  # it draws ten times in a second at most
    live.on_record({"kind": "train", "step": 7, "loss": 1.25} | about)
    assert screen.getvalue() == (
        "1 of 3 known cells, 1 failed, about 2:00 left\n  final: pool mean  step 7/50  loss 1.2500\n"
    )
    live.on_record({"kind": "cell", "what": "done", "seconds": 65.0, "validation": 0.5, "test": 0.25} | about)
    drawn_over = screen.getvalue().split("\033[2A\033[J")[1]
    assert " ".join(drawn_over.split()) == "2/3 final: pool mean validation 50.0 % test 25.0 % 1:05"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the children of a process are found in /proc")
def test_other_job_finishes_the_cell_of_a_killed_job(tmp_path: Path):
    process = started(tmp_path, *TWO, "--set", "steps=300", "--jobs", "2")
    until(lambda: len(list(tmp_path.glob("study/cells/*/run-0/metrics.jsonl"))) == 2, process)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert "1 of 2 runners failed, the first with exit code -9" in said
    assert measured(tmp_path) == sorted(numbers(tmp_path / "study"))
    assert len(measured(tmp_path)) == 2
    assert len(list(tmp_path.glob("study/cells/*/claim-1"))) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the children of a process are found in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_command_stops_and_saves_its_jobs(tmp_path: Path, how: signal.Signals):
    process = started(tmp_path, *TWO, "--set", "steps=1000000", "--jobs", "2")
    until(lambda: len(list(tmp_path.glob("study/cells/*/run-0/timing.jsonl"))) == 2, process)
    workers = children(process.pid)
    process.send_signal(how)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if how == signal.SIGINT:
        assert "the same command continues; vitrail paper show study shows the results so far" in said
    begin = time.monotonic()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.05)
    saved = {path.parent for path in tmp_path.glob("study/cells/*/run-0/checkpoints/step-*")}
    assert len(saved) == 2  # a slow machine may have saved more than once by then
    assert all(json.loads(path.read_text())["over"] for path in tmp_path.glob("study/cells/*/claim-0"))


@pytest.mark.slow
def test_torchrun_processes_share_cells_without_a_group(tmp_path: Path):
    # Nothing listens at this address: joining a group would block.
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    both = [started(tmp_path, *TWO, RANK=str(n), LOCAL_RANK=str(n), **group) for n in range(2)]
    said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert measured(tmp_path) == sorted(numbers(tmp_path / "study"))
    assert len(measured(tmp_path)) == 2
    assert "2 cells are final" in said[0]
    assert said[1] == ""  # only the first one prints


def test_torchrun_and_jobs_are_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = paper(tmp_path, *TWO, "--jobs", "2")
    assert code == 2
    assert "torchrun starts the processes: leave out --jobs" in err


def test_job_threads_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.studies.runner.count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_environment(0, 2)["OMP_NUM_THREADS"] == "4"
    assert worker_environment(0, 16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [worker_environment(0, jobs)["OMP_NUM_THREADS"] for jobs in (2, 4)] == ["3", "2"]


def test_failed_cells_are_reported_with_exit_code_1(tmp_path: Path):
    (tmp_path / "broken").write_text("mean")
    code, out, err = paper(tmp_path, *TWO)
    assert code == 1
    assert "failed   final: pool mean, rate 0.001, seed 0: mean is broken" in err
    assert "1 cell failed; the same command runs the failed cell again" in out
    assert len(numbers(tmp_path / "study")) == 1
    (tmp_path / "broken").unlink()
    assert paper(tmp_path, *TWO)[0] == 0
    assert len(numbers(tmp_path / "study")) == 2


def test_more_seeds_keep_finished_runs(tmp_path: Path):
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
    assert "study holds a study with a different number of seeds: 3, not 2" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "position", "--scale", "test"), "unknown study 'position': did you mean 'positions'?"),
        (("run", "tiny", "--scale", "gpu"), "tiny has no scale 'gpu'"),
        (("run", "tiny", "--scale", "test", "--jobs", "0"), "--jobs must be >= 1, got 0"),
        (("run", "tiny", "--scale", "test", "--seeds", "0"), "--seeds must be >= 1, got 0"),
        (("run", "tiny", "--scale", "test", "--data", "nowhere"), "nowhere"),
        (
            ("run", "tiny", "--scale", "test", "--set", "optimizer.lr=0.1"),
            "--set optimizer.lr=0.1 makes compared runs equal: pool class, rate 0.001, seed 0 and pool class",
        ),
        (("run", "tiny", "--scale", "test", "--fractions", "0.8,0.1,0.1"), "--fractions needs DATA"),
        (("run", "tiny", "--scale", "test", "--device", "abacus"), "unknown device 'abacus'"),
        (("show", "nowhere"), "nowhere is not a study"),
    ],
)
def test_user_errors_are_one_line_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, line
):
    monkeypatch.chdir(tmp_path)
    assert tiny.main(["paper", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.startswith("vitrail paper: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_list_shows_every_study(capsys: pytest.CaptureFixture[str]):
    assert tiny.main(["paper", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line and not line.startswith(" ")] == [*STUDY_NAMES, "tiny"]
    assert "  laptop      about 60 seconds on one core (estimated); digits, seeds: 1" in lines
    assert tiny.main(["paper", "list", "--json"]) == 0
    table = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    for name in STUDY_NAMES:
        each = load_study(name)
        assert each.name == name
        assert {"test", "laptop", "gpu", "cluster"} <= set(table[name]["scales"])
        assert table[name]["found"] == each.paper_finding
