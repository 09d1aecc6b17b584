"""Classification with class names alone, through the command line: predictions, evaluation, refusals in one line."""

import csv
import json

import pytest
import torch
from PIL import Image

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import make_towers
from vitrail.cli import main

NAMES = "a cat,a dog,a photo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with two towers, and photos in folders by class."""
    folder = tmp_path_factory.mktemp("zero")
    vitrail.save(make_towers(), folder / "towers.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in NAMES.split(","):
        (folder / "photos" / name).mkdir(parents=True)
        for index in range(3):
            pixels = torch.randint(0, 256, (40, 36, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / "photos" / name / f"{index}.png")
    return folder


def call(folder, *arguments: str) -> int:
    return main([*map(str, arguments)])


def test_predictions_are_those_of_the_classifier(folder, tmp_path, capsys) -> None:
    out = tmp_path / "predictions.csv"
    arguments = ("predict", folder / "towers.safetensors", folder / "photos", "--out", out, "--classes", NAMES)
    assert call(folder, *arguments, "--template", "{}", "--template", "the {}") == 0
    rows = list(csv.DictReader(out.open()))
    classifier = vitrail.zero_shot(vitrail.load_towers(folder / "towers.safetensors"), NAMES, ("{}", "the {}"))
    expected = list(vitrail.predict(classifier, folder / "photos", device="cpu"))
    assert [row["label"] for row in rows] == [row.label for row in expected]
    assert len(rows) == 9
    capsys.readouterr()


def test_evaluation_counts_the_named_classes(folder, capsys) -> None:
    arguments = ("evaluate", folder / "towers.safetensors", folder / "photos", "--classes", NAMES, "--json")
    assert call(folder, *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    classifier = vitrail.zero_shot(vitrail.load_towers(folder / "towers.safetensors"), NAMES)
    expected = vitrail.evaluate(classifier, folder / "photos", device="cpu").as_dict()
    assert result["top1"] == expected["top1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--classes", "cat,cat"), "--classes lists 'cat' twice: remove one"),
        (("--classes", "cat"), "--classes needs at least two names with commas between them, or a file, got 'cat'"),
        (("--classes", "a cat,"), "--classes has an empty name at position 2: remove it"),
        (("--classes", "cat," + "x" * 1_000_001), "texts must have at most 1,000,000 characters"),
        (("--classes", "nothing.txt"), "--classes nothing.txt: no such file"),
        (("--classes", NAMES, "--template", "a photo"), "a template must have {} where the name goes, got 'a photo'"),
        (("--template", "{}"), "--template needs --classes"),
        (("--classes", NAMES, "--tokenizer", "/nowhere"), "/nowhere: no tokeniser"),
    ],
)
def test_mistakes_are_named_in_one_line(folder, tmp_path, capsys, options, message) -> None:
    arguments = ("predict", folder / "towers.safetensors", folder / "photos", "--out", tmp_path / "p.csv")
    assert call(folder, *arguments, *options) != 0
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_model_without_a_text_tower_is_refused(folder, tmp_path, capsys) -> None:
    vitrail.save(vitrail.build(patch=16, width=32, depth=1, heads=2, image_size=32), tmp_path / "vit.safetensors")
    arguments = ("predict", tmp_path / "vit.safetensors", folder / "photos", "--out", tmp_path / "p.csv")
    assert call(folder, *arguments, "--classes", NAMES) != 0
    assert "it has no text tower" in capsys.readouterr().err


def test_both_towers_are_described_and_converted(folder, tmp_path, capsys) -> None:
    assert call(folder, "describe", folder / "towers.safetensors", "--text-tower") == 0
    assert "text tower" in capsys.readouterr().out
    assert call(folder, "convert", folder / "towers.safetensors", tmp_path / "i.safetensors", "--to", "vitrail") == 0
    assert "note: the text tower is left out: --text-tower converts both" in capsys.readouterr().out
    out = tmp_path / "hf"
    assert call(folder, "convert", folder / "towers.safetensors", out, "--to", "hf", "--text-tower") == 0
    assert vitrail.load_towers(out).config.text == make_towers().config.text
    capsys.readouterr()
