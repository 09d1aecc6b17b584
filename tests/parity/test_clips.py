"""VideoMAE, ViViT and TimeSformer: same weights, same logits and gradients as transformers, and their checkpoints."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import transformers
from safetensors.torch import load_file, save_file

import vitrail
from tests.parity.peers import TOLERANCE, assert_same, relative_difference, saved_state, spread
from vitrail.checkpoints.convert import convert, is_bit_identical
from vitrail.checkpoints.formats import timesformer, videomae, vivit
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.checkpoints.mae import read_mae
from vitrail.data.clip import Clip
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm
from vitrail.nn.pool import Mean

HF: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
HF |= {"patch_size": 8, "num_labels": 7}
OURS: dict[str, Any] = {"patch": 8, "width": 48, "depth": 2, "heads": 3, "mlp_width": 96, "classes": 7}
VIDEOMAE = {**OURS, "position": "sinusoid1d", "pool": Mean(norm_after=True, eps=1e-5), "prefix": "none", "eps": 1e-12}
VIDEOMAE |= {"block": PreNorm(key_bias=False)}
TIMESFORMER = {**OURS, "tubelet": 1, "position": "factorised", "block": "divided"}
SHAPES = ((4, 2, 32, 32), (6, 3, 16, 40))  # frames, frames of a tubelet, height, width


def take_clips(peer: nn.Module) -> nn.Module:
    """Return transformers' model for clips as ours take them, [B, C, T, H, W]."""
    peer.register_forward_pre_hook(lambda _, inputs: tuple(clip.transpose(1, 2) for clip in inputs))
    return spread(peer)


def make_peer(kind: str, frames: int, tubelet: int, height: int, width: int, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    size = [height, width] if height != width else height
    given = {**HF, "num_frames": frames, "image_size": size, **more}
    if kind.startswith("Vivit"):
        given |= {"tubelet_size": [tubelet, given.pop("patch_size"), HF["patch_size"]]}
    elif kind.startswith("VideoMAE"):
        given |= {"tubelet_size": tubelet}
    family = next(name for name in ("VideoMAE", "Vivit", "Timesformer") if kind.startswith(name))
    return take_clips(getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**given)))


def logits(answer: Any) -> Tensor:
    return answer.logits


def clip_of(frames: int, height: int, width: int) -> Tensor:
    return torch.randn(2, 3, frames, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_videomae_gives_transformers_logits_and_gradients(shape):
    frames, tubelet, height, width = shape
    config = configure(**VIDEOMAE, frames=frames, tubelet=tubelet, image_size=(height, width))
    peer = make_peer("VideoMAEForVideoClassification", *shape)
    clip = clip_of(frames, height, width)
    assert_same(vitrail.build_from(config), peer, videomae.build_table(config), clip, saved_state, logits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vivit_gives_transformers_logits_and_gradients(shape):
    frames, tubelet, height, width = shape
    config = configure(**OURS, mlp="gelu-tanh", frames=frames, tubelet=tubelet, image_size=(height, width))
    peer = make_peer("VivitForVideoClassification", *shape)
    clip = clip_of(frames, height, width)
    assert_same(vitrail.build_from(config), peer, vivit.build_table(config), clip, saved_state, logits)


@pytest.mark.parametrize("attention", ["divided_space_time", "joint_space_time"])
@pytest.mark.parametrize("shape", [(4, 1, 32, 32), (3, 1, 48, 48)], ids=str)
def test_timesformer_gives_transformers_logits_and_gradients(shape, attention):
    frames, _, height, width = shape
    block = "divided" if attention.startswith("divided") else "pre"
    config = configure(**{**TIMESFORMER, "block": block}, frames=frames, image_size=(height, width))
    peer = make_peer("TimesformerForVideoClassification", *shape, attention_type=attention)
    clip = clip_of(frames, height, width)
    assert_same(vitrail.build_from(config), peer, timesformer.build_table(config), clip, saved_state, logits)


def test_models_without_classes_give_transformers_tokens():
    clip = clip_of(4, 32, 32)
    body = {"classes": None, "frames": 4, "image_size": 32}
    for mean in (True, False):
        config = configure(**{**VIDEOMAE, **body, "pool": Mean(normed=not mean)})
        peer = make_peer("VideoMAEModel", *SHAPES[0], use_mean_pooling=mean)
        table = videomae.build_table(config)
        assert_same(
            vitrail.build_from(config), peer, table, clip, saved_state, lambda answer: answer.last_hidden_state.mean(1)
        )
    config = configure(**{**OURS, **body, "mlp": "gelu-tanh", "head": "pre-logits"})
    pooled = lambda answer: answer.pooler_output  # noqa: E731
    peer = make_peer("VivitModel", *SHAPES[0])
    assert_same(vitrail.build_from(config), peer, vivit.build_table(config), clip, saved_state, pooled)


def test_another_image_size_resamples_timesformers_positions_as_transformers_does():
    peer = make_peer("TimesformerForVideoClassification", 4, 1, 32, 32).eval()
    config = configure(**TIMESFORMER, frames=4, image_size=32, resampling="timesformer")
    model = vitrail.build_from(config).eval()
    from vitrail.checkpoints.keys import import_state

    model.load_state_dict(import_state(timesformer.build_table(config), saved_state(peer)))
    clip = clip_of(4, 48, 48)
    with torch.no_grad():
        expected = peer(clip).logits
        assert relative_difference(model(clip), expected) <= TOLERANCE
        assert relative_difference(model.resize((48, 48))(clip), expected) <= TOLERANCE


# --- files ---

KINDS = {
    "VideoMAE": ("VideoMAEForVideoClassification", (4, 2, 32, 32), "videomae"),
    "VideoMAE, not square": ("VideoMAEForVideoClassification", (6, 3, 16, 40), "videomae"),
    "VideoMAEModel": ("VideoMAEModel", (4, 2, 32, 32), None),
    "VideoMAE pre-training": ("VideoMAEForPreTraining", (4, 2, 32, 32), None),
    "ViViT": ("VivitForVideoClassification", (4, 2, 32, 32), None),
    "ViViT, not square": ("VivitForVideoClassification", (6, 3, 16, 40), None),
    "VivitModel": ("VivitModel", (4, 2, 32, 32), None),
    "TimeSformer": ("TimesformerForVideoClassification", (4, 1, 32, 32), "timesformer"),
    "TimesformerModel": ("TimesformerModel", (4, 1, 32, 32), "timesformer"),
}


@torch.no_grad()
def answer(kind: str, peer: nn.Module, clip: Tensor) -> Tensor:
    if kind == "VideoMAEForPreTraining":
        peer = peer.videomae
        clip = clip.transpose(1, 2)  # the hook is the whole model's
    answers = peer.eval()(clip)
    if hasattr(answers, "logits"):
        return answers.logits
    if getattr(answers, "pooler_output", None) is not None:
        return answers.pooler_output
    tokens = answers.last_hidden_state
    return tokens[:, 0] if kind.startswith("Timesformer") else tokens.mean(1)


@pytest.mark.parametrize(("kind", "shape", "release"), KINDS.values(), ids=KINDS)
def test_files_give_transformers_outputs_and_come_back_bit_for_bit(kind, shape, release, tmp_path):
    frames, _, height, width = shape
    peer, clip = make_peer(kind, *shape), clip_of(frames, height, width)
    peer.save_pretrained(tmp_path / "hf")
    model = vitrail.load(tmp_path / "hf")
    assert model.config.input_size == (frames, height, width)
    assert model.preprocessing.shape == (3, frames, height, width)
    expected = answer(kind, peer, clip)
    with torch.no_grad():
        assert relative_difference(model(clip), expected) <= TOLERANCE
    vitrail.save(model, tmp_path / "own.safetensors")
    convert(tmp_path / "own.safetensors", tmp_path / "back", "hf")
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    theirs = {name.removeprefix("videomae."): t for name, t in theirs.items()} if "Pre" in kind else theirs
    assert all(is_bit_identical(back[name], theirs[name]) for name in back)
    assert all(name.startswith(("decoder.", "encoder_to", "mask_")) for name in set(theirs) - set(back))
    if kind != "VideoMAEForPreTraining":
        again, info = getattr(transformers, kind).from_pretrained(tmp_path / "back", output_loading_info=True)
        assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert relative_difference(answer(kind, again, clip.transpose(1, 2)), expected) <= TOLERANCE
    if release is not None:
        convert(tmp_path / "own.safetensors", tmp_path / "release.pth", release)
        assume = {"heads": 3} | ({} if release == "timesformer" else {"frames": frames, "size": f"{height}x{width}"})
        read = vitrail.load(tmp_path / "release.pth", assume=assume)
        with torch.no_grad():
            assert relative_difference(read(clip), expected) <= TOLERANCE


def test_releases_have_their_authors_names(tmp_path):
    config = configure(**{**VIDEOMAE, "pool": "mean-norm", "eps": 1e-6}, frames=4, image_size=32)
    vitrail.save(vitrail.build_from(config), tmp_path / "own.safetensors")
    convert(tmp_path / "own.safetensors", tmp_path / "release.pth", "videomae")
    state = torch.load(tmp_path / "release.pth", weights_only=True)
    assert {name for name in state if "blocks.1" not in name} == {
        *("patch_embed.proj.weight", "patch_embed.proj.bias", "fc_norm.weight", "fc_norm.bias", "head.weight"),
        *("head.bias", "blocks.0.norm1.weight", "blocks.0.norm1.bias", "blocks.0.attn.q_bias", "blocks.0.attn.v_bias"),
        *("blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "blocks.0.attn.proj.bias", "blocks.0.norm2.weight"),
        *("blocks.0.norm2.bias", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias", "blocks.0.mlp.fc2.weight"),
        "blocks.0.mlp.fc2.bias",
    }
    assert state["patch_embed.proj.weight"].shape == (48, 3, 2, 8, 8)
    torch.save({"module": state, "epoch": 1}, tmp_path / "deepspeed.pth")
    assume = {"heads": 3, "frames": 4, "size": 32}
    read = vitrail.load(tmp_path / "deepspeed.pth", assume=assume)
    assert read.config == config.__class__(**{**vars(config), "init": "deit"})

    pretraining = {f"encoder.{n}": t for n, t in state.items() if not n.startswith(("head", "fc_norm"))}
    pretraining |= {f"encoder.norm.{part}": torch.randn(48) for part in ("weight", "bias")}
    pretraining |= {"mask_token": torch.zeros(1, 1, 24), "encoder_to_decoder.weight": torch.zeros(24, 48)}
    pretraining |= {"decoder.blocks.0.norm1.weight": torch.ones(24), "decoder.head.bias": torch.zeros(384)}
    torch.save({"model": pretraining}, tmp_path / "pretraining.pth")
    assert vitrail.load(tmp_path / "pretraining.pth", assume=assume).config.pool == Mean()

    config = configure(**TIMESFORMER, frames=4, image_size=32)
    vitrail.save(vitrail.build_from(config), tmp_path / "own.safetensors")
    convert(tmp_path / "own.safetensors", tmp_path / "release.pyth.pth", "timesformer")
    state = torch.load(tmp_path / "release.pyth.pth", weights_only=True)
    assert {"cls_token", "pos_embed", "time_embed", "patch_embed.proj.weight", "norm.weight", "head.weight"} < set(
        state
    )
    assert {f"blocks.0.temporal_{part}.weight" for part in ("norm1", "attn.qkv", "attn.proj", "fc")} < set(state)
    assert state["patch_embed.proj.weight"].shape == (48, 3, 8, 8)
    wrapped = {"model_state": {f"model.{name}": tensor for name, tensor in state.items()}, "epoch": 14}
    torch.save(wrapped, tmp_path / "wrapped.pyth.pth")
    assert vitrail.load(tmp_path / "wrapped.pyth.pth", assume={"heads": 3}).config.frames == 4


@pytest.mark.parametrize("kind", ["VideoMAEForVideoClassification", "VideoMAEForPreTraining"])
def test_states_in_the_names_of_modules_are_read(kind, tmp_path):
    """A plain `torch.save(model.state_dict())`: with version 5 the biases have other names than in saved directories."""
    peer, clip = make_peer(kind, *SHAPES[0]), clip_of(4, 32, 32)
    torch.save(peer.state_dict(), tmp_path / "state.pt")
    model = vitrail.load(tmp_path / "state.pt", assume={"frames": 4, "size": 32, "heads": 3, "eps": 1e-12})
    with torch.no_grad():
        assert relative_difference(model(clip), answer(kind, peer, clip)) <= TOLERANCE
    if kind.endswith("PreTraining"):
        assert read_mae(tmp_path / "state.pt", assume={"frames": 4, "size": 32, "heads": 3}, decoder_heads=6).norm_pix


def remove(folder: Path, *parts: str) -> None:
    """Delete the tensors whose names contain one of these parts."""
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not any(part in name for part in parts)}
    save_file(kept, path, {"format": "pt"})


@pytest.mark.parametrize("lost", ["q_bias", "v_bias", "_bias", "layer.1.attention.attention.q_bias"])
def test_a_videomae_whose_biases_were_lost_is_refused(lost, tmp_path):
    make_peer("VideoMAEForVideoClassification", *SHAPES[0]).save_pretrained(tmp_path)
    remove(tmp_path, lost)
    with pytest.raises(ValueError, match=r"not loaded.*\n.*differ:\n.*attention.attention.[qv]_bias \[48\] is missing"):
        vitrail.load(tmp_path)
    with inspect_checkpoint(tmp_path) as checkpoint:
        assert all("_bias" in name for name in checkpoint.detection.missing)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"not loaded.*\n.*\n.*q_bias|v_bias"):
        vitrail.load(tmp_path, assume={"frames": 4, "size": 32, "heads": 3})


def test_biases_set_to_zero_would_be_noticed(tmp_path):
    """A reader that drops the biases of queries and values without a word gives other logits than ours."""
    peer, clip = make_peer("VideoMAEForVideoClassification", *SHAPES[0]).eval(), clip_of(4, 32, 32)
    peer.save_pretrained(tmp_path)
    model = vitrail.load(tmp_path)
    with torch.no_grad():
        expected = peer(clip).logits
        assert relative_difference(model(clip), expected) <= TOLERANCE
        for name, parameter in peer.named_parameters():
            if name.endswith(("query.bias", "value.bias", "q_bias", "v_bias")):
                parameter.zero_()
        assert relative_difference(peer(clip).logits, expected) > 100 * TOLERANCE


def test_a_videomae_that_never_had_biases_loads(tmp_path):
    peer, clip = make_peer("VideoMAEForVideoClassification", *SHAPES[0], qv_bias=False).eval(), clip_of(4, 32, 32)
    peer.save_pretrained(tmp_path)
    model = vitrail.load(tmp_path)
    with torch.no_grad():
        assert relative_difference(model(clip), peer(clip).logits) <= TOLERANCE


def test_damaged_and_unsupported_files_are_refused(tmp_path):
    load = partial(vitrail.load, tmp_path)
    make_peer("TimesformerForVideoClassification", 4, 1, 32, 32).save_pretrained(tmp_path)
    remove(tmp_path, "layer.1.temporal_dense")
    with pytest.raises(ValueError, match=r"temporal_dense.weight .* is missing"):
        load()
    make_peer("VivitForVideoClassification", *SHAPES[0]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_frames": 6}))
    with pytest.raises(ValueError, match="6 frames do not fit 32 positions"):
        load()
    make_peer("VideoMAEForVideoClassification", *SHAPES[0], use_mean_pooling=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_mean_pooling=false"):
        load()


def test_processors_of_clips_become_pipelines(tmp_path):
    make_peer("VivitForVideoClassification", *SHAPES[0]).save_pretrained(tmp_path)
    settings = {"image_processor_type": "VivitImageProcessor", "size": {"shortest_edge": 36}, "do_center_crop": True}
    settings |= {"crop_size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5, "offset": True}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    pipeline = vitrail.load(tmp_path).preprocessing
    assert (pipeline.size, pipeline.resize, pipeline.fit) == ((32, 32), (36, 36), "cover")
    assert pipeline.clip == Clip(4, 2)  # of which the settings say nothing: ViViT's stride
    x = torch.rand(3)
    ours = (x - torch.tensor(pipeline.mean)) / torch.tensor(pipeline.std)
    torch.testing.assert_close(ours, (x * 255 / 127.5 - 1 - 0.5) / 0.5)  # as transformers' processor computes it


def test_models_that_a_project_cannot_express_are_refused(tmp_path):
    path = tmp_path / "own.safetensors"
    for options, to, why in (
        ({}, "timm", "timm's format does not support models of clips"),
        ({}, "torchvision", "Tubelets"),
        ({}, "videomae", "fixed 1-D sin-cos positions"),
        ({}, "timesformer", "it embeds every frame"),
        ({"position": "rotary3d"}, "hf", "learned 1-D positions"),
        ({"frames": None}, "videomae", "it takes clips, and this model images"),
    ):
        vitrail.save(vitrail.build(**{**OURS, "frames": 4, "image_size": 32, **options}), path)
        with pytest.raises(ValueError, match=why):
            convert(path, tmp_path / "out.pth" if to != "hf" else tmp_path / "out", to)
