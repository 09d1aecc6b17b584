"""Damaged files of our own kind: every reader gives one line or goes on; none ends in a traceback or hangs."""

import sqlite3
from contextlib import closing

import pytest

from tests.hostile.own_files import FIXTURES, TARGETS, attack, run_quietly

NEEDS = {"onnx": "onnxruntime", "openvino": "openvino"}
CASES = 12  # of each target; benchmarks/attack.py runs thousands


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_end_in_one_line(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    monkeypatch.delenv("VITRAIL_TRACEBACK", raising=False)
    root = tmp_path / "work"
    root.mkdir()
    assert attack(name, range(CASES), root) == []


@pytest.mark.parametrize(("column", "value"), [("width", "x"), ("digest", b"x"), ("thumb", 1.5), ("mode", None)])
def test_a_check_cache_of_other_types_is_not_used(column, value, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    audit = ["check", str(FIXTURES / "images"), "--json"]
    assert run_quietly(audit)[0] == 0
    (path,) = (tmp_path / "cache").rglob("check.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        (table,) = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchone()
        database.execute(f"UPDATE {table} SET {column} = ?", (value,))
    assert run_quietly(audit) == (0, "")
    with closing(sqlite3.connect(path)) as database:
        assert value not in [row[0] for row in database.execute(f"SELECT {column} FROM {table}")]
