"""Key tables of Multiscale Vision Transformers: timm's models of images, torchvision's of clips, and PySlowFast's release.

timm numbers the layers by stage; ours are numbered through, as those of the others. In all projects queries, keys and values
have one matrix, ours three.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames
from vitrail.checkpoints.formats.timm import make_center_crop
from vitrail.checkpoints.keys import KeyMapping, KeyTable, Rules, TensorTransform, map_tensors, reshape
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import IMAGENET_STATS, NormalisationStats, Preprocessing
from vitrail.models.mvit_config import CLIPS, MViTConfig

SPLIT_QKV = TensorTransform(
    read=lambda theirs: [part.contiguous() for part in theirs[0].chunk(3)], write=lambda ours: [torch.cat(ours)]
)
KINETICS_STATS: NormalisationStats = {"mean": (0.45, 0.45, 0.45), "std": (0.225, 0.225, 0.225)}


@dataclass(frozen=True)
class MViTNaming:
    """A project's names of the parts of a layer; `{}` is q, k or v."""

    title: str
    out: str
    pool: str
    pool_norm: str
    fc1: str
    fc2: str
    skips: tuple[str, str]  # projections to another width: of the attention, of the MLP


TIMM = MViTNaming(
    "timm's Multiscale Vision Transformer",
    out="attn.proj",
    pool="attn.pool_{}",
    pool_norm="attn.norm_{}",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
    skips=("shortcut_proj_attn", "shortcut_proj_mlp"),
)


def map_layers(config: MViTConfig, naming: MViTNaming, layers: list[str]) -> tuple[Rules, list[KeyMapping]]:
    """Return the rules of all layers, which have these names in the project, and the mappings of queries, keys and values."""
    rules: Rules = {}
    entries: list[KeyMapping] = []
    parts = {
        "norm1.*": "norm1.*",
        "skip1.*": f"{naming.skips[0]}.*",
        "msa.out.*": f"{naming.out}.*",
        "norm2.*": "norm2.*",
        "skip2.*": f"{naming.skips[1]}.*",
        "mlp.fc1.*": f"{naming.fc1}.*",
        "mlp.fc2.*": f"{naming.fc2}.*",
    }
    for axis, letter in enumerate("thw"[-len(config.input_size) :]):
        parts[f"msa.offsets.{axis}"] = f"attn.rel_pos_{letter}"
    for part in "qkv":
        parts[f"msa.pool_{part}.conv.weight"] = f"{naming.pool.format(part)}.weight"
        parts[f"msa.pool_{part}.norm.*"] = f"{naming.pool_norm.format(part)}.*"
    for number, theirs in enumerate(layers):
        rules |= {f"?blocks.{number}.{name}": f"{theirs}.{value}" for name, value in parts.items()}
        for kind in ("weight", "bias"):
            ours = tuple(f"blocks.{number}.msa.{part}.{kind}" for part in "qkv")
            entries.append(KeyMapping(ours, (f"{theirs}.attn.qkv.{kind}",), SPLIT_QKV))
    return rules, entries


# --- images: timm ---

RECORDED = {
    "patch_stride": (4, 4),
    "kv_stride": (4, 4),
    "residual_pooling": "all",
}  # the only values that tensors imply


def map_mvit(config: MViTConfig, root: str = "") -> KeyTable:
    """Return timm's table of a Multiscale Vision Transformer; `root` stands before all names."""
    names = [f"{root}stages.{stage}.blocks.{layer}" for stage, d in enumerate(config.depths) for layer in range(d)]
    rules, entries = map_layers(config, TIMM, names)
    rules |= {"embed.*": f"{root}patch_embed.proj.*", "?prefix.outputs": f"{root}cls_token"}
    rules |= {"norm.*": f"{root}norm.*", "?head.*": f"{root}head.fc.*"}
    return map_tensors(TIMM.title, config, rules, *entries)


def build_timm_table(config: MViTConfig) -> KeyTable:
    """Return the table of a file to write; raise if timm's code cannot express the model."""
    if config.frames is not None:
        raise ValueError(f"{TIMM.title} takes images, not clips: use --to torchvision")
    (height, width), stride = config.image_size, config.stride
    if height != width or height % stride:
        size = f"{height}×{width}"
        raise ValueError(
            f"{TIMM.title} needs square images with sides in multiples of {stride}, got {size}: resize the model"
        )
    check_recorded(config, TIMM, {**RECORDED, "q_strides": ((1, 1), *[(2, 2)] * (config.n_stages - 1))})
    return map_mvit(config)


def check_recorded(config: MViTConfig, naming: MViTNaming, wanted: dict[str, Any]) -> None:
    """Raise ValueError unless the fields that a project does not store have the values that its tensors imply."""
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{naming.title} stores no {name}, which must be {value}, got {getattr(config, name)}")


def read_config(names: TensorNames, assumptions: Assumptions) -> MViTConfig:
    """Return the configuration of a Multiscale Vision Transformer from the shapes of its tensors."""
    width, channels, *patch_kernel = names.shape("patch_embed.proj.weight", 4)
    n_stages = names.count_layers("stages.{}.")
    first = [f"stages.{stage}.blocks.0" for stage in range(n_stages)]
    depths = tuple(names.count_layers(f"stages.{stage}.blocks.{{}}.") for stage in range(n_stages))
    head_width, _, *pool_kernel = names.shape(f"{first[0]}.attn.pool_q.weight", 4)
    widths = [names.shape(f"{name}.attn.proj.weight", 2)[0] for name in first]
    tables = (names.shape(f"{first[0]}.attn.rel_pos_{axis}", 2)[0] for axis in "hw")
    rows, columns = (infer_cells(count) for count in tables)
    step = RECORDED["patch_stride"]
    return MViTConfig(
        width=width,
        depths=depths,
        heads=tuple(max(1, stage_width // head_width) for stage_width in widths),
        expand="mlp" if names.find("stages.*.shortcut_proj_mlp.weight") else "attention",
        class_token="cls_token" in names,
        patch_kernel=tuple(patch_kernel),
        pool_kernel=tuple(pool_kernel),
        q_strides=((1, 1), *[(2, 2)] * (n_stages - 1)),
        mlp_ratio=names.shape(f"{first[0]}.mlp.fc1.weight", 2)[0] / widths[0],
        classes=names.output_dim("head.fc"),
        image_size=(rows * step[0], columns * step[1]),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, f"the default of {TIMM.title}"),
    )


def infer_cells(rows: int) -> int:
    """Return the side of the grid that a table with this number of relative positions is for, 2n - 1."""
    if rows % 2 == 0:
        raise ValueError(f"a table of {rows} relative positions fits no grid: expected 2n - 1 for n cells")
    return (rows + 1) // 2


def default_preprocessing(config: MViTConfig, _: str) -> tuple[Preprocessing, str]:
    """Return the pipeline that timm evaluates these models with."""
    return make_center_crop(config.image_size, 0.9, "bicubic", IMAGENET_STATS), f"the default of {TIMM.title}"


# --- clips: torchvision and PySlowFast ---


@dataclass(frozen=True)
class ClipNaming(MViTNaming):
    """A project's names of a model of clips: also those outside of the layers."""

    embed: str
    class_token: str
    positions: tuple[str, str, str]  # over the cells of a frame, over time, of the class token
    head: str
    batched: bool  # its tables and tokens begin with an axis of length 1


TORCHVISION = ClipNaming(
    "torchvision's Multiscale Vision Transformer",
    out="attn.project.0",
    pool="attn.pool_{}.pool",
    pool_norm="attn.pool_{}.norm_act.0",
    fc1="mlp.0",
    fc2="mlp.3",
    skips=("project", "project"),
    embed="conv_proj",
    class_token="pos_encoding.class_token",
    positions=("pos_encoding.spatial_pos", "pos_encoding.temporal_pos", "pos_encoding.class_pos"),
    head="head.1",
    batched=False,
)
SLOWFAST = ClipNaming(
    "PySlowFast's Multiscale Vision Transformer",
    out="attn.proj",
    pool="attn.pool_{}",
    pool_norm="attn.norm_{}",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
    skips=("proj", "proj"),
    embed="patch_embed.proj",
    class_token="cls_token",
    positions=("pos_embed_spatial", "pos_embed_temporal", "pos_embed_class"),
    head="head.projection",
    batched=True,
)
CLIP_STRIDES: dict[str, Any] = {name: CLIPS[name] for name in ("patch_stride", "kv_stride")}  # implied by tensors


def map_clips(config: MViTConfig, naming: ClipNaming, root: str = "") -> KeyTable:
    """Return a project's table of a Multiscale Vision Transformer of clips; `root` stands before all names."""
    rules, entries = map_layers(config, naming, [f"{root}blocks.{layer}" for layer in range(config.depth)])
    width, grid = config.width, config.stage_grid(-1, config.input_size)
    cells, frames = math.prod(grid[-2:]), grid[0]
    table, vector = ((1,), (1, 1)) if naming.batched else ((), ())
    space, time, token = (f"{root}{name}" for name in naming.positions)
    rules |= {
        "embed.*": f"{root}{naming.embed}.*",
        "?prefix.outputs": (f"{root}{naming.class_token}", reshape((*vector, width), (1, 1, width))),
        "?position.space": (space, reshape((*table, cells, width), (*grid[-2:], width))),
        "?position.time": (time, reshape((*table, frames, width), (frames, width))),
        "?position.prefix": (token, reshape((*vector, width), (1, width))),
        "norm.*": f"{root}norm.*",
        "?head.*": f"{root}{naming.head}.*",
    }
    return map_tensors(naming.title, config, rules, *entries)


def list_implied(n_stages: int, positions: str) -> dict[str, Any]:
    """Return the fields of a model of clips that no tensor records: all published models have the same values."""
    residual = "patches" if positions == "relative" else "none"
    return {**CLIP_STRIDES, "q_strides": ((1, 1, 1), *[(1, 2, 2)] * (n_stages - 1)), "residual_pooling": residual}


def build_torchvision_table(config: MViTConfig) -> KeyTable:
    """Return the table of a file to write; raise if torchvision's code cannot express the model."""
    title = TORCHVISION.title
    if config.frames is None:
        raise ValueError(f"{title} takes clips, not images: use --to timm")
    check_recorded(config, TORCHVISION, list_implied(config.n_stages, config.positions))
    for name, value in {"class_token": True, "mlp_ratio": 4.0, "channels": 3}.items():
        if getattr(config, name) != value:
            raise ValueError(f"{title} needs {name}={value}, got {getattr(config, name)}")
    is_relative = config.positions == "relative"
    multiples = config.total_stride if is_relative else config.patch_stride
    if any(side % step for side, step in zip(config.input_size, multiples, strict=True)):
        sides, wanted = "×".join(map(str, config.input_size)), "×".join(map(str, multiples))
        raise ValueError(f"{title} needs clips in multiples of {wanted}, got {sides}: resize the model")
    height, width = config.image_size
    if is_relative and height != width:
        raise ValueError(f"{title} has tables for square frames, got {height}×{width}: resize the model")
    return map_clips(config, TORCHVISION)


def read_clip_config(names: TensorNames, assumptions: Assumptions, naming: ClipNaming) -> MViTConfig:
    """Return the configuration of a Multiscale Vision Transformer of clips from the shapes of its tensors."""
    first, depth = "blocks.0", names.count_layers("blocks.{}.")
    width, channels, *patch_kernel = names.shape(f"{naming.embed}.weight", 5)
    widths = [names.shape(f"blocks.{layer}.{naming.out}.weight", 2)[0] for layer in range(depth)]
    starts = [layer for layer in range(depth) if layer == 0 or widths[layer] != widths[layer - 1]]
    depths = tuple(end - start for start, end in pairwise((*starts, depth)))
    key_pools = [names.shape(f"blocks.{start}.{naming.pool.format('k')}.weight", 5) for start in starts]
    grows_after = names.shape(f"blocks.{depths[0] - 1}.{naming.fc2}.weight", 2)[0] != widths[0]
    steps, axis = CLIP_STRIDES["patch_stride"], int(naming.batched)
    if naming.positions[0] in names:
        positions = "absolute"
        cells, frames = (names.shape(name, 2 + axis)[axis] for name in naming.positions[:2])
        image_size = assumptions.resolve_table_size(cells, steps[1])
    else:
        positions = "relative"
        frames, rows, columns = (infer_cells(names.shape(f"{first}.attn.rel_pos_{side}", 2)[0]) for side in "thw")
        image_size = (rows * steps[1], columns * steps[2])
    return MViTConfig(
        width=width,
        depths=depths,
        heads=tuple(max(1, widths[start] // pool[0]) for start, pool in zip(starts, key_pools, strict=True)),
        expand="mlp" if grows_after else "attention",
        class_token=naming.class_token in names,
        patch_kernel=tuple(patch_kernel),
        pool_kernel=key_pools[0][2:],
        mlp_ratio=names.shape(f"{first}.{naming.fc1}.weight", 2)[0] / widths[0],
        classes=names.output_dim(naming.head),
        frames=frames * steps[0],
        image_size=image_size,
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, f"the default of {naming.title}"),
        positions=positions,
        q_pooling="all" if f"{first}.{naming.pool.format('q')}.weight" in names else "strided",
        **list_implied(len(depths), positions),
    )


def choose_clip_preprocessing(config: MViTConfig, _: str, naming: ClipNaming) -> tuple[Preprocessing, str]:
    """Return the pipeline that the project evaluates its models with: every fourth frame, resized as one image is."""
    assert config.frames is not None
    size, clip = config.image_size, Clip(config.frames, 4)
    frame = Preprocessing(size, size, "cover", "bilinear", antialias=False, engine="torch", **KINETICS_STATS, clip=clip)
    return frame.with_resize_factor(256 / 224), f"the default of {naming.title}"


# --- formats ---


def _make_clip_format(name: str, naming: ClipNaming) -> CheckpointFormat:
    first = "blocks.0"
    return CheckpointFormat(
        name,
        naming.title,
        (f"{naming.embed}.weight", f"{first}.{naming.pool.format('k')}.weight", f"{first}.{naming.out}.weight"),
        partial(read_clip_config, naming=naming),
        lambda config, root: map_clips(config, naming, root),
        partial(choose_clip_preprocessing, naming=naming),
        example={"family": "mvit", "depths": (1, 1), "heads": (1, 2), "width": 8, "frames": 4},
    )


TARGETS: dict[str, Callable[[MViTConfig], KeyTable]] = {  # by the names of conversion targets
    "timm": build_timm_table,
    "torchvision": build_torchvision_table,
}
FORMATS = (
    CheckpointFormat(
        "timm mvitv2",
        TIMM.title,
        ("patch_embed.proj.weight", "stages.0.blocks.0.attn.pool_q.weight", "stages.0.blocks.0.attn.rel_pos_h"),
        read_config,
        map_mvit,
        default_preprocessing,
        example={"family": "mvit", "depths": (1, 1), "heads": (1, 2), "width": 8},
    ),
    _make_clip_format("torchvision mvit", TORCHVISION),
    _make_clip_format("pyslowfast mvit", SLOWFAST),
)
