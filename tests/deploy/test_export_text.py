"""Export of text towers: the file's features are those of the model, and the tokeniser stands beside it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'vitrail[onnx]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'vitrail[onnx]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import onnxruntime
import tokenizers

import vitrail
from tests.checkpoints.towers_made import make_towers
from vitrail.cli import main

TEXTS = ["a cat", "", "a photo of the dog " * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "siglip.safetensors"
    vitrail.save(make_towers(True), path)
    return path


def test_an_exported_text_tower_gives_the_features_of_the_model(model: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "text.onnx"
    assert main(["export", str(model), str(out), "--text-tower", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(out)
    assert said["largest_difference"] < 1e-4
    towers = vitrail.load_towers(model)
    session = onnxruntime.InferenceSession(str(out))
    with torch.inference_mode():
        tokens = towers.tokenizer(TEXTS)
        expected = towers.encode_texts(tokens).numpy()
    (found,) = session.run(None, {"tokens": tokens.numpy()})
    np.testing.assert_allclose(found, expected, atol=1e-5)
    about = json.loads(session.get_modelmeta().custom_metadata_map["vitrail.text"])
    assert about["scale"] == pytest.approx(towers.logits.scale.exp().item())
    assert about["bias"] == pytest.approx(towers.logits.bias.item())
    read = tokenizers.Tokenizer.from_file(said["tokenizer"])
    assert read.encode("a cat").ids[:4] == tokens[0, :4].tolist()  # start, a, cat, end


def test_a_text_tower_is_exported_for_openvino(model: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'vitrail[openvino]'")
    assert main(["export", str(model), str(tmp_path / "text.xml"), "--text-tower"]) == 0
    assert "tokens [B, 16] to [B, 24]" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"text.xml", "text.bin", "text.tokenizer.json"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["text.pt2", "--text-tower"], "a text tower is written as .onnx or .xml (OpenVINO)"),
        (["text.onnx", "--text-tower", "--int8"], "--int8 is for images: leave it out with --text-tower"),
        (["text.onnx", "--text-tower", "--merge", "2"], "--merge is for images: leave it out with --text-tower"),
        (["text.onnx", "--tokenizer", "tokenizer.json"], "--tokenizer needs --text-tower: add it, or leave this out"),
    ],
)
def test_options_of_images_are_refused(model: Path, tmp_path: Path, capsys, options: list[str], words: str) -> None:
    assert main(["export", str(model), str(tmp_path / options[0]), *options[1:]]) != 0
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_text_tower_is_named(tmp_path: Path, capsys) -> None:
    vitrail.save(
        vitrail.build(patch=8, width=16, depth=1, heads=1, image_size=16, classes=2), tmp_path / "x.safetensors"
    )
    assert main(["export", str(tmp_path / "x.safetensors"), str(tmp_path / "text.onnx"), "--text-tower"]) != 0
    assert "it has no text tower" in capsys.readouterr().err
