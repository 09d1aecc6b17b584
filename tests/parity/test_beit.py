"""BEiT and timm's `vit_relpos` models: same weights, same logits and gradients as timm and transformers at every size."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
import transformers
from safetensors.torch import load_file
from timm.models.beit import Beit, checkpoint_filter_fn
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos

import vitrail
from tests.parity.made import saved
from tests.parity.peers import assert_same, plain_state, relative_difference, saved_state, spread
from vitrail.checkpoints.convert import collect_assumptions, convert, is_bit_identical
from vitrail.checkpoints.formats import beit, timm
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm, ResPostNorm
from vitrail.nn.position import Learned1D, Relative, RelativeMLP

Size = tuple[int, int]
SIZES: tuple[Size, ...] = ((64, 64), (48, 48), (96, 96), (48, 96), (64, 96))  # the last one changes one side only
SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 64, "patch_size": 16, "num_classes": 7}
HF = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 7,
    "vocab_size": 32,
}
OURS = {"patch": 16, "width": 64, "depth": 2, "heads": 4, "image_size": 64, "classes": 7}
BEIT = {**OURS, "prefix": "class", "block": PreNorm(key_bias=False, layer_scale=0.1)}
ASSUME = {"heads": 4}
LEARNED = Learned1D()

# timm's arguments, and ours
BEITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every layer": ({"use_abs_pos_emb": False, "use_rel_pos_bias": True}, {"position": Relative()}),
    "shared": ({"use_abs_pos_emb": False, "use_shared_rel_pos_bias": True}, {"position": Relative("shared")}),
    "absolute too": ({"use_rel_pos_bias": True}, {"position": Relative(absolute=LEARNED)}),
    "absolute": ({}, {"position": LEARNED}),
    "class token": (
        {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "global_pool": "token"},
        {"position": Relative(), "pool": "class"},
    ),
}


def make_beit(name: str, **more: Any) -> Beit:
    arguments = {**SMALL, "init_values": 0.1, **BEITS[name][0], **more}
    return Beit(**arguments).eval()


def spread_more(model: Any) -> Any:
    """Randomise all weights, and the positions more, so that the rule is seen in the outputs."""
    with torch.no_grad():
        for name, parameter in spread(model, 0.1).named_parameters():
            if "pos" in name:
                parameter.add_(3 * torch.randn_like(parameter))
    return model


def images(size: Size) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


# --- BEiT in timm ---


@pytest.mark.parametrize("name", BEITS)
def test_beit_gives_timm_logits_and_gradients(name):
    config = configure(**{**BEIT, "pool": "mean-norm", **BEITS[name][1]})
    theirs, table = spread(make_beit(name)), beit.build_table(config, "")
    assert_same(vitrail.build_from(config), theirs, table, torch.randn(2, 3, 64, 64))


def test_beit_on_a_grid_that_is_not_square_gives_timm_logits_and_gradients():
    config = configure(**{**BEIT, "pool": "mean-norm", "position": Relative(), "image_size": (32, 80)})
    theirs = spread(make_beit("every layer", img_size=(32, 80)))
    assert_same(vitrail.build_from(config), theirs, beit.build_table(config, ""), torch.randn(2, 3, 32, 80))


@pytest.mark.parametrize("name", BEITS)
@torch.inference_mode()
def test_timm_beit_at_other_sizes(name, tmp_path):
    theirs = spread_more(make_beit(name))
    path = saved(tmp_path, theirs.state_dict())
    flexible = vitrail.load(path, assume=ASSUME)
    assert not flexible.config.block.key_bias
    by_default = vitrail.load(path, assume={**ASSUME, "resampling": "timm"})
    for size in SIZES:
        peer = make_beit(name, img_size=size)
        peer.load_state_dict(checkpoint_filter_fn(dict(theirs.state_dict()), peer))  # as timm resizes a checkpoint
        expected = peer(images(size))
        for model in (flexible, vitrail.load(path, assume=ASSUME, image_size=size)):
            assert relative_difference(model(images(size)), expected) <= 1e-4, size
        if size != (64, 64) and name in ("every layer", "shared"):  # the other rule would be seen
            assert relative_difference(by_default(images(size)), expected) > 1e-3, size


@pytest.mark.parametrize("name", BEITS)
@pytest.mark.parametrize("classes", [7, 0])
def test_timm_beit_round_trip(name, classes, tmp_path):
    theirs = spread(make_beit(name, num_classes=classes))
    path = saved(tmp_path, theirs.state_dict())
    report = convert(path, tmp_path / "back.safetensors", "timm", assume=ASSUME)
    assert report.notes == (["the file does not record 4 heads: give it when loading"] if name == "absolute" else [])
    assert_bit_identical(theirs.state_dict(), load_file(report.path))
    convert(path, tmp_path / "own.safetensors", "vitrail", assume=ASSUME)
    again = convert(tmp_path / "own.safetensors", tmp_path / "third.safetensors", "timm")
    assert_bit_identical(theirs.state_dict(), load_file(again.path))


def assert_bit_identical(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert all(is_bit_identical(found[name], tensor) for name, tensor in expected.items())


# --- the release ---


def make_release(folder: Path, pretraining: bool = False) -> tuple[Path, Beit]:
    """Write a file with the names of Microsoft's release: buffers of indices, and what pre-training needs."""
    kind = "shared" if pretraining else "every layer"
    model = spread(make_beit(kind, **({"num_classes": 0, "global_pool": "token"} if pretraining else {})))
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        index = getattr(module, "relative_position_index", None)
        if index is not None:
            state[f"{name}.relative_position_index"] = index
    if pretraining:
        more = {"mask_token": (1, 1, 64), "lm_head.weight": (32, 64), "lm_head.bias": (32,)}
        state |= {name: torch.randn(shape) for name, shape in more.items()}
    return saved(folder, {"model": state}, "beit_base_patch16_64.pth"), model


def test_the_release_is_read_without_its_indices(tmp_path):
    path, theirs = make_release(tmp_path)
    with inspect_checkpoint(path, ASSUME) as found:
        assert found.detection.format == "beit"
        assert found.detection.is_complete
        assert set(found.detection.ignored.values()) == {"computed, not learned"}
    with torch.inference_mode():
        assert (
            relative_difference(vitrail.load(path, assume=ASSUME)(images((64, 64))), theirs(images((64, 64)))) <= 1e-4
        )


def test_a_file_of_pre_training_gives_features_and_names_what_it_leaves_out(tmp_path):
    path, theirs = make_release(tmp_path, pretraining=True)
    with inspect_checkpoint(path, ASSUME) as found:
        ignored = found.detection.ignored
        assert {ignored[name] for name in ("mask_token", "lm_head.weight")} == {"used in pre-training only"}
        assert found.detection.assumptions["pool"] == ("mean", "pre-training predicts the patches")
    image = images((64, 64))
    with torch.inference_mode():
        tokens = theirs.forward_features(image)
        assert relative_difference(vitrail.load(path, assume=ASSUME)(image), tokens[:, 1:].mean(1)) <= 1e-4
        model = vitrail.load(path, assume={**ASSUME, "pool": "class"})
        assert relative_difference(model(image), tokens[:, 0]) <= 1e-4
    with pytest.raises(ValueError, match="its BEiT pools by the class token, or by the mean with the norm after it"):
        convert(path, tmp_path / "out.safetensors", "timm", assume=ASSUME)


@pytest.mark.parametrize(
    ("name", "mean", "resize"),
    [("beit_base_patch16_224", 0.5, 248), ("beitv2_base_patch16_224", 0.485, 248), ("weights", 0.5, 248)],
)
def test_preprocessing_is_that_of_the_version(name, mean, resize):
    config = configure("B/16", position=Relative(), prefix="class", block=PreNorm(key_bias=False, layer_scale=0.1))
    pipeline, _ = beit.default_preprocessing(config, name)
    assert (pipeline.mean[0], pipeline.resize, pipeline.interpolation) == (mean, (resize, resize), "bicubic")


# --- BEiT in transformers ---

HF_BEITS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "every layer": ("BeitForImageClassification", {"use_relative_position_bias": True}, {"position": Relative()}),
    "shared": (
        "BeitForImageClassification",
        {"use_shared_relative_position_bias": True},
        {"position": Relative("shared")},
    ),
    "absolute too": (
        "BeitForImageClassification",
        {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
        {"position": Relative(absolute=LEARNED)},
    ),
    "absolute": (
        "BeitForImageClassification",
        {"use_absolute_position_embeddings": True},
        {"position": LEARNED},
    ),
    "class token": (
        "BeitForImageClassification",
        {"use_relative_position_bias": True, "use_mean_pooling": False},
        {"position": Relative(), "pool": "class"},
    ),
    "body": ("BeitModel", {"use_relative_position_bias": True}, {"position": Relative(), "classes": None}),
    "Data2Vec": (
        "Data2VecVisionForImageClassification",
        {"use_relative_position_bias": True},
        {"position": Relative()},
    ),
}


def make_hugging(name: str, **more: Any) -> Any:
    kind, settings, _ = HF_BEITS[name]
    family = kind.partition("For")[0].removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**{**HF, **settings, **more})
    return getattr(transformers, kind)(config).eval()


@pytest.fixture(autouse=True)
def _uncached_index(monkeypatch):
    """transformers caches index tensors; one that was made in inference mode has no gradients later."""
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias
    from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionRelativePositionBias

    for module in (BeitRelativePositionBias, Data2VecVisionRelativePositionBias):
        uncached = module.generate_relative_position_index.__wrapped__
        monkeypatch.setattr(module, "generate_relative_position_index", staticmethod(uncached))


def read_answer(answer: Any) -> Tensor:
    return answer.logits if hasattr(answer, "logits") else answer.pooler_output


@pytest.mark.parametrize("name", HF_BEITS)
def test_beit_gives_transformers_logits_and_gradients(name):
    config = configure(**{**BEIT, "eps": 1e-12, "pool": "mean-norm", **HF_BEITS[name][2]})
    theirs, root = spread(make_hugging(name)), {"body": "", "Data2Vec": "data2vec_vision."}.get(name, "beit.")
    table = beit.build_table(config, root, beit.TRANSFORMERS)
    assert_same(vitrail.build_from(config), theirs, table, torch.randn(2, 3, 64, 64), saved_state, read_answer)


@pytest.mark.parametrize("name", HF_BEITS)
@torch.inference_mode()
def test_transformers_beit_at_other_sizes(name, tmp_path):
    peer = spread_more(make_hugging(name))
    peer.save_pretrained(tmp_path)
    flexible, by_timm = vitrail.load(tmp_path), vitrail.load(tmp_path, assume={"resampling": "timm"})
    for size in SIZES:
        expected = read_answer(peer(images(size), interpolate_pos_encoding=True))
        for model in (flexible, vitrail.load(tmp_path, image_size=size)):
            assert relative_difference(model(images(size)), expected) <= 1e-4, size
        if size != (64, 64) and name in ("every layer", "shared"):  # the other rule would be seen
            assert relative_difference(by_timm(images(size)), expected) > 1e-3, size


@pytest.mark.parametrize("name", HF_BEITS)
@torch.inference_mode()
def test_transformers_beit_round_trip(name, tmp_path):
    peer = spread(make_hugging(name))
    peer.save_pretrained(tmp_path / "in")
    report = convert(tmp_path / "in", tmp_path / "back", "hf")
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "in", report.path))
    assert_bit_identical({re.sub("^data2vec_vision", "beit", name): tensor for name, tensor in expected.items()}, found)
    auto = transformers.AutoModel if name == "body" else transformers.AutoModelForImageClassification
    again, about = auto.from_pretrained(report.path, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    for size in ((64, 64), (48, 96)):
        wanted = read_answer(peer(images(size), interpolate_pos_encoding=True))
        assert (
            relative_difference(read_answer(again.eval()(images(size), interpolate_pos_encoding=True)), wanted) <= 1e-5
        )
    timms = convert(tmp_path / "in", tmp_path / "timm.safetensors", "timm")
    assert any("resampled to other sizes by another rule" in note for note in timms.notes)
    peer_of_timm = make_beit(name if name in BEITS else "every layer", num_classes=0 if name == "body" else 7)
    peer_of_timm.load_state_dict(load_file(timms.path), strict=True)
    for module in peer_of_timm.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-12
    assert relative_difference(peer_of_timm(images((64, 64))), read_answer(peer(images((64, 64))))) <= 1e-4


@torch.inference_mode()
def test_pre_training_of_transformers_gives_features(tmp_path):
    settings = {"use_shared_relative_position_bias": True, "use_mask_token": True}
    peer = spread(transformers.BeitForMaskedImageModeling(transformers.BeitConfig(**HF, **settings))).eval()
    peer.save_pretrained(tmp_path)
    with inspect_checkpoint(tmp_path) as found:
        assert found.detection.format == "transformers beit pre-training"
        assert set(found.detection.ignored) == {"beit.embeddings.mask_token", "lm_head.weight", "lm_head.bias"}
    tokens = peer.layernorm(peer.beit(images((64, 64))).last_hidden_state)
    assert relative_difference(vitrail.load(tmp_path)(images((64, 64))), tokens[:, 1:].mean(1)) <= 1e-4


def test_tables_that_are_not_square_are_refused_in_transformers(tmp_path):
    make_hugging("every layer", image_size=[48, 64]).save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="exchanges the sides of a table that is not square, got 48×64"):
        vitrail.load(tmp_path / "in")
    config = configure(**{**BEIT, "pool": "mean-norm", "position": Relative(), "image_size": (32, 80)})
    vitrail.save(vitrail.build_from(config), tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match="exchanges the sides of images that are not square"):
        convert(tmp_path / "own.safetensors", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


# --- refusals ---


def test_files_that_differ_are_refused_in_one_line(tmp_path):
    state = dict(make_beit("every layer").state_dict())
    table = "blocks.0.attn.relative_position_bias_table"
    other = "blocks.1.attn.relative_position_bias_table"
    shared = {"rel_pos_bias.relative_position_bias_table": state[table].clone()}
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "foreign": (state | {"stages.0.blocks.0.attn.qkv.weight": torch.ones(3)}, "stages.0.blocks.0.attn.qkv.weight"),
        "short": (state | {table: state[table][:50], other: state[other][:50]}, "47 relative offsets do not match"),
        "one-short": (state | {other: state[other][:50]}, r"blocks.1.attn.relative_position_bias_table is \[50, 4\]"),
        "missing": ({name: t for name, t in state.items() if name != other}, f"{other} .* is missing"),
        "mixed": (state | shared, "of every layer and shared ones: only one of both is supported"),
    }
    for name, (tensors, message) in cases.items():
        path = saved(tmp_path, tensors, f"{name}.safetensors")
        with pytest.raises(ValueError, match=message):
            vitrail.load(path, assume=ASSUME)


# --- vit_relpos ---

RELPOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "relpos_small": ({"fc_norm": True}, {"position": RelativeMLP(), "pool": "mean-norm", "layer_scale": 1e-6}),
    "srelpos": (
        {"rel_pos_dim": 24, "shared_rel_pos": True},
        {"position": RelativeMLP("shared", 24), "pool": "mean", "layer_scale": 1e-6},
    ),
    "cls": (
        {"rel_pos_dim": 16, "class_token": True, "global_pool": "token"},
        {"position": RelativeMLP(hidden=16), "pool": "class", "layer_scale": 1e-6},
    ),
    "clsgap": (
        {"fc_norm": True, "class_token": True},
        {"position": RelativeMLP(), "pool": "mean-norm", "prefix": "class", "layer_scale": 1e-6},
    ),
    "rpn": ({"block_fn": ResPostRelPosBlock}, {"position": RelativeMLP(), "pool": "mean", "block": ResPostNorm()}),
    "mlp-swin": (
        {"rel_pos_type": "mlp-swin"},
        {"position": RelativeMLP(scaled=True), "pool": "mean", "layer_scale": 1e-6},
    ),
    "bias": ({"rel_pos_type": "bias"}, {"position": Relative(), "pool": "mean", "layer_scale": 1e-6}),
}


def make_relpos(name: str, size: Size = (64, 64), **more: Any) -> VisionTransformerRelPos:
    return VisionTransformerRelPos(**{**SMALL, "img_size": size, **RELPOS[name][0], **more}).eval()


@pytest.mark.parametrize("name", RELPOS)
def test_relpos_gives_timm_logits_and_gradients(name):
    theirs, config = spread(make_relpos(name)), configure(**{**OURS, **RELPOS[name][1]})
    assert_same(vitrail.build_from(config), theirs, timm.map_vit(config), torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize("name", RELPOS)
@torch.inference_mode()
def test_relpos_is_read_at_every_size_and_written_back(name, tmp_path):
    qkv_bias = name == "rpn"  # most have none
    theirs = spread(make_relpos(name, qkv_bias=qkv_bias), 0.1)
    path = saved(tmp_path, theirs.state_dict())
    model = vitrail.load(path, assume=ASSUME | {"size": 64})
    assert type(model.config.position) is type(RELPOS[name][1]["position"])
    assert type(model.config.block) is (ResPostNorm if name == "rpn" else PreNorm)
    for size in SIZES if name != "bias" else SIZES[:1]:  # timm does not resample a table here
        peer = make_relpos(name, size, qkv_bias=qkv_bias)
        peer.load_state_dict(theirs.state_dict(), strict=True)
        fixed = vitrail.load(path, assume=ASSUME | {"size": 64}, image_size=size)
        for each in (model, fixed):
            assert relative_difference(each(images(size)), peer(images(size))) <= 1e-4, size
    convert(path, tmp_path / "back.safetensors", "timm", assume=ASSUME | {"size": 64})
    assert_bit_identical(theirs.state_dict(), load_file(tmp_path / "back.safetensors"))
    convert(path, tmp_path / "own.safetensors", "vitrail", assume=ASSUME | {"size": 64})
    assert vitrail.load(tmp_path / "own.safetensors").config == model.config
    for to in ("hf", "torchvision", "big_vision", "dinov2", "clip"):
        out = tmp_path / {"hf": "hf", "big_vision": "out.npz"}.get(to, f"{to}.pth")
        with pytest.raises(ValueError, match="cannot express this model"):
            convert(path, out, to, assume=ASSUME | {"size": 64})


@torch.inference_mode()
def test_the_kind_of_layer_can_be_given(tmp_path):
    """Without LayerScale, both kinds of layers have the same names."""
    block = partial(make_relpos, "relpos_small", init_values=None)
    theirs = spread(block())
    path = saved(tmp_path, theirs.state_dict())
    with inspect_checkpoint(path, ASSUME) as found:
        assert found.detection.assumptions["block"][0] == "res-post"
    model = vitrail.load(path, assume=ASSUME | {"block": "pre", "size": 64})
    assert relative_difference(model(images((64, 64))), theirs(images((64, 64)))) <= 1e-4
    assert collect_assumptions(model.config)["block"] == "pre"
    report = convert(path, tmp_path / "out.safetensors", "timm", assume=ASSUME | {"block": "pre", "size": 64})
    assert any("pre-norm layers" in note for note in report.notes)
    with pytest.raises(ValueError, match="block must be pre or res-post, got post"):
        vitrail.load(path, assume=ASSUME | {"block": "post"})
    named = saved(
        tmp_path, spread(make_relpos("rpn", rel_pos_type="bias")).state_dict(), "vit_relpos_x_patch16_rpn_64.pth"
    )
    with inspect_checkpoint(named, ASSUME) as found:
        assert found.detection.assumptions["block"] == ("res-post", "the file's name")


@torch.inference_mode()
def test_norms_at_the_end_of_branches_with_learned_positions_are_told_by_the_name(tmp_path):
    arguments = {**SMALL, "class_token": False, "global_pool": "avg", "qkv_bias": False, "init_values": 1e-5}
    theirs = spread(VisionTransformer(**arguments, block_fn=ResPostBlock)).eval()
    path = saved(tmp_path, theirs.state_dict(), "vit_base_patch16_rpn_64.safetensors")
    model = vitrail.load(path, assume=ASSUME)
    assert isinstance(model.config.block, ResPostNorm)
    assert relative_difference(model(images((64, 64))), theirs(images((64, 64)))) <= 1e-4
    report = convert(path, tmp_path / "back.safetensors", "timm", assume=ASSUME)
    assert "the file does not record 4 heads, residual post-norm layers: give it when loading" in report.notes
    assert_bit_identical(theirs.state_dict(), load_file(report.path))
    with pytest.raises(ValueError, match="its norms stand before attention and MLP"):
        convert(path, tmp_path / "out.npz", "big_vision", assume=ASSUME)


def test_models_that_timm_lacks_are_refused_by_name(tmp_path):
    cases = {
        "at most a class token": {"position": "relative-mlp", "registers": 2},
        "norms at the end of a branch have no LayerScale": {
            "block": ResPostNorm(layer_scale=0.1),
            "position": "relative",
        },
        "only its BEiT has learned and relative": {"position": Relative(absolute=LEARNED)},
        "its relative models have no SwiGLU": {"position": "relative-mlp", "mlp": "swiglu"},
    }
    for message, slots in cases.items():
        vitrail.save(vitrail.build(**{**OURS, **slots}), tmp_path / "own.safetensors")
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "own.safetensors", tmp_path / "out.safetensors", "timm")
    assert plain_state(vitrail.build(**OURS, position="relative-mlp"))  # the model itself is built
