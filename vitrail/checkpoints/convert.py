"""Conversion of a model to another project's format, verified by reading the result back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import TARGET_NAMES
from vitrail.checkpoints.artifact import CheckpointContract, save_artifact
from vitrail.checkpoints.checkpoint import ByteProgress, no_progress, open_and_detect
from vitrail.checkpoints.formats import (
    GELUS,
    eomt,
    swin,
    towers,
)
from vitrail.checkpoints.interpolate import interpolate_with
from vitrail.checkpoints.keys import build_meta_state, export_state, format_names
from vitrail.checkpoints.load import KEEP, adapt_state, assemble_model, merge_adapter, resolve_path
from vitrail.checkpoints.targets import (
    build_target_table,
    check_expressible,
    check_output_name,
    get_target,
    restate_model,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.things import find_things
from vitrail.models.base import ModelConfig, TokenConfig, refuse
from vitrail.models.mvit_config import MViTConfig
from vitrail.models.segmenter import SegmenterConfig
from vitrail.models.swin import SwinConfig
from vitrail.models.two_towers import TwoTowersConfig
from vitrail.models.vit_config import POOLS, describe_resampling, parse_resampling
from vitrail.nn.block import ResPostNorm
from vitrail.nn.pool import Mean
from vitrail.nn.position import Relative, RelativeMLP, RotaryDINOv3
from vitrail.utils.files import stage_output

SAMPLE_IMAGE = Path(__file__).parent / "photograph.jpg"
LOGIT_TOLERANCE = 1e-4  # relative to the largest logit, between the model read and the model written
MOTION = 4  # pixels from frame to frame, in a clip of the photograph
State = dict[str, Tensor]


@dataclass
class ConversionReport:
    """The result of a conversion and of its verification."""

    path: Path
    target: str
    tensors: int
    bytes: int
    largest_logit: float
    largest_difference: float
    notes: list[str] = field(default_factory=list)
    compared: str = "logits"  # or features, if a new head is still zero
    as_read_by_strangers: float | None = None  # the difference when read without the assumptions

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "bit_for_bit": True}


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    allow_missing: Iterable[str] = (),
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    labels: tuple[str, ...] | None = None,
    stuff: str | None = None,
    licence: str | None = None,
    adapter: str | Path | None = None,
    image_path: Path = SAMPLE_IMAGE,
    progress: ByteProgress = no_progress,
    text_tower: bool = False,
    interpolate: str | Path | None = None,
    alpha: float = 0.5,
) -> ConversionReport:
    """Convert a checkpoint of any known format to one of `TARGET_NAMES`, then reload and compare it.

    `adapter` is a PEFT directory whose low-rank additions are merged first. `stuff` names the classes without objects of a
    segmentation model (`find_things`); vitrail's own format alone stores them. `text_tower` converts both towers of a model
    like CLIP; without it, the image tower is converted. `interpolate` is another model of the same shape and classes: the
    weights are (1 - alpha) times its own plus alpha times those of `source` (WiSE-FT, Wortsman et al. 2022).
    """
    if to not in TARGET_NAMES:
        raise ValueError(f"unknown format {to!r}: use {', '.join(TARGET_NAMES)}")
    if stuff is not None and to != "vitrail":
        raise ValueError(f"stuff= needs to='vitrail': the format {to} does not store it")
    out = Path(out)
    with open_and_detect(resolve_path(source, towers=text_tower), assume, take, text_tower) as checkpoint:
        # from shapes only, so that an unsupported model is refused before its tensors are read
        shapes = dict(build_meta_state(checkpoint.contract.config))
        changed, _ = adapt_state(checkpoint.contract, shapes, classes, image_size, channels)
        check_expressible(to, changed.config, changed.preprocessing)
        check_output_name(to, out)
        state = checkpoint.read_state(allow_missing, progress)
        contract = checkpoint.contract
    notes = []
    if "text tower" in checkpoint.detection.ignored.values():
        notes.append("the text tower is left out: text_tower=True converts both")
    if checkpoint.random_tensors:
        notes.append(f"random values, allowed to be missing: {', '.join(checkpoint.random_tensors)}")
        contract = replace(contract, card=contract.card | {"random": checkpoint.random_tensors})
    if adapter is not None:
        contract, state = merge_adapter(contract, state, adapter)
        notes.append(f"low-rank additions of {adapter} merged")
    contract, state = adapt_state(contract, state, classes, image_size, channels)
    if labels is not None:
        if len(labels) != contract.config.classes:
            raise ValueError(f"{len(labels)} labels for {contract.config.classes} classes: give one per class")
        contract = replace(contract, labels=labels)
    if stuff is not None:
        contract = replace(contract, card=contract.card | {"things": name_things(contract, stuff)})
    if licence is not None:
        contract = replace(contract, card=contract.card | {"licence": licence})
    if interpolate is not None:
        contract, state = interpolate_with(contract, state, interpolate, alpha)
        notes.append(f"interpolated with {interpolate}: alpha={alpha:g}, the share of {source}")
    return write_and_verify(contract, state, out, to, image_path, notes)


def name_things(contract: CheckpointContract, stuff: str) -> list[bool]:
    """Return which classes of a segmentation model have objects, all but those of `stuff`."""
    if contract.config.output_kind != "masks":
        raise refuse(contract.config, "stuff=", "leave it out")
    return list(find_things(stuff, contract.labels or tuple(map(str, range(contract.config.classes or 0)))))


def write_and_verify(
    contract: CheckpointContract,
    state: State,
    out: Path,
    to: str,
    image_path: Path = SAMPLE_IMAGE,
    notes: list[str] | None = None,
) -> ConversionReport:
    """Write a model in a format, read it back, and compare every tensor bit for bit and the logits on a photograph.

    Only a verified file is moved to `out`.
    """
    check_expressible(to, contract.config, contract.preprocessing)
    check_output_name(to, out)
    notes, assume = list(notes or []), {}
    image = prepare_image(image_path, contract)
    stated, written = contract, state  # the model as the format expresses it
    with stage_output(out) as path:
        if to == "vitrail":
            save_artifact(path, state, contract)
        else:
            target = get_target(to, contract.config)
            if isinstance(contract.config, TokenConfig):
                config, written = restate_model(target, contract.config, state)
                notes += _describe_restatements(contract.config, config)
                notes += compare_resampling(contract.config, target.resampling(config), target.title)
                notes += target.list_notes(config, written)
                stated = replace(contract, config=config)
            theirs = export_state(build_target_table(to, stated.config), written)
            if isinstance(stated.config, TokenConfig):
                dtype, unused = next(iter(theirs.values())).dtype, target.list_unused_tensors(stated.config)
                theirs |= {name: torch.zeros(shape, dtype=dtype) for name, shape in unused.items()}
            elif isinstance(stated.config, SegmenterConfig):
                unused = eomt.list_unused_tensors(stated.config)
                theirs |= {name: torch.zeros(shape) for name, shape in unused.items()}
            elif isinstance(stated.config, TwoTowersConfig):
                rule = "transformers" if to == "hf" else "timm"
                notes += compare_resampling(stated.config, rule, target.title)
                notes += towers.list_tokenizer_notes(to, stated.tokenizer)
            elif isinstance(stated.config, SwinConfig):
                notes += swin.compare_shift(stated.config, swin.TARGETS[to])
            target.write(path, theirs, stated)
            assume = collect_assumptions(stated.config)
        both = contract.config.text_tower is not None
        with open_and_detect(path, assume, towers=both) as again:
            back, read, count = again.read_state(), again.contract, len(again.source.specs)
        check_identical(path, written, back)
        if to == "vitrail" and read != contract:
            raise ValueError("the written file has another configuration, labels or pipeline: please report this bug")
        expected, compared = compute_outputs(contract, state, image, "logits"), "logits"
        if not expected.any():  # a new head is zero: compare its input instead
            expected, compared = compute_outputs(contract, state, image, "features"), "features"
        read = replace(stated, config=_copy_training_fields(read.config, stated.config))
        outputs = compute_outputs(read, back, image, compared)
        report = replace(report_conversion(out, to, back, expected, outputs, notes, compared), tensors=count)
        if to != "vitrail":
            _compare_without_assumptions(report, path, stated, expected, image)
    return report


def report_conversion(
    out: Path, to: str, state: State, expected: Tensor, outputs: Tensor, notes: list[str], compared: str
) -> ConversionReport:
    """Return the report on a file that was read back; raise if the model's outputs differ."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    largest, difference = float(expected.abs().max()), float((outputs - expected).abs().max())
    if not difference <= LOGIT_TOLERANCE * max(1.0, largest):
        raise ValueError(f"not written: read back, the {compared} differ by {difference:.3g} of {largest:.3g}")
    return ConversionReport(out, to, len(state), nbytes, largest, difference, notes, compared)


def _copy_training_fields(read: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """Return the configuration that was read, with the training fields that no file stores."""
    names = ("dropout", "stochastic_depth", "init")
    if isinstance(read, SegmenterConfig) and isinstance(wanted, SegmenterConfig):
        return replace(read, backbone=_copy_training_fields(read.backbone, wanted.backbone))
    if isinstance(read, TwoTowersConfig) and isinstance(wanted, TwoTowersConfig):
        return replace(read, image=_copy_training_fields(read.image, wanted.image))
    if isinstance(read, TokenConfig) and isinstance(wanted, TokenConfig):
        return replace(read, **{name: getattr(wanted, name) for name in names})
    if isinstance(read, SwinConfig | MViTConfig) and isinstance(wanted, SwinConfig | MViTConfig):
        return replace(read, **{name: getattr(wanted, name) for name in (*names, "attention_dropout")})
    return read


def _describe_restatements(before: TokenConfig, after: TokenConfig) -> list[str]:
    notes = []
    if type(before.position) is not type(after.position):
        notes.append("fixed positions are written as a table")
    elif before.position != after.position and before.prefix.count:
        notes.append("positions of the prefix tokens are added to the tokens, or zero if there were none")
    if before.block.qkv_bias and before.block.key_bias != after.block.key_bias:
        notes.append("the bias of q, k and v has zeros for the keys, which have none here")
    if before.block.qkv_bias != after.block.qkv_bias:
        notes.append("q and v get a bias of zeros, which they do not have here")
    if before.head != after.head:
        notes.append(f"the projection is written as a head of {after.classes} classes with zero bias")
    return notes


def compare_resampling(config: ModelConfig, theirs: str | None, project: str) -> list[str]:
    """Return a note if a project resamples positions by another rule than the model; None: it has one image size."""
    ours = config.resampling
    if ours is None or theirs is None or parse_resampling(theirs) == ours:
        return []
    words = f"{describe_resampling(ours)} here, {describe_resampling(parse_resampling(theirs))} in {project}"
    return [f"positions are resampled to other sizes by another rule: {words}"]


def collect_assumptions(config: ModelConfig) -> dict[str, Any]:
    """Return the facts of a model that tensors do not determine, as assumptions for reading it back."""
    if isinstance(config, SegmenterConfig):
        return collect_assumptions(config.backbone)
    if isinstance(config, TwoTowersConfig):
        return collect_assumptions(config.image) | towers.collect_assumptions(config)
    facts: dict[str, Any] = {"size": config.image_size}
    if config.frames is not None:
        facts["frames"] = config.frames
    if isinstance(config, TokenConfig):
        if getattr(config.embed, "overlap", 0):
            facts["stride"] = config.stride
        facts |= {"heads": config.size.heads, "eps": config.eps, "channels": config.channels}
        gelu = next((name for name, slot in GELUS.items() if slot == config.block.mlp), None)
        pool = next((name for name in ("class", "mean") if POOLS[name] == config.pool and config.prefix.outputs), None)
        relative, is_res_post = (
            isinstance(config.position, Relative | RelativeMLP),
            isinstance(config.block, ResPostNorm),
        )
        block = "res-post" if is_res_post else "pre" if relative else None
        choices = {"gelu": gelu, "pool": pool, "resampling": config.resampling, "block": block}
        if isinstance(config.position, RotaryDINOv3):
            choices["periods"] = config.position.precision
        facts |= {name: value for name, value in choices.items() if value}
    elif isinstance(config, SwinConfig):
        facts |= {"eps": config.eps, "window": config.windows[0]}
    elif isinstance(config, MViTConfig):
        facts["eps"] = config.eps
    return facts


def check_identical(path: Path, written: State, back: State) -> None:
    """Raise unless every tensor was read back with the same bytes."""
    same = {name for name in written if name in back and is_bit_identical(written[name], back[name])}
    if differ := sorted({*written, *back} - same):
        raise ValueError(f"{path.name}: {len(differ)} tensors differ when read back: {format_names(differ)}")


def is_bit_identical(one: Tensor, other: Tensor) -> bool:
    """Return whether shape, dtype and bytes are the same: -0 is not 0, and NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _compare_without_assumptions(
    report: ConversionReport, out: Path, contract: CheckpointContract, expected: Tensor, image: Tensor
) -> None:
    """Note the facts that a reader without assumptions misses, and how much they change the logits."""
    try:
        with open_and_detect(out, towers=contract.config.text_tower is not None) as checkpoint:
            config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
            missed = _list_unrecorded(config, contract.config)
            if missed:
                report.notes.append(f"the file does not record {', '.join(missed)}: give it when loading")
            if missed and report.compared != "features":
                logits = compute_outputs(checkpoint.contract, checkpoint.read_state(), image, "logits")
                report.as_read_by_strangers = float((logits - expected).abs().max())
    except ValueError as error:
        report.notes.append(f"it cannot be read without assumptions: {str(error).split(': ', 1)[-1]}")
        return
    if contract.preprocessing is not None and pipeline != contract.preprocessing:
        other = "the file does not record all of it"
        if report.target == "hf" and pipeline is not None:
            names = [f.name for f in fields(pipeline)]
            names = [name for name in names if getattr(pipeline, name) != getattr(contract.preprocessing, name)]
            other = "transformers differs: " + ", ".join(f"{name} {getattr(pipeline, name)}" for name in names)
        report.notes.append(f"preprocessing is {contract.preprocessing.describe()}; {other}")
    if contract.labels is not None and report.target != "hf":
        report.notes.append(f"the format does not store labels: {len(contract.labels)} labels are left out")


def _list_unrecorded(read: ModelConfig, wanted: ModelConfig) -> list[str]:
    if isinstance(read, SegmenterConfig) and isinstance(wanted, SegmenterConfig):
        return _list_unrecorded(read.backbone, wanted.backbone)
    if isinstance(read, TwoTowersConfig) and isinstance(wanted, TwoTowersConfig):
        text = (
            []
            if read.text == wanted.text
            else [f"the text tower's {part}" for part in towers.compare_text(read, wanted)]
        )
        return _list_unrecorded(read.image, wanted.image) + text
    if not isinstance(read, TokenConfig) or not isinstance(wanted, TokenConfig):
        return []
    facts = {
        f"{wanted.size.heads} heads": read.size == wanted.size,
        f"{type(wanted.block.mlp).__name__}": read.block.mlp == wanted.block.mlp,
        f"eps {wanted.eps:g}": read.eps == wanted.eps,
        f"{'residual post-norm' if isinstance(wanted.block, ResPostNorm) else 'pre-norm'} layers": type(read.block)
        is type(wanted.block),
        f"{'mean' if isinstance(wanted.pool, Mean) else 'class token'} pooling": isinstance(read.pool, Mean)
        == isinstance(wanted.pool, Mean),
        f"{getattr(wanted.position, 'precision', '')} periods": read.position == wanted.position
        or not isinstance(wanted.position, RotaryDINOv3),
        f"{wanted.frames} frames": read.frames == wanted.frames,
        f"the image size {wanted.image_size[0]}×{wanted.image_size[1]}": read.image_size == wanted.image_size,
    }
    return [fact for fact, same in facts.items() if not same]


def prepare_image(image_path: Path, contract: CheckpointContract) -> Tensor:
    """Return the photograph preprocessed for the model, [1, C, H, W]; for clips moving sideways, [1, C, T, H, W].

    For a model of sounds it stands for a spectrogram.
    """
    config = contract.config
    default, given = Preprocessing(config.image_size, config.image_size), contract.preprocessing
    pipeline = default if given is None or given.sound is not None else replace(given, clip=None)
    if pipeline.channels not in (1, 3, 4):
        pipeline = pipeline.with_channels(3)
    try:
        with Image.open(image_path) as image:
            x = pipeline(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{image_path}: {error}") from None
    x = x.repeat(-(-config.channels // x.shape[0]), 1, 1)[: config.channels].unsqueeze(0)
    if config.frames is None:
        return x
    return torch.stack([x.roll(MOTION * frame, -1) for frame in range(config.frames)], 2)


@torch.inference_mode()
def compute_outputs(contract: CheckpointContract, state: State, image: Tensor, kind: str) -> Tensor:
    """Return the logits or the features, the input of the classifier, of a model for an image."""
    model = assemble_model(contract, state, torch.float32)
    return model.sample_outputs(image) if kind == "logits" else model.compute_pre_logits(image)
