"""Key table of OpenAI's CLIP and OpenCLIP's visual tower: a norm on z_0, and a projection without bias."""

from collections.abc import Mapping
from typing import Any, Literal

from vitrail.checkpoints.architecture import (
    Assumptions,
    CheckpointFormat,
    FormatMismatchError,
    TensorNames,
    get_patch_size,
    list_commonly_unsupported,
)
from vitrail.checkpoints.keys import (
    IgnoredKeys,
    KeyTable,
    add_root,
    check_complete,
    map_key,
    map_layer,
    reshape,
    transpose,
)
from vitrail.data.preprocessing import CLIP_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, Projection
from vitrail.nn.pool import ClassToken


def map_vit(config: TokenConfig) -> KeyTable:
    """Return the table of the `VisionTransformer` of CLIP and OpenCLIP."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"CLIP cannot express this model: it has no {type(config.embed).__name__}")
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: KeyTable = [
        map_key("embed.projection.weight", "conv1.weight", reshape(shape, (width, -1))),
        map_key("prefix.outputs", "class_embedding", reshape((width,), (1, 1, width))),
        map_key("position.weight", "positional_embedding", reshape((rows, width), (1, rows, width))),
        *map_layer("token_norm", "ln_pre"),
    ]
    for layer in range(config.size.depth):
        ours, theirs = f"blocks.{layer}", f"transformer.resblocks.{layer}"
        table += map_layer(f"{ours}.norm1", f"{theirs}.ln_1") + map_layer(f"{ours}.norm2", f"{theirs}.ln_2")
        table.append(map_key(f"{ours}.msa.qkv.weight", f"{theirs}.attn.in_proj_weight"))
        table.append(map_key(f"{ours}.msa.qkv.bias", f"{theirs}.attn.in_proj_bias"))
        table += map_layer(f"{ours}.msa.out", f"{theirs}.attn.out_proj")
        table += map_layer(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc") + map_layer(
            f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj"
        )
    table += map_layer("pool.norm", "ln_post")
    if isinstance(config.head, Projection):
        table.append(map_key("head.weight", "proj", transpose()))
    return check_complete("CLIP", table, config)


def read_config(names: TensorNames, facts: Assumptions) -> ViTConfig:
    """Return the configuration of a visual tower."""
    width, channels, _, _ = projection = names.shape("conv1.weight", 4)
    patch = get_patch_size(projection, "conv1.weight")
    h, w = facts.resolve_grid(names.shape("positional_embedding", 2)[0] - 1, patch)
    openai = any(name.endswith("input_resolution") for name in names.shapes)
    why = "OpenAI's CLIP, by its input_resolution" if openai else "OpenCLIP's default; OpenAI's weights use quick"
    return ViTConfig(
        size=Size(
            depth=names.count_layers("transformer.resblocks.{}."),
            width=width,
            mlp=names.layer_shape("transformer.resblocks.*.mlp.c_fc.weight", 2)[0],
            heads=facts.resolve_heads(width, "CLIP"),
        ),
        embed=Patches(patch, bias=False),
        block=PreNorm(mlp=facts.resolve_gelu("quick" if openai else "exact", why)),
        head=Projection(names.shape("proj", 2)[1]) if "proj" in names else Linear(),
        classes=None,
        image_size=(h * patch, w * patch),
        channels=channels,
        eps=facts.resolve("eps", 1e-5, "CLIP's default"),
        token_norm=True,
    )


def parse_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of open_clip_config.json that tensors do not determine."""
    config = settings.get("open_clip_config.json")
    model = config.get("model_cfg") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return {}
    facts: dict[str, Any] = {"gelu": "quick" if model.get("quick_gelu") else "exact"}
    vision = model.get("vision_cfg")
    if isinstance(vision, dict):
        for name, usual in {"pool_type": "tok", "final_ln_after_pool": False, "attentional_pool": False}.items():
            if vision.get(name, usual) != usual:
                raise FormatMismatchError(f"unsupported {name} {vision[name]!r} in open_clip_config.json")
        kinds, norms = vision.get("act_kwargs"), vision.get("norm_kwargs")
        if isinstance(kinds, dict) and kinds.get("approximate") == "tanh":
            facts["gelu"] = "tanh"
        if isinstance(norms, dict) and isinstance(norms.get("eps"), float):
            facts["eps"] = norms["eps"]
        width, head = vision.get("width"), vision.get("head_width", 64)
        if type(width) is int and type(head) is int and head > 0 and width % head == 0:
            facts["heads"] = width // head
    return {name: (value, "open_clip_config.json") for name, value in facts.items()}


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return CLIP's pipeline: the smaller side to the size, bicubic, then a centre crop."""
    return Preprocessing(config.image_size, config.image_size, "cover", "bicubic", **CLIP_STATS), "CLIP's default"


def parse_preprocessing(settings: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """Return the pipeline of open_clip_config.json."""
    config = settings.get("open_clip_config.json")
    steps = config.get("preprocess_cfg") if isinstance(config, dict) else None
    if not isinstance(steps, dict) or not {"mean", "std"} <= set(steps):
        return None
    mean, std = (tuple(float(v) for v in steps[name]) for name in ("mean", "std"))
    fits: dict[Any, Literal["cover", "squash"]] = {None: "cover", "shortest": "cover", "squash": "squash"}
    if str(steps.get("resize_mode", "shortest")) not in ("None", "shortest", "squash"):
        raise ValueError(f"unsupported resize_mode {steps['resize_mode']!r} in open_clip_config.json")
    fit = fits[steps.get("resize_mode")]
    return Preprocessing(size, size, fit, steps.get("interpolation") or "bicubic", mean=mean, std=std)


TEXT_TOWER_KEYS = (
    "transformer.*",
    "token_embedding.*",
    "positional_embedding",
    "ln_final.*",
    "text_projection*",
    "text.*",
)
TEXT_TOWER_KEYS += ("logit_scale", "logit_bias", "attn_mask", "input_resolution", "context_length", "vocab_size")


def _build_table(config: ModelConfig, root: str) -> KeyTable:
    assert isinstance(config, ViTConfig)
    return [
        *add_root(map_vit(config), root),
        *(IgnoredKeys(name, "text tower") for name in (TEXT_TOWER_KEYS if root else ())),
    ]


FORMATS = (
    CheckpointFormat(
        "clip",
        "the visual tower of CLIP or OpenCLIP",
        ("conv1.weight", "class_embedding", "ln_pre.weight", "transformer.resblocks.*.attn.in_proj_weight"),
        read_config,
        _build_table,
        default_preprocessing,
        ("visual.", ""),
        parse_settings,
        {"embed": Patches(16, bias=False), "token_norm": True, "classes": None, "head": Projection(32)},
    ),
)


def list_unsupported(config: TokenConfig) -> list[str]:
    """Return why CLIP cannot express a model, apart from its tensor names."""
    reasons = list_commonly_unsupported(config)
    if not isinstance(config.pool, ClassToken) or config.prefix.count != 1:
        reasons.append("it has one class token and reads it")
    return reasons
