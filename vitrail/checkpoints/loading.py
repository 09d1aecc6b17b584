"""`vitrail.load` and `vitrail.save`: a checkpoint of any known form to a model that runs, and a model to the artifact."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.checkpoints.adapter import read_adapter
from vitrail.checkpoints.artifact import MOST, Contract, save_artifact
from vitrail.checkpoints.checkpoint import Checkpoint, Progress, finite, no_progress, open_and_recognise
from vitrail.checkpoints.hub import download
from vitrail.checkpoints.keys import layout, some
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_channels, with_classes, with_size
from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.build import Config, side
from vitrail.models.vit import ViT

KEEP: Any = object()  # stands for "as it is", where None means none


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
    revision: str | None = None,
    adapter: str | Path | None = None,
    mapped: bool = True,
    progress: Progress = no_progress,
) -> ViT | BiT:
    """A model from a checkpoint of any known form, in evaluation mode, whole or not at all.

    `path` is a file, a directory, or `hf://owner/name` on the Hugging Face Hub (at a `revision`). `model.labels` and
    `model.preprocessing` come with it. Weights are computed in `dtype`; None keeps what is stored. `assume` tells what
    tensors cannot (`{"heads": 6}`), `take` picks one of several models in a file, and `classes`, `image_size`, `channels`
    change the model on the way. `adapter` is a directory of PEFT's, whose low-rank additions (LoRA) are merged. `mapped`
    leaves the weights in the pages of a safetensors file, copied when they are changed: quick, and fit for training, but
    somebody who overwrites that file in place (vitrail never does) would change the model.
    """
    with open_and_recognise(resolve(path, revision), assume, take) as checkpoint, ThreadPoolExecutor(1) as other:
        contract = checkpoint.contract
        body = other.submit(blank, contract.config)  # laid out while the values are read
        state = checkpoint.state(allow_missing, progress, mapped)
        if adapter is not None:
            contract, state = with_adapter(contract, state, adapter)
        contract, state = adapted(contract, state, classes, image_size, channels)
        unchanged = contract.config == checkpoint.contract.config
        model = filled(body.result() if unchanged else blank(contract.config), contract, state, dtype, device)
    if checkpoint.random:
        model.card = {**model.card, "random": checkpoint.random}
    return model


def resolve(path: str | Path, revision: str | None = None) -> Path:
    """A path on this machine for a file, a directory or `hf://owner/name`."""
    if isinstance(path, str) and path.startswith("hf://"):
        return download(path, revision)
    if revision is not None:
        raise ValueError(f"{path} is a file, which has no revision: use hf://owner/name")
    return Path(path)


def assembled(
    contract: Contract, state: Mapping[str, Tensor], dtype: torch.dtype | None, device: str | torch.device = "cpu"
) -> ViT | BiT:
    """The model of a contract with these tensors as its parameters."""
    return filled(blank(contract.config), contract, state, dtype, device)


def blank(config: Config) -> ViT | BiT:
    """A model without memory, whose weights nobody has to begin."""
    with torch.device("meta"), Unbegun():
        return BiT(config) if isinstance(config, BiTConfig) else ViT(config)


class Unbegun(TorchFunctionMode):
    """Leaves out `torch.nn.init`, which would take most of the time of laying out a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def filled(
    model: ViT | BiT,
    contract: Contract,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: str | torch.device = "cpu",
) -> ViT | BiT:
    """A blank model with these tensors as its parameters and buffers: every one, and no other."""
    tensors = {name: _as(tensor, dtype, device) for name, tensor in state.items()}
    kind = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, old in module.named_parameters(recurse=False):
            new = tensors.pop(start + name)
            assert new.shape == old.shape, start + name
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if start + name in tensors:
                module.register_buffer(name, tensors.pop(start + name))
            else:  # it is not stored: a place that remembers a device
                module.register_buffer(name, torch.empty(buffer.shape, dtype=kind, device=device), persistent=False)
    assert not tensors, f"{len(tensors)} tensors have no place in the model"
    model.labels, model.preprocessing, model.card = contract.labels, contract.preprocessing, dict(contract.card)
    return model.eval()


def _as(tensor: Tensor, dtype: torch.dtype | None, device: str | torch.device) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.to(device)
    made = tensor.to(device=device, dtype=dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not finite(made):
        raise ValueError(f"values that are too large for {dtype}: keep them as they are stored, with dtype=None")
    return made


def adapted(
    contract: Contract,
    state: dict[str, Tensor],
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
) -> tuple[Contract, dict[str, Tensor]]:
    """A contract and its tensors for other classes, another image size, other channels."""
    config, labels, pipeline = contract.config, contract.labels, contract.preprocessing
    for name, number in (("classes", classes), ("image size", image_size), ("channels", channels)):
        if number is not KEEP and number is not None and max(side(number)) > MOST:
            raise ValueError(f"{number} for {name}: more than any model has")
    if classes is not KEEP and classes != config.classes:
        config, state = with_classes(config, state, classes)
        labels = None
    if image_size is not None and side(image_size) != config.image_size:
        config, state = with_size(config, state, side(image_size))
        pipeline = None if pipeline is None else pipeline.at(config.image_size)
    if channels is not None and channels != config.channels:
        config, state = with_channels(config, state, channels)
        pipeline = None if pipeline is None else pipeline.with_channels(channels)
    return replace(contract, config=config, labels=labels, preprocessing=pipeline), state


def with_adapter(
    contract: Contract, state: dict[str, Tensor], directory: str | Path
) -> tuple[Contract, dict[str, Tensor]]:
    """A contract and its tensors with PEFT's low-rank additions merged, and the adapter's head where it has one."""
    adapter = read_adapter(directory, contract.config)
    size = contract.config.image_size if adapter.preprocessing is None else adapter.preprocessing.size
    classes = contract.config.classes if adapter.classes is None else adapter.classes
    contract, state = adapted(contract, state, classes, size)
    state = dict(state)
    for name, tensor in adapter.head.items():
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(f"{directory} has a head of another shape than the model's: {name} {list(tensor.shape)}")
        state[name] = tensor.to(state[name].dtype)
    for name, difference in adapter.differences.items():
        state[name] = (state[name].double() + difference).to(state[name].dtype)
    for name in (*adapter.head, *adapter.differences):
        if not torch.isfinite(state[name].double()).all():
            raise ValueError(
                f"{directory} makes {name} larger than {state[name].dtype} can say: is its lora_alpha right?"
            )
    if adapter.labels is not None and len(adapter.labels) != contract.config.classes:
        raise ValueError(f"{directory} has {len(adapter.labels)} labels for {contract.config.classes} classes")
    labels = adapter.labels if adapter.head else contract.labels  # a new head's classes are not the old one's
    pipeline = adapter.preprocessing or contract.preprocessing
    return replace(contract, labels=labels, preprocessing=pipeline), state


def save(
    model: ViT | BiT,
    path: str | Path,
    *,
    labels: Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
    **card: Any,
) -> None:
    """A model as one file, `model.safetensors`, with all that belongs to it; the old file or the new, never half of one.

    Labels and preprocessing are the model's own unless given. `card` takes what else is to be known of it, in JSON's kinds
    of value: `recipe`, `metrics`, `provenance`, `licence`.
    """
    names = model.labels if labels is None else tuple(labels)
    if names is not None and len(names) != model.config.classes:
        raise ValueError(f"{len(names)} labels for a model of {model.config.classes} classes")
    pipeline = model.preprocessing if preprocessing is None else preprocessing
    if pipeline is not None and not isinstance(pipeline, Preprocessing):
        raise ValueError(
            f"preprocessing is {type(pipeline).__name__}: give a vitrail Preprocessing, which can be stored"
        )
    if pipeline is not None and pipeline.channels != model.config.channels:
        raise ValueError(f"preprocessing gives {pipeline.channels} channels, the model takes {model.config.channels}")
    contract = Contract(model.config, names, pipeline, {**model.card, **card})
    state = model.state_dict()
    check_state(state, contract)
    save_artifact(Path(path), state, contract)


def check_state(state: Mapping[str, Tensor], contract: Contract) -> None:
    """The tensors are those of the configuration, and finite: what is saved can be loaded."""
    wanted = layout(contract.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differ = [
        name for name in {*wanted, *shapes} if name not in wanted or shapes.get(name) != tuple(wanted[name].shape)
    ]
    if differ:
        raise ValueError(f"not saved: the model is no longer what its configuration says, in {some(sorted(differ))}")
    if bad := [name for name, tensor in state.items() if not finite(tensor)]:
        raise ValueError(f"not saved: values that are not finite in {some(bad)}")


def describe(path: str | Path, assume: Mapping[str, Any] | None = None, take: str | None = None) -> Checkpoint:
    """A checkpoint recognised and not read. Close it, or use it in a `with`."""
    return open_and_recognise(resolve(path), assume, take)
