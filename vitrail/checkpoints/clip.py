"""The names of OpenAI's CLIP and of OpenCLIP, for the visual tower: a norm on z_0, and a projection without bias."""

from collections.abc import Mapping
from typing import Any, Literal

from vitrail.checkpoints.keys import LeftOut, Table, both, complete, key, reshaped, rooted, transposed
from vitrail.checkpoints.look import Differs, Facts, Form, Names, square, usual_reasons
from vitrail.data.preprocessing import CLIP, Preprocessing
from vitrail.models.build import Config
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, Projection
from vitrail.nn.pool import ClassToken


def vit(config: ViTConfig) -> Table:
    """`VisionTransformer` of CLIP and OpenCLIP."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"CLIP cannot express this model: it has no {type(config.embed).__name__}")
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: Table = [
        key("embed.projection.weight", "conv1.weight", reshaped(shape, (width, -1))),
        key("prefix.outputs", "class_embedding", reshaped((width,), (1, 1, width))),
        key("position.weight", "positional_embedding", reshaped((rows, width), (1, rows, width))),
        *both("token_norm", "ln_pre"),
    ]
    for layer in range(config.size.depth):
        ours, theirs = f"blocks.{layer}", f"transformer.resblocks.{layer}"
        table += both(f"{ours}.norm1", f"{theirs}.ln_1") + both(f"{ours}.norm2", f"{theirs}.ln_2")
        table.append(key(f"{ours}.msa.qkv.weight", f"{theirs}.attn.in_proj_weight"))
        table.append(key(f"{ours}.msa.qkv.bias", f"{theirs}.attn.in_proj_bias"))
        table += both(f"{ours}.msa.out", f"{theirs}.attn.out_proj")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc") + both(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj")
    table += both("pool.norm", "ln_post")
    if isinstance(config.head, Projection):
        table.append(key("head.weight", "proj", transposed()))
    return complete("CLIP", table, config)


def look(names: Names, facts: Facts) -> ViTConfig:
    """The configuration of a visual tower."""
    width, channels, _, _ = projection = names.shape("conv1.weight", 4)
    patch = square(projection, "conv1.weight")
    h, w = facts.grid(names.shape("positional_embedding", 2)[0] - 1, patch)
    openai = any(name.endswith("input_resolution") for name in names.shapes)
    why = "OpenAI's CLIP, by its input_resolution" if openai else "OpenCLIP's default; OpenAI's weights use quick"
    return ViTConfig(
        size=Size(
            depth=names.count("transformer.resblocks.{}."),
            width=width,
            mlp=names.layer_shape("transformer.resblocks.*.mlp.c_fc.weight", 2)[0],
            heads=facts.heads(width, "CLIP"),
        ),
        embed=Patches(patch, bias=False),
        block=PreNorm(mlp=facts.gelu("quick" if openai else "exact", why)),
        head=Projection(names.shape("proj", 2)[1]) if "proj" in names else Linear(),
        classes=None,
        image_size=(h * patch, w * patch),
        channels=channels,
        eps=facts.ask("eps", 1e-5, "CLIP's default"),
        token_norm=True,
    )


def told(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What open_clip_config.json says and tensors cannot."""
    config = settings.get("open_clip_config.json")
    model = config.get("model_cfg") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return {}
    found: dict[str, Any] = {"gelu": "quick" if model.get("quick_gelu") else "exact"}
    vision = model.get("vision_cfg")
    if isinstance(vision, dict):
        for name, usual in {"pool_type": "tok", "final_ln_after_pool": False, "attentional_pool": False}.items():
            if vision.get(name, usual) != usual:
                raise Differs(f"open_clip_config.json says {name} {vision[name]!r}, which is not among the models here")
        kinds, norms = vision.get("act_kwargs"), vision.get("norm_kwargs")
        if isinstance(kinds, dict) and kinds.get("approximate") == "tanh":
            found["gelu"] = "tanh"
        if isinstance(norms, dict) and isinstance(norms.get("eps"), float):
            found["eps"] = norms["eps"]
        width, head = vision.get("width"), vision.get("head_width", 64)
        if type(width) is int and type(head) is int and head > 0 and width % head == 0:
            found["heads"] = width // head
    return {name: (value, "open_clip_config.json") for name, value in found.items()}


def preprocessing(config: Config, name: str) -> tuple[Preprocessing, str]:
    """CLIP's: the smaller side to the size, bicubic, and the middle."""
    return Preprocessing(config.image_size, config.image_size, "cover", "bicubic", **CLIP), "CLIP's default"


def pipeline(settings: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """The pipeline of open_clip_config.json."""
    config = settings.get("open_clip_config.json")
    found = config.get("preprocess_cfg") if isinstance(config, dict) else None
    if not isinstance(found, dict) or not {"mean", "std"} <= set(found):
        return None
    mean, std = (tuple(float(v) for v in found[name]) for name in ("mean", "std"))
    fits: dict[Any, Literal["cover", "squash"]] = {None: "cover", "shortest": "cover", "squash": "squash"}
    if str(found.get("resize_mode", "shortest")) not in ("None", "shortest", "squash"):
        raise ValueError(f"open_clip_config.json's resize_mode {found['resize_mode']!r} is not reproduced")
    fit = fits[found.get("resize_mode")]
    return Preprocessing(size, size, fit, found.get("interpolation") or "bicubic", mean=mean, std=std)


TEXT = ("transformer.*", "token_embedding.*", "positional_embedding", "ln_final.*", "text_projection*", "text.*")
TEXT += ("logit_scale", "logit_bias", "attn_mask", "input_resolution", "context_length", "vocab_size")


def _table(config: Config, root: str) -> Table:
    assert isinstance(config, ViTConfig)
    return [*rooted(vit(config), root), *(LeftOut(name, "text tower") for name in (TEXT if root else ()))]


FORMS = (
    Form(
        "clip",
        "the visual tower of CLIP or OpenCLIP",
        ("conv1.weight", "class_embedding", "ln_pre.weight", "transformer.resblocks.*.attn.in_proj_weight"),
        look,
        _table,
        preprocessing,
        ("visual.", ""),
        told,
        {"embed": Patches(16, bias=False), "token_norm": True, "classes": None, "head": Projection(32)},
    ),
)


def reasons(config: ViTConfig) -> list[str]:
    """Why CLIP cannot express a model, beyond the names of its tensors."""
    found = usual_reasons(config)
    if not isinstance(config.pool, ClassToken) or config.prefix.count != 1:
        found.append("it reads its one class token")
    return found
