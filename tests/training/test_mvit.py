"""Multiscale Vision Transformers in training: from scratch, fine-tuning, LoRA. Other commands: tests/e2e/test_families.py."""

import json
from pathlib import Path

import pytest
import torch

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


@pytest.mark.slow
def test_mvit_is_trained_from_scratch_by_the_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--model", "MViTv2-T", "--size", "32", "--steps", "1", "--batch-size", "4", "--out", str(run)]
    assert main(["train", "digits", *options]) == 0
    assert json.loads((run / "recipe.json").read_text())["model"]["type"] == "MViTConfig"
    assert vitrail.load(run).config.describe() == "MViTv2-T"


def test_images_that_are_too_small_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--model", "MViTv2-T", "--size", "28", "--out", str(tmp_path / "no")]) == 2
    message = capsys.readouterr().err
    assert "images of 28×28 are too small for 4 stages: use at least 32×32" in message
    assert not (tmp_path / "no").exists()
