"""Swin Transformers: logits, gradients and tensors of timm, torchvision and transformers, at several image sizes."""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.parity.peers import assert_same, relative_difference, spread
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.detect import detect_format
from vitrail.checkpoints.keys import export_state, import_state
from vitrail.models.registry import build_from, configure

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import timm
import torchvision
import transformers
from safetensors.torch import load_file, save_file
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torchvision.models import swin_transformer as tv

SMALL = {"embed_dim": 16, "depths": [2, 2, 2], "num_heads": [1, 2, 4]}
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Peer:
    """A peer's model: how to build it for an image size, its tensors and settings, and its output."""

    form: str
    build: Callable[[tuple[int, int]], nn.Module]
    sizes: Sizes  # the first is the configured one
    one_size: bool = False  # a model takes the size that it is built for only
    read: Callable[[nn.Module], tuple[dict[str, Tensor], dict[str, Any]]] = lambda model: (all_tensors(model), {})
    output: Callable[[Any], Tensor] = lambda answer: answer


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def saved(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        return load_file(Path(folder, "model.safetensors")), {"config.json": config}


def with_name(name: str) -> Callable[[Any], tuple[dict[str, Tensor], dict[str, Any]]]:
    def read(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        size = [int(side) * 4 for side in model.patch_embed.grid_size]
        return all_tensors(model), {"config.json": {"architecture": name, "pretrained_cfg": {"input_size": [3, *size]}}}

    return read


def build_torchvision(version: int) -> nn.Module:
    parts = {} if version == 1 else {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2}
    model = torchvision.models.SwinTransformer(
        patch_size=[4, 4], window_size=[4, 4], stochastic_depth_prob=0.0, num_classes=5, **SMALL, **parts
    )
    spread(model)
    if version == 2:
        with torch.no_grad():  # the bias of the keys is not used
            for name, parameter in model.named_parameters():
                if name.endswith("qkv.bias"):
                    parameter.chunk(3)[1].zero_()
    return model


def build_timm(kind: Any, size: tuple[int, int]) -> nn.Module:
    return spread(kind(img_size=size, window_size=4, num_classes=5, drop_path_rate=0.0, **SMALL))


def build_transformers(version: int, size: tuple[int, int], **more: Any) -> nn.Module:
    name = "Swin" if version == 1 else "Swinv2"
    config = getattr(transformers, f"{name}Config")(
        image_size=size[0], window_size=4, num_labels=5, drop_path_rate=0.0, **SMALL, **more
    )
    return spread(getattr(transformers, f"{name}ForImageClassification")(config))


logits = lambda answer: answer.logits  # noqa: E731
PEERS = {
    "torchvision": Peer(
        "torchvision swin", lambda size: build_torchvision(1), ((64, 64), (40, 56), (64, 128), (100, 72))
    ),
    "torchvision v2": Peer("torchvision swinv2", lambda size: build_torchvision(2), ((64, 64), (40, 56), (64, 128))),
    "timm": Peer(
        "timm swin",
        lambda size: build_timm(SwinTransformer, size),
        ((64, 64), (64, 128), (80, 112)),  # not 72: its mask is built for a grid that is halved without the padding
        one_size=True,
        read=with_name("swin_small"),
    ),
    "timm v2": Peer(
        "timm swinv2",
        lambda size: build_timm(SwinTransformerV2, size),
        ((64, 64), (64, 128)),
        one_size=True,
        read=with_name("swinv2_small_window4_64"),
    ),
    # The window of transformers' Swin (v1) stays without a shift after an image that it covered, so that image is last.
    "transformers": Peer(
        "transformers swin",
        lambda size: build_transformers(1, (64, 64)),
        ((80, 72), (100, 84), (64, 128), (64, 64)),
        read=saved,
        output=logits,
    ),
    "transformers v2": Peer(
        "transformers swinv2",
        lambda size: build_transformers(2, (64, 64), pretrained_window_sizes=[0, 0, 0]),
        ((64, 64), (80, 72), (64, 128)),
        read=saved,
        output=logits,
    ),
    "transformers v2 from smaller windows": Peer(
        "transformers swinv2",
        lambda size: build_transformers(2, (64, 64), pretrained_window_sizes=[3, 3, 2]),
        ((64, 64), (80, 72)),
        read=saved,
        output=logits,
    ),
}


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_logits_gradients_and_tensors_are_the_peers(peer: Peer):
    size = peer.sizes[0]
    theirs = peer.build(size)
    tensors, settings = peer.read(theirs)
    found = detect_format({name: tuple(t.shape) for name, t in tensors.items()}, settings, {})
    assert found.format == peer.form
    assert found.is_complete, found.list_differences()
    assert not found.ignored
    ours = build_from(found.config)
    image = torch.randn(2, 3, *size)
    assert_same(ours, theirs, found.table, image, lambda model: peer.read(model)[0], peer.output)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_other_sizes_give_the_peers_logits(peer: Peer):
    theirs = peer.build(peer.sizes[0]).eval()
    for size in peer.sizes:
        if peer.one_size:
            theirs = peer.build(size).eval()
        tensors, settings = peer.read(theirs)
        found = detect_format({name: tuple(t.shape) for name, t in tensors.items()}, settings, {})
        ours = build_from(found.config).eval()
        ours.load_state_dict(import_state(found.table, tensors))
        image = torch.randn(2, 3, *size)
        with torch.inference_mode():
            expected = peer.output(theirs(image))
            assert relative_difference(ours(image), expected) <= 1e-5, size


def test_microsofts_names_are_read_without_what_is_computed():
    """In its release a merging ends a stage, and indices and masks are stored."""
    theirs = build_timm(SwinTransformer, (64, 64))
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        tensors[".".join(parts).replace("head.fc", "head")] = tensor
    tensors["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    tensors["layers.0.blocks.1.attn_mask"] = torch.zeros(16, 16, 16)
    found = detect_format({name: tuple(t.shape) for name, t in tensors.items()}, {}, {"size": (64, 64)})
    assert found.format == "microsoft swin"
    assert found.is_complete, found.list_differences()
    assert len(found.ignored) == 2
    kept = {name: tensor for name, tensor in tensors.items() if name not in found.ignored}
    state = import_state(found.table, kept)
    ours = build_from(found.config).eval()
    ours.load_state_dict(state)
    image = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert relative_difference(ours(image), theirs.eval()(image)) <= 1e-5
    written = export_state(found.table, state)
    assert all(torch.equal(written[name], tensor) for name, tensor in kept.items())


def test_damaged_files_are_refused_with_the_reason():
    tensors = all_tensors(build_torchvision(1))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    table = "features.1.0.attn.relative_position_bias_table"
    with pytest.raises(ValueError, match=r"a table of 48 relative positions fits no window"):
        detect_format(shapes | {table: (48, 1)}, {}, {})
    other = detect_format(shapes | {"blocks.0.ls1.gamma": (16,)}, {}, {})
    assert other.list_differences() == ["blocks.0.ls1.gamma [16] is unexpected"]
    found = detect_format(shapes, {}, {})
    index = "features.3.1.attn.relative_position_index"
    with pytest.raises(ValueError, match=r"relative_position_index does not match its window"):
        import_state(found.table, tensors | {index: tensors[index].flip(0)})
    v2 = all_tensors(build_torchvision(2))
    table = detect_format({name: tuple(t.shape) for name, t in v2.items()}, {}, {}).table
    bias = "features.1.0.attn.qkv.bias"
    with pytest.raises(ValueError, match=r"is not zero for the keys"):
        import_state(table, v2 | {bias: torch.ones_like(v2[bias])})


def test_swin_v2_without_a_known_window_is_refused():
    tensors, _ = with_name("x")(build_timm(SwinTransformerV2, (64, 64)))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    with pytest.raises(ValueError, match=r"do not determine window .*assume=\{'window'"):
        detect_format(shapes, {}, {})
    assert detect_format(shapes, {}, {"window": 4, "size": (64, 64)}).config.windows == (4, 4, 4)


CONVERTED = {
    "torchvision": ("torchvision", "out.pth"),
    "timm": ("timm", "out.safetensors"),
    "transformers": ("hf", "out"),
}


@pytest.mark.parametrize("name", [*CONVERTED, *(f"{name} v2" for name in CONVERTED)])
def test_files_convert_to_the_other_projects_and_back(name: str, tmp_path: Path):
    peer, (own, _) = PEERS[name], CONVERTED[name.removesuffix(" v2")]
    theirs = peer.build(peer.sizes[0]).eval()
    tensors, _ = peer.read(theirs)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "in.safetensors")
    assume = {"size": (64, 64), "window": 4}
    for to, file in CONVERTED.values():
        report = convert(tmp_path / "in.safetensors", tmp_path / file, to, assume=assume)
        assert report.largest_difference <= 1e-5 * max(1.0, report.largest_logit)
        expected = "windows that do not fill the grid are shifted by another rule"
        assert any(note.startswith(expected) for note in report.notes) == (
            vitrail.load(tmp_path / "in.safetensors", assume=assume).config.shift
            != vitrail.load(tmp_path / file, assume=assume).config.shift
        )
        back = tmp_path / f"back-{to}{'' if own == 'hf' else '.safetensors'}"
        convert(tmp_path / file, back, own, assume=assume)
        returned = load_file(back / "model.safetensors" if own == "hf" else back)
        assert set(returned) == set(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(returned[key], tensor) or "coords_table" in key, key
    if own == "hf":  # the other project opens what we wrote
        again = type(theirs).from_pretrained(tmp_path / "out").eval()
        image = torch.randn(1, 3, 64, 64)
        with torch.inference_mode():
            assert relative_difference(again(image).logits, theirs(image).logits) <= 1e-6


def test_models_that_a_project_cannot_express_are_refused(tmp_path: Path):
    model = vitrail.build_from(configure("SwinV2-T/16", width=16, depths=(1, 1, 1, 1), heads=(1, 2, 4, 8)))
    vitrail.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="needs one window for all stages, got"):
        convert(tmp_path / "model.safetensors", tmp_path / "out.pth", "torchvision")
    with pytest.raises(ValueError, match="the format of CLIP does not support Swin Transformers: use --to vitrail"):
        convert(tmp_path / "model.safetensors", tmp_path / "out.pth", "clip")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "mvitv2_tiny"])
def test_a_file_without_settings_gets_timms_preprocessing(name: str, tmp_path: Path):
    model = timm.create_model(name)
    config = timm.data.resolve_data_config(model=model)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = vitrail.load(tmp_path / "weights.safetensors").preprocessing
    assert found.resize == (math.floor(224 / config["crop_pct"]),) * 2
    assert (found.size, found.mean, found.std) == ((224, 224), config["mean"], config["std"])
