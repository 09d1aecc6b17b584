"""Where an inspection is written: nothing of anybody else's is touched."""

import json

import numpy as np
import pytest

from vitrail.analysis.output import OutputFolder


def test_a_new_directory_is_made_with_those_above_it(tmp_path):
    folder = OutputFolder(tmp_path / "a" / "b")
    folder.write_file("x/y.png", b"1")
    folder.save_arrays("z.npz", {"a": np.arange(3)})
    folder.write_record({"model": "m"}, finished=True)
    assert (tmp_path / "a/b/x/y.png").read_bytes() == b"1"
    assert np.load(tmp_path / "a/b/z.npz")["a"].tolist() == [0, 1, 2]
    told = json.loads((tmp_path / "a/b/inspect.json").read_text())
    assert told == {"model": "m", "finished": True, "files": ["x/y.png", "z.npz"]}


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="not written by an inspection"):
        OutputFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_in_which_nothing_was_written_is_taken_away_again(tmp_path):
    folder = OutputFolder(tmp_path / "new" / "out")
    folder.write_record({})
    folder.discard_if_empty()
    assert list(tmp_path.iterdir()) == []
    folder = OutputFolder(tmp_path / "out")
    folder.write_file("kept", b"it")
    folder.write_record({}, finished=True)
    folder.discard_if_empty()
    again = OutputFolder(tmp_path / "out")
    again.discard_if_empty()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["inspect.json", "kept"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        OutputFolder(tmp_path / "file")


def test_what_an_earlier_inspection_wrote_is_replaced_and_nothing_else(tmp_path):
    first = OutputFolder(tmp_path)
    first.write_file("cat/attention.png", b"old")
    first.write_file("index.html", b"old")
    first.write_record({}, finished=True)
    (tmp_path / "notes.txt").write_text("mine")
    second = OutputFolder(tmp_path)
    second.write_file("index.html", b"new")
    second.write_record({})
    assert (tmp_path / "cat/attention.png").exists()  # until the new one is whole
    second.write_record({}, finished=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "inspect.json", "notes.txt"]
    assert (tmp_path / "index.html").read_bytes() == b"new"


def test_one_that_was_stopped_can_be_done_again(tmp_path):
    stopped = OutputFolder(tmp_path)
    stopped.write_record({})
    stopped.write_file("cat/attention.png", b"half")
    stopped.write_record({})
    again = OutputFolder(tmp_path)
    again.write_file("dog/attention.png", b"new")
    again.write_record({}, finished=True)
    assert not (tmp_path / "cat").exists()


def test_a_forged_record_deletes_nothing_outside(tmp_path):
    (tmp_path / "outside.txt").write_text("precious")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "inspect.json").write_text(json.dumps({"files": ["../outside.txt", "/etc/hostname", 3]}))
    folder = OutputFolder(inside)
    folder.write_record({}, finished=True)
    assert (tmp_path / "outside.txt").read_text() == "precious"
