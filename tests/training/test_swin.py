"""Swin Transformers in training: fine-tuning, LoRA, and the commands after it."""

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
    sizes = {"width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "image_size": 32}
    model = vitrail.build_from(configure(family="swin", classes=10, channels=1, **sizes))
    model.labels, model.preprocessing = tuple("0123456789"), Preprocessing((32, 32), (32, 32), mean=(0.5,), std=(0.5,))
    path = tmp_path_factory.mktemp("swin") / "swin.safetensors"
    vitrail.save(model, path)
    return path


@pytest.mark.parametrize("tune", ["full", "lora", "head", "last-1"])
def test_swin_is_fine_tuned(checkpoint: Path, tmp_path: Path, tune: str) -> None:
    run, summary = vitrail.train("digits", init=checkpoint, steps=2, batch_size=16, tune=tune, out=tmp_path / "run")
    before, after = vitrail.load(checkpoint).state_dict(), vitrail.load(run / "model.safetensors").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "head.weight" in changed
    assert ("blocks.3.msa.qkv.weight" in changed) == (tune != "head")
    assert ("embed.weight" in changed) == (tune == "full")
    if tune == "lora":
        assert summary["adapter"].startswith("not written: PEFT's form does not support Swin Transformers")


def test_a_swin_run_is_evaluated_exported_and_predicted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = vitrail.train("digits", init=checkpoint, steps=1, batch_size=16, out=tmp_path / "run")
    assert main(["evaluate", str(run)]) == 0
    assert "270 images" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "model.onnx"), "--verify", "digits"]) == 0
    images = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8).numpy()
    rows = [list(vitrail.predict(model, list(images))) for model in (run, tmp_path / "model.onnx")]
    assert [row.label for row in rows[0]] == [row.label for row in rows[1]]
    Image.fromarray(images[0]).save(tmp_path / "image.png")
    assert main(["inspect", str(run), str(tmp_path / "image.png"), "--out", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "image" / "attention.png").exists()
