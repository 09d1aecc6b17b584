"""The header of a shared encoder's file: the configuration and the preprocessing of every modality.

The file is an artifact whose tensors are the layers, `blocks.*`, once, and all others under the name of their modality,
`images.embed.…`. `take` selects a modality, which is then read as an ordinary model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.checkpoints.artifact import (
    CheckpointContract,
    check_about,
    parse_labels_and_preprocessing,
    read_about,
    unreadable_error,
)
from vitrail.checkpoints.io.safetensors import SafetensorsFile
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import ModelConfig
from vitrail.models.shared_encoder import SharedEncoderConfig
from vitrail.utils.json import dataclass_from_json

TYPE = f'"type": "{SharedEncoderConfig.__name__}"'


@dataclass(frozen=True)
class SharedContract:
    """All parts of a shared encoder other than its tensors."""

    config: SharedEncoderConfig
    preprocessing: Mapping[str, Preprocessing | None]  # of the modalities of images, clips and sounds
    card: dict[str, Any]


def is_shared(source: SafetensorsFile) -> bool:
    """Return whether an artifact holds a shared encoder."""
    return TYPE in source.metadata.get("vitrail", "")[:200]


def read_shared(source: SafetensorsFile) -> tuple[SharedContract, dict[str, str]]:
    """Return the contract of a shared encoder and the tensors' digests after verifying the header's checksum."""
    about, digests = read_about(source)
    try:
        check_about(source, about, digests)
        config = dataclass_from_json(about["config"], SharedEncoderConfig, "config")
        models = {name: model for name, model in config.models.items() if isinstance(model, ModelConfig)}
        pipelines = {
            name: parse_labels_and_preprocessing(
                {"labels": None, "preprocessing": about["preprocessing"][name]}, model
            )[1]
            for name, model in models.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable_error(source, error) from None
    return SharedContract(config, pipelines, about["card"]), digests


def read_modality(
    source: SafetensorsFile, take: str | None, towers: bool = False
) -> tuple[str, CheckpointContract, dict[str, str]]:
    """Return the name and the contract of the modality that `take` selects, and the tensors' digests."""
    shared, digests = read_shared(source)
    known = ", ".join(shared.preprocessing)
    if towers:
        raise source.error("a shared encoder, not two towers: use vitrail.load_shared, and its method towers")
    if take is None:
        raise source.error(f"a shared encoder of several modalities: choose one with take=NAME, of {known}")
    if take not in shared.preprocessing:
        reason = "is its text tower: use vitrail.load_shared" if take in shared.config.models else f"is none of {known}"
        raise source.error(f"take={take!r} {reason}")
    model = shared.config.models[take]
    assert isinstance(model, ModelConfig)
    return take, CheckpointContract(model, None, shared.preprocessing[take], shared.card), digests
