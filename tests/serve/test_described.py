"""The OpenAPI description: complete, and checked by schemathesis with valid and invalid requests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import serving, tiny

ROOT = Path(__file__).parents[2]


def test_openapi_describes_all_routes(tmp_path):
    with serving(f"tiny={tiny(tmp_path / 'tiny.safetensors')}") as client:
        status, said, _ = client.ask("GET", "/openapi.json")
    assert status == 200
    assert set(said["paths"]) == {
        "/predict",
        "/segment",
        "/embed",
        "/attention",
        "/spectrogram",
        "/models",
        "/search",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    for path in ("/predict", "/segment", "/embed", "/attention"):
        asked = said["paths"][path]["post"]
        assert set(asked["requestBody"]["content"]) >= {"image/jpeg", "application/octet-stream", "multipart/form-data"}
        assert set(asked["responses"]) == {
            "200",
            *(str(code) for code in (400, 401, 404, 408, 409, 413, 415, 422, 500, 503)),
        }
        assert "Retry-After" in asked["responses"]["503"]["headers"]


@pytest.mark.slow
def test_schemathesis_finds_nothing_wrong(tmp_path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'vitrail[dev]'")
    token = "a-long-secret"
    with serving(f"tiny={tiny(tmp_path / 'tiny.safetensors')}", tokens=(token,)) as client:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{client.port}/openapi.json"]
        command += [
            "--header",
            f"Authorization: Bearer {token}",
            "--checks",
            "all",
            "--max-examples",
            "5",
            "--seed",
            "1",
        ]
        command += ["--generation-database", "none", "--suppress-health-check", "all"]
        about = {"SCHEMATHESIS_HOOKS": "tests.serve.hooks", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
        found = subprocess.run(
            command, env=os.environ | about, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert found.returncode == 0, found.stdout[-5000:]
    assert "generated, " in found.stdout
