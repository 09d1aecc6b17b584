"""Where an inspection is written: nothing of anybody else's is touched."""

import json

import numpy as np
import pytest

from vitrail.views.folder import Folder


def test_a_new_directory_is_made_with_those_above_it(tmp_path):
    folder = Folder(tmp_path / "a" / "b")
    folder.write("x/y.png", b"1")
    folder.save("z.npz", {"a": np.arange(3)})
    folder.record({"model": "m"}, done=True)
    assert (tmp_path / "a/b/x/y.png").read_bytes() == b"1"
    assert np.load(tmp_path / "a/b/z.npz")["a"].tolist() == [0, 1, 2]
    told = json.loads((tmp_path / "a/b/inspect.json").read_text())
    assert told == {"model": "m", "finished": True, "files": ["x/y.png", "z.npz"]}


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="not written by an inspection"):
        Folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_in_which_nothing_was_written_is_taken_away_again(tmp_path):
    folder = Folder(tmp_path / "new" / "out")
    folder.record({})
    folder.leave()
    assert list(tmp_path.iterdir()) == []
    folder = Folder(tmp_path / "out")
    folder.write("kept", b"it")
    folder.record({}, done=True)
    folder.leave()
    again = Folder(tmp_path / "out")
    again.leave()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["inspect.json", "kept"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        Folder(tmp_path / "file")


def test_what_an_earlier_inspection_wrote_is_replaced_and_nothing_else(tmp_path):
    first = Folder(tmp_path)
    first.write("cat/attention.png", b"old")
    first.write("index.html", b"old")
    first.record({}, done=True)
    (tmp_path / "notes.txt").write_text("mine")
    second = Folder(tmp_path)
    second.write("index.html", b"new")
    second.record({})
    assert (tmp_path / "cat/attention.png").exists()  # until the new one is whole
    second.record({}, done=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "inspect.json", "notes.txt"]
    assert (tmp_path / "index.html").read_bytes() == b"new"


def test_one_that_was_stopped_can_be_done_again(tmp_path):
    stopped = Folder(tmp_path)
    stopped.record({})
    stopped.write("cat/attention.png", b"half")
    stopped.record({})
    again = Folder(tmp_path)
    again.write("dog/attention.png", b"new")
    again.record({}, done=True)
    assert not (tmp_path / "cat").exists()


def test_a_forged_record_deletes_nothing_outside(tmp_path):
    (tmp_path / "outside.txt").write_text("precious")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "inspect.json").write_text(json.dumps({"files": ["../outside.txt", "/etc/hostname", 3]}))
    folder = Folder(inside)
    folder.record({}, done=True)
    assert (tmp_path / "outside.txt").read_text() == "precious"
