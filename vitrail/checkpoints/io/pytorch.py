"""PyTorch's `.pth`, `.pt` and `.bin` files, read with `weights_only=True` and memory-mapped.

Training scripts store their arguments beside the weights as an `argparse.Namespace`. It holds values only, so it is allowed
too; any other class is refused.
"""

import argparse
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.io.pickle_memory import estimate_pickle_memory
from vitrail.checkpoints.io.source import MAX_TENSORS, TensorFile, TensorSpec, checkpoint_error
from vitrail.utils.files import atomic_write

# Of several models in one file, the one that its authors evaluate comes first.
PREFERRED_KEYS = ("teacher", "state_dict_ema", "model", "state_dict", "model_ema", "ema")
PREFERRED_KEYS += ("student", "encoder", "module")
NON_WEIGHT_KEYS = ("optimizer", "optim", "scaler", "lr_scheduler", "scheduler", "dino_loss", "loss_scaler", "rng_state")
LEGACY_PICKLES = 5  # magic number, protocol, machine, content, keys of storages: PyTorch's format before version 1.6
MEMORY_FACTOR, MEMORY_ALLOWANCE = 32, 2**26  # an ordinary pickle takes a few MB


class PyTorchFile(TensorFile):
    """One file; of several models in it, the requested one or the one that its authors evaluate."""

    container = "PyTorch"

    def __init__(self, path: Path, take: str | None = None) -> None:
        super().__init__(path)
        models = dict(find_state_dicts(load_weights_only(path), set()))
        if not models:
            raise self.error("there are no tensors in it")
        if take is None:  # ignore a few tensors beside a model
            most = max(len(tensors) for tensors in models.values())
            models = {name: tensors for name, tensors in models.items() if 10 * len(tensors) >= most}
        if take is not None and take not in models:
            raise self.error(f"there is no {take!r} in it: it has {', '.join(models)}")
        preferred = [name for key in PREFERRED_KEYS for name in models if name.split(".")[-1] == key]
        chosen = next((name for name in ([take] if take else ["", *preferred]) if name in models), None)
        if chosen is None:
            chosen = max(models, key=lambda name: sum(tensor.numel() for tensor in models[name].values()))
        self.tensors = models[chosen]
        self.selected, self.alternatives = chosen or None, [name for name in models if name != chosen]
        self.specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        size = path.stat().st_size
        if len(self.specs) > MAX_TENSORS or self.nbytes > 4 * size + 2**20:
            raise self.error(f"its tensors take {self.nbytes:,} bytes, the file {size:,}")

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self.tensors = {}


def load_weights_only(path: Path) -> Any:
    """Return the content of the file that `weights_only=True` allows."""
    archive = zipfile.is_zipfile(path)
    if archive:
        check_archive(path)
    check_pickle_memory(path, archive)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's version: if it matters, loading fails
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except MemoryError:
        raise checkpoint_error(path, "not enough memory to read it") from None
    except Exception as error:  # a damaged or hostile pickle may raise anything
        if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise checkpoint_error(
                path,
                f"refused: besides weights it needs {wanted[1]}, which may run any code. If you trust its source, open it "
                "in isolation and save the tensors: torch.save({'model': state_dict}, …)",
            ) from None
        lines = [line for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
        why = (lines or [""])[0].removeprefix("Weights only load failed.").strip()[:200]
        raise checkpoint_error(path, f"not a PyTorch file, or a damaged one ({type(error).__name__}: {why})") from None


def check_archive(path: Path) -> None:
    """Raise unless PyTorch wrote the zip archive: a pickle and uncompressed bytes, no code."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError) as error:
        raise checkpoint_error(path, f"not a readable zip archive, or a truncated one ({error})") from None
    names = [info.filename for info in infos]
    if any("/code/" in name for name in names) or any(name.endswith("constants.pkl") for name in names):
        raise checkpoint_error(
            path,
            "refused: a TorchScript archive is a program (OpenAI's CLIP files are). If you trust its source, save its "
            "tensors: torch.save(torch.jit.load(path, 'cpu').state_dict(), …)",
        )
    if not any(name.endswith("data.pkl") for name in names):
        raise checkpoint_error(path, "a zip archive that is neither PyTorch's nor NumPy's")
    size = path.stat().st_size
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos) or sum(i.file_size for i in infos) > size:
        raise checkpoint_error(path, "not written by PyTorch: members of the archive are compressed or overlap")


def check_pickle_memory(path: Path, archive: bool) -> None:
    """Raise if unpickling would take much more memory than the file's size."""
    limit = MEMORY_FACTOR * path.stat().st_size + MEMORY_ALLOWANCE
    try:
        if archive:
            with zipfile.ZipFile(path) as opened:
                programs = [info for info in opened.infolist() if info.filename.endswith("data.pkl")]
                needed = sum(estimate_pickle_memory(opened.read(info)) for info in programs)
        else:
            with path.open("rb") as file:
                needed = sum(estimate_pickle_memory(file) for _ in range(LEGACY_PICKLES))
    except Exception as error:  # as above: a damaged or hostile pickle may raise anything
        raise checkpoint_error(path, f"not a PyTorch file, or a damaged one ({error})") from None
    if needed > limit:
        raise checkpoint_error(path, f"refused: unpickling it may take {needed:,} bytes, more than {limit:,}")


def find_state_dicts(
    data: Any, seen: set[int], name: str = "", depth: int = 0
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every mapping from names to tensors once, with its path: `teacher`, or "" for the file itself."""
    if not isinstance(data, Mapping) or depth > 3 or len(data) > MAX_TENSORS or id(data) in seen or len(seen) > 1_000:
        return
    seen.add(id(data))
    tensors = {key: value for key, value in data.items() if isinstance(key, str) and is_usable_tensor(value)}
    if tensors:
        yield name, tensors
    for key, value in data.items():
        if isinstance(key, str) and isinstance(value, Mapping) and key not in NON_WEIGHT_KEYS:
            yield from find_state_dicts(value, seen, f"{name}.{key}" if name else key, depth + 1)


def is_usable_tensor(value: Any) -> bool:
    """Return whether a value is a plain tensor with all its values."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def save_pytorch(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the file atomically."""
    with atomic_write(path, sum(tensor.nbytes for tensor in tensors.values())) as file:
        try:
            torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
        except RuntimeError as error:  # PyTorch's error for a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
