"""Tests of clusters: they start system services as root, take minutes, and run with `make test-cluster` only."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def require_request() -> None:
    """Skip unless the tests were asked for."""
    if os.environ.get("VITRAIL_TEST_CLUSTER") != "1":
        pytest.skip("starts system services as root: make test-cluster runs it")
