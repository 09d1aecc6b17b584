"""safetensors files: eight bytes of length, a JSON header, then the tensors end to end.

Values are read from the file directly into the model's memory, or stay in the file's pages and are copied on write.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.io.source import MAX_TENSORS, TensorFile, TensorSpec, parse_integers, parse_json, view_bytes
from vitrail.utils.files import atomic_write

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32}
DTYPES |= {"I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 25_000_000  # real headers have a few hundred thousand


class SafetensorsFile(TensorFile):
    """One file with a checked header: every tensor lies inside the file, without overlaps or gaps."""

    container = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size = path.stat().st_size
        self.storage: Any = None
        self.file = path.open("rb", buffering=0)
        try:
            self.header = self._read_header()
            self.byte_ranges = self._parse_header()
        except BaseException:
            self.file.close()
            raise

    def _read_header(self) -> bytes:
        begin = self.file.read(8)
        if len(begin) < 8:
            raise self.error(f"{self.size} bytes are too few for a safetensors file")
        (length,) = struct.unpack("<Q", begin)
        if length > MAX_HEADER_BYTES or length > self.size - 8:
            header = f"its header would have {length:,} bytes of {self.size:,}"
            raise self.error(f"not a safetensors file, or a truncated one: {header}")
        return self.file.read(length)

    def _parse_header(self) -> dict[str, tuple[int, int]]:
        """Return the first byte of each tensor in the file, and the one after its last."""
        complaint = "not a safetensors file, or a damaged one: its header is no JSON"
        header = parse_json(self.header, self.path, complaint)
        if not isinstance(header, dict):
            raise self.error("damaged safetensors header: not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self.error("damaged safetensors header: its metadata are not strings")
        self.metadata = metadata
        if len(header) > MAX_TENSORS:
            raise self.error(f"too many tensors: {len(header):,}")
        data = 8 + len(self.header)
        ranges: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            if not isinstance(entry, dict) or str(entry.get("dtype")) not in DTYPES:
                kind = entry.get("dtype") if isinstance(entry, dict) else entry
                raise self.error(f"{name[:80]} has the unknown dtype {str(kind)[:40]!r}: known are {', '.join(DTYPES)}")
            spec = TensorSpec(DTYPES[entry["dtype"]], parse_integers(entry, "shape", self.path))
            offsets = parse_integers(entry, "data_offsets", self.path)
            if len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
                raise self.error(f"damaged header: {name[:80]} takes {spec.nbytes} bytes and has {offsets}")
            self.specs[name] = spec
            ranges[name] = (data + offsets[0], data + offsets[1])
        at = data
        for name, (start, end) in sorted(ranges.items(), key=lambda item: item[1]):
            if start != at:
                raise self.error(f"damaged header: {name[:80]} begins at byte {start}, not at {at}")
            at = end
        if at != self.size:
            reason = "truncated" if at > self.size else "bytes after the tensors"
            raise self.error(f"{reason}: the header describes {at:,} bytes and the file has {self.size:,}")
        return ranges

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: Tensor) -> None:
        size, done = self.specs[name].nbytes, 0
        assert out.is_contiguous()
        assert out.numel() * out.element_size() == size
        self.file.seek(self.byte_ranges[name][0])
        while done < size:
            count = self.file.readinto(view_bytes(out)[done:])
            if not count:
                raise self.error(f"the file ended inside {name}: was it changed while it was read?")
            done += count

    def view(self, name: str) -> Tensor:
        spec, (start, end) = self.specs[name], self.byte_ranges[name]
        if not spec.nbytes or start % spec.dtype.itemsize:
            return self.read(name)
        if self.storage is None:  # a private mapping: a write copies the page and does not change the file
            self.storage = torch.UntypedStorage.from_file(str(self.path), False, self.size)
        part: Any = self.storage[start:end]
        return torch.empty(0, dtype=spec.dtype).set_(part).reshape(spec.shape)

    def close(self) -> None:
        self.file.close()
        self.storage = None


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, row after row."""
    return view_bytes(tensor.detach().cpu().contiguous())


def build_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header for these tensors in this order, padded so that they begin at a multiple of 64."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"safetensors does not support {tensor.dtype} ({name})")
        end = at + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % 64)


def sort_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort by dtype size, largest first as the format requires for alignment, then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the file atomically."""
    tensors = sort_tensors(tensors)
    write_with_header(path, build_header(tensors, metadata), tensors)


def write_with_header(path: Path, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write the file atomically with a given header."""
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(header):,} bytes, readers accept at most {MAX_HEADER_BYTES:,}")
    with atomic_write(path, 8 + len(header) + sum(tensor.nbytes for tensor in tensors.values())) as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))
