"""Key tables and configuration files of Hugging Face transformers, as its `save_pretrained` writes them.

ViT (also ViTMAE and ViTMSN, which are ViTs), DeiT with and without a teacher, DINOv2 with and without registers.
"""

from functools import partial
from typing import Any, Literal

from vitrail.checkpoints import formats
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules, concatenate, flatten_patches, map_tensors
from vitrail.data.preprocessing import IMAGENET_STATS, INCEPTION_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix, Tubelets
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import ClassAndMean, ClassToken
from vitrail.nn.position import Learned1D

Family = Literal["vit", "deit", "dinov2", "dinov2_with_registers"]
FAMILIES: tuple[Family, ...] = ("vit", "deit", "dinov2", "dinov2_with_registers")
RESAMPLE_NAMES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def map_vit(config: TokenConfig, family: Family, root: str | None = None, layers: str | None = None) -> KeyTable:
    """Return the table of `…ForImageClassification`, or of `…Model` for a configuration without classes.

    `root` and `layers` are prefixes of the names of the body and of its layers, if they are not the usual ones.
    """
    patch = formats.require_patches("transformers", config, family)
    if root is None:
        root = f"{family}." if config.classes is not None else ""
    embeddings, layer = f"{root}embeddings", f"{root if layers is None else layers}encoder.layer.#"
    tokens = (f"{embeddings}.cls_token", f"{embeddings}.distillation_token")
    patches = f"{embeddings}.patch_embeddings.projection"
    projections = tuple(f"{layer}.attention.attention.{name}." for name in ("query", "key", "value"))
    rows = concatenate(0, [config.size.heads * config.shape.head_width] * 3)
    pooler = (f"{root}pooler.*", "pooler, not used for classification")
    rules: Rules = {
        "embed.projection.weight": (f"{patches}.weight", flatten_patches(config.channels, patch)),
        "embed.projection.bias": f"{patches}.bias",
        "position.weight": f"{embeddings}.position_embeddings",
        "?prefix.outputs": (tokens, concatenate(1, [1, 1])) if config.prefix.outputs == 2 else tokens[0],
        # without a teacher's head, the distillation token is read by no head
        "?prefix.registers": tokens[1] if family == "deit" else f"{embeddings}.register_tokens",
        "blocks.#.msa.qkv.weight": (tuple(f"{name}weight" for name in projections), rows),
        "?blocks.#.msa.qkv.bias": (tuple(f"{name}bias" for name in projections), rows),
        "blocks.#.msa.out.*": f"{layer}.attention.output.dense.*",
        "pool.norm.*": f"{root}layernorm.*",
    }
    if family.startswith("dinov2"):
        into, out = ("weights_in", "weights_out") if isinstance(config.block.mlp, SwiGLU) else ("fc1", "fc2")
        rules |= {
            "blocks.#.norm1.*": f"{layer}.norm1.*",
            "blocks.#.norm2.*": f"{layer}.norm2.*",
            "blocks.#.mlp.fc1.*": f"{layer}.mlp.{into}.*",
            "blocks.#.mlp.fc2.*": f"{layer}.mlp.{out}.*",
            "blocks.#.branch1.scale.weight": f"{layer}.layer_scale1.lambda1",
            "blocks.#.branch2.scale.weight": f"{layer}.layer_scale2.lambda1",
        }
    else:
        rules |= {
            "blocks.#.norm1.*": f"{layer}.layernorm_before.*",
            "blocks.#.norm2.*": f"{layer}.layernorm_after.*",
            "blocks.#.mlp.fc1.*": f"{layer}.intermediate.dense.*",
            "blocks.#.mlp.fc2.*": f"{layer}.output.dense.*",
        }
    if config.classes is None:
        rules |= {"?head.pre_logits.*": f"{root}pooler.dense.*"}
    elif config.prefix.outputs == 2:
        rules |= {"head.label.*": "cls_classifier.*", "head.teacher.*": "distillation_classifier.*"}
    else:
        rules |= {"head.*": "classifier.*"}
    return [
        *map_tensors(f"transformers' {family}", config, rules),
        *([IgnoredKeys(*pooler)] if config.classes is not None else []),
        IgnoredKeys(f"{embeddings}.mask_token", "used in pre-training only"),
        IgnoredKeys("decoder.*", "MAE decoder"),
    ]


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, family: Family, layers: str | None = None) -> ViTConfig:
    """Return the configuration of one of these families."""
    dino, outside = family.startswith("dinov2"), TensorNames(names.shapes)
    inside = names if layers is None else TensorNames(names.shapes, layers)
    depth = inside.count_layers("encoder.layer.{}.")
    width, channels, patch, _ = names.patch_shape("embeddings.patch_embeddings.projection.weight")
    gated = dino and inside.find("encoder.layer.*.mlp.weights_in.*") is not None
    if dino:
        mlp = inside.layer_shape(f"encoder.layer.*.mlp.{'weights_out' if gated else 'fc2'}.weight", 2)[1]
    else:
        mlp = inside.layer_shape("encoder.layer.*.intermediate.dense.weight", 2)[0]
    teacher = outside.find("distillation_classifier.*") is not None
    distilled = "embeddings.distillation_token" in names
    registers = names.shape("embeddings.register_tokens", 3)[1] if "embeddings.register_tokens" in names else 0
    prefix = Prefix(2) if teacher else Prefix(1, registers=1 if distilled else registers)
    patches = names.shape("embeddings.position_embeddings", 3)[1] - (2 if distilled else 1)
    classifier = "cls_classifier" if teacher else "classifier"
    classes = outside.output_dim(classifier)
    features = width if classes is None else outside.shape(f"{classifier}.weight", 2)[1]
    return ViTConfig(
        size=Size(depth, width, mlp, assumptions.resolve_heads(width, "transformers")),
        embed=Patches(patch),
        position=Learned1D(
            prefix="all" if distilled and not teacher else "outputs",
            resampling=assumptions.resolve_resampling(
                choose_resampling(family), f"interpolate_pos_encoding of {family}"
            ),
        ),
        prefix=prefix,
        block=PreNorm(
            mlp=SwiGLU() if gated else assumptions.resolve_gelu("exact", "transformers' default"),
            layer_scale=1.0 if dino else None,
            qkv_bias=inside.find("encoder.layer.*.attention.attention.*.bias") is not None,
        ),
        pool=ClassAndMean() if features == 2 * width else ClassToken(),
        head=formats.choose_head(names.output_dim("pooler.dense") if classes is None else None, width),
        classes=classes,
        image_size=assumptions.resolve_table_size(patches, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6 if dino else 1e-12, f"transformers' default for {family}"),
        init="deit" if teacher else "vit",
    )


def choose_resampling(family: Family) -> str:
    """Return the rule of a family's `interpolate_pos_encoding`: bicubic, antialiased only for DINOv2 with registers."""
    return "timm" if family == "dinov2_with_registers" else "transformers"


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of config.json that tensors do not determine."""
    config = formats.get_object(settings, "config.json")
    if "hidden_size" not in config:
        return {}
    acts = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "tanh")
    acts |= {"gelu": "exact", "quick_gelu": "quick"}
    facts: dict[str, Any] = {}
    if config.get("pooler_act", "tanh") != "tanh":
        raise ValueError(f"unsupported pooler_act {config['pooler_act']!r} in config.json: only tanh is supported")
    if type(config.get("num_attention_heads")) is int:
        facts["heads"] = config["num_attention_heads"]
    if isinstance(config.get("layer_norm_eps"), float):
        facts["eps"] = config["layer_norm_eps"]
    if isinstance(config.get("hidden_act"), str) and not config.get("use_swiglu_ffn"):
        facts["gelu"] = acts.get(config["hidden_act"], config["hidden_act"])
    size = config.get("image_size")
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        facts["size"] = (size[0], size[1])
    return {name: (value, "config.json") for name, value in facts.items()}


def parse_labels(settings: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in order, unless they are transformers' placeholders."""
    config = formats.get_object(settings, "config.json")
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(i) in names for i in range(len(names))):
        return None
    labels = tuple(str(names[str(i)]) for i in range(len(names)))
    return None if labels == tuple(f"LABEL_{i}" for i in range(len(labels))) else labels


def parse_preprocessing(settings: dict[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """Return the pipeline of preprocessor_config.json."""
    if not isinstance(config := settings.get("preprocessor_config.json"), dict):
        return None
    try:
        mean, std = (tuple(map(float, config[name])) for name in ("image_mean", "image_std"))
        if config.get("do_normalize") is False:
            mean, std = (0.0,) * len(mean), (1.0,) * len(std)
        scale = float(config.get("rescale_factor", 1 / 255)) * 255
        if (
            config.get("offset") and config.get("do_rescale") is not False and scale > 0
        ):  # ViViT: scale · x - 1, then this
            mean, std = tuple((1 + m) / scale for m in mean), tuple(s / scale for s in std)
            scale = 1.0
        default_size = {"height": size[0], "width": size[1]}
        kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
        covers = kind.startswith(("Bit", "CLIP", "VideoMAE", "Vivit"))  # they take one number for the smaller side
        resize, fit = _parse_size(config.get("size", default_size), covers)
        if kind.startswith("Eomt"):  # it pads or splits the image: ours sees the whole one
            fit = "squash"
        if config.get("do_resize") is False:
            raise ValueError("do_resize is false, but the model needs one image size: set it to true")
        crops = config.get("do_center_crop") and "crop_size" in config
        crop = _parse_size(config["crop_size"], False)[0] if crops else None
        if crop is None and fit == "cover":
            raise ValueError("size keeps the aspect ratio, but the model needs one image size: set do_center_crop")
        if config.get("do_rescale") is False or not abs(scale - 1) <= 1e-6:
            raise ValueError("it does not divide by 255: set do_rescale to true and rescale_factor to 1/255")
        filter = RESAMPLE_NAMES[int(config.get("resample", 2))]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"unsupported preprocessor_config.json: {error}") from None
    engine = "torch" if filter in ("nearest", "bilinear", "bicubic") else "pillow"
    return Preprocessing(crop or resize, resize, fit, filter, engine=engine, centre="down", mean=mean, std=std)  # type: ignore[arg-type]


def _parse_size(size: Any, covers: bool) -> tuple[tuple[int, int], Literal["cover", "squash"]]:
    if isinstance(size, int):
        return (size, size), "cover" if covers else "squash"
    if "shortest_edge" in size:
        edge = int(size["shortest_edge"])
        return (edge, edge), "cover"
    return (int(size["height"]), int(size["width"])), "squash"


def default_preprocessing(config: ModelConfig, name: str, family: Family) -> tuple[Preprocessing, str]:
    """Return the default of the family's image processor."""
    size = config.image_size
    why = f"the default of transformers' {family} processor"
    if family == "vit":
        return Preprocessing(size, size, "squash", "bilinear", engine="torch", centre="down", **INCEPTION_STATS), why
    fit: Any = "squash" if family == "deit" else "cover"
    pipeline = Preprocessing(size, size, fit, "bicubic", engine="torch", centre="down", **IMAGENET_STATS)
    return pipeline.with_resize_factor(256 / 224), why


def _make_format(family: Family, layers: str | None = None, name: str | None = None) -> CheckpointFormat:
    """Return the format of a family; `layers` is the prefix of the names of its layers if it is not that of the body."""
    telling = "layer_scale1.lambda1" if family.startswith("dinov2") else "layernorm_before.weight"
    inside = (f"encoder.layer.*.{telling}",) if layers is None else ()
    return CheckpointFormat(
        name or f"transformers {family}",
        f"transformers' {family}",
        ("embeddings.patch_embeddings.projection.weight", *inside, *REQUIRED_KEYS.get(family, ())),
        partial(read_config, family=family, layers=layers),
        lambda config, root: map_vit(config, family, root, layers),
        partial(default_preprocessing, family=family),
        (f"{family}.", "") if layers is None else ("vit.",),
        parse_settings,
        EXAMPLES[family],
    )


EXAMPLES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {"prefix": "class+distillation"},
    "dinov2": {"layer_scale": 1.0, "pool": "class+mean"},
    "dinov2_with_registers": {"layer_scale": 1.0, "pool": "class+mean", "registers": 4},
}
REQUIRED_KEYS = {"deit": ("embeddings.distillation_token",), "dinov2_with_registers": ("embeddings.register_tokens",)}
# The most specific family first. The last is ViTMSN as version 5 writes it.
FORMATS = (*map(_make_format, reversed(FAMILIES)), _make_format("vit", layers="", name="transformers vit_msn"))


# --- writing ---


def choose_family(config: TokenConfig) -> Family:
    """Return the family that a model would belong to."""
    if config.block.layer_scale is not None:
        return "dinov2_with_registers" if config.prefix.registers else "dinov2"
    return "deit" if config.prefix.outputs == 2 or config.prefix.registers else "vit"


def list_limits(config: TokenConfig) -> Reasons:
    """Return why no family can express a model, apart from its tensor names."""
    family, mlp, prefix, head = choose_family(config), config.size.mlp, config.prefix, config.head
    dino, gated, classes = family.startswith("dinov2"), isinstance(config.block.mlp, SwiGLU), config.classes is not None
    pool, pooling = (ClassAndMean, "class token and mean") if dino and classes else (ClassToken, "class token")
    # DINOv2's SwiGLU: two thirds of four times the width, rounded up to a multiple of eight
    swiglu_width = (int(4 * config.size.width * 2 / 3) + 7) // 8 * 8
    odd_prefix = family == "deit" and (prefix.registers > 1 or prefix.count != 2)
    return {
        **formats.list_common_limits(config),
        f"{family} pools by {pooling}": not isinstance(config.pool, pool),
        "only DINOv2 has registers, and it has LayerScale": odd_prefix,
        f"{family}'s classifier is one linear layer": classes and not isinstance(head, Linear),
        f"{family} has no projection": not (classes or dino or isinstance(head, PreLogits | Linear)),
        "its patches have a bias": isinstance(config.embed, Patches) and not config.embed.bias,
        f"its SwiGLU has the width {swiglu_width}": gated and (not dino or mlp != swiglu_width),
        "DINOv2's MLP width is a multiple of the width": dino and not gated and mlp % config.size.width > 0,
    }


def build_common_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what config.json says of a model of any family."""
    size = config.size
    activation = next((name for name, slot in formats.GELUS.items() if slot == config.block.mlp), "exact")
    assert isinstance(config.embed, Patches | Tubelets)
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[activation],
        "layer_norm_eps": config.eps,
        "image_size": config.image_size[0] if config.image_size[0] == config.image_size[1] else list(config.image_size),
        "patch_size": config.embed.patch,
        "num_channels": config.channels,
        "dtype": dtype,
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what config.json says of the model."""
    family, size = choose_family(config), config.size
    camel = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[family]
    body = "Model" if config.classes is None else "ForImageClassification"
    teacher = "WithTeacher" if config.prefix.outputs == 2 else ""
    settings: dict[str, Any] = {
        "architectures": [f"{camel}{body}{teacher}"],
        "model_type": family,
        **build_common_settings(config, dtype),
        "qkv_bias": config.block.qkv_bias,
    }
    if family.startswith("dinov2"):
        gated = isinstance(config.block.mlp, SwiGLU)
        settings |= {"mlp_ratio": 4 if gated else size.mlp // size.width, "use_swiglu_ffn": gated}
        if config.prefix.registers:
            settings["num_register_tokens"] = config.prefix.registers
    else:
        settings["intermediate_size"] = size.mlp
        if isinstance(config.head, PreLogits):
            settings |= {"pooler_output_size": config.head.hidden or size.width, "pooler_act": "tanh"}
    return settings


def build_files(
    settings: dict[str, Any], classes: int | None, class_names: tuple[str, ...] | None
) -> dict[str, dict[str, Any]]:
    """Return config.json with the labels."""
    if classes is not None:
        labels = class_names or tuple(f"LABEL_{i}" for i in range(classes))
        settings["id2label"] = {str(i): name for i, name in enumerate(labels)}
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
    return {"config.json": settings}


def list_unused_tensors(config: TokenConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a family's code requires and our models lack; only pre-training uses them."""
    if config.block.layer_scale is None:
        return {}
    root = "" if config.classes is None else f"{choose_family(config)}."
    return {f"{root}embeddings.mask_token": (1, config.size.width)}


def build_processor_config(pipeline: Preprocessing) -> dict[str, Any]:
    """Return preprocessor_config.json for a pipeline, with a processor that crops as it does."""
    numbers = {name: number for number, name in RESAMPLE_NAMES.items()}
    crop = pipeline.size != pipeline.resize or pipeline.fit == "cover"
    height, width = pipeline.resize
    if pipeline.fit == "cover" and height != width:
        raise ValueError(f"transformers cannot express this: a centre crop needs a square resize, got {height}×{width}")
    settings: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if crop else "ViTImageProcessor",
        "do_convert_rgb": pipeline.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": height} if pipeline.fit == "cover" else {"height": height, "width": width},
        "resample": numbers[pipeline.interpolation],
        "do_center_crop": crop,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pipeline.mean),
        "image_std": list(pipeline.std),
    }
    if crop:
        settings["crop_size"] = {"height": pipeline.size[0], "width": pipeline.size[1]}
    return settings
