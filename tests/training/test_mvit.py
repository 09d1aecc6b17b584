"""Multiscale Vision Transformers in training: from scratch, fine-tuning, LoRA, and the commands after it."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.registry import configure


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"width": 16, "depths": (1, 2), "heads": (1, 2), "image_size": 32}
    model = vitrail.build_from(configure(family="mvit", classes=10, channels=1, **sizes))
    model.labels, model.preprocessing = tuple("0123456789"), Preprocessing((32, 32), (32, 32), mean=(0.5,), std=(0.5,))
    path = tmp_path_factory.mktemp("mvit") / "mvit.safetensors"
    vitrail.save(model, path)
    return path


@pytest.mark.parametrize("tune", ["full", "lora", "head", "last-1"])
def test_mvit_is_fine_tuned(checkpoint: Path, tmp_path: Path, tune: str) -> None:
    run, summary = vitrail.train("digits", init=checkpoint, steps=2, batch_size=16, tune=tune, out=tmp_path / "run")
    before, after = vitrail.load(checkpoint).state_dict(), vitrail.load(run / "model.safetensors").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "head.weight" in changed
    assert ("blocks.2.msa.q.weight" in changed) == (tune != "head")
    assert ("blocks.2.msa.offsets.0" in changed) == (tune in ("full", "last-1"))
    assert ("embed.weight" in changed) == (tune == "full")
    if tune == "lora":
        expected = "not written: PEFT's form does not support Multiscale Vision Transformers"
        assert summary["adapter"].startswith(expected)


def test_mvit_is_trained_from_scratch_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["--model", "MViTv2-T", "--size", "32", "--steps", "1", "--batch-size", "4", "--out", str(run)]
    assert main(["train", "digits", *options]) == 0
    assert json.loads((run / "recipe.json").read_text())["model"]["type"] == "MViTConfig"
    assert vitrail.load(run).config.describe() == "MViTv2-T"
    capsys.readouterr()
    assert main(["train", "digits", "--model", "MViTv2-T", "--size", "28", "--out", str(tmp_path / "no")]) == 2
    message = capsys.readouterr().err
    assert "images of 28×28 are too small for 4 stages: use at least 32×32" in message
    assert not (tmp_path / "no").exists()


def test_an_mvit_run_is_evaluated_exported_and_predicted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = vitrail.train("digits", init=checkpoint, steps=1, batch_size=16, out=tmp_path / "run")
    assert main(["evaluate", str(run)]) == 0
    assert "270 images" in capsys.readouterr().out
    images = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8).numpy()
    expected = [row.label for row in vitrail.predict(run, list(images))]
    for name in ("model.onnx", "model.xml"):
        assert main(["export", str(run), str(tmp_path / name), "--verify", "digits"]) == 0
        assert [row.label for row in vitrail.predict(tmp_path / name, list(images))] == expected
    Image.fromarray(images[0]).save(tmp_path / "image.png")
    capsys.readouterr()
    assert main(["embed", str(run), str(tmp_path / "image.png"), "--out", str(tmp_path / "features.npy")]) == 0
    assert main(["export", str(run), str(tmp_path / "any.onnx"), "--dynamic-size"]) == 2
    assert "--dynamic-size does not support Multiscale Vision Transformers" in capsys.readouterr().err
    assert not (tmp_path / "any.onnx").exists()
