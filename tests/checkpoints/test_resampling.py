"""The rule that resamples positions: stored with the model, detected, kept by conversion, and set by the user."""

import json
from dataclasses import replace

import pytest
import torch

import vitrail
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.formats import timm
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.keys import export_state
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.cli import main
from vitrail.models.registry import config_from_json, configure
from vitrail.models.vit_config import RESAMPLINGS
from vitrail.nn.resampling import Resampling
from vitrail.utils.json import to_json

SMALL = {"patch": 8, "width": 64, "depth": 1, "heads": 1, "image_size": 32, "classes": 3}


def build(**options):
    model = vitrail.build(**{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def write_timm(path, **options):
    model = build(**options)
    safetensors.save_safetensors(path, export_state(timm.map_vit(model.config), model.state_dict()), {})
    return path


def read_rule(path, **options):
    with inspect_checkpoint(path, **options) as checkpoint:
        return checkpoint.contract.config.resampling


# --- the configuration and the artifact ---


@pytest.mark.parametrize("position", ["learned1d", "learned2d@every", "relative"])
@pytest.mark.parametrize("name", RESAMPLINGS)
def test_rule_is_part_of_configuration_and_artifact(name, position, tmp_path):
    if RESAMPLINGS[name].kind == "geometric" and position != "relative":
        with pytest.raises(ValueError, match="for tables of offsets"):
            build(position=position, resampling=name)
        return
    model = build(position=position, resampling=name)
    assert model.config.resampling == RESAMPLINGS[name]
    assert config_from_json(json.loads(json.dumps(to_json(model.config)))) == model.config
    vitrail.save(model, tmp_path / "model.safetensors")
    loaded = vitrail.load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    images = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(loaded(images), model(images), atol=1e-5, rtol=1e-5)
    resized = vitrail.load(tmp_path / "model.safetensors", image_size=(24, 40))
    torch.testing.assert_close(resized(images), model(images), atol=1e-5, rtol=1e-5)


def test_default_is_not_written_and_missing_rule_is_the_default():
    written = to_json(configure(**SMALL))
    assert written["position"] == {
        "type": "Learned1D",
        "at": "stem",
        "prefix": "outputs",
    }  # as earlier versions wrote it
    assert config_from_json(written).resampling == Resampling()
    other = to_json(configure(**SMALL, resampling="google"))["position"]["resampling"]
    assert other == {"type": "Resampling", "kind": "linear", "antialias": False, "align_corners": True, "offset": 0.0}


def test_artifact_with_an_invalid_rule_is_refused():
    written = to_json(configure(**SMALL, resampling="dino"))
    written["position"]["resampling"]["offset"] = 7
    with pytest.raises(ValueError, match="offset of resampling must be at least 0 and below 1, got 7"):
        config_from_json(written)


# --- set by the user ---


def test_resize_with_another_rule():
    model, images = build(), torch.randn(1, 3, 48, 24)
    resized = model.resize((48, 24), resampling="google")
    assert resized.config == replace(model.config.with_resampling("google"), image_size=(48, 24))
    assert (resized(images) - model.resize((48, 24))(images)).abs().max() > 1e-3
    rule = Resampling("linear", antialias=False, align_corners=True)
    torch.testing.assert_close(model.resize((48, 24), rule)(images), resized(images), atol=1e-5, rtol=0)


def test_rules_for_positions_without_a_table_are_refused():
    with pytest.raises(ValueError, match="unknown resampling 'dinov': did you mean 'dino'"):
        vitrail.build(**SMALL, resampling="dinov")
    with pytest.raises(ValueError, match="SinCos2D positions are not resampled"):
        vitrail.build(**SMALL, position="sincos2d", resampling="dino")
    with pytest.raises(ValueError, match="resampling of positions does not support BiT ResNets"):
        vitrail.build("R14x0.25", classes=3).resize((64, 64), resampling="dino")


def test_assumption_replaces_the_rule(tmp_path, capsys):
    path = write_timm(tmp_path / "vit.safetensors")
    assert read_rule(path) == RESAMPLINGS["timm"]
    assert read_rule(path, assume={"resampling": "dino"}) == RESAMPLINGS["dino"]
    rule = Resampling("linear")
    assert read_rule(path, assume={"resampling": rule}) == rule
    assert main(["describe", str(path), "--assume", "resampling=dino"]) == 0
    text = capsys.readouterr().out
    assert "resampling     bicubic, offset 0.1 (dino)" in text
    assert "resampling     dino: given" in text
    assert main(["describe", str(path), "--assume", "resampling=cubic"]) == 2
    error = capsys.readouterr().err
    assert "unknown resampling 'cubic': Known: timm, transformers, dino, torchvision, google" in error


def test_assumption_corrects_an_artifact_of_an_earlier_version(tmp_path, capsys):
    old, new = str(tmp_path / "old.safetensors"), str(tmp_path / "new.safetensors")
    vitrail.save(build(), old)
    assert main(["convert", old, new, "--to", "vitrail", "--assume", "resampling=transformers"]) == 0
    capsys.readouterr()
    assert main(["describe", new]) == 0
    assert "resampling     bicubic (transformers)" in capsys.readouterr().out
    assert main(["describe", old, "--assume", "heads=1", "--assume", "resampling=dino"]) == 2
    assert "an artifact needs no assumptions: leave out heads" in capsys.readouterr().err
    vitrail.save(build(position="sincos2d"), old)
    assert main(["describe", old, "--assume", "resampling=dino"]) == 2
    assert "SinCos2D positions are not resampled" in capsys.readouterr().err


# --- detection and conversion ---


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("dino_deitsmall16_pretrain", "dino"),
        ("mae_pretrain_vit_base", "transformers"),
        ("deit_tiny_patch16_224", "timm"),  # timm publishes the same file
        ("dinosaurs", "timm"),
        ("vit_small_patch16_224.dino", "timm"),
    ],
)
def test_file_names_of_releases_determine_the_rule(file, rule, tmp_path):
    assert read_rule(write_timm(tmp_path / f"{file}.safetensors")) == RESAMPLINGS[rule]


def test_conversion_keeps_the_rule_or_notes_another_one(tmp_path):
    path, note = write_timm(tmp_path / "vit.safetensors"), "positions are resampled to other sizes by another rule"
    report = convert(path, tmp_path / "hf", "hf")
    words = "bicubic, antialiased (timm) here, bicubic (transformers) in transformers"
    assert f"{note}: {words}" in report.notes
    assert not [line for line in convert(path, tmp_path / "again.pth", "timm").notes if note in line]
    convert(tmp_path / "hf", tmp_path / "ours.safetensors", "vitrail", image_size=48)
    ours = vitrail.load(tmp_path / "ours.safetensors")
    assert (ours.config.resampling, ours.config.image_size) == (RESAMPLINGS["transformers"], (48, 48))
    images = torch.randn(1, 3, 48, 48)
    torch.testing.assert_close(ours(images), vitrail.load(tmp_path / "hf", image_size=48)(images), atol=1e-5, rtol=0)
    assert [
        line for line in convert(tmp_path / "ours.safetensors", tmp_path / "b.npz", "big_vision").notes if note in line
    ]


def test_conversion_at_the_size_of_another_pipeline_compares_by_one_rule(tmp_path):
    """A release of DINOv2 is evaluated at 224 pixels, with positions of another size: both sides resample alike."""
    model = build(patch=14, image_size=42, layer_scale=1.0, classes=None)
    tensors = export_state(timm.map_vit(model.config, timm.DINOV2), model.state_dict())
    tensors["mask_token"] = torch.zeros(1, 64)
    safetensors.save_safetensors(tmp_path / "release.safetensors", tensors, {})
    loaded = vitrail.load(tmp_path / "release.safetensors")
    assert (loaded.preprocessing.size, loaded.config.image_size) == ((224, 224), (42, 42))
    assert loaded.config.resampling == RESAMPLINGS["dino"]
    report = convert(tmp_path / "release.safetensors", tmp_path / "hf", "hf")
    assert report.largest_difference <= 1e-4 * report.largest_logit
    assert any(
        "bicubic, offset 0.1 (dino) here, bicubic (transformers) in transformers" in note for note in report.notes
    )
