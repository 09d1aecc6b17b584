"""Key tables of the image towers of CLIP and SigLIP in transformers' names; `towers.py` adds the text towers.

SigLIP 2 at a fixed image size is SigLIP with another vocabulary; its NaFlex models, of any aspect ratio, are refused.
"""

from typing import Any

import torch

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames, transformers
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules, TensorTransform
from vitrail.data.preprocessing import CLIP_STATS, INCEPTION_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear, Projection
from vitrail.nn.pool import MAP, ClassToken
from vitrail.nn.position import Learned1D

ROOT, PATCHES = "vision_model.", "embeddings.patch_embedding"
OUTSIDE = ("text_model.*", "text_projection.weight", "logit_scale", "logit_bias")


def map_attention(layer: str) -> Rules:
    """Return the rules of attention with separate matrices for queries, keys and values."""
    parts = {kind: tuple(f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")}
    rules: Rules = {f"blocks.#.msa.qkv.{kind}": (names, THIRDS) for kind, names in parts.items()}
    return rules | {"blocks.#.msa.out.*": f"{layer}.self_attn.out_proj.*"}


def _split_thirds(ours: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.contiguous() for part in ours[0].chunk(3)]


THIRDS = TensorTransform(lambda theirs: [torch.cat(theirs)], _split_thirds)


def map_encoder(config: TokenConfig, root: str) -> Rules:
    """Return the rules of what both image towers have."""
    layer, patch = f"{root}encoder.layers.#", formats.require_patches("transformers", config)
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    return {
        "embed.projection.weight": (
            f"{root}{PATCHES}.weight",
            keys.flatten_patches(config.channels, patch),
        ),
        "?embed.projection.bias": f"{root}{PATCHES}.bias",
        "position.weight": (
            f"{root}embeddings.position_embedding.weight",
            keys.reshape((rows, width), (1, rows, width)),
        ),
        **map_attention(layer),
        "blocks.#.norm1.*": f"{layer}.layer_norm1.*",
        "blocks.#.norm2.*": f"{layer}.layer_norm2.*",
        "blocks.#.mlp.fc1.*": f"{layer}.mlp.fc1.*",
        "blocks.#.mlp.fc2.*": f"{layer}.mlp.fc2.*",
        "pool.norm.*": f"{root}post_layernorm.*",
    }


def map_clip(config: TokenConfig, root: str = ROOT) -> KeyTable:
    """Return the table of `CLIPVisionModelWithProjection`, whose second norm is spelt `pre_layrnorm`."""
    width = config.size.width
    rules = map_encoder(config, root) | {
        "prefix.outputs": (f"{root}embeddings.class_embedding", keys.reshape((width,), (1, 1, width))),
        "token_norm.*": f"{root}pre_layrnorm.*",
        "?head.weight": "visual_projection.weight",
    }
    return keys.map_tensors("transformers' CLIP", config, rules)


def map_siglip(config: TokenConfig, root: str = ROOT) -> KeyTable:
    """Return the table of `SiglipVisionModel`, whose head pools by attention."""
    head, width = f"{root}head", config.size.width
    rows = TensorTransform(lambda theirs: list(theirs[0].split([width, 2 * width])), lambda ours: [torch.cat(ours)])
    entries = [
        keys.map_key((f"pool.q.{kind}", f"pool.kv.{kind}"), f"{head}.attention.in_proj_{kind}", rows)
        for kind in ("weight", "bias")
    ]
    rules = map_encoder(config, root) | {
        "pool.probe": f"{head}.probe",
        "pool.out.*": f"{head}.attention.out_proj.*",
        "pool.norm2.*": f"{head}.layernorm.*",
        "pool.mlp.fc1.*": f"{head}.mlp.fc1.*",
        "pool.mlp.fc2.*": f"{head}.mlp.fc2.*",
    }
    return keys.map_tensors("transformers' SigLIP", config, rules, *entries)


def read_config(names: TensorNames, assumptions: Assumptions) -> ViTConfig:
    """Return the configuration of an image tower: CLIP's if it has a class token, else SigLIP's."""
    name, outside = f"{PATCHES}.weight", TensorNames(names.shapes)
    if name in names and len(names.shapes[names.root + name]) == 2:
        raise ValueError("its patches have no fixed grid (NaFlex), which is unsupported: use a fixed-resolution model")
    clip = "embeddings.class_embedding" in names
    width, channels, patch, _ = names.patch_shape(name)
    activation = assumptions.resolve_gelu("quick" if clip else "tanh", "transformers' default")
    project = "visual_projection.weight"
    return ViTConfig(
        size=Size(
            depth=names.count_layers("encoder.layers.{}."),
            width=width,
            mlp=names.layer_shape("encoder.layers.*.mlp.fc1.weight", 2)[0],
            heads=assumptions.resolve_heads(width, "transformers"),
        ),
        embed=Patches(patch, bias=not clip),
        position=Learned1D(
            resampling=assumptions.resolve_resampling("transformers", "interpolate_pos_encoding of transformers")
        ),
        prefix=Prefix(int(clip)),
        block=PreNorm(mlp=activation),
        pool=ClassToken() if clip else MAP(activation),
        head=Projection(outside.shape(project, 2)[0]) if clip and project in outside else Linear(),
        classes=None,
        image_size=assumptions.resolve_table_size(
            names.shape("embeddings.position_embedding.weight", 2)[0] - clip, patch
        ),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-5 if clip else 1e-6, "transformers' default"),
        token_norm=clip,
    )


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of `vision_config` in config.json, or of config.json of an image tower alone."""
    config = formats.get_object(settings, "config.json")
    vision = formats.get_object(config, "vision_config")
    facts = parse_tower(vision if "vision_config" in config else config)
    if config.get("vision_config") == {} and config.get("model_type") in ("clip", "siglip"):
        return {}  # the defaults
    if vision.get("vision_use_head") is False:
        raise ValueError("unsupported vision_use_head=false in config.json: the image tower has no pooling")
    return facts


def parse_tower(config: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of one tower that tensors do not determine."""
    return transformers.parse_settings({"config.json": {"hidden_size": 0} | config} if config else {})


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the default of the image processors of CLIP and SigLIP."""
    size, clip = config.image_size, getattr(config, "token_norm", False)
    shared: dict[str, Any] = {"interpolation": "bicubic", "engine": "torch", "centre": "down"}
    if clip:
        return Preprocessing(size, size, "cover", **shared, **CLIP_STATS), "the default of transformers' CLIP processor"
    return Preprocessing(
        size, size, "squash", **shared, **INCEPTION_STATS
    ), "the default of transformers' SigLIP processor"


def build_tower_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what `vision_config` says of an image tower."""
    settings = transformers.build_common_settings(config, dtype) | {"intermediate_size": config.size.mlp}
    return settings | ({"projection_dim": config.head.width} if isinstance(config.head, Projection) else {})


def _build_table(config: TokenConfig, root: str) -> KeyTable:
    table = map_clip(config, root) if config.token_norm else map_siglip(config, root)
    ignored = [IgnoredKeys(name, "text tower") for name in OUTSIDE]
    return [*table, *ignored, IgnoredKeys(f"{root}embeddings.position_ids", "computed, not learned")]


def _make_format(name: str, title: str, telling: str, **example: Any) -> CheckpointFormat:
    return CheckpointFormat(
        f"transformers {name}",
        f"the image tower of transformers' {title}",
        (f"{PATCHES}.weight", telling, "encoder.layers.*.self_attn.q_proj.weight"),
        read_config,
        _build_table,
        default_preprocessing,
        (ROOT, ""),
        parse_settings,
        {"classes": None, **example},
    )


CLIP_EXAMPLE = {"embed": Patches(16, bias=False), "token_norm": True, "head": Projection(32)}
FORMATS = (
    _make_format("clip", "CLIP", "embeddings.class_embedding", **CLIP_EXAMPLE),
    _make_format("siglip", "SigLIP", "head.probe", pool="map"),
)
