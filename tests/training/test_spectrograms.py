"""Runs on sounds that start from a model of images: the model becomes one of spectrograms, as AST does."""

from pathlib import Path

import pytest
import torch

import vitrail
from tests.data.sounds import write_folder
from vitrail.data.log_mel import LogMel
from vitrail.nn.head import NormLinear
from vitrail.nn.pool import OutputMean

pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'vitrail[audio]'")


def test_a_distilled_model_of_images_is_fine_tuned_on_sounds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    image_model = vitrail.build(
        patch=16, width=32, depth=2, heads=2, image_size=64, classes=3, prefix="class+distillation"
    )
    vitrail.save(image_model, tmp_path / "deit.safetensors", preprocessing=vitrail.Preprocessing((64, 64), (64, 64)))
    sounds = write_folder(tmp_path / "sounds", 8)
    options = {"workers": 0, "device": "cpu", "steps": 4, "batch_size": 4}
    vitrail.train(sounds, out=tmp_path / "run", init=str(tmp_path / "deit.safetensors"), **options)
    model = vitrail.load(tmp_path / "run" / "model.safetensors")
    assert (model.config.pool, model.config.head, model.config.channels) == (OutputMean(), NormLinear(), 1)
    assert model.config.image_size == (128, 64)
    assert model.config.shape.grid == (12, 5)
    assert model.preprocessing.sound == LogMel(8000, 128, 200, 80, "centre")
    assert model.labels == ("high", "low")
    vitrail.train(sounds, out=tmp_path / "again", init=str(tmp_path / "run" / "model.safetensors"), **options)
    again = vitrail.load(tmp_path / "again" / "model.safetensors")
    assert (again.config, again.preprocessing) == (model.config, model.preprocessing)


def test_a_published_model_is_trained_from_scratch(tmp_path: Path) -> None:
    sounds = write_folder(tmp_path / "sounds", 4)
    options = {"workers": 0, "device": "cpu", "steps": 1, "batch_size": 4, "size": (32, 32)}
    vitrail.train(sounds, out=tmp_path / "run", model="AST-Ti/16", **options)
    assert vitrail.load(tmp_path / "run" / "model.safetensors").config.describe().startswith("AST-Ti/16")
