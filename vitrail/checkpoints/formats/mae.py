"""Masked autoencoders with their decoder: Facebook's names, transformers' `ViTMAEForPreTraining`, and vitrail's own file.

The own file, `pretraining.safetensors`, is an artifact of the encoder that also holds the decoder's tensors, described in its
card. Loaded as a model, it is the encoder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.architecture import GELUS, TensorNames
from vitrail.checkpoints.artifact import CheckpointContract, check_bounds, save_artifact
from vitrail.checkpoints.checkpoint import ByteProgress, Checkpoint, is_finite, no_progress, open_and_detect
from vitrail.checkpoints.convert import (
    LOGIT_TOLERANCE,
    SAMPLE_IMAGE,
    ConversionReport,
    check_expressible,
    check_identical,
    check_output_name,
    collect_assumptions,
    prepare_image,
    write_weights_file,
)
from vitrail.checkpoints.convert import convert as convert_model
from vitrail.checkpoints.detect import Detection, account_tensors
from vitrail.checkpoints.formats import timm, transformers
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.io.source import checkpoint_error
from vitrail.checkpoints.keys import (
    KeyMapping,
    KeyTable,
    TensorTransform,
    add_root,
    build_meta_state,
    export_state,
    format_names,
    map_key,
    map_layer,
    select_mappings,
)
from vitrail.checkpoints.load import KEEP, SkipInit, assemble_model, resolve_path
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_learned_positions, with_positions_for
from vitrail.models.base import TokenConfig, TokenModel
from vitrail.models.mae_decoder import Decoder, PixelDecoder, reconstruct_patches
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.mlp import GELU
from vitrail.nn.pool import ClassToken
from vitrail.utils.files import stage_output
from vitrail.utils.json import dataclass_from_json, to_json

DECODER_PREFIX = "decoder."  # of the decoder's tensors in vitrail's own file
CARD_KEY = "pretraining"  # in the card of vitrail's own file
DECODER_FORMATS = ("vitrail", "timm", "hf")  # that can hold a decoder; `timm` has Facebook's names


@dataclass
class Autoencoder:
    """An encoder, its decoder, and their training settings: the arguments of `objectives.mae.MAE`."""

    model: TokenModel
    decoder: PixelDecoder
    mask_ratio: float = 0.75
    norm_pix: bool = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor under our names."""
        decoder = {DECODER_PREFIX + name: tensor for name, tensor in self.decoder.state_dict().items()}
        return {**self.model.state_dict(), **decoder}


# --- the key table ---


@dataclass(frozen=True)
class DecoderNaming:
    """The names that a format gives to the parts of a decoder."""

    root: str  # before everything of the decoder but the mask token
    mask_token: str
    layers: str
    encoder_layers: str  # before the layers of an encoder in the same format
    mlp: str  # the first matrix of a layer's MLP


FACEBOOK = DecoderNaming("decoder_", "mask_token", "decoder_blocks.", "blocks.", "mlp.fc1")
HUGGING_FACE = DecoderNaming(
    "decoder.decoder_", "decoder.mask_token", "decoder.decoder_layers.", "encoder.layer.", "intermediate.dense"
)
# The names that version 5 of transformers writes; it reads both.
HUGGING_FACE_V5 = replace(HUGGING_FACE, layers="decoder.decoder_encoder.layer.")
DECODER_NAMINGS = {"timm": FACEBOOK, "hf": HUGGING_FACE}


def map_autoencoder(config: TokenConfig, spec: Decoder, naming: DecoderNaming) -> KeyTable:
    """Return the key table of encoder and decoder in a format; our names are those of `Autoencoder.state_dict`."""
    facebook = naming is FACEBOOK
    encoder = timm.map_vit(config) if facebook else transformers.map_vit(config, "vit", "vit.")
    assert spec.width is not None and spec.mlp is not None and spec.heads is not None  # noqa: PT018
    # The layers have the names that an encoder of the decoder's size would have.
    block = PreNorm(mlp=config.block.mlp, qkv_bias=config.block.qkv_bias)
    twin = ViTConfig(size=Size(spec.depth, spec.width, spec.mlp, spec.heads), block=block, classes=None)
    layers = [
        KeyMapping(
            tuple(DECODER_PREFIX + name for name in entry.ours),
            tuple(naming.layers + name.removeprefix(naming.encoder_layers) for name in entry.theirs),
            entry.transform,
        )
        for entry in select_mappings(timm.map_vit(twin) if facebook else transformers.map_vit(twin, "vit", ""))
        if entry.ours[0].startswith("blocks.")
    ]
    out = naming.root
    return [
        *select_mappings(encoder),
        map_key(f"{DECODER_PREFIX}mask_token", naming.mask_token),
        map_key(f"{DECODER_PREFIX}position", f"{out}pos_embed"),
        *map_layer(f"{DECODER_PREFIX}embed", f"{out}embed"),
        *layers,
        *map_layer(f"{DECODER_PREFIX}norm", f"{out}norm"),
        *map_layer(f"{DECODER_PREFIX}pred", f"{out}pred", reorder_pixels(config.channels, config.embed.stride)),
    ]


def reorder_pixels(channels: int, patch: int) -> TensorTransform:
    """Return the transform from values pixel by pixel (theirs) to channel by channel (ours), along the first dimension."""
    return TensorTransform(
        read=lambda t: [t[0].unflatten(0, (patch, patch, channels)).movedim(2, 0).flatten(0, 2).contiguous()],
        write=lambda o: [o[0].unflatten(0, (channels, patch, patch)).movedim(0, 2).flatten(0, 2).contiguous()],
    )


def build_autoencoder_meta_state(config: TokenConfig, spec: Decoder) -> dict[str, Tensor]:
    """Return every tensor of encoder and decoder on the meta device."""
    decoder = build_meta_decoder(config, spec).state_dict()
    return {**build_meta_state(config), **{DECODER_PREFIX + name: tensor for name, tensor in decoder.items()}}


def build_meta_decoder(config: TokenConfig, spec: Decoder) -> PixelDecoder:
    with torch.device("meta"), SkipInit():
        return PixelDecoder(config, spec)


# --- reading ---


def read_mae(
    path: str | Path,
    *,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    decoder_heads: int | None = None,
    norm_pix: bool | None = None,
    progress: ByteProgress = no_progress,
) -> Autoencoder:
    """Read a masked autoencoder from Facebook's file, transformers' directory or `pretraining.safetensors`.

    Facebook's files record neither the decoder's heads (default: 32 values each) nor `norm_pix` (default: True).
    """
    with open_and_detect(resolve_path(path), assume, take) as checkpoint:
        detected = detect_decoder(checkpoint, decoder_heads)
        if norm_pix is not None:
            detected = replace(detected, norm_pix=norm_pix)
        state = replace(checkpoint, detection=detected.detection).read_state(progress=progress)
    contract, decoder = checkpoint.contract, build_meta_decoder(detected.config, detected.decoder)
    ours = {n.removeprefix(DECODER_PREFIX): t.float() for n, t in state.items() if n.startswith(DECODER_PREFIX)}
    decoder.load_state_dict(ours, assign=True)
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith(DECODER_PREFIX)}
    model = assemble_model(contract, encoder, torch.float32).tokens_for("a masked autoencoder")
    return Autoencoder(model, decoder.eval(), detected.mask_ratio, detected.norm_pix)


@dataclass(frozen=True)
class DecoderDetection:
    """A detected checkpoint with a decoder, with every tensor accounted for."""

    config: TokenConfig
    decoder: Decoder
    mask_ratio: float
    norm_pix: bool
    detection: Detection


def detect_decoder(checkpoint: Checkpoint, decoder_heads: int | None = None) -> DecoderDetection:
    """Detect the decoder of a checkpoint; raise if it has none."""
    detection, path = checkpoint.detection, checkpoint.source.path
    shapes = {name: spec.shape for name, spec in checkpoint.source.specs.items()}
    if not has_decoder(checkpoint) or not isinstance(detection.config, ViTConfig):
        raise checkpoint_error(path, "it has no MAE decoder: load the encoder with vitrail.load")
    config = detection.config
    try:
        if detection.format == "vitrail":
            if decoder_heads is not None:
                raise ValueError("the file records the heads of its decoder: leave out decoder_heads")
            decoder, mask, norm_pix = read_decoder_card(checkpoint.contract, config)
            table: KeyTable = [map_key(name, name) for name in build_autoencoder_meta_state(config, decoder)]
        else:
            naming = FACEBOOK if detection.format == "timm" else HUGGING_FACE
            wrapper = detection.root if naming is FACEBOOK else detection.root.removesuffix("vit.")
            if naming is HUGGING_FACE and TensorNames(shapes, wrapper).find(f"{HUGGING_FACE_V5.layers}*"):
                naming = HUGGING_FACE_V5
            settings = checkpoint.source.settings.get("config.json")
            settings = settings if isinstance(settings, dict) else {}
            decoder = read_decoder_config(TensorNames(shapes, wrapper), config, naming, decoder_heads, settings)
            mask = _check_mask_ratio(settings.get("mask_ratio", 0.75))
            norm_pix = bool(settings.get("norm_pix_loss", naming is FACEBOOK))  # transformers' default is False
            table = add_root(map_autoencoder(config, decoder, naming), wrapper)
        with torch.device("meta"):
            exported = export_state(table, build_autoencoder_meta_state(config, decoder))
            wanted = {name: tuple(tensor.shape) for name, tensor in exported.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise checkpoint_error(path, f"cannot read its decoder: {error}") from None
    detection = replace(detection, table=table, **account_tensors(wanted, shapes))
    return DecoderDetection(config, decoder, mask, norm_pix, detection)


def has_decoder(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds a decoder."""
    marks = {"vitrail": f"{DECODER_PREFIX}embed.weight", "timm": "decoder_embed.weight"}
    mark = marks.get(checkpoint.detection.format, "decoder.decoder_embed.weight")
    root = checkpoint.detection.root
    return any(name in checkpoint.source.specs for name in (root + mark, root.removesuffix("vit.") + mark))


def read_decoder_config(
    names: TensorNames, config: TokenConfig, naming: DecoderNaming, heads: int | None, settings: Mapping[str, Any]
) -> Decoder:
    """Return the decoder of another project's checkpoint, from its shapes and settings."""
    width = names.shape(f"{naming.root}embed.weight", 2)[0]
    mlp = names.layer_shape(f"{naming.layers}*.{naming.mlp}.weight", 2)[0]
    default = settings.get("decoder_num_attention_heads", width // 32 if width % 32 == 0 else None)
    heads = default if heads is None else heads
    if type(heads) is not int:
        raise ValueError(f"the heads of its decoder of width {width} are not recorded: give decoder_heads")
    return Decoder(names.count_layers(naming.layers + "{}."), width, heads, mlp).fill_sizes(config)


def read_decoder_card(contract: CheckpointContract, config: TokenConfig) -> tuple[Decoder, float, bool]:
    """Return the decoder, mask ratio and norm_pix in the card of vitrail's own file."""
    card = contract.card.get(CARD_KEY)
    if not isinstance(card, dict) or card.get("method") != "mae":
        raise ValueError("its card has no description of the decoder")
    check_bounds(card.get("decoder"), "decoder")
    decoder = dataclass_from_json(card.get("decoder"), Decoder, "decoder").fill_sizes(config)
    if type(card.get("norm_pix")) is not bool:
        raise ValueError(f"norm_pix must be true or false, got {card.get('norm_pix')!r}")
    return decoder, _check_mask_ratio(card.get("mask")), card["norm_pix"]


def _check_mask_ratio(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"the mask ratio must be between 0 and 1, got {value!r}")
    return float(value)


# --- writing ---


def write_mae(
    autoencoder: Autoencoder, out: str | Path, to: str, *, image_path: Path = SAMPLE_IMAGE
) -> ConversionReport:
    """Write a masked autoencoder in one of `DECODER_FORMATS`, after reading it back and comparing it.

    `hf` is a directory for transformers' `ViTMAEForPreTraining`, `timm` a file with Facebook's names, `vitrail` our own.
    """
    if to not in DECODER_FORMATS:
        raise ValueError(f"{to!r} does not store a decoder: use {', '.join(DECODER_FORMATS)}")
    out, model = Path(out), autoencoder.model
    assert isinstance(model.preprocessing, Preprocessing | None)
    contract = CheckpointContract(model.config, None, model.preprocessing, dict(model.card))
    state, notes = autoencoder.state_dict(), []
    check_output_name(to, out)
    check_autoencoder_state(state, autoencoder)
    if to != "vitrail":
        config, state = restate_autoencoder(model.config, state)
        reasons = list_mae_unsupported(config)
        if reasons:
            raise ValueError(f"published masked autoencoders cannot express this model: {'; '.join(reasons)}")
        check_expressible(to, config, contract.preprocessing)
        notes = list_unrecorded(model.config, config, autoencoder, to)
        contract = replace(contract, config=config)
    with stage_output(out) as path:
        write_files(path, state, contract, autoencoder, to)
        assume = {} if to == "vitrail" else collect_assumptions(contract.config)
        heads = None if to == "vitrail" else autoencoder.decoder.spec.heads
        back = read_mae(path, assume=assume, decoder_heads=heads, norm_pix=autoencoder.norm_pix)
        check_identical(path, state, back.state_dict())
        image = prepare_image(image_path, contract)
        expected, outputs = predict_hidden_patches(autoencoder, image), predict_hidden_patches(back, image)
        report = ConversionReport(
            out,
            to,
            len(state),
            sum(tensor.numel() * tensor.element_size() for tensor in state.values()),
            float(expected.abs().max()),
            float((expected - outputs).abs().max()),
            notes,
            compared="hidden patches",
        )
        if not report.largest_difference <= LOGIT_TOLERANCE * max(1.0, report.largest_logit):
            raise ValueError(f"not written: read back, the hidden patches differ by {report.largest_difference:.3g}")
    return report


def write_files(
    path: Path, state: Mapping[str, Tensor], contract: CheckpointContract, autoencoder: Autoencoder, to: str
) -> None:
    """Write the files of a format."""
    spec = autoencoder.decoder.spec
    assert isinstance(contract.config, ViTConfig)
    if to == "vitrail":
        card = {
            "method": "mae",
            "decoder": to_json(spec),
            "mask": autoencoder.mask_ratio,
            "norm_pix": autoencoder.norm_pix,
        }
        save_artifact(path, state, replace(contract, card={**contract.card, CARD_KEY: card}))
        return
    theirs = export_state(map_autoencoder(contract.config, spec, DECODER_NAMINGS[to]), state)
    if to == "timm":
        write_weights_file(path, theirs, contract)
        return
    path.mkdir()
    safetensors.save_safetensors(path / "model.safetensors", theirs, {"format": "pt"})
    files = transformers.build_settings(contract.config, None, contract.preprocessing, "float32")
    files["config.json"] |= {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "decoder_hidden_size": spec.width,
        "decoder_num_hidden_layers": spec.depth,
        "decoder_num_attention_heads": spec.heads,
        "decoder_intermediate_size": spec.mlp,
        "mask_ratio": autoencoder.mask_ratio,
        "norm_pix_loss": autoencoder.norm_pix,
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_autoencoder_state(state: Mapping[str, Tensor], autoencoder: Autoencoder) -> None:
    """Raise unless the tensors are those of the configurations and finite, so that a saved file can be loaded."""
    wanted = build_autoencoder_meta_state(autoencoder.model.config, autoencoder.decoder.spec)
    differ = [n for n in {*wanted, *state} if n not in wanted or n not in state or wanted[n].shape != state[n].shape]
    if differ:
        raise ValueError(f"not saved: the tensors differ from the configuration in {format_names(sorted(differ))}")
    if bad := [name for name, tensor in state.items() if not is_finite(tensor)]:
        raise ValueError(f"not saved: values that are not finite in {format_names(bad)}")


def restate_autoencoder(config: TokenConfig, state: dict[str, Tensor]) -> tuple[TokenConfig, dict[str, Tensor]]:
    """Return the model as published autoencoders are: fixed positions as a table, and pooling by the class token."""
    decoder = {name: tensor for name, tensor in state.items() if name.startswith(DECODER_PREFIX)}
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith(DECODER_PREFIX)}
    config, encoder = with_learned_positions(config, encoder)
    config, encoder = with_positions_for(config, encoder, "outputs")
    pool = ClassToken() if config.prefix.outputs else config.pool
    return replace(config, pool=pool), {**encoder, **decoder}


def list_mae_unsupported(config: TokenConfig) -> list[str]:
    """Return why no published format has such an autoencoder, apart from the reasons of `check_expressible`."""
    reasons = []
    if config.prefix.outputs != 1 or config.prefix.registers:
        reasons.append("they have a class token and no other prefix token")
    if config.image_size[0] != config.image_size[1]:
        reasons.append("their images are square")
    if isinstance(config.embed, Patches) and (config.embed.normed or not config.embed.bias):
        reasons.append("their patches have a bias and no norm")
    block = config.block
    plain = replace(block, mlp=GELU(), qkv_bias=True, attention_dropout=0.0) == PreNorm()
    if not plain or block.mlp not in GELUS.values():
        reasons.append("their layers are the paper's")
    if config.token_norm:
        reasons.append("they have no norm before the first layer")
    return reasons


def list_unrecorded(before: TokenConfig, after: TokenConfig, autoencoder: Autoencoder, to: str) -> list[str]:
    """Return notes on the facts that the format does not store."""
    notes = []
    if before.position != after.position:
        notes.append("fixed positions are written as a table")
    if before.pool != after.pool:
        notes.append("the format does not store mean pooling")
    if to == "timm":
        spec = autoencoder.decoder.spec
        notes.append(
            f"the file does not record {before.size.heads} heads, the decoder's {spec.heads}, "
            f"mask {autoencoder.mask_ratio:g} and norm_pix {autoencoder.norm_pix}: give them when loading"
        )
    return notes


@torch.inference_mode()
def predict_hidden_patches(autoencoder: Autoencoder, image: Tensor) -> Tensor:
    """Return the prediction of three quarters of an image's patches from every fourth patch."""
    patches = torch.arange(autoencoder.decoder.shape.patches).unsqueeze(0)
    model, decoder = autoencoder.model.eval(), autoencoder.decoder.eval()
    visible = patches % 4 == 0
    return reconstruct_patches(model, decoder, image, patches[visible].unsqueeze(0), patches[~visible].unsqueeze(0))


def convert_with_decoder(source: str | Path, out: str | Path, to: str, **options: Any) -> ConversionReport:
    """Convert as `vitrail.checkpoints.convert.convert` does; a decoder is converted too if the format stores one."""
    path = resolve_path(source)
    assume, take, licence = options.get("assume"), options.get("take"), options.get("licence")
    with open_and_detect(path, assume, take) as checkpoint:
        form = checkpoint.detection.format
        if not has_decoder(checkpoint):
            return convert_model(path, out, to, **options)
        ours, unread = form == "vitrail", explain_unreadable_decoder(checkpoint)
    changes = list_changes(options)
    if ours and changes and to in DECODER_FORMATS and to != "vitrail":
        raise ValueError(f"{path} holds a decoder: leave out {', '.join(changes)}, or convert the model without it")
    if why := explain_dropped_decoder(to, ours, changes, unread):
        report = convert_model(path, out, to, **options)
        report.notes.append(f"the decoder is left out: {why}")
        return report
    read = read_mae(path, assume=assume, take=take, progress=options.get("progress", no_progress))
    if licence is not None:
        read.model.card = {**read.model.card, "licence": licence}
    report = write_mae(read, out, to, image_path=options.get("image_path", SAMPLE_IMAGE))
    if form == "timm":  # Facebook's names
        heads = read.decoder.spec.heads
        report.notes.append(f"assumed, because the file does not record them: {heads} decoder heads, norm_pix True")
    return report


def list_changes(options: Mapping[str, Any]) -> list[str]:
    """Return the requested changes of the model that a decoder does not support."""
    defaults = {"classes": KEEP, "image_size": None, "channels": None, "labels": None, "adapter": None}
    return [name.replace("_", " ") for name, value in defaults.items() if options.get(name, value) is not value]


def explain_dropped_decoder(to: str, ours: bool, changes: list[str], unread: str | None) -> str | None:
    """Return why a decoder is not converted; None if it is."""
    if changes:
        return f"it does not support other {changes[0]}"
    if to not in DECODER_FORMATS:
        return f"{to} does not store one"
    # vitrail's own decoder is written with Facebook's names. A file that already has them is converted for timm itself.
    if to == "timm" and not ours:
        return "timm's own models have none; --to vitrail and --to hf keep it"
    return unread


def explain_unreadable_decoder(checkpoint: Checkpoint) -> str | None:
    """Return why the decoder of another project's file cannot be read; None if it can, or for vitrail's own file."""
    if checkpoint.detection.format == "vitrail":
        return None
    try:
        detection = detect_decoder(checkpoint).detection
    except ValueError as error:
        return str(error).removeprefix(f"{checkpoint.source.path}: ")
    odd = sorted({*detection.missing, *detection.unexpected, *detection.mismatched})
    return f"tensors that are missing or belong to no decoder: {format_names(odd)}" if odd else None
