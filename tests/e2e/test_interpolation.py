"""Weights between a zero-shot classifier and its fine-tuned copy, through the command line (WiSE-FT)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import make_towers
from tests.training.runs import trained
from vitrail.checkpoints.convert import convert
from vitrail.cli import main

NAMES = "a cat,a dog,a photo"


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two towers, and photos in folders by class."""
    folder = tmp_path_factory.mktemp("wise")
    vitrail.save(make_towers(), folder / "towers.safetensors")
    rng = np.random.default_rng(0)
    for name in NAMES.split(","):
        (folder / "photos" / name).mkdir(parents=True)
        for index in range(12):
            pixels = rng.integers(0, 256, (36, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def zero(tmp: Path) -> Path:
    out = tmp / "zero.safetensors"
    assert main(["convert", str(tmp / "towers.safetensors"), str(out), "--to", "vitrail", "--zero-shot", NAMES]) == 0
    return out


@pytest.fixture(scope="module")
def tuned(tmp: Path, zero: Path) -> Path:
    arguments = ("photos", "--init", "zero.safetensors", "--steps", "4", "--batch-size", "12", "--lr", "1e-3")
    done = trained(tmp, *arguments, "--out", "tuned", "--workers", "0")
    assert "its head is kept" in done.stderr
    return tmp / "tuned" / "model.safetensors"


def call(*arguments: object) -> int:
    return main([*map(str, arguments)])


def test_classifier_by_texts_is_a_file(tmp: Path, zero: Path) -> None:
    expected = vitrail.zero_shot(vitrail.load_towers(tmp / "towers.safetensors"), NAMES)
    found = vitrail.load(zero)
    assert found.labels == expected.labels
    assert found.preprocessing == expected.preprocessing
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_weights_lie_between_both_models(tmp: Path, zero: Path, tuned: Path, alpha: float, capsys) -> None:
    out = tmp / f"mixed-{alpha}.safetensors"
    assert call("convert", tuned, out, "--to", "vitrail", "--interpolate", zero, "--alpha", alpha, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bit_for_bit"]
    first, second, mixed = (vitrail.load(path).state_dict() for path in (zero, tuned, out))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name, tensor in mixed.items():
        expected = (1 - alpha) * first[name].double() + alpha * second[name].double()
        torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=0 if alpha in (0, 1) else 1e-7)
    card = vitrail.load(out).card
    assert card["interpolated"] == {"with": str(zero), "alpha": alpha}
    assert "calibration" not in card


def test_both_towers_are_interpolated(tmp: Path) -> None:
    vitrail.save(make_towers(seed=1), tmp / "other.safetensors")
    convert(
        tmp / "other.safetensors",
        tmp / "half.safetensors",
        "vitrail",
        text_tower=True,
        interpolate=tmp / "towers.safetensors",
    )
    first, second, half = (
        vitrail.load_towers(tmp / f"{name}.safetensors").state_dict() for name in ("towers", "other", "half")
    )
    for name, tensor in half.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2, rtol=0, atol=1e-6)


def test_what_cannot_be_interpolated_is_named_in_one_line(tmp: Path, zero: Path, tuned: Path, capsys) -> None:
    two, large = tmp / "two.safetensors", tmp / "large.safetensors"
    assert call("convert", tmp / "towers.safetensors", two, "--to", "vitrail", "--zero-shot", "a cat,a dog") == 0
    assert call("convert", zero, large, "--to", "vitrail", "--size", 64) == 0
    capsys.readouterr()
    for options, message in (
        (("--interpolate", two), "has other classes, 'a cat', 'a dog', not 'a cat', 'a dog', 'a photo'"),
        (("--interpolate", large), "large.safetensors differs in image_size: [64, 64], not [32, 32]"),
        (("--interpolate", zero, "--alpha", 1.5), "--alpha must be from 0 to 1, got 1.5"),
        (("--alpha", 0.5), "--alpha needs --interpolate"),
        (("--template", "{}"), "--template needs --zero-shot"),
        (("--zero-shot", "a cat,a dog"), "it has no text tower"),
        (("--zero-shot", "a cat,a dog", "--classes", 2), "--classes does not go with --zero-shot"),
    ):
        assert call("convert", tuned, tmp / "never.safetensors", "--to", "vitrail", *options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
    assert call("convert", tmp / "towers.safetensors", tmp / "x", "--to", "vitrail", "--zero-shot", "a cat") == 2
    assert (
        "--zero-shot needs at least two names with commas between them, or a file, got 'a cat'"
        in capsys.readouterr().err
    )
    assert call("convert", tmp / "towers.safetensors", tmp / "x", "--to", "hf", "--zero-shot", "a cat,a dog") == 2
    assert "--zero-shot needs --to vitrail" in capsys.readouterr().err
    assert not (tmp / "never.safetensors").exists()
