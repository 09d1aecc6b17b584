"""Models load completely or are refused with the differences; labels and preprocessing load with them."""

import copy
import json

import pytest
import torch
from PIL import Image

import vitrail
from tests.variants import SMALL, VIT_SLOTS
from vitrail.checkpoints import keys
from vitrail.checkpoints.card import build_report
from vitrail.checkpoints.convert import SAMPLE_IMAGE, convert
from vitrail.checkpoints.formats import timm as timm_names
from vitrail.checkpoints.io import pytorch as pickled
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.models.adapt import with_channels, with_classes, with_learned_positions, with_positions_for, with_size
from vitrail.models.registry import config_from_json, configure
from vitrail.nn.position import Learned1D
from vitrail.utils.json import ALIASES, to_json

CONFIG = configure(patch=16, width=64, depth=2, heads=1, image_size=64, classes=5)


@pytest.fixture
def theirs():
    model = vitrail.build_from(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return keys.export_state(timm_names.map_vit(CONFIG), model.state_dict())


def written(tmp_path, tensors, name="weights.safetensors"):
    safetensors.save_safetensors(tmp_path / name, tensors, {})
    return tmp_path / name


def test_loaded_model_is_in_evaluation_mode_with_its_contract(tmp_path, theirs):
    model = vitrail.load(written(tmp_path, theirs))
    assert not model.training
    assert model.config == CONFIG
    assert model.labels is None
    image = model.preprocessing(Image.open(SAMPLE_IMAGE))
    assert image.shape == (3, 64, 64)
    assert model(image.unsqueeze(0)).shape == (1, 5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    copied = copy.deepcopy(model)
    copied.train()(image.unsqueeze(0)).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_model_does_not_depend_on_its_file(tmp_path, theirs):
    path = written(tmp_path, theirs)
    owner, mapped = vitrail.load(path, mmap=False), vitrail.load(path)
    before = owner.head.weight.clone()
    convert(path, path, "vitrail", classes=3)  # written beside it and renamed, so the old pages stay
    assert torch.equal(mapped.head.weight, before)
    with torch.no_grad():
        vitrail.load(path).head.bias.add_(1)  # a private copy: the file does not change
    assert vitrail.load(path).head.bias.tolist() == [0, 0, 0]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(owner.head.weight, before)


def test_tensor_of_a_mapped_model_is_saved_without_the_file(tmp_path, theirs):
    model = vitrail.load(written(tmp_path, theirs))
    torch.save(model.head.state_dict(), tmp_path / "head.pth")
    assert (tmp_path / "head.pth").stat().st_size < 10_000


@pytest.mark.parametrize("position", ["sincos2d", "rotary2d", "sinusoid1d"])
def test_positions_without_weights_run_after_loading(position, tmp_path):
    model = vitrail.build(patch=16, width=64, depth=1, heads=1, image_size=64, classes=5, position=position)
    vitrail.save(model, tmp_path / "m.safetensors")
    again = vitrail.load(tmp_path / "m.safetensors")
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(image), model.eval()(image))


# --- refusals ---


def test_one_missing_tensor_is_refused_and_named(tmp_path, theirs):
    del theirs["blocks.1.attn.qkv.bias"]
    path = written(tmp_path, theirs)
    with pytest.raises(
        ValueError,
        match=r"(?s)closest format is timm's.*1 differ:\n  blocks.1.attn.qkv.bias \[192\] is missing.*allow_missing=",
    ):
        vitrail.load(path)


def test_any_one_missing_tensor_is_refused_and_named(tmp_path, theirs):
    for name in theirs:
        path = written(tmp_path, {other: tensor for other, tensor in theirs.items() if other != name})
        with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
            vitrail.load(path)
        if name not in ("patch_embed.proj.weight", "pos_embed"):  # without these nothing is known
            assert str(error.value).count("is missing") == 1
            assert "1 differ:" in str(error.value)
            assert vitrail.load(path, allow_missing=[name]).card["random"]


def test_an_unexpected_tensor_is_refused_and_named(tmp_path, theirs):
    path = written(tmp_path, theirs | {"blocks.0.attn.gate": torch.ones(3)})
    with pytest.raises(ValueError, match=r"blocks.0.attn.gate \[3\] is unexpected"):
        vitrail.load(path)
    with pytest.raises(ValueError, match=r"blocks.0.attn.gate \[3\] is unexpected"):
        vitrail.load(path, allow_missing=["*"])


def test_wrong_shape_is_refused_with_both_shapes(tmp_path, theirs):
    theirs["blocks.1.mlp.fc1.weight"] = theirs["blocks.1.mlp.fc1.weight"].T.contiguous()
    with pytest.raises(ValueError, match=r"blocks.1.mlp.fc1.weight is \[64, 256\], expected \[256, 64\]"):
        vitrail.load(written(tmp_path, theirs))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value, tmp_path, theirs):
    theirs["norm.weight"][3] = value
    path = written(tmp_path, theirs)
    with pytest.raises(ValueError, match=r"values that are not finite in 1: norm.weight"):
        vitrail.load(path)
    with inspect_checkpoint(path) as found:
        assert build_report(found, lambda done, total: None)["not_finite"] == ["norm.weight"]


def test_integer_weights_are_refused(tmp_path, theirs):
    with pytest.raises(ValueError, match=r"stored as torch.int8, not as floating-point"):
        vitrail.load(written(tmp_path, {name: tensor.to(torch.int8) for name, tensor in theirs.items()}))


def test_unknown_format_error_names_the_closest(tmp_path, theirs):
    renamed = {name.replace("patch_embed", "stem"): tensor for name, tensor in theirs.items()}
    with pytest.raises(
        ValueError, match=r"unknown format: .* closest format is timm, .* patch_embed.proj.weight.*unknown: stem"
    ):
        vitrail.load(written(tmp_path, renamed))
    with pytest.raises(ValueError, match=r"No name belongs to a Vision Transformer"):
        vitrail.load(written(tmp_path, {"layer1.conv": torch.ones(1)}))


def test_missing_tensors_are_random_only_when_allowed_and_listed(tmp_path, theirs):
    for name in ("blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.bias"):
        del theirs[name]
    path = written(tmp_path, theirs)
    with pytest.raises(ValueError, match=r"blocks.1.attn.qkv.bias \[192\] is missing"):
        vitrail.load(path, allow_missing=["*.qkv.weight"])
    model = vitrail.load(path, allow_missing=["blocks.1.attn.qkv.*"])
    assert model.card["random"] == ["blocks.1.msa.qkv.weight", "blocks.1.msa.qkv.bias"]
    proof = convert(path, tmp_path / "a.safetensors", "vitrail", allow_missing=["blocks.1.attn.qkv.*"])
    assert "random values, allowed to be missing: blocks.1.msa.qkv.weight" in proof.notes[0]


def test_undetermined_heads_must_be_given(tmp_path):
    config = configure(patch=16, width=48, depth=1, heads=3, image_size=32, classes=5)
    path = written(tmp_path, keys.export_state(timm_names.map_vit(config), vitrail.build_from(config).state_dict()))
    with pytest.raises(ValueError, match=r"tensors do not determine heads .* assume=\{'heads': "):
        vitrail.load(path)
    assert vitrail.load(path, assume={"heads": 3}).config == config
    with pytest.raises(ValueError, match=r"5 heads do not divide the width 48"):
        vitrail.load(path, assume={"heads": 5})
    with pytest.raises(ValueError, match=r"unknown assumption 'hats'"):
        vitrail.load(path, assume={"hats": 5})


def test_oblong_grids_must_be_given(tmp_path):
    config = configure(patch=16, width=64, depth=1, heads=1, image_size=(32, 96), classes=5)
    path = written(tmp_path, keys.export_state(timm_names.map_vit(config), vitrail.build_from(config).state_dict()))
    with pytest.raises(ValueError, match=r"assume=.'size': 'HEIGHTxWIDTH'"):
        vitrail.load(path)
    assert vitrail.load(path, assume={"size": "32x96"}).config == config
    with pytest.raises(ValueError, match=r"an image of 32×64 does not have"):
        vitrail.load(path, assume={"size": "32x64"})


# --- kinds of number ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_float32_by_default_and_stored_dtype_on_request(dtype, tmp_path, theirs):
    path = written(tmp_path, {name: tensor.to(dtype) for name, tensor in theirs.items()})
    assert {p.dtype for p in vitrail.load(path).parameters()} == {torch.float32}
    assert {p.dtype for p in vitrail.load(path, dtype=None).parameters()} == {dtype}
    for to, out in (("timm", "out.safetensors"), ("hf", "hf"), ("big_vision", "out.npz"), ("vitrail", "a.safetensors")):
        convert(path, tmp_path / out, to)
        with inspect_checkpoint(tmp_path / out) as found:
            assert found.dtypes == [dtype]


def test_mixed_dtypes_are_preserved(tmp_path, theirs):
    mixed = {name: t.half() if t.ndim > 1 else t for name, t in theirs.items()}
    convert(written(tmp_path, mixed), tmp_path / "a.safetensors", "vitrail")
    with inspect_checkpoint(tmp_path / "a.safetensors") as found:
        assert set(found.dtypes) == {torch.float16, torch.float32}
    assert vitrail.load(tmp_path / "a.safetensors")(torch.randn(1, 3, 64, 64)).dtype == torch.float32


# --- the artifact ---


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_every_variant_round_trips_through_one_file(slots, tmp_path):
    model = vitrail.build(**{**SMALL, **slots})
    vitrail.save(model, tmp_path / "model.safetensors")
    again = vitrail.load(tmp_path / "model.safetensors")
    assert again.config == model.config
    state, returned = model.state_dict(), again.state_dict()
    assert all(torch.equal(state[name], returned[name]) for name in state)


def test_resnet_round_trips_through_one_file(tmp_path):
    model = vitrail.build("R14x0.25", classes=3, image_size=64, root="small")
    vitrail.save(model, tmp_path / "model.safetensors")
    assert vitrail.load(tmp_path / "model.safetensors").config == model.config


def test_labels_preprocessing_and_card_round_trip(tmp_path, theirs):
    model = vitrail.load(written(tmp_path, theirs))
    pipeline = vitrail.Preprocessing((64, 64), (70, 70), interpolation="bilinear")
    labels = ["cœur", "b\nb", '"c"', "\\", "🪟"]
    recipe = {"epochs": 3, "lr": 1e-3}
    path = tmp_path / "m.safetensors"
    vitrail.save(
        model, path, labels=labels, preprocessing=pipeline, recipe=recipe, licence="cc0-1.0", metrics={"top1": 0.5}
    )
    again = vitrail.load(path)
    assert again.labels == tuple(labels)
    assert again.preprocessing == pipeline
    assert again.card["recipe"] == recipe
    assert again.card["licence"] == "cc0-1.0"
    with pytest.raises(ValueError, match=r"2 labels for a model of 5 classes: give one per class"):
        vitrail.save(model, path, labels=["a", "b"])
    with pytest.raises(ValueError, match=r"preprocessing gives 1 channels, the model takes 3"):
        vitrail.save(model, path, preprocessing=pipeline.with_channels(1))
    assert vitrail.load(path).labels == tuple(labels)


def test_safetensors_library_reads_the_artifact(tmp_path, theirs):
    library = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'vitrail[peers]'")
    vitrail.save(vitrail.load(written(tmp_path, theirs)), tmp_path / "m.safetensors")
    with library.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["vitrail"])["version"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Model"}, "unknown type 'Model'"),
        ({"depth": 12}, "unknown 'depth'"),
        ({"classes": "many"}, "config.classes is 'many'"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"image_size": [224]}, "config.image_size"),
        ({"eps": True}, "config.eps is True"),
        ({"pool": {"type": "Prefix", "outputs": 1, "registers": 0}}, "unknown type 'Prefix'"),
    ],
)
def test_invalid_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(to_json(CONFIG) | change)
    with pytest.raises(ValueError, match=r"lacks channels"):
        config_from_json({name: value for name, value in to_json(CONFIG).items() if name != "channels"})


def test_renamed_class_loads_under_its_earlier_name(monkeypatch):
    monkeypatch.setitem(ALIASES, "Model", "ViTConfig")
    monkeypatch.setitem(ALIASES, "Position", "Learned1D")
    data = to_json(CONFIG)
    assert config_from_json(data | {"type": "Model", "position": data["position"] | {"type": "Position"}}) == CONFIG


# --- labels and preprocessing of others ---


def test_labels_and_pipeline_of_a_transformers_directory_are_preserved(tmp_path):
    made = pytest.importorskip("tests.parity.made", reason="the peers are not installed: pip install 'vitrail[peers]'")
    folder = made.labelled(tmp_path / "in", ["cat", "dog", "cow"])
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    model = vitrail.load(folder)
    assert model.labels == ("cat", "dog", "cow")
    assert model.preprocessing.resize == (72, 72)
    assert model.preprocessing.mean == (0.1, 0.2, 0.3)
    assert model.card["licence"] == "apache-2.0"
    convert(folder, tmp_path / "hf", "hf")
    again = vitrail.load(tmp_path / "hf")
    assert (again.labels, again.preprocessing) == (model.labels, model.preprocessing)


def test_transformers_directory_opens_with_its_processor(tmp_path, theirs):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    labels = tuple("abcde")
    convert(written(tmp_path, theirs), tmp_path / "hf", "hf", labels=labels)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval()
    assert list(model.config.id2label.values()) == list(labels)
    ours = vitrail.load(tmp_path / "hf")
    with Image.open(SAMPLE_IMAGE) as picture:
        pixels = processor(picture, return_tensors="pt")["pixel_values"]
        assert (pixels - ours.preprocessing(picture)).abs().max() * 0.5 <= 1 / 255
    with torch.inference_mode():
        torch.testing.assert_close(model(pixels).logits, ours(pixels), rtol=1e-4, atol=1e-4)


def test_timm_settings_are_preserved(tmp_path, theirs):
    safetensors.save_safetensors(tmp_path / "model.safetensors", theirs, {})
    cfg = {
        "mean": [0.1, 0.2, 0.3],
        "std": [1, 1, 1],
        "interpolation": "bilinear",
        "crop_pct": 0.8,
        "crop_mode": "squash",
    }
    settings = {
        "architecture": "vit",
        "pretrained_cfg": cfg,
        "label_names": list("abcde"),
        "model_args": {"act_layer": "gelu_tanh"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = vitrail.load(tmp_path)
    assert model.labels == tuple("abcde")
    assert type(model.config.block.mlp).__name__ == "TanhGELU"
    assert (model.preprocessing.resize, model.preprocessing.fit) == ((80, 80), "squash")


def test_file_name_decides_the_normalisation_of_a_plain_vit(tmp_path, theirs):
    assert vitrail.load(written(tmp_path, theirs, "vit.safetensors")).preprocessing.mean == (0.5, 0.5, 0.5)
    named = vitrail.load(written(tmp_path, theirs, "deit_tiny.safetensors"))
    assert named.preprocessing.mean == (0.485, 0.456, 0.406)
    model = vitrail.load(written(tmp_path, theirs, "vit.safetensors"), assume={"mean": "imagenet", "crop": 1.0})
    assert model.preprocessing.mean == (0.485, 0.456, 0.406)
    assert model.preprocessing.resize == (64, 64)


# --- changes on the way ---


def test_new_classes_are_zero_and_have_no_labels(tmp_path, theirs):
    model = vitrail.load(written(tmp_path, theirs), classes=3)
    assert model.config.classes == 3
    assert model(torch.randn(1, 3, 64, 64)).tolist() == [[0, 0, 0]]
    features = vitrail.load(written(tmp_path, theirs), classes=None)
    assert features(torch.randn(1, 3, 64, 64)).shape == (1, 64)


def test_resized_model_equals_resampling_at_run_time(tmp_path, theirs):
    path = written(tmp_path, theirs)
    image = torch.randn(2, 3, 96, 128)
    model, resized = vitrail.load(path), vitrail.load(path, image_size=(96, 128))
    assert resized.config.image_size == (96, 128)
    assert resized.preprocessing.size == (96, 128)
    torch.testing.assert_close(resized(image), model(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in VIT_SLOTS if "position" in name or name in ("paper", "registers")])
def test_every_kind_of_position_is_resampled(name):
    model = vitrail.build(**{**SMALL, "image_size": 32, **VIT_SLOTS[name]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config, state = with_size(model.config, model.state_dict(), (48, 40))
    resized = vitrail.build_from(config)
    resized.load_state_dict(state)
    image = torch.randn(1, 3, 48, 40)
    torch.testing.assert_close(resized.eval()(image), model.eval()(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["R14x0.25", None])
def test_grey_model_equals_three_equal_channels(name):
    slots = {"patch": 8, "width": 32, "depth": 1, "heads": 2} if name is None else {}
    model = vitrail.build(name, image_size=32, classes=3, **slots)
    with torch.no_grad():
        model.head.weight.normal_()
    config, state = with_channels(model.config, model.state_dict(), 1)
    grey = vitrail.build_from(config)
    grey.load_state_dict(state)
    image = torch.randn(2, 1, 32, 32)
    if name is None:
        torch.testing.assert_close(grey.eval()(image), model.eval()(image.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)
    more, tiled = with_channels(model.config, model.state_dict(), 5)
    wide = vitrail.build_from(more)
    wide.load_state_dict(tiled)
    assert wide.eval()(image.expand(-1, 5, -1, -1)).shape == (2, 3)


def test_restated_positions_give_the_same_model():
    base = {"patch": 8, "width": 32, "depth": 1, "heads": 2, "image_size": 32, "classes": 3, "registers": 2}
    image = torch.randn(2, 3, 32, 32)
    for before in ("outputs", "none", "all"):
        model = vitrail.build(**base, position=Learned1D(prefix=before)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for after in ("outputs", "none", "all"):
            config, state = with_positions_for(model.config, model.state_dict(), after)
            other = vitrail.build_from(config).eval()
            other.load_state_dict(state)
            torch.testing.assert_close(other(image), model(image), rtol=1e-5, atol=1e-6)
    fixed = vitrail.build(**base, position="sincos2d").eval()
    config, state = with_learned_positions(fixed.config, fixed.state_dict())
    table = vitrail.build_from(config).eval()
    table.load_state_dict(state)
    assert torch.equal(table(image), fixed(image))


def test_classes_of_every_head():
    for slots in ({}, {"head": "pre-logits"}, {"prefix": "class+distillation"}, {"pool": "class+mean"}):
        model = vitrail.build(**{**SMALL, **slots})
        for classes in (9, None) if slots != {"prefix": "class+distillation"} else (9,):
            config, state = with_classes(model.config, model.state_dict(), classes)
            changed = vitrail.build_from(config)
            changed.load_state_dict(state)
            answer = changed.eval()(torch.randn(2, 3, *config.image_size))
            features = 64 if slots == {"pool": "class+mean"} else 32
            assert answer.shape == (2, features if classes is None else classes)
            assert answer.any() == (classes is None)  # a new head is zero, features are not
            kept = [name for name in state if not name.startswith("head.") or "pre_logits" in name]
            assert all(torch.equal(state[name], model.state_dict()[name]) for name in kept)


def test_failed_conversion_does_not_change_an_existing_file(tmp_path, theirs):
    out = tmp_path / "out.npz"
    out.write_bytes(b"the old file")
    config = configure(
        patch=16, width=64, depth=1, heads=1, image_size=32, registers=2, position=Learned1D(prefix="all")
    )
    path = written(tmp_path, keys.export_state(timm_names.map_vit(config), vitrail.build_from(config).state_dict()))
    with pytest.raises(
        ValueError, match=r"Google's \.npz cannot express this model: it has no distillation token and no registers"
    ):
        convert(path, out, "big_vision")
    with pytest.raises(ValueError, match=r"a file for big_vision must be named"):
        convert(written(tmp_path, theirs), tmp_path / "out.pth", "big_vision")
    assert out.read_bytes() == b"the old file"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match=r"exists and is not empty"):
        convert(written(tmp_path, theirs), tmp_path / "full", "hf")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*partial"))


def test_a_file_can_be_converted_in_its_place(tmp_path, theirs):
    path = written(tmp_path, theirs)
    convert(path, path, "vitrail")
    with inspect_checkpoint(path) as found:
        assert found.detection.format == "vitrail"


def test_prefixes_that_training_leaves_are_seen_through(tmp_path, theirs):
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in theirs.items()}
    pickled.save_pytorch(tmp_path / "ddp.pth", wrapped)
    model = vitrail.load(tmp_path / "ddp.pth")
    assert torch.equal(model.head.weight, theirs["head.weight"])
