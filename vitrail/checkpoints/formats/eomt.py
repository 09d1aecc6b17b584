"""Key table of EoMT in transformers' names: a DINOv2 with registers, queries, and the modules that read them."""

from typing import Any

from vitrail.checkpoints import formats
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames
from vitrail.checkpoints.formats.transformers import build_common_settings, parse_settings
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules, concatenate, flatten_patches, map_tensors, reshape
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.eomt import EoMT
from vitrail.models.segmenter import SegmenterConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.position import Learned1D

TITLE = "transformers' EoMT"
PATCHES, LAYER = "embeddings.patch_embeddings.projection", "layers.#"


def map_eomt(config: SegmenterConfig, root: str = "") -> KeyTable:
    """Return the table of `EomtForUniversalSegmentation`; raise if it cannot express the model."""
    decoder, vit = config.decoder, config.backbone.require_tokens(TITLE)
    if not isinstance(decoder, EoMT):
        raise ValueError(f"{TITLE} cannot express this model: its decoder is {type(decoder).__name__}")
    check_backbone(vit)
    patch, width = formats.require_patches(TITLE, vit), vit.size.width
    inner, hidden = concatenate(0, [width] * 3), vit.size.mlp
    qkv = {kind: tuple(f"{LAYER}.attention.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")}
    grid = vit.shape.patches
    rules: Rules = {
        "prefix.outputs": "embeddings.cls_token",
        "?prefix.registers": "embeddings.register_tokens",
        "embed.projection.weight": (f"{PATCHES}.weight", flatten_patches(vit.channels, patch)),
        "embed.projection.bias": f"{PATCHES}.bias",
        "position.weight": ("embeddings.position_embeddings.weight", reshape((grid, width), (1, grid, width))),
        **{f"blocks.#.msa.qkv.{kind}": (names, inner) for kind, names in qkv.items()},
        "blocks.#.msa.out.*": f"{LAYER}.attention.out_proj.*",
        **{f"blocks.#.norm{part}.*": f"{LAYER}.norm{part}.*" for part in (1, 2)},
        **{f"blocks.#.branch{part}.scale.weight": f"{LAYER}.layer_scale{part}.lambda1" for part in (1, 2)},
        "pool.norm.*": "layernorm.*",
    }
    if isinstance(vit.block.mlp, SwiGLU):
        rows = concatenate(0, [hidden] * 2)
        for kind in ("weight", "bias"):
            names = tuple(f"{LAYER}.mlp.{part}_proj.{kind}" for part in ("gate", "up"))
            rules[f"blocks.#.mlp.fc1.{kind}"] = names, rows
        rules["blocks.#.mlp.fc2.*"] = f"{LAYER}.mlp.down_proj.*"
    else:
        rules |= {f"blocks.#.mlp.fc{part}.*": f"{LAYER}.mlp.fc{part}.*" for part in (1, 2)}
    rules = {f"?backbone.{name[1:]}" if name[0] == "?" else f"backbone.{name}": rule for name, rule in rules.items()}
    rules |= {"head.queries": "query.weight", "head.classifier.*": "class_predictor.*"}
    rules |= {f"head.mask_mlp.{2 * part}.*": f"mask_head.fc{part + 1}.*" for part in range(3)}
    for block in range(decoder.upscales):
        ours, theirs = f"head.upscale.{block}", f"upscale_block.block.{block}"
        rules |= {f"{ours}.expansion.*": f"{theirs}.conv1.*", f"{ours}.norm.*": f"{theirs}.layernorm2d.*"}
        rules[f"{ours}.depthwise.weight"] = f"{theirs}.conv2.weight"
    ignored = [
        IgnoredKeys("attn_mask_probs", "masked attention, used in training only"),
        IgnoredKeys("criterion.*", "weights of the loss"),
    ]
    if not vit.prefix.registers:
        ignored.append(IgnoredKeys("embeddings.register_tokens", "no register"))
    return [*map_tensors(TITLE, config, rules), *ignored]


def check_backbone(vit: TokenConfig) -> None:
    """Raise ValueError for facts of a backbone that the names of its tensors do not tell."""
    position, wanted_width = vit.position, (int(4 * vit.size.width * 2 / 3) + 7) // 8 * 8
    gated = isinstance(vit.block.mlp, SwiGLU)
    limits = {
        "its positions are learned ones of the patches only": not isinstance(position, Learned1D)
        or position.at != "stem"
        or position.prefix != "none",
        "it has a class token and LayerScale": vit.prefix.outputs != 1 or vit.block.layer_scale is None,
        "q, k and v have a bias": not (vit.block.qkv_bias and vit.block.key_bias),
        "its heads divide the width evenly": vit.size.head is not None,
        f"its SwiGLU has the width {wanted_width}": gated and vit.size.mlp != wanted_width,
        "its MLP width is a multiple of the width": not gated and vit.size.mlp % vit.size.width > 0,
    }
    if reasons := [reason for reason, holds in limits.items() if holds]:
        raise ValueError(f"{TITLE} cannot express this model: {'; '.join(reasons)}")


def read_config(names: TensorNames, assumptions: Assumptions) -> SegmenterConfig:
    """Return the configuration of an EoMT from the shapes of its tensors."""
    width, channels, patch, _ = names.patch_shape(f"{PATCHES}.weight")
    gated = names.find("layers.*.mlp.gate_proj.weight") is not None
    mlp = names.layer_shape(f"layers.*.mlp.{'down_proj' if gated else 'fc2'}.weight", 2)[1]
    registers = names.shapes.get(f"{names.root}embeddings.register_tokens", (1, 0, width))
    (positions, _), (queries, _) = (
        names.shape("embeddings.position_embeddings.weight", 2),
        names.shape("query.weight", 2),
    )
    vit = ViTConfig(
        size=Size(names.count_layers("layers.{}."), width, mlp, assumptions.resolve_heads(width, "transformers")),
        embed=Patches(patch),
        position=Learned1D(
            prefix="none", resampling=assumptions.resolve_resampling("timm", "as DINOv2 with registers")
        ),
        prefix=Prefix(1, registers=registers[1]),
        block=PreNorm(
            mlp=SwiGLU() if gated else assumptions.resolve_gelu("exact", "transformers' default"), layer_scale=1.0
        ),
        classes=None,
        image_size=assumptions.resolve_table_size(positions, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, f"the default of {TITLE}"),
    )
    (blocks,), (outputs,) = names.shape("attn_mask_probs", 1), names.shape("class_predictor.bias", 1)
    decoder = EoMT(queries, blocks, names.count_layers("upscale_block.block.{}."))
    return SegmenterConfig(vit, decoder, outputs - 1)


def default_preprocessing(config: ModelConfig, _: str) -> tuple[Preprocessing, str]:
    """Return a pipeline that shows the model the whole image."""
    size = config.image_size
    pipeline = Preprocessing(size, size, "squash", "bilinear", engine="torch", **IMAGENET_STATS, turn=True)
    return pipeline, f"as {TITLE}, squashed"


def build_settings(config: SegmenterConfig, dtype: str) -> dict[str, Any]:
    """Return what config.json says of the model."""
    vit, decoder = config.backbone.require_tokens(TITLE), config.decoder
    assert isinstance(decoder, EoMT)
    gated = isinstance(vit.block.mlp, SwiGLU)
    return {
        "architectures": ["EomtForUniversalSegmentation"],
        "model_type": "eomt",
        **build_common_settings(vit, dtype),
        "mlp_ratio": 4 if gated else vit.size.mlp // vit.size.width,
        "use_swiglu_ffn": gated,
        "num_register_tokens": vit.prefix.registers,
        "num_queries": decoder.queries,
        "num_blocks": decoder.blocks,
        "num_upscale_blocks": decoder.upscales,
    }


def list_unused_tensors(config: SegmenterConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that transformers' code requires and ours does not; at zero, attention is not masked."""
    vit, decoder = config.backbone.require_tokens(TITLE), config.decoder
    assert isinstance(decoder, EoMT)
    unused: dict[str, tuple[int, ...]] = {"attn_mask_probs": (decoder.blocks,)}
    if not vit.prefix.registers:
        unused["embeddings.register_tokens"] = (1, 0, vit.size.width)
    return unused


EXAMPLE = {"patch": 16, "width": 64, "depth": 1, "heads": 1, "image_size": 32, "registers": 1, "layer_scale": 1.0}
FORMATS = (
    CheckpointFormat(
        "transformers eomt",
        TITLE,
        ("query.weight", "class_predictor.weight", "attn_mask_probs", f"{PATCHES}.weight"),
        read_config,
        map_eomt,
        default_preprocessing,
        parse_settings=parse_settings,
        example={
            "family": "segmenter",
            "decoder": EoMT(1, 1, 1),
            "classes": 1,
            "position": Learned1D(prefix="none"),
            **EXAMPLE,
        },
    ),
)
