"""Damaged checkpoints of Swin, and sizes and channels that do not fit: one line each, nothing loaded in part."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitrail
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.registry import configure

Tensors = dict[str, Tensor]
SMALL = {"family": "swin", "width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "classes": 3, "image_size": 32}
TABLE = "layers.0.blocks.0.attn.relative_position_bias_table"
QKV = "layers.1.blocks.0.attn.qkv.weight"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Swin in vitrail's format."""
    path = tmp_path_factory.mktemp("swin") / "own.safetensors"
    model = vitrail.build_from(configure(**SMALL))
    vitrail.save(model, path, labels=("a", "b", "c"), preprocessing=Preprocessing((32, 32), (32, 32)))
    return path


@pytest.fixture(scope="module")
def tensors(own: Path) -> Tensors:
    """Return the tensors of the model by timm's names."""
    out = own.parent / "timm.safetensors"
    assert main(["convert", str(own), str(out), "--to", "timm"]) == 0
    return load_file(out)


def cut(name: str, *, rows: int = 1) -> Callable[[Tensors], Tensors]:
    return lambda found: found | {name: found[name][:-rows].contiguous()}


def add(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda found: found | {name: torch.zeros(shape)}


DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "truncated table": (cut(TABLE), "a table of 48 relative positions fits no window"),
    "table of another window": (cut(TABLE, rows=24), "layers.0.blocks.1.attn.relative_position_bias_table"),
    "tensor of a ViT": (add("cls_token", 1, 1, 16), "cls_token [1, 1, 16] is unexpected"),
    "tensor of Swin v2": (add("layers.0.blocks.0.attn.logit_scale", 1, 1, 1), "logit_scale [1, 1, 1] is unexpected"),
    "missing matrix": (lambda found: {k: v for k, v in found.items() if k != QKV}, f"{QKV} [96, 32] is missing"),
    "matrix of another width": (cut(QKV), QKV),
    "values that are not finite": (lambda found: found | {QKV: found[QKV] * torch.nan}, "not finite"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_whole(damage: str, tensors: Tensors, tmp_path: Path, capsys) -> None:
    change, reason = DAMAGES[damage]
    path, out = tmp_path / "damaged.safetensors", tmp_path / "rows.csv"
    save_file(change(tensors), path)
    Image.new("RGB", (40, 40)).save(tmp_path / "image.png")
    with pytest.raises(ValueError, match="damaged") as error:
        vitrail.load(path)
    assert reason in str(error.value)
    assert main(["predict", str(path), str(tmp_path), "--out", str(out)]) == 2
    assert "damaged.safetensors" in capsys.readouterr().err
    assert not out.exists()
    assert main(["describe", str(path)]) in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "Swin-T", "--size", "2"], "image sides must be multiples of the patch 4, got 2: use 4"),
        (["describe", "Swin-T", "--size", "30x32"], "image sides must be multiples of the patch 4, got 30"),
        (["describe", "Swin-T", "--channels", "0"], "channels must be at least 1, got 0"),
        (["train", "digits", "--recipe", "swin", "--size", "5"], "image sides must be multiples of the patch 4, got 5"),
    ],
)
def test_sizes_and_channels_that_do_not_fit(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_images_below_a_window_are_padded_and_below_a_patch_refused(own: Path) -> None:
    model = vitrail.load(own).eval()
    assert model(torch.randn(1, 3, 4, 8)).shape == (1, 3)  # less than a window, and a stage of one cell
    with pytest.raises(ValueError, match=r"multiples of the patch 4, got 2×32"):
        model(torch.randn(1, 3, 2, 32))
    with pytest.raises(ValueError, match=r"takes \[B, 3, H, W\], got \[1, 4, 32, 32\]"):
        model(torch.randn(1, 4, 32, 32))
