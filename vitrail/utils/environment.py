"""Facts about this machine, without PyTorch: processor, cores, memory, limits of a container, GPUs, disks, variables.

Functions that read the system's files take `root`, the directory in which /proc, /sys and /dev are looked for. A fact that the
system does not tell is None.
"""

import csv
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitrail.utils.devices import count_cores, processor_name
from vitrail.utils.slurm import adopt_step

ROOT = Path("/")
NO_LIMIT = 2**60  # bytes: what version 1 of cgroups says where there is none
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}  # of GPUs that PyTorch uses, by PCI number
# Instructions that PyTorch and oneDNN multiply matrices with, as /proc/cpuinfo spells them.
SIMD_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
)
SIMD_FLAGS += ("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16", "sme")
TOOL_SECONDS = 15.0  # time limit of nvidia-smi, which can hang with a broken driver


def describe_system(root: Path = ROOT) -> dict[str, Any]:
    """Return the operating system, the C library, and the container if this is one."""
    release, name = platform.release(), platform.system()
    with suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    if name == "Darwin":
        name = f"macOS {platform.mac_ver()[0]}"
    libc = " ".join(platform.libc_ver()).strip()
    container = None
    if (root / ".dockerenv").exists():
        container = "docker"
    elif (root / "run/.containerenv").exists():
        container = "podman"
    elif "microsoft" in release.lower():
        container = "WSL"
    return {
        "name": name,
        "kernel": release,
        "machine": platform.machine(),
        "libc": libc or None,
        "container": container,
    }


def describe_processor(root: Path = ROOT) -> dict[str, Any]:
    """Return the model, the SIMD instructions and the cores: all, those of this process, and the container's share."""
    text = read_text(root / "proc/cpuinfo")
    flags: set[str] = set()
    places: set[tuple[str, str]] = set()
    package = ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("flags", "Features"):
            flags |= set(value.split())
        elif key == "physical id":
            package = value
        elif key == "core id":
            places.add((package, value))
    quota = read_cpu_quota(root)
    affinity = count_cores()
    return {
        "model": processor_name(),
        "cores": os.cpu_count(),
        "physical_cores": len(places) or None,
        "affinity": affinity,
        "quota": quota,
        "usable_cores": affinity if quota is None else max(1, min(affinity, math.ceil(quota))),
        "simd": [flag for flag in SIMD_FLAGS if flag in flags],
    }


def read_load() -> float | None:
    """Return the mean number of running processes in the last minute, of the whole machine."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # Windows has none
        return None


def describe_memory(root: Path = ROOT) -> dict[str, Any]:
    """Return the bytes of memory: all, available, and the limit of the container."""
    amounts: dict[str, int] = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if value.split() and value.split()[0].isdecimal():
            amounts[key] = 1024 * int(value.split()[0])
    if "MemTotal" not in amounts:
        with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
            amounts["MemTotal"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = read_memory_limit(root)
    available = amounts.get("MemAvailable")
    if limit is not None:
        room = max(0, limit - (used or 0))
        available = room if available is None else min(available, room)
    return {
        "total": amounts.get("MemTotal"),
        "available": available,
        "limit": limit,
        "swap": amounts.get("SwapTotal"),
    }


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control groups for a controller, the innermost first.

    A container may see its own group as the root, so the folders above belong to it.
    """
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = base
        elif controller in names.split(","):
            top = base / controller
        else:
            continue
        inner = top / path.lstrip("/")
        folders = [inner, *inner.parents]
        found = [folder for folder in folders if folder == top or top in folder.parents]
        if any((folder / name).exists() for folder in found for name in CGROUP_FILES[controller]):
            return found
    return [base, base / controller]


CGROUP_FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "cpu": ("cpu.max", "cpu.cfs_quota_us")}


def read_memory_limit(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the smallest memory limit of the control groups of this process, and the bytes used there."""
    found: tuple[int | None, int | None] = (None, None)
    for folder in cgroup_folders(root, "memory"):
        names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        for limit_name, used_name in names:
            limit, used = (read_text(folder / name).strip() for name in (limit_name, used_name))
            if limit.isdecimal() and int(limit) < NO_LIMIT and (found[0] is None or int(limit) < found[0]):
                found = int(limit), int(used) if used.isdecimal() else None
    return found


def read_cpu_quota(root: Path = ROOT) -> float | None:
    """Return the number of cores that the control groups of this process may use, which may be a fraction."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        parts = read_text(folder / "cpu.max").split()
        if not parts:
            parts = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(parts) == 2 and all(part.isdecimal() for part in parts) and int(parts[1]):
            quotas.append(int(parts[0]) / int(parts[1]))
    return min(quotas, default=None)


def list_gpus(root: Path = ROOT) -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that the system has, with or without a driver, and the CUDA version of NVIDIA's driver.

    PyTorch is not asked: this is what it should find. `driver` is None for a card whose driver is not loaded.
    """
    gpus, cuda = query_nvidia_smi()
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = VENDORS.get(read_text(device / "vendor").strip())
        is_gpu = read_text(device / "class").strip().startswith(("0x03", "0x12"))
        if vendor is None or not is_gpu or (vendor == "NVIDIA" and gpus and gpus[0]["vendor"] == "NVIDIA"):
            continue
        memory = read_text(device / "mem_info_vram_total").strip()
        driver = read_text(root / "sys/module" / ("amdgpu" if vendor == "AMD" else "nvidia") / "version").strip()
        loaded = (device / "driver").exists()
        fact = {"vendor": vendor, "name": f"{vendor} GPU", "memory": int(memory) if memory.isdecimal() else None}
        gpus.append(fact | {"free": None, "driver": (driver or "loaded") if loaded else None})
    return gpus, cuda


def query_nvidia_smi() -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that nvidia-smi lists, and the newest CUDA version that its driver supports."""
    fields = "name,memory.total,memory.free,driver_version"
    table = run_tool("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = []
    for row in csv.reader(table.splitlines(), skipinitialspace=True):
        if len(row) == 4:
            total, free = (int(cell) * 2**20 if cell.isdecimal() else None for cell in row[1:3])
            gpus.append({"vendor": "NVIDIA", "name": row[0], "memory": total, "free": free, "driver": row[3]})
    _, found, rest = run_tool("nvidia-smi").partition("CUDA Version:") if gpus else ("", "", "")
    return gpus, rest.split()[0] if found and rest.split() else None


def run_tool(*command: str) -> str:
    """Return the output of a program; "" if it is missing, fails or does not end in time."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def describe_limits() -> dict[str, int | None]:
    """Return the limits of this process: open files (soft and hard), processes, address space. None is without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return {"open_files": None, "open_files_hard": None, "processes": None, "address_space": None}

    def read(name: str, index: int = 0) -> int | None:
        if not hasattr(resource, name):
            return None
        value = resource.getrlimit(getattr(resource, name))[index]
        return None if value == resource.RLIM_INFINITY else value

    return {
        "open_files": read("RLIMIT_NOFILE"),
        "open_files_hard": read("RLIMIT_NOFILE", 1),
        "processes": read("RLIMIT_NPROC"),
        "address_space": read("RLIMIT_AS"),
    }


def measure_disk(path: Path) -> dict[str, int | None]:
    """Return the total and free bytes of the file system that a path is on, or would be."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    try:
        usage = shutil.disk_usage(there or path)
    except OSError:
        return {"total": None, "free": None}
    return {"total": usage.total, "free": usage.free}


def is_writable(path: Path) -> bool:
    """Return whether a folder can be written, or made in the nearest one that exists."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def measure_folder(path: Path, seconds: float = 2.0) -> dict[str, Any]:
    """Return the bytes and files below a folder, without following links; `complete` is False if the time ran out."""
    total = files = 0
    complete, waiting, deadline = True, [path], time.monotonic() + seconds
    while waiting:
        if time.monotonic() > deadline:
            complete = False
            break
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
                        files += 1
    return {"bytes": total, "files": files, "complete": complete}


def find_group(environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the variables of the process group that torchrun or srun started this process in; None for a single process."""
    adopted = dict(environment)
    adopt_step(adopted)
    world = adopted.get("WORLD_SIZE", "1")
    if not world.isdecimal() or int(world) < 2:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: adopted[name] for name in names if name in adopted}


def read_text(path: Path) -> str:
    """Return the text of a system file; "" if it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
