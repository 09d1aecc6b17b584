"""Inputs of `predict`: files, folders, lists, archives and tables become one sequence of images."""

import io
import json
import tarfile

import pytest

from tests.data.making import encoded, pixels, tree
from vitrail.deploy.predict.inputs import collect_inputs


def names(*paths) -> list[str]:
    inputs = collect_inputs([str(path) for path in paths])
    return [inputs.name(index) for index in range(len(inputs))]


def test_files_and_folders_keep_their_order(tmp_path):
    root = tree(tmp_path, {"b/2.png": 1, "b/1.png": 2, "b/deep/3.png": 3, "a.png": 4, "z.png": 5, "b/notes.txt": b"x"})
    found = names(root / "z.png", root / "b", root / "a.png")
    assert [name.removeprefix(f"{root}/") for name in found] == ["z.png", "b/1.png", "b/2.png", "b/deep/3.png", "a.png"]
    assert "1 other files" in collect_inputs([str(root / "b")]).notes[0]


def test_images_match_their_names(tmp_path):
    root = tree(tmp_path, {"one/a.png": 11, "b.png": 12})
    inputs = collect_inputs([str(root / "b.png"), str(root / "one")])
    with inputs.open(0) as first, inputs.open(1) as second:
        assert first.tobytes() == pixels(12).tobytes()
        assert second.tobytes() == pixels(11).tobytes()


def test_split_and_class_folders_are_plain_folders(tmp_path):
    root = tree(tmp_path, {"train/cat/1.png": 1, "validation/cat/2.png": 2, "top.png": 3})
    assert len(names(root)) == 3


def test_patterns_are_expanded_recursively(tmp_path, monkeypatch):
    tree(tmp_path, {"a1.png": 1, "a2.png": 2, "b1.png": 3, "in/side/c.png": 4})
    monkeypatch.chdir(tmp_path)
    assert names("a*.png") == ["a1.png", "a2.png"]
    assert names("{b,a}1.png") == ["b1.png", "a1.png"]
    assert names("**/c.png") == ["in/side/c.png"]
    with pytest.raises(FileNotFoundError, match=r"no file matches x\*\.png"):
        names("x*.png")


def test_existing_file_with_wildcards_is_not_a_pattern(tmp_path):
    root = tree(tmp_path, {"[1].png": 1, "1.png": 2})
    assert names(root / "[1].png") == [f"{root}/[1].png"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "path,label\nb.png,\na.png,x|y\ngone.png,3\n"),
        ("list.tsv", "label\tfile_name\n\tb.png\nx\ta.png\n\tgone.png\n"),
        ("list.jsonl", '{"path": "b.png", "label": [1, {}]}\n\n{"Path": "a.png"}\n{"image": "gone.png"}\n'),
    ],
)
def test_lists_keep_their_order_and_ignore_labels(tmp_path, name, text):
    root = tree(tmp_path, {"a.png": 1, "b.png": 2, name: text.encode()})
    assert names(root / name) == [f"{root}/b.png", f"{root}/a.png", f"{root}/gone.png"]


def test_line_without_a_path_is_an_error_with_its_number(tmp_path):
    root = tree(tmp_path, {"a.png": 1, "list.jsonl": b'{"path": "a.png"}\n{"label": 3}\n', "bad.jsonl": b"{\n"})
    with pytest.raises(ValueError, match=r"list\.jsonl, line 2: no path"):
        names(root / "list.jsonl")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: not JSON"):
        names(root / "bad.jsonl")


def test_tar_members_are_images_and_labels_are_ignored(tmp_path):
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        for name, data in {
            "1.jpg": encoded(1, "JPEG"),
            "1.json": b"{broken",
            "1.png": encoded(2),
            "._1.png": b"",
            "2.cls": b"\xff",
            "sub/2.png": encoded(3),
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert names(shard) == [f"{shard}:1.jpg", f"{shard}:1.png", f"{shard}:sub/2.png"]
    with collect_inputs([str(shard)]).open(1) as image:
        assert image.tobytes() == pixels(2).tobytes()
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"a\.tar .*download it again"):
        names(shard)


def test_parquet_holds_images_or_paths(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitrail[parquet]'")
    from pyarrow import parquet

    tree(tmp_path, {"a.png": 1, "b.png": 2})
    parquet.write_table(arrow.table({"path": ["b.png", "a.png"], "label": [0.5, None]}), tmp_path / "list.parquet")
    assert names(tmp_path / "list.parquet") == [f"{tmp_path}/b.png", f"{tmp_path}/a.png"]
    inside = arrow.table(
        {"image": [{"bytes": encoded(7)}, {"bytes": encoded(8)}, {"bytes": None}], "label": [0.5, 1, 2]}
    )
    parquet.write_table(inside, tmp_path / "inside.parquet", row_group_size=2)
    inputs = collect_inputs([str(tmp_path / "inside.parquet"), str(tmp_path / "a.png")])
    assert len(inputs) == 4
    with inputs.open(1) as image:
        assert image.tobytes() == pixels(8).tobytes()
    with pytest.raises(OSError, match="the row has no image"):
        inputs.open(2)
    parquet.write_table(arrow.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="has no column of images, videos or paths, only x"):
        names(tmp_path / "other.parquet")


def test_folder_of_shards_and_dataset_name(tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        member = tarfile.TarInfo("1.png")
        member.size = len(encoded(1))
        tar.addfile(member, io.BytesIO(encoded(1)))
    assert names(tmp_path) == [f"{tmp_path}/train-0.tar:1.png"]
    assert len(collect_inputs(["digits"])) == 1797


def test_missing_or_empty_input_gives_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: nothing\.jpg"):
        names("nothing.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no images in .*empty"):
        names(tmp_path / "empty")


def test_fingerprint_depends_on_names_and_order(tmp_path):
    root = tree(tmp_path, {"a.png": 1, "b.png": 2})
    lines = [json.dumps({"path": name}) for name in ("a.png", "b.png")]
    (root / "x.jsonl").write_text("\n".join(lines))
    (root / "y.jsonl").write_text("\n".join(lines[::-1]))

    def known(name, count=2):
        return collect_inputs([str(root / name)]).fingerprint(count)

    assert known("x.jsonl") == known("x.jsonl")
    assert known("x.jsonl") != known("y.jsonl")
    assert known("x.jsonl") != known("x.jsonl", 1)
