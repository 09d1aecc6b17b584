"""Open a checkpoint, a run, `hf://owner/name`, a loaded model or an exported file with a runtime."""

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints import load as checkpoints
from vitrail.data.class_names import name_outputs
from vitrail.data.dataset import Media
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy import RUNTIME_SUFFIXES, RUNTIMES
from vitrail.deploy.runtimes.base import (
    BATCH_SECONDS,
    DeployedModel,
    ModelContract,
    OutputKind,
    Runtime,
)
from vitrail.deploy.runtimes.exported import (
    is_exported,
    open_exported_file,
    openvino_precisions,
    read_exported_contract,
)
from vitrail.deploy.runtimes.int8 import with_int8
from vitrail.deploy.runtimes.precision import (
    CheckedRuntime,
    choice_key,
    choose_once,
    choose_runtime,
    is_short,
    measure_runtimes,
    with_check,
)
from vitrail.deploy.runtimes.select import MessageCallback, get_or_export, select_runtime
from vitrail.inference import TorchRuntime
from vitrail.models.base import Model, TokenConfig
from vitrail.models.eomt import PackedQueries
from vitrail.models.registry import config_from_json
from vitrail.models.token_merging import Merged, format_token_counts, tokens_per_layer
from vitrail.tasks.masks import read_colours, read_ignored
from vitrail.tasks.numbers import read_statistics
from vitrail.utils.devices import pick_device, processor_name
from vitrail.utils.json import to_json
from vitrail.utils.precision import PrecisionChoice, check_precision

LOADED_MODEL = "the loaded model"  # in messages, in place of a path


def ask_media(
    where: str | os.PathLike[str] | Model, assume: Mapping[str, Any] | None = None, take: str | None = None
) -> Callable[[], Media]:
    """Return a function that returns what a model takes, and reads that from its file when it is first called."""
    known: list[Media] = []

    def ask() -> Media:
        if not known:
            known.append(read_media(where, assume, take))
        return known[0]

    return ask


def read_media(
    where: str | os.PathLike[str] | Model, assume: Mapping[str, Any] | None = None, take: str | None = None
) -> Media:
    """Return what a model takes, images, videos or sounds, without reading the weights of its file."""
    if isinstance(where, Model):
        config, pipeline = where.config, where.preprocessing
    elif is_exported(os.fspath(where)):
        return read_exported_contract(Path(where)).media
    else:
        path = checkpoints.find_weights(os.fspath(where))
        with checkpoints.inspect_checkpoint(path, dict(assume or {}), take) as checkpoint:
            config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
    if isinstance(pipeline, Preprocessing) and pipeline.sound is not None:
        return "sound"
    return "image" if config.frames is None else "video"


def open_deployed_model(
    where: str | os.PathLike[str] | Model,
    *,
    runtime: str = "auto",
    device: str = "auto",
    output_kind: OutputKind = "logits",
    merge: int = 0,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    threads: int | None = None,
    report: MessageCallback | None = None,
    precision: str = "auto",
    n_images: int | None = None,
    tolerance: float | None = None,
    batch_timeout: float = BATCH_SECONDS,
) -> DeployedModel:
    """Return the model of a checkpoint or an exported file, with its runtime. A loaded model runs on PyTorch.

    `runtime` is torch, onnx or openvino; for the latter two a checkpoint is exported once. "auto" measures the installed
    runtimes once per model and machine and takes the fastest; for few images (`n_images`) it takes PyTorch without measuring.
    `precision` is fp32, bf16, fp16, or "auto": the fastest by a measurement of about a second, compared with fp32 on the first
    images; fp32 without measuring for few images or a small model. `threads` is the number of threads of the model; `report`
    receives messages about slow steps. With a `tolerance` in points of accuracy, the runtime "auto" may take an int8 export that
    was verified to lose no more. `batch_timeout` is the limit in seconds of one batch of an exported graph. The output kind
    "queries" is that of EoMT, on PyTorch.
    """
    if runtime not in ("auto", *RUNTIMES):
        raise ValueError(f"unknown runtime {runtime!r}: use auto, {', '.join(RUNTIMES)}")
    check_precision(precision)
    if tolerance is not None and (runtime != "auto" or not 0 <= tolerance <= 100):
        wrong = f"tolerance= must be from 0 to 100 points, got {tolerance:g}"
        raise ValueError(wrong if runtime == "auto" else f"tolerance= is for runtime='auto', not {runtime!r}: omit it")
    is_auto, precision = precision == "auto", "fp32" if precision == "auto" else precision
    if merge < 0:
        raise ValueError(f"merge= must be >= 0, got {merge}")
    if isinstance(where, Model):
        if runtime not in ("auto", "torch"):
            raise ValueError(f"a loaded model runs on PyTorch: leave out runtime={runtime!r}, or give its file")
        if tolerance is not None:
            raise ValueError("a loaded model runs on PyTorch: leave out tolerance=, or give its file")
        if threads is not None and pick_device(device).type == "cpu":
            torch.set_num_threads(threads)
        target = pick_device(device) if device != "auto" else next(where.parameters()).device
        opened = open_checkpoint(where, target, output_kind, merge, size, assume, take, precision)
        return choose_runtime(opened, n_images, report) if is_auto else opened
    where = os.fspath(where)
    if output_kind == "queries":
        if is_exported(where):
            raise ValueError(f"panoptic= needs the checkpoint: the exported file {where} has semantic masks only")
        if runtime not in ("auto", "torch"):
            raise ValueError(f"panoptic= needs PyTorch: leave out runtime={runtime!r}")
        runtime = "torch"
    if is_exported(where):
        own = RUNTIME_SUFFIXES[Path(where).suffix.lower()]
        if runtime not in ("auto", own):
            raise ValueError(f"{where} is a file for {own}: omit runtime={runtime!r}, or give the checkpoint")
        given = {"merge=": merge, "assume=": assume, "take=": take, "precision=": precision != "fp32"}
        given |= {"device=": device not in ("auto", "cpu"), "tolerance=": tolerance is not None}
        if fixed := [name for name, value in given.items() if value]:
            raise ValueError(f"{fixed[0]} is fixed in the exported file {where}: omit it, or export the model again")
        opened = open_exported_model(Path(where), output_kind, threads, size, batch_timeout)
        return with_fastest_precision(opened, n_images, threads, report) if is_auto else opened
    target = pick_device(device)
    torch_only = target.type != "cpu" or precision != "fp32"
    if runtime in ("onnx", "openvino") and torch_only:
        option = f"device={target.type!r}" if target.type != "cpu" else f"precision={precision!r}"
        raise ValueError(f"{option} needs PyTorch: use runtime='torch', or vitrail export for {runtime}")
    if threads is not None and target.type == "cpu":
        torch.set_num_threads(threads)
    loading = (merge, size, assume, take, precision)
    opened = open_checkpoint(where, target, output_kind, *loading)
    fast = choose_runtime(opened, n_images, report) if is_auto else opened
    if runtime == "torch" or torch_only:
        return fast
    whole = opened if output_kind == "logits" else open_checkpoint(where, target, None, *loading)
    if runtime == "auto":
        lower = fast.runtime.lower if isinstance(fast.runtime, CheckedRuntime) else fast.runtime
        hint = "bf16" if fast.contract.precision == "bf16" and supports_bf16_hint() else None
        runtime, why = select_runtime(whole, threads, n_images, report, lower, hint)
        opened, fast = (replace(one, notes=(*one.notes, why) if why else one.notes) for one in (opened, fast))
        if runtime == "torch":
            return fast if tolerance is None else with_int8(fast, tolerance, threads, n_images)
    file = get_or_export(whole, runtime, report)
    running, _ = open_exported_file(file, output_kind, threads, batch_timeout)
    exported = replace(opened, runtime=running, file=str(file), batch_timeout=batch_timeout)
    exported = with_fastest_precision(exported, n_images, threads, report) if is_auto else exported
    return exported if tolerance is None else with_int8(exported, tolerance, threads, n_images)


def with_fastest_precision(
    deployed: DeployedModel,
    n_images: int | None,
    threads: int | None = None,
    report: MessageCallback | None = None,
) -> DeployedModel:
    """Return a model opened in fp32 with the runtime of its fastest precision, for so many images."""
    if isinstance(deployed.runtime, TorchRuntime):
        return choose_runtime(deployed, n_images, report)
    return with_bf16_hint(deployed, threads, n_images, report)


def supports_bf16_hint() -> bool:
    """Return whether OpenVINO is installed and computes bf16 natively on this processor."""
    return find_spec("openvino") is not None and "BF16" in openvino_precisions()


def with_bf16_hint(
    deployed: DeployedModel, threads: int | None, n_images: int | None, report: MessageCallback | None
) -> DeployedModel:
    """Return an exported fp32 model in the faster of fp32 and bf16, by measurement; only OpenVINO computes it in bf16."""
    file, contract = Path(deployed.file or ""), deployed.contract
    if deployed.runtime.name != "openvino" or contract.precision != "fp32" or is_short(contract, n_images):
        return deployed
    if not supports_bf16_hint():
        return replace(deployed, choice=PrecisionChoice("fp32", f"{processor_name()} does not multiply bf16 natively"))
    lower = open_exported_file(file, deployed.output_kind, threads, deployed.batch_timeout, "bf16")[0]
    runtimes = {"fp32": deployed.runtime, "bf16": lower}
    choice = choose_once(choice_key(contract, f"openvino {threads}"), lambda: measure_runtimes(runtimes, contract))
    if choice.precision == "fp32":
        return replace(deployed, choice=choice)
    return with_check(deployed, lower, choice, report if n_images is None else None)


def with_class_names(deployed: DeployedModel, file: str | None) -> DeployedModel:
    """Return the model with the class names of a file, or as it is without one."""
    if file is None:
        return deployed
    if deployed.contract.labels is None:
        raise ValueError(f"{deployed.where} has no classifier: leave out --names")
    if deployed.contract.targets is not None:
        raise ValueError(f"{deployed.where} predicts numbers, which have names: leave out --names")
    labels = name_outputs(file, len(deployed.contract.labels))
    return replace(deployed, contract=replace(deployed.contract, labels=labels))


def open_exported_model(
    path: Path, output_kind: OutputKind, threads: int | None, size: tuple[int, int] | None, batch_timeout: float
) -> DeployedModel:
    """Return the model of an exported file, for another size if it was exported for any size."""
    running, contract = open_exported_file(path, output_kind, threads, batch_timeout)
    contract = with_fitted_preprocessing(str(path), contract)
    if size is not None:
        contract = resize_contract(path, contract, size)
    notes = describe_token_counts(contract)
    return DeployedModel(
        str(path), path.stem, contract, running, output_kind, None, notes, str(path), batch_timeout=batch_timeout
    )


def resize_contract(path: Path, contract: ModelContract, size: tuple[int, int]) -> ModelContract:
    """Return the contract of an exported file for another image size; raise ValueError if its size is fixed."""
    if size == contract.preprocessing.size:
        return contract
    if not contract.any_size:
        fixed = "{}×{}".format(*contract.preprocessing.size)
        raise ValueError(f"size= is fixed to {fixed} in {path}: omit it, or export the model with --dynamic-size")
    config = config_from_json(contract.config)
    step, least = config.size_rule
    if min(side // step for side in size) < least:
        raise ValueError(f"size= of {path} must be at least {step * least} pixels a side, got {size[0]}×{size[1]}")
    resized = to_json(config.with_image_size(size))
    return replace(contract, preprocessing=contract.preprocessing.with_size(size), config=resized)


def describe_token_counts(contract: ModelContract) -> tuple[str, ...]:
    """Return a note on the tokens left in each layer, for a file with merged tokens."""
    config = config_from_json(contract.config) if contract.merge else None
    return (format_token_counts(tokens_per_layer(config, contract.merge)),) if isinstance(config, TokenConfig) else ()


def clone_runtime(deployed: DeployedModel, threads: int | None) -> Runtime:
    """Return another runtime of the model for another thread. PyTorch shares the weights, the others open the file again."""

    def clone(runtime: Runtime) -> Runtime:
        if deployed.file is None or isinstance(runtime, TorchRuntime):
            return copy.copy(runtime)
        precision = getattr(runtime, "precision", None)
        return open_exported_file(
            Path(deployed.file), deployed.output_kind, threads, deployed.batch_timeout, precision
        )[0]

    runtime = deployed.runtime
    return runtime.clone(clone) if isinstance(runtime, CheckedRuntime) else clone(runtime)


def open_checkpoint(
    where: str | os.PathLike[str] | Model,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    output_kind: OutputKind | None = None,  # None: the whole model, with or without a classifier
    merge: int = 0,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    precision: str = "fp32",
) -> DeployedModel:
    """Open a checkpoint or a loaded model with PyTorch, without its classifier for features."""
    classes = None if output_kind == "features" else checkpoints.KEEP
    if isinstance(where, Model):
        if assume or take:
            raise ValueError(f"{'assume=' if assume else 'take='} is for files: the model is loaded already")
        path, model, where = None, adapt_loaded(where, device, size, output_kind), LOADED_MODEL
    else:
        path = checkpoints.find_weights(os.fspath(where))
        # Not memory-mapped: the alignment of file pages differs, and sums could differ in the last bit.
        model = checkpoints.load(path, image_size=size, assume=assume, take=take, classes=classes, mmap=False)
        model = model.to(device)
    where = os.fspath(where)
    if output_kind == "logits" and model.config.classes is None:
        raise ValueError(f"{where} has no classifier: use vitrail.embed for its features")
    contract = replace(build_contract(where, path, model, size), merge=merge, precision=precision)
    merged = model if not merge else model.merge_tokens(merge)
    running = PackedQueries(model, "panoptic=") if output_kind == "queries" else merged
    runtime = TorchRuntime(running, contract.preprocessing, output_kind or "logits", device, precision)
    notes = (format_token_counts(merged.tokens_per_layer()),) if isinstance(merged, Merged) else ()
    return DeployedModel(str(where), contract.name, contract, runtime, output_kind or "logits", model, notes)


def adapt_loaded(model: Model, device: torch.device, size: tuple[int, int] | None, kind: OutputKind | None) -> Model:
    """Return a loaded model for prediction, a copy where it has to be changed: the caller's stays as it is."""
    changed = model
    if size is not None and tuple(model.config.image_size) != tuple(size):
        changed = changed.resize(size)
    if kind == "features" and model.config.classes is not None:
        changed = changed.replace_head(None)
    if changed is model and (model.training or next(model.parameters()).device != device):
        changed = copy.deepcopy(model)
    return changed.to(device).eval() if changed is not model else model


def build_contract(where: str, path: Path | None, model: Model, size: tuple[int, int] | None = None) -> ModelContract:
    """Return the contract of a checkpoint, or of a loaded model if there is no path."""
    pipeline = checkpoints.require_preprocessing(where, model)
    try:
        pipeline.check_frames(model.config.frames, "save it with another preprocessing")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if size is not None and pipeline.size != size:
        pipeline = pipeline.with_size(size)
    count = model.config.classes
    labels = None if count is None else model.labels or tuple(map(str, range(count)))  # indices without names
    name = model.config.describe() if path is None else checkpoints.derive_model_name(where, path)
    checksum = "" if path is None else checkpoints.compute_checksum(path)
    several, config = is_multilabel(model, path), to_json(model.config)
    stored = {"colours": read_colours(model), "ignore": read_ignored(model), "statistics": read_statistics(model)}
    contract = ModelContract(pipeline, labels, several, config=config, name=name, checksum=checksum, **stored)
    return with_fitted_preprocessing(where, contract)


def with_fitted_preprocessing(where: str, contract: ModelContract) -> ModelContract:
    """Return the contract with the preprocessing that its task needs; raise ValueError if it cannot predict with its own."""
    try:
        return replace(contract, preprocessing=contract.task.fit_preprocessing(contract.preprocessing))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def is_multilabel(model: Model, path: Path | None) -> bool:
    """Return True for a multi-label model, according to its run, its recipe's task or its loss."""
    if "zero_shot" in model.card:  # its recipe is that of the pairs it has learnt
        return False
    recipe = model.card.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    run_json = None if path is None else (path if path.is_dir() else path.parent) / "run.json"
    task = read_task(run_json) if recipe and run_json is not None and run_json.is_file() else None
    if task is None:
        data, objective = recipe.get("data"), recipe.get("objective")
        task = data.get("task") if isinstance(data, dict) else None
        if task in (None, "auto") and isinstance(objective, dict):
            task = "multi" if objective.get("loss") == "sigmoid" else "single"
    return task == "multi"


def read_task(run_json: Path) -> str | None:
    """Return the task recorded by a run, or None if that cannot be read."""
    try:
        task = json.loads(run_json.read_text(encoding="utf-8")).get("task")
    except (OSError, ValueError, AttributeError):
        return None
    return task if isinstance(task, str) else None
