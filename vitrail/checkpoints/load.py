"""`vitrail.load` and `vitrail.save`, and the weights file, name and checksum of a trained model."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.checkpoints.adapter import read_adapter
from vitrail.checkpoints.artifact import MAX_CONFIG_VALUE, CheckpointContract, save_artifact
from vitrail.checkpoints.checkpoint import (
    ByteProgress,
    Checkpoint,
    check_tokenizer,
    is_finite,
    no_progress,
    open_and_detect,
)
from vitrail.checkpoints.hub import download_weights
from vitrail.checkpoints.io import FILES_BY_SAFETY, list_folder, rank_weights
from vitrail.checkpoints.io.source import read_json
from vitrail.checkpoints.keys import build_meta_state, format_names
from vitrail.checkpoints.known_models import check_known, expand_name
from vitrail.data.preprocessing import PIL_MODES, Preprocessing
from vitrail.data.tokenizer import TOKENIZER_FILES, Tokenizer, read_tokenizer
from vitrail.models.adapt import KEEP, with_channels, with_classes, with_frames, with_size
from vitrail.models.base import Model, ModelConfig, State, image_sides, remove_calibration
from vitrail.models.registry import FAMILIES, lay_out
from vitrail.models.two_towers import TwoTowers

MODEL_FILE, BEST_FILE = "model.safetensors", "best.safetensors"


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    allow_missing: Iterable[str] = (),
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    frames: int | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    mmap: bool = True,
    progress: ByteProgress = no_progress,
) -> Model:
    """Load a complete model from a checkpoint of any known format, in evaluation mode.

    `path` is a file, a directory, `hf://owner/name` on the Hugging Face Hub (at a `revision`), or a name of `vitrail
    models` ("deit-tiny"). `model.labels` and `model.preprocessing` are loaded with it. Weights are converted to `dtype`;
    None keeps the stored one. `assume` gives facts that tensors do not determine (`{"heads": 6}`), `take` selects one of
    several models in a file, and `classes`, `image_size`, `channels`, `frames` (of a clip) adapt the model. `adapter` is a
    PEFT directory whose low-rank additions (LoRA) are merged. `mmap` leaves the weights in the pages of a safetensors
    file, copied on write: fast, and suitable for training, but a program that overwrites that file in place (vitrail never
    does) would change the model.
    """
    with open_and_detect(resolve_path(path, revision), assume, take) as checkpoint:
        changes = {"classes": classes, "image_size": image_size, "channels": channels, "frames": frames}
        return read_model(checkpoint, dtype, device, allow_missing, adapter, mmap, progress, **changes)


def load_towers(
    path: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    allow_missing: Iterable[str] = (),
    image_size: int | tuple[int, int] | None = None,
    revision: str | None = None,
    mmap: bool = True,
    progress: ByteProgress = no_progress,
) -> TwoTowers:
    """Load the image tower and the text tower of a model like CLIP or SigLIP, in evaluation mode.

    `vitrail.load` reads the image tower of the same file alone. `model.tokenizer` is that of the file or of the files beside
    it; `tokenizer` gives another one: a directory, a tokenizer.json, OpenAI's `bpe_simple_vocab_16e6.txt.gz`, or a
    `Tokenizer`. The other arguments are those of `vitrail.load`.
    """
    with open_and_detect(resolve_path(path, revision, towers=True), assume, take, towers=True) as checkpoint:
        contract = checkpoint.contract
        if tokenizer is not None:
            text = contract.config.text_tower
            assert text is not None
            read = tokenizer if isinstance(tokenizer, Tokenizer) else read_tokenizer(tokenizer, text.context)
            checkpoint.contract = replace(contract, tokenizer=check_tokenizer(read, contract.config))
        model = read_model(checkpoint, dtype, device, allow_missing, None, mmap, progress, image_size=image_size)
    assert isinstance(model, TwoTowers)
    return model


def read_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: str | torch.device,
    allow_missing: Iterable[str],
    adapter: str | Path | None,
    mmap: bool,
    progress: ByteProgress,
    **changes: Any,
) -> Model:
    """Return the model in an open checkpoint with an adapter merged and changes made; see `load` and `adapt_state`."""
    with ThreadPoolExecutor(1) as other:
        contract = checkpoint.contract
        body = other.submit(build_meta_model, contract.config)  # built while the values are read
        state = checkpoint.read_state(allow_missing, progress, mmap)
        if adapter is not None:
            contract, state = merge_adapter(contract, state, adapter)
        contract, state = adapt_state(contract, state, **changes)
        unchanged = contract.config == checkpoint.contract.config
        model = assemble_model(contract, state, dtype, device, body.result() if unchanged else None)
    if checkpoint.random_tensors:
        model.card = {**model.card, "random": checkpoint.random_tensors}
    return model


def resolve_path(path: str | Path, revision: str | None = None, towers: bool = False) -> Path:
    """Return the local path of a file, a directory, `hf://owner/name` or the name of a public model."""
    address = expand_name(path) if isinstance(path, str) else path
    if isinstance(address, str) and address.startswith("hf://"):
        return download_weights(address, revision, TOKENIZER_FILES if towers else ())
    if revision is not None:
        raise ValueError(f"revision needs hf://owner/name, and {path} is a local path")
    if isinstance(path, str):
        check_architecture(path)
        check_known(path)
    return Path(path)


def check_architecture(path: str) -> None:
    """Raise FileNotFoundError for the name of an architecture, such as S/16, which has no weights."""
    if any(family.matches(path) for family in FAMILIES.values()) and not os.path.exists(path):
        trained = "`vitrail models` lists trained models"
        raise FileNotFoundError(f"{path} names an architecture, without weights: {trained}, model={path!r} trains one")


def build_meta_model(config: ModelConfig) -> Model:
    """Return a model on the meta device without initialising its weights."""
    with torch.device("meta"), SkipInit():
        return lay_out(config)


class SkipInit(TorchFunctionMode):
    """A mode that skips `torch.nn.init`, which would take most of the time of building a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def assemble_model(
    contract: CheckpointContract,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: str | torch.device = "cpu",
    body: Model | None = None,
) -> Model:
    """Return the model of a contract with these tensors as its parameters and buffers; the names must match exactly.

    `body` is the model on the meta device, if it is already built.
    """
    model = build_meta_model(contract.config) if body is None else body
    assign_tensors(model, state, dtype, device)
    model.labels, model.preprocessing, model.card = contract.labels, contract.preprocessing, dict(contract.card)
    model.tokenizer = contract.tokenizer
    return model.eval()


def assign_tensors(
    model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None, device: str | torch.device = "cpu"
) -> None:
    """Set the parameters and buffers of a module on the meta device; the names must match exactly."""
    tensors = {name: _convert_tensor(tensor, dtype, device) for name, tensor in state.items()}
    stored = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, old in module.named_parameters(recurse=False):
            new = tensors.pop(start + name)
            assert new.shape == old.shape, start + name
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if start + name in tensors:
                module.register_buffer(name, tensors.pop(start + name))
            else:  # not stored: an empty buffer that holds the device and the precision
                module.register_buffer(name, torch.empty(buffer.shape, dtype=stored, device=device), persistent=False)
    assert not tensors, f"{len(tensors)} tensors are not in the model"


def _convert_tensor(tensor: Tensor, dtype: torch.dtype | None, device: str | torch.device) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.to(device)
    converted = tensor.to(device=device, dtype=dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not is_finite(converted):
        raise ValueError(f"values are too large for {dtype}: keep the stored precision with dtype=None")
    return converted


def adapt_state(
    contract: CheckpointContract,
    state: State,
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    frames: int | None = None,
) -> tuple[CheckpointContract, State]:
    """Return a contract and its tensors for other classes, another image size, other channels or frames."""
    config, labels, pipeline, card = contract.config, contract.labels, contract.preprocessing, contract.card
    for name, number in (("classes", classes), ("image size", image_size), ("channels", channels), ("frames", frames)):
        if number is not KEEP and number is not None and max(image_sides(number)) > MAX_CONFIG_VALUE:
            raise ValueError(f"{name} must be at most {MAX_CONFIG_VALUE:,}, got {number}")
    if classes is not KEEP and classes != config.classes:
        config, state = with_classes(config, state, classes)
        labels, card = None, remove_calibration(card)
    if image_size is not None and image_sides(image_size) != config.image_size:
        config, state = with_size(config, state, image_sides(image_size))
        pipeline = None if pipeline is None else pipeline.with_size(config.image_size)
    if frames is not None and frames != config.frames:
        config, state = with_frames(config, state, frames)
        pipeline = None if pipeline is None else pipeline.with_frames(frames)
    if channels is not None and channels != config.channels:
        config, state = with_channels(config, state, channels)
        pipeline = None if pipeline is None else pipeline.with_channels(channels)
    return replace(contract, config=config, labels=labels, preprocessing=pipeline, card=card), state


def merge_adapter(contract: CheckpointContract, state: State, folder: str | Path) -> tuple[CheckpointContract, State]:
    """Return a contract and its tensors with PEFT's low-rank additions merged, and the adapter's head if it has one."""
    adapter = read_adapter(folder, contract.config)
    size = contract.config.image_size if adapter.preprocessing is None else adapter.preprocessing.size
    classes = contract.config.classes if adapter.classes is None else adapter.classes
    contract, state = adapt_state(contract, state, classes, size)
    state = dict(state)
    for name, tensor in adapter.head.items():
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(f"{folder} has a head of another shape than the model: {name} {list(tensor.shape)}")
        state[name] = tensor.to(state[name].dtype)
    for name, difference in adapter.deltas.items():
        state[name] = (state[name].double() + difference).to(state[name].dtype)
    for name in (*adapter.head, *adapter.deltas):
        if not torch.isfinite(state[name].double()).all():
            raise ValueError(f"{folder} makes {name} too large for {state[name].dtype}: check its lora_alpha")
    if adapter.labels is not None and len(adapter.labels) != contract.config.classes:
        raise ValueError(f"{folder} has {len(adapter.labels)} labels for {contract.config.classes} classes")
    labels = adapter.labels if adapter.head else contract.labels  # a new head has other classes
    pipeline, card = adapter.preprocessing or contract.preprocessing, contract.card
    card = remove_calibration(card) if adapter.head else card
    return replace(contract, labels=labels, preprocessing=pipeline, card=card), state


def save(
    model: Model,
    path: str | Path,
    *,
    labels: Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
    **card: Any,
) -> None:
    """Save a model as one file, `model.safetensors`, with labels, preprocessing and card, atomically.

    Labels and preprocessing default to the model's. `card` takes other facts as JSON values: `recipe`, `metrics`,
    `provenance`, `licence`.
    """
    names = model.labels if labels is None else tuple(labels)
    if names is not None and len(names) != model.config.classes:
        raise ValueError(f"{len(names)} labels for a model of {model.config.classes} classes: give one per class")
    pipeline = model.preprocessing if preprocessing is None else preprocessing
    if pipeline is not None and not isinstance(pipeline, Preprocessing):
        raise ValueError(f"preprocessing must be a vitrail Preprocessing, got {type(pipeline).__name__}")
    if pipeline is not None and pipeline.channels != model.config.channels:
        raise ValueError(f"preprocessing gives {pipeline.channels} channels, the model takes {model.config.channels}")
    if pipeline is not None:
        pipeline.check_frames(model.config.frames, "change preprocessing.clip")
    tokenizer = model.tokenizer
    if tokenizer is not None:
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer must be a vitrail Tokenizer, got {type(tokenizer).__name__}")
        check_tokenizer(tokenizer, model.config)
    contract = CheckpointContract(model.config, names, pipeline, {**model.card, **card}, tokenizer)
    state = model.state_dict()
    check_state(state, build_meta_state(model.config))
    save_artifact(Path(path), state, contract)


def check_state(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors have the wanted names and shapes and are finite, so that a saved file can be loaded."""
    differ = [n for n in {*wanted, *state} if n not in wanted or n not in state or wanted[n].shape != state[n].shape]
    if differ:
        raise ValueError(f"not saved: the tensors differ from the configuration in {format_names(sorted(differ))}")
    if bad := [name for name, tensor in state.items() if not is_finite(tensor)]:
        raise ValueError(f"not saved: values that are not finite in {format_names(bad)}")


def inspect_checkpoint(
    path: str | Path, assume: dict[str, Any] | None = None, take: str | None = None, towers: bool = False
) -> Checkpoint:
    """Open a checkpoint and detect its format without reading the tensors. Close it, or use it in a `with`."""
    return open_and_detect(resolve_path(path, towers=towers), assume, take, towers)


def find_weights(source: str | Path, towers: bool = False) -> Path:
    """Return the local path of the weights, with `towers` beside the files of a tokeniser; of a run directory, its model."""
    path = resolve_path(source, towers=towers)
    if not (path / "run.json").is_file():
        return path
    if (path / MODEL_FILE).is_file():
        return path / MODEL_FILE
    best = f", or use {path / BEST_FILE}, its best so far" if (path / BEST_FILE).is_file() else ""
    raise ValueError(f"{source} is an unfinished run: continue it with vitrail.resume({str(source)!r}){best}")


def require_preprocessing(source: str | Path, model: Model) -> Preprocessing:
    """Return the preprocessing of a model; raise if it has none, or if images do not have its channels."""
    pipeline = model.preprocessing
    if not isinstance(pipeline, Preprocessing):
        raise ValueError(f"{source} has no preprocessing: save it again with vitrail.save(…, preprocessing=…)")
    if pipeline.channels not in PIL_MODES:
        takes = f"{source} takes {pipeline.channels} channels, images have 1, 3 or 4"
        raise ValueError(f"{takes}: use vitrail.load and pass it tensors")
    return pipeline


def derive_model_name(source: str, path: Path) -> str:
    """Return a name for a model: its file's, or its directory's if the file has a standard name."""
    if expand_name(source).startswith("hf://"):
        return source.removeprefix("hf://")
    path = path.resolve()
    return path.parent.name if path.name in FILES_BY_SAFETY else path.name if path.is_dir() else path.stem


def compute_checksum(path: Path) -> str:
    """Return the SHA-256 of the weights' bytes: of the file, or of its shards in order."""
    if path.is_dir():
        path = path / rank_weights(list_folder(path))[0]
    files = [path]
    if path.name.endswith(".index.json"):
        files = [path.parent / name for name in sorted(set(read_json(path)["weight_map"].values()))]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(2**22):
                digest.update(part)
    return digest.hexdigest()
