"""Key tables of ViViT (Arnab et al. 2021), the model of all tubelets, in the names of transformers' `Vivit…`.

A Vision Transformer of clips with a class token and a learned position of every tubelet.
"""

from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, transformers, videomae
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Prefix, Tubelets
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.pool import ClassToken
from vitrail.nn.position import Learned1D

TITLE = "transformers' ViViT"
PATCHES = "embeddings.patch_embeddings.projection"
LAYER = "encoder.layer.#."


def build_table(config: TokenConfig, root: str | None = None) -> KeyTable:
    """Return the table of a classifier, or of the body of a configuration without classes."""
    root = ("vivit." if config.classes is not None else "") if root is None else root
    embed, inner = videomae.require_tubelets(TITLE, config), config.size.heads * config.shape.head_width
    layer, rows = f"{root}{LAYER}", keys.concatenate(0, [inner] * 3)
    projections = [f"{layer}attention.attention.{name}." for name in ("query", "key", "value")]
    rules: Rules = {
        "embed.projection.weight": (
            f"{root}{PATCHES}.weight",
            keys.flatten_tubelets(config.channels, embed.frames, embed.patch),
        ),
        "embed.projection.bias": f"{root}{PATCHES}.bias",
        "prefix.outputs": f"{root}embeddings.cls_token",
        "position.weight": f"{root}embeddings.position_embeddings",
        "blocks.#.norm1.*": f"{layer}layernorm_before.*",
        "blocks.#.msa.qkv.weight": (tuple(f"{name}weight" for name in projections), rows),
        "?blocks.#.msa.qkv.bias": (tuple(f"{name}bias" for name in projections), rows),
        "blocks.#.msa.out.*": f"{layer}attention.output.dense.*",
        "blocks.#.norm2.*": f"{layer}layernorm_after.*",
        "blocks.#.mlp.fc1.*": f"{layer}intermediate.dense.*",
        "blocks.#.mlp.fc2.*": f"{layer}output.dense.*",
        "pool.norm.*": f"{root}layernorm.*",
    }
    if config.classes is None:
        rules["?head.pre_logits.*"] = f"{root}pooler.dense.*"
    else:
        rules["head.*"] = "classifier.*"
    pooler = IgnoredKeys(f"{root}pooler.*", "pooler, not used for classification")
    return [*keys.map_tensors(TITLE, config, rules), *([pooler] if config.classes is not None else [])]


def read_config(names: TensorNames, assumptions: Assumptions) -> ViTConfig:
    """Return the configuration of a ViViT."""
    width, channels, tubelet, patch, _ = names.tubelet_shape(f"{PATCHES}.weight")
    rows = names.shape("embeddings.position_embeddings", 3)[1] - 1
    frames = assumptions.resolve("frames", 16 * tubelet, "the published number of steps, 16")
    steps = max(1, frames // tubelet)
    if frames % tubelet or rows % steps:
        raise ValueError(f"{frames} frames do not fit {rows} positions of tubelets: give assume={{'frames': …}}")
    classes = TensorNames(names.shapes).output_dim("classifier")
    why = "transformers' default for ViViT"
    return ViTConfig(
        size=Size(
            names.count_layers("encoder.layer.{}."),
            width,
            names.layer_shape("encoder.layer.*.intermediate.dense.weight", 2)[0],
            assumptions.resolve_heads(width, TITLE),
        ),
        embed=Tubelets(tubelet, patch),
        position=Learned1D(resampling=assumptions.resolve_resampling("transformers", "interpolate_pos_encoding")),
        prefix=Prefix(1),
        block=PreNorm(mlp=assumptions.resolve_gelu("tanh", why), qkv_bias=assumptions.resolve("qkv_bias", True, why)),
        pool=ClassToken(),
        head=formats.choose_head(names.output_dim("pooler.dense") if classes is None else None, width),
        classes=classes,
        image_size=assumptions.resolve_table_size(rows // steps, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, why),
        frames=frames,
    )


def default_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the default of transformers' processor: values from -1 to 1, of which it subtracts 0.5 and divides by 0.5."""
    pipeline, why = (
        videomae.make_centre_crop(config, 2, (0.75,) * 3, (0.25,) * 3),
        "the default of its processor",
    )
    return (pipeline.with_resize_factor(256 / 224) if pipeline.fit == "cover" else pipeline), why


FORMATS = (
    CheckpointFormat(
        "transformers vivit",
        TITLE,
        (f"{PATCHES}.weight", "encoder.layer.*.attention.attention.query.weight", "embeddings.cls_token"),
        read_config,
        build_table,
        default_preprocessing,
        ("vivit.", ""),
        videomae.parse_settings,
        {"frames": 4},
        {f"{PATCHES}.weight": 5},
    ),
)


def list_limits(config: TokenConfig) -> Reasons:
    """Return why ViViT cannot express a model, apart from its tensor names."""
    return {
        **formats.list_common_limits(config),
        "it has a class token and no other prefix token": config.prefix != Prefix(1),
        "it pools by the class token": config.pool != ClassToken(),
        "its layers are pre-norm": type(config.block) is not PreNorm,
        "its classifier is one linear layer": config.classes is not None and not isinstance(config.head, Linear),
        "it has no projection": not isinstance(config.head, Linear | PreLogits),
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    body = "Model" if config.classes is None else "ForVideoClassification"
    embed = videomae.require_tubelets(TITLE, config)
    settings = {
        "architectures": [f"Vivit{body}"],
        "model_type": "vivit",
        **transformers.build_common_settings(config, dtype),
        "intermediate_size": config.size.mlp,
        "num_frames": config.frames,
        "tubelet_size": [embed.frames, embed.patch, embed.patch],
        "qkv_bias": config.block.qkv_bias,
    }
    del settings["patch_size"]
    if isinstance(config.head, PreLogits):
        settings |= {"pooler_output_size": config.head.hidden or config.size.width, "pooler_act": "tanh"}
    return settings
