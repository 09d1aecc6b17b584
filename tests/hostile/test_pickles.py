"""PyTorch files that run no code but would take far more memory than their size."""

import collections
import io
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from tests.hostile.measured import run_vitrail
from vitrail.checkpoints.io.pickle_memory import estimate_pickle_memory
from vitrail.checkpoints.io.pytorch import load_weights_only

MB = 2**20


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def encode_bomb(copies: int, length: int) -> bytes:
    """Encode one stored string again and again."""
    begin = b"\x80\x02" + text("a" * length) + b"q\x00" + text("latin1") + b"q\x01" + b"c_codecs\nencode\nq\x02"
    return begin + b"]" + b"".join(b"h\x02h\x00h\x01\x86Ra" for _ in range(copies)) + b"."


def bytearray_bomb(copies: int, length: int) -> bytes:
    """Ask for zeroed memory by its length."""
    begin = b"\x80\x02cbuiltins\nbytearray\nq\x02]"
    return begin + b"".join(b"h\x02J" + struct.pack("<i", length) + b"\x85Ra" for _ in range(copies)) + b"."


def copy_bomb(copies: int, length: int) -> bytes:
    """Copy one stored list again and again."""
    begin = b"\x80\x02](" + b"K\x01" * length + b"eq\x00cbuiltins\nset\nq\x02]"
    return begin + b"".join(b"h\x02h\x00\x85Ra" for _ in range(copies)) + b"."


def tensor_bomb(copies: int, length: int) -> bytes:
    """Ask for tensors by their length."""
    begin = b"\x80\x02ctorch\nFloatTensor\nq\x02]"
    return begin + b"".join(b"h\x02J" + struct.pack("<i", length) + b"\x85Ra" for _ in range(copies)) + b"."


BOMBS = {
    "encode": encode_bomb(4_000, 2 * MB),
    "bytearray": bytearray_bomb(20, 2**30),
    "copy": copy_bomb(2_000, MB),
    "tensor": tensor_bomb(10, 2**30),
}


def write_archive(path: Path, program: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    return path


def write_legacy(path: Path, program: bytes) -> Path:
    first = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    path.write_bytes(b"".join(first) + program + pickle.dumps([], 2))
    return path


@pytest.mark.parametrize("write", [write_archive, write_legacy])
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_copies_its_values_is_refused_before_it_runs(name, write, tmp_path):
    path = write(tmp_path / "weights.pth", BOMBS[name])
    with pytest.raises(ValueError, match=r"weights\.pth: refused: unpickling it may take [\d,]+ bytes, more than"):
        load_weights_only(path)


def test_the_command_line_refuses_it_with_little_memory(tmp_path):
    usual = run_vitrail("describe", "Ti/16")
    assert usual.code == 0, usual.err
    refused = run_vitrail("describe", write_archive(tmp_path / "weights.pth", BOMBS["encode"]))
    refused.assert_refused("weights.pth", "refused: unpickling it may take")
    assert refused.peak_mb < usual.peak_mb + 200  # 8 GB without the check


def test_nested_containers_are_counted_in_linear_time(tmp_path):
    """Lists that hold the one before twice double the bound each time; nothing is copied, so it is not refused."""
    program = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([k % 250]) + b"h" + bytes([k % 250]) + b"eq" + bytes([(k + 1) % 250]) for k in range(50_000)
    )
    assert estimate_pickle_memory(program + b".") < 100 * len(program)


ORDINARY = {
    "state": {f"blocks.{k}.weight": torch.zeros(4, 4) for k in range(500)},
    "settings": {"model": {"w": torch.zeros(2)}, "args": list(range(20_000)), "note": "x" * 100_000},
    "counter": {
        "model": collections.OrderedDict(w=torch.zeros(2)),
        "seen": collections.Counter("hello"),
        "raw": b"abc",
    },
    "optimizer": {"w": torch.zeros(3), "optimizer": {k: {"step": k, "exp_avg": torch.zeros(2)} for k in range(300)}},
}


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_read(name, archive, tmp_path):
    torch.save(ORDINARY[name], tmp_path / "weights.pth", _use_new_zipfile_serialization=archive)
    assert load_weights_only(tmp_path / "weights.pth").keys() == ORDINARY[name].keys()


def test_the_bound_covers_what_unpickling_really_takes():
    """A bomb small enough to run: the bytes that it makes are within the bound."""
    program = encode_bomb(50, 10_000)
    made = torch._weights_only_unpickler.load(io.BytesIO(program))
    assert sum(map(len, made)) <= estimate_pickle_memory(program)


@pytest.mark.parametrize("program", [b"\x80\x02h\x05.", b"\x80\x02R.", b"\x80\x02e.", b"\x80\x02]", b"", b"garbage"])
def test_damaged_pickles_are_one_line(program, tmp_path):
    with pytest.raises(ValueError, match=r"weights\.pth: not a PyTorch file, or a damaged one") as error:
        load_weights_only(write_archive(tmp_path / "weights.pth", program))
    assert "\n" not in str(error.value)
