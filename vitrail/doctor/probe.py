"""Facts that only PyTorch knows, as a program: one JSON object per line, so that a crash loses only what comes after it.

`python -m vitrail.doctor.probe`. The doctor runs it as a process of its own: an import may fail, crash or hang.
"""

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

IMPORT_SECONDS = 120.0  # time limit of the whole probe; a first import from a network disk takes long


def run_probe(seconds: float = IMPORT_SECONDS, command: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return what the program says; `error` has one line if PyTorch cannot be imported."""
    command = command or (sys.executable, "-m", "vitrail.doctor.probe")
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
        output, errors, ending = done.stdout, done.stderr, describe_exit(done.returncode)
    except subprocess.TimeoutExpired as expired:
        output, errors = expired.stdout or b"", expired.stderr or b""
        ending = f"did not end within {seconds:.0f} s"
    facts: dict[str, Any] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            facts |= json.loads(line)
        except (ValueError, TypeError):  # what a library prints
            continue
    if ending and "version" not in facts and "error" not in facts:
        last = (errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        facts["error"] = f"import torch {ending}" + (f": {last}" if last else "")
    elif ending and "error" not in facts:
        facts["crash"] = f"after its import, PyTorch {ending}"
    return facts


def describe_exit(code: int) -> str:
    """Return how a process ended, "" for a normal end."""
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    import signal

    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def first_line(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> int:
    """Print the facts."""
    print(json.dumps({"import_errors": import_essentials()}), flush=True)
    try:
        import torch
    except BaseException as error:  # what an import raises is what is reported
        print(json.dumps({"error": first_line(error)}), flush=True)
        return 0
    parts: list[Callable[[], dict[str, Any]]] = [describe_build, describe_cpu, describe_cuda, describe_mps, choose]
    for part in (*parts, import_torchvision):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                facts = part()
            except Exception as error:  # one part that fails does not hide the others
                facts = {f"{part.__name__}_error": first_line(error)}
        if part is describe_cuda and caught:
            facts["cuda_warning"] = first_line(caught[-1].message)  # type: ignore[arg-type]
        print(json.dumps(facts), flush=True)
    del torch
    return 0


def import_essentials() -> dict[str, str]:
    """Return the packages that every command imports besides PyTorch and that do not import, with the reason."""
    failures = {}
    for name in ("numpy", "PIL"):
        try:
            importlib.import_module(name)
        except BaseException as error:  # what an import raises is what is reported
            failures[name] = first_line(error)
    return failures


def describe_build() -> dict[str, Any]:
    """Return the version of PyTorch and what it was built for."""
    import torch

    version = getattr(torch, "version", None)
    cuda, hip = (getattr(version, name, None) for name in ("cuda", "hip"))
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    if build == "CPU" and sys.platform == "darwin" and torch.backends.mps.is_built():
        build = "CPU and Metal"
    return {"version": str(torch.__version__), "build": build, "location": torch.__path__[0]}


def describe_cpu() -> dict[str, Any]:
    """Return the threads and the instructions that PyTorch uses."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "mkl": torch.backends.mkl.is_available(),
        "openmp": torch.backends.openmp.is_available(),
    }


def describe_cuda() -> dict[str, Any]:
    """Return the GPUs that PyTorch can use (CUDA or ROCm), with their memory and the versions of its libraries."""
    import torch
    from torch.cuda import nccl

    if not torch.cuda.is_available():
        return {"gpus": []}
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gpus.append({"name": facts.name, "memory": facts.total_memory, "capability": f"{facts.major}.{facts.minor}"})
    facts = {"gpus": gpus, "architectures": torch.cuda.get_arch_list()}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    version = ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else None
    return facts | {"cudnn": cudnn, "nccl": version}


def describe_mps() -> dict[str, Any]:
    """Return whether PyTorch can use Apple's Metal."""
    import torch

    return {"mps": torch.backends.mps.is_available()}


def choose() -> dict[str, Any]:
    """Return the device of --device auto, and the precision of --precision auto as far as it is known without measuring."""
    from vitrail.utils.devices import device_name, pick_device
    from vitrail.utils.precision import choose_cuda, multiplies_bf16

    device = pick_device("auto")
    name = device_name(device)
    if device.type == "cuda":
        choice = choose_cuda(device, name)
        return {"device": str(device), "precision": choice.precision, "precision_reason": choice.why}
    if device.type == "cpu" and multiplies_bf16(device):
        reason = f"bf16 is native on {name}: every longer run measures whether it is faster than fp32"
        return {"device": "cpu", "precision": "fp32 or bf16", "precision_reason": reason}
    reason = "not measured on Metal" if device.type == "mps" else f"{name} does not multiply bf16 natively"
    return {"device": str(device), "precision": "fp32", "precision_reason": reason}


def import_torchvision() -> dict[str, Any]:
    """Return why torchvision cannot be imported, if it is installed and cannot. vitrail does not need it."""
    from importlib.util import find_spec

    if find_spec("torchvision") is None:
        return {}
    try:
        import torchvision  # noqa: F401  # pyright: ignore
    except BaseException as error:
        return {"torchvision_error": first_line(error)}
    return {"torchvision_error": None}


if __name__ == "__main__":
    raise SystemExit(main())
