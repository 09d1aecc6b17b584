"""The annotated page is what its template and the source say now."""

import subprocess
import sys
from pathlib import Path

ANNOTATE = Path(__file__).parents[1] / "docs" / "annotate.py"


def test_the_annotated_page_has_not_drifted():
    result = subprocess.run([sys.executable, ANNOTATE, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
