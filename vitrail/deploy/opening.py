"""A model ready to answer: any checkpoint, run or `hf://owner/name`, or a file that was exported for a runtime."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.loading import KEEP, load
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.choosing import chosen
from vitrail.deploy.exported_files import ENDINGS, Tell, exported, is_exported, open_file
from vitrail.deploy.runtime import RUNTIMES, Contract, Deployed, Gives, Runtime
from vitrail.deploy.torch_runtime import PRECISIONS, TorchRuntime
from vitrail.engine.devices import pick_device
from vitrail.models.bit import BiT
from vitrail.models.merging import Merged, in_words, merged, tokens_per_layer
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import from_json, to_json
from vitrail.run.opening import checksum, name_of, pipeline_of, weights_of


def opened(
    where: str | Path,
    *,
    runtime: str = "auto",
    device: str = "auto",
    gives: Gives = "logits",
    merge: int = 0,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    threads: int | None = None,
    tell: Tell | None = None,
    precision: str = "fp32",
    pictures: int | None = None,
) -> Deployed:
    """The model of a checkpoint or of an exported file, run by what is asked for.

    `runtime` is torch, onnx or openvino; a checkpoint is exported for the others, once. "auto" measures those that are
    installed on this machine, once for each model, and takes the quickest; where only a few `pictures` are to come, that would
    take longer than it could save, and PyTorch is taken. `threads` are those of the model; `tell` hears what takes long.
    """
    if runtime not in ("auto", *RUNTIMES):
        raise ValueError(f"unknown runtime {runtime!r}: use auto, {', '.join(RUNTIMES)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: use {', '.join(PRECISIONS)}")
    if merge < 0:
        raise ValueError(f"--merge {merge}: 0 or more tokens in each layer")
    if is_exported(where):
        given = {"--merge": merge, "--assume": assume, "--take": take}
        given |= {"--precision": precision != "fp32", "--device": device not in ("auto", "cpu")}
        return of_file(Path(where), runtime, gives, threads, [name for name, value in given.items() if value], size)
    place = pick_device(device)
    elsewhere = place.type != "cpu" or precision != "fp32"
    if runtime in ("onnx", "openvino") and elsewhere:
        what = f"--device {place.type}" if place.type != "cpu" else f"--precision {precision}"
        raise ValueError(f"{what} is PyTorch's: use --runtime torch, or vitrail export for {runtime}")
    if threads is not None and place.type == "cpu":
        torch.set_num_threads(threads)
    found = of_checkpoint(where, place, gives, merge, size, assume, take, precision)
    if runtime == "torch" or elsewhere:
        return found
    whole = found if gives == "logits" else of_checkpoint(where, place, None, merge, size, assume, take, precision)
    if runtime == "auto":
        runtime, why = chosen(whole, threads, pictures, tell)
        found = replace(found, notes=(*found.notes, why) if why else found.notes)
        if runtime == "torch":
            return found
    file = exported(whole, runtime, tell)
    running, _ = open_file(file, gives, threads)
    return replace(found, runtime=running, file=str(file))


def of_file(
    path: Path,
    runtime: str,
    gives: Gives,
    threads: int | None,
    given: list[str],
    size: tuple[int, int] | None = None,
) -> Deployed:
    """An exported file, in which everything is settled already but the size, where it takes every one."""
    own = ENDINGS[path.suffix.lower()]
    if runtime not in ("auto", own):
        raise ValueError(f"{path} is a file for {own}: leave out --runtime {runtime}, or give the checkpoint")
    if given:
        raise ValueError(f"{path} is exported, and {given[0]} is settled in it: leave it out, or export the model anew")
    running, contract = open_file(path, gives, threads)
    if size is not None:
        from vitrail.deploy.sized import at_size

        contract = at_size(path, contract, size)
    return Deployed(str(path), path.stem, contract, running, gives, notes=left_over(contract), file=str(path))


def left_over(contract: Contract) -> tuple[str, ...]:
    """How many tokens are left in each layer of a file in which they are merged."""
    config = from_json(contract.config) if contract.merge else None
    return (in_words(tokens_per_layer(config, contract.merge)),) if isinstance(config, ViTConfig) else ()


def another(deployed: Deployed, threads: int | None) -> Runtime:
    """The same model once more, for another thread: PyTorch shares its weights, the others open their file again."""
    if deployed.file is None or isinstance(deployed.runtime, TorchRuntime):
        return copy.copy(deployed.runtime)
    return open_file(Path(deployed.file), deployed.gives, threads)[0]


def of_checkpoint(
    where: str | Path,
    device: torch.device,
    gives: Gives | None,  # None for both, to be exported: a whole model, as PyTorch runs it
    merge: int,
    size: tuple[int, int] | None,
    assume: Mapping[str, Any] | None,
    take: str | None,
    precision: str,
) -> Deployed:
    """A checkpoint run by PyTorch."""
    path = weights_of(where)
    classes = None if gives == "features" else KEEP
    # Not mapped: pages of a file are aligned otherwise than memory, and sums could differ in their last bit.
    model = load(path, image_size=size, assume=assume, take=take, classes=classes, mapped=False).to(device)
    if gives == "logits" and model.config.classes is None:
        raise ValueError(f"{where} has no classes: it gives features, which vitrail embed writes")
    contract = replace(contract_of(where, path, model, size), merge=merge, precision=precision)
    running = model if not merge else merged(one_kind(model, where), merge)
    runtime = TorchRuntime(running, contract.preprocessing, gives or "logits", device, precision)
    notes = (in_words(running.tokens_per_layer()),) if isinstance(running, Merged) else ()
    return Deployed(str(where), contract.name, contract, runtime, gives or "logits", model, notes)


def one_kind(model: ViT | BiT, where: str | Path) -> ViT:
    if not isinstance(model, ViT):
        raise ValueError(f"--merge: {where} is a ResNet, which has no tokens to merge: leave it out")
    return model


def contract_of(where: str | Path, path: Path, model: ViT | BiT, size: tuple[int, int] | None = None) -> Contract:
    """What a checkpoint promises."""
    pipeline: Preprocessing = pipeline_of(where, model)
    if size is not None and pipeline.size != size:
        pipeline = pipeline.at(size)
    return Contract(
        pipeline,
        labels_of(model),
        judged_alone(model, path),
        config=to_json(model.config),
        name=name_of(str(where), path),
        checksum=checksum(path),
    )


def labels_of(model: ViT | BiT) -> tuple[str, ...] | None:
    """The names of its classes; their numbers, where nobody named them."""
    if model.config.classes is None:
        return None
    return model.labels or tuple(map(str, range(model.config.classes)))


def judged_alone(model: ViT | BiT, path: Path) -> bool:
    """Whether a picture may have several labels: as the run says, or the recipe, or the loss it was trained by."""
    recipe = model.card.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    about = (path if path.is_dir() else path.parent) / "run.json"
    told = task_in(about) if recipe and about.is_file() else None
    if told is None:
        data, objective = recipe.get("data"), recipe.get("objective")
        told = data.get("task") if isinstance(data, dict) else None
        if told in (None, "auto") and isinstance(objective, dict):
            told = "multi" if objective.get("loss") == "sigmoid" else "single"
    return told == "multi"


def task_in(about: Path) -> str | None:
    """The task that a run wrote down; nothing, where what it wrote cannot be read."""
    try:
        told = json.loads(about.read_text(encoding="utf-8")).get("task")
    except (OSError, ValueError, AttributeError):
        return None
    return told if isinstance(told, str) else None
