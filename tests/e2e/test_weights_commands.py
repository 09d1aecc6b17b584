"""Tests of `vitrail describe FILE` and `vitrail convert`."""

import json
from pathlib import Path

import pytest
import torch

import vitrail
from tests.e2e.test_command_line import vitrail as command
from vitrail.checkpoints import TARGET_NAMES, keys
from vitrail.checkpoints.formats import timm
from vitrail.checkpoints.io import safetensors
from vitrail.cli import main
from vitrail.models.registry import configure

SHARED = Path(__file__).parents[3] / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
needs_weights = pytest.mark.skipif(
    not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)"
)
CONFIG = configure(patch=16, width=64, depth=1, heads=1, image_size=32, classes=3)


@pytest.fixture
def weights(tmp_path):
    tensors = keys.export_state(timm.map_vit(CONFIG), vitrail.build_from(CONFIG).state_dict())
    tensors = {name: tensor + 0.05 * torch.randn(tensor.shape) for name, tensor in tensors.items()}
    safetensors.save_safetensors(tmp_path / "vit.safetensors", tensors, {})
    return tmp_path / "vit.safetensors"


@needs_weights
def test_describe_reports_on_a_real_checkpoint():
    result = command("describe", str(WEIGHTS))
    assert result.stderr == ""
    for part in (
        "safetensors, 21.8 MB, 152 tensors, float32",
        "timm's Vision Transformer",
        "Ti/16, 5,717,416 parameters",
        "152 loaded, 0 left out, 0 missing, 0 unexpected, 0 wrong shape",
        "all finite",
        "mean 0.485, 0.456, 0.406",
        "from the file name",
        "3: the published number for the width 192",
        "The checkpoint can be loaded.",
    ):
        assert part in result.stdout


def test_describe_json_has_everything(weights, capsys):
    assert main(["describe", str(weights), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["form"] == "timm"
    assert found["loads"] is True
    assert found["coverage"]["loaded"] == found["tensors"]
    assert found["not_told_by_tensors"]["heads"] == {"value": 1, "from": "timm's default, 64 values per head"}
    assert found["preprocessing"]["size"] == [32, 32]
    assert found["not_finite"] == []
    assert main(["describe", str(weights), "--json", "--header"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] is None


def test_describe_lists_differences_with_exit_code_1(weights, capsys):
    with safetensors.SafetensorsFile(weights) as file:
        tensors = {name: file.read(name) for name in file.specs if name != "norm.bias"}
    safetensors.save_safetensors(weights, tensors | {"extra": torch.ones(2)}, {})
    assert main(["describe", str(weights)]) == 1
    text = capsys.readouterr().out
    assert "norm.bias [64] is missing" in text
    assert "extra [2] is unexpected" in text
    assert "The checkpoint cannot be loaded." in text


@pytest.mark.slow
def test_convert_through_every_format(weights, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("cat\ndog\ncœur\n", encoding="utf-8")
    steps = [
        (str(weights), "a.safetensors", "vitrail", ["--labels", str(tmp_path / "names.txt"), "--licence", "mit"]),
        (str(tmp_path / "a.safetensors"), "hf", "hf", []),
        (str(tmp_path / "hf"), "b.npz", "big_vision", []),
        (str(tmp_path / "b.npz"), "tv.pth", "torchvision", ["--assume", "gelu=exact"]),
        (str(tmp_path / "tv.pth"), "timm.pth", "timm", []),
    ]
    for source, out, to, more in steps:
        assert main(["convert", source, str(tmp_path / out), "--to", to, *more]) == 0
        text = capsys.readouterr().out
        assert "read back identical bit for bit" in text
        assert "largest difference 0, largest value" in text
    assert vitrail.load(tmp_path / "hf").labels == ("cat", "dog", "cœur")
    assert vitrail.load(tmp_path / "a.safetensors").card["licence"] == "mit"
    first, last = vitrail.load(weights).state_dict(), vitrail.load(tmp_path / "timm.pth").state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_convert_with_changes(weights, tmp_path, capsys):
    out = str(tmp_path / "out.safetensors")
    options = ["--classes", "7", "--size", "48x64", "--channels", "1", "--json"]
    assert main(["convert", str(weights), out, "--to", "vitrail", *options]) == 0
    assert json.loads(capsys.readouterr().out)["bit_for_bit"] is True
    config = vitrail.load(out).config
    assert (config.classes, config.image_size, config.channels) == (7, (48, 64), 1)
    assert main(["convert", str(weights), out, "--to", "vitrail", "--classes", "none"]) == 0
    assert vitrail.load(out).config.classes is None


def test_missing_information_is_reported(weights, tmp_path, capsys):
    assert main(["convert", str(weights), str(tmp_path / "b.npz"), "--to", "big_vision"]) == 0
    text = capsys.readouterr().out
    assert "the file does not record GELU: give it when loading" in text
    assert "read without the configuration: largest difference" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["describe", "{empty}"], "an empty file"),
        (["describe", "{text}"], "not a safetensors, PyTorch or NumPy file"),
        (["describe", "{weights}", "--assume", "heads"], "write it as NAME=VALUE"),
        (["describe", "{weights}", "--assume", "heads=five"], "invalid value --assume heads=five"),
        (["describe", "{weights}", "--assume", "gelu=hard"], "unknown gelu 'hard': known are exact, tanh, quick"),
        (["convert", "{weights}", "out.safetensors", "--to", "keras"], "invalid choice: 'keras'"),
        (["convert", "{weights}", "out.pth", "--to", "vitrail"], "a file for vitrail must be named *.safetensors"),
        (["convert", "{weights}", "out.safetensors", "--to", "hf"], "give the name of a new directory"),
        (
            ["convert", "{weights}", "out.pth", "--to", "vit-pytorch"],
            "vit-pytorch cannot express this model: its queries",
        ),
        (["convert", "{weights}", "nowhere/out.pth", "--to", "timm"], "there is no directory nowhere"),
        (["convert", "{weights}", "out.pth", "--to", "timm", "--size", "33"], "not divisible by the patch size"),
        (["convert", "{weights}", "out.pth", "--to", "timm", "--labels", "nowhere.txt"], "nowhere.txt"),
        (["convert", "{weights}", "out.pth", "--to", "timm", "--image", "{text}"], "cannot identify image file"),
        (["push", "{weights}", "somewhere"], "invalid Hub address"),
    ],
)
def test_user_errors_are_one_line(arguments, message, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.pth").touch()
    (tmp_path / "text.xyz").write_text("hello, this is no picture and no checkpoint")
    files = {"weights": weights, "empty": "empty.pth", "text": "text.xyz"}
    arguments = [argument.format(**files) for argument in arguments]
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err.strip().splitlines()[-1]
    assert captured.out == ""
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {"empty.pth", "text.xyz", "vit.safetensors"}


def test_help_lists_the_formats():
    text = command("convert", "--help").stdout
    assert ", ".join(TARGET_NAMES) in " ".join(text.split())
    assert "--allow-missing" in text


@pytest.mark.slow
@needs_weights
@pytest.mark.skipif(
    not (SHARED / "data" / "imagenet-samples").exists(), reason="the 200 photographs are not beside this checkout"
)
def test_real_deit_agrees_with_timm_on_every_photograph():
    timm_library = pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
    from PIL import Image
    from safetensors.torch import load_file
    from timm.data import create_transform

    model = vitrail.load(WEIGHTS)
    assert len(model.state_dict()) == 152
    peer = timm_library.create_model("deit_tiny_patch16_224").eval()
    peer.load_state_dict(load_file(WEIGHTS), strict=True)
    transform = create_transform(
        (3, 224, 224), interpolation="bicubic", crop_pct=0.9, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    paths = sorted((SHARED / "data" / "imagenet-samples").iterdir())
    correct = 0
    with torch.inference_mode():
        for start in range(0, len(paths), 20):
            images = [Image.open(path).convert("RGB") for path in paths[start : start + 20]]
            ours = model(torch.stack([model.preprocessing(image) for image in images])).argmax(1)
            theirs = peer(torch.stack([transform(image) for image in images])).argmax(1)
            assert torch.equal(ours, theirs)
            correct += sum(
                int(path.name[:4]) == predicted for path, predicted in zip(paths[start:], ours.tolist(), strict=False)
            )
    assert len(paths) == 200
    assert correct == 162
