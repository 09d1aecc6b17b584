"""Key table of OpenAI's CLIP and OpenCLIP's visual tower: a norm on z_0, and a projection without bias."""

from typing import Any, Literal

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules
from vitrail.data.preprocessing import CLIP_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, Projection
from vitrail.nn.pool import ClassToken
from vitrail.nn.position import Learned1D

TEXT_TOWER_KEYS = ("transformer.*", "token_embedding.*", "positional_embedding", "ln_final.*", "text_projection*")
TEXT_TOWER_KEYS += ("text.*", "logit_scale", "logit_bias", "attn_mask")
TEXT_TOWER_KEYS += ("input_resolution", "context_length", "vocab_size")


def map_vit(config: TokenConfig) -> KeyTable:
    """Return the table of the `VisionTransformer` of CLIP and OpenCLIP."""
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    patch = formats.require_patches("CLIP", config)
    layer = "transformer.resblocks.#"
    rules: Rules = {
        "embed.projection.weight": ("conv1.weight", keys.flatten_patches(config.channels, patch)),
        "prefix.outputs": ("class_embedding", keys.reshape((width,), (1, 1, width))),
        "position.weight": ("positional_embedding", keys.reshape((rows, width), (1, rows, width))),
        "token_norm.*": "ln_pre.*",
        "blocks.#.norm1.*": f"{layer}.ln_1.*",
        "blocks.#.msa.qkv.*": f"{layer}.attn.in_proj_*",
        "blocks.#.msa.out.*": f"{layer}.attn.out_proj.*",
        "blocks.#.norm2.*": f"{layer}.ln_2.*",
        "blocks.#.mlp.fc1.*": f"{layer}.mlp.c_fc.*",
        "blocks.#.mlp.fc2.*": f"{layer}.mlp.c_proj.*",
        "pool.norm.*": "ln_post.*",
    }
    if isinstance(config.head, Projection):
        rules |= {"head.weight": ("proj", keys.permute(1, 0))}
    return keys.map_tensors("CLIP", config, rules)


def read_config(names: TensorNames, assumptions: Assumptions) -> ViTConfig:
    """Return the configuration of a visual tower."""
    width, channels, patch, _ = names.patch_shape("conv1.weight")
    openai = any(name.endswith("input_resolution") for name in names.shapes)
    why = "OpenAI's CLIP, by its input_resolution" if openai else "OpenCLIP's default; OpenAI's weights use quick"
    return ViTConfig(
        size=Size(
            depth=names.count_layers("transformer.resblocks.{}."),
            width=width,
            mlp=names.layer_shape("transformer.resblocks.*.mlp.c_fc.weight", 2)[0],
            heads=assumptions.resolve_heads(width, "CLIP"),
        ),
        embed=Patches(patch, bias=False),
        position=Learned1D(resampling=assumptions.resolve_resampling("timm", "OpenCLIP's resize_pos_embed")),
        block=PreNorm(mlp=assumptions.resolve_gelu("quick" if openai else "exact", why)),
        head=Projection(names.shape("proj", 2)[1]) if "proj" in names else Linear(),
        classes=None,
        image_size=assumptions.resolve_table_size(names.shape("positional_embedding", 2)[0] - 1, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-5, "CLIP's default"),
        token_norm=True,
    )


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of open_clip_config.json that tensors do not determine."""
    model = formats.get_object(settings, "open_clip_config.json", "model_cfg")
    if not model:
        return {}
    vision = formats.get_object(model, "vision_cfg")
    for name, usual in {"pool_type": "tok", "final_ln_after_pool": False, "attentional_pool": False}.items():
        if vision.get(name, usual) != usual:
            raise ValueError(f"unsupported {name} {vision[name]!r} in open_clip_config.json")
    facts: dict[str, Any] = {"gelu": "quick" if model.get("quick_gelu") else "exact"}
    if formats.get_object(vision, "act_kwargs").get("approximate") == "tanh":
        facts["gelu"] = "tanh"
    if isinstance(eps := formats.get_object(vision, "norm_kwargs").get("eps"), float):
        facts["eps"] = eps
    width, head = vision.get("width"), vision.get("head_width", 64)
    if type(width) is int and type(head) is int and head > 0 and width % head == 0:
        facts["heads"] = width // head
    return {name: (value, "open_clip_config.json") for name, value in facts.items()}


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return CLIP's pipeline: the smaller side to the size, bicubic, then a centre crop."""
    return Preprocessing(config.image_size, config.image_size, "cover", "bicubic", **CLIP_STATS), "CLIP's default"


def parse_preprocessing(settings: dict[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """Return the pipeline of open_clip_config.json."""
    steps = formats.get_object(settings, "open_clip_config.json", "preprocess_cfg")
    if not {"mean", "std"} <= set(steps):
        return None
    mean, std = (tuple(float(v) for v in steps[name]) for name in ("mean", "std"))
    fits: dict[Any, Literal["cover", "squash"]] = {"None": "cover", "shortest": "cover", "squash": "squash"}
    mode = str(steps.get("resize_mode"))
    if mode not in fits:
        raise ValueError(f"unsupported resize_mode {mode!r} in open_clip_config.json")
    return Preprocessing(size, size, fits[mode], steps.get("interpolation") or "bicubic", mean=mean, std=std)


def _build_table(config: TokenConfig, root: str) -> KeyTable:
    ignored = [IgnoredKeys(name, "text tower") for name in TEXT_TOWER_KEYS] if root else []
    return [*keys.add_root(map_vit(config), root), *ignored]


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


def list_limits(config: TokenConfig) -> Reasons:
    """Return why CLIP cannot express a model, apart from its tensor names."""
    reads_token = isinstance(config.pool, ClassToken) and config.prefix.count == 1
    return {**formats.list_common_limits(config), "it has one class token and reads it": not reads_token}
