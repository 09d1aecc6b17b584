"""Key tables and configuration files of the Audio Spectrogram Transformer (Gong et al. 2021), as transformers' `AST…` has them.

A Vision Transformer of spectrograms, [1, mel bins, frames]: overlapping patches, class and distillation token, whose mean is
pooled, and a LayerNorm before the classifier. transformers has one number of frames per model. Other numbers follow the authors'
code: positions are cut from the middle, or interpolated linearly where there are more than before.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, transformers
from vitrail.checkpoints.keys import KeyTable, Rules
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import Preprocessing, sound_preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear, NormLinear
from vitrail.nn.pool import OutputMean
from vitrail.nn.position import Learned1D

TITLE, MODEL_TYPE = "transformers' AST", "audio-spectrogram-transformer"
ROOT, PATCHES = "audio_spectrogram_transformer.", "embeddings.patch_embeddings.projection"
EXTRACTOR = "ASTFeatureExtractor"
MEL_BINS, FRAMES, STRIDE = 128, 1024, 10  # of the published models
MEAN, STD = -4.2677393, 4.5689974  # of AudioSet; values are divided by twice the standard deviation

# The names of a layer's modules: in files, and in the code of transformers 5, as `torch.save(model.state_dict())` writes them.
FILES = {
    "layer": "encoder.layer.#.",
    "qkv": "attention.attention.query.|attention.attention.key.|attention.attention.value.",
    "out": "attention.output.dense.",
    "fc1": "intermediate.dense.",
    "fc2": "output.dense.",
}
MODULES = {
    "layer": "layers.#.",
    "qkv": "attention.q_proj.|attention.k_proj.|attention.v_proj.",
    "out": "attention.o_proj.",
    "fc1": "mlp.fc1.",
    "fc2": "mlp.fc2.",
}


def has_classifier(config: TokenConfig) -> bool:
    """Return whether a model has the classifier's tensors, of which a model without classes has the norm."""
    return config.classes is not None or isinstance(config.head, NormLinear)


def build_table(config: TokenConfig, root: str | None = None, names: Mapping[str, str] = FILES) -> KeyTable:
    """Return the table of a classifier, or of the body of a configuration without one."""
    root = (ROOT if has_classifier(config) else "") if root is None else root
    layer, embeddings = f"{root}{names['layer']}", f"{root}embeddings."
    patch, inner = formats.require_patches(TITLE, config, overlaps=True), config.size.heads * config.shape.head_width
    parts, rows = [f"{layer}{part}" for part in names["qkv"].split("|")], keys.concatenate(0, [inner] * 3)
    tokens = (f"{embeddings}cls_token", f"{embeddings}distillation_token")
    rules: Rules = {
        "embed.projection.weight": (f"{root}{PATCHES}.weight", keys.flatten_patches(config.channels, patch)),
        "embed.projection.bias": f"{root}{PATCHES}.bias",
        "prefix.outputs": (tokens, keys.concatenate(1, [1, 1])),
        "position.weight": f"{embeddings}position_embeddings",
        "blocks.#.norm1.*": f"{layer}layernorm_before.*",
        "blocks.#.msa.qkv.weight": (tuple(f"{part}weight" for part in parts), rows),
        "?blocks.#.msa.qkv.bias": (tuple(f"{part}bias" for part in parts), rows),
        "blocks.#.msa.out.*": f"{layer}{names['out']}*",
        "blocks.#.norm2.*": f"{layer}layernorm_after.*",
        "blocks.#.mlp.fc1.*": f"{layer}{names['fc1']}*",
        "blocks.#.mlp.fc2.*": f"{layer}{names['fc2']}*",
        "pool.norm.*": f"{root}layernorm.*",
        "?head.pre_logits.*": "classifier.layernorm.*",
        "?head.linear.*": "classifier.dense.*",
    }
    return keys.map_tensors(TITLE, config, rules)


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, modules: Mapping[str, str] = FILES) -> ViTConfig:
    """Return the configuration of an AST."""
    kind, where = assumptions.given.get("model_type", (MODEL_TYPE, ""))
    if kind != MODEL_TYPE:
        raise ValueError(f"{where} says that it is a {kind}")
    width, channels, patch, _ = names.patch_shape(f"{PATCHES}.weight")
    if channels != 1:
        raise ValueError(f"it reads {channels} channels, and a spectrogram has one")
    layer, why = modules["layer"].replace("#", "*"), "transformers' default for AST"
    outside = TensorNames(names.shapes)
    stride = assumptions.resolve("stride", min(STRIDE, patch), why)
    if not 1 <= stride <= patch:
        raise ValueError(f"stride must be 1 to the patch size {patch}, got {stride}")
    embed = Patches(patch, overlap=patch - stride)
    return ViTConfig(
        size=Size(
            names.count_layers(modules["layer"].replace("#", "{}")),
            width,
            names.layer_shape(f"{layer}{modules['fc1']}weight", 2)[0],
            assumptions.resolve_heads(width, TITLE),
        ),
        embed=embed,
        position=Learned1D(resampling=assumptions.resolve_resampling("ast", "the authors' code")),
        prefix=Prefix(2),
        block=PreNorm(
            mlp=assumptions.resolve_gelu("exact", why),
            qkv_bias=names.find(f"{layer}{modules['qkv'].split('|')[0]}bias") is not None,
        ),
        pool=OutputMean(),
        head=NormLinear() if "classifier.layernorm.weight" in outside else Linear(),
        classes=outside.output_dim("classifier.dense"),
        image_size=resolve_size(assumptions, names.shape("embeddings.position_embeddings", 3)[1] - 2, embed),
        channels=1,
        eps=assumptions.resolve("eps", 1e-12, why),
        init="deit",
    )


def resolve_size(assumptions: Assumptions, patches: int, embed: Patches) -> tuple[int, int]:
    """Return mel bins and frames: the given ones, or the published number of mel bins and the frames that fit positions."""
    rows = embed.grid_of((max(MEL_BINS, embed.patch), embed.patch))[0]
    published = embed.grid_of((MEL_BINS, FRAMES)) if embed.patch <= MEL_BINS else (0, 0)
    default = None
    if published[0] * published[1] == patches:
        default = (MEL_BINS, FRAMES)
    elif patches % rows == 0 and patches and "size" not in assumptions.given:
        default = (max(MEL_BINS, embed.patch), embed.patch + (patches // rows - 1) * embed.stride)
    size = assumptions.resolve("size", default, "the published mel bins, and the fewest frames of so many positions")
    grid = embed.grid_of(size)
    if grid[0] * grid[1] != patches:
        found = f"{size[0]} mel bins and {size[1]} frames have {grid[0]}×{grid[1]} patches"
        raise ValueError(
            f"{found}, and the checkpoint {patches} positions: give another assume={{'size': 'BINSxFRAMES'}}"
        )
    return size


def parse_settings(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of transformers' config.json, of models of sounds too."""
    config, facts = formats.get_object(settings, "config.json"), transformers.parse_settings(settings)
    if isinstance(config.get("model_type"), str):
        facts["model_type"] = (config["model_type"], "config.json")
    if facts.get("model_type", (MODEL_TYPE,))[0] != MODEL_TYPE:
        return facts
    numbers = {name: config.get(name) for name in ("num_mel_bins", "max_length", "frequency_stride", "time_stride")}
    numbers = {name: number for name, number in numbers.items() if type(number) is int and number > 0}
    if "num_mel_bins" in numbers and "max_length" in numbers:
        facts["size"] = ((numbers["num_mel_bins"], numbers["max_length"]), "config.json")
    if len(strides := {numbers[name] for name in numbers if name.endswith("stride")}) > 1:
        both = f"frequency_stride {numbers['frequency_stride']} and time_stride {numbers['time_stride']}"
        raise ValueError(f"{both} in config.json differ: only one stride is supported")
    if strides:
        facts["stride"] = (strides.pop(), "config.json")
    return facts


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the default of the feature extractor for this number of mel bins and frames."""
    bins, frames = config.image_size
    pipeline = sound_preprocessing(LogMel(mel_bins=bins), frames, MEAN, 2 * STD)
    return pipeline, "the default of transformers' AST feature extractor: AudioSet's mean and deviation"


EXAMPLE = {
    "embed": Patches(16, overlap=6),
    "pool": "output-mean",
    "head": "norm-linear",
    "channels": 1,
}


def _make_format(name: str, modules: Mapping[str, str]) -> CheckpointFormat:
    return CheckpointFormat(
        name,
        TITLE,
        (
            "embeddings.distillation_token",
            f"{modules['layer'].replace('#', '*')}layernorm_before.weight",
            f"{modules['layer'].replace('#', '*')}{modules['fc1']}weight",
            f"{PATCHES}.weight",
        ),
        partial(read_config, modules=modules),
        partial(build_table, names=modules),
        default_preprocessing,
        (ROOT, ""),
        parse_settings,
        EXAMPLE,
    )


FORMATS = (_make_format("transformers ast", FILES), _make_format("transformers ast modules", MODULES))


# --- writing ---


def is_ast(config: ModelConfig) -> bool:
    """Return whether a model is an AST for formats: it pools the mean of its output tokens."""
    return isinstance(getattr(config, "pool", None), OutputMean)


def list_limits(config: TokenConfig) -> Reasons:
    """Return why AST cannot express a model, apart from its tensor names."""
    embed = config.embed
    return {
        **formats.list_common_limits(config),
        "it takes spectrograms of one channel": config.channels != 1,
        "it has a class and a distillation token, and no registers": config.prefix != Prefix(2),
        "it pools the mean of both tokens": config.pool != OutputMean(),
        "its layers are pre-norm": type(config.block) is not PreNorm,
        "its patches have a bias and no norm": isinstance(embed, Patches) and (embed.normed or not embed.bias),
        "its classifier is a LayerNorm and a linear layer": config.classes is not None
        and not isinstance(config.head, NormLinear),
        "it has no projection": not isinstance(config.head, Linear | NormLinear),
    }


def build_settings(config: TokenConfig, dtype: str) -> dict[str, Any]:
    """Return what transformers' config.json says of the model."""
    body = "ForAudioClassification" if has_classifier(config) else "Model"
    settings = {
        "architectures": [f"AST{body}"],
        "model_type": MODEL_TYPE,
        **transformers.build_common_settings(config, dtype),
        "intermediate_size": config.size.mlp,
        "qkv_bias": config.block.qkv_bias,
        "num_mel_bins": config.image_size[0],
        "max_length": config.image_size[1],
        "frequency_stride": config.embed.stride,
        "time_stride": config.embed.stride,
    }
    if config.classes is None and has_classifier(config):  # no labels: the classifier is its norm
        settings |= {"id2label": {}, "label2id": {}}
    del settings["image_size"], settings["num_channels"]
    return settings


# --- the feature extractor ---


def parse_preprocessing(settings: dict[str, Any], size: tuple[int, int]) -> Preprocessing | None:
    """Return the features of preprocessor_config.json, as transformers computes them with NumPy: frames of 400 samples."""
    config = formats.get_object(settings, "preprocessor_config.json")
    if config.get("feature_extractor_type") != EXTRACTOR:
        return None
    try:
        sound = LogMel(int(config.get("sampling_rate", 16_000)), int(config.get("num_mel_bins", MEL_BINS)))
        mean, std = float(config.get("mean", MEAN)), 2 * float(config.get("std", STD))
        if config.get("do_normalize") is False:
            mean, std = 0.0, 1.0
        return sound_preprocessing(sound, int(config.get("max_length", size[1])), mean, std)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"unsupported preprocessor_config.json: {error}") from None


def build_extractor(pipeline: Preprocessing) -> dict[str, Any]:
    """Return preprocessor_config.json for the features of sounds; raise ValueError if transformers has no such features."""
    sound = pipeline.sound
    assert sound is not None
    default = LogMel()
    for name in ("frame_length", "frame_shift", "align"):
        if getattr(sound, name) != getattr(default, name):
            theirs = f"{name} is always {getattr(default, name)}, here {getattr(sound, name)}"
            raise ValueError(f"transformers cannot express these features of sounds: {theirs}")
    return {
        "feature_extractor_type": EXTRACTOR,
        "feature_size": 1,
        "sampling_rate": sound.sample_rate,
        "num_mel_bins": sound.mel_bins,
        "max_length": pipeline.size[1],
        "do_normalize": True,
        "mean": pipeline.mean[0],
        "std": pipeline.std[0] / 2,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
