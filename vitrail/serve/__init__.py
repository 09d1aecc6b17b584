"""HTTP service for trained and exported models, with a page to try them (`vitrail serve`)."""

from importlib.util import find_spec


def check_installed() -> None:
    """Raise ValueError if a dependency of the service is missing. Called before the service is imported."""
    for name in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        if find_spec(name) is None:
            raise ValueError(f"the service needs {name}: pip install 'vitrail[serve]'")
