"""The interface of tensor files: names and shapes from the header, and one tensor at a time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

MAX_TENSORS = 200_000  # per checkpoint; the largest Vision Transformers have a few thousand


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """An open checkpoint: names, dtypes and shapes are known, values are read on request."""

    container = "a file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self.settings: dict[str, Any] = {}  # JSON files beside it, by name
        self.selected: str | None = None  # which of several models in the file
        self.alternatives: list[str] = []

    def read(self, name: str) -> Tensor:
        """Return one tensor in its own memory."""
        raise NotImplementedError

    def read_into(self, name: str, out: Tensor) -> None:
        """Read one tensor into existing memory: contiguous, of its dtype and size."""
        out.copy_(self.read(name))

    def view(self, name: str) -> Tensor:
        """Return one tensor in the pages of the file if possible, copied only on write."""
        return self.read(name)

    def close(self) -> None:
        """Close the file."""

    def error(self, reason: str) -> ValueError:
        """Return the error for this file if it cannot be read."""
        return checkpoint_error(self.path, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def checkpoint_error(path: Path, reason: str) -> ValueError:
    """Return the error for a file that cannot be read, in one line."""
    return ValueError(f"{path}: {' '.join(reason.split())}")


def read_json(path: Path, max_bytes: int = 25_000_000) -> Any:
    """Read a JSON file of limited size."""
    if path.stat().st_size > max_bytes:
        raise checkpoint_error(path, f"JSON file too large: {path.stat().st_size:,} bytes")
    return parse_json(path.read_bytes(), path, "not readable as JSON")


def parse_json(data: bytes, path: Path, complaint: str) -> Any:
    """Parse JSON from untrusted bytes; a repeated name is an error."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("an object has two entries of the same name")
        return dict(pairs)

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise checkpoint_error(path, f"{complaint} ({error})") from None


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the JSON files that libraries store beside the weights."""
    names = ("config.json", "preprocessor_config.json", "open_clip_config.json")
    return {name: read_json(folder / name) for name in names if (folder / name).is_file()}


def parse_integers(values: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    """Return a list of integers >= 0; raise if it is none."""
    integers = values.get(name)
    if not isinstance(integers, list) or not all(type(v) is int and 0 <= v < 2**62 for v in integers):
        raise checkpoint_error(path, f"damaged header: {name} is {str(integers)[:60]}")
    return tuple(integers)
