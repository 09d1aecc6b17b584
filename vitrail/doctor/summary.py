"""A diagnosis in words: rows that the terminal and the page show alike."""

from typing import Any

from vitrail.doctor.diagnosis import Diagnosis, Folder, Package, PackageGroup
from vitrail.doctor.packages import REQUIRED
from vitrail.utils.text import format_bytes, format_duration

Rows = list[tuple[str, str]]  # label, value


def count_words(count: int, noun: str) -> str:
    """Return "1 error" or "2 errors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_headline(facts: Diagnosis) -> str:
    """Return "1 warning and 1 note; 7 of 7 tests passed in 58 s"."""
    counts = {name: sum(p["severity"] == name for p in facts["problems"]) for name in ("error", "warning", "note")}
    parts = [count_words(count, name) for name, count in counts.items() if count]
    found = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "no problems found"
    tests = [test for test in facts["tests"] if test["status"] not in ("skipped", "stopped")]
    if not tests:
        return f"{found}; no self-test" if not facts["tests"] else f"{found}; the self-test was not run"
    passed = sum(test["status"] == "ok" for test in tests)
    seconds = format_duration(sum(test["seconds"] for test in tests)).replace("\u00a0", " ")
    return f"{found}; {passed} of {count_words(len(tests), 'test')} passed in {seconds}"


def describe_device(facts: Diagnosis) -> Rows:
    """Return the device and the precision that a run would use, with the reasons."""
    device, torch = facts["device"], facts["software"]["torch"]
    if device["name"] is None:
        return [("--device auto", "unknown: PyTorch does not import")]
    gpus = torch.get("gpus") or []
    name = gpus[0]["name"] if gpus else facts["machine"]["processor"]["model"]
    why = "Metal" if device["name"] == "mps" else name if gpus else f"{name}; PyTorch finds no GPU"
    rows = [("--device auto", f"{device['name']}: {why}")]
    measured = find_values(facts, "vit")
    if "prediction_precision" not in measured:
        return [*rows, ("--precision auto", f"{device['precision']}: {device['reason']}")]
    for purpose in ("prediction", "training"):
        choice = measured[f"{purpose}_precision"]
        rows.append((f"--precision auto, {purpose}", f"{choice['precision']}: {choice['reason']} (ViT-S/16)"))
    return rows


def find_values(facts: Diagnosis, name: str) -> dict[str, Any]:
    """Return the values of a test that passed, {} for others."""
    return next((test["values"] for test in facts["tests"] if test["name"] == name and test["status"] == "ok"), {})


def describe_software(facts: Diagnosis) -> Rows:
    """Return the versions of vitrail, Python and PyTorch, and of what vitrail requires."""
    software = facts["software"]
    torch, python = software["torch"], software["python"]
    rows = [("vitrail", software["vitrail"]), ("Python", f"{python['version']} ({python['implementation']})")]
    rows.append(("PyTorch", describe_torch(torch)))
    if "version" in torch:
        rows.append(("", torch["location"]))
    required = next((group["packages"] for group in software["packages"] if group["name"] == REQUIRED), [])
    return rows + [(package["name"], format_version(package)) for package in required if package["name"] != "torch"]


def describe_torch(torch: dict[str, Any]) -> str:
    """Return the build of PyTorch with its libraries and threads, or why it does not import."""
    if "version" not in torch:
        return f"does not import: {torch.get('error', 'no answer')}"
    libraries = [name for name, key in (("oneDNN", "onednn"), ("MKL", "mkl"), ("OpenMP", "openmp")) if torch.get(key)]
    if torch.get("cudnn"):
        libraries.append(f"cuDNN {torch['cudnn']}")
    if torch.get("nccl"):
        libraries.append(f"NCCL {torch['nccl']}")
    parts = [f"{torch['version']}, built for {torch['build']}"]
    if "threads" in torch:
        parts += [count_words(torch["threads"], "thread"), torch["cpu_capability"]]
    return ", ".join([*parts, *libraries])


def format_version(package: Package) -> str:
    """Return the version of a package, with what is wrong with it."""
    if package["status"] == "missing":
        return "missing"
    version = str(package["version"])
    return version if package["status"] == "ok" else f"{version}, not supported ({package['supported']} is)"


def describe_extra(group: PackageGroup) -> tuple[str, str, str]:
    """Return the name of an extra, what it enables, and its versions or the command that installs it."""
    missing = [package for package in group["packages"] if package["status"] != "ok"]
    versions = ", ".join(f"{p['name']} {format_version(p)}" for p in group["packages"] if p["status"] != "missing")
    shown = versions if not missing else "; ".join(filter(None, (versions, str(group["install"]))))
    return group["name"], group["enables"], shown


def describe_machine(facts: Diagnosis) -> Rows:
    """Return the operating system, processor, memory and GPUs."""
    machine = facts["machine"]
    system, processor, memory = machine["system"], machine["processor"], machine["memory"]
    libc = f", {system['libc']}" if system["libc"] else ""
    container = f", in {system['container']}" if system["container"] else ""
    rows = [("system", f"{system['name']}, kernel {system['kernel']}, {system['machine']}{libc}{container}")]
    load = "" if machine["load"] is None else f"; load {machine['load']:.1f}"
    rows += [("processor", processor["model"]), ("cores", describe_cores(processor) + load)]
    if processor["simd"]:
        rows.append(("instructions", " ".join(processor["simd"])))
    limit = f"; the container's limit is {format_bytes(memory['limit'])}" if memory["limit"] is not None else ""
    rows.append(("memory", f"{format_bytes(memory['total'])}, {format_bytes(memory['available'])} available{limit}"))
    shared = facts["shared_memory"]
    if shared is not None:
        rows.append(("/dev/shm", f"{format_bytes(shared['total'])}, {format_bytes(shared['free'])} free"))
    files = machine["limits"]["open_files"]
    rows.append(("open files", "no limit" if files is None else f"at most {files:,}"))
    return rows + (describe_gpus(facts) or [("GPU", "none found")])


def describe_cores(processor: dict[str, Any]) -> str:
    """Return the cores of the machine, and those that this process may use."""
    parts = [count_words(processor["cores"], "core")]
    if processor["physical_cores"] and processor["physical_cores"] != processor["cores"]:
        parts[0] += f" ({processor['physical_cores']} physical)"
    if processor["affinity"] != processor["cores"]:
        parts.append(f"this process may run on {processor['affinity']}")
    if processor["quota"] is not None:
        parts.append(f"the container may use {processor['quota']:.4g}")
    return ", ".join([*parts, f"{processor['usable_cores']} usable"])


def describe_gpus(facts: Diagnosis) -> Rows:
    """Return the GPUs of the system, and below them what PyTorch sees if that differs."""
    machine, torch = facts["machine"], facts["software"]["torch"]
    rows = []
    for index, gpu in enumerate(machine["gpus"]):
        memory = f", {format_bytes(gpu['memory'])}" if gpu["memory"] else ""
        free = f", {format_bytes(gpu['free'])} free" if gpu["free"] else ""
        driver = f", driver {gpu['driver']}" if gpu["driver"] else ", no driver"
        cuda = f", CUDA up to {machine['cuda']}" if machine["cuda"] and gpu["vendor"] == "NVIDIA" else ""
        rows.append((f"GPU {index}", f"{gpu['name']}{memory}{free}{driver}{cuda}"))
    for index, gpu in enumerate(torch.get("gpus") or []):
        seen = f"{gpu['name']}, {format_bytes(gpu['memory'])}, compute capability {gpu['capability']}"
        rows.append((f"cuda:{index}", seen))
    return [*rows, ("mps", "Apple's Metal")] if torch.get("mps") else rows


def describe_storage(folder: Folder) -> tuple[str, str, str, str]:
    """Return the name, path, size and free space of a folder."""
    size = format_bytes(folder["bytes"]) if folder["files"] else "–"
    if folder["files"] and not folder["complete"]:
        size = f"> {size}"
    free = format_bytes(folder["free"]) + ("" if folder["writable"] else ", not writable")
    return folder["name"], folder["path"], size, free
