"""AST: same weights, same logits and gradients as transformers, and its checkpoints both ways."""

import json
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
from vitrail.checkpoints.formats import ast
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import sound_preprocessing
from vitrail.models.flops import count
from vitrail.models.registry import configure
from vitrail.nn.embed import Patches
from vitrail.nn.head import NormLinear

HF: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
SIZES = {"name": None, "patch": 16, "width": 48, "depth": 2, "heads": 3, "mlp_width": 96}


def make_peer(kind: str, bins: int, frames: int, stride: int = 10, **more: Any) -> nn.Module:
    """Return transformers' model with random weights, which takes spectrograms as ours do, [B, 1, mel bins, frames]."""
    torch.manual_seed(0)
    given = {"num_mel_bins": bins, "max_length": frames, "frequency_stride": stride, "time_stride": stride, **more}
    peer = getattr(transformers, kind)(transformers.ASTConfig(**HF, **{"num_labels": 7, **given}))
    peer.register_forward_pre_hook(lambda _, inputs: tuple(sound[:, 0].transpose(1, 2) for sound in inputs))
    return spread(peer)


def configure_like(bins: int, frames: int, stride: int = 10, **more: Any) -> Any:
    slots = {"embed": Patches(16, overlap=16 - stride), "pool": "output-mean", "head": "norm-linear", "eps": 1e-12}
    size = {"image_size": (bins, frames), "channels": 1, "resampling": "ast", "classes": 7}
    return configure(**SIZES, **{**slots, **size, **more})


def spectrogram(bins: int, frames: int) -> Tensor:
    return torch.randn(2, 1, bins, frames, generator=torch.Generator().manual_seed(1))


def logits(answer: Any) -> Tensor:
    return answer.logits


@pytest.mark.parametrize(
    ("bins", "frames", "stride"), [(128, 1024, 10), (128, 100, 10), (64, 57, 10), (32, 48, 16), (40, 50, 7)]
)
def test_gives_transformers_logits_and_gradients(bins, frames, stride):
    """At the published size, and where the last pixels belong to no patch."""
    config, peer = configure_like(bins, frames, stride), make_peer("ASTForAudioClassification", bins, frames, stride)
    sound = spectrogram(bins, frames)[: 1 if frames > 1000 else 2]
    assert_same(vitrail.build_from(config), peer, ast.build_table(config), sound, saved_state, logits)


def test_the_body_gives_the_mean_of_both_tokens():
    config = configure_like(64, 57, classes=None, head="linear")
    peer, pooled = make_peer("ASTModel", 64, 57), lambda answer: answer.pooler_output
    table = ast.build_table(config)
    assert_same(vitrail.build_from(config), peer, table, spectrogram(64, 57), saved_state, pooled)


KINDS = {
    "classifier": ("ASTForAudioClassification", {}, 7),
    "other strides": ("ASTForAudioClassification", {"stride": 12}, 7),
    "no bias of q, k and v": ("ASTForAudioClassification", {"qkv_bias": False}, 7),
    "classifier without classes": ("ASTForAudioClassification", {"num_labels": 0}, None),
    "body": ("ASTModel", {}, None),
}


@torch.no_grad()
def answer(kind: str, peer: nn.Module, sound: Tensor) -> Tensor:
    answers = peer.eval()(sound)
    return answers.logits if kind.endswith("Classification") else answers.pooler_output


@pytest.mark.parametrize(("kind", "settings", "classes"), KINDS.values(), ids=KINDS)
def test_files_give_transformers_outputs_and_come_back_bit_for_bit(kind, settings, classes, tmp_path):
    peer, sound = make_peer(kind, 64, 57, **settings), spectrogram(64, 57)
    peer.save_pretrained(tmp_path / "hf")
    extractor = transformers.ASTFeatureExtractor(
        num_mel_bins=64, max_length=57, mean=-3.5, std=2.25, sampling_rate=8000
    )
    extractor.save_pretrained(tmp_path / "hf")
    model = vitrail.load(tmp_path / "hf")
    assert (model.config.image_size, model.config.classes) == ((64, 57), classes)
    assert model.preprocessing == sound_preprocessing(LogMel(8000, 64), 57, -3.5, 4.5)
    expected = answer(kind, peer, sound)
    with torch.no_grad():
        assert relative_difference(model(sound), expected) <= TOLERANCE
    vitrail.save(model, tmp_path / "own.safetensors")
    report = convert(tmp_path / "own.safetensors", tmp_path / "back", "hf")
    assert not [note for note in report.notes if "record" in note or "assumptions" in note]
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert theirs.keys() == back.keys()
    assert all(is_bit_identical(back[name], theirs[name]) for name in back)
    again, info = getattr(transformers, kind).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert relative_difference(answer(kind, again, sound[:, 0].transpose(1, 2)), expected) <= TOLERANCE
    read = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "back")
    assert read.to_dict() == extractor.to_dict()
    assert vitrail.load(tmp_path / "back").preprocessing == model.preprocessing


def test_states_in_the_names_of_modules_are_read(tmp_path):
    """A plain `torch.save(model.state_dict())` has no settings: stride, mel bins and frames are the published ones."""
    peer = make_peer("ASTForAudioClassification", 128, 98)
    torch.save(peer.state_dict(), tmp_path / "state.pt")
    model = vitrail.load(tmp_path / "state.pt", assume={"heads": 3})
    assert model.config.image_size == (128, 96)  # the fewest frames of nine positions in time
    assert model.preprocessing == sound_preprocessing(LogMel(), 96, ast.MEAN, 2 * ast.STD)
    sound = spectrogram(128, 98)
    with torch.no_grad():
        assert relative_difference(model(sound), answer("ASTForAudioClassification", peer, sound)) <= TOLERANCE
    exact = vitrail.load(tmp_path / "state.pt", assume={"heads": 3, "size": "128x98", "stride": 10})
    assert exact.config.image_size == (128, 98)
    with pytest.raises(
        ValueError, match="64 mel bins and 98 frames have 5×9 patches, and the checkpoint 108 positions"
    ):
        vitrail.load(tmp_path / "state.pt", assume={"heads": 3, "size": "64x98"})


def test_a_grey_deit_is_no_ast(tmp_path):
    settings = transformers.DeiTConfig(**HF, image_size=64, patch_size=16, num_channels=1)
    torch.manual_seed(0)
    transformers.DeiTModel(settings, add_pooling_layer=False).save_pretrained(tmp_path / "deit")
    assert vitrail.load(tmp_path / "deit").config.pool == configure("S/16").pool


def test_damaged_checkpoints_are_refused(tmp_path):
    make_peer("ASTForAudioClassification", 64, 57).save_pretrained(tmp_path)
    path, settings = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    state = load_file(path)
    for lost in ("classifier.layernorm.bias", f"{ast.ROOT}encoder.layer.1.output.dense.weight"):
        save_file({name: tensor for name, tensor in state.items() if name != lost}, path, {"format": "pt"})
        with pytest.raises(ValueError, match=f"not loaded.*\n.*\n.*{lost} .* is missing"):
            vitrail.load(tmp_path)
    save_file(state, path, {"format": "pt"})
    for changes, message in (
        ({"time_stride": 12}, "frequency_stride 10 and time_stride 12 in config.json differ: only one stride"),
        ({"max_length": 67}, r"64 mel bins and 67 frames have 5×6 patches, and the checkpoint 25 positions"),
        ({"frequency_stride": 20, "time_stride": 20}, "stride must be 1 to the patch size 16, got 20"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ValueError, match=message):
            vitrail.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    extractor = {"feature_extractor_type": "ASTFeatureExtractor", "num_mel_bins": "many"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor))
    with pytest.raises(ValueError, match=r"unsupported preprocessor_config.json: invalid literal .*'many'"):
        vitrail.load(tmp_path)


def test_other_formats_refuse_an_ast_and_ast_refuses_other_models(tmp_path):
    vitrail.save(vitrail.build_from(configure_like(64, 57)), tmp_path / "ast.safetensors")
    for to in ("timm", "torchvision", "big_vision", "clip", "vit-pytorch"):
        with pytest.raises(ValueError, match="cannot express this model"):
            convert(tmp_path / "ast.safetensors", tmp_path / "out", to)
    for more, reason in (
        ({"channels": 3}, "it takes spectrograms of one channel"),
        ({"head": "linear"}, "its classifier is a LayerNorm and a linear layer"),
        ({"registers": 1}, "no registers"),
    ):
        vitrail.save(vitrail.build_from(configure_like(64, 57, **more)), tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=f"transformers' AST cannot express this model: .*{reason}"):
            convert(tmp_path / "other.safetensors", tmp_path / "out", "hf")
    sound = sound_preprocessing(LogMel(frame_length=200, mel_bins=64), 57, 0.0, 1.0)
    vitrail.save(vitrail.build_from(configure_like(64, 57)), tmp_path / "fast.safetensors", preprocessing=sound)
    with pytest.raises(ValueError, match="frame_length is always 400, here 200"):
        convert(tmp_path / "fast.safetensors", tmp_path / "out", "hf")


def test_published_sizes_have_the_parameters_of_transformers():
    """86.6 million with AudioSet's 527 classes, the body alone 86.2 million."""
    with torch.device("meta"):
        peers = {
            527: transformers.ASTForAudioClassification(transformers.ASTConfig(num_labels=527)),
            None: transformers.ASTModel(transformers.ASTConfig()),
        }
    for classes, peer in peers.items():
        config = configure("B/16", classes=classes, **{**AST, "head": "linear" if classes is None else "norm-linear"})
        cost, expected = count(config), sum(parameter.numel() for parameter in peer.parameters())
        assert cost.params == expected == {527: 86_594_063, None: 86_187_264}[classes]
        assert cost.tokens == 12 * 101 + 2
    assert isinstance(configure("B/16", **AST).head, NormLinear)


AST = {
    "embed": Patches(16, overlap=6),
    "pool": "output-mean",
    "head": "norm-linear",
    "image_size": (128, 1024),
    "channels": 1,
}
