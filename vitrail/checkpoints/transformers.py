"""Hugging Face transformers' names, as its `save_pretrained` writes them, and the settings that it keeps beside them.

ViT (also ViTMAE and ViTMSN, which are ViTs), DeiT with and without a teacher, DINOv2 with and without registers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from vitrail.checkpoints.keys import Key, LeftOut, Table, both, complete, joined, key, reshaped
from vitrail.checkpoints.look import GELUS, Differs, Facts, Form, Names, square, usual_reasons
from vitrail.data.preprocessing import HALF, IMAGENET, Preprocessing
from vitrail.models.build import Config
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import ClassAndMean, ClassToken
from vitrail.nn.position import Learned1D
from vitrail.nn.prefix import Prefix

Family = Literal["vit", "deit", "dinov2", "dinov2_with_registers"]
FAMILIES: tuple[Family, ...] = ("vit", "deit", "dinov2", "dinov2_with_registers")


def vit(config: ViTConfig, family: Family, root: str | None = None, layers: str | None = None) -> Table:
    """`…ForImageClassification` of these families, or the bare `…Model` where the configuration has no classes.

    `root` is what stands before the names of the body, and `layers` before those of the layers, where they are unusual.
    """
    if not isinstance(config.embed, Patches):
        raise ValueError(f"transformers cannot express this model: {family} has no {type(config.embed).__name__}")
    size, prefix = config.size, config.prefix
    dino = family.startswith("dinov2")
    if root is None:
        root = f"{family}." if config.classes is not None else ""
    layers = root if layers is None else layers
    embeddings, width = f"{root}embeddings", size.width
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: Table = [
        key(
            "embed.projection.weight",
            f"{embeddings}.patch_embeddings.projection.weight",
            reshaped(shape, (width, -1)),
        ),
        key("embed.projection.bias", f"{embeddings}.patch_embeddings.projection.bias"),
        key("position.weight", f"{embeddings}.position_embeddings"),
    ]
    tokens = (f"{embeddings}.cls_token", f"{embeddings}.distillation_token")
    if prefix.outputs == 2:
        table.append(key("prefix.outputs", tokens, joined(1, [1, 1])))
    elif prefix.outputs == 1:
        table.append(key("prefix.outputs", tokens[0]))
    if prefix.registers:  # without a teacher's head, the distillation token is a token that nobody reads
        table.append(key("prefix.registers", tokens[1] if family == "deit" else f"{embeddings}.register_tokens"))
    for layer in range(size.depth):
        table += _layer(config, layer, layers, dino)
    table += both("pool.norm", f"{root}layernorm")
    if isinstance(config.head, PreLogits) and config.classes is None:
        table += both("head.pre_logits", f"{root}pooler.dense")
    if config.classes is not None:
        if prefix.outputs == 2:
            table += both("head.label", "cls_classifier") + both("head.teacher", "distillation_classifier")
        else:
            table += both("head", "classifier")
    if config.classes is not None:
        table.append(LeftOut(f"{root}pooler.*", "a pooler that classification does not read"))
    table.append(LeftOut(f"{embeddings}.mask_token", "used in pre-training alone"))
    table.append(LeftOut("decoder.*", "MAE decoder"))
    return complete(f"transformers' {family}", table, config)


def _layer(config: ViTConfig, layer: int, layers: str, dino: bool) -> list[Key]:
    ours, theirs = f"blocks.{layer}", f"{layers}encoder.layer.{layer}"
    inner = config.size.heads * config.shape.head_width
    table: list[Key] = []
    for part in ("weight", "bias") if config.block.qkv_bias else ("weight",):
        names = tuple(f"{theirs}.attention.attention.{which}.{part}" for which in ("query", "key", "value"))
        table.append(key(f"{ours}.msa.qkv.{part}", names, joined(0, [inner] * 3)))
    table += both(f"{ours}.msa.out", f"{theirs}.attention.output.dense")
    if dino:
        table += both(f"{ours}.norm1", f"{theirs}.norm1") + both(f"{ours}.norm2", f"{theirs}.norm2")
        into, out = ("weights_in", "weights_out") if isinstance(config.block.mlp, SwiGLU) else ("fc1", "fc2")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.{into}") + both(f"{ours}.mlp.fc2", f"{theirs}.mlp.{out}")
        table.append(key(f"{ours}.branch1.scale.weight", f"{theirs}.layer_scale1.lambda1"))
        table.append(key(f"{ours}.branch2.scale.weight", f"{theirs}.layer_scale2.lambda1"))
    else:
        table += both(f"{ours}.norm1", f"{theirs}.layernorm_before")
        table += both(f"{ours}.norm2", f"{theirs}.layernorm_after")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense")
        table += both(f"{ours}.mlp.fc2", f"{theirs}.output.dense")
    return table


# --- recognising ---


def look(names: Names, facts: Facts, family: Family, layers: str | None = None) -> ViTConfig:
    """The configuration of one of these families."""
    dino, outside = family.startswith("dinov2"), Names(names.shapes)
    inside = names if layers is None else Names(names.shapes, layers)
    width, channels, _, _ = projection = names.shape("embeddings.patch_embeddings.projection.weight", 4)
    patch = square(projection, "the patch projection")
    gated = dino and inside.anywhere("encoder.layer.*.mlp.weights_in.*") is not None
    if dino:
        mlp = inside.layer_shape(f"encoder.layer.*.mlp.{'weights_out' if gated else 'fc2'}.weight", 2)[1]
    else:
        mlp = inside.layer_shape("encoder.layer.*.intermediate.dense.weight", 2)[0]
    teacher, distilled = (
        outside.anywhere("distillation_classifier.*") is not None,
        "embeddings.distillation_token" in names,
    )
    registers = names.shape("embeddings.register_tokens", 3)[1] if "embeddings.register_tokens" in names else 0
    prefix = Prefix(2) if teacher else Prefix(1, registers=1 if distilled else registers)
    covered = 2 if distilled else 1
    h, w = facts.grid(names.shape("embeddings.position_embeddings", 3)[1] - covered, patch)
    classifier = "cls_classifier" if teacher else "classifier"
    classes = outside.outputs(classifier)
    features = width if classes is None else outside.shape(f"{classifier}.weight", 2)[1]
    pooler = classes is None and "pooler.dense.weight" in names
    hidden = names.shape("pooler.dense.weight", 2)[0] if pooler else width
    eps = 1e-6 if dino else 1e-12
    return ViTConfig(
        size=Size(
            inside.count("encoder.layer.{}."),
            width,
            mlp,
            facts.heads(width, "transformers"),
        ),
        embed=Patches(patch),
        position=Learned1D(prefix="all" if distilled and not teacher else "outputs"),
        prefix=prefix,
        block=PreNorm(
            mlp=SwiGLU() if gated else facts.gelu("exact", "transformers' default"),
            layer_scale=1.0 if dino else None,
            qkv_bias=inside.anywhere("encoder.layer.*.attention.attention.*.bias") is not None,
        ),
        pool=ClassAndMean() if features == 2 * width else ClassToken(),
        head=PreLogits(None if hidden == width else hidden) if pooler else Linear(),
        classes=classes,
        image_size=(h * patch, w * patch),
        channels=channels,
        eps=facts.ask("eps", eps, f"transformers' default for {family}"),
        init="deit" if teacher else "vit",
    )


def told(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What config.json says and tensors cannot."""
    config = settings.get("config.json")
    if not isinstance(config, dict) or "hidden_size" not in config:
        return {}
    acts = {
        "gelu": "exact",
        "gelu_pytorch_tanh": "tanh",
        "gelu_new": "tanh",
        "gelu_fast": "tanh",
        "quick_gelu": "quick",
    }
    found: dict[str, Any] = {}
    if config.get("pooler_act", "tanh") != "tanh":
        raise Differs(f"config.json says pooler_act {config['pooler_act']!r}, and poolers here have tanh")
    if type(config.get("num_attention_heads")) is int:
        found["heads"] = config["num_attention_heads"]
    if isinstance(config.get("layer_norm_eps"), float):
        found["eps"] = config["layer_norm_eps"]
    if isinstance(config.get("hidden_act"), str) and not config.get("use_swiglu_ffn"):
        found["gelu"] = acts.get(config["hidden_act"], config["hidden_act"])
    size = config.get("image_size")
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        found["size"] = (size[0], size[1])
    return {name: (value, "config.json") for name, value in found.items()}


def labels(settings: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The class names in order, unless they are the placeholders that transformers makes up."""
    config = settings.get("config.json")
    names = config.get("id2label") if isinstance(config, dict) else None
    if not isinstance(names, dict) or not all(str(i) in names for i in range(len(names))):
        return None
    found = tuple(str(names[str(i)]) for i in range(len(names)))
    return None if found == tuple(f"LABEL_{i}" for i in range(len(found))) else found


RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def pipeline(settings: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """The pipeline of preprocessor_config.json."""
    config = settings.get("preprocessor_config.json")
    if not isinstance(config, dict):
        return None
    try:
        mean, std = (tuple(map(float, config[name])) for name in ("image_mean", "image_std"))
        if config.get("do_normalize") is False:
            mean, std = (0.0,) * len(mean), (1.0,) * len(std)
        resize, fit = _side(config.get("size", {"height": size[0], "width": size[1]}), _covers(config))
        if config.get("do_resize") is False:
            raise ValueError("it does not resize, and the model takes one size")
        crop = _side(config["crop_size"], False)[0] if config.get("do_center_crop") and "crop_size" in config else None
        if crop is None and fit == "cover":
            raise ValueError("it keeps the proportions and does not crop, and the model takes one size")
        scale = float(config.get("rescale_factor", 1 / 255))
        if config.get("do_rescale") is False or not abs(scale * 255 - 1) <= 1e-6:
            raise ValueError(f"it does not divide by 255 (do_rescale, rescale_factor {scale})")
        filter = RESAMPLE[int(config.get("resample", 2))]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"preprocessor_config.json is not one that can be reproduced: {error}") from None
    engine = "torch" if filter in ("nearest", "bilinear", "bicubic") else "pillow"
    return Preprocessing(crop or resize, resize, fit, filter, engine=engine, centre="down", mean=mean, std=std)  # type: ignore[arg-type]


def _covers(config: Mapping[str, Any]) -> bool:
    """Whether this kind of processor takes one number for the smaller side."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    return kind.startswith(("Bit", "CLIP"))


def _side(size: Any, covers: bool) -> tuple[tuple[int, int], Literal["cover", "squash"]]:
    if isinstance(size, int):
        return (size, size), "cover" if covers else "squash"
    if "shortest_edge" in size:
        edge = int(size["shortest_edge"])
        return (edge, edge), "cover"
    return (int(size["height"]), int(size["width"])), "squash"


def preprocessing(config: Config, name: str, family: Family) -> tuple[Preprocessing, str]:
    """The default of the family's image processor."""
    size = config.image_size
    why = f"the default of transformers' {family} processor"
    if family == "vit":
        return Preprocessing(size, size, "squash", "bilinear", engine="torch", centre="down", **HALF), why
    fit: Any = "squash" if family == "deit" else "cover"
    return Preprocessing(size, size, fit, "bicubic", engine="torch", centre="down", **IMAGENET).larger(256 / 224), why


def _table(config: Config, root: str, family: Family, layers: str | None = None) -> Table:
    assert isinstance(config, ViTConfig)
    return vit(config, family, root, layers)


def _form(family: Family, body: str, layers: str | None = None, name: str | None = None) -> Form:
    start = "embeddings.patch_embeddings.projection.weight"
    roots = (f"{family}.", "") if layers is None else ("vit.",)
    return Form(
        name or f"transformers {family}",
        f"transformers' {family}",
        (start, *((f"encoder.layer.*.{body}",) if layers is None else ()), *TELLING[family]),
        partial(look, family=family, layers=layers),
        partial(_table, family=family, layers=layers),
        partial(preprocessing, family=family),
        roots,
        told,
        EXAMPLES[family],
    )


EXAMPLES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {"prefix": "class+distillation"},
    "dinov2": {"layer_scale": 1.0, "pool": "class+mean"},
    "dinov2_with_registers": {"layer_scale": 1.0, "pool": "class+mean", "registers": 4},
}
TELLING: dict[str, tuple[str, ...]] = {
    "vit": (),
    "deit": ("embeddings.distillation_token",),
    "dinov2": (),
    "dinov2_with_registers": ("embeddings.register_tokens",),
}
FORMS = (
    _form("dinov2_with_registers", "layer_scale1.lambda1"),
    _form("dinov2", "layer_scale1.lambda1"),
    _form("deit", "layernorm_before.weight"),
    _form("vit", "layernorm_before.weight"),
    _form("vit", "layernorm_before.weight", layers="", name="transformers vit_msn"),  # as version 5 writes ViTMSN
)


# --- writing ---


def family_of(config: ViTConfig) -> Family:
    """The family that a model belongs to, if to any."""
    if config.block.layer_scale is not None:
        return "dinov2_with_registers" if config.prefix.registers else "dinov2"
    return "deit" if config.prefix.outputs == 2 or config.prefix.registers else "vit"


def reasons(config: ViTConfig) -> list[str]:
    """Why no family can express a model, beyond the names of its tensors."""
    family = family_of(config)
    dino = family.startswith("dinov2")
    pooled = ClassAndMean if dino and config.classes is not None else ClassToken
    found = usual_reasons(config)
    if not isinstance(config.pool, pooled):
        found.append(f"{family} pools by {'class token and mean' if pooled is ClassAndMean else 'class token'}")
    if config.prefix.outputs == 2 and config.classes is None:
        found.append("a distilled model has its two heads")
    if family == "deit" and (config.prefix.registers > 1 or config.prefix.count != 2):
        found.append("only DINOv2 has registers, and it has LayerScale")
    if config.classes is not None and not isinstance(config.head, Linear):
        found.append(f"{family}'s classifier is one linear layer")
    if config.classes is None and family in ("vit", "deit") and not isinstance(config.head, PreLogits | Linear):
        found.append(f"{family} has no projection")
    if isinstance(config.embed, Patches) and not config.embed.bias:
        found.append("its patches have a bias")
    if isinstance(config.block.mlp, SwiGLU) and (not dino or config.size.mlp != swiglu_width(config.size.width)):
        found.append(f"its SwiGLU is {swiglu_width(config.size.width)} wide")
    if dino and not isinstance(config.block.mlp, SwiGLU) and config.size.mlp % config.size.width:
        found.append("DINOv2's MLP is a whole multiple of the width")
    return found


def swiglu_width(width: int) -> int:
    """DINOv2's: two thirds of four times the width, rounded up to a multiple of eight."""
    return (int(4 * width * 2 / 3) + 7) // 8 * 8


def settings(
    config: ViTConfig, names: tuple[str, ...] | None, pipeline: Preprocessing | None, dtype: str
) -> dict[str, dict[str, Any]]:
    """config.json, and preprocessor_config.json where the pipeline is known."""
    family, size = family_of(config), config.size
    camel = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[family]
    body = "Model" if config.classes is None else "ForImageClassification"
    teacher = "WithTeacher" if config.prefix.outputs == 2 else ""
    activation = next((name for name, slot in GELUS.items() if slot == config.block.mlp), "exact")
    assert isinstance(config.embed, Patches)
    made: dict[str, Any] = {
        "architectures": [f"{camel}{body}{teacher}"],
        "model_type": family,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[activation],
        "layer_norm_eps": config.eps,
        "image_size": config.image_size[0] if config.image_size[0] == config.image_size[1] else list(config.image_size),
        "patch_size": config.embed.patch,
        "num_channels": config.channels,
        "qkv_bias": config.block.qkv_bias,
        "dtype": dtype,
    }
    if family.startswith("dinov2"):
        gated = isinstance(config.block.mlp, SwiGLU)
        made |= {"mlp_ratio": 4 if gated else size.mlp // size.width, "use_swiglu_ffn": gated}
        if config.prefix.registers:
            made["num_register_tokens"] = config.prefix.registers
    else:
        made["intermediate_size"] = size.mlp
        if isinstance(config.head, PreLogits):
            made |= {"pooler_output_size": config.head.hidden or size.width, "pooler_act": "tanh"}
    if config.classes is not None:
        named = names or tuple(f"LABEL_{i}" for i in range(config.classes))
        made |= {
            "id2label": {str(i): name for i, name in enumerate(named)},
            "label2id": {name: i for i, name in enumerate(named)},
        }
    found = {"config.json": made}
    if pipeline is not None:
        found["preprocessor_config.json"] = processor(pipeline)
    return found


def unused(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a family's code wants and our models lack, because only pre-training reads them."""
    if config.block.layer_scale is None:
        return {}
    root = "" if config.classes is None else f"{family_of(config)}."
    return {f"{root}embeddings.mask_token": (1, config.size.width)}


def processor(pipeline: Preprocessing) -> dict[str, Any]:
    """preprocessor_config.json for a pipeline: of the processors that crop where it crops."""
    numbers = {name: number for number, name in RESAMPLE.items()}
    crop = pipeline.size != pipeline.resize or pipeline.fit == "cover"
    if pipeline.fit == "cover" and pipeline.resize[0] != pipeline.resize[1]:
        raise ValueError(
            "transformers cannot express this model: its pipelines do not cover an oblong with the proportions kept"
        )
    height, width = pipeline.resize
    made: dict[str, Any] = {
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
        made["crop_size"] = {"height": pipeline.size[0], "width": pipeline.size[1]}
    return made
