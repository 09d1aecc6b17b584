"""Masked autoencoders with their decoder: Facebook's names, transformers' `ViTMAEForPreTraining`, and vitrail's own file; of
clips, VideoMAE's names and transformers' `VideoMAEForPreTraining` (`formats/videomae.py`).

The own file, `pretraining.safetensors`, is an artifact of the encoder that also holds the decoder's tensors, described in its
card. Loaded as a model, it is the encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import convert, keys, targets
from vitrail.checkpoints.artifact import CheckpointContract, check_bounds, save_artifact
from vitrail.checkpoints.checkpoint import ByteProgress, Checkpoint, no_progress, open_and_detect
from vitrail.checkpoints.detect import Detection, account_tensors
from vitrail.checkpoints.formats import GELUS, Reasons, TensorNames, get_object, timm, transformers, videomae
from vitrail.checkpoints.io.source import checkpoint_error
from vitrail.checkpoints.keys import KeyMapping, KeyTable
from vitrail.checkpoints.load import KEEP, SkipInit, assemble_model, check_state, resolve_path
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_learned_positions, with_positions_for
from vitrail.models.base import ModelConfig, State, TokenConfig, TokenModel
from vitrail.models.mae_decoder import Decoder, PixelDecoder, reconstruct_patches
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.mlp import GELU
from vitrail.nn.pool import ClassToken
from vitrail.utils.files import stage_output
from vitrail.utils.json import dataclass_from_json, to_json

DECODER_PREFIX = "decoder."  # of the decoder's tensors in vitrail's own file
CARD_KEY = "pretraining"  # in the card of vitrail's own file
DECODER_FORMATS = ("vitrail", "timm", "hf", "videomae")  # that can hold a decoder; `timm` has Facebook's names


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
CLIP_NAMINGS = {"hf": videomae.TRANSFORMERS, "videomae": videomae.RELEASE}
CLIP_FORMATS = {
    "transformers videomae": videomae.TRANSFORMERS,
    "transformers videomae modules": videomae.TRANSFORMERS_MODULES,
    "videomae": videomae.RELEASE,
}
INNER_ROOTS = ("vit.", "videomae.", "encoder.")  # of the encoder beside a decoder


def map_autoencoder(config: TokenConfig, spec: Decoder, naming: DecoderNaming | videomae.Naming) -> KeyTable:
    """Return the key table of encoder and decoder in a format; our names are those of `Autoencoder.state_dict`."""
    if isinstance(naming, videomae.Naming):
        root = naming.root or "encoder."
        encoder = keys.select_mappings(videomae.build_table(config, root, naming))
        return [*encoder, *videomae.map_decoder(config, spec, naming, DECODER_PREFIX)]

    def map_encoder(config: TokenConfig, root: str) -> list[KeyMapping]:
        facebook = naming is FACEBOOK
        return keys.select_mappings(timm.map_vit(config) if facebook else transformers.map_vit(config, "vit", root))

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
        for entry in map_encoder(twin, "")
        if entry.ours[0].startswith("blocks.")
    ]
    pixels = keys.reorder_patches(config.channels, config.embed.stride, dim=0)
    names = [f"{layer}.{part}" for layer in ("embed", "norm", "pred") for part in ("weight", "bias")]
    transforms = {"pred.weight": pixels, "pred.bias": pixels}
    return [
        *map_encoder(config, "vit."),
        keys.map_key(f"{DECODER_PREFIX}mask_token", naming.mask_token),
        keys.map_key(f"{DECODER_PREFIX}position", f"{naming.root}pos_embed"),
        *layers,
        *(keys.map_key(DECODER_PREFIX + n, naming.root + n, transforms.get(n, keys.IDENTITY)) for n in names),
    ]


def build_autoencoder_meta_state(config: TokenConfig, spec: Decoder) -> dict[str, Tensor]:
    """Return every tensor of encoder and decoder on the meta device."""
    decoder = build_meta_decoder(config, spec).state_dict()
    return {**keys.build_meta_state(config), **{DECODER_PREFIX + name: tensor for name, tensor in decoder.items()}}


def split_state(state: State) -> tuple[State, State]:
    """Return the tensors of the encoder and those of the decoder."""
    decoder = {name: tensor for name, tensor in state.items() if name.startswith(DECODER_PREFIX)}
    return {name: tensor for name, tensor in state.items() if name not in decoder}, decoder


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
        spec, mask, recorded_norm_pix, detection = detect_decoder(checkpoint, decoder_heads)
        state = replace(checkpoint, detection=detection).read_state(progress=progress)
    contract, (encoder, ours) = checkpoint.contract, split_state(state)
    decoder = build_meta_decoder(contract.config.require_tokens("a masked autoencoder", clips=True), spec)
    decoder.load_state_dict({n.removeprefix(DECODER_PREFIX): t.float() for n, t in ours.items()}, assign=True)
    model = assemble_model(contract, encoder, torch.float32).require_tokens("a masked autoencoder", clips=True)
    return Autoencoder(model, decoder.eval(), mask, recorded_norm_pix if norm_pix is None else norm_pix)


def detect_decoder(checkpoint: Checkpoint, decoder_heads: int | None = None) -> tuple[Decoder, float, bool, Detection]:
    """Return the decoder of a checkpoint, its mask ratio and norm_pix, and every tensor accounted for; raise if it has none."""
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
            table: KeyTable = [keys.map_key(name, name) for name in build_autoencoder_meta_state(config, decoder)]
        elif detection.format in CLIP_FORMATS:
            clip_naming, wrapper = CLIP_FORMATS[detection.format], remove_inner_root(detection.root)
            settings = get_object(checkpoint.source.settings, "config.json")
            names = TensorNames(shapes, wrapper)
            decoder = videomae.read_decoder(names, config, clip_naming, decoder_heads, settings)
            mask, norm_pix = 0.9, bool(settings.get("norm_pix_loss", True))
            table = keys.add_root(map_autoencoder(config, decoder, clip_naming), wrapper)
        else:
            naming = FACEBOOK if detection.format == "timm" else HUGGING_FACE
            wrapper = detection.root if naming is FACEBOOK else detection.root.removesuffix("vit.")
            if naming is HUGGING_FACE and TensorNames(shapes, wrapper).find(f"{HUGGING_FACE_V5.layers}*"):
                naming = HUGGING_FACE_V5
            settings = get_object(checkpoint.source.settings, "config.json")
            decoder = read_decoder_config(TensorNames(shapes, wrapper), config, naming, decoder_heads, settings)
            mask = _check_mask_ratio(settings.get("mask_ratio", 0.75))
            norm_pix = bool(settings.get("norm_pix_loss", naming is FACEBOOK))  # transformers' default is False
            table = keys.add_root(map_autoencoder(config, decoder, naming), wrapper)
        with torch.device("meta"):
            exported = keys.export_state(table, build_autoencoder_meta_state(config, decoder))
            wanted = {name: tuple(tensor.shape) for name, tensor in exported.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise checkpoint_error(path, f"cannot read its decoder: {error}") from None
    return decoder, mask, norm_pix, replace(detection, table=table, **account_tensors(wanted, shapes))


def has_decoder(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds a decoder."""
    marks = {"vitrail": f"{DECODER_PREFIX}embed.weight", "timm": "decoder_embed.weight"}
    marks |= dict.fromkeys(CLIP_FORMATS, "encoder_to_decoder.weight")
    mark = marks.get(checkpoint.detection.format, "decoder.decoder_embed.weight")
    root = checkpoint.detection.root
    return any(name in checkpoint.source.specs for name in (root + mark, remove_inner_root(root) + mark))


def remove_inner_root(root: str) -> str:
    """Return the prefix of all names, from that of the encoder's."""
    return root.removesuffix(next((inner for inner in INNER_ROOTS if root.endswith(inner)), ""))


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
    if not isinstance(card, dict) or card.get("method") != choose_method(config):
        raise ValueError("its card has no description of the decoder")
    check_bounds(card.get("decoder"), "decoder")
    decoder = dataclass_from_json(card.get("decoder"), Decoder, "decoder").fill_sizes(config)
    if type(card.get("norm_pix")) is not bool:
        raise ValueError(f"norm_pix must be true or false, got {card.get('norm_pix')!r}")
    return decoder, _check_mask_ratio(card.get("mask")), card["norm_pix"]


def choose_method(config: ModelConfig) -> str:
    """Return the name of the pre-training method of a model of images or of clips."""
    return "mae" if config.frames is None else "videomae"


def _check_mask_ratio(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"the mask ratio must be between 0 and 1, got {value!r}")
    return float(value)


# --- writing ---


def write_mae(
    autoencoder: Autoencoder, out: str | Path, to: str, *, image_path: Path = convert.SAMPLE_IMAGE
) -> convert.ConversionReport:
    """Write a masked autoencoder in one of `DECODER_FORMATS`, after reading it back and comparing it.

    `hf` is a directory for transformers' `ViTMAEForPreTraining`, `timm` a file with Facebook's names, `vitrail` our own.
    """
    if to not in DECODER_FORMATS:
        raise ValueError(f"{to!r} does not store a decoder: use {', '.join(DECODER_FORMATS)}")
    out, model = Path(out), autoencoder.model
    assert isinstance(model.preprocessing, Preprocessing | None)
    contract = CheckpointContract(model.config, None, model.preprocessing, dict(model.card))
    state, notes = autoencoder.state_dict(), []
    targets.check_output_name(to, out)
    check_state(state, build_autoencoder_meta_state(model.config, autoencoder.decoder.spec))
    if to != "vitrail" and model.config.frames is not None:
        targets.check_expressible(to, model.config, contract.preprocessing)
        if to not in CLIP_NAMINGS:
            raise ValueError(f"{to!r} does not store the decoder of clips: use vitrail, {', '.join(CLIP_NAMINGS)}")
        notes = list_unrecorded(model.config, model.config, autoencoder, to)
    elif to != "vitrail":
        config, state = restate_autoencoder(model.config, state)
        if reasons := [reason for reason, holds in list_mae_limits(config).items() if holds]:
            raise ValueError(f"published masked autoencoders cannot express this model: {'; '.join(reasons)}")
        targets.check_expressible(to, config, contract.preprocessing)
        notes = convert.compare_resampling(model.config, "transformers", "MAE's code")
        notes += list_unrecorded(model.config, config, autoencoder, to)
        contract = replace(contract, config=config)
    with stage_output(out) as path:
        write_files(path, state, contract, autoencoder, to)
        assume = {} if to == "vitrail" else convert.collect_assumptions(contract.config)
        heads = None if to == "vitrail" else autoencoder.decoder.spec.heads
        back = read_mae(path, assume=assume, decoder_heads=heads, norm_pix=autoencoder.norm_pix)
        convert.check_identical(path, state, back.state_dict())
        image = convert.prepare_image(image_path, contract)
        expected, outputs = predict_hidden_patches(autoencoder, image), predict_hidden_patches(back, image)
        return convert.report_conversion(out, to, state, expected, outputs, notes, "hidden patches")


def write_files(path: Path, state: State, contract: CheckpointContract, autoencoder: Autoencoder, to: str) -> None:
    """Write the files of a format."""
    spec = autoencoder.decoder.spec
    assert isinstance(contract.config, TokenConfig)
    if to == "vitrail":
        settings = {"mask": autoencoder.mask_ratio, "norm_pix": autoencoder.norm_pix}
        card = {"method": choose_method(contract.config), "decoder": to_json(spec), **settings}
        save_artifact(path, state, replace(contract, card={**contract.card, CARD_KEY: card}))
        return
    namings = DECODER_NAMINGS if contract.config.frames is None else CLIP_NAMINGS
    theirs = keys.export_state(map_autoencoder(contract.config, spec, namings[to]), state)
    if to != "hf":
        targets.write_weights_file(path, theirs, contract)
        return
    if contract.config.frames is not None:
        more = videomae.build_decoder_settings(spec, autoencoder.norm_pix)
        targets.write_transformers_directory(path, theirs, contract, more)
        return
    more = {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "decoder_hidden_size": spec.width,
        "decoder_num_hidden_layers": spec.depth,
        "decoder_num_attention_heads": spec.heads,
        "decoder_intermediate_size": spec.mlp,
        "mask_ratio": autoencoder.mask_ratio,
        "norm_pix_loss": autoencoder.norm_pix,
    }
    targets.write_transformers_directory(path, theirs, contract, more)


def restate_autoencoder(config: TokenConfig, state: State) -> tuple[TokenConfig, State]:
    """Return the model as published autoencoders are: fixed positions as a table, and pooling by the class token."""
    encoder, decoder = split_state(state)
    config, encoder = with_learned_positions(config, encoder)
    config, encoder = with_positions_for(config, encoder, "outputs")
    pool = ClassToken() if config.prefix.outputs else config.pool
    return replace(config, pool=pool), {**encoder, **decoder}


def list_mae_limits(config: TokenConfig) -> Reasons:
    """Return why no published format has such an autoencoder, apart from the reasons of `check_expressible`."""
    embed, block = config.embed, config.block
    plain = replace(block, mlp=GELU(), qkv_bias=True, attention_dropout=0.0) == PreNorm()
    return {
        "they have a class token and no other prefix token": config.prefix != Prefix(1),
        "their images are square": config.image_size[0] != config.image_size[1],
        "their patches have a bias and no norm": isinstance(embed, Patches) and (embed.normed or not embed.bias),
        "their layers are the paper's": not plain or block.mlp not in GELUS.values(),
        "they have no norm before the first layer": config.token_norm,
    }


def list_unrecorded(before: TokenConfig, after: TokenConfig, autoencoder: Autoencoder, to: str) -> list[str]:
    """Return notes on the facts that the format does not store."""
    notes = []
    if before.position != after.position:
        notes.append("fixed positions are written as a table")
    if before.pool != after.pool:
        notes.append("the format does not store mean pooling")
    spec = autoencoder.decoder.spec
    if to == "hf" and before.frames is not None and (spec.norm_eps or before.eps) != videomae.TRANSFORMERS.mean_eps:
        notes.append(f"transformers has an eps of {videomae.TRANSFORMERS.mean_eps:g} in the decoder's last norm")
    if to != "hf":
        heads = f"{before.size.heads} heads, the decoder's {spec.heads}"
        settings = f"mask {autoencoder.mask_ratio:g} and norm_pix {autoencoder.norm_pix}"
        notes.append(f"the file does not record {heads}, {settings}: give them when loading")
    return notes


@torch.inference_mode()
def predict_hidden_patches(autoencoder: Autoencoder, image: Tensor) -> Tensor:
    """Return the prediction of three quarters of an image's patches from every fourth patch."""
    patches = torch.arange(autoencoder.decoder.shape.patches).unsqueeze(0)
    model, decoder = autoencoder.model.eval(), autoencoder.decoder.eval()
    visible = patches % 4 == 0
    return reconstruct_patches(model, decoder, image, patches[visible].unsqueeze(0), patches[~visible].unsqueeze(0))


def convert_with_decoder(source: str | Path, out: str | Path, to: str, **options: Any) -> convert.ConversionReport:
    """Convert as `vitrail.checkpoints.convert.convert` does; a decoder is converted too if the format stores one."""
    path, licence = resolve_path(source), options.get("licence")
    selection: dict[str, Any] = {name: options.get(name) for name in ("assume", "take")}
    if options.get("text_tower"):
        return convert.convert(source, out, to, **options)
    with open_and_detect(path, **selection) as checkpoint:
        form = checkpoint.detection.format
        if not has_decoder(checkpoint):
            return convert.convert(path, out, to, **options)
        ours, unread = form == "vitrail", explain_unreadable_decoder(checkpoint)
    defaults = {"classes": KEEP, "image_size": None, "channels": None, "labels": None, "stuff": None, "adapter": None}
    defaults |= {"interpolate": None}
    changes = [name.replace("_", " ") for name, value in defaults.items() if options.get(name, value) is not value]
    if ours and changes and to in DECODER_FORMATS and to != "vitrail":
        raise ValueError(f"{path} holds a decoder: leave out {', '.join(changes)}, or convert the model without it")
    if why := explain_dropped_decoder(to, ours, changes, unread):
        report = convert.convert(path, out, to, **options)
        report.notes.append(f"the decoder is left out: {why}")
        return report
    read = read_mae(path, **selection, progress=options.get("progress", no_progress))
    if licence is not None:
        read.model.card = {**read.model.card, "licence": licence}
    report = write_mae(read, out, to, image_path=options.get("image_path", convert.SAMPLE_IMAGE))
    if form in ("timm", "videomae"):  # the names of the releases
        heads = read.decoder.spec.heads
        report.notes.append(f"assumed, because the file does not record them: {heads} decoder heads, norm_pix True")
    return report


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
        *_, detection = detect_decoder(checkpoint)
    except ValueError as error:
        return str(error).removeprefix(f"{checkpoint.source.path}: ")
    odd = sorted({*detection.missing, *detection.unexpected, *detection.mismatched})
    return f"tensors that are missing or belong to no decoder: {keys.format_names(odd)}" if odd else None
