"""safetensors, read and written here: eight bytes of length, a JSON header, then the tensors end to end.

The format is small enough to read directly: values go from the file straight into memory that the model owns, or stay in the
file's own pages and are copied when they are changed.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoints.files.atomic import atomic
from vitrail.checkpoints.files.source import MOST_TENSORS, Source, Spec, numbers, parse_json, raw, refuse

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 25_000_000  # bytes; real ones have a few hundred thousand


class Place(NamedTuple):
    """Where a tensor's bytes are, counted from the beginning of the file."""

    start: int
    end: int


class SafetensorsFile(Source):
    """One file, its header checked: every tensor lies inside it, none overlap, and nothing lies between them."""

    container = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size = path.stat().st_size
        self.pages: Any = None
        self.file = path.open("rb", buffering=0)
        try:
            self.header = self._header()
            self.places = self._tensors()
        except BaseException:
            self.file.close()
            raise

    def _header(self) -> bytes:
        begin = self.file.read(8)
        if len(begin) < 8:
            raise refuse(self.path, f"{self.size} bytes are too few for a safetensors file")
        (length,) = struct.unpack("<Q", begin)
        if length > LONGEST_HEADER or length > self.size - 8:
            raise refuse(
                self.path,
                f"not a safetensors file, or a truncated one: its header would have {length:,} bytes of {self.size:,}",
            )
        return self.file.read(length)

    def _tensors(self) -> dict[str, Place]:
        complaint = "not a safetensors file, or a damaged one: its header is no JSON"
        header = parse_json(self.header, self.path, complaint)
        if not isinstance(header, dict):
            raise refuse(self.path, "damaged safetensors header: it is no list of tensors")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise refuse(self.path, "damaged safetensors header: its metadata are not strings")
        self.metadata = metadata
        if len(header) > MOST_TENSORS:
            raise refuse(self.path, f"{len(header):,} tensors are more than a model has")
        data = 8 + len(self.header)
        places: dict[str, Place] = {}
        for name, entry in header.items():
            if not isinstance(entry, dict) or str(entry.get("dtype")) not in DTYPES:
                kind = entry.get("dtype") if isinstance(entry, dict) else entry
                raise refuse(
                    self.path, f"{name[:80]} has the unknown kind {str(kind)[:40]!r}: known are {', '.join(DTYPES)}"
                )
            spec = Spec(DTYPES[entry["dtype"]], numbers(entry, "shape", self.path))
            offsets = numbers(entry, "data_offsets", self.path)
            if len(offsets) != 2 or offsets[1] - offsets[0] != spec.bytes:
                raise refuse(self.path, f"damaged header: {name[:80]} takes {spec.bytes} bytes and has {offsets}")
            self.specs[name] = spec
            places[name] = Place(data + offsets[0], data + offsets[1])
        at = data
        for name, place in sorted(places.items(), key=lambda item: item[1]):
            if place.start != at:
                raise refuse(self.path, f"damaged header: {name[:80]} begins at byte {place.start}, not at {at}")
            at = place.end
        if at != self.size:
            what = "truncated" if at > self.size else "something follows the tensors"
            raise refuse(self.path, f"{what}: the header speaks of {at:,} bytes and the file has {self.size:,}")
        return places

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: Tensor) -> None:
        size, done = self.specs[name].bytes, 0
        assert out.is_contiguous()
        assert out.numel() * out.element_size() == size
        self.file.seek(self.places[name].start)
        while done < size:
            got = self.file.readinto(raw(out)[done:])
            if not got:
                raise refuse(self.path, f"the file ended inside {name}: was it changed while it was read?")
            done += got

    def view(self, name: str) -> Tensor:
        spec, place = self.specs[name], self.places[name]
        if not spec.bytes or place.start % spec.dtype.itemsize:
            return self.read(name)
        if self.pages is None:  # private: writing to it copies the page and leaves the file alone
            self.pages = torch.UntypedStorage.from_file(str(self.path), False, self.size)
        part: Any = self.pages[place.start : place.end]
        return torch.empty(0, dtype=spec.dtype).set_(part).reshape(spec.shape)

    def close(self) -> None:
        self.file.close()
        self.pages = None


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values as they stand in memory, row after row."""
    return raw(tensor.detach().cpu().contiguous())


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header for these tensors in this order, padded so that they begin at a multiple of 64."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"safetensors has no name for {tensor.dtype} ({name})")
        end = at + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % 64)


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Largest kinds first, as the format asks, so that all are aligned; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """All or nothing: the file is there with everything in it, or as it was before."""
    tensors = in_order(tensors)
    write_with_header(path, header_of(tensors, metadata), tensors)


def write_with_header(path: Path, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """The same with a header that was made before."""
    if len(header) > LONGEST_HEADER:
        raise ValueError(f"a header of {len(header):,} bytes is longer than the {LONGEST_HEADER:,} that readers accept")
    with atomic(path) as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
