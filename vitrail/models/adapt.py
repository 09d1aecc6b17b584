"""Adaptation of trained models to other classes, image sizes or channels, and equivalent models with other parts.

Each function takes a configuration and its tensors and returns new ones; nothing is changed in place.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.models.base import Model, ModelConfig, State, TokenConfig, remove_calibration
from vitrail.models.registry import build_from, lay_out, parse_decoder
from vitrail.models.segmenter import DecoderSlot, Segmenter, SegmenterConfig
from vitrail.nn.head import Linear, Projection
from vitrail.nn.position import AddedPositionEmbedding, Learned1D, SinCos2D, Sinusoid1D
from vitrail.nn.resampling import Resampling

KEEP: Any = object()  # leave unchanged, where None means none


def with_classes(config: ModelConfig, state: State, classes: int | None) -> tuple[ModelConfig, State]:
    """Return the model with a new zero classifier for this number of classes (section 3.2); None returns features.

    CLIP's projection is replaced: the new head reads the features before it.
    """
    new, kept = config.with_classes(classes), config.drop_classifier(state, classes)
    with torch.device("meta"):
        wanted = build_from(new).state_dict()
    one = next(iter(state.values()))
    assert all(wanted[name].shape == tensor.shape for name, tensor in kept.items())
    return new, {name: kept.get(name, one.new_zeros(like.shape)) for name, like in wanted.items()}


def with_size(config: ModelConfig, state: State, size: tuple[int, int]) -> tuple[ModelConfig, State]:
    """Return the model for another image size, positions resampled to its grid (section 3.2)."""
    new = config.with_image_size(size)
    return new, config.resize_state(state, new.input_size)


def with_frames(config: ModelConfig, state: State, frames: int) -> tuple[ModelConfig, State]:
    """Return the model for clips of another number of frames, positions interpolated along time."""
    new = config.with_frames(frames)
    return new, config.resize_state(state, new.input_size)


def with_channels(config: ModelConfig, state: State, channels: int) -> tuple[ModelConfig, State]:
    """Return the model for other channels: input weights are summed for one channel, else repeated and scaled down.

    A grey model then gives for a grey image what the old model gave for three equal channels.
    """
    name = config.input_weight()
    weight = state[name]
    old = weight.unflatten(1, (config.channels, -1)) if weight.ndim == 2 else weight
    if channels == 1:
        fresh = old.float().sum(1, keepdim=True)
    else:
        repeated = old.float().repeat(1, -(-channels // config.channels), *[1] * (old.ndim - 2))[:, :channels]
        fresh = repeated * (config.channels / channels)
    fresh = fresh.to(weight.dtype)
    return config.with_channels(channels), state | {name: fresh.flatten(1) if weight.ndim == 2 else fresh}


def adapt_model(
    model: Model,
    classes: int | None = KEEP,
    image_size: tuple[int, int] = KEEP,
    channels: int = KEEP,
    resampling: str | Resampling = KEEP,
    frames: int = KEEP,
) -> Model:
    """Return a copy of a model for other classes, another image size, other channels or frames."""
    config, state = model.config, dict(model.state_dict())
    if resampling is not KEEP:
        config = config.with_resampling(resampling)
    if channels is not KEEP and channels != config.channels:
        config, state = with_channels(config, state, channels)
    if image_size is not KEEP and image_size != config.image_size:
        config, state = with_size(config, state, image_size)
    if frames is not KEEP and frames != config.frames:
        config, state = with_frames(config, state, frames)
    if classes is not KEEP and classes != config.classes:
        config, state = with_classes(config, state, classes)
    adapted = assemble(config, state, like=next(iter(model.parameters())))
    keeps_head = config.classes == model.config.classes
    adapted.labels = model.labels if keeps_head else None
    adapted.preprocessing = fit_preprocessing(model.preprocessing, model.config, config)
    adapted.tokenizer = None if config.text_tower is None else model.tokenizer
    adapted.card = dict(model.card) if keeps_head else remove_calibration(model.card)
    return adapted.train(model.training)


def assemble(config: ModelConfig, state: State, like: Tensor) -> Model:
    """Return the model of a configuration with these tensors; buffers that are not stored get the device of `like`."""
    with torch.device("meta"):
        model = lay_out(config)
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # not stored: an empty buffer that holds the device and the precision
                module.register_buffer(name, like.new_empty(buffer.shape), persistent=False)
    return model


def fit_preprocessing(preprocessing: Any, before: ModelConfig, after: ModelConfig) -> Any:
    """Return the preprocessing of a model for its adapted size, channels and frames; a function of the user stays as it is."""
    if after.image_size != before.image_size and hasattr(preprocessing, "with_size"):
        preprocessing = preprocessing.with_size(after.image_size)
    if after.channels != before.channels and hasattr(preprocessing, "with_channels"):
        preprocessing = preprocessing.with_channels(after.channels)
    if after.frames != before.frames and hasattr(preprocessing, "with_frames"):
        preprocessing = preprocessing.with_frames(after.frames)
    return preprocessing


# --- segmentation ---


def take_backbone(model: Model) -> tuple[ModelConfig, State]:
    """Return a model without its head and without pooling that feature maps do not need."""
    config, state = model.config.as_backbone(), model.config.drop_classifier(dict(model.state_dict()), None)
    with torch.device("meta"):
        wanted = lay_out(config).state_dict()
    return config, {name: state[name] for name in wanted}


def segment_from(model: Model, decoder: str | DecoderSlot, classes: int) -> Segmenter:
    """Return a segmentation model around the weights of a loaded model of any family, with a fresh decoder.

    The weights are shared with the model, not copied. Its labels are dropped. Its preprocessing is kept, except that a mask is
    that of the whole upright image: it is squashed, not cropped.
    """
    backbone, state = take_backbone(model)
    segmenter = build_from(SegmenterConfig(backbone, parse_decoder(decoder), classes))
    assert isinstance(segmenter, Segmenter)
    like = next(iter(model.parameters()))
    segmenter.to(device=like.device, dtype=like.dtype)
    segmenter.backbone.load_state_dict(state, assign=True)
    pipeline: Any = model.preprocessing  # a `Preprocessing`, of a package on the same floor
    if pipeline is not None:
        segmenter.preprocessing = replace(pipeline, resize=pipeline.size, fit="squash", turn=True)
    segmenter.card = remove_calibration(model.card)
    return segmenter.train(model.training)


# --- equivalent Vision Transformers with other parts, for formats that lack some ---


def with_projection_as_classes(config: TokenConfig, state: State) -> tuple[TokenConfig, State]:
    """Return CLIP's projection as a linear head with zero bias, for formats without projections."""
    if not isinstance(config.head, Projection):
        return config, state
    weight = state["head.weight"]
    new = replace(config, head=Linear(), classes=config.head.width)
    return new, state | {"head.bias": weight.new_zeros(weight.shape[0])}


def with_key_bias(config: TokenConfig, state: State) -> tuple[TokenConfig, State]:
    """Return the same model with a zero bias of the keys, for formats that have one for q, k and v or none."""
    block = config.block
    if block.key_bias or not block.qkv_bias:
        return config, state
    biases = {name: state[name].chunk(2) for name in state if name.endswith("msa.qkv.bias")}
    padded = {name: torch.cat((q, torch.zeros_like(q), v)) for name, (q, v) in biases.items()}
    return replace(config, block=replace(block, key_bias=True)), state | padded


def with_learned_positions(config: TokenConfig, state: State) -> tuple[TokenConfig, State]:
    """Return fixed stem positions as a learned table, for formats without fixed positions."""
    if not isinstance(config.position, SinCos2D | Sinusoid1D) or config.position.at != "stem":
        return config, state
    position = config.position.build(config.shape)
    assert isinstance(position, AddedPositionEmbedding)
    rows = position.gather_rows(0, config.shape.grid, None).to(next(iter(state.values())).dtype)  # [1, T, D]
    return replace(config, position=Learned1D(prefix="all")), state | {"position.weight": rows}


def with_positions_for(config: TokenConfig, state: State, which: Any) -> tuple[TokenConfig, State]:
    """Return the model with positions for these prefix tokens; dropped ones are added to the tokens, new ones are zero."""
    position = config.position
    if not isinstance(position, Learned1D) or position.at != "stem" or position.prefix == which:
        return config, state
    wanted = replace(position, prefix=which)
    new = replace(config, position=wanted)
    before, after = position.count_covered(config.shape), wanted.count_covered(config.shape)
    if before == after:
        return new, state
    state, table = dict(state), state["position.weight"]
    rows, patches = table[:, :before], table[:, before:]
    if after > before:
        rows = torch.cat((rows, table.new_zeros(1, after - before, table.shape[2])), 1)
    outputs = config.prefix.outputs
    for name, start, end in (("prefix.outputs", 0, outputs), ("prefix.registers", outputs, config.prefix.count)):
        lost = rows[:, max(start, after) : end]
        if lost.shape[1] and name in state:
            tokens = state[name].clone()
            tokens[:, tokens.shape[1] - lost.shape[1] :] += lost
            state[name] = tokens
    state["position.weight"] = torch.cat((rows[:, :after], patches), 1)
    return new, state
