"""Masked autoencoders whole, decoder included: Facebook's names, transformers' `ViTMAEForPreTraining`, and our own file.

Our own, `pretraining.safetensors`, is an artifact whose model is the encoder, with the decoder's tensors beside it and a word
in its card about what they are. Whoever loads it as a model gets the encoder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import timm, transformers
from vitrail.checkpoints.artifact import Contract, check_bounds, save_artifact
from vitrail.checkpoints.checkpoint import Checkpoint, Progress, finite, no_progress, open_and_recognise
from vitrail.checkpoints.convert import (
    PHOTOGRAPH,
    TOLERANCE,
    Proof,
    check_name,
    expressible,
    prepared,
    same_bits,
    untold,
    write_file,
)
from vitrail.checkpoints.convert import convert as convert_model
from vitrail.checkpoints.files import safetensors
from vitrail.checkpoints.files.atomic import staged
from vitrail.checkpoints.files.source import refuse
from vitrail.checkpoints.keys import Change, Key, Table, both, key, keys_of, layout, rooted, some, write
from vitrail.checkpoints.loading import KEEP, Unbegun, assembled, resolve
from vitrail.checkpoints.look import GELUS, Names, Shapes
from vitrail.checkpoints.recognise import Reading
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_learned_positions, with_positions_for
from vitrail.models.decoder import Decoder, PixelDecoder, painted
from vitrail.models.sizes import Size
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import dataclass_from_json, to_json
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.mlp import GELU
from vitrail.nn.pool import ClassToken

OURS = "decoder."  # before the names of the decoder's tensors, in our own file
CARD = "pretraining"  # in the card of our own file
FORMS = ("vitrail", "timm", "hf")  # that can hold a decoder: `timm` are Facebook's names


@dataclass
class Autoencoder:
    """An encoder and its decoder, and what they were trained with. `objectives.mae.MAE(mask, norm_pix, decoder.spec)`
    makes a task of them."""

    model: ViT
    decoder: PixelDecoder
    mask: float = 0.75
    norm_pix: bool = True

    def state(self) -> dict[str, Tensor]:
        """Every tensor under our names."""
        decoder = {OURS + name: tensor for name, tensor in self.decoder.state_dict().items()}
        return {**self.model.state_dict(), **decoder}


# --- the key table ---


@dataclass(frozen=True)
class Spelling:
    """What a form calls the parts of a decoder."""

    outside: str  # before everything of the decoder but the mask token
    mask_token: str
    layers: str
    twin: str  # before the layers of an encoder in the same form
    mlp: str  # the first matrix of a layer's MLP


FACEBOOK = Spelling("decoder_", "mask_token", "decoder_blocks.", "blocks.", "mlp.fc1")
HUGGING = Spelling(
    "decoder.decoder_", "decoder.mask_token", "decoder.decoder_layers.", "encoder.layer.", "intermediate.dense"
)
# What version 5 of transformers writes instead, and reads as well as the published names.
HUGGING5 = replace(HUGGING, layers="decoder.decoder_encoder.layer.")
SPELLINGS = {"timm": FACEBOOK, "hf": HUGGING}


def whole_table(config: ViTConfig, spec: Decoder, spelling: Spelling) -> Table:
    """Encoder and decoder in a form: our names are those of `Autoencoder.state`."""
    facebook = spelling is FACEBOOK
    encoder = timm.vit(config) if facebook else transformers.vit(config, "vit", "vit.")
    assert spec.width is not None
    assert spec.mlp is not None
    assert spec.heads is not None
    # The layers are named as an encoder of the decoder's size would name them.
    block = PreNorm(mlp=config.block.mlp, qkv_bias=config.block.qkv_bias)
    twin = ViTConfig(Size(spec.depth, spec.width, spec.mlp, spec.heads), block=block, classes=None)
    layers = [
        Key(
            tuple(OURS + name for name in entry.ours),
            tuple(spelling.layers + name.removeprefix(spelling.twin) for name in entry.theirs),
            entry.change,
        )
        for entry in keys_of(timm.vit(twin) if facebook else transformers.vit(twin, "vit", ""))
        if entry.ours[0].startswith("blocks.")
    ]
    out = spelling.outside
    return [
        *keys_of(encoder),
        key(f"{OURS}mask_token", spelling.mask_token),
        key(f"{OURS}position", f"{out}pos_embed"),
        *both(f"{OURS}embed", f"{out}embed"),
        *layers,
        *both(f"{OURS}norm", f"{out}norm"),
        *both(f"{OURS}pred", f"{out}pred", pixels_last(config.channels, config.embed.stride)),
    ]


def pixels_last(channels: int, patch: int) -> Change:
    """Values of a patch pixel by pixel (theirs) against channel by channel (ours), along the first dimension."""
    return Change(
        read=lambda t: [t[0].unflatten(0, (patch, patch, channels)).movedim(2, 0).flatten(0, 2).contiguous()],
        write=lambda o: [o[0].unflatten(0, (channels, patch, patch)).movedim(0, 2).flatten(0, 2).contiguous()],
    )


def whole_layout(config: ViTConfig, spec: Decoder) -> dict[str, Tensor]:
    """Every tensor of encoder and decoder, without values."""
    return {**layout(config), **{OURS + name: t for name, t in blank_decoder(config, spec).state_dict().items()}}


def blank_decoder(config: ViTConfig, spec: Decoder) -> PixelDecoder:
    with torch.device("meta"), Unbegun():
        return PixelDecoder(config, spec)


# --- reading ---


def read_mae(
    path: str | Path,
    *,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    decoder_heads: int | None = None,
    norm_pix: bool | None = None,
    progress: Progress = no_progress,
) -> Autoencoder:
    """A masked autoencoder from Facebook's file, transformers' directory or our own `pretraining.safetensors`.

    Facebook's files do not say how many heads the decoder has (32 values each unless told) nor whether pixels were
    normalised (they were unless told).
    """
    with open_and_recognise(resolve(path), assume, take) as checkpoint:
        found = described(checkpoint, decoder_heads)
        if norm_pix is not None:
            found = replace(found, norm_pix=norm_pix)
        state = replace(checkpoint, reading=found.reading).state(progress=progress)
    contract, decoder = checkpoint.contract, blank_decoder(found.config, found.decoder)
    ours = {n.removeprefix(OURS): t.float() for n, t in state.items() if n.startswith(OURS)}
    decoder.load_state_dict(ours, assign=True)
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith(OURS)}
    model = assembled(contract, encoder, torch.float32)
    assert isinstance(model, ViT)
    return Autoencoder(model, decoder.eval(), found.mask, found.norm_pix)


@dataclass(frozen=True)
class Described:
    """A checkpoint with a decoder, as it was recognised, with the account of every tensor."""

    config: ViTConfig
    decoder: Decoder
    mask: float
    norm_pix: bool
    reading: Reading


def described(checkpoint: Checkpoint, decoder_heads: int | None = None) -> Described:
    """What a checkpoint with a decoder holds; an error where there is none."""
    reading, path = checkpoint.reading, checkpoint.source.path
    shapes = {name: spec.shape for name, spec in checkpoint.source.specs.items()}
    if not has_decoder(checkpoint) or not isinstance(reading.config, ViTConfig):
        raise refuse(path, "there is no MAE decoder in it; an encoder alone is read by vitrail.load")
    config = reading.config
    try:
        if reading.form == "vitrail":
            if decoder_heads is not None:
                raise ValueError("it says itself how many heads its decoder has: leave out decoder_heads")
            decoder, mask, norm_pix = from_card(checkpoint.contract, config)
            table: Table = [key(name, name) for name in whole_layout(config, decoder)]
        else:
            spelling = FACEBOOK if reading.form == "timm" else HUGGING
            wrapper = reading.root if spelling is FACEBOOK else reading.root.removesuffix("vit.")
            if spelling is HUGGING and Names(shapes, wrapper).anywhere(f"{HUGGING5.layers}*"):
                spelling = HUGGING5
            settings = checkpoint.source.settings.get("config.json")
            settings = settings if isinstance(settings, dict) else {}
            decoder = look(Names(shapes, wrapper), config, spelling, decoder_heads, settings)
            mask = _share(settings.get("mask_ratio", 0.75))
            norm_pix = bool(settings.get("norm_pix_loss", spelling is FACEBOOK))  # transformers' default is without
            table = rooted(whole_table(config, decoder, spelling), wrapper)
        with torch.device("meta"):
            wanted = {n: tuple(t.shape) for n, t in write(table, whole_layout(config, decoder)).items()}
    except (ValueError, TypeError, KeyError) as error:
        raise refuse(path, f"its decoder cannot be read: {error}") from None
    return Described(config, decoder, mask, norm_pix, accounted(reading, table, wanted, shapes))


def has_decoder(checkpoint: Checkpoint) -> bool:
    """Whether there is a decoder beside the encoder."""
    marks = {"vitrail": f"{OURS}embed.weight", "timm": "decoder_embed.weight"}
    mark = marks.get(checkpoint.reading.form, "decoder.decoder_embed.weight")
    root = checkpoint.reading.root
    return any(name in checkpoint.source.specs for name in (root + mark, root.removesuffix("vit.") + mark))


def look(
    names: Names, config: ViTConfig, spelling: Spelling, heads: int | None, settings: Mapping[str, Any]
) -> Decoder:
    """The decoder of a foreign checkpoint, from its shapes and its settings."""
    width = names.shape(f"{spelling.outside}embed.weight", 2)[0]
    mlp = names.layer_shape(f"{spelling.layers}*.{spelling.mlp}.weight", 2)[0]
    told = settings.get("decoder_num_attention_heads", width // 32 if width % 32 == 0 else None)
    heads = told if heads is None else heads
    if type(heads) is not int:
        raise ValueError(f"how many heads its decoder of width {width} has is not said: give decoder_heads")
    return Decoder(names.count(spelling.layers + "{}."), width, heads, mlp).sized(config)


def from_card(contract: Contract, config: ViTConfig) -> tuple[Decoder, float, bool]:
    """What our own file says of its decoder."""
    said = contract.card.get(CARD)
    if not isinstance(said, dict) or said.get("method") != "mae":
        raise ValueError("its card does not say what it is")
    check_bounds(said.get("decoder"), "decoder")
    decoder = dataclass_from_json(said.get("decoder"), Decoder, "decoder").sized(config)
    if type(said.get("norm_pix")) is not bool:
        raise ValueError(f"norm_pix is {said.get('norm_pix')!r}")
    return decoder, _share(said.get("mask")), said["norm_pix"]


def _share(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"a share of {value!r} hidden patches")
    return float(value)


def accounted(reading: Reading, table: Table, wanted: Shapes, shapes: Shapes) -> Reading:
    """Every tensor of the file against every tensor of encoder and decoder."""
    return replace(
        reading,
        table=table,
        loaded=tuple(name for name in wanted if shapes.get(name) == wanted[name]),
        left_out={},
        missing={name: tuple(shape) for name, shape in wanted.items() if name not in shapes},
        unexpected={name: tuple(shape) for name, shape in shapes.items() if name not in wanted},
        misshapen={
            name: (tuple(shapes[name]), tuple(shape))
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != tuple(shape)
        },
    )


# --- writing ---


def write_mae(auto: Autoencoder, out: str | Path, to: str, *, picture: Path = PHOTOGRAPH) -> Proof:
    """A masked autoencoder in one of `FORMS`, read back and compared before it takes its name.

    `hf` is a directory for transformers' `ViTMAEForPreTraining`, `timm` a file with Facebook's names, `vitrail` our own.
    """
    if to not in FORMS:
        raise ValueError(f"{to!r} has no place for a decoder: use {', '.join(FORMS)}")
    out, model = Path(out), auto.model
    assert isinstance(model.preprocessing, Preprocessing | None)
    contract = Contract(model.config, None, model.preprocessing, dict(model.card))
    state, notes = auto.state(), []
    check_name(to, out)
    check_whole(state, auto)
    if to != "vitrail":
        config, state = restated(model.config, state)
        reasons = unsayable(config)
        if reasons:
            raise ValueError(f"masked autoencoders are published otherwise: {'; '.join(reasons)}")
        expressible(to, config, contract.preprocessing)
        notes = missed(model.config, config, auto, to)
        contract = replace(contract, config=config)
    with staged(out) as place:
        put(place, state, contract, auto, to)
        told = {} if to == "vitrail" else untold(contract.config)
        heads = None if to == "vitrail" else auto.decoder.spec.heads
        back = read_mae(place, assume=told, decoder_heads=heads, norm_pix=auto.norm_pix)
        found = back.state()
        if differ := [
            n for n in {*found, *state} if n not in found or n not in state or not same_bits(found[n], state[n])
        ]:
            raise ValueError(f"{len(differ)} tensors did not come back as they were written: {some(sorted(differ))}")
        image = prepared(picture, contract)
        expected, answer = answers(auto, image), answers(back, image)
        proof = Proof(
            out,
            to,
            len(found),
            sum(tensor.numel() * tensor.element_size() for tensor in found.values()),
            float(expected.abs().max()),
            float((expected - answer).abs().max()),
            notes,
            compared="hidden patches",
        )
        if not proof.largest_difference <= TOLERANCE * max(1.0, proof.largest_logit):
            raise ValueError(f"not written: read back, the pictures differ by {proof.largest_difference:.3g}")
    return proof


def put(place: Path, state: Mapping[str, Tensor], contract: Contract, auto: Autoencoder, to: str) -> None:
    """The files of a form."""
    spec = auto.decoder.spec
    assert isinstance(contract.config, ViTConfig)
    if to == "vitrail":
        said = {"method": "mae", "decoder": to_json(spec), "mask": auto.mask, "norm_pix": auto.norm_pix}
        save_artifact(place, state, replace(contract, card={**contract.card, CARD: said}))
        return
    theirs = write(whole_table(contract.config, spec, SPELLINGS[to]), state)
    if to == "timm":
        write_file(place, theirs, contract)
        return
    place.mkdir()
    safetensors.write(place / "model.safetensors", theirs, {"format": "pt"})
    files = transformers.settings(contract.config, None, contract.preprocessing, "float32")
    files["config.json"] |= {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "decoder_hidden_size": spec.width,
        "decoder_num_hidden_layers": spec.depth,
        "decoder_num_attention_heads": spec.heads,
        "decoder_intermediate_size": spec.mlp,
        "mask_ratio": auto.mask,
        "norm_pix_loss": auto.norm_pix,
    }
    for name, content in files.items():
        (place / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_whole(state: Mapping[str, Tensor], auto: Autoencoder) -> None:
    """The tensors are those of the configurations, and finite: what is saved can be loaded."""
    wanted = whole_layout(auto.model.config, auto.decoder.spec)
    differ = [n for n in {*wanted, *state} if n not in wanted or n not in state or wanted[n].shape != state[n].shape]
    if differ:
        raise ValueError(f"not saved: encoder or decoder is not what its configuration says, in {some(sorted(differ))}")
    if bad := [name for name, tensor in state.items() if not finite(tensor)]:
        raise ValueError(f"not saved: values that are not finite in {some(bad)}")


def restated(config: ViTConfig, state: dict[str, Tensor]) -> tuple[ViTConfig, dict[str, Tensor]]:
    """The same as published autoencoders are: fixed positions in a table, and the class token for pooling."""
    decoder = {name: tensor for name, tensor in state.items() if name.startswith(OURS)}
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith(OURS)}
    config, encoder = with_learned_positions(config, encoder)
    config, encoder = with_positions_for(config, encoder, "outputs")
    pool = ClassToken() if config.prefix.outputs else config.pool
    return replace(config, pool=pool), {**encoder, **decoder}


def unsayable(config: ViTConfig) -> list[str]:
    """Why no published form has such an autoencoder, beyond what `expressible` finds."""
    found = []
    if config.prefix.outputs != 1 or config.prefix.registers:
        found.append("they have a class token, and no other")
    if config.image_size[0] != config.image_size[1]:
        found.append("their pictures are square")
    if isinstance(config.embed, Patches) and (config.embed.normed or not config.embed.bias):
        found.append("their patches have a bias and no norm")
    block = config.block
    plain = replace(block, mlp=GELU(), qkv_bias=True, attention_dropout=0.0) == PreNorm()
    if not plain or block.mlp not in GELUS.values():
        found.append("their layers are the paper's")
    if config.token_norm:
        found.append("they have no norm before the first layer")
    return found


def missed(before: ViTConfig, after: ViTConfig, auto: Autoencoder, to: str) -> list[str]:
    """What a reader of the form has to be told."""
    found = []
    if before.position != after.position:
        found.append("fixed positions are written as a table")
    if before.pool != after.pool:
        found.append("that features are pooled by the mean has no place in it")
    if to == "timm":
        spec = auto.decoder.spec
        found.append(
            f"the file does not say {before.size.heads} heads, the decoder's {spec.heads}, mask {auto.mask:g} and "
            f"norm_pix {auto.norm_pix}: whoever opens it must"
        )
    return found


@torch.inference_mode()
def answers(auto: Autoencoder, image: Tensor) -> Tensor:
    """What it tells of three quarters of a picture, every fourth patch seen."""
    patches = torch.arange(auto.decoder.shape.patches).unsqueeze(0)
    model, decoder = auto.model.eval(), auto.decoder.eval()
    seen = patches % 4 == 0
    return painted(model, decoder, image, patches[seen].unsqueeze(0), patches[~seen].unsqueeze(0))


def convert(source: str | Path, out: str | Path, to: str, **how: Any) -> Proof:
    """As `convert.convert`; a file with a decoder is written whole where the form has a place for one."""
    path = resolve(source)
    assume, take, licence = how.get("assume"), how.get("take"), how.get("licence")
    with open_and_recognise(path, assume, take) as checkpoint:
        form = checkpoint.reading.form
        if not has_decoder(checkpoint):
            return convert_model(path, out, to, **how)
        ours, unread = form == "vitrail", unreadable(checkpoint)
    changes = changes_in(how)
    if ours and changes and to in FORMS and to != "vitrail":
        raise ValueError(
            f"{path} holds a decoder and is converted whole: leave out {', '.join(changes)}, or convert the model beside it"
        )
    if why := left_behind(to, ours, changes, unread):
        proof = convert_model(path, out, to, **how)
        proof.notes.append(f"the decoder is left out: {why}")
        return proof
    read = read_mae(path, assume=assume, take=take, progress=how.get("progress", no_progress))
    if licence is not None:
        read.model.card = {**read.model.card, "licence": licence}
    proof = write_mae(read, out, to, picture=how.get("picture", PHOTOGRAPH))
    if form == "timm":  # Facebook's names
        heads = read.decoder.spec.heads
        proof.notes.append(f"taken for granted, as the file does not say: {heads} heads of the decoder, norm_pix True")
    return proof


def changes_in(how: Mapping[str, Any]) -> list[str]:
    """What is to be changed on the way, of all that a decoder would not fit any more."""
    usual = {"classes": KEEP, "image_size": None, "channels": None, "labels": None, "adapter": None}
    return [name.replace("_", " ") for name, value in usual.items() if how.get(name, value) is not value]


def left_behind(to: str, ours: bool, changes: list[str], unread: str | None) -> str | None:
    """Why a decoder stays behind; None where it goes along."""
    if changes:
        return f"it fits no other {changes[0]}"
    if to not in FORMS:
        return f"{to} has no place for one"
    # Our own goes there with Facebook's names. Whoever brings theirs has those already, and wants what timm can load.
    if to == "timm" and not ours:
        return "timm's own models have none; --to vitrail and --to hf keep it"
    return unread


def unreadable(checkpoint: Checkpoint) -> str | None:
    """Why the decoder of a foreign file cannot be told; None where it can, and of our own, which is refused then."""
    if checkpoint.reading.form == "vitrail":
        return None
    try:
        found = described(checkpoint).reading
    except ValueError as error:
        return str(error).removeprefix(f"{checkpoint.source.path}: ")
    odd = sorted({*found.missing, *found.unexpected, *found.misshapen})
    return f"tensors beside the encoder that are missing or no decoder's: {some(odd)}" if odd else None
