"""Key tables of TimeSformer (Bertasius et al. 2021): transformers' `Timesformer…` and the names of its authors' release.

A Vision Transformer of clips that embeds every frame, with a table of positions in a frame and one of steps in time. Attention
is divided into time and space, or joint. Its variant of space only, whose class tokens are averaged, is not supported.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, transformers, videomae
from vitrail.checkpoints.keys import KeyTable, Rules
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import Divided, PreNorm
from vitrail.nn.embed import Prefix, Tubelets
from vitrail.nn.head import Linear
from vitrail.nn.pool import ClassToken
from vitrail.nn.position import Factorised

STRIDES = {8: 32, 16: 16, 96: 4}  # between the frames of the published models, by their number


@dataclass(frozen=True)
class Naming:
    """The names of one project. `#` stands for the number of a layer."""

    title: str
    root: str  # before the body of a classifier
    patches: str
    tokens: tuple[str, str, str]  # the class token, and the positions in space and in time
    layer: str
    parts: dict[str, str]  # of a layer: ours and theirs
    norm: str
    head: str


TRANSFORMERS = Naming(
    title="transformers' TimeSformer",
    root="timesformer.",
    patches="embeddings.patch_embeddings.projection",
    tokens=("embeddings.cls_token", "embeddings.position_embeddings", "embeddings.time_embeddings"),
    layer="encoder.layer.#.",
    parts={
        "norm1.*": "layernorm_before.*",
        "msa.qkv.weight": "attention.attention.qkv.weight",
        "?msa.qkv.bias": "attention.attention.qkv.bias",
        "msa.out.*": "attention.output.dense.*",
        "norm2.*": "layernorm_after.*",
        "mlp.fc1.*": "intermediate.dense.*",
        "mlp.fc2.*": "output.dense.*",
        "?time_norm.*": "temporal_layernorm.*",
        "?time_msa.qkv.weight": "temporal_attention.attention.qkv.weight",
        "?time_msa.qkv.bias": "temporal_attention.attention.qkv.bias",
        "?time_msa.out.*": "temporal_attention.output.dense.*",
        "?time_projection.*": "temporal_dense.*",
    },
    norm="layernorm",
    head="classifier",
)
RELEASE = Naming(
    title="TimeSformer's release",
    root="",
    patches="patch_embed.proj",
    tokens=("cls_token", "pos_embed", "time_embed"),
    layer="blocks.#.",
    parts={
        "norm1.*": "norm1.*",
        "msa.qkv.weight": "attn.qkv.weight",
        "?msa.qkv.bias": "attn.qkv.bias",
        "msa.out.*": "attn.proj.*",
        "norm2.*": "norm2.*",
        "mlp.fc1.*": "mlp.fc1.*",
        "mlp.fc2.*": "mlp.fc2.*",
        "?time_norm.*": "temporal_norm1.*",
        "?time_msa.qkv.weight": "temporal_attn.qkv.weight",
        "?time_msa.qkv.bias": "temporal_attn.qkv.bias",
        "?time_msa.out.*": "temporal_attn.proj.*",
        "?time_projection.*": "temporal_fc.*",
    },
    norm="norm",
    head="head",
)


def build_table(config: TokenConfig, root: str | None = None, naming: Naming = TRANSFORMERS) -> KeyTable:
    """Return the table of a classifier, or of the body of a configuration without classes; `root` is before the body."""
    root = (naming.root if config.classes is not None else "") if root is None else root
    embed, (token, space, time) = videomae.require_tubelets(naming.title, config), naming.tokens
    rules: Rules = {
        "embed.projection.weight": (
            f"{root}{naming.patches}.weight",
            keys.flatten_patches(config.channels, embed.patch),
        ),
        "embed.projection.bias": f"{root}{naming.patches}.bias",
        "prefix.outputs": root + token,
        "position.space_weight": root + space,
        "position.time_weight": root + time,
        "pool.norm.*": f"{root}{naming.norm}.*",
        "?head.*": f"{root if naming is RELEASE else ''}{naming.head}.*",
    }
    for ours, theirs in naming.parts.items():
        mark = "?" if ours.startswith("?") else ""
        rules[f"{mark}blocks.#.{ours.removeprefix('?')}"] = root + naming.layer + theirs
    return keys.map_tensors(naming.title, config, rules)


def read_config(names: TensorNames, assumptions: Assumptions, naming: Naming) -> ViTConfig:
    """Return the configuration of a TimeSformer with these names."""
    width, channels, patch, _ = names.patch_shape(f"{naming.patches}.weight")
    layer, (_, space, time) = naming.layer.replace("#", "*"), naming.tokens
    time_attention = naming.parts["?time_msa.qkv.weight"]
    block = Divided if names.find(f"{layer}{time_attention}") else PreNorm
    outside = names if naming is RELEASE else TensorNames(names.shapes)
    return ViTConfig(
        size=Size(
            names.count_layers(naming.layer.replace("#", "{}")),
            width,
            names.layer_shape(f"{layer}{naming.parts['mlp.fc1.*'].removesuffix('*')}weight", 2)[0],
            assumptions.resolve_heads(width, naming.title),
        ),
        embed=Tubelets(1, patch),
        position=Factorised(resampling=assumptions.resolve_resampling("timesformer", f"the code of {naming.title}")),
        prefix=Prefix(1),
        block=block(
            mlp=assumptions.resolve_gelu("exact", f"the default of {naming.title}"),
            qkv_bias=assumptions.resolve("qkv_bias", True, f"the default of {naming.title}"),
        ),
        pool=ClassToken(),
        classes=outside.output_dim(naming.head),
        image_size=assumptions.resolve_table_size(names.shape(space, 3)[1] - 1, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, f"the default of {naming.title}"),
        init="deit",
        frames=names.shape(time, 3)[1],
    )


def default_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the pipeline of evaluation: the shorter side resized, the centre cropped."""
    stride = STRIDES.get(config.frames or 0, 4)
    return videomae.make_centre_crop(
        config, stride, (0.45,) * 3, (0.225,) * 3
    ), "the evaluation of TimeSformer's release"


def _make_format(naming: Naming, name: str, roots: tuple[str, ...]) -> CheckpointFormat:
    patches = f"{naming.patches}.weight"
    return CheckpointFormat(
        name,
        naming.title,
        (patches, naming.tokens[2]),
        partial(read_config, naming=naming),
        partial(build_table, naming=naming),
        default_preprocessing,
        roots,
        videomae.parse_settings,
        {"frames": 4, "tubelet": 1, "block": "divided", "position": "factorised"},
        {patches: 4},
    )


FORMATS = (
    _make_format(TRANSFORMERS, "transformers timesformer", ("timesformer.", "")),
    _make_format(RELEASE, "timesformer", ("",)),
)


# --- writing ---


def list_limits(config: TokenConfig, naming: Naming) -> Reasons:
    """Return why the project cannot express a model, apart from its tensor names."""
    block, position = config.block, config.position
    height, width = config.image_size
    return {
        "it takes clips, and this model images": config.frames is None,
        "it embeds every frame": getattr(config.embed, "frames", None) != 1 or not getattr(config.embed, "bias", True),
        "its positions are factorised and added at the stem": not isinstance(position, Factorised)
        or position.at != "stem",
        "it has a class token and no other prefix token": config.prefix != Prefix(1),
        "it pools by the class token": config.pool != ClassToken(),
        "its layers are pre-norm, divided or not": type(block) not in (PreNorm, Divided),
        "its classifier is one linear layer": not isinstance(config.head, Linear),
        "its heads divide the width evenly": config.size.head is not None,
        "its images are square": height != width,
        "its release has the exact GELU": naming is RELEASE and block.mlp != formats.GELUS["exact"],
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    body = "Model" if config.classes is None else "ForVideoClassification"
    return {
        "architectures": [f"Timesformer{body}"],
        "model_type": "timesformer",
        **transformers.build_common_settings(config, dtype),
        "intermediate_size": config.size.mlp,
        "num_frames": config.frames,
        "qkv_bias": config.block.qkv_bias,
        "attention_type": "divided_space_time" if config.block.is_divided else "joint_space_time",
    }
