"""The annotated page is what its template and the source say now."""

import subprocess
import sys
from pathlib import Path

import pytest

ANNOTATE = Path(__file__).parents[1] / "docs" / "annotate.py"


def test_the_annotated_page_has_not_drifted():
    result = subprocess.run([sys.executable, ANNOTATE, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_matrix_of_conversions_is_what_the_tests_prove():
    pytest.importorskip("timm", reason="the peers are not installed: pip install 'vitrail[peers]'")
    from tests.parity.matrix import matrix

    assert matrix() in (Path(__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")
