"""Packaging: the extras, the pinned versions, the wheel, the commit hooks and the citation agree with each other."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import vitrail

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CORE = PYPROJECT["project"]["dependencies"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
}


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the checkout on its import path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def run_pip(*arguments: object, cwd: Path, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run pip for an environment, with the pinned versions, also for what it builds with."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=cwd, PIP_CONSTRAINT=str(CONSTRAINTS))


def resolve(requirements: list[str], *options: str, cwd: Path) -> dict[str, Version]:
    """Return the packages that pip would install for some requirements, with the pinned versions."""
    report = cwd / "report.json"
    result = run_pip("install", "--dry-run", "--quiet", "--report", report, *options, *requirements, cwd=cwd)
    assert result.returncode == 0, result.stderr
    found = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {canonicalize_name(item["name"]): Version(item["version"]) for item in found}


def find_unpinned(packages: dict[str, Version]) -> dict[str, Version]:
    """Return the packages whose version is not pinned; a local part such as +cpu does not count."""
    return {name: version for name, version in packages.items() if PINS.get(name) != Version(version.public)}


@pytest.fixture(scope="module")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where pip is missing or reaches no package index."""
    pytest.importorskip("pip", reason="pip is not installed in this environment")
    options = ("--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--retries", "1", "--timeout", "10")
    result = run_pip("install", *options, "hatchling", cwd=tmp_path_factory.mktemp("index"))
    if result.returncode or "connection broken" in result.stderr:
        pytest.skip("no package index can be reached")


@pytest.fixture(scope="module")
def wheel(package_index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the checkout; building needs the index for hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    result = run_pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("vitrail-*.whl"))


# --- pinned versions ---


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_pinned_versions_are_in_the_range_of_every_requirement(extra: str | None) -> None:
    requirements = list(map(Requirement, EXTRAS[extra] if extra else CORE + PYPROJECT["build-system"]["requires"]))
    unpinned = [item.name for item in requirements if canonicalize_name(item.name) not in PINS]
    assert unpinned == []
    outside = [str(item) for item in requirements if PINS[canonicalize_name(item.name)] not in item.specifier]
    assert outside == []


def test_make_installs_every_extra_but_two_loggers_and_umap() -> None:
    installed = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert installed is not None
    assert set(installed[1].split(",")) == set(EXTRAS) - {"wandb", "mlflow", "umap"}


@pytest.mark.slow
@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_resolves_with_the_pinned_versions(extra: str, tmp_path: Path) -> None:
    """Packages that this environment has in their pinned version are not fetched again."""
    assert find_unpinned(resolve(CORE + EXTRAS[extra], cwd=tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("package_index")
def test_all_extras_resolve_together_and_every_package_is_pinned(tmp_path: Path) -> None:
    requirements = CORE + [item for extra in EXTRAS.values() for item in extra]
    packages = resolve(requirements, "--ignore-installed", cwd=tmp_path)
    assert {canonicalize_name(Requirement(item).name) for item in requirements} <= set(packages)
    assert find_unpinned(packages) == {}


# --- the wheel ---


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vitrail").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("vitrail/")}
    assert packed == expected
    assert {Path(name).suffix for name in packed} >= {".py", ".html", ".css", ".js", ".png", ".typed"}


@pytest.fixture
def empty_environment(tmp_path: Path) -> Iterator[Path]:
    """A virtual environment without packages. It is removed at once: pytest would keep more than a gigabyte."""
    home = tmp_path / "environment"
    made = run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    yield home
    shutil.rmtree(home)


@pytest.mark.slow
def test_wheel_trains_in_an_empty_environment(wheel: Path, empty_environment: Path, tmp_path: Path) -> None:
    home, python = empty_environment, empty_environment / "bin" / "python"
    installed = run_pip("install", "--quiet", "--no-compile", wheel, cwd=tmp_path, python=python)
    assert installed.returncode == 0, installed.stderr
    where = run(python, "-c", "import vitrail; print(vitrail.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(home), where

    command = home / "bin" / "vitrail"
    shown = run(command, "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "vitrail train" in shown.stdout
    trained = run(command, "train", "digits", "--steps", "5", "--out", "run", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    for name in ("model.safetensors", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 0


# --- commit hooks and citation ---


def check_message(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "message").write_text(message, encoding="utf-8")
    return run(sys.executable, ROOT / ".ci" / "check_commit_message.py", folder / "message", cwd=folder)


@pytest.mark.parametrize(
    "message",
    [
        "×" * 72,  # characters count, not bytes
        "Fix a test\n\n" + "a long line of the body " * 5,
        "# a comment that git removes, longer than seventy-two characters as it stands here\nFix a test\n",
        "Fix a test\n\n# ------------------------ >8 ------------------------\ndiff --git a/" + "b" * 90,
    ],
)
def test_commit_message_is_accepted(message: str, tmp_path: Path) -> None:
    result = check_message(message, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("x" * 73, "error: the subject must have at most 72 characters, got 73"),
        ("Fix a test\nand another", "error: a blank line must follow the subject, got: and another"),
    ],
)
def test_commit_message_is_refused(message: str, error: str, tmp_path: Path) -> None:
    result = check_message(message, tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(error)


def test_commit_hooks_run_the_tools_of_the_environment() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'vitrail[dev]'")
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [item["repo"] for item in repositories] == ["local"]  # any other is downloaded
    hooks = repositories[0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-format", "ruff-check", "commit-message"]
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks)


def test_citation_names_this_version() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'vitrail[dev]'")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == vitrail.__version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["message"]
    assert citation["authors"]
