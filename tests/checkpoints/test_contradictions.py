"""Contradicting, invalid and unsupported checkpoints and settings are refused."""

import json
import time

import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints import keys
from vitrail.checkpoints.artifact import CheckpointContract, save_artifact
from vitrail.checkpoints.convert import convert, write_and_verify
from vitrail.checkpoints.formats import timm, transformers
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.models.registry import configure
from vitrail.nn.mlp import TanhGELU
from vitrail.nn.pool import MAP
from vitrail.nn.position import SinCos2D
from vitrail.utils import json as written

SMALL = {"patch": 16, "width": 64, "depth": 1, "heads": 1, "image_size": 32, "classes": 5}


def tiny(**slots):
    model = vitrail.build(**{**SMALL, **slots})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def timm_directory(folder, settings, **slots):
    model = tiny(**slots)
    folder.mkdir(exist_ok=True)
    safetensors.save_safetensors(
        folder / "model.safetensors", keys.export_state(timm.map_vit(model.config), model.state_dict()), {}
    )
    cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    base = {"architecture": "vit_tiny", "pretrained_cfg": cfg | settings.pop("cfg", {})}
    (folder / "config.json").write_text(json.dumps(base | settings))
    return folder


@pytest.mark.parametrize(
    ("slots", "to", "reason"),
    [
        ({"position": "learned1d@shared"}, "hf", "learned 1-D positions at the stem"),
        ({"position": "learned1d@every"}, "timm", "at the stem"),
        ({"position": "rotary2d"}, "big_vision", "2-D sin-cos positions at the stem"),
        ({"mlp": "relu"}, "timm", "it has no ReLU"),
        ({"mlp": "relu"}, "torchvision", "it has no ReLU"),
        ({"mlp": "swiglu"}, "torchvision", "it has no SwiGLU"),
        ({"mlp": "swiglu"}, "big_vision", "it has no SwiGLU"),
        ({"pool": MAP(TanhGELU())}, "timm", "the activation of its blocks"),
        ({"pool": "class+mean"}, "big_vision", "class token and mean together"),
        ({"pool": "class+mean", "classes": None, "layer_scale": 1.0}, "dinov2", "read their class token"),
        ({"prefix": "class+distillation", "classes": None}, "hf", "two heads"),
        ({"position": SinCos2D(end=False), "pool": "mean"}, "big_vision", "the frequencies of end=True"),
        ({"head_width": 48}, "timm", "its heads divide the width evenly"),
        (
            {"pool": MAP(), "heads": 3, "head_width": 16},
            "big_vision",
            "heads of its attention pooling divide the width",
        ),
        ({"block": "post"}, "timm", "it has no ReLU"),
        ({"block": "parallel"}, "timm", "norm2"),
    ],
)
def test_unsupported_conversion_is_refused_before_writing(slots, to, reason, tmp_path):
    vitrail.save(tiny(**slots), tmp_path / "m.safetensors")
    out = tmp_path / {"hf": "hf", "big_vision": "b.npz"}.get(to, "o.pth")
    with pytest.raises(ValueError, match=f"cannot express this model: .*{reason}"):
        convert(tmp_path / "m.safetensors", out, to)
    assert not out.exists()


def test_attention_pooling_has_its_own_head_width(tmp_path):
    """Heads of the layers may be wider than width / heads; those of the pooling are not."""
    model = tiny(pool=MAP(), heads=2, head_width=48)
    vitrail.save(model, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "b.npz", "big_vision")
    with inspect_checkpoint(tmp_path / "b.npz") as checkpoint:
        assert checkpoint.source.specs["MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"].shape == (64, 2, 32)
    images = torch.rand(2, 3, 32, 32)
    loaded = vitrail.load(tmp_path / "b.npz", assume={"gelu": "exact"})
    torch.testing.assert_close(loaded(images), model.eval()(images))


def test_failed_verification_raises_and_leaves_no_file(tmp_path, monkeypatch):
    """A wrong detection reads back another model, although every tensor is the same."""
    model = tiny(width=128, heads=2)
    contract, state = CheckpointContract(model.config), model.state_dict()
    from vitrail.checkpoints import convert as conversion

    monkeypatch.setattr(conversion, "collect_assumptions", lambda config: {"heads": 4})
    with pytest.raises(ValueError, match=r"not written: read back, the logits differ"):
        write_and_verify(contract, state, tmp_path / "o.pth", "timm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "beit3_base_patch16_224"}, "unsupported architecture beit3_base_patch16_224"),
        ({"architecture": "vit_base_patch16_rope_ape_224"}, "rope"),
        ({"global_pool": "avgmax"}, "global_pool 'avgmax'"),
        ({"model_args": {"pool_include_prefix": True}}, "pool_include_prefix"),
        ({"cfg": {"crop_mode": "border"}}, "unsupported crop mode 'border'"),
        ({"cfg": {"mean": None}}, "invalid settings or sizes"),
        ({"cfg": {"crop_pct": [1]}}, "invalid settings or sizes"),
        ({"cfg": {"crop_pct": 5e-324}}, "crop_pct"),
        ({"cfg": {"mean": [10**400] * 3}}, "invalid settings or sizes"),
        ({"cfg": {"interpolation": ["bicubic"]}}, "invalid settings or sizes"),
        ({"model_args": {"img_size": [16, 96]}}, "does not have"),
    ],
)
def test_unsupported_timm_settings_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        vitrail.load(timm_directory(tmp_path / "m", settings))
    assert "\n" not in str(error.value)


def test_timm_settings_give_size_and_heads(tmp_path):
    folder = timm_directory(tmp_path / "m", {"model_args": {"img_size": [16, 80]}}, image_size=(16, 80))
    assert vitrail.load(folder).config.image_size == (16, 80)
    folder = timm_directory(tmp_path / "n", {"model_args": {"num_heads": 4}}, heads=4)
    assert vitrail.load(folder).config.size.heads == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_rescale": False}, "does not divide by 255"),
        ({"rescale_factor": float("nan")}, "does not divide by 255"),
        ({"do_resize": False}, "do_resize is false, but the model needs one image size"),
        ({"size": {"height": float("inf"), "width": 3}}, "unsupported preprocessor_config.json"),
        ({"image_mean": [10**400] * 3}, "unsupported preprocessor_config.json"),
        ({"resample": 17}, "unsupported preprocessor_config.json"),
    ],
)
def test_unsupported_transformers_pipelines_are_refused(settings, message):
    base = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 32, "width": 32}}
    assert transformers.parse_preprocessing({"preprocessor_config.json": base}, (32, 32)) is not None
    with pytest.raises(ValueError, match=message):
        transformers.parse_preprocessing({"preprocessor_config.json": base | settings}, (32, 32))


def test_classifier_outside_the_backbone_is_loaded(tmp_path):
    model = tiny(classes=None)
    tensors = {f"encoder.{n}": t for n, t in keys.export_state(timm.map_vit(model.config), model.state_dict()).items()}
    safetensors.save_safetensors(tmp_path / "m.safetensors", tensors | {"head.weight": torch.ones(7, 64)}, {})
    with pytest.raises(ValueError, match=r"head.weight \[7, 64\] is unexpected"):
        vitrail.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("assumptions", "message"),
    [
        ({"eps": "nan"}, "eps must be above 0 .* got nan"),
        ({"eps": -1}, "above 0"),
        ({"fit": "foo"}, "unknown fit 'foo'"),
        ({"mean": "0,0,0,0", "std": "1,1,1,1"}, "mean must have 3 values, one per channel, got 4"),
        ({"mean": "nan,0,0"}, "mean must be finite"),
        ({"size": "32x1x32"}, "invalid value assume={'size': '32x1x32'}"),
        ({"channels": 1}, "channels=1 contradicts the tensors"),
        ({"crop": "1e-320"}, "crop"),
        ({"heads": 0}, "above 0"),
    ],
)
def test_contradicting_assumptions_are_refused(assumptions, message, tmp_path):
    model = tiny()
    safetensors.save_safetensors(
        tmp_path / "m.safetensors", keys.export_state(timm.map_vit(model.config), model.state_dict()), {}
    )
    with pytest.raises(ValueError, match=message):
        vitrail.load(tmp_path / "m.safetensors", assume=assumptions)


def test_correct_assumptions_are_accepted(tmp_path):
    model = tiny()
    path = tmp_path / "m.safetensors"
    safetensors.save_safetensors(path, keys.export_state(timm.map_vit(model.config), model.state_dict()), {})
    assert vitrail.load(path, assume={"channels": 3, "mean": [0.1, 0.2, 0.3]}).preprocessing.mean == (0.1, 0.2, 0.3)
    pipeline = vitrail.load(path, assume={"mean": "half", "std": "imagenet"}).preprocessing
    assert (pipeline.mean[0], pipeline.std[0]) == (0.5, 0.229)
    with pytest.raises(ValueError, match=r"it holds one model and no 'teacher'"):
        vitrail.load(path, take="teacher")
    tensors = keys.export_state(timm.map_vit(model.config), model.state_dict())
    safetensors.save_safetensors(path, {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, {})
    with pytest.raises(ValueError, match=r"norm.weight \[64\] is missing"):  # one pattern, not its letters
        vitrail.load(path, allow_missing="head.*")


def test_values_too_large_for_the_dtype_are_refused(tmp_path):
    model = tiny().double()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e39
    tensors = keys.export_state(timm.map_vit(model.config), model.state_dict())
    safetensors.save_safetensors(tmp_path / "m.safetensors", tensors, {})
    with pytest.raises(ValueError, match=r"too large for torch.float32"):
        vitrail.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", ["sincos2d", "rotary2d"])
def test_stored_half_precision_runs(dtype, position, tmp_path):
    vitrail.save(tiny(position=position).to(dtype), tmp_path / "m.safetensors")
    model = vitrail.load(tmp_path / "m.safetensors", dtype=None)
    assert model(torch.randn(1, 3, 32, 32, dtype=dtype)).dtype == dtype


def test_changed_model_is_not_saved_over_a_valid_file(tmp_path):
    path = tmp_path / "m.safetensors"
    model = tiny()
    vitrail.save(model, path)
    before = path.read_bytes()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not saved: values that are not finite in head.weight"):
        vitrail.save(model, path)
    model.head = torch.nn.Linear(64, 3)
    with pytest.raises(ValueError, match=r"not saved: the tensors differ from the configuration in head.bias"):
        vitrail.save(model, path)
    assert path.read_bytes() == before


def test_labels_that_look_like_a_checksum_are_preserved(tmp_path):
    labels = ["0" * 64, '"vitrail.checksum":"' + "0" * 64 + '"', "c", "d", "e"]
    vitrail.save(tiny(), tmp_path / "m.safetensors", labels=labels)
    assert vitrail.load(tmp_path / "m.safetensors").labels == tuple(labels)


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"width": 10**12, "heads": 7}},
        {"size": {"depth": 10**6}},
        {"size": {"mlp": 10**18}},
        {"classes": 10**30},
        {"channels": 10**18},
        {"image_size": [16 * 10**9, 16]},
        {"embed": {"type": "Hybrid", "stages": [200_000], "patch": 1}},
        {"eps": -1.0},
    ],
)
def test_artifact_with_invalid_configuration_is_refused(change, tmp_path, monkeypatch):
    """Checksums detect damage, not a malicious author."""
    model = tiny()

    def lying(value):
        made = written.to_json(value)
        for name, new in change.items():
            if isinstance(made, dict) and name in made and made.get("type") == "ViTConfig":
                made[name] = made[name] | new if isinstance(new, dict) and "type" not in new else new
        return made

    monkeypatch.setattr("vitrail.checkpoints.artifact.to_json", lying)
    save_artifact(tmp_path / "m.safetensors", model.state_dict(), CheckpointContract(model.config))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        inspect_checkpoint(tmp_path / "m.safetensors")
    assert time.monotonic() - begin < 30  # no hang


def test_shared_mappings_in_a_pickle_are_visited_once(tmp_path):
    table = {"t": torch.zeros(1)}
    for _ in range(3):
        table = {str(i): table for i in range(100)}
    torch.save(table, tmp_path / "b.pth")
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"unknown format"):
        vitrail.load(tmp_path / "b.pth")
    assert time.monotonic() - begin < 30  # no hang


def test_scalar_beside_the_model_is_not_selected(tmp_path):
    model = tiny()
    state = keys.export_state(timm.map_vit(model.config), model.state_dict())
    torch.save({"model": state, "best_acc": torch.tensor(0.5)}, tmp_path / "m.pth")
    assert vitrail.load(tmp_path / "m.pth").config == model.config


def test_names_with_control_characters_are_escaped(tmp_path):
    safetensors.save_safetensors(tmp_path / "m.safetensors", {"\x1b[2Jblocks": torch.ones(1)}, {})
    with pytest.raises(ValueError, match=r"invalid tensor name") as error:
        inspect_checkpoint(tmp_path / "m.safetensors")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_too_thin_images_are_refused_before_allocation(size):
    with pytest.raises(ValueError, match=r"is too elongated"):
        vitrail.Preprocessing((224, 224), (248, 248))(Image.new("RGB", size))
    assert vitrail.Preprocessing((224, 224), (248, 248))(Image.new("RGB", (1, 1))).shape == (3, 224, 224)


def test_oblong_grids_convert_in_every_format(tmp_path):
    for slots in ({"image_size": (48, 80)}, {"image_size": (16, 80), "position": "relative"}):
        vitrail.save(tiny(**slots), tmp_path / "m.safetensors")
        for to in ("timm", "big_vision") if "position" not in slots else ("timm",):
            out = tmp_path / {"timm": "o.pth", "big_vision": "o.npz"}[to]
            convert(tmp_path / "m.safetensors", out, to)
            assert vitrail.load(out, assume={"size": slots["image_size"]}).config.image_size == slots["image_size"]


def test_too_large_changes_are_refused(tmp_path):
    vitrail.save(tiny(), tmp_path / "m.safetensors")
    for change in ({"classes": 10**13}, {"image_size": 16 * 10**6}, {"channels": 10**9}):
        with pytest.raises(ValueError, match=r"must be at most"):
            vitrail.load(tmp_path / "m.safetensors", **change)


def test_heads_of_a_very_wide_configuration_are_checked_quickly():
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"7 heads do not divide the width"):
        configure(patch=16, width=10**12, depth=1, heads=7)
    assert time.monotonic() - begin < 30  # no hang
