"""NumPy archives, Google's format: a zip file with one array per member. Nothing is unpickled."""

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from vitrail.checkpoints.io.source import MAX_TENSORS, TensorFile, TensorSpec, checkpoint_error, view_bytes
from vitrail.utils.files import atomic_write

# NumPy has no bfloat16: JAX saves it as two raw bytes.
DTYPES = {"f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "V2": torch.bfloat16, "i8": torch.int64}
DTYPES |= {"i4": torch.int32, "i2": torch.int16, "i1": torch.int8, "u1": torch.uint8, "b1": torch.bool}
# Google's older GroupNorm arrays have three leading dimensions of 1.
GROUP_NORM_PATTERN = re.compile(r"(^|/)gn\w*/(scale|bias)\.npy$")
MAX_EXPANSION = 20  # times the file: weights hardly compress


class NpzMember(NamedTuple):
    info: zipfile.ZipInfo
    header_bytes: int  # of the array's own header
    fortran_order: bool


class NpzFile(TensorFile):
    """One archive; all members are checked before any value is read."""

    container = "npz"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError) as error:
            raise checkpoint_error(path, f"not a readable zip archive, or a truncated one ({error})") from None
        try:
            self.members = self._read_members()
        except BaseException:
            self.close()
            raise

    def _read_members(self) -> dict[str, NpzMember]:
        infos, size = self.archive.infolist(), self.path.stat().st_size
        if len(infos) > MAX_TENSORS:
            raise self.error(f"too many arrays: {len(infos):,}")
        total = sum(info.file_size for info in infos)
        if total > MAX_EXPANSION * size + 2**20:
            raise self.error(f"refused: its arrays take {total:,} bytes, the file {size:,}")
        members: dict[str, NpzMember] = {}
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if not info.filename.endswith(".npy") or name in members:
                raise self.error(f"not a NumPy archive: {info.filename[:80]!r} is no array, or there twice")
            self.specs[name], members[name] = self._read_array_header(info)
        return members

    def _read_array_header(self, info: zipfile.ZipInfo) -> tuple[TensorSpec, NpzMember]:
        name = info.filename[:80]
        try:
            with self.archive.open(info) as file:
                version = npy.read_magic(file)
                read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
                if read is None:
                    raise ValueError(f"format {version}")
                shape, fortran_order, dtype = read(file)
                skip = file.tell()
        except Exception as error:  # a damaged member may fail in zipfile, zlib or NumPy's parser
            raise self._damage_error(name, error) from None
        if dtype.hasobject:
            raise self.error(f"{name} holds pickled objects, which are never unpickled: save plain arrays")
        kind = dtype.str
        if kind[0] == ">":
            raise self.error(f"{name} is big-endian: save it with `array.astype('<{kind[1:]}')`")
        if kind[1:] not in DTYPES:
            raise self.error(f"{name} has the unsupported dtype {kind!r}")
        spec = TensorSpec(DTYPES[kind[1:]], tuple(int(n) for n in shape))
        if min(spec.shape, default=0) < 0 or info.file_size - skip != math.prod(spec.shape) * dtype.itemsize:
            raise self.error(f"{name} has the shape {list(spec.shape)} and {info.file_size} bytes")
        if GROUP_NORM_PATTERN.search(info.filename) and spec.shape[:-1] == (1, 1, 1):
            spec = TensorSpec(spec.dtype, spec.shape[-1:])
        return spec, NpzMember(info, skip, fortran_order)

    def _damage_error(self, name: str, error: Exception) -> ValueError:
        return self.error(f"damaged array {name} ({type(error).__name__}: {str(error)[:120]})")

    def read(self, name: str) -> Tensor:
        spec, member = self.specs[name], self.members[name]
        shape = spec.shape[::-1] if member.fortran_order else spec.shape
        tensor = torch.empty(shape, dtype=spec.dtype)
        try:
            with self.archive.open(member.info) as opened:
                file: Any = opened
                file.read(member.header_bytes)
                if spec.nbytes:
                    view, done = view_bytes(tensor), 0
                    while done < spec.nbytes:
                        count = file.readinto(view[done : done + 2**22])
                        if not count:
                            raise EOFError("fewer bytes than its shape has")
                        done += count
                if file.read(1):  # reaching the end compares the archive's checksum
                    raise ValueError("more bytes than its shape has")
        except Exception as error:
            raise self._damage_error(name, error) from None
        return tensor.permute(*reversed(range(tensor.ndim))).contiguous() if member.fortran_order else tensor

    def close(self) -> None:
        self.archive.close()


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array that NumPy saves, bfloat16 included."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"NumPy has no {tensor.dtype}")
    return tensor.numpy()


def save_npz(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the archive atomically."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with atomic_write(path, nbytes) as file, zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, to_numpy(tensor), allow_pickle=False)
