"""Key tables of VideoMAE (Tong et al. 2022): transformers' `VideoMAE…` and the names of its authors' release.

A Vision Transformer of clips with fixed 1-D positions, no class token, and a bias of queries and values only. Its classifier
reads the norm of the mean over tubelets, and has no norm before. No tensor depends on the size of a clip.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, transformers
from vitrail.checkpoints.keys import IgnoredKeys, KeyMapping, KeyTable, Rules
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.mae_decoder import Decoder, PixelDecoder, compute_decoder_positions, make_decoder_block
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Prefix, Tubelets
from vitrail.nn.head import Linear
from vitrail.nn.pool import Mean
from vitrail.nn.position import Sinusoid1D

PRETRAINING = "used in pre-training only"


@dataclass(frozen=True)
class Naming:
    """The names of one project. `#` stands for the number of a layer."""

    title: str
    root: str  # before the body of a classifier
    patches: str
    layer: str
    qkv: tuple[str, ...]  # weights
    biases: tuple[str, str]  # of queries and values
    parts: dict[str, str]  # of a layer: ours and theirs
    norm: str  # of a model without classes
    head: str
    decoder: str  # before the layers of the decoder
    eps: float
    mean_eps: float  # of the norm of the mean, and of the decoder's last norm


TRANSFORMERS = Naming(
    title="transformers' VideoMAE",
    root="videomae.",
    patches="embeddings.patch_embeddings.projection",
    layer="encoder.layer.#.",
    qkv=tuple(f"attention.attention.{name}.weight" for name in ("query", "key", "value")),
    biases=("attention.attention.q_bias", "attention.attention.v_bias"),
    parts={
        "norm1.*": "layernorm_before.*",
        "msa.out.*": "attention.output.dense.*",
        "norm2.*": "layernorm_after.*",
        "mlp.fc1.*": "intermediate.dense.*",
        "mlp.fc2.*": "output.dense.*",
    },
    norm="layernorm",
    head="classifier",
    decoder="decoder.decoder_layers.",
    eps=1e-12,
    mean_eps=1e-5,
)
# The names of the modules in version 5, which writes the others.
TRANSFORMERS_MODULES = replace(
    TRANSFORMERS,
    title="transformers' VideoMAE in the names of its modules",
    biases=("attention.attention.query.bias", "attention.attention.value.bias"),
)
RELEASE = Naming(
    title="VideoMAE's release",
    root="",
    patches="patch_embed.proj",
    layer="blocks.#.",
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
    norm="norm",
    head="head",
    decoder="decoder.blocks.",
    eps=1e-6,
    mean_eps=1e-6,
)


def build_table(config: TokenConfig, root: str | None = None, naming: Naming = TRANSFORMERS) -> KeyTable:
    """Return the table of a classifier, or of the body of a configuration without classes; `root` is before the body."""
    root = (naming.root if config.classes is not None else "") if root is None else root
    outside = root if naming is RELEASE else ""
    embed, mean = require_tubelets(naming.title, config), isinstance(config.pool, Mean) and config.pool.norm_after
    rules: Rules = {
        "embed.projection.weight": (
            f"{root}{naming.patches}.weight",
            keys.flatten_tubelets(config.channels, embed.frames, embed.patch),
        ),
        "embed.projection.bias": f"{root}{naming.patches}.bias",
        **map_layers(config, f"{root}{naming.layer}", naming),
        "?pool.norm.*": f"{outside}fc_norm.*" if mean else f"{root}{naming.norm}.*",
        "?head.*": f"{outside}{naming.head}.*",
    }
    names = ("decoder.*", "encoder_to_decoder.*", "mask_token")
    return [
        *keys.map_tensors(naming.title, config, rules),
        *(IgnoredKeys(name, PRETRAINING) for name in names),
    ]


def map_layers(config: TokenConfig, layer: str, naming: Naming) -> Rules:
    """Return the rules of all layers, whose names begin with `layer`."""
    inner = config.size.heads * config.shape.head_width
    transform = keys.concatenate(0, [inner] * 3) if len(naming.qkv) > 1 else keys.IDENTITY
    rules: Rules = {
        "blocks.#.msa.qkv.weight": (tuple(layer + name for name in naming.qkv), transform),
        "?blocks.#.msa.qkv.bias": (tuple(layer + name for name in naming.biases), keys.concatenate(0, [inner] * 2)),
    }
    for ours, theirs in naming.parts.items():
        mark = "?" if ours.startswith("?") else ""
        rules[f"{mark}blocks.#.{ours.removeprefix('?')}"] = layer + theirs
    return rules


def require_tubelets(title: str, config: TokenConfig) -> Tubelets:
    """Return the tubelets of a model of clips; raise ValueError for a model of images."""
    if not isinstance(config.embed, Tubelets):
        raise ValueError(f"{title} cannot express this model: it is a model of clips, and this is one of images")
    return config.embed


def map_decoder(config: TokenConfig, spec: Decoder, naming: Naming, prefix: str) -> list[KeyMapping]:
    """Return the table of the decoder of a pre-training model; our names begin with `prefix`. Positions are computed."""
    assert spec.width is not None and spec.mlp is not None and spec.heads is not None  # noqa: PT018
    embed = require_tubelets(naming.title, config)
    # the layers have the names that an encoder of the decoder's size would have
    size, block = Size(spec.depth, spec.width, spec.mlp, spec.heads), make_decoder_block(config)
    twin = replace(config, size=size, block=block, classes=None, pool=Mean())
    before = naming.layer.removesuffix("#.")
    layers = [
        KeyMapping(
            tuple(prefix + name for name in entry.ours),
            tuple(naming.decoder + name.removeprefix(before) for name in entry.theirs),
            entry.transform,
        )
        for entry in keys.select_mappings(build_table(twin, "", naming))
        if entry.ours[0].startswith("blocks.")
    ]
    pixels = keys.reorder_patches(config.channels, embed.patch, 0, embed.frames)
    with torch.device("meta"):
        decoder = PixelDecoder(config, spec)
    positions = keys.TensorTransform(lambda theirs: [compute_decoder_positions(decoder)], lambda ours: [])
    return [
        keys.map_key(f"{prefix}mask_token", "mask_token"),
        keys.map_key(f"{prefix}position", (), positions),
        keys.map_key(f"{prefix}embed.weight", "encoder_to_decoder.weight"),
        *layers,
        *(keys.map_key(f"{prefix}norm.{part}", f"decoder.norm.{part}") for part in ("weight", "bias")),
        *(keys.map_key(f"{prefix}pred.{part}", f"decoder.head.{part}", pixels) for part in ("weight", "bias")),
    ]


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, naming: Naming) -> ViTConfig:
    """Return the configuration of a VideoMAE with these names."""
    width, channels, tubelet, patch, _ = names.tubelet_shape(f"{naming.patches}.weight")
    layer, outside = naming.layer.replace("#", "*"), names if naming is RELEASE else TensorNames(names.shapes)
    classes, eps = (
        outside.output_dim(naming.head),
        assumptions.resolve("eps", naming.eps, f"the default of {naming.title}"),
    )
    return ViTConfig(
        size=Size(
            names.count_layers(naming.layer.replace("#", "{}")),
            width,
            names.layer_shape(f"{layer}{naming.parts['mlp.fc1.*'].removesuffix('*')}weight", 2)[0],
            assumptions.resolve_heads(width, naming.title),
        ),
        embed=Tubelets(tubelet, patch),
        position=Sinusoid1D(),
        prefix=Prefix(0),
        block=PreNorm(
            mlp=assumptions.resolve_gelu("exact", f"the default of {naming.title}"),
            layer_scale=0.1 if naming is RELEASE and names.find(f"{layer}gamma_1") else None,
            qkv_bias=assumptions.resolve("qkv_bias", True, f"the default of {naming.title}"),
            key_bias=False,
        ),
        pool=read_pool(names, outside, classes, eps, naming),
        classes=classes,
        image_size=assumptions.resolve_image_size(patch, "the published size"),
        channels=channels,
        eps=eps,
        init="deit",
        frames=assumptions.resolve("frames", 16 if 16 % tubelet == 0 else 8 * tubelet, "the published number"),
    )


def read_pool(names: TensorNames, outside: TensorNames, classes: int | None, eps: float, naming: Naming) -> Mean:
    """Return the pooling: of a classifier the norm of the mean; else the mean of tokens, normed if there is a norm."""
    if classes is None:
        return Mean(normed=f"{naming.norm}.weight" in names)
    if "fc_norm.weight" not in outside:
        raise ValueError("its classifier reads the first tubelet (use_mean_pooling=false), which is not supported")
    return Mean(norm_after=True, eps=None if naming.mean_eps == eps else naming.mean_eps)


def read_decoder(
    names: TensorNames, config: TokenConfig, naming: Naming, heads: int | None, settings: Mapping[str, Any]
) -> Decoder:
    """Return the decoder of a pre-training model, from its shapes and settings."""
    width = names.shape("encoder_to_decoder.weight", 2)[0]
    mlp = names.layer_shape(f"{naming.decoder}*.{naming.parts['mlp.fc1.*'].removesuffix('*')}weight", 2)[0]
    default = settings.get("decoder_num_attention_heads", width // 64 if width % 64 == 0 else None)
    heads = default if heads is None else heads
    if type(heads) is not int:
        raise ValueError(f"the heads of its decoder of width {width} are not recorded: give decoder_heads")
    eps = None if naming.mean_eps == config.eps else naming.mean_eps
    return Decoder(names.count_layers(naming.decoder + "{}."), width, heads, mlp, eps).fill_sizes(config)


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of transformers' config.json, of models of clips too."""
    config, facts = formats.get_object(settings, "config.json"), transformers.parse_settings(settings)
    for name, key in (("frames", "num_frames"), ("qkv_bias", "qkv_bias"), ("qkv_bias", "qv_bias")):
        if type(config.get(key)) is (int if name == "frames" else bool):
            facts[name] = (config[key], "config.json")
    if type(size := config.get("image_size")) is int and size > 0:
        facts["size"] = ((size, size), "config.json")
    return facts


def default_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the pipeline of evaluation: the shorter side resized, the centre cropped."""
    return make_centre_crop(config, 4, **IMAGENET_STATS), "the evaluation of VideoMAE's release on Kinetics"


def make_centre_crop(
    config: TokenConfig, stride: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Preprocessing:
    """Return the usual pipeline of clips: the shorter side resized, the centre cropped; frames that are not square, squashed."""
    assert config.frames is not None
    size, clip = config.image_size, Clip(config.frames, stride)
    fit = "cover" if size[0] == size[1] else "squash"
    return Preprocessing(size, size, fit, "bilinear", engine="torch", centre="down", mean=mean, std=std, clip=clip)


EXAMPLE = {"frames": 4, "position": "sinusoid1d", "pool": "mean-norm", "block": PreNorm(key_bias=False)}


def _make_format(naming: Naming, name: str, roots: tuple[str, ...]) -> CheckpointFormat:
    patches, layer = f"{naming.patches}.weight", naming.layer.replace("#", "*")
    return CheckpointFormat(
        name,
        naming.title,
        (patches, f"{layer}{naming.qkv[0]}"),
        partial(read_config, naming=naming),
        partial(build_table, naming=naming),
        default_preprocessing,
        roots,
        parse_settings,
        EXAMPLE,
        {patches: 5},
    )


FORMATS = (
    _make_format(TRANSFORMERS, "transformers videomae", ("videomae.", "")),
    _make_format(TRANSFORMERS_MODULES, "transformers videomae modules", ("videomae.", "")),
    _make_format(RELEASE, "videomae", ("", "encoder.")),
)


# --- writing ---


def list_limits(config: TokenConfig, naming: Naming) -> Reasons:
    """Return why the project cannot express a model, apart from its tensor names."""
    block, pool = config.block, config.pool
    pools = (Mean(),) if naming is RELEASE else (Mean(), Mean(normed=False))
    if config.classes is not None:
        pools = tuple(Mean(norm_after=True, eps=eps) for eps in (None, 1e-5, 1e-6, 1e-12))
    return {
        "it takes clips, and this model images": config.frames is None,
        "it has fixed 1-D sin-cos positions": config.position != Sinusoid1D(),
        "it has no class token": config.prefix.count > 0,
        "its layers are pre-norm, with a bias of queries and values only": type(block) is not PreNorm
        or (block.qkv_bias and block.key_bias),
        "it classifies the norm of the mean, and else has the mean of the normed tokens": pool not in pools,
        "its classifier is one linear layer": not isinstance(config.head, Linear),
        "its heads divide the width evenly": config.size.head is not None,
        "its release has the exact GELU": naming is RELEASE and block.mlp != formats.GELUS["exact"],
        "its release has a bias of queries and values": naming is RELEASE and not block.qkv_bias,
    }


def list_notes(config: TokenConfig, naming: Naming) -> list[str]:
    """Return where the project's code computes otherwise."""
    eps = getattr(config.pool, "eps", None) or config.eps
    if config.classes is None or eps == naming.mean_eps:
        return []
    return [f"{naming.title} has an eps of {naming.mean_eps:g} in the norm of the mean, and the model one of {eps:g}"]


def build_decoder_settings(spec: Decoder, norm_pix: bool) -> dict[str, Any]:
    """Return what transformers' config.json says of a pre-training model beside its encoder."""
    return {
        "architectures": ["VideoMAEForPreTraining"],
        "decoder_hidden_size": spec.width,
        "decoder_num_hidden_layers": spec.depth,
        "decoder_num_attention_heads": spec.heads,
        "decoder_intermediate_size": spec.mlp,
        "norm_pix_loss": norm_pix,
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    body = "Model" if config.classes is None else "ForVideoClassification"
    return {
        "architectures": [f"VideoMAE{body}"],
        "model_type": "videomae",
        **transformers.build_common_settings(config, dtype),
        "intermediate_size": config.size.mlp,
        "num_frames": config.frames,
        "tubelet_size": require_tubelets(TRANSFORMERS.title, config).frames,
        "qv_bias": config.block.qkv_bias,
        "use_mean_pooling": config.pool != Mean(),
    }
