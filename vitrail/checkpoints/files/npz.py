"""NumPy's archives, in which Google publishes: a zip file with one array a member. Nothing in them is unpickled."""

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

from vitrail.checkpoints.files.atomic import atomic
from vitrail.checkpoints.files.source import MOST_TENSORS, Source, Spec, raw, refuse

DTYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "V2": torch.bfloat16,  # NumPy has no bfloat16: JAX's arrays are saved as two bytes of nothing in particular
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}
GROUP_NORM = re.compile(
    r"(^|/)gn\w*/(scale|bias)\.npy$"
)  # Google's older ones have three dimensions of 1 before theirs
MOST_EXPANDED = 20  # times the file: weights hardly compress


class Member(NamedTuple):
    info: zipfile.ZipInfo
    skip: int  # bytes of the array's own header
    columns_first: bool


class NpzFile(Source):
    """One archive, all of its members checked before any value is read."""

    container = "npz"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError) as error:
            raise refuse(path, f"not a readable zip archive, or a truncated one ({error})") from None
        try:
            self.members = self._members()
        except BaseException:
            self.close()
            raise

    def _members(self) -> dict[str, Member]:
        infos, size = self.archive.infolist(), self.path.stat().st_size
        if len(infos) > MOST_TENSORS:
            raise refuse(self.path, f"{len(infos):,} arrays are more than a model has")
        total = sum(info.file_size for info in infos)
        if total > MOST_EXPANDED * size + 2**20:
            raise refuse(self.path, f"its arrays would take {total:,} bytes, from a file of {size:,}: refused")
        members: dict[str, Member] = {}
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if not info.filename.endswith(".npy") or name in members:
                raise refuse(self.path, f"{info.filename[:80]!r} is no array of its own: this is not a NumPy archive")
            self.specs[name], members[name] = self._array(info)
        return members

    def _array(self, info: zipfile.ZipInfo) -> tuple[Spec, Member]:
        where = info.filename[:80]
        try:
            with self.archive.open(info) as file:
                version = npy.read_magic(file)
                read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
                if read is None:
                    raise ValueError(f"format {version}")
                shape, columns_first, dtype = read(file)
                skip = file.tell()
        except Exception as error:  # a damaged member fails in zipfile, zlib or NumPy's parser, each in its own ways
            raise refuse(self.path, f"damaged array {where} ({type(error).__name__}: {str(error)[:120]})") from None
        if dtype.hasobject:
            raise refuse(self.path, f"{where} holds pickled objects, which are never unpickled: save plain arrays")
        kind = dtype.str
        if kind[0] == ">":
            raise refuse(self.path, f"{where} is big-endian: save it with `array.astype('<{kind[1:]}')`")
        if kind[1:] not in DTYPES:
            raise refuse(self.path, f"{where} has the kind {kind!r}, which no weights have")
        spec = Spec(DTYPES[kind[1:]], tuple(int(n) for n in shape))
        if min(spec.shape, default=0) < 0 or info.file_size - skip != math.prod(spec.shape) * dtype.itemsize:
            raise refuse(self.path, f"{where} speaks of the shape {list(spec.shape)} and has {info.file_size} bytes")
        if GROUP_NORM.search(info.filename) and spec.shape[:-1] == (1, 1, 1):
            spec = Spec(spec.dtype, spec.shape[-1:])
        return spec, Member(info, skip, columns_first)

    def read(self, name: str) -> Tensor:
        spec, member = self.specs[name], self.members[name]
        shape = spec.shape[::-1] if member.columns_first else spec.shape
        tensor = torch.empty(shape, dtype=spec.dtype)
        try:
            with self.archive.open(member.info) as opened:
                file: Any = opened
                file.read(member.skip)
                if spec.bytes:
                    view, done = raw(tensor), 0
                    while done < spec.bytes:
                        got = file.readinto(view[done : done + 2**22])
                        if not got:
                            raise EOFError("too short")
                        done += got
                if file.read(1):  # the end, where the archive's checksum is compared
                    raise ValueError("too long")
        except Exception as error:
            raise refuse(self.path, f"damaged array {name} ({type(error).__name__}: {str(error)[:120]})") from None
        return tensor.permute(*reversed(range(tensor.ndim))).contiguous() if member.columns_first else tensor

    def close(self) -> None:
        self.archive.close()


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as NumPy saves it, bfloat16 included."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"NumPy has no {tensor.dtype}")
    return tensor.numpy()


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """All or nothing."""
    with atomic(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, array(tensor), allow_pickle=False)
