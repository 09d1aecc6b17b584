"""Key table of Multiscale Vision Transformers in timm's names.

timm numbers the layers by stage; ours are numbered through. Its queries, keys and values have one matrix, ours three.
"""

import torch

from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames
from vitrail.checkpoints.formats.timm import make_center_crop
from vitrail.checkpoints.keys import KeyMapping, KeyTable, Rules, TensorTransform, map_tensors
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.mvit_config import MViTConfig

TITLE = "timm's Multiscale Vision Transformer"
SPLIT_QKV = TensorTransform(
    read=lambda theirs: [part.contiguous() for part in theirs[0].chunk(3)], write=lambda ours: [torch.cat(ours)]
)
RECORDED = {
    "patch_stride": (4, 4),
    "kv_stride": (4, 4),
    "residual_pooling": "all",
}  # the only values that tensors imply


def map_mvit(config: MViTConfig, root: str = "") -> KeyTable:
    """Return the table of a Multiscale Vision Transformer; `root` stands before all names."""
    rules: Rules = {"embed.*": f"{root}patch_embed.proj.*", "?prefix.outputs": f"{root}cls_token"}
    entries: list[KeyMapping] = []
    names = [(stage, layer) for stage, depth in enumerate(config.depths) for layer in range(depth)]
    for number, (stage, layer) in enumerate(names):
        ours, theirs = f"blocks.{number}", f"{root}stages.{stage}.blocks.{layer}"
        parts = {
            "norm1.*": "norm1.*",
            "?skip1.*": "shortcut_proj_attn.*",
            "msa.out.*": "attn.proj.*",
            "msa.offsets.0": "attn.rel_pos_h",
            "msa.offsets.1": "attn.rel_pos_w",
            "norm2.*": "norm2.*",
            "?skip2.*": "shortcut_proj_mlp.*",
            "mlp.fc1.*": "mlp.fc1.*",
            "mlp.fc2.*": "mlp.fc2.*",
        }
        for part in "qkv":
            parts |= {
                f"msa.pool_{part}.conv.weight": f"attn.pool_{part}.weight",
                f"msa.pool_{part}.norm.*": f"attn.norm_{part}.*",
            }
        for name, value in parts.items():
            optional = "?" if name.startswith("?") else ""
            rules[f"{optional}{ours}.{name.removeprefix('?')}"] = f"{theirs}.{value}"
        entries += [
            KeyMapping(tuple(f"{ours}.msa.{part}.{kind}" for part in "qkv"), (f"{theirs}.attn.qkv.{kind}",), SPLIT_QKV)
            for kind in ("weight", "bias")
        ]
    rules |= {"norm.*": f"{root}norm.*", "?head.*": f"{root}head.fc.*"}
    return map_tensors(TITLE, config, rules, *entries)


def build_table(config: MViTConfig) -> KeyTable:
    """Return the table of a file to write; raise if timm's code cannot express the model."""
    (height, width), stride = config.image_size, config.stride
    if height != width or height % stride:
        size = f"{height}×{width}"
        raise ValueError(
            f"{TITLE} needs square images with sides in multiples of {stride}, got {size}: resize the model"
        )
    wanted = {**RECORDED, "q_strides": ((1, 1), *[(2, 2)] * (config.n_stages - 1))}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{TITLE} stores no {name}, which must be {value}, got {getattr(config, name)}")
    return map_mvit(config)


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
        eps=assumptions.resolve("eps", 1e-6, f"the default of {TITLE}"),
    )


def infer_cells(rows: int) -> int:
    """Return the side of the grid that a table with this number of relative positions is for, 2n - 1."""
    if rows % 2 == 0:
        raise ValueError(f"a table of {rows} relative positions fits no grid: expected 2n - 1 for n cells")
    return (rows + 1) // 2


def default_preprocessing(config: MViTConfig, _: str) -> tuple[Preprocessing, str]:
    """Return the pipeline that timm evaluates these models with."""
    return make_center_crop(config.image_size, 0.9, "bicubic", IMAGENET_STATS), f"the default of {TITLE}"


FORMATS = (
    CheckpointFormat(
        "timm mvitv2",
        TITLE,
        ("patch_embed.proj.weight", "stages.0.blocks.0.attn.pool_q.weight", "stages.0.blocks.0.attn.rel_pos_h"),
        read_config,
        map_mvit,
        default_preprocessing,
        example={"family": "mvit", "depths": (1, 1), "heads": (1, 2), "width": 8},
    ),
)
