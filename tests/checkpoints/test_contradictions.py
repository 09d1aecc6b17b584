"""What contradicts itself, what nobody could mean, and what another project's code would do differently: refused."""

import json
import time

import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints import keys, timm, transformers
from vitrail.checkpoints.artifact import Contract, save_artifact
from vitrail.checkpoints.convert import convert, write_and_prove
from vitrail.checkpoints.files import safetensors
from vitrail.checkpoints.loading import describe
from vitrail.models import written
from vitrail.models.build import configure
from vitrail.nn.mlp import TanhGELU
from vitrail.nn.pool import MAP
from vitrail.nn.position import SinCos2D

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
    safetensors.write(folder / "model.safetensors", keys.write(timm.vit(model.config), model.state_dict()), {})
    cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    base = {"architecture": "vit_tiny", "pretrained_cfg": cfg | settings.pop("cfg", {})}
    (folder / "config.json").write_text(json.dumps(base | settings))
    return folder


@pytest.mark.parametrize(
    ("slots", "to", "reason"),
    [
        ({"position": "learned1d@shared"}, "hf", "learned in one dimension, at the stem"),
        ({"position": "learned1d@every"}, "timm", "at the stem"),
        ({"position": "rotary2d"}, "big_vision", "its positions are"),
        ({"mlp": "relu"}, "timm", "it has no ReLU"),
        ({"mlp": "relu"}, "torchvision", "it has no ReLU"),
        ({"mlp": "swiglu"}, "torchvision", "it has no SwiGLU"),
        ({"mlp": "swiglu"}, "big_vision", "it has no SwiGLU"),
        ({"pool": MAP(TanhGELU())}, "timm", "the activation of its blocks"),
        ({"pool": "class+mean"}, "big_vision", "class token and mean side by side"),
        ({"pool": "class+mean", "classes": None, "layer_scale": 1.0}, "dinov2", "read their class token"),
        ({"prefix": "class+distillation", "classes": None}, "hf", "two heads"),
        ({"position": SinCos2D(end=False), "pool": "mean"}, "big_vision", "the frequencies of end=True"),
        ({"head_width": 48}, "timm", "its heads share the width"),
        ({"block": "post"}, "timm", "it has no ReLU"),
        ({"block": "parallel"}, "timm", "norm2"),
    ],
)
def test_what_a_form_would_compute_differently_is_refused_before_anything_is_written(slots, to, reason, tmp_path):
    vitrail.save(tiny(**slots), tmp_path / "m.safetensors")
    out = tmp_path / {"hf": "hf", "big_vision": "b.npz"}.get(to, "o.pth")
    with pytest.raises(ValueError, match=f"cannot express this model: .*{reason}"):
        convert(tmp_path / "m.safetensors", out, to)
    assert not out.exists()


def test_a_proof_that_fails_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    """A look that takes one thing for another reads back a different model, though every tensor is the same."""
    model = tiny(width=128, heads=2)
    contract, state = Contract(model.config), model.state_dict()
    from vitrail.checkpoints import convert as conversion

    monkeypatch.setattr(conversion, "untold", lambda config: {"heads": 4})
    with pytest.raises(ValueError, match=r"not written: read back, the logits differ"):
        write_and_prove(contract, state, tmp_path / "o.pth", "timm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "vit_base_patch16_rpn_224"}, "says vit_base_patch16_rpn_224"),
        ({"architecture": "vit_base_patch16_rope_ape_224"}, "rope"),
        ({"global_pool": "avgmax"}, "global_pool 'avgmax'"),
        ({"model_args": {"pool_include_prefix": True}}, "pool_include_prefix"),
        ({"cfg": {"crop_mode": "border"}}, "crop mode 'border' is not reproduced"),
        ({"cfg": {"mean": None}}, "make no sense"),
        ({"cfg": {"crop_pct": [1]}}, "make no sense"),
        ({"cfg": {"crop_pct": 5e-324}}, "crop_pct"),
        ({"cfg": {"mean": [10**400] * 3}}, "make no sense"),
        ({"cfg": {"interpolation": ["bicubic"]}}, "make no sense"),
        ({"model_args": {"img_size": [16, 96]}}, "does not have"),
    ],
)
def test_settings_of_timm_that_are_not_reproduced_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        vitrail.load(timm_directory(tmp_path / "m", settings))
    assert "\n" not in str(error.value)


def test_settings_of_timm_tell_the_size_and_the_heads(tmp_path):
    folder = timm_directory(tmp_path / "m", {"model_args": {"img_size": [16, 80]}}, image_size=(16, 80))
    assert vitrail.load(folder).config.image_size == (16, 80)
    folder = timm_directory(tmp_path / "n", {"model_args": {"num_heads": 4}}, heads=4)
    assert vitrail.load(folder).config.size.heads == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_rescale": False}, "does not divide by 255"),
        ({"rescale_factor": float("nan")}, "does not divide by 255"),
        ({"do_resize": False}, "it does not resize"),
        ({"size": {"height": float("inf"), "width": 3}}, "not one that can be reproduced"),
        ({"image_mean": [10**400] * 3}, "not one that can be reproduced"),
        ({"resample": 17}, "not one that can be reproduced"),
    ],
)
def test_pipelines_of_transformers_that_cannot_be_reproduced_are_refused(settings, message):
    base = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 32, "width": 32}}
    assert transformers.pipeline({"preprocessor_config.json": base}, (32, 32)) is not None
    with pytest.raises(ValueError, match=message):
        transformers.pipeline({"preprocessor_config.json": base | settings}, (32, 32))


def test_a_classifier_outside_its_backbone_is_not_lost(tmp_path):
    model = tiny(classes=None)
    tensors = {f"encoder.{n}": t for n, t in keys.write(timm.vit(model.config), model.state_dict()).items()}
    safetensors.write(tmp_path / "m.safetensors", tensors | {"head.weight": torch.ones(7, 64)}, {})
    with pytest.raises(ValueError, match=r"head.weight \[7, 64\] is unexpected"):
        vitrail.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"eps": "nan"}, "eps=nan"),
        ({"eps": -1}, "above 0"),
        ({"fit": "foo"}, "unknown fit 'foo'"),
        ({"mean": "0,0,0,0", "std": "1,1,1,1"}, "4 values for mean, and the model takes 3 channels"),
        ({"mean": "nan,0,0"}, "every mean must be a number"),
        ({"size": "32x1x32"}, "cannot be read"),
        ({"channels": 1}, "channels=1 was told, and the tensors tell otherwise"),
        ({"crop": "1e-320"}, "crop"),
        ({"heads": 0}, "above 0"),
    ],
)
def test_what_is_told_wrongly_is_refused(told, message, tmp_path):
    model = tiny()
    safetensors.write(tmp_path / "m.safetensors", keys.write(timm.vit(model.config), model.state_dict()), {})
    with pytest.raises(ValueError, match=message):
        vitrail.load(tmp_path / "m.safetensors", assume=told)


def test_what_is_told_rightly_is_taken(tmp_path):
    model = tiny()
    path = tmp_path / "m.safetensors"
    safetensors.write(path, keys.write(timm.vit(model.config), model.state_dict()), {})
    assert vitrail.load(path, assume={"channels": 3, "mean": [0.1, 0.2, 0.3]}).preprocessing.mean == (0.1, 0.2, 0.3)
    pipeline = vitrail.load(path, assume={"mean": "half", "std": "imagenet"}).preprocessing
    assert (pipeline.mean[0], pipeline.std[0]) == (0.5, 0.229)
    with pytest.raises(ValueError, match=r"there is one model in it, and no 'teacher' to take"):
        vitrail.load(path, take="teacher")
    tensors = keys.write(timm.vit(model.config), model.state_dict())
    safetensors.write(path, {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, {})
    with pytest.raises(ValueError, match=r"norm.weight \[64\] is missing"):  # one pattern, not its letters
        vitrail.load(path, allow_missing="head.*")


def test_numbers_that_do_not_fit_are_noticed(tmp_path):
    model = tiny().double()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e39
    tensors = keys.write(timm.vit(model.config), model.state_dict())
    safetensors.write(tmp_path / "m.safetensors", tensors, {})
    with pytest.raises(ValueError, match=r"too large for torch.float32"):
        vitrail.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", ["sincos2d", "rotary2d"])
def test_kept_half_precision_runs(dtype, position, tmp_path):
    vitrail.save(tiny(position=position).to(dtype), tmp_path / "m.safetensors")
    model = vitrail.load(tmp_path / "m.safetensors", dtype=None)
    assert model(torch.randn(1, 3, 32, 32, dtype=dtype)).dtype == dtype


def test_a_model_that_is_not_what_it_says_is_not_saved_over_a_good_one(tmp_path):
    path = tmp_path / "m.safetensors"
    model = tiny()
    vitrail.save(model, path)
    before = path.read_bytes()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not saved: values that are not finite in head.weight"):
        vitrail.save(model, path)
    model.head = torch.nn.Linear(64, 3)
    with pytest.raises(
        ValueError, match=r"not saved: the model is no longer what its configuration says, in head.bias"
    ):
        vitrail.save(model, path)
    assert path.read_bytes() == before


def test_labels_that_look_like_a_checksum_come_back(tmp_path):
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
def test_an_artifact_by_a_liar_is_refused_at_once(change, tmp_path, monkeypatch):
    """Checksums prove that a file is as it was written, not that its writer meant well."""
    model = tiny()

    def lying(value):
        made = written.to_json(value)
        for name, new in change.items():
            if isinstance(made, dict) and name in made and made.get("type") == "ViTConfig":
                made[name] = made[name] | new if isinstance(new, dict) and "type" not in new else new
        return made

    monkeypatch.setattr("vitrail.checkpoints.artifact.to_json", lying)
    save_artifact(tmp_path / "m.safetensors", model.state_dict(), Contract(model.config))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        describe(tmp_path / "m.safetensors")
    assert time.monotonic() - begin < 30  # no hang


def test_shared_tables_in_a_pickle_are_visited_once(tmp_path):
    table = {"t": torch.zeros(1)}
    for _ in range(3):
        table = {str(i): table for i in range(100)}
    torch.save(table, tmp_path / "b.pth")
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"unknown form"):
        vitrail.load(tmp_path / "b.pth")
    assert time.monotonic() - begin < 30  # no hang


def test_a_number_beside_the_model_is_not_taken_for_one(tmp_path):
    model = tiny()
    state = keys.write(timm.vit(model.config), model.state_dict())
    torch.save({"model": state, "best_acc": torch.tensor(0.5)}, tmp_path / "m.pth")
    assert vitrail.load(tmp_path / "m.pth").config == model.config


def test_names_with_control_characters_never_reach_the_terminal(tmp_path):
    safetensors.write(tmp_path / "m.safetensors", {"\x1b[2Jblocks": torch.ones(1)}, {})
    with pytest.raises(ValueError, match=r"is not that of a tensor") as error:
        describe(tmp_path / "m.safetensors")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_pictures_that_are_too_thin_are_refused_before_they_take_memory(size):
    with pytest.raises(ValueError, match=r"is too thin"):
        vitrail.Preprocessing((224, 224), (248, 248))(Image.new("RGB", size))
    assert vitrail.Preprocessing((224, 224), (248, 248))(Image.new("RGB", (1, 1))).shape == (3, 224, 224)


def test_oblong_grids_of_every_form_come_back(tmp_path):
    for slots in ({"image_size": (48, 80)}, {"image_size": (16, 80), "position": "relative"}):
        vitrail.save(tiny(**slots), tmp_path / "m.safetensors")
        for to in ("timm", "big_vision") if "position" not in slots else ("timm",):
            out = tmp_path / {"timm": "o.pth", "big_vision": "o.npz"}[to]
            convert(tmp_path / "m.safetensors", out, to)
            assert vitrail.load(out, assume={"size": slots["image_size"]}).config.image_size == slots["image_size"]


def test_absurd_changes_are_refused(tmp_path):
    vitrail.save(tiny(), tmp_path / "m.safetensors")
    for change in ({"classes": 10**13}, {"image_size": 16 * 10**6}, {"channels": 10**9}):
        with pytest.raises(ValueError, match=r"more than any model has"):
            vitrail.load(tmp_path / "m.safetensors", **change)


def test_a_configuration_too_wide_for_its_heads_answers_at_once():
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"7 heads do not divide the width"):
        configure(patch=16, width=10**12, depth=1, heads=7)
    assert time.monotonic() - begin < 30  # no hang
