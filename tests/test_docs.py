"""Tests that the documentation agrees with the source."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ANNOTATE = Path(__file__).parents[1] / "docs" / "annotate.py"


def test_annotated_page_is_up_to_date():
    result = subprocess.run([sys.executable, ANNOTATE, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_matrix_of_conversions_is_up_to_date():
    pytest.importorskip("timm", reason="the peers are not installed: pip install 'vitrail[peers]'")
    from tests.parity.matrix import matrix

    assert matrix() in (Path(__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")


def test_make_bench_runs_every_benchmark_without_arguments():
    root = Path(__file__).parents[1]
    run = set(re.findall(r"benchmarks/(\w+)\.py", (root / "Makefile").read_text()))
    parts = {"measure", "plain_server", "serving", "shipping_peers", "cifar10_sheets"}  # parts of others, or fetch data
    given = {"merging", "same_answers", "spoken_digits"}  # need files as arguments, see docs/benchmarks.md, results.md
    assert run | parts | given == {path.stem for path in (root / "benchmarks").glob("*.py")}
    assert not run & given


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "README.md", "docs/security.md"])
def test_files_that_a_page_names_exist(page):
    root = Path(__file__).parents[1]
    text = (root / page).read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:vitrail|tests|benchmarks|examples|docs)/[\w/.-]+)`", text))
    missing = [path for path in sorted(paths) if not (root / path).exists() and "NAME" not in path]
    assert missing == []
