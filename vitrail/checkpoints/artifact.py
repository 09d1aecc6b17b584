"""The artifact: one safetensors file with a model's weights, configuration, labels, preprocessing and provenance.

A tokeniser is a tensor of bytes beside the weights. The header's metadata has three entries: `vitrail`, a JSON text with
everything that is not a tensor; `vitrail.tensors`, the SHA-256 of every tensor's bytes; and `vitrail.checksum`, the SHA-256
of the header itself, computed with these 64 digits at zero. So a change of any byte of the file is detected.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoints.formats import MAX_LAYERS, LabelsAndPreprocessing
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.io.source import parse_json
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.tokenizer import Tokenizer
from vitrail.models.base import ModelConfig
from vitrail.models.registry import config_from_json
from vitrail.utils.json import dataclass_from_json, to_json

ARTIFACT_VERSION = 1
CHECKSUM_PATTERN = re.compile(rb'"vitrail\.checksum":"([0-9a-f]{64})"')
ZERO_CHECKSUM = "0" * 64
TOKENIZER_TENSOR = "tokenizer"  # uint8; no weight has this name
MAX_CONFIG_VALUE = 10_000_000  # of any number in a configuration


@dataclass(frozen=True)
class CheckpointContract:
    """All parts of a model other than its tensors."""

    config: ModelConfig
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    card: dict[str, Any] = field(default_factory=dict)  # recipe, metrics, provenance, licence: JSON
    tokenizer: Tokenizer | None = None  # of a text tower


def is_artifact(metadata: Mapping[str, str]) -> bool:
    return "vitrail" in metadata or "vitrail.checksum" in metadata


def save_artifact(path: Path, tensors: Mapping[str, Tensor], contract: CheckpointContract) -> None:
    """Write the file atomically."""
    if contract.tokenizer is not None:
        tensors = {**tensors, TOKENIZER_TENSOR: contract.tokenizer.to_bytes()}
    about = {
        "version": ARTIFACT_VERSION,
        "config": to_json(contract.config),
        "labels": to_json(contract.labels),
        "preprocessing": to_json(contract.preprocessing),
        "card": contract.card,
    }
    write_artifact(path, tensors, about)


def write_artifact(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors and the facts of a header atomically, with checksums of both."""
    tensors = safetensors.sort_tensors(tensors)
    metadata = {
        "format": "pt",
        "vitrail": json.dumps(about, ensure_ascii=False, allow_nan=False),
        "vitrail.tensors": json.dumps({name: hash_tensor(tensor) for name, tensor in tensors.items()}),
        "vitrail.checksum": ZERO_CHECKSUM,
    }
    header = safetensors.build_header(tensors, metadata)
    (match,) = CHECKSUM_PATTERN.finditer(header)
    start, end = match.span(1)
    checksum = hashlib.sha256(header).hexdigest().encode()
    safetensors.write_with_header(path, header[:start] + checksum + header[end:], tensors)


def read_about(source: safetensors.SafetensorsFile) -> tuple[Any, Any]:
    """Return the facts of the header and the tensors' digests as JSON, after verifying the header's checksum."""
    matches = list(CHECKSUM_PATTERN.finditer(source.header))
    start, end = matches[0].span(1) if len(matches) == 1 else (0, 0)
    blank = source.header[:start] + ZERO_CHECKSUM.encode() + source.header[end:]
    if len(matches) != 1 or hashlib.sha256(blank).hexdigest().encode() != matches[0][1]:
        raise source.error("damaged: the checksum of its header differs")
    about = parse_json(source.metadata.get("vitrail", "").encode(), source.path, "damaged metadata")
    return about, parse_json(source.metadata.get("vitrail.tensors", "").encode(), source.path, "damaged checksums")


def read_contract(source: safetensors.SafetensorsFile) -> tuple[CheckpointContract, dict[str, str]]:
    """Return the contract and the tensors' digests after verifying the header's checksum."""
    about, digests = read_about(source)
    try:
        check_about(source, about, digests)
        return _parse_contract(about), digests
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable_error(source, error) from None


def unreadable_error(source: safetensors.SafetensorsFile, error: Exception) -> ValueError:
    """Return the error for an artifact whose header has values that this version does not know."""
    return source.error(f"this version cannot read the artifact: {error}")


def check_about(source: safetensors.SafetensorsFile, about: dict[str, Any], digests: Any) -> None:
    """Raise ValueError for another version, sizes beyond any model's, or digests of other tensors."""
    if not isinstance(digests, dict) or set(digests) != set(source.specs):
        raise ValueError("the checksums are not those of its tensors")
    if about["version"] != ARTIFACT_VERSION:
        raise ValueError(f"its version is {about['version']}, supported is {ARTIFACT_VERSION}")
    check_bounds(about["config"])
    if not isinstance(about["card"], dict):
        raise ValueError("card must be a JSON object")


def _parse_contract(about: dict[str, Any]) -> CheckpointContract:
    config = config_from_json(about["config"])
    labels, pipeline = parse_labels_and_preprocessing(about, config)
    if labels is not None and len(labels) != config.classes:
        raise ValueError(f"{len(labels)} labels for {config.classes} classes")
    return CheckpointContract(config, labels, pipeline, about["card"])


def parse_labels_and_preprocessing(about: Mapping[str, Any], config: ModelConfig) -> LabelsAndPreprocessing:
    """Return the labels and preprocessing in a file's metadata; either may be None."""
    labels, pipeline = about["labels"], about["preprocessing"]
    if labels is not None and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise ValueError("labels must be a list of names")
    prepare = None if pipeline is None else dataclass_from_json(pipeline, Preprocessing, "preprocessing")
    if prepare is not None and prepare.channels != config.channels:
        raise ValueError(f"preprocessing gives {prepare.channels} channels and the model takes {config.channels}")
    return None if labels is None else tuple(labels), prepare


def check_bounds(data: Any, name: str = "config") -> None:
    """Raise for numbers beyond any model's: a checksum detects damage, not a malicious author."""
    most = MAX_LAYERS if name in ("depth", "stages") else MAX_CONFIG_VALUE
    if isinstance(data, dict):
        for key, value in data.items():
            check_bounds(value, key)
    elif isinstance(data, list):
        if len(data) > 16:
            raise ValueError(f"{name} has {len(data)} numbers, at most 16 are supported")
        for value in data:
            check_bounds(value, name)
    elif name == "eps" and isinstance(data, int | float) and not 0 < data < 1:
        raise ValueError(f"eps must be between 0 and 1, got {data}")
    elif isinstance(data, int | float) and not abs(data) <= most:
        raise ValueError(f"{name} must be at most {most:,}, got {data:g}")


def hash_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(safetensors.tensor_bytes(tensor)).hexdigest()
