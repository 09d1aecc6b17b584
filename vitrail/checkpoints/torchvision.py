"""torchvision's names: `vit_b_16` and its siblings, and the SWAG weights that it publishes for them."""

from functools import partial

from vitrail.checkpoints.keys import Table, both, complete, key, reshaped, rooted
from vitrail.checkpoints.look import Facts, Form, Names, square, usual_reasons
from vitrail.data.preprocessing import IMAGENET, Preprocessing
from vitrail.models.build import Config
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.pool import ClassToken

MLP = ("0", "3")
OLD_MLP = ("linear_1", "linear_2")  # before torchvision 0.13; its files on the web still have them


def vit(config: ViTConfig, mlp: tuple[str, str] = MLP) -> Table:
    """`torchvision.models.VisionTransformer`."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"torchvision cannot express this model: it has no {type(config.embed).__name__}")
    width = config.size.width
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: Table = [
        key("embed.projection.weight", "conv_proj.weight", reshaped(shape, (width, -1))),
        key("embed.projection.bias", "conv_proj.bias"),
        key("prefix.outputs", "class_token"),
        key("position.weight", "encoder.pos_embedding"),
    ]
    for layer in range(config.size.depth):
        ours, theirs = f"blocks.{layer}", f"encoder.layers.encoder_layer_{layer}"
        table += both(f"{ours}.norm1", f"{theirs}.ln_1")
        table.append(key(f"{ours}.msa.qkv.weight", f"{theirs}.self_attention.in_proj_weight"))
        table.append(key(f"{ours}.msa.qkv.bias", f"{theirs}.self_attention.in_proj_bias"))
        table += both(f"{ours}.msa.out", f"{theirs}.self_attention.out_proj")
        table += both(f"{ours}.norm2", f"{theirs}.ln_2")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.{mlp[0]}") + both(f"{ours}.mlp.fc2", f"{theirs}.mlp.{mlp[1]}")
    table += both("pool.norm", "encoder.ln")
    if isinstance(config.head, PreLogits):
        table += both("head.pre_logits", "heads.pre_logits")
        if config.classes is not None:
            table += both("head.linear", "heads.head")
    elif config.classes is not None:
        table += both("head", "heads.head")
    return complete("torchvision", table, config)


def look(names: Names, facts: Facts, mlp: tuple[str, str]) -> ViTConfig:
    """The configuration of a torchvision Vision Transformer."""
    width, channels, _, _ = projection = names.shape("conv_proj.weight", 4)
    patch = square(projection, "conv_proj.weight")
    h, w = facts.grid(names.shape("encoder.pos_embedding", 3)[1] - 1, patch)
    hidden = names.shape("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in names else None
    return ViTConfig(
        size=Size(
            depth=names.count("encoder.layers.encoder_layer_{}."),
            width=width,
            mlp=names.layer_shape(f"encoder.layers.encoder_layer_*.mlp.{mlp[0]}.weight", 2)[0],
            heads=facts.heads(width, "torchvision"),
        ),
        embed=Patches(patch),
        block=PreNorm(mlp=facts.gelu("exact", "torchvision's default")),
        head=Linear() if hidden is None else PreLogits(None if hidden == width else hidden),
        classes=names.outputs("heads.head"),
        image_size=(h * patch, w * patch),
        channels=channels,
        eps=facts.ask("eps", 1e-6, "torchvision's default"),
    )


def preprocessing(config: Config, name: str) -> tuple[Preprocessing, str]:
    """Weights for larger images are SWAG's; so are those for 224² of H/14, and those whose file's name says so."""
    assert isinstance(config, ViTConfig)
    size, width = config.image_size, config.size.width
    if size[0] == 224 and (width == 1280 or "swag" in name.lower()):
        return Preprocessing(
            size, size, "cover", "bicubic", **IMAGENET
        ), "torchvision's default for SWAG's linear weights"
    if size[0] == 224 and width == 1024 and config.embed.stride == 16:
        return Preprocessing(size, (242, 242), "cover", "bilinear", **IMAGENET), "torchvision's default for vit_l_16"
    if size[0] > 224:
        return Preprocessing(size, size, "cover", "bicubic", **IMAGENET), "torchvision's default for SWAG at this size"
    return Preprocessing(size, size, "cover", "bilinear", **IMAGENET).larger(256 / 224), "torchvision's default at 224²"


def _form(name: str, title: str, mlp: tuple[str, str]) -> Form:
    first = "encoder.layers.encoder_layer_*"
    return Form(
        name,
        title,
        ("conv_proj.weight", f"{first}.self_attention.in_proj_weight", f"{first}.mlp.{mlp[0]}.weight"),
        partial(look, mlp=mlp),
        lambda config, root: rooted(vit(config, mlp), root),
        preprocessing,
    )


FORMS = (
    _form("torchvision", "torchvision's Vision Transformer", MLP),
    _form("torchvision old", "torchvision's Vision Transformer before version 0.13", OLD_MLP),
)


def reasons(config: ViTConfig) -> list[str]:
    """Why torchvision cannot express a model, beyond the names of its tensors."""
    found = usual_reasons(config)
    if config.prefix.registers:
        found.append("it has no registers")
    if config.prefix.outputs != 1 or not isinstance(config.pool, ClassToken):
        found.append("it reads one class token")
    return found
