"""A full disk ends every command in one line that names it, and leaves no part of a file behind."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail
from tests.hostile.measured import run_forked
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.export import export
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.training.checkpointing import find_damage
from vitrail.utils.files import DiskFullError

FIXTURES = Path(__file__).parent.parent / "compatibility" / "fixtures"
SIZES = ("heads=8", "width=512", "mlp=2048", "depth=1")
WIDE = tuple(word for size in SIZES for word in ("--set", f"model.size.{size}"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here (needs root)")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a model of 22 MB."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    built = vitrail.build("Ti/16", image_size=32, classes=10)
    built.preprocessing = Preprocessing((32, 32), (32, 32))
    vitrail.save(built, path)
    return path


@pytest.mark.parametrize("name", ["model.onnx", "model.xml", "model.pt2"])
def test_export(name: str, model: Path, disk: Path) -> None:
    pytest.importorskip({"model.onnx": "onnxscript", "model.xml": "openvino"}.get(name, "torch"))
    refused = run_forked("export", model, disk / name)
    refused.assert_refused("no space left on", "needs about", "MB")
    assert refused.code == 1
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("name", ["model.xml", "model.pt2"])
def test_a_disk_that_fills_while_an_export_is_written_is_named(name: str, model: Path, disk: Path, monkeypatch) -> None:
    """As if the size had been unknown: the libraries report a full disk in their own ways, one of them by an abort."""
    pytest.importorskip("openvino" if name == "model.xml" else "torch")
    monkeypatch.setattr("vitrail.deploy.export.export.estimate_bytes", lambda *_: 0)
    opened = open_checkpoint(model)
    assert opened.model is not None
    target = {".xml": "openvino", ".pt2": "torch"}[Path(name).suffix]
    with pytest.raises(DiskFullError, match=r"no space left on .*: model\.(xml|pt2)"):
        export(opened.model, opened.contract, disk / name, target=target)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("target", ["timm", "hf", "big_vision"])
def test_convert(target: str, model: Path, disk: Path) -> None:
    suffix = {"timm": ".pth", "hf": "", "big_vision": ".npz"}[target]
    refused = run_forked("convert", model, disk / f"converted{suffix}", "--to", target)
    refused.assert_refused("no space left on", "needs about", "MB")
    assert refused.code == 1
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("command", [("train",), ("pretrain", "--method", "mae")])
def test_training_stops_with_one_line_and_keeps_what_it_has(command: tuple[str, ...], disk: Path) -> None:
    length = ("--steps", "4", "--save-seconds", "0", "--workers", "0")
    refused = run_forked(*command, "digits", *WIDE, *length, "--out", disk / "run")
    refused.assert_refused("no space left on")
    assert refused.code == 1
    assert "inline_container" not in refused.err
    assert not [path for path in disk.rglob("*") if ".partial" in path.name]
    assert (disk / "run" / "recipe.json").is_file()


def test_a_full_disk_leaves_earlier_checkpoints(disk: Path) -> None:
    small = ("--set", "model.size.heads=2", "--set", "model.size.width=64", "--set", "model.size.depth=2")
    length = ("--steps", "40", "--save-seconds", "0", "--keep-checkpoints", "100", "--workers", "0")
    refused = run_forked("train", "digits", *small, *length, "--out", disk / "run")
    refused.assert_refused("no space left on", "step-", "needs about", "earlier checkpoints are intact")
    assert refused.code == 1
    assert not [path for path in disk.rglob("*") if ".partial" in path.name]
    checkpoints = sorted((disk / "run" / "checkpoints").iterdir())
    assert checkpoints
    assert [find_damage(path) for path in checkpoints] == [None] * len(checkpoints)


def test_embed_names_the_space_that_all_rows_need(model: Path, disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(8 * 2**20 - 3 * 4096))
    refused = run_forked("embed", model, FIXTURES / "images", "--out", disk / "features.npy")
    refused.assert_refused("no space left on", "features.npy", "needs about 1 MB, 0 MB are free")
    assert refused.code == 1


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_embed_stops_with_one_line_and_resumes(pages: int, disk: Path, tmp_path: Path) -> None:
    """Rows, paths and journal need four pages while the journal is replaced."""
    embed = ("embed", FIXTURES / "finished" / "vit" / "model.safetensors", FIXTURES / "images", "--out")
    (disk / "filler").write_bytes(bytes(8 * 2**20 - pages * 4096))
    refused = run_forked(*embed, disk / "features.npy")
    refused.assert_refused("no space left on", "features.npy")
    assert refused.code == 1
    (disk / "filler").unlink()
    for out, more in ((disk, ("--resume",)), (tmp_path, ())):
        done = run_forked(*embed, out / "features.npy", *more)
        assert done.code == 0, done.err
    assert (disk / "features.npy").read_bytes() == (tmp_path / "features.npy").read_bytes()
    assert [path.name for path in disk.iterdir() if ".partial" in path.name] == []
