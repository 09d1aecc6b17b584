"""Damaged files of our own kind: every reader gives one line or goes on; none ends in a traceback or hangs."""

import pytest

from tests.hostile.own_files import TARGETS, attack

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
