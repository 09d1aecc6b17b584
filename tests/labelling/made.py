"""A folder of images in three colours with wrong labels, and a model whose features tell colours apart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing

SIZE = 16
COLOURS = {"blue": (20, 40, 230), "green": (30, 200, 40), "red": (220, 30, 30)}
WRONG = {"blue/9.png": "red", "green/9.png": "blue"}  # the image in the folder, and its colour


def save_model(path: Path) -> Path:
    """Save a small model without training: its features keep the colour."""
    torch.manual_seed(0)
    made = vitrail.build(patch=8, width=32, depth=1, heads=2, image_size=SIZE, classes=3, init="deit", pool="mean")
    vitrail.save(made, path, labels=tuple(COLOURS), preprocessing=Preprocessing((SIZE, SIZE), (SIZE, SIZE)))
    return path


def save_image(path: Path, colour: str, seed: int) -> Path:
    """Save an image of one colour with noise of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).normal(0, 45, (24, 20, 3))
    Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


def make_photos(folder: Path, per_class: int = 10, wrong: dict[str, str] = WRONG) -> None:
    """Save a folder of classes in which some images lie in the wrong one."""
    for number, name in enumerate(COLOURS):
        for index in range(per_class):
            colour = wrong.get(f"{name}/{index}.png", name)
            save_image(folder / name / f"{index}.png", colour, 1000 * number + index)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create photos with wrong labels, unlabelled images and a model, and work there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(Path("model.safetensors"))
    make_photos(Path("photos"))
    for number, name in enumerate(COLOURS):
        for index in range(4):
            save_image(Path("more", f"{name}-{index}.png"), name, 5000 + 10 * number + index)
    return tmp_path


def label(capsys, *arguments) -> tuple[int, str, str]:
    """Run `vitrail label`; return the exit code and the outputs."""
    try:
        code = main(["label", *map(str, arguments)])
    except SystemExit as stop:  # of argparse
        code = int(stop.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


def result(capsys, *arguments) -> dict:
    """Return the JSON of a command that succeeds."""
    code, out, error = label(capsys, *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def refused(capsys, *arguments) -> str:
    """Return the one-line message of a command that fails."""
    code, out, error = label(capsys, *arguments)
    assert code == 2, out + error
    assert error.count("\n") == 1, error
    return error.strip()
