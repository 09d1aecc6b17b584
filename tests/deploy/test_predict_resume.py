"""Resuming an interrupted `predict` loses and repeats no row, in every format and with several processes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from tests.deploy.asked import images, model, read, vitrail
from vitrail.cli.predict import resume_command
from vitrail.deploy.predict import resume as resuming
from vitrail.deploy.predict.formats import LabelsCSV, PredictionRow
from vitrail.deploy.predict.parallel import ParallelInference
from vitrail.deploy.predict.processes import ProcessShare, process_share
from vitrail.deploy.predict.resume import PartialOutput

FORMS = ["a.csv", "a.jsonl", "f.npy", "f.csv", "f.jsonl"]  # Parquet is killed for real, below
COUNT = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    model(root / "model.safetensors")
    model(root / "other.safetensors", seed=1)
    images(root / "photos", COUNT)
    return root


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch):
    """Sync every row separately."""
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)


def command(place, out, *more):
    what = ("embed",) if out.name.startswith("f.") else ("predict",)
    report = ("--top", 2) if what == ("predict",) else ()
    return vitrail(
        *what,
        place / "model.safetensors",
        place / "photos",
        "--out",
        out,
        *report,
        "--batch-size",
        1,
        "--runtime",
        "torch",
        *more,
    )


class Killed(BaseException):
    """Stands for a kill: no cleanup follows."""


def killed_after(monkeypatch, rows):
    """Interrupt the next run after `rows` rows."""
    whole = ParallelInference.__iter__

    def short(self):
        for number, made in enumerate(whole(self)):
            if number == rows:
                raise Killed
            yield made

    monkeypatch.setattr(ParallelInference, "__iter__", short)


@pytest.mark.parametrize("name", FORMS)
def test_killed_run_resumes_to_the_same_rows(place, tmp_path, monkeypatch, name):
    whole, out = tmp_path / "whole" / name, tmp_path / name
    whole.parent.mkdir()
    assert command(place, whole) == 0
    with monkeypatch.context() as patch:
        killed_after(patch, 7)
        with pytest.raises(Killed):
            command(place, out)
    assert not out.exists()
    part = tmp_path / f"{name}.partial"
    with part.open("ab") as file:  # what came to the disk after the journal's last word
        file.write(b"half a row")
    assert json.loads((tmp_path / f"{name}.partial.json").read_text())["rows"] == 7
    assert command(place, out, "--resume") == 0
    assert read(out) == read(whole)
    assert len(read(out)) == COUNT
    assert {file.name for file in tmp_path.iterdir()} - {"whole"} == {file.name for file in whole.parent.iterdir()}


# The command, with a pause in every batch: on a fast machine it would end before it can be killed.
SLOW_COMMAND = """
import sys, time
from vitrail.cli import main
from vitrail.deploy.predict.parallel import ParallelInference

process_batch = ParallelInference.process_batch

def pause_and_process(*arguments):
    time.sleep(0.1)
    return process_batch(*arguments)

ParallelInference.process_batch = pause_and_process
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_kill_9_loses_and_repeats_no_row(place, tmp_path, name):
    out, journal = tmp_path / name, tmp_path / f"{name}.partial.json"
    many, listed = 4000, tmp_path / "list.csv"
    names = [f"{place}/photos/{n % COUNT:04d}.png" for n in range(many)]
    listed.write_text("path\n" + "\n".join(names))
    arguments = [place / "model.safetensors", listed, "--out", out, "--runtime", "torch"]
    words = ["predict", *map(str, arguments)]
    running = subprocess.Popen([sys.executable, "-c", SLOW_COMMAND, *words])
    try:
        end = time.monotonic() + 200
        while not (journal.exists() and json.loads(journal.read_text())["rows"]):
            assert running.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < end, "no row came to the disk"
            time.sleep(0.01)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    rows = json.loads(journal.read_text())["rows"]
    assert 0 < rows < many
    subprocess.run([sys.executable, "-m", "vitrail", *words, "--resume"], check=True, timeout=200)
    assert [row["path"] for row in read(out)] == names
    assert all(row["label"] for row in read(out))


def test_resume_starts_a_new_file_and_rejects_a_complete_one(place, tmp_path, capsys):
    out = tmp_path / "a.csv"
    assert command(place, out, "--resume") == 0
    capsys.readouterr()
    assert command(place, out, "--resume") == 2
    assert "is complete: give another name" in capsys.readouterr().err


def stopped(place, tmp_path, monkeypatch, rows=5):
    """Start and kill a run."""
    out = tmp_path / "a.csv"
    with monkeypatch.context() as patch:
        killed_after(patch, rows)
        with pytest.raises(Killed):
            command(place, out)
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("other.safetensors", "photos"), "with another model"),
        (("model.safetensors", "photos/0000.png"), "with other images"),
        (("model.safetensors", "photos", "--merge", 1), "with --merge 0, which is 1 now"),
        (("model.safetensors", "photos", "--top", 3), "with --top 2, which is 3 now"),
    ],
)
def test_resume_needs_the_same_options(place, tmp_path, monkeypatch, capsys, change, message):
    out = stopped(place, tmp_path, monkeypatch)
    before = (tmp_path / "a.csv.partial").read_bytes()
    name, photos, *more = change
    arguments = (place / name, place / photos, "--out", out, "--runtime", "torch", "--top", 2, *more, "--resume")
    assert vitrail("predict", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert (tmp_path / "a.csv.partial").read_bytes() == before


def test_partial_file_needs_resume_or_force(place, tmp_path, monkeypatch, capsys):
    out = stopped(place, tmp_path, monkeypatch)
    assert command(place, out) == 2
    assert "use --resume to continue it, or --force to start again" in capsys.readouterr().err
    assert command(place, out, "--force") == 0
    assert len(read(out)) == COUNT


def test_lost_rows_are_detected(place, tmp_path, monkeypatch, capsys):
    out = stopped(place, tmp_path, monkeypatch)
    (tmp_path / "a.csv.partial").write_bytes(b"path")
    assert command(place, out, "--resume") == 2
    assert "has lost rows" in capsys.readouterr().err
    (tmp_path / "a.csv.partial.json").write_text("{")
    assert command(place, out, "--resume") == 2
    assert "is damaged" in capsys.readouterr().err


def test_ctrl_c_keeps_rows_and_shows_how_to_resume(place, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a.csv"
    with monkeypatch.context() as patch:
        whole = ParallelInference.__iter__

        def interrupted(self):
            for number, made in enumerate(whole(self)):
                if number == 4:
                    raise KeyboardInterrupt
                yield made

        patch.setattr(ParallelInference, "__iter__", interrupted)
        patch.setattr(resuming, "MAX_PENDING_ROWS", 100)  # so that some rows wait
        assert command(place, out) == 130
    report = capsys.readouterr().err
    assert f"interrupted after 4 of {COUNT} images" in report
    assert "continue with: vitrail predict" in report
    assert report.rstrip().endswith("--resume")
    assert command(place, out, "--resume") == 0
    assert len(read(out)) == COUNT


def test_full_disk_gives_one_line_and_loses_no_row(place, tmp_path, capsys):
    out = tmp_path / "a.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert command(place, out) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    error = capsys.readouterr().err
    assert "rows are saved: free disk space and use --resume" in error
    assert error.count("\n") == 1
    assert command(place, out, "--resume") == 0
    assert [row["path"][-8:] for row in read(out)] == [f"{n:04d}.png" for n in range(COUNT)]


def test_two_processes_do_not_write_the_same_rows(tmp_path):
    first, second = (PartialOutput(tmp_path / "a.csv", LabelsCSV(), 2, {}) for _ in range(2))
    first.start(2, resume=False, force=False)
    with pytest.raises(ValueError, match="another process is writing"):
        second.start(2, resume=True, force=False)
    first.close()


def test_ctrl_c_during_save_repeats_no_row(tmp_path, monkeypatch):
    part = made(tmp_path, 0, 1, 2)
    part.start(2, resume=False, force=False)
    part.add(PredictionRow("x", (("cat", 0.5),)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            part.add(PredictionRow("y", (("cat", 0.5),)))
    part.save()  # as the command does when it was interrupted
    part.close()
    again = made(tmp_path, 0, 1, 2)
    assert again.start(2, resume=True, force=False) == 1
    again.add(PredictionRow("y", (("cat", 0.5),)))
    assert again.finish()
    assert (tmp_path / "a.csv").read_text() == "path,label,score,error\nx,cat,0.5,\ny,cat,0.5,\n"


def interrupt(_file):
    raise KeyboardInterrupt


def made(tmp_path, rank, world, count, form=None, **how):
    return PartialOutput(
        tmp_path / "a.csv", form or LabelsCSV(), count, {"world": world}, rank=rank, world=world, **how
    )


def test_finished_part_is_renamed_on_resume(tmp_path):
    part = made(tmp_path, 0, 1, 1)
    part.start(1, resume=False, force=False)
    part.add(PredictionRow("x", (("cat", 0.5),)))
    part.save()
    part.finished = True
    part.write_journal()  # killed here
    part.close()
    again = made(tmp_path, 0, 1, 1)
    assert again.start(1, resume=True, force=False) == 1
    assert again.finish()
    assert (tmp_path / "a.csv").read_text() == "path,label,score,error\nx,cat,0.5,\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
    # Killed between the file's name and the end of its journal.
    part = made(tmp_path, 0, 1, 1)
    part.rows, part.finished, part.sizes = 1, True, [9]
    part.write_journal()
    again = made(tmp_path, 0, 1, 1)
    assert again.start(1, resume=True, force=False) == 1
    assert again.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "f.npy"])
def test_processes_share_the_work_and_the_last_joins_the_parts(place, tmp_path, monkeypatch, capsys, name):
    whole, out = tmp_path / "whole" / name, tmp_path / name
    whole.parent.mkdir()
    assert command(place, whole) == 0
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0, 1):  # in any order
        capsys.readouterr()
        monkeypatch.setenv("RANK", str(rank))
        assert command(place, out) == 0
        assert out.exists() == (rank == 1)
    assert "process 2 of 3" in capsys.readouterr().out
    assert read(out) == read(whole)
    assert {file.name for file in tmp_path.iterdir()} - {"whole"} == {file.name for file in whole.parent.iterdir()}


def test_killed_process_resumes_without_repeating_the_others(place, tmp_path, monkeypatch):
    out = tmp_path / "a.csv"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert command(place, out) == 0
    before = (tmp_path / "a.csv.part-1-of-2").read_bytes()
    monkeypatch.setenv("RANK", "1")
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            command(place, out)
    monkeypatch.setenv("RANK", "0")
    assert command(place, out, "--resume") == 0
    assert (tmp_path / "a.csv.part-1-of-2").read_bytes() == before
    assert not out.exists()
    monkeypatch.setenv("RANK", "1")
    assert command(place, out, "--resume") == 0
    assert len(read(out)) == COUNT
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_resume_command_has_the_same_number_of_processes(monkeypatch):
    options = Namespace(arguments=["predict", "a.pt", "my photos", "--force", "--out", "a.csv"])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert resume_command(options, 1) == "vitrail predict a.pt 'my photos' --out a.csv --resume"
    assert resume_command(options, 2).startswith("torchrun --nproc-per-node 2 -m vitrail predict a.pt")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume_command(options, 8).startswith("torchrun --nnodes 2 --nproc-per-node 4 -m vitrail predict a.pt")


def test_parts_of_another_number_of_processes_are_kept(place, tmp_path, monkeypatch, capsys):
    out = stopped(place, tmp_path, monkeypatch)  # by one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for more in ((), ("--resume",)):
        assert command(place, out, *more) == 2
        error = capsys.readouterr().err
        assert "a.csv.partial exists, of an interrupted run with 1 process: use --resume without torchrun" in error
        assert error.count("\n") == 1
    assert command(place, out, "--force") == 0
    (tmp_path / "a.csv.partial.json").unlink()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert command(place, out, "--resume") == 2
    report = "a.csv.part-2-of-2 exists, of an interrupted run with 2 processes: use --resume with 2 processes"
    assert report in capsys.readouterr().err
    assert not out.exists()


def test_torchrun_writes_one_file(place, tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29673"]
    arguments = ["predict", place / "model.safetensors", place / "photos", "--out", tmp_path / "a.csv"]
    found = subprocess.run(
        [*run, "-m", "vitrail", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert [row["path"][-8:] for row in read(tmp_path / "a.csv")] == [f"{n:04d}.png" for n in range(COUNT)]
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_shares_cover_every_image_once():
    for count in (0, 1, 7, 100):
        spans = [ProcessShare(rank, 3).index_range(count) for rank in range(3)]
        assert [index for start, stop in spans for index in range(start, stop)] == list(range(count))
    with pytest.raises(ValueError, match="RANK=2 and WORLD_SIZE=2"):
        process_share({"RANK": "2", "WORLD_SIZE": "2"})
