"""Files of shared encoders: one encoder with the embeddings of several modalities."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.artifact import ARTIFACT_VERSION, TOKENIZER_TENSOR, hash_tensor, is_artifact, write_artifact
from vitrail.checkpoints.checkpoint import is_finite
from vitrail.checkpoints.io import open_checkpoint
from vitrail.checkpoints.io.safetensors import SafetensorsFile
from vitrail.checkpoints.keys import format_names
from vitrail.checkpoints.load import SkipInit, assign_tensors, check_state, resolve_path
from vitrail.checkpoints.modalities import is_shared, read_shared
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.tokenizer import Tokenizer
from vitrail.models.base import Model
from vitrail.models.shared_encoder import SharedEncoder, SharedEncoderConfig, strip_modality
from vitrail.models.text import TextConfig
from vitrail.utils.json import to_json


def save_shared(shared: SharedEncoder, path: str | Path, **card: Any) -> None:
    """Save a shared encoder as one file, with the preprocessing of its modalities and its tokeniser, atomically.

    `vitrail.load(path, take="images")` reads one modality of it as an ordinary model. `card` takes other facts as JSON
    values: `recipe`, `metrics`, `provenance`, `licence`.
    """
    models = {name: model for name in shared if isinstance(model := shared[name], Model)}
    for name, model in models.items():
        pipeline = model.preprocessing
        if pipeline is not None and not isinstance(pipeline, Preprocessing):
            raise ValueError(f"preprocessing of {name} must be a vitrail Preprocessing, got {type(pipeline).__name__}")
        if pipeline is not None and pipeline.channels != model.config.channels:
            takes = f"the model takes {model.config.channels}"
            raise ValueError(f"preprocessing of {name} gives {pipeline.channels} channels, {takes}")
        if pipeline is not None:
            pipeline.check_frames(model.config.frames, f"change the clip of {name}")
    state, wanted = shared.state_dict(), build_meta(shared.config).state_dict()
    check_state(state, wanted)
    tensors = {strip_modality(name): tensor for name, tensor in state.items()}
    if shared.tokenizer is not None:
        check_shared_tokenizer(shared.config, shared.tokenizer)
        assert isinstance(shared.tokenizer, Tokenizer)
        tensors[TOKENIZER_TENSOR] = shared.tokenizer.to_bytes()
    about = {
        "version": ARTIFACT_VERSION,
        "config": to_json(shared.config),
        "preprocessing": {name: to_json(model.preprocessing) for name, model in models.items()},
        "card": card,
    }
    write_artifact(Path(path), tensors, about)


def check_shared_tokenizer(config: SharedEncoderConfig, tokenizer: object) -> None:
    """Raise ValueError unless the tokeniser is one of vitrail for a text tower of the encoder."""
    texts = [model for model in config.models.values() if isinstance(model, TextConfig)]
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer must be a vitrail Tokenizer, got {type(tokenizer).__name__}")
    if not any(text.context == tokenizer.context and tokenizer.vocabulary <= text.vocabulary for text in texts):
        size = f"{tokenizer.vocabulary:,} tokens and a context of {tokenizer.context}"
        raise ValueError(f"the tokeniser has {size}, which no text tower of the encoder has: give its own")


def load_shared(
    path: str | Path, *, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu"
) -> SharedEncoder:
    """Load a shared encoder with all its modalities, in evaluation mode; `vitrail.load(path, take=…)` reads one of them."""
    with open_checkpoint(resolve_path(path), take=None) as source:
        if not isinstance(source, SafetensorsFile) or not is_artifact(source.metadata) or not is_shared(source):
            raise source.error("not a shared encoder: use vitrail.load")
        contract, digests = read_shared(source)
        tensors: dict[str, Tensor] = {}
        for name in source.specs:
            tensors[name] = source.read(name)
            if hash_tensor(tensors[name]) != digests[name]:
                raise source.error(f"damaged: the checksum of {name} differs")
        if bad := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
            raise source.error(f"values that are not finite in {len(bad)}: {format_names(bad)}")
        tokenizer = tensors.pop(TOKENIZER_TENSOR, None)
        shared = build_meta(contract.config)
        wanted = {name: strip_modality(name) for name in shared.state_dict()}
        shapes = {wanted[name]: tensor.shape for name, tensor in shared.state_dict().items()}
        differ = [
            n for n in {*tensors, *shapes} if n not in shapes or n not in tensors or tensors[n].shape != shapes[n]
        ]
        if differ:
            raise source.error(f"the tensors differ from the configuration in {format_names(sorted(differ))}")
        once = [name for name, _ in (*shared.named_parameters(), *shared.named_buffers()) if name in wanted]
        assign_tensors(shared, {name: tensors[wanted[name]] for name in once}, dtype, device)
        if tokenizer is not None:
            shared.tokenizer = Tokenizer.from_bytes(tokenizer)
            check_shared_tokenizer(contract.config, shared.tokenizer)
    for name, pipeline in contract.preprocessing.items():
        model = shared[name]
        assert isinstance(model, Model)
        model.preprocessing, model.card = pipeline, contract.card
    return shared.eval()


def build_meta(config: SharedEncoderConfig) -> SharedEncoder:
    """Return a shared encoder on the meta device without initialising its weights."""
    with torch.device("meta"), SkipInit():
        return SharedEncoder(config)
