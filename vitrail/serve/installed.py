"""Whether what the service is built on is there: asked before it is imported."""

from importlib.util import find_spec


def check_installed() -> None:
    """One line where something is missing."""
    for name in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        if find_spec(name) is None:
            raise ValueError(f"the service needs {name}: pip install 'vitrail[serve]'")
