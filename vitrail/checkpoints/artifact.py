"""The artifact: one safetensors file that is the model, with its configuration, labels, preprocessing and origin.

Its header's metadata has three entries of vitrail's own: `vitrail`, a JSON text with everything that is not a tensor;
`vitrail.tensors`, the SHA-256 of every tensor's bytes; and `vitrail.checksum`, the SHA-256 of the header itself, taken with
these 64 digits at zero. So no byte of the file can change unnoticed.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoints.files.safetensors import SafetensorsFile, bytes_of, header_of, in_order, write_with_header
from vitrail.checkpoints.files.source import parse_json, refuse
from vitrail.checkpoints.look import MOST_LAYERS
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import Config
from vitrail.models.written import dataclass_from_json, from_json, to_json

VERSION = 1
CHECKSUM = re.compile(rb'"vitrail\.checksum":"([0-9a-f]{64})"')
ZEROS = "0" * 64
MOST = 10_000_000  # of anything that a configuration counts


@dataclass(frozen=True)
class Contract:
    """All that a model is besides its tensors."""

    config: Config
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    card: dict[str, Any] = field(default_factory=dict)  # recipe, metrics, provenance, licence: JSON


def is_artifact(metadata: Mapping[str, str]) -> bool:
    return "vitrail" in metadata or "vitrail.checksum" in metadata


def save_artifact(path: Path, tensors: Mapping[str, Tensor], contract: Contract) -> None:
    """Writes the file, all or nothing."""
    tensors = in_order(tensors)
    about = {
        "version": VERSION,
        "config": to_json(contract.config),
        "labels": None if contract.labels is None else list(contract.labels),
        "preprocessing": None if contract.preprocessing is None else to_json(contract.preprocessing),
        "card": contract.card,
    }
    metadata = {
        "format": "pt",
        "vitrail": json.dumps(about, ensure_ascii=False, allow_nan=False),
        "vitrail.tensors": json.dumps({name: digest(tensor) for name, tensor in tensors.items()}),
        "vitrail.checksum": ZEROS,
    }
    header = header_of(tensors, metadata)
    assert len(CHECKSUM.findall(header)) == 1
    found = CHECKSUM.search(header)
    assert found is not None
    start, end = found.span(1)
    write_with_header(path, header[:start] + hashlib.sha256(header).hexdigest().encode() + header[end:], tensors)


def read_contract(source: SafetensorsFile) -> tuple[Contract, dict[str, str]]:
    """The contract and the tensors' digests, once the header is proven to be as it was written."""
    found = list(CHECKSUM.finditer(source.header))
    start, end = found[0].span(1) if len(found) == 1 else (0, 0)
    blank = source.header[:start] + ZEROS.encode() + source.header[end:]
    if len(found) != 1 or hashlib.sha256(blank).hexdigest().encode() != found[0][1]:
        raise refuse(source.path, "damaged: its header is not what was written (the checksum differs)")
    about = parse_json(source.metadata.get("vitrail", "").encode(), source.path, "damaged description")
    digests = parse_json(source.metadata.get("vitrail.tensors", "").encode(), source.path, "damaged checksums")
    try:
        return _contract(about), _digests(digests, set(source.specs))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(source.path, f"not an artifact that this version can read: {error}") from None


def _contract(about: dict[str, Any]) -> Contract:
    if about["version"] != VERSION:
        raise ValueError(f"it is written in version {about['version']}, this vitrail reads {VERSION}")
    check_bounds(about["config"])
    config = from_json(about["config"])
    if not 0 < getattr(config, "eps", 1e-6) < 1:
        raise ValueError(f"an epsilon of {getattr(config, 'eps', None)}")
    labels, pipeline = about["labels"], about["preprocessing"]
    if labels is not None and (not isinstance(labels, list) or not all(isinstance(label, str) for label in labels)):
        raise ValueError("its labels are no list of names")
    if labels is not None and len(labels) != config.classes:
        raise ValueError(f"{len(labels)} labels for {config.classes} classes")
    if not isinstance(about["card"], dict):
        raise ValueError("its card is no table")
    prepare = None if pipeline is None else dataclass_from_json(pipeline, Preprocessing, "preprocessing")
    if prepare is not None and prepare.channels != config.channels:
        raise ValueError(f"its preprocessing gives {prepare.channels} channels and its model takes {config.channels}")
    return Contract(config, None if labels is None else tuple(labels), prepare, about["card"])


def check_bounds(data: Any, name: str = "config") -> None:
    """No number in a configuration is beyond what a model could have: a checksum proves who damaged it, not who wrote it."""
    most = MOST_LAYERS if name in ("depth", "stages") else MOST
    if isinstance(data, dict):
        for key, value in data.items():
            check_bounds(value, key)
    elif isinstance(data, list):
        if len(data) > 16:
            raise ValueError(f"{len(data)} numbers for {name}")
        for value in data:
            check_bounds(value, name)
    elif isinstance(data, int | float) and not abs(data) <= most:
        raise ValueError(f"{name} is {data:g}, more than any model has")


def _digests(digests: Any, names: set[str]) -> dict[str, str]:
    if not isinstance(digests, dict) or set(digests) != names:
        raise ValueError("its checksums are not those of its tensors")
    return digests


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()
