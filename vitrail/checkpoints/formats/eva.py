"""Key table of timm's EVA (`eva_giant_*`, Fang et al. 2022) and EVA-02 (`eva02_*`, Fang et al. 2023).

Both have a learned position table and no bias of the keys. EVA-02 adds a rotation and a gated MLP; its larger models have a
norm in the MLP and one matrix each for q, k and v, its CLIP models a norm of the heads too. `eva02_enormous` is not read:
its norms follow the branches.
"""

from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, timm
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules
from vitrail.data.preprocessing import CLIP_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear
from vitrail.nn.mlp import GELU, MLPSlot, SwiGLU
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, RotaryEVA02

ENORMOUS_WIDTH = 1792
SPLIT = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def is_split(mlp: MLPSlot) -> bool:
    """Return whether q, k and v have one matrix each: in the models with a norm in the MLP."""
    return isinstance(mlp, SwiGLU) and mlp.normed


def map_vit(config: TokenConfig) -> KeyTable:
    """Return the table of timm's `Eva` without registers."""
    patch, mlp = formats.require_patches("timm's EVA", config), config.block.mlp
    inner, layer = config.size.heads * config.shape.head_width, "blocks.#"
    rules: Rules = {
        "embed.projection.weight": ("patch_embed.proj.weight", keys.flatten_patches(config.channels, patch)),
        "embed.projection.bias": "patch_embed.proj.bias",
        "prefix.outputs": "cls_token",
        "?position.weight": "pos_embed",
        "?position.learned.weight": "pos_embed",
        "blocks.#.norm1.*": f"{layer}.norm1.*",
        "blocks.#.msa.qkv.weight": f"{layer}.attn.qkv.weight",
        "?blocks.#.msa.norm.*": f"{layer}.attn.norm.*",
        "blocks.#.msa.out.*": f"{layer}.attn.proj.*",
        "blocks.#.norm2.*": f"{layer}.norm2.*",
        "blocks.#.mlp.fc1.*": f"{layer}.mlp.fc1.*",
        "blocks.#.mlp.fc2.*": f"{layer}.mlp.fc2.*",
        "pool.norm.*": "fc_norm.*" if isinstance(config.pool, Mean) else "norm.*",
        "?head.*": "head.*",
    }
    biases: tuple[str, ...] = (f"{layer}.attn.q_bias", f"{layer}.attn.v_bias")
    if is_split(mlp):
        weights, halves = tuple(f"{layer}.{name}.weight" for name in SPLIT), [config.size.mlp] * 2
        biases = (f"{layer}.{SPLIT[0]}.bias", f"{layer}.{SPLIT[2]}.bias")
        rules["blocks.#.msa.qkv.weight"] = (weights, keys.concatenate(0, [inner] * 3))
        rules["blocks.#.mlp.norm.*"] = f"{layer}.mlp.norm.*"
        gated = (f"{layer}.mlp.fc1_g.*", f"{layer}.mlp.fc1_x.*")
        rules["blocks.#.mlp.fc1.*"] = (gated, keys.concatenate(0, halves))
    rules["?blocks.#.msa.qkv.bias"] = (biases, keys.concatenate(0, [inner] * 2))
    return keys.map_tensors("timm's EVA", config, rules)


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions) -> ViTConfig:
    """Return the configuration of an EVA or EVA-02."""
    width, channels, patch, _ = names.patch_shape("patch_embed.proj.weight")
    if width == ENORMOUS_WIDTH:
        raise ValueError("eva02_enormous is not supported: its norms follow the branches")
    mlp = names.layer_shape("blocks.*.mlp.fc2.weight", 2)[1]
    normed = names.find("blocks.*.mlp.norm.weight") is not None
    packed = names.find("blocks.*.mlp.fc1.weight")
    gated = normed or packed is None or names.shape(packed, 2)[0] == 2 * mlp
    activation = SwiGLU(normed) if gated else assumptions.resolve_gelu("exact", "timm's default")
    resampling = assumptions.resolve_resampling("timm", "timm's resample_abs_pos_embed")
    heads = assumptions.resolve_heads(width, "timm")
    rotary = RotaryEVA02(resampling=resampling)
    return ViTConfig(
        size=Size(names.count_layers("blocks.{}."), width, mlp, heads),
        embed=Patches(patch),
        position=rotary if gated else Learned1D(resampling=resampling),
        prefix=Prefix(1),
        block=PreNorm(
            mlp=activation,
            key_bias=False,
            attention_norm=names.find("blocks.*.attn.norm.weight") is not None,
        ),
        pool=Mean(norm_after=True) if "fc_norm.weight" in names else ClassToken(),
        classes=names.output_dim("head"),
        image_size=assumptions.resolve_table_size(names.shape("pos_embed", 3)[1] - 1, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, "timm's default"),
    )


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of timm's config.json or of the file name; the pooling is in the tensors."""
    facts = timm.parse_settings(settings, supported="eva")
    facts.pop("pool", None)
    return facts


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return timm's pipeline for EVA."""
    size = config.image_size
    pipeline = timm.make_center_crop(size, 0.9 if size[0] <= 224 else 1.0, "bicubic", CLIP_STATS)
    return pipeline, "timm's default for EVA"


def build_table(config: ModelConfig, root: str = "") -> KeyTable:
    """Return the table of a file, and the tensors that only pre-training uses."""
    table = map_vit(config.require_tokens("timm's EVA"))
    outside = [IgnoredKeys(name, why) for name, why in timm.IGNORED_OUTSIDE_ROOT.items()] if root else []
    return [*keys.add_root(table, root), IgnoredKeys(f"{root}mask_token", "used in pre-training only"), *outside]


EXAMPLE = {"position": "rotary-eva02", "key_bias": False, "pool": "mean-norm", "prefix": "class"}
FORMATS = tuple(
    CheckpointFormat(
        name,
        title,
        ("patch_embed.proj.weight", f"blocks.*.{telling}", "pos_embed"),
        read_config,
        build_table,
        default_preprocessing,
        timm.ROOTS,
        parse_settings,
        {**EXAMPLE, "mlp": SwiGLU(normed)},
    )
    for name, title, telling, normed in (
        ("timm eva", "timm's EVA", "attn.q_bias", False),
        ("timm eva, split", "timm's EVA with matrices of q, k and v", "attn.q_proj.weight", True),
    )
)


# --- writing ---


def list_limits(config: TokenConfig) -> Reasons:
    """Return why timm's EVA cannot express a model, apart from its tensor names."""
    block, pool, position = config.block, config.pool, config.position
    gated, learned = isinstance(block.mlp, SwiGLU), Learned1D(resampling=config.resampling or Learned1D().resampling)
    wanted = RotaryEVA02(resampling=learned.resampling) if gated else learned
    return {
        "its models with SwiGLU have rotary-eva02 positions, the others learned ones": position != wanted,
        "its MLP has the exact GELU or SwiGLU": not gated and block.mlp != GELU(),
        "its queries and values have a bias, its keys have none": block.key_bias or not block.qkv_bias,
        "its models have a class token and no registers": config.prefix != Prefix(1),
        "its pooling is the class token, or the mean before the norm": pool
        not in (ClassToken(), Mean(norm_after=True)),
        "its classifier is one linear layer": not isinstance(config.head, Linear),
        "its heads divide the width evenly": config.size.head is not None,
        "its patches have a bias": isinstance(config.embed, Patches) and not config.embed.bias,
        f"no model has the width {ENORMOUS_WIDTH}": config.size.width == ENORMOUS_WIDTH,
    }
