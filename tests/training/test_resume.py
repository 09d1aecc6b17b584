"""A run that is killed, stopped or damaged goes on as if nothing had happened."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.training.runs import SMALL, assert_same, command, environment, interrupted, newest, summary, train, trained
from vitrail.training.checkpointing import hash_file
from vitrail.training.runs.record import lock_run

LENGTH = ("--steps", "60")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(tmp: Path) -> Path:
    """A run that nobody disturbed."""
    trained(tmp, "digits", "--out", "whole", *SMALL, *LENGTH)
    return tmp / "whole"


def test_finished_run_holds_everything(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert {"model.safetensors", "recipe.json", "run.json", "metrics.jsonl", "summary.json", "report.html"} <= names
    found = summary(whole)
    assert {"top1", "split", "seconds", "steps", "images_per_second"} <= set(found)
    assert found["steps"] == 60
    assert found["split"] == "test"


@pytest.mark.slow
@pytest.mark.parametrize("at_step", [1, 23, 59])
def test_killed_run_resumes_to_the_same_weights(tmp: Path, whole: Path, at_step: int) -> None:
    run = tmp / f"killed-{at_step}"
    frequent = ("--save-seconds", "0")
    code = interrupted(tmp, run, signal.SIGKILL, at_step, "digits", "--out", run.name, *SMALL, *LENGTH, *frequent)
    assert code == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    trained(tmp, "--resume", run.name)
    assert_same(run, whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (run / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_stopped_run_saves_and_resumes(tmp: Path, whole: Path, number: signal.Signals, code: int) -> None:
    run = tmp / f"stopped-{code}"
    assert (
        interrupted(tmp, run, number, 20, "digits", "--out", run.name, *SMALL, *LENGTH, "--save-seconds", "0") == code
    )
    stood = newest(run)
    assert 20 <= stood < 60
    trained(tmp, "--resume", run.name)
    assert_same(run, whole)


def test_corrupt_latest_checkpoint_falls_back_to_the_one_before(tmp: Path, whole: Path) -> None:
    run = tmp / "corrupt"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    latest = run / "checkpoints" / f"step-{newest(run):08d}"
    victim = max(latest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = trained(tmp, "--resume", run.name)
    assert "is damaged" in done.stderr
    assert "using the one before" in done.stderr
    assert_same(run, whole)


def test_half_written_log_line_is_written_again(tmp: Path, whole: Path) -> None:
    run = tmp / "halfline"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    trained(tmp, "--resume", run.name)
    assert_same(run, whole)


def test_resuming_a_finished_run_says_so(tmp: Path, whole: Path) -> None:
    assert "finished already" in trained(tmp, "--resume", whole.name).stderr


def test_run_directory_is_never_overwritten(tmp: Path, whole: Path) -> None:
    done = train(tmp, "digits", "--out", whole.name, *SMALL, *LENGTH)
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert done.stderr.count("\n") == 1


def test_resuming_no_run_is_one_line(tmp: Path) -> None:
    done = train(tmp, "--resume", "nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_full_disk_leaves_earlier_checkpoints_intact(tmp: Path, whole: Path) -> None:
    run = tmp / "full"
    assert (
        interrupted(tmp, run, signal.SIGTERM, 20, "digits", "--out", run.name, *SMALL, *LENGTH, "--save-seconds", "0")
        == 143
    )
    stood = newest(run)
    limit = 100_000  # bytes of a file: less than a checkpoint, more than a log

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        command("--resume", run.name, "--save-seconds", "0"),
        cwd=tmp,
        env=environment(tmp),
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert newest(run) == stood
    trained(tmp, "--resume", run.name)
    assert_same(run, whole)


def test_other_data_is_refused(tmp: Path, whole: Path) -> None:
    run = tmp / "other"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    about = json.loads((run / "run.json").read_text())
    about["data"]["fingerprints"]["validation"] = "0"
    (run / "run.json").write_text(json.dumps(about))
    done = train(tmp, "--resume", run.name)
    assert done.returncode == 2
    assert "validation images" in done.stderr
    assert done.stderr.count("\n") == 1


def test_saved_recipe_runs_again_to_the_same_weights(tmp: Path, whole: Path) -> None:
    trained(tmp, "--recipe", os.path.join(whole.name, "recipe.json"), "--out", "again")
    assert_same(tmp / "again", whole)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch pwned",)


def unfinished(whole: Path, run: Path) -> Path:
    """A copy of a run that stands before its end, and its newest checkpoint."""
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    return run / "checkpoints" / f"step-{newest(run):08d}"


def sealed(checkpoint: Path) -> None:
    """Checksums as if everything in it were meant."""
    files = [path for path in checkpoint.iterdir() if path.name != "checksums.json"]
    (checkpoint / "checksums.json").write_text(json.dumps({path.name: hash_file(path) for path in files}))


@pytest.mark.parametrize("what", ["pickle", "other pickle", "progress", "no checksums"])
def test_tampered_checkpoint_executes_nothing(tmp: Path, whole: Path, what: str) -> None:
    run = tmp / f"evil-{what.replace(' ', '-')}"
    latest = unfinished(whole, run)
    if what == "pickle":
        (latest / ".metadata").write_bytes(pickle.dumps(Evil()))
    elif what == "other pickle":
        (latest / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    elif what == "progress":
        (latest / "progress.json").write_text('{"step": 3, "magic": true}')
    sealed(latest)
    if what == "no checksums":
        (latest / "checksums.json").write_text("{}")
    done = trained(tmp, "--resume", run.name)
    assert "using the one before" in done.stderr
    assert not (tmp / "pwned").exists()
    assert_same(run, whole)


def test_damaged_checkpoint_does_not_replace_good_ones(tmp: Path, whole: Path) -> None:
    run = tmp / "pushed"
    latest = unfinished(whole, run)
    (latest / "progress.json").write_text("")
    trained(tmp, "--resume", run.name, "--keep-checkpoints", "1")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [latest.name]
    assert_same(run, whole)


def test_second_process_in_one_run_is_refused(tmp: Path, whole: Path) -> None:
    run = tmp / "shared"
    unfinished(whole, run)
    with lock_run(run):
        done = train(tmp, "--resume", run.name)
    assert done.returncode == 2
    assert "another process is training" in done.stderr


def test_resume_writes_a_missing_report(tmp: Path, whole: Path) -> None:
    run = tmp / "unreported"
    shutil.copytree(whole, run)
    (run / "report.html").unlink()
    trained(tmp, "--resume", run.name)
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    "option", [("--epochs", "3"), ("--lr", "1"), ("--set", "seed=1"), ("--out", "x"), ("--balance", "weights")]
)
def test_resume_refuses_other_options(tmp: Path, whole: Path, option: tuple[str, str]) -> None:
    done = train(tmp, "--resume", whole.name, *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


@pytest.mark.slow
def test_early_stopping_survives_a_kill(tmp: Path) -> None:
    patient = ("--epochs", "40", "--patience", "2", "--set", "validate_every=0.2")
    trained(tmp, "digits", "--out", "early", *SMALL, *patient)
    run = tmp / "early-killed"
    assert interrupted(tmp, run, signal.SIGKILL, 8, "digits", "--out", run.name, *SMALL, *patient) == -signal.SIGKILL
    trained(tmp, "--resume", run.name)
    assert summary(run)["steps"] == summary(tmp / "early")["steps"]
    assert summary(run)["weights"] == "best"
    assert (run / "model.safetensors").read_bytes() == (tmp / "early" / "model.safetensors").read_bytes()
