"""Hostile shards and tables, files that vanish in the middle of a run, and a clock that goes back."""

import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vitrail
from tests.hostile.measured import run_vitrail as run

TINY = (
    "--set",
    "model.size.depth=1",
    "--set",
    "model.size.heads=2",
    "--set",
    "model.size.width=16",
    "--set",
    "model.size.mlp=32",
)
OFTEN = ("--save-seconds", "0", "--set", "validate_every=1")
SHORT = ("--batch-size", "4", "--workers", "0", "--device", "cpu", *TINY)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def fill(folder: Path, count: int = 12) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for k in range(count):
            (folder / label / f"{k}.png").write_bytes(png(hash(label) % 97 + k))
    return folder


def add(archive: tarfile.TarFile, name: str, data: bytes, **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def write_shard(path: Path, hostile) -> Path:
    """Write a shard of twelve good samples with hostile members among them."""
    with tarfile.open(path, "w") as archive:
        for k in range(12):
            add(archive, f"{k:03d}.png", png(k))
            add(archive, f"{k:03d}.cls", str(k % 2).encode())
            if k == 5:
                hostile(archive)
    return path


MEMBERS = {
    "path traversal": lambda archive: add(archive, "../../escaped.png", png(99)),
    "absolute path": lambda archive: add(archive, "/tmp/escaped.png", png(99)),
    "symbolic link": lambda archive: add(archive, "link.png", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": lambda archive: add(archive, "hard.png", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": lambda archive: add(archive, "null.png", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "pipe": lambda archive: add(archive, "pipe.png", b"", type=tarfile.FIFOTYPE),
    "newline in the name": lambda archive: add(archive, "new\nline.png", png(99)),
    "not UTF-8": lambda archive: add(archive, "caf\udce9.png", png(99)),
    "label of a megabyte": lambda archive: add(archive, "long.cls", b"9" * 2**20),
    "twice the same": lambda archive: add(archive, "001.png", png(99)),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_hostile_members_of_a_shard_do_no_harm(name: str, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "shard-000.tar", MEMBERS[name])
    before = set(tmp_path.parent.iterdir())
    done = run("check", shard, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.code in (0, 1, 2), done.err
    assert "Traceback" not in done.err
    assert "root:" not in done.out + done.err
    assert set(tmp_path.parent.iterdir()) == before
    assert not Path("/tmp/escaped.png").exists()


@pytest.mark.parametrize("size", [2**33 - 1, 2**63 - 1, -1])
def test_a_member_that_claims_more_than_the_file_is_one_line(size: int, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "shard-000.tar", lambda archive: add(archive, "big.png", b"x"))
    data = bytearray(shard.read_bytes())
    at = data.index(b"big.png")
    field = struct.pack(">Bxxxq", 0x80, size) if size >= 2**33 or size < 0 else f"{size:011o}\0".encode()
    data[at + 124 : at + 136] = field
    shard.write_bytes(data)
    done = run("check", shard, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.code in (1, 2), (done.out, done.err)
    assert "Traceback" not in done.err
    assert done.peak_mb < 1_000


@pytest.mark.parametrize("damage", ["truncated", "changed", "not an image", "no column"])
def test_damaged_parquet_is_one_line(damage: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": png(k) if damage != "not an image" else b"<svg/>", "path": f"{k}.png"} for k in range(12)]
    columns = {"image": images, "label": [k % 2 for k in range(12)]}
    if damage == "no column":
        columns = {"other": [1, 2], "thing": ["a", "b"]}
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "changed":
        data[len(data) - 200 : len(data) - 100] = bytes(100)
        path.write_bytes(data)
    done = run("check", path, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.code in (1, 2), (done.out, done.err)
    assert "Traceback" not in done.err


def test_images_deleted_in_the_middle_of_a_run_are_named(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", 40)
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", "train", photos, "--out", tmp_path / "run", "--epochs", "40", *SHORT, *OFTEN],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    begin = time.monotonic()
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")) and process.poll() is None:
        assert time.monotonic() - begin < 120
        time.sleep(0.01)
    shutil.rmtree(photos / "cat")
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    assert process.returncode in (0, 2), err
    if process.returncode == 0:  # read into memory before, or passed over
        assert (tmp_path / "run" / "model.safetensors").is_file()
    else:
        assert "cat" in err


def test_data_changed_between_stop_and_resume_is_refused(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run("train", photos, "--out", tmp_path / "run", "--steps", "3", *SHORT, "--save-seconds", "0", env=env)
    assert done.code == 0, done.err
    (tmp_path / "run" / "summary.json").unlink()
    (photos / "cat" / "0.png").rename(photos / "dog" / "moved.png")
    run("train", "--resume", tmp_path / "run", env=env).assert_refused("restore", "new run")


CLOCK = """
import sys, time
real, start = time.time, time.time()
time.time = lambda: start - 3 * (real() - start) - 86400 * ((real() - start) > 0.5)
from vitrail.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["train", "digits", "--steps", "6", *SHORT[2:], "--batch-size", "32", "--save-seconds", "0"]
    usual = run(*command, "--out", tmp_path / "usual", env=env)
    assert usual.code == 0, usual.err
    back = subprocess.run(
        [sys.executable, "-c", CLOCK, *command, "--out", tmp_path / "back"], capture_output=True, text=True, env=env
    )
    assert back.returncode == 0, back.stderr
    ours, theirs = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("usual", "back"))
    assert ours == theirs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-40])
def test_weights_that_are_not_finite_are_refused_and_tiny_ones_are_not(value: float, tmp_path: Path) -> None:
    vitrail.save(vitrail.build("Ti/16", depth=1, classes=10), tmp_path / "ours.safetensors")
    assert run("convert", tmp_path / "ours.safetensors", tmp_path / "foreign.safetensors", "--to", "timm").code == 0
    tensors = load_file(tmp_path / "foreign.safetensors")
    name = "blocks.0.mlp.fc1.weight"
    tensors[name].flat[3] = value
    save_file(tensors, tmp_path / "foreign.safetensors")
    done = run("convert", tmp_path / "foreign.safetensors", tmp_path / "out.safetensors", "--to", "vitrail")
    if np.isfinite(value):
        assert done.code == 0, done.err
    else:
        done.assert_refused(name)
        assert not (tmp_path / "out.safetensors").exists()
