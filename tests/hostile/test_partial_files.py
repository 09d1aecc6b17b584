"""Temporary directories of killed writers are removed, those of living ones are not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitrail.utils.files import DiskFullError, atomic_write, remove_stale_partials, stage_output

WRITER = """
import sys, time
from pathlib import Path
from vitrail.utils.files import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "a.json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*.partial"))


def test_a_killed_writer_is_cleaned_up_after(writer: subprocess.Popen, tmp_path: Path) -> None:
    remove_stale_partials(tmp_path)
    assert len(leftovers(tmp_path)) == 1, "it is still being written"
    writer.kill()
    writer.wait()
    assert len(leftovers(tmp_path)) == 1
    remove_stale_partials(tmp_path, "b.json")
    assert len(leftovers(tmp_path)) == 1, "of another file"
    remove_stale_partials(tmp_path)
    assert leftovers(tmp_path) == []


def test_the_next_write_removes_an_old_leftover_of_the_same_file(writer: subprocess.Popen, tmp_path: Path) -> None:
    writer.kill()
    writer.wait()
    (left,) = leftovers(tmp_path)
    os.utime(left, (time.time() - 60, time.time() - 60))
    with atomic_write(tmp_path / "a.json") as file:
        file.write(b"whole")
    assert leftovers(tmp_path) == []
    assert (tmp_path / "a.json").read_bytes() == b"whole"


def test_two_writers_of_one_file_do_not_disturb_each_other(writer: subprocess.Popen, tmp_path: Path) -> None:
    (left,) = leftovers(tmp_path)
    os.utime(left, (time.time() - 60, time.time() - 60))
    with atomic_write(tmp_path / "a.json") as file:
        file.write(b"whole")
    assert leftovers(tmp_path) == [left]


def test_too_large_a_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=r"no space left on /.*: a needs about [\d,]+ MB, [\d,]+ MB are free"):  # noqa: SIM117
        with atomic_write(tmp_path / "a", nbytes=2**62):
            pytest.fail("opened")
    assert list(tmp_path.iterdir()) == []


def test_several_files_are_moved_together(tmp_path: Path) -> None:
    with stage_output(tmp_path / "a.xml") as staged:
        staged.write_text("x")
        staged.with_suffix(".bin").write_text("y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.xml"]
