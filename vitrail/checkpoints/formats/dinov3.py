"""Key tables of DINOv3 (Siméoni et al. 2025) in the names of Meta's release, of timm and of transformers.

The three compute the same but for the periods of the rotation: Meta's files store them, rounded to bfloat16, and its code
uses them; timm and transformers compute them in float32. Meta's and transformers' models return the class token, timm's the
mean of the patches. The random scaling of coordinates in training is not part of our models.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, timm, transformers
from vitrail.checkpoints.keys import IgnoredKeys, KeyMapping, KeyTable, Names, Rules, TensorTransform
from vitrail.data.preprocessing import IMAGENET_STATS, NormalisationStats, Preprocessing
from vitrail.models.base import ModelConfig, State, TokenConfig
from vitrail.models.sizes import SIZES, Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear
from vitrail.nn.mlp import GELU, SwiGLU
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import RotaryDINOv3

SATELLITE_STATS: NormalisationStats = {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)}
WIDTH_WITHOUT_BIAS = 4096  # of 7B, the one model of Meta's release whose q, k and v have no bias
UNUSED = "used in pre-training only"


@dataclass(frozen=True)
class Naming:
    """The names of one project. `#` stands for the number of a layer."""

    title: str
    layer: str = "blocks.#"
    embed: str = "patch_embed.proj"
    tokens: tuple[str, str, str] = ("cls_token", "reg_token", "mask_token")  # class, registers, mask
    qkv: tuple[str, ...] = ("attn.qkv",)
    biases: tuple[str, ...] = ("attn.q_bias", "attn.v_bias")  # of q and v
    out: str = "attn.proj"
    scale: str = "gamma_{}"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    gated: tuple[str, str, str] = ("mlp.fc1_g", "mlp.fc1_x", "mlp.fc2")  # gate, value, output


TIMM = Naming("timm")
META = Naming(
    "DINOv3's release",
    tokens=("cls_token", "storage_tokens", "mask_token"),
    biases=("attn.qkv.bias", "attn.qkv.bias_mask"),
    scale="ls{}.gamma",
    gated=("mlp.w1", "mlp.w2", "mlp.w3"),
)
TRANSFORMERS = Naming(
    "transformers' dinov3_vit",
    layer="layer.#",
    embed="embeddings.patch_embeddings",
    tokens=("embeddings.cls_token", "embeddings.register_tokens", "embeddings.mask_token"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    biases=("attention.q_proj.bias", "attention.v_proj.bias"),
    out="attention.o_proj",
    scale="layer_scale{}.lambda1",
    mlp=("mlp.up_proj", "mlp.down_proj"),
    gated=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NESTED = replace(TRANSFORMERS, layer="model.layer.#")  # the names of version 5's modules


def map_vit(config: TokenConfig, naming: Naming) -> KeyTable:
    """Return the table of a DINOv3 in the names of one project."""
    patch = formats.require_patches(naming.title, config)
    inner, layer, (gate, value, output) = config.size.heads * config.shape.head_width, naming.layer, naming.gated
    rows = keys.concatenate(0, [inner] * 3) if len(naming.qkv) == 3 else keys.IDENTITY
    qkv = tuple(f"{layer}.{name}" for name in naming.qkv)
    rules: Rules = {
        "embed.projection.weight": (f"{naming.embed}.weight", keys.flatten_patches(config.channels, patch)),
        "embed.projection.bias": f"{naming.embed}.bias",
        "prefix.outputs": naming.tokens[0],
        "prefix.registers": naming.tokens[1],
        "blocks.#.norm1.*": f"{layer}.norm1.*",
        "blocks.#.norm2.*": f"{layer}.norm2.*",
        "blocks.#.msa.qkv.weight": (tuple(f"{name}.weight" for name in qkv), rows),
        "?blocks.#.msa.out.*": f"{layer}.{naming.out}.*",
        "blocks.#.branch1.scale.weight": f"{layer}.{naming.scale.format(1)}",
        "blocks.#.branch2.scale.weight": f"{layer}.{naming.scale.format(2)}",
        "pool.norm.*": "norm.*",
        "?head.*": "head.*",
    }
    if isinstance(config.block.mlp, SwiGLU):
        joined = keys.concatenate(0, [config.size.mlp] * 2)
        rules["blocks.#.mlp.fc1.*"] = ((f"{layer}.{gate}.*", f"{layer}.{value}.*"), joined)
        rules["blocks.#.mlp.fc2.*"] = f"{layer}.{output}.*"
    else:
        rules |= {f"blocks.#.mlp.fc{n}.*": f"{layer}.{name}.*" for n, name in enumerate(naming.mlp, start=1)}
    if config.block.key_bias:
        rules["?blocks.#.msa.qkv.bias"] = (tuple(f"{name}.bias" for name in qkv), rows)
    else:
        names: Names = tuple(f"{layer}.{name}" for name in naming.biases)
        transform = mask_key_bias(inner) if naming is META else keys.concatenate(0, [inner] * 2)
        rules["?blocks.#.msa.qkv.bias"] = (names, transform)
    periods = [map_periods(config)] if naming is META else []
    return keys.map_tensors(naming.title, config, rules, *periods)


def mask_key_bias(inner: int) -> TensorTransform:
    """Return the transform from a bias of q, k and v and its mask, which is zero for the keys, to that of q and v."""

    def make_mask(like: Tensor) -> Tensor:
        return torch.cat((like.new_ones(inner), like.new_zeros(inner), like.new_ones(inner)))

    def read(theirs: list[Tensor]) -> list[Tensor]:
        bias, mask = theirs
        if not torch.equal(mask, make_mask(mask)):
            raise ValueError("attn.qkv.bias_mask must be 1 for queries and values and 0 for keys: the file is modified")
        return [torch.cat((bias[:inner], bias[2 * inner :]))]

    def write(ours: list[Tensor]) -> list[Tensor]:
        q, v = ours[0].split(inner)
        return [torch.cat((q, torch.zeros_like(q), v)), make_mask(q)]

    return TensorTransform(read, write)


def map_periods(config: TokenConfig) -> KeyMapping:
    """Return the entry of Meta's stored periods, which the configuration determines."""
    assert isinstance(config.position, RotaryDINOv3)
    position, name = config.position, "rope_embed.periods"
    expected = torch.tensor(position.compute_periods(config.shape.head_width), device="cpu")

    def read(found: list[Tensor]) -> list[Tensor]:
        if not torch.allclose(found[0].float(), expected, rtol=1e-6, atol=0):
            raise ValueError(f"{name} are not those of base {position.theta:g} in {position.precision}")
        return []

    return KeyMapping((), (name,), TensorTransform(read, lambda _: [expected.clone()]))


def compare_angles(theta: float, head_width: int) -> float:
    """Return the largest difference of an angle, in radians, that periods in bfloat16 make."""
    exact, rounded = (RotaryDINOv3(theta, p).compute_periods(head_width) for p in ("float32", "bfloat16"))
    return max(2 * math.pi * abs(1 / a - 1 / b) for a, b in zip(exact, rounded, strict=True))


def fit_periods(periods: list[float]) -> tuple[float, str]:
    """Return the base and the precision that give these periods; raise ValueError if none does."""
    n = len(periods)
    found = torch.tensor(periods, device="cpu")
    bases = [100.0]
    if n > 1 and math.isfinite(periods[-1]) and periods[-1] > 0:
        bases.append(float(f"{periods[-1] ** (n / (n - 1)):.2g}"))
    for theta in bases:
        for precision in ("float32", "bfloat16"):
            known = torch.tensor(RotaryDINOv3(theta, precision).compute_periods(4 * n), device="cpu")
            if torch.allclose(found, known, rtol=1e-6, atol=0):
                return theta, precision
    raise ValueError(
        f"rope_embed.periods are not powers of a base such as 100: {keys.format_names(map(str, periods), 4)}"
    )


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, naming: Naming) -> ViTConfig:
    """Return the configuration of a DINOv3 in the names of one project."""
    width, channels, patch, _ = names.patch_shape(f"{naming.embed}.weight")
    layer, (gate, _, output) = naming.layer.replace("#", "*"), naming.gated
    gated = names.find(f"{layer}.{gate}.*") is not None
    mlp = names.layer_shape(f"{layer}.{output if gated else naming.mlp[1]}.weight", 2)[1]
    keyless = naming.biases[1] if naming is META else naming.biases[0]
    with_key = names.find(f"{layer}.{naming.qkv[1 if len(naming.qkv) > 1 else 0]}.bias") is not None
    key_bias = with_key and names.find(f"{layer}.{keyless}") is None if naming is META else with_key
    heads = _resolve_heads(names, assumptions, width, naming)
    registers = names.shape(naming.tokens[1], 3)[1]
    theta, precision = _resolve_periods(assumptions, width // heads, naming)
    return ViTConfig(
        size=Size(names.count_layers(naming.layer.replace("#", "{}") + "."), width, mlp, heads),
        embed=Patches(patch),
        position=RotaryDINOv3(theta, precision),
        prefix=Prefix(1, registers),
        block=PreNorm(
            mlp=SwiGLU() if gated else assumptions.resolve_gelu("exact", "DINOv3's models"),
            layer_scale=1e-5,
            qkv_bias=with_key or names.find(f"{layer}.{keyless}") is not None,
            key_bias=key_bias,
            out_bias=names.find(f"{layer}.{naming.out}.bias") is not None,
        ),
        pool=_resolve_pool(assumptions, naming),
        classes=names.output_dim("head") if naming is TIMM else None,
        image_size=assumptions.resolve_image_size(patch, "rotary positions have no size"),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-5, "DINOv3's models"),
    )


def _resolve_heads(names: TensorNames, assumptions: Assumptions, width: int, naming: Naming) -> int:
    if naming is META:
        head_width = 4 * names.shape("rope_embed.periods", 1)[0]
        if width % head_width:
            raise ValueError(f"rope_embed.periods has {head_width // 4} values, which do not divide the width {width}")
        return width // head_width
    if width == SIZES["H+"].width:  # H has other heads
        return assumptions.resolve("heads", SIZES["H+"].heads, f"the published number for the width {width}")
    return assumptions.resolve_heads(width, naming.title)


def _resolve_periods(assumptions: Assumptions, head_width: int, naming: Naming) -> tuple[float, Any]:
    """Return the base and the precision of the rotation's periods, with the difference that the precision makes."""
    theta = float(assumptions.given.get("theta", (100.0, ""))[0])
    differ = f"angles differ by up to {compare_angles(theta, head_width):.2g} between float32 and bfloat16"
    if naming is META:
        return theta, assumptions.resolve("periods", "bfloat16", f"Meta's release; {differ}")
    return theta, assumptions.resolve("periods", "float32", f"{naming.title} computes them; {differ}, Meta's release")


def _resolve_pool(assumptions: Assumptions, naming: Naming) -> ClassToken | Mean:
    default, why = (
        ("mean", "timm's default for DINOv3") if naming is TIMM else ("class", "its models return the class token")
    )
    name = assumptions.resolve("pool", default, why)
    if name not in ("class", "mean"):
        raise ValueError(f"pool must be class or mean, got {name}")
    return ClassToken() if name == "class" else Mean()


def parse_release_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the base and the precision of the periods in Meta's files."""
    periods = settings.get(formats.PERIODS_KEY)
    if not isinstance(periods, list) or not periods:
        return {}
    theta, precision = fit_periods(periods)
    differ = f"angles differ by up to {compare_angles(theta, 4 * len(periods)):.2g} from those of float32"
    source = f"rope_embed.periods; {differ}" if precision == "bfloat16" else "rope_embed.periods"
    return {"periods": (precision, source), "theta": (theta, "rope_embed.periods")}


def parse_transformers_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of transformers' config.json that tensors do not determine."""
    config = formats.get_object(settings, "config.json")
    facts, size = transformers.parse_settings(settings), config.get("image_size")
    if config.get("use_gated_mlp") and facts.pop("gelu", ("silu",))[0] != "silu":
        raise ValueError(f"unsupported hidden_act {config.get('hidden_act')!r} in config.json: a gated MLP needs silu")
    if type(size) is int and size > 0:
        facts["size"] = ((size, size), "config.json")
    if isinstance(theta := config.get("rope_theta"), int | float) and theta > 0:
        facts["theta"] = (theta, "config.json")
    return facts


def default_preprocessing(config: ModelConfig, name: str, naming: Naming) -> tuple[Preprocessing, str]:
    """Return the pipeline of a project for DINOv3; models of satellite images have other statistics."""
    satellite = "sat493m" in name.lower()
    stats = SATELLITE_STATS if satellite else IMAGENET_STATS
    why = (
        "timm's default for DINOv3"
        if naming is TIMM
        else f"the default of {naming.title}" + (" of satellite images, from the file name" if satellite else "")
    )
    larger = naming in (TIMM, META) and 256 % config.require_tokens(naming.title).embed.stride == 0
    size = (256, 256) if larger else config.image_size
    if naming is TIMM:
        return Preprocessing(size, size, "cover", "bicubic", **stats), why
    return Preprocessing(size, size, "squash", "bilinear", engine="torch", centre="down", **stats), why


def build_table(config: ModelConfig, root: str = "", naming: Naming = META) -> KeyTable:
    """Return the table of a file, and the tensors that only pre-training uses."""
    table = map_vit(config.require_tokens(naming.title), naming)
    ignored = [IgnoredKeys(f"{root}{name}", UNUSED) for name in (naming.tokens[2], "local_cls_norm.*")]
    outside = [IgnoredKeys(name, why) for name, why in timm.IGNORED_OUTSIDE_ROOT.items()] if root else []
    return [*keys.add_root(table, root), *ignored, *outside]


def _make_format(
    name: str, naming: Naming, required: tuple[str, ...], parse: Any, roots: tuple[str, ...]
) -> CheckpointFormat:
    title = f"{naming.title}'s DINOv3" if naming is TIMM else naming.title
    return CheckpointFormat(
        name,
        title,
        required,
        partial(read_config, naming=naming),
        partial(build_table, naming=naming),
        partial(default_preprocessing, naming=naming),
        roots,
        parse,
        {"position": "rotary-dinov3", "registers": 4, "layer_scale": 1e-5, "classes": None, "key_bias": False},
    )


EMBEDDINGS = ("embeddings.patch_embeddings.weight", "embeddings.register_tokens")
FORMATS = (
    _make_format(
        "dinov3",
        META,
        ("patch_embed.proj.weight", "rope_embed.periods|storage_tokens", "blocks.*.attn.qkv.weight"),
        parse_release_settings,
        ("", "backbone."),
    ),
    _make_format(
        "timm dinov3",
        TIMM,
        ("patch_embed.proj.weight", "reg_token", "blocks.*.gamma_?"),
        timm.parse_settings,
        timm.ROOTS,
    ),
    _make_format("transformers dinov3_vit", TRANSFORMERS, (*EMBEDDINGS, "layer.*"), parse_transformers_settings, ("",)),
    _make_format(
        "transformers 5 dinov3_vit", NESTED, (*EMBEDDINGS, "model.layer.*"), parse_transformers_settings, ("",)
    ),
)


# --- writing ---


def list_limits(config: TokenConfig, naming: Naming) -> Reasons:
    """Return why a project's DINOv3 cannot express a model, apart from its tensor names."""
    block, pool, position = config.block, config.pool, config.position
    theta = position.theta if isinstance(position, RotaryDINOv3) else None
    exact = isinstance(block.mlp, SwiGLU) or block.mlp == GELU()
    limits = {
        "its positions are rotary": theta is None,
        "its models have LayerScale": block.layer_scale is None,
        "its models have a class token and registers": config.prefix.outputs != 1 or not config.prefix.registers,
        "its heads divide the width evenly": config.size.head is not None,
        "its patches have a bias": isinstance(config.embed, Patches) and not config.embed.bias,
    }
    if naming is TIMM:
        other_pool = not isinstance(pool, ClassToken) and pool != Mean()
        limits |= {
            "its pooling is the class token, or the mean after the norm": other_pool,
            "its keys have no bias": block.qkv_bias and block.key_bias,
            "its classifier is one linear layer": not isinstance(config.head, Linear),
            "its rotation has the base 100": theta != 100,
        }
    else:
        limits |= {
            "its models have no classes: --classes none": config.classes is not None,
            "its models return their class token: --assume pool=class": not isinstance(pool, ClassToken),
            "its models have no projection": not isinstance(config.head, Linear),
        }
    if naming is not TRANSFORMERS:
        limits["its MLP has the exact GELU or SwiGLU"] = not exact
    return limits


def with_bias(config: TokenConfig, state: State) -> tuple[TokenConfig, State]:
    """Return the same model with a zero bias of q and v, which all of Meta's models but 7B have."""
    if config.block.qkv_bias or config.size.width == WIDTH_WITHOUT_BIAS:
        return config, state
    inner = config.size.heads * config.shape.head_width
    one = state["blocks.0.msa.qkv.weight"]
    zeros = {f"blocks.{layer}.msa.qkv.bias": one.new_zeros(2 * inner) for layer in range(config.depth)}
    return replace(config, block=replace(config.block, qkv_bias=True, key_bias=False)), state | zeros


def list_notes(config: TokenConfig, state: State, naming: Naming) -> list[str]:
    """Return the differences between this model and what a project computes with its tensors."""
    notes, position = [], config.position
    assert isinstance(position, RotaryDINOv3)
    if naming is not META and position.precision == "bfloat16":
        differ = f"angles differ by up to {compare_angles(position.theta, config.shape.head_width):.2g}"
        notes.append(
            f"{naming.title} computes the periods of the rotation in float32, here they are in bfloat16: {differ}"
        )
    if naming is TIMM and config.block.qkv_bias:
        zero = not any(tensor.any() for name, tensor in state.items() if name.endswith("msa.qkv.bias"))
        notes.append(f"timm's models with a bias of q and v end in _qkvb{': here all of it is zero' if zero else ''}")
    return notes


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of a DINOv3."""
    assert isinstance(config.position, RotaryDINOv3)
    block, gated = config.block, isinstance(config.block.mlp, SwiGLU)
    settings = transformers.build_common_settings(config, dtype)
    return settings | {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "intermediate_size": config.size.mlp,
        "hidden_act": "silu" if gated else settings["hidden_act"],
        "rope_theta": config.position.theta,
        "query_bias": block.qkv_bias,
        "key_bias": block.qkv_bias and block.key_bias,
        "value_bias": block.qkv_bias,
        "proj_bias": block.out_bias,
        "mlp_bias": True,
        "layerscale_value": block.layer_scale,
        "use_gated_mlp": gated,
        "num_register_tokens": config.prefix.registers,
    }
