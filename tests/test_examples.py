"""The examples run as they are documented, and the minimal ViT computes what `vitrail.build` computes."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vitrail

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
MODULES = {
    "vitrail",
    "vitrail.data.log_mel",
    "vitrail.data.sources",
    "vitrail.objectives.contrastive",
}  # as in the docs


def run_example(name: str, *arguments: str | Path) -> str:
    """Run an example as a program on this checkout and return what it prints."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def find_number(pattern: str, text: str) -> float:
    """Return the number that the pattern's group matches in the text."""
    match = re.search(pattern, text)
    assert match, f"no {pattern!r} in {text!r}"
    return float(match[1])


def import_example(name: str):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- all of them ---


def test_the_table_lists_every_example():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_gives_the_command_and_the_code_uses_public_names_alone(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree) or ""
    assert f"python examples/{path.name}" in docstring
    assert "Expect" in docstring
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vitrail":
            assert node.attr in vitrail.__all__
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vitrail":
            assert node.module in MODULES
        if isinstance(node, ast.Import):
            assert all(name.name in MODULES for name in node.names if name.name.split(".")[0] == "vitrail")


# --- the minimal ViT ---


def compare(ours: torch.nn.Module, theirs: torch.nn.Module, rename, image: torch.Tensor, tolerance: float) -> None:
    """Compare logits and the gradient of every parameter, each relative to its norm."""
    ours.load_state_dict(rename(theirs.state_dict()))
    target = torch.arange(len(image))
    logits, expected = ours(image), theirs(image)
    assert logits.shape == expected.shape
    assert (logits - expected).norm() <= tolerance * expected.norm()
    F.cross_entropy(logits, target).backward()
    F.cross_entropy(expected, target).backward()
    gradients = rename({name: parameter.grad for name, parameter in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert gradients[name].norm() > 0, name
        assert (parameter.grad - gradients[name]).norm() <= tolerance * gradients[name].norm(), name


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Move every parameter away from zeros and ones, where a mistake could hide."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)


def test_the_minimal_vit_fits_on_one_page_and_needs_only_pytorch():
    source = (EXAMPLES / "minimal_vit.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    imported = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert names == {"torch"}
    for equation in range(1, 9):
        assert f"eq. {equation}" in source


def test_the_minimal_vit_equals_vitrail_in_double_precision():
    example = import_example("minimal_vit")
    sizes = {"width": 24, "depth": 3, "heads": 4, "channels": 2, "classes": 7, "image_size": 24}
    theirs = vitrail.build(patch=8, mlp_width=40, **sizes)
    randomise(theirs)
    ours = example.ViT(patch_size=8, mlp_width=40, **sizes)
    image = torch.randn(3, 2, 24, 24, dtype=torch.float64)
    compare(ours.double(), theirs.double(), example.rename_vitrail_state, image, 1e-10)


def test_the_minimal_vit_equals_b16():
    example = import_example("minimal_vit")
    theirs = vitrail.build("B/16")
    randomise(theirs)
    compare(example.ViT(), theirs, example.rename_vitrail_state, torch.randn(1, 3, 224, 224), 1e-3)


def test_the_minimal_vit_runs():
    printed = run_example("minimal_vit.py")
    assert "86,567,656" in printed
    assert find_number(r"largest difference +(\S+)", printed) < 1e-3


# --- the others ---


def test_the_custom_training_loop_trains_saves_and_loads(tmp_path: Path):
    file = tmp_path / "digits.safetensors"
    printed = run_example("custom_training_loop.py", "--steps", "40", "--out", file)
    assert find_number(r"test accuracy (\S+)", printed) > 0.2  # of 10 classes
    assert find_number(r"largest difference of logits (\S+)", printed) < 1e-4
    model = vitrail.load(file)
    assert model.labels == tuple("0123456789")
    assert model.preprocessing is not None
    assert model.preprocessing.size == (16, 16)


def test_the_learning_rate_of_the_custom_loop_rises_and_falls_to_zero():
    learning_rate = import_example("custom_training_loop").learning_rate
    rates = [learning_rate(step, 100, peak=1.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.0)
    assert learning_rate(0, 1) > 0  # a single step trains


@pytest.mark.slow
def test_the_frozen_backbone_does_not_change_while_its_head_is_trained(tmp_path: Path):
    printed = run_example("frozen_backbone.py", "--backbone-steps", "30", "--steps", "60", "--out", tmp_path)
    assert "feature maps [256, 128, 12, 12]" in printed
    assert "backbone unchanged: True" in printed
    empty = find_number(r"always empty: (\S+)\)", printed)
    assert find_number(r"accuracy over cells (\S+)", printed) > empty + 0.05
    assert torch.load(tmp_path / "head.pt")["weight"].shape == (11, 128, 4, 4)


def test_a_given_backbone_is_used_and_the_targets_match_the_sheets(tmp_path: Path):
    model = vitrail.build(patch=4, width=32, depth=2, heads=2, image_size=16, channels=1, classes=10)
    preprocessing = vitrail.Preprocessing(size=(16, 16), resize=(16, 16), mean=(0.5,), std=(0.5,))
    vitrail.save(model, tmp_path / "backbone.safetensors", preprocessing=preprocessing)
    printed = run_example(
        "frozen_backbone.py", "--backbone", tmp_path / "backbone.safetensors", "--steps", "2", "--out", tmp_path
    )
    assert "backbone unchanged: True" in printed

    example = import_example("frozen_backbone")
    images = torch.arange(10.0)[:, None, None, None].expand(10, 1, 4, 4)  # a digit's image is its number
    sheets, targets = example.compose_sheets(images, torch.arange(10), 50)
    assert sheets.shape == (50, 1, 12, 12)
    cells = F.avg_pool2d(sheets, 4)[:, 0]
    digits = targets != example.EMPTY
    assert torch.equal(cells[digits], targets[digits].float())
    assert (cells[~digits] == 0).all()
    assert 0.3 < digits.float().mean() < 0.7


def test_a_dataset_of_ones_own_is_trained_on_and_predicted(tmp_path: Path):
    printed = run_example("own_dataset.py", "--epochs", "2", "--out", tmp_path)
    assert "364 train, 78 validation, 78 test" in printed
    assert vitrail.load(tmp_path / "run" / "model.safetensors").labels == ("temple", "flower")
    assert (tmp_path / "run" / "report.html").is_file()
    predicted = re.findall(r"label (\w+)  predicted (\w+) \((\S+)\)", printed)
    assert {label for label, _, _ in predicted} == {"flower", "temple"}
    assert all(prediction in ("flower", "temple") and 0.5 <= float(score) <= 1 for _, prediction, score in predicted)


def test_one_encoder_is_trained_on_images_and_tones_and_saved(tmp_path: Path):
    printed = run_example("one_encoder.py", "--steps", "4", "--batch", "16", "--out", tmp_path / "digits.safetensors")
    assert 0 <= find_number(r"test top-1 accuracy (\S+): 200 sounds", printed) <= 1
    assert find_number(r"largest difference of features (\S+)", printed) == 0
    shared = vitrail.load_shared(tmp_path / "digits.safetensors")
    assert shared["images"].blocks is shared["sounds"].blocks
    assert shared["sounds"].preprocessing.sound is not None


def test_one_encoder_reads_recordings_by_their_names_and_says_what_it_needs(tmp_path: Path):
    example = import_example("one_encoder")
    for name in ("7_jackson_0.wav", "7_theo_5.wav", "3_theo_32.wav", "notes.wav"):
        (tmp_path / name).touch()
    files = example.list_recordings(tmp_path)
    assert {split: [file.name for file in found] for split, found in files.items()} == {
        "train": ["3_theo_32.wav"],
        "validation": ["7_theo_5.wav"],
        "test": ["7_jackson_0.wav"],
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="has no recordings named DIGIT_SPEAKER_NUMBER"):
        example.list_recordings(tmp_path / "empty")
