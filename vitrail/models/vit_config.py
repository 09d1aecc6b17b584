"""The configuration of a Vision Transformer, and the short strings that stand for its parts.

"B/16" and `position="sincos2d"` are parsed here; all other modules receive objects in every slot.
"""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_args

from vitrail.models.base import State, TokenConfig, Unsupported, check_common, image_sides
from vitrail.models.hybrid import Hybrid, configure_hybrid
from vitrail.models.init import SCHEMES
from vitrail.models.sizes import RESAMPLING_NAMES, SIZES, SLOT_NAMES, Size, closest
from vitrail.nn.block import BlockSlot, Divided, Parallel, PostNorm, PreNorm, ResPostNorm
from vitrail.nn.embed import ConvPool, ConvStem, Patches, Prefix, Tubelets
from vitrail.nn.head import HeadSlot, Linear, NormLinear, PreLogits, Projection, Similarity
from vitrail.nn.mlp import GELU, MLPSlot, QuickGELU, ReLU, SwiGLU, TanhGELU
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean, OutputMean, PoolSlot
from vitrail.nn.position import AddedPosition, Learned1D, NoPosition, PositionSlot
from vitrail.nn.resampling import Resampling
from vitrail.nn.shape import Grid

EmbedSlot = Patches | ConvStem | ConvPool | Hybrid | Tubelets
T = TypeVar("T")


@dataclass(frozen=True)
class ViTConfig(TokenConfig):
    """A Vision Transformer as a value: its size and the object in each slot. The defaults are the paper's."""

    family: ClassVar[str] = "vit"
    title: ClassVar[str] = "Vision Transformers"

    size: Size
    embed: EmbedSlot = Patches(16)
    position: PositionSlot = Learned1D()
    prefix: Prefix = Prefix()
    block: BlockSlot = PreNorm()
    pool: PoolSlot = ClassToken()
    head: HeadSlot = Linear()
    classes: int | None = 1000  # None: the model returns features
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last layer; increases linearly from 0 at the first
    eps: float = 1e-6  # of every LayerNorm
    token_norm: bool = False  # a LayerNorm on z_0 too, as in CLIP
    init: str = "vit"
    frames: int | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, kw_only=True, metadata={"omit_default": True}
    )  # of a clip; None for a model of images

    def __post_init__(self) -> None:
        check_common(self)
        self.check_axes()
        for name in ("dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.pool.required_tokens > self.prefix.outputs:
            least = SLOT_NAMES["prefix"][0][self.pool.required_tokens]
            missing = "there is none" if not self.prefix.outputs else "there is no distillation token"
            reads = f"the pooling reads a {least.replace('+', ' and a ')} token"
            raise ValueError(f"{reads}, and {missing}: use prefix={least!r} or pool='mean'")
        if self.init not in SCHEMES:
            raise ValueError(f"unknown initialisation {self.init!r}: use {' or '.join(SCHEMES)}")
        _ = self.shape

    def check_axes(self) -> None:
        """Raise ValueError for parts that are not for images, or not for clips."""
        embed, position, axes = self.embed, self.position, len(self.input_size)
        if isinstance(embed, Tubelets) != (self.frames is not None):
            remedy = "give frames" if self.frames is None else "use embed=Tubelets(…)"
            raise ValueError(f"frames={self.frames} does not fit {embed}: {remedy}")
        if axes not in position.axes:
            kind, known = ("images", "learned1d") if axes == 2 else ("clips", "learned1d, factorised or rotary3d")
            raise Unsupported(f"{type(position).__name__} positions are not for {kind}: use {known}")
        if self.block.is_divided and self.frames is None:
            raise Unsupported("divided attention separates time from space: give frames, or use block='pre'")
        if self.block.is_divided and not isinstance(position, AddedPosition | NoPosition):
            name = type(position).__name__
            raise Unsupported(f"divided attention needs positions added to the tokens, not {name}: use factorised")

    @property
    def depth(self) -> int:
        return self.size.depth

    @property
    def stride(self) -> int:
        return self.embed.stride

    @property
    def size_rule(self) -> tuple[int, int]:
        if self.overlap:
            return 1, self.embed.stride + self.overlap  # a side is that of a patch, or longer
        return self.embed.stride, 2  # an exported graph resamples positions for at least two patches per side

    @property
    def overlap(self) -> int:
        """Return the pixels that neighbouring patches share."""
        return self.embed.overlap if isinstance(self.embed, Patches) else 0

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        if self.frames is not None and len(size) == 2:
            size = (self.frames, *size)
        return self.embed.grid_of(size)

    def describe(self) -> str:
        size, stride = self.size, self.embed.stride
        patch: int | str = stride + self.overlap
        name = next((name for name, known in SIZES.items() if known == size), None)
        kind = "" if isinstance(self.embed, Patches) else f"{type(self.embed).__name__} + "
        if name and isinstance(self.pool, OutputMean) and stride == choose_ast_stride(patch):
            return f"AST-{name}/{patch}"
        if isinstance(self.embed, Tubelets):  # as in ViViT-B/16x2
            kind, patch = "", f"{patch}x{self.embed.frames}"
        sizes = f"{kind}{name}/{patch}" if name else f"ViT of width {size.width}, depth {size.depth}, patch {patch}"
        return sizes + (f", stride {stride}" if self.overlap else "")

    def facts(self) -> dict[str, str]:
        block = self.block
        tokens = {0: "none", 1: "class", 2: "class and distillation"}[self.prefix.outputs]
        registers = f", {self.prefix.registers} registers" if self.prefix.registers else ""
        options = {
            type(block.mlp).__name__: True,
            "a norm in the MLP": getattr(block.mlp, "normed", False),
            "LayerScale": block.layer_scale is not None,
            "q/k norm": block.qk_norm,
        }
        options |= {"no q/k/v bias": not block.qkv_bias, "no key bias": block.qkv_bias and not block.key_bias}
        options |= {"a norm of the heads": block.attention_norm, "a norm on z_0": self.token_norm}
        size, rule = self.size, self.resampling
        resampling = {} if rule is None else {"resampling": describe_resampling(rule)}
        clip = {} if self.frames is None else {"tubelets": str(self.embed)}
        return {
            **clip,
            "size": f"width {size.width}, depth {size.depth}, {size.heads} heads, MLP {size.mlp}",
            "patches": "×".join(map(str, self.shape.grid))
            + (f", {self.overlap} pixels overlap" if self.overlap else ""),
            "positions": str(self.position),
            **resampling,
            "prefix tokens": tokens + registers,
            "blocks": f"{type(block).__name__}, {', '.join(name for name, present in options.items() if present)}",
            "pooling": str(self.pool),
            "head": str(self.head),
        }

    def check_any_size(self) -> None:
        if self.frames is not None:
            raise Unsupported("dynamic_size= does not support models of clips: use size=")
        if self.overlap:
            raise Unsupported("dynamic_size= does not support overlapping patches: use size=")
        if not isinstance(self.embed, Patches):
            name = type(self.embed).__name__
            raise Unsupported(f"dynamic_size= does not support {name}: its padding depends on the size, use size=")

    def matches_option(self, name: str, value: Any) -> bool:
        if name == "gelu":
            return GELUS.get(value) == self.block.mlp
        if name == "pool":
            return {"class": ClassToken(), "mean": Mean()}.get(value) == self.pool
        if name == "periods":
            return getattr(self.position, "precision", None) == value
        if name == "block":
            return type(BLOCKS.get(value)) is type(self.block)
        known = {"heads": self.size.heads, "eps": self.eps, "size": self.image_size, "channels": self.channels}
        known |= {"frames": self.frames, "stride": self.stride}
        if name == "resampling":
            return self.resampling == parse_resampling(value)
        return known[name] == value

    @property
    def resampling(self) -> Resampling | None:
        return getattr(self.position, "resampling", None)

    def with_resampling(self, resampling: str | Resampling) -> "ViTConfig":
        if self.resampling is None:
            kind = f"{type(self.position).__name__} positions"
            raise Unsupported(f"{kind} are not resampled: leave out resampling, or use learned positions")
        position = replace(self.position, resampling=parse_resampling(resampling))  # type: ignore[call-arg]
        return replace(self, position=position)

    def with_classes(self, classes: int | None) -> "ViTConfig":
        """Return the configuration with a head for this number of classes; a linear head replaces CLIP's projection."""
        head = Linear() if isinstance(self.head, Projection) else self.head
        return replace(self, classes=classes, head=head)

    def with_similarity(self, classes: int) -> "ViTConfig":
        head = Similarity(self.head.width if isinstance(self.head, Projection) else None)
        return replace(self, classes=classes, head=head)

    def as_backbone(self) -> "ViTConfig":
        """Return the configuration without head, pre-logits and attention pooling, which feature maps do not need."""
        pool = Mean() if isinstance(self.pool, MAP) else self.pool
        return replace(self, classes=None, head=Linear(), pool=pool)

    def with_frames(self, frames: int) -> "ViTConfig":
        if self.frames is None:
            return super().with_frames(frames)
        return replace(self, frames=frames)

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        return self.resize_to_grid(state, self.grid_of(size))

    def resize_to_grid(self, state: State, grid: Grid) -> State:
        """Return these tensors with learned positions resampled to another grid (section 3.2)."""
        tensors = {name.removeprefix("position."): t for name, t in state.items() if name.startswith("position.")}
        resized = self.position.resize_tensors(tensors, self.shape, grid)
        return state | {f"position.{name}": tensor for name, tensor in resized.items()}

    def input_weight(self) -> str:
        if isinstance(self.embed, Patches) and self.embed.normed:
            raise Unsupported("patches with a norm before the projection do not support another number of channels")
        return f"embed.{self.embed.input_weight}"


def name_slot(slot: str, *objects: Any) -> dict[str, Any]:
    """Return the objects of a slot by their names in `SLOT_NAMES`."""
    return dict(zip(SLOT_NAMES[slot][0], objects, strict=True))


EMBEDS = name_slot("embed", Patches, ConvStem, ConvPool)
POSITIONS: dict[str, Any] = name_slot("position", *get_args(PositionSlot))  # the union has the order of the names
PREFIXES: dict[str, Prefix] = name_slot("prefix", Prefix(0), Prefix(1), Prefix(2))
POOLS: dict[str, PoolSlot] = name_slot(
    "pool", ClassToken(), Mean(), Mean(norm_after=True), ClassAndMean(), MAP(), OutputMean()
)
BLOCKS: dict[str, BlockSlot] = name_slot("block", PreNorm(), PostNorm(), Parallel(), ResPostNorm(), Divided())
MLPS: dict[str, MLPSlot] = name_slot("mlp", GELU(), TanhGELU(), QuickGELU(), ReLU(), SwiGLU())
HEADS: dict[str, HeadSlot] = name_slot("head", Linear(), PreLogits(), NormLinear())
RESAMPLINGS: dict[str, Resampling] = dict(
    zip(
        RESAMPLING_NAMES,
        (
            Resampling(),  # also OpenCLIP, and DINOv2 with registers
            Resampling(antialias=False),  # also DeiT, DeiT III and MAE
            Resampling(antialias=False, offset=0.1),  # DINO, DINOv2 without registers
            Resampling(antialias=False, align_corners=True),
            Resampling("linear", antialias=False, align_corners=True),  # SciPy's zoom of order 1
            Resampling("geometric", antialias=False),  # BEiT
            Resampling("linear", antialias=False),  # BEiT in transformers
            Resampling("nearest", antialias=False),
            Resampling("cut", antialias=False),
        ),
        strict=True,
    )
)

VIT_NAME = re.compile(r"(?P<ast>AST-)?(?:R(?P<resnet>\d*)\+)?(?P<size>[A-Za-z]+\+?|\d+B)/(?P<patch>\d+)")
AST: dict[str, Any] = {  # what a name like "AST-B/16" stands for beside the size (Gong et al. 2021)
    "image_size": (128, 1024),
    "channels": 1,
    "classes": 527,
    "prefix": "class+distillation",
    "pool": "output-mean",
    "head": "norm-linear",
    "eps": 1e-12,
    "resampling": "ast",
}
GELUS: dict[str, MLPSlot] = {"exact": GELU(), "tanh": TanhGELU(), "quick": QuickGELU()}


def get_slot(slot: str, name: str, known: dict[str, T]) -> T:
    """Return the object that a short string names; raise ValueError with the known names."""
    if name not in known:
        raise ValueError(f"unknown {slot} {name!r}: {closest(name, list(known))}")
    return known[name]


def parse_position(name: str) -> PositionSlot:
    """Return the position slot of `learned1d`, or of `learned1d@every` or `learned1d@shared` for every layer."""
    kind, _, at = name.partition("@")
    position = get_slot("position", kind, POSITIONS)
    if not at:
        return position()
    if "at" not in (field.name for field in fields(position)):
        raise ValueError(f"position {kind!r} has no scope: leave out '@{at}'")
    return position(at=at)


def parse_resampling(value: str | Resampling) -> Resampling:
    """Return the rule that a project's name stands for."""
    return value if isinstance(value, Resampling) else get_slot("resampling", value, RESAMPLINGS)


def describe_resampling(rule: Resampling) -> str:
    """Return a rule in words, with the project that uses it."""
    name = next((name for name, known in RESAMPLINGS.items() if known == rule), None)
    return rule.describe() + (f" ({name})" if name else "")


def configure_vit(name: str | None = None, **options: Any) -> ViTConfig:
    """Return the configuration of a Vision Transformer, or of an AST from a name like "AST-B/16"; see `configure_slots`.

    The options of an AST are the published ones unless they are given: patches of 16 pixels every 10, log-mel spectrograms of
    128 mel bins and 1,024 frames, the mean of the class and the distillation token, AudioSet's 527 classes.
    """
    match = None if name is None else VIT_NAME.fullmatch(name)
    if match is None or match["ast"] is None or name is None:
        return configure_slots(name, **options)
    patch = int(match["patch"])
    embed = Patches(patch, overlap=patch - choose_ast_stride(patch))
    return configure_slots(name.removeprefix("AST-"), **{"embed": embed, **AST, **options})


def choose_ast_stride(patch: int) -> int:
    """Return the pixels from patch to patch of an AST: 10 of patches of 16, and as much for others."""
    return max(1, patch * 10 // 16)


def configure_slots(
    name: str | None = None,
    *,
    patch: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    head_width: int | None = None,
    mlp_width: int | None = None,
    embed: str | EmbedSlot = "patches",
    position: str | PositionSlot = "learned1d",
    resampling: str | Resampling | None = None,
    prefix: str | Prefix | None = None,
    registers: int = 0,
    pool: str | PoolSlot = "class",
    block: str | BlockSlot = "pre",
    mlp: str | MLPSlot | None = None,
    head: str | HeadSlot = "linear",
    layer_scale: float | None = None,
    qk_norm: bool = False,
    key_bias: bool = True,
    classes: int | None = 1000,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    eps: float = 1e-6,
    token_norm: bool = False,
    init: str | None = None,
    frames: int | None = None,
    tubelet: int | None = None,
) -> ViTConfig:
    """Return a configuration from a name and the options that differ from it.

    `name` is a size and a patch size, "B/16", or a hybrid, "R50+B/16". Without a name, give `patch`, `width`, `depth` and
    `heads`; the MLP is then four times as wide as the model. Every slot accepts a short string or an object. `resampling`
    is the rule for learned positions at other image sizes, "timm" if not given.

    `frames` makes it a model of clips of so many frames, cut into tubelets of `tubelet` frames (2 if not given).
    """
    if frames is None and tubelet is not None:
        raise ValueError(f"tubelet={tubelet} is for models of clips: give frames=16 too, or another number")
    if name is None:
        if patch is None or width is None or depth is None or heads is None:
            raise ValueError("without a name like 'B/16', give patch, width, depth and heads")
        base, slot = Size(depth, width, 4 * width, heads), embed
    else:
        match = VIT_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"unknown model {name!r}: use a name like 'B/16' or 'R50+B/16'. Sizes: {', '.join(SIZES)}")
        base, slot = get_slot("size", match["size"], SIZES), embed
        patch = int(match["patch"]) if patch is None else patch
        if match["resnet"] is not None:
            if embed != "patches":
                raise ValueError(f"{name} is a hybrid and embeds patches with its ResNet: leave out embed")
            slot = configure_hybrid(match["resnet"], patch)
    size = Size(
        depth=base.depth if depth is None else depth,
        width=base.width if width is None else width,
        mlp=mlp_width if mlp_width is not None else (base.mlp if width is None else 4 * width),
        heads=base.heads if heads is None else heads,
        head=head_width,
    )
    if slot == "patches" and frames is not None:
        slot = Tubelets(2 if tubelet is None else tubelet, patch)
    elif isinstance(slot, Tubelets) and tubelet not in (None, slot.frames):
        raise ValueError(f"tubelet={tubelet} does not match {slot}: give the same number in both")
    elif isinstance(slot, str):
        slot = get_slot("embedding", slot, EMBEDS)(patch)
    if isinstance(slot, (Patches, ConvStem, Tubelets)) and slot.patch != patch:
        raise ValueError(f"patch size {patch} does not match {slot}: give the same size in both")

    pool = get_slot("pooling", pool, POOLS) if isinstance(pool, str) else pool
    if prefix is None:
        prefix = list(PREFIXES.values())[pool.required_tokens]
    prefix = get_slot("prefix", prefix, PREFIXES) if isinstance(prefix, str) else prefix
    prefix = replace(prefix, registers=prefix.registers + registers)

    block = get_slot("block", block, BLOCKS) if isinstance(block, str) else block
    if mlp is not None:
        block = replace(block, mlp=get_slot("MLP", mlp, MLPS) if isinstance(mlp, str) else mlp)
    if layer_scale is not None:
        block = replace(block, layer_scale=layer_scale)
    if qk_norm:
        block = replace(block, qk_norm=True)
    if not key_bias:
        block = replace(block, key_bias=False)

    config = ViTConfig(
        size=size,
        embed=slot,
        position=parse_position(position) if isinstance(position, str) else position,
        prefix=prefix,
        block=block,
        pool=pool,
        head=get_slot("head", head, HEADS) if isinstance(head, str) else head,
        classes=classes,
        image_size=image_sides(image_size),
        channels=channels,
        dropout=dropout,
        stochastic_depth=stochastic_depth,
        eps=eps,
        token_norm=token_norm,
        init=init or ("deit" if prefix.outputs == 2 else "vit"),
        frames=frames,
    )
    return config if resampling is None else config.with_resampling(resampling)
