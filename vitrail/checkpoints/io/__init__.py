"""Opening of a checkpoint, file or directory, by its first bytes, whatever its name."""

from collections.abc import Container
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from vitrail.checkpoints.io.npz import NpzFile
from vitrail.checkpoints.io.pytorch import PyTorchFile
from vitrail.checkpoints.io.safetensors import SafetensorsFile
from vitrail.checkpoints.io.source import TensorFile, checkpoint_error, read_json, read_settings

# File names that libraries give to the weights in a directory, the safest first.
WEIGHT_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES_BY_SAFETY = (*WEIGHT_FILES[:2], INDEX_FILES[0], *WEIGHT_FILES[2:], INDEX_FILES[1])
OPEN_CLIP_CONFIG = "open_clip_config.json"


def rank_weights(files: Container[str]) -> list[str]:
    """Return the standard weights among the files of a directory, the best first: the safest, and in OpenCLIP's own format.

    Repositories of OpenCLIP hold the same weights in the format of transformers too.
    """
    names = [name for name in FILES_BY_SAFETY if name in files]
    return sorted(names, key=lambda name: not name.startswith("open_clip")) if OPEN_CLIP_CONFIG in files else names


class ShardedFile(TensorFile):
    """Several files that are one checkpoint, listed in an index beside them."""

    def __init__(self, index: Path) -> None:
        super().__init__(index)
        data = read_json(index)
        found = data.get("weight_map") if isinstance(data, dict) else None
        files = found if isinstance(found, dict) else {}
        if not files or not all(isinstance(name, str) and name == Path(name).name for name in files.values()):
            raise self.error("not an index of shards: it has no weight_map of names to files beside it")
        self.shards: dict[str, TensorFile] = {}
        try:
            for name in dict.fromkeys(files.values()):
                if not (index.parent / name).is_file():
                    raise self.error(f"the shard {name} is missing")
                self.shards[name] = open_tensor_file(index.parent / name)
            self.shard_by_tensor: dict[str, TensorFile] = {}
            for part in self.shards.values():
                for name, spec in part.specs.items():
                    if name in self.shard_by_tensor:
                        raise self.error(f"{name} is in two shards")
                    self.shard_by_tensor[name], self.specs[name] = part, spec
            for name in files:
                if name not in self.shard_by_tensor:
                    raise self.error(f"{name} is in no shard; the index names {files[name]}")
        except BaseException:
            self.close()
            raise
        self.container = f"{next(iter(self.shards.values())).container} in {len(self.shards)} shards"

    def read(self, name: str) -> Tensor:
        return self.shard_by_tensor[name].read(name)

    def read_into(self, name: str, out: Tensor) -> None:
        self.shard_by_tensor[name].read_into(name, out)

    def view(self, name: str) -> Tensor:
        return self.shard_by_tensor[name].view(name)

    def close(self) -> None:
        for part in self.shards.values():
            part.close()


def list_folder(folder: Path) -> set[str]:
    """Return the names of the files in a directory."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def open_checkpoint(path: Path, take: str | None = None) -> TensorFile:
    """Open a file or a directory of weights. `take` names one of several models in it."""
    if path.is_dir():
        names = rank_weights(list_folder(path))
        if not names:
            known = ", ".join((*WEIGHT_FILES, *INDEX_FILES))
            raise checkpoint_error(path, f"a directory without weights: it has none of {known}")
        path = path / names[0]
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    source = ShardedFile(path) if path.name.endswith(".index.json") else open_tensor_file(path, take)
    if take is not None and not isinstance(source, PyTorchFile) and "vitrail" not in source.metadata:
        source.close()
        raise checkpoint_error(path, f"it holds one model and no {take!r}")
    if path.name in (*WEIGHT_FILES, *INDEX_FILES):
        source.settings = read_settings(path.parent)
        source.metadata |= read_front_matter(path.parent / "README.md")
    return source


def open_tensor_file(path: Path, take: str | None = None) -> TensorFile:
    """Open one file by its first bytes."""
    if not path.is_file():
        raise checkpoint_error(path, "not a file")
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin:
        raise checkpoint_error(path, "an empty file")
    if begin[:4] == b"PK\x03\x04":
        return NpzFile(path) if _is_npz(path) else PyTorchFile(path, take)
    if begin[8:9] == b"{":
        return SafetensorsFile(path)
    if begin[:1] == b"\x80" or path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".pkl"):
        return PyTorchFile(path, take)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    raise checkpoint_error(path, "not a safetensors, PyTorch or NumPy file, by its first bytes")


def _is_npz(path: Path) -> bool:
    """Return whether the first member of a zip archive is an array; PyTorch's never is."""
    with path.open("rb") as file:
        begin = file.read(4096)
    length = int.from_bytes(begin[26:28], "little")
    return begin[30 : 30 + length].endswith(b".npy") or path.suffix == ".npz"


def read_front_matter(readme: Path) -> dict[str, str]:
    """Return the licence in the first lines of a model card."""
    if not readme.is_file():
        return {}
    with readme.open(encoding="utf-8", errors="replace") as file:
        first, *lines = [line.strip() for line in file.read(20_000).splitlines()] or [""]
    for line in takewhile(lambda line: line != "---", lines if first == "---" else []):
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return {"license": value.strip().strip("'\"")}
    return {}
