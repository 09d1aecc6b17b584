"""`--slurm`: the batch script, its submission, and refused settings. sbatch is a stand-in here; tests/cluster has SLURM."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from vitrail.cli import main
from vitrail.cli.slurm import Job, parse_job, quote_directive

TRAIN = ("train", "my photos", "--out", "runs/first run", "--set", "optimizer.lr=1e-3", "--label-from", "^(.+)_'$x")


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def vitrail(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = int(error.code or 0)
    return Done(code, *capsys.readouterr())


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put shell programs first in PATH."""
    programs_directory = directory / "programs"
    programs_directory.mkdir(exist_ok=True)
    for name, text in programs.items():
        (programs_directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs_directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs_directory}:{os.environ['PATH']}")


def directives(text: str) -> dict[str, str]:
    """The options of a script, unquoted as sbatch does it."""
    found = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in found}


def test_the_script_has_what_was_asked(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    (workplace / "setup.sh").write_text("module load cuda\n")
    keys = "nodes=2,gpus=a100:8,cpus=6,mem=64G,time=1-12:00:00,signal=300,partition=gpu,long,account=me,setup=setup.sh"
    done = vitrail(capsys, *TRAIN, "--slurm", f"{keys},qos=high,constraint=nvme,name=vit")
    assert (done.code, done.err) == (0, "")
    script = workplace / "runs/first run.slurm.sh"
    text = script.read_text()
    assert text in done.out
    assert "sbatch 'runs/first run.slurm.sh'" in done.out
    assert os.access(script, os.X_OK)
    assert directives(text) == {
        "job-name": "vit",
        "chdir": str(workplace),
        "output": f"{workplace}/runs/first run.slurm.log",
        "open-mode": "append",
        "partition": "gpu,long",
        "account": "me",
        "qos": "high",
        "constraint": "nvme",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gres": "gpu:a100:8",
        "cpus-per-task": "6",
        "mem": "64G",
        "time": "1-12:00:00",
        "signal": "USR1@300",
        "requeue": "",
    }
    assert f"source {workplace}/setup.sh\n" in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_defaults_leave_the_cluster_its_own(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert vitrail(capsys, "pretrain", "digits", "--method", "mae", "--out", "runs/a", "--slurm", "").code == 0
    found = directives((workplace / "runs/a.slurm.sh").read_text())
    assert set(found) == {
        *("job-name", "chdir", "output", "open-mode", "nodes", "ntasks-per-node", "signal", "requeue")
    }
    assert (found["nodes"], found["ntasks-per-node"], found["signal"]) == ("1", "1", "USR1@120")


def run_script(workplace: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int, running: bool = True) -> str:
    """Run a batch script in the place of SLURM; return the arguments of the programs that it called."""
    record = 'printf "%s|" "${0##*/}" "$@" >> calls; echo >> calls'
    squeue = f"{record}; {'echo 7' if running else ':'}"
    install(workplace, monkeypatch, srun=f"{record}; exit {code}", squeue=squeue, scontrol=record)
    (workplace / "calls").unlink(missing_ok=True)
    done = subprocess.run(["bash", script], env=os.environ | {"SLURM_JOB_ID": "7"}, timeout=30)
    assert done.returncode == code
    return (workplace / "calls").read_text()


def test_the_script_trains_then_resumes(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--log", "tensorboard", "--save-seconds", "60", "--compile", "--json", "--device", "cpu")
    done = vitrail(capsys, *TRAIN, *given, "--slurm=tasks=2,cpus=3", "--quiet")
    about = json.loads(done.out)
    assert about["job"] is None
    assert about["command"] == ["sbatch", about["script"]]
    called = run_script(workplace, monkeypatch, about["script"], 0).splitlines()
    start = ["srun", "--wait=60", "--cpus-per-task=", sys.executable, "-m", "vitrail"]
    kept = ("--log", "tensorboard", "--save-seconds", "60", "--compile", "--device", "cpu", "--quiet")
    assert called == ["|".join([*start, *TRAIN, *kept, ""])]
    (workplace / "runs/first run").mkdir()
    (workplace / "runs/first run/recipe.json").touch()
    called = run_script(workplace, monkeypatch, about["script"], 0).splitlines()
    again = ("--device", "cpu", "--compile", "--save-seconds", "60.0", "--quiet", "--log", "tensorboard")
    assert called == ["|".join([*start, "train", "--resume", "runs/first run", *again, ""])]


@pytest.mark.parametrize(
    ("code", "running", "restarts", "requeued"),
    [
        (138, True, "2", True),
        (138, False, "2", False),  # cancelled
        (143, True, "2", False),
        (1, True, "2", False),
        (0, True, "2", False),
        (138, True, "0", False),
    ],
)
def test_only_a_saved_stop_of_a_running_job_is_requeued(
    capsys: pytest.CaptureFixture[str],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    running: bool,
    restarts: str,
    requeued: bool,
) -> None:
    vitrail(capsys, "train", "digits", "--out", "a", "--slurm", f"restarts={restarts}")
    called = run_script(workplace, monkeypatch, "a.slurm.sh", code, running)
    assert ("scontrol|requeue|7|" in called) == requeued
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert "scontrol" not in run_script(workplace, monkeypatch, "a.slurm.sh", code, running)


def test_a_run_that_is_resumed_needs_one_command(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "runs/b is not a run directory" in vitrail(capsys, "train", "--resume", "runs/b", "--slurm", "").err
    (workplace / "runs/b").mkdir(parents=True)
    (workplace / "runs/b/recipe.json").touch()
    assert vitrail(capsys, "train", "--slurm", "", "--resume", "runs/b/").code == 0
    called = run_script(workplace, monkeypatch, "runs/b.slurm.sh", 0)
    assert called == f"srun|{sys.executable}|-m|vitrail|train|--resume|runs/b/|\n"


def test_a_study_is_a_job_array(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    study = ("paper", "run", "head", "--scale", "test")
    assert vitrail(capsys, *study, "--slurm", "gpus=2,array=8").code == 0
    text = (workplace / "studies/head-test.slurm.sh").read_text()
    found = directives(text)
    assert (found["array"], found["ntasks-per-node"]) == ("1-8", "2")
    assert found["output"] == f"{workplace}/studies/head-test.slurm-%a.log"
    assert f"command=({sys.executable} -m vitrail paper run head --scale test)" in text
    assert "--wait" not in text  # its processes end when they want
    assert "--jobs" in vitrail(capsys, *study, "--slurm", "", "--jobs", "2").err


def test_paths_are_quoted_as_sbatch_reads_them(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert vitrail(capsys, "train", "digits", "--out", '50% "new" $HOME', "--slurm", "").code == 0
    text = (workplace / '50% "new" $HOME.slurm.sh').read_text()
    assert r'--job-name="50% \"new\" $HOME"' in text
    assert rf'--output="{workplace}/50%% \"new\" $HOME.slurm.log"' in text
    assert quote_directive("nodes=2") == "nodes=2"
    assert quote_directive("constraint=a\\b") == r'constraint="a\\b"'
    done = vitrail(capsys, "train", "digits", "--out", "a\\b", "--slurm", "")
    assert done.code == 2
    assert "has a backslash or control characters" in done.err


def test_submission_prints_the_job(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(workplace, monkeypatch, sbatch='echo "$@" > given; echo "4711;cluster"')
    done = vitrail(capsys, "train", "digits", "--out", "runs/a", "--slurm", "time=10", "--submit")
    assert (done.code, done.err) == (0, "")
    assert "job     4711" in done.out
    assert "scancel 4711" in done.out
    assert (workplace / "given").read_text() == "--parsable runs/a.slurm.sh\n"
    done = vitrail(capsys, "train", "digits", "--out", "runs/a", "--slurm", "time=10", "--submit", "--json")
    assert json.loads(done.out)["job"] == "4711"


def test_a_refusal_of_sbatch_is_one_line(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job submission failed\\n"
    install(workplace, monkeypatch, sbatch=f"printf '{lines}' >&2; exit 1")
    done = vitrail(capsys, "train", "digits", "--out", "a", "--slurm", "partition=x", "--submit")
    assert done.code == 2
    said = "sbatch refused a.slurm.sh: invalid partition specified: x; Batch job submission failed"
    assert done.err == f"vitrail train: {said}\n"
    monkeypatch.setenv("PATH", str(workplace))
    done = vitrail(capsys, "train", "digits", "--out", "b", "--slurm", "", "--submit")
    assert done.code == 2
    assert "--submit needs sbatch, which is not in PATH" in done.err
    assert not (workplace / "b.slurm.sh").exists()


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ("digits", "'digits': write KEY=VALUE, for example nodes=2,gpus=8,time=4:00:00"),
        ("nodes=", "'nodes=': write KEY=VALUE"),
        ("gpu=2", "unknown key 'gpu': did you mean gpus?"),
        ("walrus=2", "unknown key 'walrus': use nodes, gpus, tasks"),
        ("array=2", "unknown key 'array'"),
        ("nodes=0", "nodes must be a whole number >= 1, got '0'"),
        ("nodes=two", "nodes must be a whole number >= 1, got 'two'"),
        ("nodes=1,nodes=2", "nodes is given twice"),
        ("gpus=0", "gpus must be a number per node, such as 8 or a100:8, got '0'"),
        ("gpus=8,tasks=2", "leave out tasks"),
        ("mem=much", "mem must be a size per node, such as 64G, got 'much'"),
        ("time=4h", "time must be minutes, H:MM:SS or D-HH:MM:SS, such as 90, 4:00:00 or 2-12:00:00, got '4h'"),
        ("time=0", "time must be minutes"),
        ("time=3", "time=3 must be longer than signal=120 seconds and the minute"),
        ("signal=70000", "signal must be <= 65535 seconds, got 70000"),
        ("restarts=-1", "restarts must be a whole number >= 0, got '-1'"),
        ("setup=missing.sh", "setup=missing.sh is not a file"),
        ("name=a\nb", "control characters"),
    ],
)
def test_bad_settings_are_one_line(capsys: pytest.CaptureFixture[str], slurm: str, message: str) -> None:
    done = vitrail(capsys, "train", "digits", "--out", "a", "--slurm", slurm)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not os.path.exists("a.slurm.sh")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits", "--slurm", ""), "--slurm needs --out RUN"),
        (("train", "digits", "--submit"), "--submit needs --slurm"),
        (("paper", "run", "head", "--scale", "test", "--submit"), "--submit needs --slurm"),
        (("train", "digits", "--out", "full", "--slurm", ""), "use --resume full"),
        (("train", "a", "--unlabelled", "b", "--out", "x", "--slurm", "tasks=2"), "self-training runs in one process"),
        (("train", "--out", "x", "--resume", "full", "--slurm", ""), "leave out --out"),
    ],
)
def test_what_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], workplace: Path, arguments: tuple[str, ...], message: str
) -> None:
    (workplace / "full").mkdir()
    (workplace / "full/notes.txt").touch()
    done = vitrail(capsys, *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(workplace.glob("*.slurm.sh"))


@pytest.mark.parametrize(
    "text", ["90", "90:30", "4:00:00", "2-0", "2-12:30", "2-12:30:00", "unlimited", "UNLIMITED", "infinite"]
)
def test_time_limits_have_the_formats_of_sbatch(text: str) -> None:
    assert parse_job(f"time={text}").time in (text, "UNLIMITED")


def test_a_value_may_have_commas() -> None:
    assert parse_job("partition=a,b, nodes = 2") == Job(nodes=2, partition="a,b")
    assert parse_job("", array=True) == Job(array=4)
