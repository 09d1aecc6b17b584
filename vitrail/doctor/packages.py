"""Installed packages: what vitrail requires, and its extras with what each of them enables."""

import platform
import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import vitrail

MIN_PYTHON = (3, 11)
# Extras of pyproject.toml that users install, in the order of the report, with what each enables.
EXTRAS = {
    "fast": "a faster JPEG decoder with the same pixels",
    "video": "files of video",
    "audio": "files of sound",
    "text": "tokenisers of CLIP and SigLIP",
    "hub": "checkpoints of the Hugging Face Hub, vitrail push",
    "datasets": "datasets of the Hugging Face Hub",
    "parquet": "Parquet tables and their images",
    "remote": "shards over HTTP",
    "s3": "shards on S3",
    "onnx": "vitrail export to ONNX, ONNX Runtime",
    "openvino": "vitrail export to OpenVINO, int8",
    "serve": "vitrail serve",
    "umap": "vitrail embed --plot --projection umap",
    "faiss": "vitrail search over very many images",
    "tensorboard": "vitrail train --log tensorboard",
    "wandb": "vitrail train --log wandb",
    "mlflow": "vitrail train --log mlflow",
}
REQUIRED = "required"  # the group of packages that every installation has
DEVELOPMENT = ("peers", "site", "dev")  # extras that no command needs
# Modules whose name is not that of the package.
MODULES = {"pillow": "PIL", "scikit-learn": "sklearn", "faiss-cpu": "faiss", "prometheus-client": "prometheus_client"}
REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
EXTRA_MARKER = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


@dataclass(frozen=True)
class Requirement:
    """A package with the range of versions that is supported."""

    name: str
    specifier: str  # ">=2.7", or "" for any version

    def supports(self, version: str) -> bool:
        """Return whether a version is in the range."""
        found = parse_release(version)
        for part in filter(None, (part.strip() for part in self.specifier.split(","))):
            sign, bound = re.fullmatch(r"([<>=!~]+)\s*(.+)", part).groups()  # type: ignore[union-attr]
            given = parse_release(bound)
            longest = max(len(found), len(given))
            left, right = (numbers + (0,) * (longest - len(numbers)) for numbers in (found, given))
            fits = {">=": left >= right, "<": left < right, ">": left > right, "<=": left <= right, "==": left == right}
            if not fits.get(sign, True):
                return False
        return True


def parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(map(int, found[0].split("."))) if found else ()


def read_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of vitrail by extra; the group "required" is always needed.

    They are read from the pyproject.toml of a checkout, else from what pip installed.
    """
    groups: dict[str, list[Requirement]] = {}
    for extra, text in list_requirement_texts():
        found = REQUIREMENT.match(text)
        if found:
            groups.setdefault(extra, []).append(Requirement(found[1], found[2].strip(" ()")))
    return groups


def list_requirement_texts() -> list[tuple[str, str]]:
    """Return pairs of an extra, or "required", and a requirement as text."""
    table = Path(vitrail.__file__).parents[1] / "pyproject.toml"
    if table.is_file():
        project = tomllib.loads(table.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "vitrail":
            texts = [(REQUIRED, text) for text in project["dependencies"]]
            extras = project["optional-dependencies"]
            return texts + [(extra, text) for extra in extras for text in extras[extra]]
    try:
        lines = metadata.requires("vitrail") or []
    except metadata.PackageNotFoundError:
        return []
    texts = []
    for line in lines:
        marker = EXTRA_MARKER.search(line)
        texts.append((marker[1] if marker else REQUIRED, line))
    return texts


def describe_packages() -> list[dict[str, Any]]:
    """Return the groups of packages: what vitrail requires first, then its extras, with the pip command for what is missing."""
    requirements = read_requirements()
    groups = []
    for name in (REQUIRED, *EXTRAS):
        packages = [describe_package(requirement) for requirement in requirements.get(name, [])]
        lacking = [package for package in packages if package["status"] != "ok"]
        target = "vitrail" if name == REQUIRED else f"vitrail[{name}]"
        command = f"pip install '{target}'" if lacking else None
        enables = "every command" if name == REQUIRED else EXTRAS[name]
        groups.append({"name": name, "enables": enables, "packages": packages, "install": command})
    return groups


def describe_package(requirement: Requirement) -> dict[str, Any]:
    """Return the version of a package and its status: ok, missing, or unsupported."""
    version = find_version(requirement.name)
    status = "missing" if version is None else "ok" if requirement.supports(version) else "unsupported"
    return {"name": requirement.name, "version": version, "supported": requirement.specifier, "status": status}


def find_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def module_name(package: str) -> str:
    """Return the name by which a package is imported."""
    return MODULES.get(package, package.replace("-", "_"))


def describe_python() -> dict[str, Any]:
    """Return the version of Python, and whether vitrail supports it."""
    supported = ">=" + ".".join(map(str, MIN_PYTHON))
    version = platform.python_version()
    status = "ok" if parse_release(version) >= MIN_PYTHON else "unsupported"
    build = platform.python_implementation()
    return {"version": version, "implementation": build, "supported": supported, "status": status}
