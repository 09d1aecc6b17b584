"""Key tables of BEiT and BEiT v2 (Bao et al. 2021, Peng et al. 2022): timm's `beit_*` and `beitv2_*`, Microsoft's release with
the same names, and transformers' `Beit…` and `Data2VecVision…`.

They are Vision Transformers with a class token, a table of relative positions for every layer or a shared one, a bias of
queries and values only, and LayerScale.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import (
    Assumptions,
    CheckpointFormat,
    Reasons,
    TensorNames,
    relative,
    timm,
    transformers,
)
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules
from vitrail.data.preprocessing import IMAGENET_STATS, INCEPTION_STATS, Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear
from vitrail.nn.mlp import GELU
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, PositionSlot, Relative
from vitrail.nn.position.base import PositionScope

PRETRAINING = "used in pre-training only"


@dataclass(frozen=True)
class Naming:
    """The names of one project. `{}` and `#` stand for the number of a layer."""

    title: str
    patches: str
    class_token: str
    absolute: str
    layer: str
    qkv: tuple[str, ...]  # weights
    biases: tuple[str, str]  # of queries and values
    parts: dict[str, str]  # of a layer: ours and theirs
    every: str  # the module of a layer's table of offsets
    shared: str
    norms: tuple[str, str]  # with the class token, with the mean over patches
    head: str
    ignored: tuple[str, ...]
    resampling: str  # the rule of its table of offsets
    absolute_resampling: str
    eps: float


TIMM = Naming(
    title="timm",
    patches="patch_embed.proj",
    class_token="cls_token",
    absolute="pos_embed",
    layer="blocks.#",
    qkv=("attn.qkv.weight",),
    biases=("attn.q_bias", "attn.v_bias"),
    parts={
        "norm1.*": "norm1.*",
        "msa.out.*": "attn.proj.*",
        "?branch1.scale.weight": "gamma_1",
        "norm2.*": "norm2.*",
        "mlp.fc1.*": "mlp.fc1.*",
        "mlp.fc2.*": "mlp.fc2.*",
        "?branch2.scale.weight": "gamma_2",
    },
    every="attn",
    shared="rel_pos_bias",
    norms=("norm", "fc_norm"),
    head="head",
    ignored=("mask_token", "lm_head.*", "cls_pt_layers.*"),
    resampling="timm-relative",
    absolute_resampling="timm",
    eps=1e-6,
)
TRANSFORMERS = Naming(
    title="transformers",
    patches="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    absolute="embeddings.position_embeddings",
    layer="encoder.layer.#",
    qkv=tuple(f"attention.attention.{name}.weight" for name in ("query", "key", "value")),
    biases=("attention.attention.query.bias", "attention.attention.value.bias"),
    parts={
        "norm1.*": "layernorm_before.*",
        "msa.out.*": "attention.output.dense.*",
        "?branch1.scale.weight": "lambda_1",
        "norm2.*": "layernorm_after.*",
        "mlp.fc1.*": "intermediate.dense.*",
        "mlp.fc2.*": "output.dense.*",
        "?branch2.scale.weight": "lambda_2",
    },
    every="attention.attention.relative_position_bias",
    shared="encoder.relative_position_bias",
    norms=("layernorm", "pooler.layernorm"),
    head="classifier",
    ignored=("embeddings.mask_token",),
    resampling="transformers-relative",
    absolute_resampling="transformers",
    eps=1e-12,
)


def is_beit(config: Any) -> bool:
    """Return whether BEiT's classes express this model: a class token, no bias of the keys, relative positions.

    With learned positions alone, LayerScale distinguishes it from a Vision Transformer whose keys have a bias of zero.
    """
    if not isinstance(config, ViTConfig) or type(config.block) is not PreNorm or config.prefix != Prefix(1):
        return False
    position, block = config.position, config.block
    learned = isinstance(position, Learned1D) and position.at == "stem" and block.layer_scale is not None
    return block.qkv_bias and not block.key_bias and (learned or isinstance(position, Relative))


def build_table(config: TokenConfig, root: str, naming: Naming = TIMM, norm: str | None = None) -> KeyTable:
    """Return the table of a classifier, or of the body of a configuration without classes.

    `root` is a prefix of the body's names, not of those of the head; `norm` is the name of the last norm if it is not the
    usual one.
    """
    patch, inner = formats.require_patches(naming.title, config), config.size.heads * config.shape.head_width
    layer, is_mean = f"{root}{naming.layer}", isinstance(config.pool, Mean) and config.pool.norm_after
    weights = tuple(f"{layer}.{name}" for name in naming.qkv)
    transform = keys.concatenate(0, [inner] * 3) if len(weights) > 1 else keys.IDENTITY
    rules: Rules = {
        "embed.projection.weight": (
            f"{root}{naming.patches}.weight",
            keys.flatten_patches(config.channels, patch),
        ),
        "embed.projection.bias": f"{root}{naming.patches}.bias",
        "prefix.outputs": f"{root}{naming.class_token}",
        "?position.weight": f"{root}{naming.absolute}",
        "?position.absolute.weight": f"{root}{naming.absolute}",
        "blocks.#.msa.qkv.weight": (weights, transform),
        "blocks.#.msa.qkv.bias": (
            tuple(f"{layer}.{name}" for name in naming.biases),
            keys.concatenate(0, [inner] * 2),
        ),
        "pool.norm.*": f"{norm or root + naming.norms[is_mean]}.*",
        "?head.*": f"{root if naming is TIMM else ''}{naming.head}.*",
    }
    for ours, theirs in naming.parts.items():
        rules[f"?blocks.#.{ours[1:]}" if ours.startswith("?") else f"blocks.#.{ours}"] = f"{layer}.{theirs}"
    entries = []
    if isinstance(config.position, Relative):
        every, shared = f"{layer}.{naming.every}".replace("#", "{}"), f"{root}{naming.shared}"
        entries = [relative.map_relative(config, relative.list_modules(config, every, shared))]
    ignored = [IgnoredKeys(f"{root}{name}", PRETRAINING) for name in naming.ignored]
    outside = [IgnoredKeys("lm_head.*", PRETRAINING)] if norm else []
    computed = IgnoredKeys("*.relative_position_index", "computed, not learned")
    return [*keys.map_tensors(f"{naming.title}'s BEiT", config, rules, *entries), *ignored, *outside, computed]


# --- detection ---


def read_config(
    names: TensorNames, assumptions: Assumptions, naming: Naming = TIMM, norm: str | None = None
) -> ViTConfig:
    """Return the configuration of a BEiT with these names."""
    layer, found = naming.layer.replace("#", "*"), _find_tables(names, naming)
    width, channels, patch, _ = names.patch_shape(f"{naming.patches}.weight")
    mlp, depth = naming.parts["mlp.fc1.*"].removesuffix("*"), naming.layer.replace("#", "{}") + "."
    outside = names if naming is TIMM else TensorNames(names.shapes)
    position, size = _read_position(names, assumptions, patch, naming)
    if naming is TRANSFORMERS and isinstance(position, Relative) and size[0] != size[1]:
        raise ValueError(f"transformers exchanges the sides of a table that is not square, got {size[0]}×{size[1]}")
    return ViTConfig(
        size=Size(
            names.count_layers(depth),
            width,
            names.layer_shape(f"{layer}.{mlp}weight", 2)[0],
            names.shape(found[1], 2)[1] if found else assumptions.resolve_heads(width, naming.title),
        ),
        embed=Patches(patch),
        position=position,
        block=PreNorm(
            mlp=assumptions.resolve_gelu("exact", f"{naming.title}'s default"),
            layer_scale=0.1 if names.find(f"{layer}.{naming.parts['?branch1.scale.weight']}") else None,
            key_bias=False,
        ),
        pool=_read_pool(names, assumptions, naming, norm),
        classes=outside.output_dim(naming.head),
        image_size=size,
        channels=channels,
        eps=assumptions.resolve("eps", naming.eps, f"{naming.title}'s default for BEiT"),
        init="deit",
    )


def _find_tables(names: TensorNames, naming: Naming) -> tuple[PositionScope, str] | None:
    """Return the scope of the tables of offsets and the name of one; None if there are none."""
    every = f"{naming.layer.replace('#', '*')}.{naming.every}.{relative.TABLE}"
    shared = f"{naming.shared}.{relative.TABLE}"
    at = relative.find_scope(names, every, shared)
    return None if at is None else (at, names.find(every) or shared)


def _read_position(
    names: TensorNames, assumptions: Assumptions, patch: int, naming: Naming
) -> tuple[PositionSlot, tuple[int, int]]:
    found, has_table = _find_tables(names, naming), naming.absolute in names
    if found is None:
        scale = f"{naming.layer.replace('#', '*')}.{naming.parts['?branch1.scale.weight']}"
        if not has_table or names.find(scale) is None:
            raise ValueError(f"it has neither a {relative.TABLE} nor {naming.absolute} and {scale}, as BEiT has")
        rule = assumptions.resolve_resampling(naming.absolute_resampling, f"{naming.title}'s code")
        patches = names.shape(naming.absolute, 3)[1] - 1
        return Learned1D(resampling=rule), assumptions.resolve_table_size(patches, patch)
    at, table = found
    size = relative.read_offset_size(table, names, 1, patch, assumptions)
    rule = assumptions.resolve_resampling(naming.resampling, f"{naming.title}'s code for BEiT")
    added = formats.parse_resampling(naming.absolute_resampling)
    return Relative(at, resampling=rule, absolute=Learned1D(resampling=added) if has_table else None), size


def _read_pool(names: TensorNames, assumptions: Assumptions, naming: Naming, norm: str | None) -> ClassToken | Mean:
    if f"{naming.norms[1]}.weight" in names:
        return Mean(norm_after=True)
    if norm is None and "lm_head.weight" not in names:
        return ClassToken()
    name = assumptions.resolve("pool", "mean", "pre-training predicts the patches")
    if name not in ("class", "mean"):
        raise ValueError(f"pool must be class or mean, got {name}")
    return ClassToken() if name == "class" else Mean()


def default_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return timm's pipeline: mean and standard deviation 0.5 for BEiT, those of ImageNet for BEiT v2."""
    size, version = config.image_size, "BEiT v2" if "beitv2" in name.lower() else "BEiT"
    fraction = 0.9 if size[0] <= 224 else 1.0
    if version == "BEiT v2" and config.size.width >= 1024:
        fraction = 0.95
    pipeline = timm.make_center_crop(size, fraction, "bicubic")
    if version == "BEiT":
        why = "timm's default for BEiT; BEiT v2 has the same tensors and uses assume={'mean': 'imagenet'}"
        return pipeline, why
    return replace(pipeline, **IMAGENET_STATS), "timm's default for BEiT v2, from the file name"


def default_transformers_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the default of transformers' image processor."""
    size = config.image_size
    pipeline = Preprocessing(size, size, "squash", "bicubic", engine="torch", centre="down", **INCEPTION_STATS)
    return pipeline, "the default of transformers' beit processor"


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of timm's config.json; the pooling follows from the tensors."""
    facts = timm.parse_settings(settings)
    return {name: fact for name, fact in facts.items() if name != "pool"}


EXAMPLE = {"position": "relative", "block": PreNorm(key_bias=False), "layer_scale": 0.1, "pool": "mean-norm"}
EXAMPLE |= {"prefix": "class"}


def _list_required(naming: Naming) -> tuple[str, ...]:
    return (f"{naming.patches}.weight", f"{naming.layer.replace('#', '*')}.{naming.biases[1]}")


def _make_transformers_format(family: str, norm: str | None = None) -> CheckpointFormat:
    """Return a format of transformers; `norm` is that of a model for pre-training, whose body has none."""
    required = _list_required(TRANSFORMERS)
    layer = TRANSFORMERS.layer.replace("#", "*")
    return CheckpointFormat(
        f"transformers {family}{' pre-training' if norm else ''}",
        f"transformers' {family}{' with the head of its pre-training' if norm else ''}",
        (required[0], f"{layer}.lambda_1") if not norm else required,
        partial(read_config, naming=TRANSFORMERS, norm=norm),
        partial(build_table, naming=TRANSFORMERS, norm=norm),
        default_transformers_preprocessing,
        (f"{family}.", "") if not norm else (f"{family}.",),
        transformers.parse_settings,
        EXAMPLE,
    )


FORMATS = (
    CheckpointFormat(
        "beit",
        "BEiT in the names of timm and of Microsoft's release",
        _list_required(TIMM),
        read_config,
        build_table,
        default_preprocessing,
        ("", "encoder.", "backbone."),
        parse_settings,
        EXAMPLE,
    ),
    _make_transformers_format("beit", norm="layernorm"),
    _make_transformers_format("beit"),
    _make_transformers_format("data2vec_vision"),
)


# --- writing ---


def list_limits(config: TokenConfig, naming: Naming) -> Reasons:
    """Return why a project's BEiT cannot express a model, apart from its tensor names."""
    pool, height, width = config.pool, *config.image_size
    in_timm, learned = naming is TIMM, config.position
    learned = learned.absolute if isinstance(learned, Relative) else learned
    return {
        "its BEiT pools by the class token, or by the mean with the norm after it": pool
        not in (ClassToken(), Mean(norm_after=True)),
        "its BEiT has positions of the class token": isinstance(learned, Learned1D) and learned.prefix == "none",
        "its BEiT's classifier is one linear layer": not isinstance(config.head, Linear),
        "its heads divide the width evenly": config.size.head is not None,
        "its BEiT has the exact GELU": in_timm and config.block.mlp != GELU(),
        "its BEiT is recognised by its LayerScale": not in_timm and config.block.layer_scale is None,
        "its BEiT exchanges the sides of images that are not square": not in_timm and height != width,
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    position = config.position
    at = position.at if isinstance(position, Relative) else None
    absolute = not isinstance(position, Relative) or position.absolute is not None
    body = "Model" if config.classes is None else "ForImageClassification"
    return {
        "architectures": [f"Beit{body}"],
        "model_type": "beit",
        **transformers.build_common_settings(config, dtype),
        "intermediate_size": config.size.mlp,
        "layer_scale_init_value": config.block.layer_scale,
        "use_absolute_position_embeddings": absolute,
        "use_relative_position_bias": at == "every",
        "use_shared_relative_position_bias": at == "shared",
        "use_mean_pooling": isinstance(config.pool, Mean),
        "use_mask_token": False,
    }


def build_target_table(config: TokenConfig, naming: Naming) -> KeyTable:
    """Return the table of a file to write."""
    root = "" if naming is TIMM or config.classes is None else "beit."
    return build_table(config, root, naming)
