"""Key tables of Swin Transformers: Microsoft's release, timm, torchvision and transformers, versions 1 and 2.

All of them number the layers by stage; ours are numbered through. Patch merging ends a stage in Microsoft's release and in
transformers, starts one in timm, and has a number of its own in torchvision.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import formats
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames, get_object
from vitrail.checkpoints.formats.timm import make_center_crop
from vitrail.checkpoints.keys import (
    IgnoredKeys,
    KeyMapping,
    KeyTable,
    Rules,
    TensorTransform,
    concatenate,
    map_tensors,
    reshape,
)
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.swin import SwinConfig, fit_windows
from vitrail.nn.position import compute_log_offsets
from vitrail.nn.window import ShiftRule, SwinV1, SwinV2, WindowSlot, compute_offset_index

COMPUTED = "computed from the size of the window"
WINDOW_IN_NAME = re.compile(r"window(?P<first>\d+)(?:to(?P<last>\d+))?_(?P<size>\d+)(?:to(?P<larger>\d+))?")


@dataclass(frozen=True)
class SwinNaming:
    """The names of one project."""

    title: str
    embed: str  # the patch projection
    embed_norm: str
    block: Callable[[int, int], str]  # of a stage and a layer in it, counted from 0
    merge: Callable[[int], str]  # after a stage
    norm: str
    head: str
    shift_rules: tuple[ShiftRule, ShiftRule]  # of versions 1 and 2
    attention: str = "attn"
    norms: tuple[str, str] = ("norm1", "norm2")
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    out: str = "attn.proj"
    qkv: tuple[str, ...] = ("qkv",)  # one matrix, or three
    bias_mlp: str = "cpb_mlp"
    v2_biases: tuple[str, str] | None = ("q_bias", "v_bias")  # of queries and values; None: one tensor, also for keys
    has_index: bool = False  # stores what is computed from the window


MICROSOFT = SwinNaming(
    "Microsoft's Swin Transformer",
    "patch_embed.proj",
    "patch_embed.norm",
    "layers.{}.blocks.{}".format,
    "layers.{}.downsample".format,
    "norm",
    "head",
    (ShiftRule("image"), ShiftRule("image")),
)
TIMM = SwinNaming(
    "timm's Swin Transformer",
    "patch_embed.proj",
    "patch_embed.norm",
    "layers.{}.blocks.{}".format,
    lambda stage: f"layers.{stage + 1}.downsample",
    "norm",
    "head.fc",
    (ShiftRule("configured", pad_first=False), ShiftRule("configured", pad_first=False)),
)
TORCHVISION = SwinNaming(
    "torchvision's Swin Transformer",
    "features.0.0",
    "features.0.2",
    lambda stage, layer: f"features.{2 * stage + 1}.{layer}",
    lambda stage: f"features.{2 * stage + 2}",
    "norm",
    "head",
    (ShiftRule("side"), ShiftRule("side")),
    mlp=("mlp.0", "mlp.3"),
    v2_biases=None,
    has_index=True,
)
TRANSFORMERS = SwinNaming(
    "transformers' Swin Transformer",
    "embeddings.patch_embeddings.projection",
    "embeddings.norm",
    "encoder.layers.{}.blocks.{}".format,
    "encoder.layers.{}.downsample".format,
    "layernorm",
    "classifier",
    (ShiftRule("image"), ShiftRule("configured")),
    attention="attention.self",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("intermediate.dense", "output.dense"),
    out="attention.output.dense",
    qkv=("query", "key", "value"),
    v2_biases=("query.bias", "value.bias"),
    bias_mlp="continuous_position_bias_mlp",
)


# --- the table ---


def map_swin(config: SwinConfig, naming: SwinNaming, root: str = "") -> KeyTable:
    """Return the table of a Swin Transformer; `root` stands before all names but those of the head."""
    rules: Rules = {"embed.*": f"{root}{naming.embed}.*", "embed_norm.*": f"{root}{naming.embed_norm}.*"}
    entries: list[KeyMapping] = []
    number = 0
    for stage, depth in enumerate(config.depths):
        for layer in range(depth):
            ours, theirs = f"blocks.{number}", root + naming.block(stage, layer)
            rules |= {f"{ours}.{name}": value for name, value in map_block(config, naming, stage, theirs).items()}
            entries += map_shared_tensors(config, naming, stage, ours, f"{theirs}.{naming.attention}")
            number += 1
    for stage in range(config.n_stages - 1):
        merge = root + naming.merge(stage)
        rules[f"merges.{stage}.norm.*"] = f"{merge}.norm.*"
        rules[f"merges.{stage}.reduction.weight"] = f"{merge}.reduction.weight"
    rules |= {"norm.*": f"{root}{naming.norm}.*", "?head.*": f"{naming.head}.*"}
    computed = () if naming.has_index else ("relative_position_index", "relative_coords_table", "attn_mask")
    ignored = [IgnoredKeys(f"{root}*.{name}", COMPUTED) for name in computed]
    return [*map_tensors(naming.title, config, rules, *entries), *ignored]


def map_block(config: SwinConfig, naming: SwinNaming, stage: int, block: str) -> Rules:
    """Return the rules of a layer, without its name on our side."""
    attention, (norm1, norm2), (fc1, fc2) = f"{block}.{naming.attention}", naming.norms, naming.mlp
    rules: Rules = {
        "norm1.*": f"{block}.{norm1}.*",
        "msa.out.*": f"{block}.{naming.out}.*",
        "norm2.*": f"{block}.{norm2}.*",
        "mlp.fc1.*": f"{block}.{fc1}.*",
        "mlp.fc2.*": f"{block}.{fc2}.*",
    }
    parts = tuple(f"{attention}.{name}" for name in naming.qkv)
    transform = concatenate(0, [config.width * 2**stage] * 3) if len(parts) == 3 else TensorTransform()
    if isinstance(config.block, SwinV1):
        qkv = tuple(f"{part}.*" for part in parts)
        return rules | {"msa.qkv.*": (qkv, transform), "msa.offsets": f"{attention}.relative_position_bias_table"}
    heads = config.heads[stage]
    rules |= {
        "msa.qkv.weight": (tuple(f"{part}.weight" for part in parts), transform),
        "msa.log_scale": (f"{attention}.logit_scale", reshape((heads, 1, 1), (heads,))),
        "msa.bias_mlp.0.*": f"{attention}.{naming.bias_mlp}.0.*",
        "msa.bias_mlp.2.weight": f"{attention}.{naming.bias_mlp}.2.weight",
    }
    if naming.v2_biases is not None:
        q_bias, v_bias = naming.v2_biases
        rules |= {"msa.q_bias": f"{attention}.{q_bias}", "msa.v_bias": f"{attention}.{v_bias}"}
    return rules


def map_shared_tensors(
    config: SwinConfig, naming: SwinNaming, stage: int, ours: str, attention: str
) -> Iterator[KeyMapping]:
    """Yield the entries of torchvision's tensors that are not one of ours: computed ones, and the bias of q, k and v."""
    is_v2, window, width = isinstance(config.block, SwinV2), config.windows[stage], config.width * 2**stage
    if naming.has_index:
        index = compute_offset_index(window, torch.device("cpu")).flatten()
        yield map_constant(f"{attention}.relative_position_index", index)
        if is_v2:
            table = compute_log_offsets((window, window), (window, window)).view(1, 2 * window - 1, 2 * window - 1, 2)
            yield map_constant(f"{attention}.relative_coords_table", table)
    if is_v2 and naming.v2_biases is None:

        def read(theirs: list[Tensor]) -> list[Tensor]:
            q_bias, k_bias, v_bias = theirs[0].chunk(3)
            if k_bias.any():
                raise ValueError(f"{attention}.qkv.bias is not zero for the keys, which Swin v2 does not support")
            return [q_bias.contiguous(), v_bias.contiguous()]

        def write(biases: list[Tensor]) -> list[Tensor]:
            return [torch.cat((biases[0], biases[0].new_zeros(width), biases[1]))]

        names = (f"{ours}.msa.q_bias", f"{ours}.msa.v_bias")
        yield KeyMapping(names, (f"{attention}.qkv.bias",), TensorTransform(read, write))


def map_constant(theirs: str, value: Tensor) -> KeyMapping:
    """Return the entry of a tensor that is computed: checked when it is read, and written as it is."""

    def read(found: list[Tensor]) -> list[Tensor]:
        if not torch.allclose(found[0].double(), value.double(), atol=1e-5):
            raise ValueError(f"{theirs} does not match its window: the file is damaged or modified")
        return []

    return KeyMapping((), (theirs,), TensorTransform(read, lambda _: [value.clone()]))


# --- writing ---


def build_table(config: SwinConfig, naming: SwinNaming) -> KeyTable:
    """Return the table of a file to write; raise if the project's code cannot express the model."""
    window, windows = config.windows[0], config.windows
    fitted = fit_windows(window, config.image_size, config.patch, config.n_stages)
    is_v2 = isinstance(config.block, SwinV2)
    has_one_window = naming is TORCHVISION or (naming is TRANSFORMERS and not is_v2)
    trained = getattr(config.block, "pretrained_windows", None)
    if has_one_window and set(windows) != {window}:
        raise ValueError(f"{naming.title} needs one window for all stages, got {windows}: use another format")
    if not has_one_window and windows != fitted:
        raise ValueError(f"{naming.title} needs the windows {fitted} at this size, got {windows}: use another format")
    if naming is TORCHVISION and trained is not None:
        raise ValueError(f"{naming.title} does not store pretrained_windows {trained}: use another format")
    has_root = naming is TRANSFORMERS and config.classes is not None
    root = ("swinv2." if is_v2 else "swin.") if has_root else ""
    return map_swin(config, naming, root)


def build_settings(config: SwinConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    is_v2 = isinstance(config.block, SwinV2)
    trained = getattr(config.block, "pretrained_windows", None)
    name, size = ("Swinv2" if is_v2 else "Swin"), config.image_size
    settings: dict[str, Any] = {
        "architectures": [f"{name}{'Model' if config.classes is None else 'ForImageClassification'}"],
        "model_type": name.lower(),
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "window_size": config.windows[0],
        "mlp_ratio": config.mlp_ratio,
        "hidden_size": config.width * 2 ** (config.n_stages - 1),
        "hidden_act": "gelu",
        "layer_norm_eps": config.eps,
        "image_size": size[0] if size[0] == size[1] else list(size),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "qkv_bias": True,
        "use_absolute_embeddings": False,
        "dtype": dtype,
    }
    return settings | ({"pretrained_window_sizes": list(trained or (0,) * config.n_stages)} if is_v2 else {})


def compare_shift(config: SwinConfig, naming: SwinNaming) -> list[str]:
    """Return a note if a project shifts windows by another rule on grids that they do not fill."""
    theirs = naming.shift_rules[int(isinstance(config.block, SwinV2))]
    if theirs == config.shift:
        return []
    return [f"windows that do not fill the grid are shifted by another rule: {config.shift} here, {theirs} there"]


# --- the configuration ---


def read_config(names: TensorNames, assumptions: Assumptions, naming: SwinNaming, version: int) -> SwinConfig:
    """Return the configuration of a Swin Transformer from the shapes of its tensors."""
    width, channels, patch, _ = names.patch_shape(f"{naming.embed}.weight")
    n_stages = 1
    while f"{naming.merge(n_stages - 1)}.reduction.weight" in names:
        n_stages += 1
    blocks = [naming.block(stage, 0) for stage in range(n_stages)]
    depths = tuple(names.count_layers(block.removesuffix("0") + "{}.") for block in blocks)
    attention = [f"{block}.{naming.attention}" for block in blocks]
    why = f"the default of {naming.title}"
    block: WindowSlot
    if version == 1:
        tables = [names.shape(f"{name}.relative_position_bias_table", 2) for name in attention]
        windows = tuple(infer_window(rows) for rows, _ in tables)
        heads, block = tuple(heads for _, heads in tables), SwinV1()
        default = (8 * patch * windows[0], 8 * patch * windows[0])
        size = assumptions.resolve("size", default, f"the published size for windows of {windows[0]}×{windows[0]}")
    else:
        heads = tuple(names.shape(f"{name}.logit_scale", 3)[0] for name in attention)
        size = assumptions.resolve("size", (256, 256), why)
        stored = [f"{name}.relative_coords_table" for name in attention]
        if stored[0] in names:
            windows = tuple((names.shape(name, 4)[1] + 1) // 2 for name in stored)
        else:
            window = assumptions.resolve("window", None, "Swin v2 computes its biases for any window")
            windows = fit_windows(window, size, patch, n_stages)
        trained = assumptions.given.get("pretrained_windows", (None, ""))[0]
        block = SwinV2(None if trained in (None, windows) else trained)
    return SwinConfig(
        width=width,
        depths=depths,
        heads=heads,
        windows=windows,
        block=block,
        shift=naming.shift_rules[version - 1],
        patch=patch,
        mlp_ratio=names.shape(f"{blocks[0]}.{naming.mlp[0]}.weight", 2)[0] / width,
        classes=TensorNames(names.shapes).output_dim(naming.head),
        image_size=size,
        channels=channels,
        eps=assumptions.resolve("eps", 1e-5, why),
    )


def infer_window(rows: int) -> int:
    """Return the window of a table with this number of offsets, (2M - 1)²."""
    side = math.isqrt(rows)
    if side * side != rows or side % 2 == 0:
        raise ValueError(f"a table of {rows} relative positions fits no window: expected (2M - 1)² for windows of M×M")
    return (side + 1) // 2


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of config.json, or of a file name such as swinv2_base_window12to16_192to256."""
    config = get_object(settings, "config.json")
    cfg = get_object(config, "pretrained_cfg")
    source = "config.json" if config else "the file's name"
    facts: dict[str, Any] = {}
    name = str(config.get("architecture") or settings.get(formats.FILE_NAME_KEY, ""))
    if match := WINDOW_IN_NAME.search(name):
        first, size = int(match["first"]), int(match["size"])
        facts["window"] = int(match["last"] or first)
        facts["size"] = (int(match["larger"] or size),) * 2
        if match["last"]:
            facts["pretrained_windows"] = fit_windows(first, (size, size), 4, 4)
    for given in (cfg.get("input_size"), config.get("image_size")):
        given = [given, given] if type(given) is int else given
        if isinstance(given, list) and len(given) >= 2 and all(type(side) is int and side > 0 for side in given):
            facts["size"] = (given[-2], given[-1])
    if type(config.get("window_size")) is int:
        facts["window"] = config["window_size"]
    if isinstance(config.get("layer_norm_eps"), float):
        facts["eps"] = config["layer_norm_eps"]
    trained = config.get("pretrained_window_sizes")
    if isinstance(trained, list) and trained and all(type(side) is int and side > 0 for side in trained):
        facts["pretrained_windows"] = tuple(trained)
    for option, usual in (("use_absolute_embeddings", False), ("qkv_bias", True), ("hidden_act", "gelu")):
        if config.get("model_type") in ("swin", "swinv2") and config.get(option, usual) != usual:
            raise ValueError(f"unsupported {option} {config[option]!r} in config.json")
    return {name: (value, source) for name, value in facts.items()}


def default_preprocessing(config: SwinConfig, _: str, naming: SwinNaming) -> tuple[Preprocessing, str]:
    """Return the pipeline that the project evaluates its models with."""
    size, why = config.image_size, f"the default of {naming.title}"
    pipeline = Preprocessing(size, size, **IMAGENET_STATS)
    if naming is TRANSFORMERS:
        return Preprocessing(size, size, "squash", "bicubic", **IMAGENET_STATS), why
    if naming is TIMM:
        return make_center_crop(size, 1.0 if size[0] >= 384 else 0.9, "bicubic", IMAGENET_STATS), why
    if naming is TORCHVISION:
        resized = TORCHVISION_SIZES.get((type(config.block), config.width, config.depth), size[0])
        return pipeline.with_resize_factor(resized / size[0]), why
    return pipeline.with_resize_factor(256 / 224), why


# Pixels of the smaller side before the crop, by layers, width and depth.
TORCHVISION_SIZES = {
    (SwinV1, 96, 12): 232,
    (SwinV1, 96, 24): 246,
    (SwinV1, 128, 24): 238,
    (SwinV2, 96, 12): 260,
    (SwinV2, 96, 24): 260,
    (SwinV2, 128, 24): 272,
}


def _make_format(name: str, naming: SwinNaming, version: int, roots: tuple[str, ...] = ("",)):
    marker = "relative_position_bias_table" if version == 1 else "logit_scale"
    required = (
        f"{naming.embed}.weight",
        f"{naming.merge(0)}.reduction.weight",
        f"{naming.block(0, 0)}.{naming.attention}.{marker}",
    )
    return CheckpointFormat(
        f"{name} swin{'v2' if version == 2 else ''}",
        f"{naming.title}{' v2' if version == 2 else ''}",
        required,
        partial(read_config, naming=naming, version=version),
        lambda config, root: map_swin(config, naming, root),
        partial(default_preprocessing, naming=naming),
        roots,
        parse_settings,
        {"family": "swin", "version": version, "depths": (1, 1), "heads": (1, 2), "width": 8},
    )


TARGETS = {"timm": TIMM, "hf": TRANSFORMERS, "torchvision": TORCHVISION}  # by the names of conversion targets
FORMATS = tuple(
    _make_format(name, naming, version, (roots[version - 1], "") if roots else ("",))
    for name, naming, roots in (
        ("microsoft", MICROSOFT, None),
        ("timm", TIMM, None),
        ("torchvision", TORCHVISION, None),
        ("transformers", TRANSFORMERS, ("swin.", "swinv2.")),
    )
    for version in (1, 2)
)
