"""Writing a model in another project's form, and proving that what was written is the same model."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import clip, google, timm, torchvision, transformers, vit_pytorch
from vitrail.checkpoints.artifact import Contract, save_artifact
from vitrail.checkpoints.checkpoint import Progress, no_progress, open_and_recognise
from vitrail.checkpoints.files import npz, pickled, safetensors
from vitrail.checkpoints.files.atomic import staged
from vitrail.checkpoints.keys import Table, layout, some, write
from vitrail.checkpoints.loading import KEEP, adapted, assembled, resolve, with_adapter
from vitrail.checkpoints.look import GELUS
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_learned_positions, with_positions_for, with_projection_as_classes
from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.build import POOLS, Config
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.head import PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean
from vitrail.nn.position import Learned1D, Relative

PHOTOGRAPH = Path(__file__).parent / "photograph.jpg"
TOLERANCE = 1e-4  # of the largest logit, between what was read and what was written
State = dict[str, Tensor]


def write_file(out: Path, theirs: Mapping[str, Tensor], contract: Contract) -> None:
    """One file, of the kind that its name says."""
    if out.suffix == ".safetensors":
        safetensors.write(out, theirs, {"format": "pt"})
    else:
        pickled.write(out, theirs)


def write_arrays(out: Path, theirs: Mapping[str, Tensor], contract: Contract) -> None:
    """NumPy's archive."""
    npz.write(out, theirs)


def write_directory(out: Path, theirs: Mapping[str, Tensor], contract: Contract) -> None:
    """Weights with transformers' settings beside them."""
    assert isinstance(contract.config, ViTConfig)
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in theirs.values()}
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    out.mkdir()
    safetensors.write(out / "model.safetensors", theirs, {"format": "pt"})
    for name, content in transformers.settings(contract.config, contract.labels, contract.preprocessing, kind).items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Target:
    """A form to write: what it cannot express, its key table, and how its files are made."""

    title: str
    reasons: Callable[[ViTConfig], list[str]]
    table: Callable[[Any], Table]
    positions: Callable[[ViTConfig], str] = lambda config: "outputs"  # the prefix tokens whose positions it has
    suffixes: tuple[str, ...] = (".safetensors", ".pth", ".pt", ".bin")  # none for a directory
    write: Callable[[Path, Mapping[str, Tensor], Contract], None] = write_file
    resnets: bool = False
    gated: bool = False  # whether it has SwiGLU
    projections: bool = True  # whether it can leave CLIP's projection without a bias
    unused: Callable[[ViTConfig], dict[str, tuple[int, ...]]] = lambda config: {}  # what its code wants and never reads
    fixed_positions: bool = False  # whether it knows positions without a table


@dataclass
class Proof:
    """What was written, and what came back."""

    path: Path
    target: str
    tensors: int
    bytes: int
    largest_logit: float
    largest_difference: float
    notes: list[str] = field(default_factory=list)
    compared: str = "logits"  # or features, where a new head is still zero
    as_read_by_strangers: float | None = None  # the difference where nobody tells what the file does not say

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "bit_for_bit": True}


def timm_reasons(config: ViTConfig) -> list[str]:
    """Why timm cannot express a model, beyond the names of its tensors."""
    found = []
    if not (isinstance(config.position, Learned1D) and config.position.at == "stem") and not isinstance(
        config.position, Relative
    ):
        found.append("its positions are learned in one dimension at the stem, or relative")
    if isinstance(config.pool, ClassAndMean):
        found.append("it does not pool class token and mean side by side")
    if isinstance(config.head, PreLogits):
        found.append("it dropped the pre-logits layer")
    if config.size.head is not None:
        found.append("its heads share the width among them")
    return found


def dinov2_reasons(config: ViTConfig) -> list[str]:
    """Why DINOv2's release cannot express a model, beyond the names of its tensors."""
    found = [] if config.classes is None else ["its models have no classes: --classes none"]
    if config.block.layer_scale is None or config.prefix.outputs != 1:
        found.append("its models have LayerScale and a class token")
    if not isinstance(config.pool, ClassToken):
        found.append("its models read their class token")
    return found


def _covered(config: ViTConfig) -> str:
    """timm's: with registers, all prefix tokens have positions or none has."""
    assert isinstance(config.position, Learned1D)
    return "none" if config.prefix.registers and config.position.prefix == "outputs" else config.position.prefix


TARGETS: dict[str, Target] = {
    "timm": Target(
        "timm",
        timm_reasons,
        lambda config: timm.bit(config) if isinstance(config, BiTConfig) else timm.vit(config),
        positions=_covered,
        resnets=True,
        gated=True,
        projections=False,
    ),
    "hf": Target(
        "transformers",
        transformers.reasons,
        lambda config: transformers.vit(config, transformers.family_of(config)),
        positions=lambda config: "all" if transformers.family_of(config) == "deit" else "outputs",
        suffixes=(),
        write=write_directory,
        gated=True,
        unused=transformers.unused,
    ),
    "big_vision": Target(
        "Google's .npz",
        google.reasons,
        lambda config: google.vit(config, google.spelling_of(config)),
        positions=lambda config: getattr(config.position, "prefix", "none"),
        suffixes=(".npz",),
        write=write_arrays,
        fixed_positions=True,
    ),
    "torchvision": Target("torchvision", torchvision.reasons, torchvision.vit),
    "vit-pytorch": Target("vit-pytorch", vit_pytorch.reasons, vit_pytorch.table_for, fixed_positions=True),
    "clip": Target("CLIP", clip.reasons, clip.vit),
    "dinov2": Target(
        "DINOv2",
        dinov2_reasons,
        lambda config: timm.vit(config, timm.DINOV2),
        gated=True,
        unused=lambda config: {"mask_token": (1, config.size.width)},
    ),
}
NAMES = ("vitrail", *TARGETS)


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    allow_missing: Iterable[str] = (),
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    labels: tuple[str, ...] | None = None,
    licence: str | None = None,
    adapter: str | Path | None = None,
    picture: Path = PHOTOGRAPH,
    progress: Progress = no_progress,
) -> Proof:
    """A checkpoint of any known form to one of `NAMES`, reloaded and compared before this returns.

    `adapter` is a directory of PEFT's, whose low-rank additions are merged first.
    """
    if to not in NAMES:
        raise ValueError(f"unknown form {to!r}: use {', '.join(NAMES)}")
    out = Path(out)
    with open_and_recognise(resolve(source), assume, take) as checkpoint:
        changed = _changed(checkpoint.contract, classes, image_size, channels)
        expressible(to, changed.config, changed.preprocessing)
        check_name(to, out)
        state = checkpoint.state(allow_missing, progress)
        contract = checkpoint.contract
    notes = []
    if checkpoint.random:
        notes.append(f"random, because they were allowed to be missing: {', '.join(checkpoint.random)}")
        contract = replace(contract, card=contract.card | {"random": checkpoint.random})
    if adapter is not None:
        contract, state = with_adapter(contract, state, adapter)
        notes.append(f"with the low-rank additions of {adapter} merged")
    contract, state = adapted(contract, state, classes, image_size, channels)
    if labels is not None:
        if len(labels) != contract.config.classes:
            raise ValueError(f"{len(labels)} labels for a model of {contract.config.classes} classes")
        contract = replace(contract, labels=labels)
    if licence is not None:
        contract = replace(contract, card=contract.card | {"licence": licence})
    return write_and_prove(contract, state, out, to, picture, notes)


def _changed(contract: Contract, classes: Any, image_size: Any, channels: Any) -> Contract:
    """The contract as it will be, from shapes alone: so that what cannot be written is refused before anything is read."""
    empty = {name: torch.empty_like(tensor) for name, tensor in layout(contract.config).items()}
    return adapted(contract, empty, classes, image_size, channels)[0]


def check_name(to: str, out: Path) -> None:
    """The name fits what is to be written."""
    suffixes = (".safetensors",) if to == "vitrail" else TARGETS[to].suffixes
    if suffixes and out.suffix not in suffixes:
        raise ValueError(f"{out}: a file for {to} is called {' or '.join('*' + suffix for suffix in suffixes)}")
    if not suffixes and out.suffix in (".safetensors", ".bin", ".pth", ".npz"):
        raise ValueError(f"{out}: for {to} give the name of a new directory, it holds several files")


def expressible(to: str, config: Config, pipeline: Preprocessing | None = None) -> None:
    """Nothing, or an error with the reasons why this form cannot say what the model is."""
    if to == "vitrail":
        return
    if to == "hf" and pipeline is not None:
        transformers.processor(pipeline)
    target = TARGETS[to]
    if isinstance(config, BiTConfig):
        if not target.resnets:
            raise ValueError(f"{target.title} cannot express this model: it has no BiT ResNet")
        target.table(config)
        return
    config, _ = _restated(target, config, None)
    reasons = [*unsayable(config), *target.reasons(config)]
    if isinstance(config.block.mlp, SwiGLU) and not target.gated:
        reasons.append("it has no SwiGLU")
    if reasons:
        raise ValueError(f"{target.title} cannot express this model: {'; '.join(reasons)}")
    target.table(config)


def as_said(to: str, config: Config) -> Config:
    """The configuration of the same model as a form says it."""
    if to == "vitrail" or not isinstance(config, ViTConfig):
        return config
    return _restated(TARGETS[to], config, None)[0]


def unsayable(config: ViTConfig) -> list[str]:
    """What no form but our own can say."""
    found = []
    mlp = config.block.mlp
    if not isinstance(mlp, SwiGLU) and mlp not in GELUS.values():
        found.append(f"it has no {type(mlp).__name__}")
    if isinstance(config.pool, MAP) and config.pool.mlp != mlp:
        found.append("its attention pooling has the activation of its blocks")
    if config.classes is None and config.prefix.outputs == 2:
        found.append("its distilled models have their two heads")
    return found


def _restated(target: Target, config: ViTConfig, state: State | None) -> tuple[ViTConfig, State]:
    """The same model as the form would say it: positions in a table, and for the prefix tokens that have them there."""
    if state is None:
        with torch.device("meta"):
            return _restated(target, config, dict(layout(config)))
    if not target.fixed_positions:
        config, state = with_learned_positions(config, state)
    if not target.projections:
        config, state = with_projection_as_classes(config, state)
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        config, state = with_positions_for(config, state, target.positions(config))
    return config, state


def write_and_prove(
    contract: Contract, state: State, out: Path, to: str, picture: Path = PHOTOGRAPH, notes: list[str] | None = None
) -> Proof:
    """Writes a model in a form, reads it back, and compares every tensor bit for bit and the logits on a photograph.

    Only what passed takes the name `out`.
    """
    expressible(to, contract.config, contract.preprocessing)
    check_name(to, out)
    image = prepared(picture, contract)
    with staged(out) as place:
        proof = _prove(contract, state, place, to, image, list(notes or []))
    return replace(proof, path=out)


def _prove(contract: Contract, state: State, out: Path, to: str, image: Tensor, notes: list[str]) -> Proof:
    original, first = contract, state
    if to == "vitrail":
        save_artifact(out, state, contract)
        assume: dict[str, Any] = {}
    else:
        target = TARGETS[to]
        if isinstance(contract.config, ViTConfig):
            before = contract.config
            config, stated = _restated(target, before, state)
            notes += _restatements(before, config)
            contract = replace(contract, config=config)
        else:
            stated = state
        theirs = write(target.table(contract.config), stated)
        if isinstance(contract.config, ViTConfig):
            kind = next(iter(theirs.values())).dtype
            theirs |= {n: torch.zeros(shape, dtype=kind) for n, shape in target.unused(contract.config).items()}
        target.write(out, theirs, contract)
        assume = untold(contract.config)
        state = stated
    with open_and_recognise(out, assume) as again:
        back = again.state()
        read_as, count = again.contract, len(again.source.specs)
    _same(out, state, back)
    if to == "vitrail" and read_as != contract:
        raise ValueError("the artifact did not bring back its contract: please report this")
    expected = logits(assembled(original, first, torch.float32), image)
    compared = "logits"
    if not expected.any():  # a new head, which is zero: what comes to it tells more
        compared, bare = "features", replace(original, labels=None)
        expected = features(assembled(bare, first, torch.float32), image)
    answer = logits if compared == "logits" else features
    found = answer(
        assembled(replace(contract, config=_told(read_as.config, contract.config)), back, torch.float32), image
    )
    proof = Proof(
        out,
        to,
        count,
        sum(tensor.numel() * tensor.element_size() for tensor in back.values()),
        float(expected.abs().max()),
        float((found - expected).abs().max()),
        notes,
        compared=compared,
    )
    if not proof.largest_difference <= TOLERANCE * max(1.0, proof.largest_logit):
        raise ValueError(
            f"not written: read back, the logits differ by {proof.largest_difference:.3g} of {proof.largest_logit:.3g}"
        )
    if to != "vitrail":
        _strangers(proof, out, contract, expected, image)
    return proof


def _told(read: Config, wanted: Config) -> Config:
    """What came back, with what no tensor and no file tells put as it was: how weights begin, and rates for training."""
    names = ("dropout", "stochastic_depth", "init")
    if isinstance(read, ViTConfig) and isinstance(wanted, ViTConfig):
        return replace(read, **{name: getattr(wanted, name) for name in names})
    return read


def _restatements(before: ViTConfig, after: ViTConfig) -> list[str]:
    found = []
    if type(before.position) is not type(after.position):
        found.append("fixed positions are written as a table")
    elif before.position != after.position and before.prefix.count:
        found.append("positions of the prefix tokens are added to the tokens, or zero where there were none")
    if before.head != after.head:
        found.append(f"the projection is written as a head of {after.classes} classes whose bias is zero")
    return found


def untold(config: Config) -> dict[str, Any]:
    """The facts of a model that tensors do not tell, as assumptions for reading it back."""
    told: dict[str, Any] = {"size": config.image_size}
    if isinstance(config, ViTConfig):
        told |= {"heads": config.size.heads, "eps": config.eps, "channels": config.channels}
        gelu = next((name for name, slot in GELUS.items() if slot == config.block.mlp), None)
        pool = next((name for name in ("class", "mean") if POOLS[name] == config.pool and config.prefix.outputs), None)
        told |= {"gelu": gelu} if gelu else {}
        told |= {"pool": pool} if pool else {}
    return told


def _same(path: Path, written: State, back: State) -> None:
    """Every tensor came back with the same bytes."""
    differ = [
        name
        for name in sorted(set(written) | set(back))
        if name not in written or name not in back or not same_bits(written[name], back[name])
    ]
    if differ:
        raise ValueError(f"{path.name}: {len(differ)} tensors did not come back as they were written: {some(differ)}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """The same shape, kind and bytes: -0 is not 0 here, and NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _strangers(proof: Proof, out: Path, contract: Contract, expected: Tensor, image: Tensor) -> None:
    """What a reader misses who is told nothing, and how much that changes."""
    try:
        with open_and_recognise(out) as checkpoint:
            config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
            missed = _missed(config, contract.config)
            if missed and proof.compared == "features":
                proof.notes.append(f"the file does not say {', '.join(missed)}: whoever opens it must")
            elif missed:
                proof.notes.append(f"the file does not say {', '.join(missed)}: whoever opens it must")
                stranger = replace(checkpoint.contract, config=config)
                found = logits(assembled(stranger, checkpoint.state(), torch.float32), image)
                proof.as_read_by_strangers = float((found - expected).abs().max())
    except ValueError as error:
        proof.notes.append(f"without being told, it cannot be read: {str(error).split(': ', 1)[-1]}")
        return
    if contract.preprocessing is not None and pipeline != contract.preprocessing:
        if proof.target != "hf" or pipeline is None:
            other = "the file does not say all of it"
        else:
            names = [
                f.name for f in fields(pipeline) if getattr(pipeline, f.name) != getattr(contract.preprocessing, f.name)
            ]
            other = "transformers does otherwise: " + ", ".join(f"{name} {getattr(pipeline, name)}" for name in names)
        proof.notes.append(f"preprocessing is {contract.preprocessing.in_words()}; {other}")
    if contract.labels is not None and proof.target != "hf":
        proof.notes.append(f"the {len(contract.labels)} labels are not in the file, which has no place for them")


def _missed(read: Config, wanted: Config) -> list[str]:
    if not isinstance(read, ViTConfig) or not isinstance(wanted, ViTConfig):
        return []
    facts = {
        f"{wanted.size.heads} heads": read.size == wanted.size,
        f"{type(wanted.block.mlp).__name__}": read.block.mlp == wanted.block.mlp,
        f"eps {wanted.eps:g}": read.eps == wanted.eps,
        "pooling by the mean": isinstance(read.pool, Mean) == isinstance(wanted.pool, Mean),
        f"the image size {wanted.image_size[0]}×{wanted.image_size[1]}": read.image_size == wanted.image_size,
    }
    return [fact for fact, same in facts.items() if not same]


def prepared(picture: Path, contract: Contract) -> Tensor:
    """The photograph as the model takes it, [1, C, H, W]."""
    config = contract.config
    pipeline = contract.preprocessing or Preprocessing(config.image_size, config.image_size)
    if pipeline.channels not in (1, 3, 4):
        pipeline = pipeline.with_channels(3)
    try:
        with Image.open(picture) as image:
            x = pipeline(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{picture}: {error}") from None
    return x.repeat(-(-config.channels // x.shape[0]), 1, 1)[: config.channels].unsqueeze(0)


@torch.inference_mode()
def logits(model: ViT | BiT, image: Tensor) -> Tensor:
    return model(image)


@torch.inference_mode()
def features(model: ViT | BiT, image: Tensor) -> Tensor:
    """What comes to the head."""
    model.head = torch.nn.Identity()
    return model(image)
