"""The audit of numbers: ranges, bad rows, constant targets, outliers, copies and leaks."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.audit import check
from vitrail.data.audit.numbers import NumberSummary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def write(folder: Path, rows: list[str]) -> Path:
    path = folder / "t.csv"
    path.write_text("path,split,x,y\n" + "\n".join(rows) + "\n")
    return path


def rows(count: int = 20) -> list[str]:
    return [f"{n}.png,{'train' if n < 14 else 'val'},{n},{n % 3}" for n in range(count)]


def test_clean_numbers_are_summarised_for_each_split(folder: Path) -> None:
    audit = check(write(folder, rows()), targets=("x", "y"), cache=False)
    assert audit.is_ok
    assert not audit.findings
    found = audit.to_dict()
    assert found["targets"] == ["x", "y"]
    assert found["splits"]["train"]["targets"]["x"] == pytest.approx(
        {"smallest": 0, "largest": 13, "mean": 6.5, "std": np.arange(14).std()}
    )


def test_bad_rows_are_errors_and_left_out(folder: Path) -> None:
    audit = check(write(folder, [*rows(19), "19.png,val,,1"]), targets="x", cache=False)
    (finding,) = audit.findings
    assert (finding.kind, finding.severity) == ("target-value", "error")
    assert finding.detail.endswith("t.csv, line 21)")
    assert len(audit.clean_dataset()["validation"]) == 5


def test_constant_targets_and_outliers_are_found(folder: Path) -> None:
    lines = [f"{n}.png,train,{n},5" for n in range(19)]
    audit = check(write(folder, [*lines, "19.png,train,4000,5"]), targets=("x", "y"), fractions=(1, 0, 0), cache=False)
    assert [(finding.kind, finding.path.rpartition("/")[2]) for finding in audit.findings] == [
        ("constant-target", "y"),
        ("outlier", "19.png"),
    ]
    assert audit.findings[1].detail == "x 4000, median 9.5"


@pytest.mark.parametrize(
    ("low", "high", "std", "constant"), [(5, 5, 0, True), (1e9, 1e9 + 64, 30, True), (0, 1, 1e-3, False)]
)
def test_numbers_that_float32_cannot_tell_apart_are_constant(
    low: float, high: float, std: float, constant: bool
) -> None:
    assert NumberSummary(low, high, (low + high) / 2, std).is_constant == constant


@pytest.mark.parametrize("same", [True, False])
def test_copies_in_two_splits_are_leaks_whatever_their_numbers(folder: Path, same: bool) -> None:
    (folder / "19.png").write_bytes((folder / "0.png").read_bytes())
    audit = check(write(folder, [*rows(19), f"19.png,val,{0 if same else 7},0"]), targets="x", cache=False)
    assert audit.counts["leak"] == 1
    assert audit.counts["contradiction"] == (0 if same else 2)
    assert not audit.is_ok
    severities = {finding.kind: finding.severity for finding in audit.findings}
    details = sorted(finding.detail for finding in audit.select_findings(["contradiction"]))
    assert same or [text.partition("; ")[0] for text in details] == ["x 0", "x 7"]
    assert severities["leak"] == "error"
    assert severities.get("contradiction", "warning") == "warning"  # measured twice
