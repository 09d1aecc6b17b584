"""Temperature scaling at the end of a run: in the weights of the head, so that every file and every runtime has it."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import summary, train, trained
from tests.training.test_train import COLOURS, picture
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.cli import main

PIPELINE = vitrail.Preprocessing((24, 24), (24, 24))
STAY = ("--init", "weak.safetensors", "--lr", "1e-12", "--steps", "1", "--batch-size", "8", "--workers", "0")


def images(folder: Path) -> list[tuple[int, Path]]:
    return [(k, path) for k, name in enumerate(COLOURS) for path in sorted((folder / name).iterdir())]


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create images of three colours, and a model that recognises them with very small logits: under-confident."""
    tmp = tmp_path_factory.mktemp("runs")
    for name, colour in COLOURS.items():
        for number in range(10):
            for split in ("train", "val", "test"):
                picture(tmp / "photos" / split / name / f"{number}.png", colour, 100 * number + len(name + split))
    torch.manual_seed(0)
    model = vitrail.build(None, patch=8, width=32, depth=1, heads=2, classes=3, image_size=24).eval()
    with torch.no_grad():
        pixels = torch.stack([PIPELINE(Image.open(path)) for _, path in images(tmp / "photos" / "train")])
        features = torch.cat((model.embed_images(pixels), torch.ones(len(pixels), 1)), 1).double()
        wanted = torch.eye(3).double()[[k for k, _ in images(tmp / "photos" / "train")]]
        solved = 0.4 * torch.linalg.lstsq(features, wanted, driver="gelsd").solution.float()
        model.head.weight.copy_(solved[:-1].T)
        model.head.bias.copy_(solved[-1])
    vitrail.save(model, tmp / "weak.safetensors", labels=tuple(COLOURS), preprocessing=PIPELINE)
    return tmp


@pytest.fixture(scope="module")
def scaled(tmp: Path) -> Path:
    done = trained(tmp, "photos", *STAY, "--out", "scaled")
    assert "accuracy (calibration error" in done.stdout + done.stderr
    assert "Temperature 0." in done.stdout + done.stderr
    return tmp / "scaled"


@pytest.fixture(scope="module")
def plain(tmp: Path) -> Path:
    trained(tmp, "photos", *STAY, "--set", "calibrate=none", "--out", "plain")
    return tmp / "plain"


def test_temperature_is_in_the_weights_of_the_head(scaled: Path, plain: Path) -> None:
    found, before = summary(scaled), summary(plain)
    fit = found["calibration"]
    assert fit["temperature"] == fit["fitted"] < 0.5
    assert fit["images"] == 30
    assert fit["calibration_error_after"] < fit["calibration_error_before"] == before["validation"]["calibration_error"]
    assert before["calibration_direction"] == "under-confident"
    assert "calibration" not in before
    assert found["top1"] == before["top1"]
    assert found["calibration_error"] < before["calibration_error"]  # of the test split
    assert found["test"]["loss"] < before["test"]["loss"]
    ours, theirs = (vitrail.load(run / "model.safetensors").state_dict() for run in (scaled, plain))
    for name, tensor in theirs.items():
        expected = tensor / fit["temperature"] if name.startswith("head.") else tensor
        assert torch.equal(ours[name], expected), name


def test_stored_logits_are_those_of_the_written_model(tmp: Path, scaled: Path) -> None:
    model = vitrail.load(scaled / "model.safetensors")
    for split, folder in (("validation", "val"), ("test", "test")):
        stored = np.load(scaled / "evaluation" / f"{split}.npz")["logits"]
        pixels = torch.stack([model.preprocessing(Image.open(path)) for _, path in images(tmp / "photos" / folder)])
        with torch.no_grad():
            assert np.allclose(model(pixels).numpy(), stored, atol=1e-4)


def test_temperature_is_described_and_reported(scaled: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = summary(scaled)["calibration"]
    assert main(["describe", str(scaled / "model.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert f"{fit['temperature']:.3g}, in the weights of the head: calibration error" in shown
    assert "(cross-validated on 30 validation samples)" in shown
    assert main(["describe", str(plain / "model.safetensors")]) == 0
    assert "temperature" not in capsys.readouterr().out
    page = (scaled / "report.html").read_text(encoding="utf-8")
    assert f"Temperature: {fit['temperature']:.3g}, in the weights of the head" in page
    assert "mean confidence" in page
    assert "Temperature:" not in (plain / "report.html").read_text(encoding="utf-8")


def test_evaluation_shows_the_direction(tmp: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(plain / "model.safetensors"), str(tmp / "photos")
    assert main(["evaluate", model, data, "--split", "test", "--workers", "0"]) == 0
    assert "under-confident: mean confidence" in capsys.readouterr().out
    assert main(["evaluate", model, data, "--split", "test", "--workers", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration_direction"] == "under-confident"
    assert found["mean_confidence"] - found["confidence_gap"] == pytest.approx(found["top1"])


def test_every_runtime_gives_the_scaled_probabilities(tmp: Path, scaled: Path, plain: Path) -> None:
    pytest.importorskip("onnxruntime")
    paths = [str(path) for _, path in images(tmp / "photos" / "test")][::4]
    assert main(["export", str(scaled / "model.safetensors"), str(tmp / "scaled.onnx")]) == 0
    assert main(["convert", str(scaled / "model.safetensors"), str(tmp / "hf"), "--to", "hf"]) == 0
    rows = list(vitrail.predict(scaled / "model.safetensors", paths, top=3))
    for other in (tmp / "scaled.onnx", tmp / "hf"):
        for ours, theirs in zip(rows, vitrail.predict(other, paths, top=3), strict=True):
            assert theirs.label == ours.label
            scores = [[score for _, score in row.predictions] for row in (ours, theirs)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    before = list(vitrail.predict(plain / "model.safetensors", paths))
    assert all(row.score > old.score for row, old in zip(rows, before, strict=True))


def test_resumed_run_has_the_same_temperature(tmp: Path, scaled: Path) -> None:
    shutil.copytree(scaled, tmp / "resumed")
    for name in ("summary.json", "model.safetensors"):
        (tmp / "resumed" / name).unlink()
    trained(tmp, "--resume", "resumed")
    assert summary(tmp / "resumed")["calibration"] == summary(scaled)["calibration"]
    assert (tmp / "resumed/model.safetensors").read_bytes() == (scaled / "model.safetensors").read_bytes()


def test_scaled_model_is_fine_tuned_again(tmp: Path, scaled: Path) -> None:
    """Its head is kept with the temperature in it, and is not scaled twice."""
    again = ("photos", *STAY, "--init", "scaled/model.safetensors", "--out", "again")
    assert "its head is kept" in trained(tmp, *again).stderr
    fit = summary(tmp / "again")["calibration"]
    assert fit["temperature"] == 1
    assert fit["fitted"] == pytest.approx(1, abs=0.02)
    with inspect_checkpoint(tmp / "again" / "model.safetensors") as checkpoint:
        assert "calibration" not in checkpoint.contract.card
    old, new = (vitrail.load(tmp / run / "model.safetensors") for run in ("scaled", "again"))
    assert torch.allclose(old.head.weight, new.head.weight, atol=1e-6)


def test_a_new_head_has_no_temperature(scaled: Path) -> None:
    path = scaled / "model.safetensors"
    assert vitrail.load(path).card["calibration"]["temperature"] < 1
    assert "calibration" not in vitrail.load(path, classes=5).card
    assert "calibration" not in vitrail.load(path).replace_head(None).card
    assert "calibration" in vitrail.load(path).resize((48, 48)).card


def test_best_weights_and_adapters_are_scaled(tmp: Path) -> None:
    trained(tmp, "photos", *STAY, "--set", "keep=best", "--out", "best")
    temperature = summary(tmp / "best")["calibration"]["temperature"]
    best, model = (vitrail.load(tmp / "best" / f"{name}.safetensors") for name in ("best", "model"))
    assert torch.equal(model.head.weight, best.head.weight / temperature)
    trained(tmp, "photos", *STAY, "--tune", "lora", "--out", "lora")
    assert summary(tmp / "lora")["calibration"]["temperature"] < 0.5
    merged = vitrail.load(tmp / "weak.safetensors", adapter=tmp / "lora" / "adapter")
    whole = vitrail.load(tmp / "lora" / "model.safetensors")
    x = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(merged(x), whole(x), atol=1e-4)


@pytest.mark.parametrize("slots", [{}, {"head": "pre-logits"}, {"prefix": "class+distillation"}])
def test_every_head_divides_its_logits(slots: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = vitrail.build(None, patch=8, width=32, depth=1, heads=2, classes=5, image_size=24, **slots).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 3, 24, 24)
    with torch.no_grad():
        before = model(x)
        model.divide_logits(0.7)
        assert torch.allclose(model(x), before / 0.7, atol=1e-5)


def test_multi_label_run_is_calibrated(tmp: Path) -> None:
    with (tmp / "photos" / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "labels", "split"))
        for split in ("train", "val"):
            for k, path in images(tmp / "photos" / split):
                labels = (tuple(COLOURS)[k], "dark" if k == 0 else "light")
                writer.writerow((path, "|".join(labels), "validation" if split == "val" else split))
    done = trained(tmp, "photos/list.csv", *STAY[2:], "--set", "model.size.depth=1", "--out", "multi")
    fit = summary(tmp / "multi")["calibration"]
    assert fit["images"] == 30
    assert fit["loss_before"] > 0
    assert "accuracy of the labels" in done.stdout + done.stderr


def test_unknown_calibration_is_one_line(tmp: Path) -> None:
    done = train(tmp, "photos", *STAY, "--set", "calibrate=platt", "--out", "wrong")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "calibrate" in done.stderr
    assert "temperature" in done.stderr
    assert not (tmp / "wrong").exists()
