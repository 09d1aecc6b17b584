"""Packages and extras: the table of the doctor is that of pyproject.toml."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vitrail.doctor import packages
from vitrail.doctor.packages import (
    DEVELOPMENT,
    EXTRAS,
    MIN_PYTHON,
    REQUIRED,
    Requirement,
    describe_packages,
    list_requirement_texts,
    module_name,
    parse_release,
    read_requirements,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_extra_that_users_install_says_what_it_enables():
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - set(DEVELOPMENT), (
        "add it to EXTRAS in doctor/packages.py"
    )
    assert all(EXTRAS.values())


def test_the_oldest_python_is_that_of_the_project():
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, MIN_PYTHON))


def test_ranges_come_from_the_checkout():
    required = {requirement.name: requirement.specifier for requirement in read_requirements()[REQUIRED]}
    assert required["torch"].startswith(">=2.")
    assert set(required) >= {"numpy", "pillow"}


def test_ranges_come_from_the_installed_package_without_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(packages.vitrail, "__file__", str(tmp_path / "vitrail" / "__init__.py"))
    lines = ["torch>=2.7", 'av>=14 ; extra == "video"', "simplejpeg>=1.8; extra == 'fast'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    found = read_requirements()
    assert found["video"] == [Requirement("av", ">=14")]
    assert found["fast"] == [Requirement("simplejpeg", ">=1.8")]
    assert found[REQUIRED] == [Requirement("torch", ">=2.7")]


def test_without_any_metadata_there_are_no_ranges(tmp_path, monkeypatch):
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.vitrail, "__file__", str(tmp_path / "vitrail" / "__init__.py"))
    monkeypatch.setattr(metadata, "requires", missing)
    assert list_requirement_texts() == []


@pytest.mark.parametrize(
    ("specifier", "version", "fits"),
    [
        (">=2.7", "2.13.0+cpu", True),
        (">=2.7", "2.6.9", False),
        (">=2", "2", True),
        (">=2.0.0", "2.0", True),
        (">=1.26,<3", "3.0", False),
        ("", "0.0.1", True),
        (">=2024.4", "2026.11.9", True),
        (">=1.0", "unknown", False),
    ],
)
def test_ranges_of_versions(specifier, version, fits):
    assert Requirement("x", specifier).supports(version) is fits


def test_a_version_is_its_numbers():
    assert parse_release("2.13.0a1+cu126") == (2, 13, 0)


def test_missing_packages_have_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(packages, "find_version", lambda name: None if name == "onnx" else "9999.0")
    groups = {group["name"]: group for group in describe_packages()}
    assert groups["onnx"]["install"] == "pip install 'vitrail[onnx]'"
    assert [package["status"] for package in groups["onnx"]["packages"]].count("missing") == 1
    assert groups["fast"]["install"] is None


def test_names_of_modules():
    assert [module_name(name) for name in ("pillow", "scikit-learn", "faiss-cpu", "huggingface_hub")] == [
        "PIL",
        "sklearn",
        "faiss",
        "huggingface_hub",
    ]
