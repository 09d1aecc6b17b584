"""What every file of tensors answers: what is in it, from its header alone, and one tensor at a time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

MOST_TENSORS = 200_000  # of one checkpoint; the largest Vision Transformers have a few thousand


class Spec(NamedTuple):
    """A tensor as its header tells it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source:
    """A checkpoint that is open: names, kinds and shapes are known, values are read when asked for."""

    container = "a file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        self.metadata: dict[str, str] = {}
        self.settings: dict[str, Any] = {}  # JSON files that lie beside it, by name
        self.taken: str | None = None  # which of several models in the file
        self.others: list[str] = []

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        raise AssertionError("a source says how it is read")

    def read_into(self, name: str, out: Tensor) -> None:
        """One tensor, to memory that is there: contiguous, of its kind and as large."""
        out.copy_(self.read(name))

    def view(self, name: str) -> Tensor:
        """One tensor, in the pages of the file itself where it can be: nothing is copied until it is changed."""
        return self.read(name)

    def close(self) -> None:
        """Lets go of the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs.values())


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def refuse(path: Path, why: str) -> ValueError:
    """The error for a file that cannot be read, in one line."""
    return ValueError(f"{path}: {' '.join(why.split())}")


def read_json(path: Path, most: int = 25_000_000) -> Any:
    """A JSON file of reasonable size."""
    if path.stat().st_size > most:
        raise refuse(path, f"a JSON file of {path.stat().st_size:,} bytes is not one that belongs to a model")
    return parse_json(path.read_bytes(), path, "not readable as JSON")


def parse_json(data: bytes, path: Path, complaint: str) -> Any:
    """JSON from bytes that nobody vouches for; a name given twice is an error too."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is given twice")
        return found

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"{complaint} ({error})") from None


def settings_beside(folder: Path) -> dict[str, Any]:
    """The JSON files that libraries keep beside the weights, those that are there."""
    names = ("config.json", "preprocessor_config.json", "open_clip_config.json")
    return {name: read_json(folder / name) for name in names if (folder / name).is_file()}


def numbers(values: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    """A list of whole numbers, none negative, or an error."""
    found = values.get(name)
    if not isinstance(found, list) or not all(type(v) is int and 0 <= v < 2**62 for v in found):
        raise refuse(path, f"damaged header: {name} is {str(found)[:60]}")
    return tuple(found)
