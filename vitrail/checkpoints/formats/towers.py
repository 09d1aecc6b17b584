"""Key tables of both towers of CLIP-like models: in the names of OpenAI's CLIP and OpenCLIP, and of transformers.

Each is the table of an image tower, as its own format has it, the table of a text tower, and the scale and bias of the logits.
Two designs exist. CLIP's text tower is causal and read at the end of the text; SigLIP's is neither causal nor read there, but
at the last token, and its logits have a bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, TensorNames, clip, clip_transformers, timm
from vitrail.checkpoints.keys import IDENTITY, IgnoredKeys, KeyMapping, KeyTable, Rules
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.tokenizer import Tokenizer
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.text import EndOfText, LastToken, TextConfig, TextEncoder
from vitrail.models.two_towers import TwoTowersConfig
from vitrail.models.vit_config import GELUS, ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Prefix
from vitrail.nn.pool import MAP, ClassToken
from vitrail.nn.position import Learned1D

TEXT = "text_"  # before the names of assumptions of the text tower
GELU_NAMES = {slot: name for name, slot in GELUS.items()}


@dataclass(frozen=True)
class TowersNaming:
    """One project's names of both towers of one design."""

    name: str
    title: str
    siglip: bool
    image: CheckpointFormat  # of the image tower
    image_root: str
    map_image: Callable[[TokenConfig, str], KeyTable]
    text: str  # before the names of the text tower
    embed: str
    position: str
    layer: str  # of the text tower, with # for its number
    mha: Callable[[str], Rules]  # rules of the attention of a layer
    norms: tuple[str, str]
    mlp: tuple[str, str]
    norm: str
    projection: str  # its whole name
    transposed: bool  # whether the projection is a bare matrix [D, F]
    gelu: str
    eps: float
    logit_shape: tuple[int, ...] = ()
    supports_bias: bool = True  # of the logits
    ignored: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


def map_fused_attention(layer: str) -> Rules:
    """Return the rules of PyTorch's `MultiheadAttention`, as CLIP and OpenCLIP use it."""
    return {"blocks.#.msa.qkv.*": f"{layer}.attn.in_proj_*", "blocks.#.msa.out.*": f"{layer}.attn.out_proj.*"}


OPENAI = TowersNaming(
    "clip towers",
    "both towers of CLIP or OpenCLIP",
    siglip=False,
    image=clip.FORMATS[0],
    image_root="visual.",
    map_image=lambda config, root: keys.add_root(clip.map_vit(config), root),
    text="",
    embed="token_embedding.weight",
    position="positional_embedding",
    layer="transformer.resblocks.#",
    mha=map_fused_attention,
    norms=("ln_1", "ln_2"),
    mlp=("mlp.c_fc", "mlp.c_proj"),
    norm="ln_final",
    projection="text_projection",
    transposed=True,
    gelu="exact",
    eps=1e-5,
    ignored=("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask"),
    required=("text_projection", "visual.class_embedding"),
)
OPEN_CLIP_CUSTOM = replace(
    OPENAI,
    name="open_clip towers",
    title="both towers of OpenCLIP with custom text",
    text="text.",
    projection="text.text_projection",
    required=("text.text_projection", "visual.class_embedding"),
)
OPEN_CLIP_SIGLIP = replace(
    OPENAI,
    name="open_clip siglip",
    title="OpenCLIP's SigLIP",
    siglip=True,
    image=next(form for form in timm.FORMATS if form.name == "timm"),
    image_root="visual.trunk.",
    map_image=lambda config, root: keys.add_root(keys.select_mappings(timm.build_table(config)), root),
    text="text.",
    projection="text.text_projection",
    transposed=False,
    eps=1e-6,
    required=("text.text_projection.bias", "visual.trunk.patch_embed.proj.weight"),
)
TRANSFORMERS_CLIP = TowersNaming(
    "transformers clip towers",
    "transformers' CLIP with both towers",
    siglip=False,
    image=clip_transformers.FORMATS[0],
    image_root=clip_transformers.ROOT,
    map_image=clip_transformers.map_clip,
    text="text_model.",
    embed="embeddings.token_embedding.weight",
    position="embeddings.position_embedding.weight",
    layer="encoder.layers.#",
    mha=clip_transformers.map_attention,
    norms=("layer_norm1", "layer_norm2"),
    mlp=("mlp.fc1", "mlp.fc2"),
    norm="final_layer_norm",
    projection="text_projection",
    transposed=False,
    gelu="quick",
    eps=1e-5,
    supports_bias=False,
    ignored=("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"),
    required=("text_projection.weight", "vision_model.embeddings.class_embedding"),
)
TRANSFORMERS_SIGLIP = replace(
    TRANSFORMERS_CLIP,
    name="transformers siglip towers",
    title="transformers' SigLIP with both towers",
    siglip=True,
    image=clip_transformers.FORMATS[1],
    map_image=clip_transformers.map_siglip,
    projection="text_model.head",
    gelu="tanh",
    eps=1e-6,
    logit_shape=(1,),
    supports_bias=True,
    required=("text_model.head.weight", "vision_model.head.probe"),
)
NAMINGS = (OPENAI, OPEN_CLIP_CUSTOM, OPEN_CLIP_SIGLIP, TRANSFORMERS_CLIP, TRANSFORMERS_SIGLIP)


@lru_cache(maxsize=4)
def list_text_tensors(config: TextConfig) -> tuple[str, ...]:
    """Return the names of the tensors of a text tower."""
    with torch.device("meta"):
        return tuple(TextEncoder(config).state_dict())


def map_text(config: TextConfig, naming: TowersNaming) -> list[KeyMapping]:
    """Return the table of a text tower."""
    root, layer, (first, second), (into, out) = naming.text, naming.text + naming.layer, naming.norms, naming.mlp
    rules: Rules = {
        "embed.weight": root + naming.embed,
        "position": root + naming.position,
        **naming.mha(layer),
        "blocks.#.norm1.*": f"{layer}.{first}.*",
        "blocks.#.norm2.*": f"{layer}.{second}.*",
        "blocks.#.mlp.fc1.*": f"{layer}.{into}.*",
        "blocks.#.mlp.fc2.*": f"{layer}.{out}.*",
        "norm.*": f"{root}{naming.norm}.*",
    }
    if naming.transposed:
        rules["?head.weight"] = (naming.projection, keys.permute(1, 0))
    else:
        rules |= {f"?head.{kind}": f"{naming.projection}.{kind}" for kind in ("weight", "bias")}
    return keys.expand_rules(naming.title, list_text_tensors(config), config.size.depth, rules)


def build_table(config: TwoTowersConfig, naming: TowersNaming, _: str = "") -> KeyTable:
    """Return the table of both towers; raise if the naming cannot express the model."""
    check_design(config, naming)
    image = keys.select_mappings(naming.map_image(config.image.require_tokens(naming.title), naming.image_root))
    shape = keys.reshape(naming.logit_shape, ()) if naming.logit_shape else IDENTITY
    logits = {"logits.scale": "logit_scale"} | ({"logits.bias": "logit_bias"} if config.logit_bias else {})
    return [
        *keys.add_prefix(image, "image."),
        *keys.add_prefix(map_text(config.text, naming), "text."),
        *(keys.map_key(ours, theirs, shape) for ours, theirs in logits.items()),
        *(IgnoredKeys(name, "computed, not learned") for name in naming.ignored),
    ]


def check_design(config: TwoTowersConfig, naming: TowersNaming) -> None:
    """Raise ValueError for facts of a model that the names of its tensors do not tell."""
    text, siglip = config.text, naming.siglip
    reads = isinstance(text.pool, LastToken) if siglip else isinstance(text.pool, EndOfText)
    image = config.image
    design = isinstance(image, ViTConfig) and type(image.block) is PreNorm
    if isinstance(image, ViTConfig):
        pool = isinstance(image.pool, MAP) and image.pool.mlp == image.block.mlp
        none = not image.prefix.count
        design &= (pool and none) if siglip else (image.pool == ClassToken() and image.prefix == Prefix(1))
        design &= image.size.head is None and isinstance(image.position, Learned1D) and image.position.at == "stem"
    limits = {
        f"its image tower is {'SigLIP' if siglip else 'CLIP'}'s Vision Transformer": not design,
        f"its text tower is {'not causal' if siglip else 'causal'}": text.causal is siglip,
        f"it reads {'the last token' if siglip else 'the end of the text'}": not reads,
        "its text tower has the plain layers": type(text.block) is not PreNorm or text.size.head is not None,
        "its text tower has a projection": text.features is None,
        f"its projection of texts has {'a' if siglip else 'no'} bias": text.projection_bias is not siglip,
        f"its logits have {'a' if siglip else 'no'} bias": config.logit_bias is not siglip
        and (siglip or not naming.supports_bias),
        "its activation is a GELU": text.block.mlp not in GELU_NAMES,
    }
    if reasons := [reason for reason, holds in limits.items() if holds]:
        raise ValueError(f"{naming.title} cannot express this model: {'; '.join(reasons)}")


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, naming: TowersNaming) -> TwoTowersConfig:
    """Return the configuration of both towers."""
    own = {name: given for name, given in assumptions.given.items() if not name.startswith(TEXT)}
    image_facts = Assumptions(own)
    image = naming.image.read_config(TensorNames(names.shapes, naming.image_root), image_facts)
    assumptions.used |= image_facts.used
    text_facts = Assumptions(
        {name.removeprefix(TEXT): given for name, given in assumptions.given.items() if name.startswith(TEXT)}
    )
    text = read_text_config(TensorNames(names.shapes, naming.text), text_facts, naming, image)
    assumptions.used |= {TEXT + name: used for name, used in text_facts.used.items()}
    return TwoTowersConfig(image, text, "logit_bias" in names)


def read_text_config(
    names: TensorNames, assumptions: Assumptions, naming: TowersNaming, image: ModelConfig
) -> TextConfig:
    """Return the configuration of a text tower. Its activation is that of the image tower unless it is given."""
    vocabulary, width = names.shape(naming.embed, 2)
    projection = naming.projection if naming.transposed else f"{naming.projection}.weight"
    features = TensorNames(names.shapes).shape(projection, 2)[1 if naming.transposed else 0]
    image_gelu = GELU_NAMES.get(getattr(image, "block", PreNorm()).mlp, naming.gelu)
    token = None
    if "token" in assumptions.given and not naming.siglip:
        token = assumptions.resolve("token", None, "")
    if token is not None and not 0 <= token < vocabulary:
        raise ValueError(f"the end-of-text token must be 0 to {vocabulary - 1:,}, got {token}")
    return TextConfig(
        size=Size(
            depth=names.count_layers(naming.layer.replace("#", "{}.")),
            width=width,
            mlp=names.layer_shape(f"{naming.layer.replace('#', '*')}.{naming.mlp[0]}.weight", 2)[0],
            heads=assumptions.resolve_heads(width, naming.title),
        ),
        features=features,
        vocabulary=vocabulary,
        context=names.shape(naming.position, 2)[0],
        block=PreNorm(mlp=assumptions.resolve_gelu(image_gelu, "as the image tower")),
        pool=LastToken() if naming.siglip else EndOfText(token),
        causal=not naming.siglip,
        projection_bias=naming.siglip,
        eps=assumptions.resolve("eps", naming.eps, f"the default of {naming.title}"),
    )


def default_preprocessing(config: TwoTowersConfig, name: str, naming: TowersNaming) -> tuple[Preprocessing, str]:
    """Return the pipeline of the format of the image tower."""
    return naming.image.default_preprocessing(config.image, name)


def parse_settings(settings: dict[str, Any], naming: TowersNaming) -> dict[str, tuple[Any, str]]:
    """Return the facts of the project's configuration file, those of the text tower named `text_…`."""
    transformers = naming.name.startswith("transformers")
    image = (clip_transformers if transformers else clip).parse_settings(settings)
    text = (parse_transformers_text if transformers else parse_open_clip_text)(settings, naming)
    return image | {TEXT + name: fact for name, fact in text.items()}


def parse_open_clip_text(settings: dict[str, Any], naming: TowersNaming) -> dict[str, tuple[Any, str]]:
    """Return the facts of `text_cfg` in open_clip_config.json; raise for a text tower of another design."""
    where = "open_clip_config.json"
    model = formats.get_object(settings, where, "model_cfg")
    if not model:
        return {}
    text = formats.get_object(model, "text_cfg")
    pools = ("last",) if naming.siglip else ("argmax", "eos")
    wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "no_causal_mask": (False, (naming.siglip,)),
        "pool_type": ("argmax", pools),
        "embed_cls": (False, (False,)),
        "use_pad_mask": (False, (False,)),
        "hf_model_name": (None, (None,)),
        "proj_type": ("linear", ("linear",)),
    }
    for name, (usual, known) in wanted.items():
        if text.get(name, usual) not in known:
            raise ValueError(f"unsupported {name} {text.get(name, usual)!r} of the text tower in {where}")
    facts: dict[str, Any] = {"gelu": "quick" if model.get("quick_gelu") else "exact"}
    if formats.get_object(text, "act_kwargs").get("approximate") == "tanh":
        facts["gelu"] = "tanh"
    if isinstance(eps := formats.get_object(text, "norm_kwargs").get("eps"), float):
        facts["eps"] = eps
    if type(heads := text.get("heads")) is int:
        facts["heads"] = heads
    if text.get("pool_type") == "eos" and type(token := text.get("eos_id", 2)) is int:
        facts["token"] = token
    return {name: (value, where) for name, value in facts.items()}


def parse_transformers_text(settings: dict[str, Any], naming: TowersNaming) -> dict[str, tuple[Any, str]]:
    """Return the facts of `text_config` in config.json. The token 2, an earlier mistake there, means the highest id."""
    config = formats.get_object(settings, "config.json", "text_config")
    facts = clip_transformers.parse_tower(config)
    token = config.get("eos_token_id", 49_407 if config else None)
    if not naming.siglip and type(token) is int and token != 2:
        facts["token"] = (token, "config.json")
    return facts


# --- writing ---


def choose_naming(to: str, config: TwoTowersConfig) -> TowersNaming:
    """Return the names of a conversion target for a model of this design."""
    siglip = not config.text.causal
    if to == "hf":
        return TRANSFORMERS_SIGLIP if siglip else TRANSFORMERS_CLIP
    return OPEN_CLIP_SIGLIP if siglip else OPENAI


def build_target_table(to: str, config: TwoTowersConfig) -> KeyTable:
    """Return the table of a file to write."""
    return build_table(config, choose_naming(to, config))


def build_settings(config: TwoTowersConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of both towers."""
    naming, text, image = choose_naming("hf", config), config.text, config.image.require_tokens("transformers' format")
    kind = "siglip" if naming.siglip else "clip"
    activations = {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
    text_settings: dict[str, Any] = {
        "model_type": f"{kind}_text_model",
        "hidden_size": text.size.width,
        "intermediate_size": text.size.mlp,
        "num_hidden_layers": text.size.depth,
        "num_attention_heads": text.size.heads,
        "max_position_embeddings": text.context,
        "vocab_size": text.vocabulary,
        "hidden_act": activations[GELU_NAMES[text.block.mlp]],
        "layer_norm_eps": text.eps,
        "projection_size" if naming.siglip else "projection_dim": text.features,
    }
    if isinstance(text.pool, EndOfText):
        text_settings["eos_token_id"] = 2 if text.pool.token is None else text.pool.token
    image_settings = clip_transformers.build_tower_settings(image, dtype) | {"model_type": f"{kind}_vision_model"}
    settings = {"model_type": kind, "text_config": text_settings, "vision_config": image_settings, "dtype": dtype}
    settings["architectures"] = ["SiglipModel" if naming.siglip else "CLIPModel"]
    return settings if naming.siglip else settings | {"projection_dim": text.features}


def build_tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json for transformers."""
    spec, kind = tokenizer.as_transformers(), "CLIPTokenizer" if tokenizer.splits else "PreTrainedTokenizerFast"
    config: dict[str, Any] = {"tokenizer_class": kind, "model_max_length": tokenizer.context}
    config |= {"pad_token": spec["padding"]["pad_token"], "padding_side": spec["padding"]["direction"].lower()}
    return {"tokenizer.json": spec, "tokenizer_config.json": config}


def list_tokenizer_notes(to: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return what a format does not store of a tokeniser."""
    if tokenizer is None:
        return []
    if to == "clip":
        return ["the format does not store the tokeniser: give it when loading"]
    return ["transformers does not clean texts as OpenCLIP does"] if tokenizer.clean != "none" else []


def compare_text(read: TwoTowersConfig, wanted: TwoTowersConfig) -> list[str]:
    """Return the facts of a text tower that were read otherwise."""
    one, other = read.text, wanted.text
    facts = {
        f"{other.size.heads} heads": one.size == other.size,
        type(other.block.mlp).__name__: one.block.mlp == other.block.mlp,
        f"eps {other.eps:g}": one.eps == other.eps,
        str(other.pool): one.pool == other.pool,
    }
    return [fact for fact, same in facts.items() if not same]


def collect_assumptions(config: TwoTowersConfig) -> dict[str, Any]:
    """Return the facts of the text tower that tensors do not determine."""
    text = config.text
    facts = {"heads": text.size.heads, "gelu": GELU_NAMES.get(text.block.mlp), "eps": text.eps}
    if isinstance(text.pool, EndOfText):
        facts["token"] = text.pool.token
    return {TEXT + name: value for name, value in facts.items() if value is not None}


def _make_format(naming: TowersNaming) -> CheckpointFormat:
    return CheckpointFormat(
        naming.name,
        naming.title,
        naming.required,
        partial(read_config, naming=naming),
        lambda config, root: build_table(config, naming),
        partial(default_preprocessing, naming=naming),
        parse_settings=partial(parse_settings, naming=naming),
    )


FORMATS = tuple(map(_make_format, NAMINGS))
