"""From a path to an open checkpoint: by what its first bytes say, whatever it is called."""

from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoints.files.npz import NpzFile
from vitrail.checkpoints.files.pickled import PickledFile
from vitrail.checkpoints.files.safetensors import SafetensorsFile
from vitrail.checkpoints.files.source import Source, read_json, refuse, settings_beside

# What libraries call the weights in a directory, the safest first.
WHOLE = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
BY_SAFETY = (*WHOLE[:2], INDEXES[0], *WHOLE[2:], INDEXES[1])


class Shards(Source):
    """Several files that are one checkpoint, by the index beside them."""

    def __init__(self, index: Path) -> None:
        super().__init__(index)
        data = read_json(index)
        places = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(places, dict) or not places or not all(map(is_plain_name, places.values())):
            raise refuse(index, "not an index of shards: it has no weight_map of names to files beside it")
        self.parts: dict[str, Source] = {}
        try:
            for name in dict.fromkeys(places.values()):
                if not (index.parent / name).is_file():
                    raise refuse(index, f"the shard {name} is missing")
                self.parts[name] = open_file(index.parent / name)
            self.homes: dict[str, Source] = {}
            for part in self.parts.values():
                for name, spec in part.specs.items():
                    if name in self.homes:
                        raise refuse(index, f"{name} is in two shards")
                    self.homes[name], self.specs[name] = part, spec
            for name in places:
                if name not in self.homes:
                    raise refuse(index, f"{name} is in no shard, and the index says it is in {places[name]}")
        except BaseException:
            self.close()
            raise
        self.container = f"{next(iter(self.parts.values())).container} in {len(self.parts)} shards"

    def read(self, name: str) -> Tensor:
        return self.homes[name].read(name)

    def read_into(self, name: str, out: Tensor) -> None:
        self.homes[name].read_into(name, out)

    def view(self, name: str) -> Tensor:
        return self.homes[name].view(name)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def is_plain_name(value: Any) -> bool:
    """A file's name, and no way to anywhere else."""
    return isinstance(value, str) and value == Path(value).name


def open_checkpoint(path: Path, take: str | None = None) -> Source:
    """A file or a directory of weights, open. `take` names one of several models in a PyTorch file."""
    if path.is_dir():
        names = [name for name in BY_SAFETY if (path / name).is_file()]
        if not names:
            raise refuse(path, f"a directory without weights: none of {', '.join((*WHOLE, *INDEXES))} is in it")
        path = path / names[0]
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    source = Shards(path) if path.name.endswith(".index.json") else open_file(path, take)
    if take is not None and not isinstance(source, PickledFile):
        source.close()
        raise refuse(path, f"there is one model in it, and no {take!r} to take")
    if path.name in (*WHOLE, *INDEXES):
        source.settings = settings_beside(path.parent)
        source.metadata |= front_matter(path.parent / "README.md")
    return source


def open_file(path: Path, take: str | None = None) -> Source:
    """One file, by its first bytes."""
    if not path.is_file():
        raise refuse(path, "not a file")
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin:
        raise refuse(path, "an empty file")
    if begin[:4] == b"PK\x03\x04":
        return NpzFile(path) if _holds_arrays(path) else PickledFile(path, take)
    if begin[8:9] == b"{":
        return SafetensorsFile(path)
    if begin[:1] == b"\x80" or path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".pkl"):
        return PickledFile(path, take)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    raise refuse(path, "neither safetensors, nor PyTorch's nor NumPy's archive, by its first bytes")


def _holds_arrays(path: Path) -> bool:
    """Whether the first member of a zip archive is an array: PyTorch's first is never."""
    with path.open("rb") as file:
        begin = file.read(4096)
    length = int.from_bytes(begin[26:28], "little")
    return begin[30 : 30 + length].endswith(b".npy") or path.suffix == ".npz"


def front_matter(readme: Path) -> dict[str, str]:
    """The licence that a model card states in its first lines."""
    if not readme.is_file():
        return {}
    with readme.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(20_000).splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, Any] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, colon, value = line.partition(":")
        if colon and key.strip() == "license" and value.strip():
            found["license"] = value.strip().strip("'\"")
    return found
