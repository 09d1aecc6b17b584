"""PyTorch's `.pth`, `.pt` and `.bin`, without unpickling: only what `weights_only=True` admits, and mapped, not copied.

Training scripts store their arguments beside the weights as an `argparse.Namespace`. It holds values and does nothing, so it
is admitted too; any other class is refused.
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

from vitrail.checkpoints.files.atomic import atomic
from vitrail.checkpoints.files.source import MOST_TENSORS, Source, Spec, refuse

# Where several models are in one file, the one its authors evaluate comes first.
PREFERRED = ("teacher", "state_dict_ema", "model", "state_dict", "model_ema", "ema", "student", "encoder", "module")
NOT_WEIGHTS = ("optimizer", "optim", "scaler", "lr_scheduler", "scheduler", "dino_loss", "loss_scaler", "rng_state")


class PickledFile(Source):
    """One file; of several models in it, the one that is asked for or that its authors evaluate."""

    container = "PyTorch"

    def __init__(self, path: Path, take: str | None = None) -> None:
        super().__init__(path)
        found = dict(models(load(path), set()))
        if not found:
            raise refuse(path, "there are no tensors in it")
        if take is None:  # a few numbers beside a model are none
            most = max(len(tensors) for tensors in found.values())
            found = {name: tensors for name, tensors in found.items() if 10 * len(tensors) >= most}
        if take is not None and take not in found:
            raise refuse(path, f"there is no {take!r} in it: it has {', '.join(found)}")
        order = [take] if take else ["", *(name for key in PREFERRED for name in found if name.split(".")[-1] == key)]
        chosen = next((name for name in order if name in found), None)
        if chosen is None:
            chosen = max(found, key=lambda name: sum(tensor.numel() for tensor in found[name].values()))
        self.tensors = found[chosen]
        self.taken, self.others = chosen or None, [name for name in found if name != chosen]
        self.specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        if len(self.specs) > MOST_TENSORS or self.bytes > 4 * path.stat().st_size + 2**20:
            raise refuse(path, f"its tensors would take {self.bytes:,} bytes, from a file of {path.stat().st_size:,}")

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self.tensors = {}


def load(path: Path) -> Any:
    """What is in the file, as far as `weights_only=True` admits it."""
    archive = zipfile.is_zipfile(path)
    if archive:
        check_archive(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's version: if it matters, the next line fails
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except MemoryError:
        raise refuse(path, "reading it would take more memory than there is") from None
    except Exception as error:  # whatever a damaged or hostile pickle sets off: it is refused, whichever way it failed
        if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise refuse(
                path,
                f"besides weights it asks for {wanted[1]}, which could be any program: it is not read. If you trust where "
                "it comes from, open it in a place of its own and save the tensors alone: "
                "torch.save({'model': state_dict}, …), or safetensors.torch.save_file(state_dict, …)",
            ) from None
        lines = [line for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
        why = (lines or [""])[0].removeprefix("Weights only load failed.").strip()[:200]
        raise refuse(path, f"not a PyTorch file, or a damaged one ({type(error).__name__}: {why})") from None


def check_archive(path: Path) -> None:
    """The zip archive is one that PyTorch wrote: a pickle and plain bytes, nothing compressed, no program."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError) as error:
        raise refuse(path, f"not a readable zip archive, or a truncated one ({error})") from None
    names = [info.filename for info in infos]
    if any("/code/" in name for name in names) or any(name.endswith("constants.pkl") for name in names):
        raise refuse(
            path,
            "a TorchScript archive, which is a program (OpenAI publishes CLIP so) and is not run. If you trust where it "
            "comes from, save its tensors: torch.save(torch.jit.load(path, 'cpu').state_dict(), …)",
        )
    if not any(name.endswith("data.pkl") for name in names):
        raise refuse(path, "a zip archive, but neither PyTorch's nor NumPy's")
    size = path.stat().st_size
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos) or sum(i.file_size for i in infos) > size:
        raise refuse(path, "an archive that PyTorch did not write: its members are compressed or overlap")


def models(data: Any, seen: set[int], name: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every mapping from names to tensors, each once, with the way to it: `teacher`, or nothing for the file itself."""
    if not isinstance(data, Mapping) or depth > 3 or len(data) > MOST_TENSORS or id(data) in seen or len(seen) > 1_000:
        return
    seen.add(id(data))
    tensors = {key: value for key, value in data.items() if isinstance(key, str) and usable(value)}
    if tensors:
        yield name, tensors
    for key, value in data.items():
        if isinstance(key, str) and isinstance(value, Mapping) and key not in NOT_WEIGHTS:
            yield from models(value, seen, f"{name}.{key}" if name else key, depth + 1)


def usable(value: Any) -> bool:
    """A plain tensor whose values are all there."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """All or nothing."""
    with atomic(path) as file:
        try:
            torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
        except RuntimeError as error:  # what PyTorch makes of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
