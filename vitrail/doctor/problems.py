"""Problems in the facts of a diagnosis, each with one remedy: pure functions of the facts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vitrail.doctor.diagnosis import Diagnosis, Folder, Problem
from vitrail.doctor.packages import REQUIRED
from vitrail.utils.text import format_bytes

SEVERITIES = ("error", "warning", "note")  # the worst first
BATCH_BYTES = 256 * 3 * 224 * 224  # of a batch that a worker prepares, as recipes have them at 224×224
PREPARED_BATCHES = 2  # that a worker keeps ready
MIN_CACHE_BYTES, FULL_BYTES = 2 * 2**30, 100 * 2**20
MIN_OPEN_FILES = 1024
BUSY = 1.25  # of the cores: load above which measurements are too slow
MIN_MEMORY_BYTES = 2 * 2**30
REINSTALL = "pip install --force-reinstall torch"
SELECTOR = "pytorch.org/get-started/locally"


def list_problems(facts: Diagnosis, environment: Mapping[str, str]) -> list[Problem]:
    """Return the problems, the worst first. `environment` has the values of the variables, which the facts may hide."""
    finders = (
        find_python_problems(facts),
        find_torch_problems(facts),
        find_gpu_problems(facts, environment),
        find_package_problems(facts),
        find_thread_problems(facts, environment),
        find_memory_problems(facts),
        find_storage_problems(facts["storage"]),
        find_limit_problems(facts),
    )
    found = [problem for problems in finders for problem in problems]
    return sorted(found, key=lambda problem: SEVERITIES.index(problem["severity"]))


def error(name: str, text: str, remedy: str) -> Problem:
    """Return a problem that stops vitrail."""
    return Problem(name=name, severity="error", text=text, remedy=remedy)


def warning(name: str, text: str, remedy: str) -> Problem:
    """Return a problem that makes vitrail slow, or may stop it."""
    return Problem(name=name, severity="warning", text=text, remedy=remedy)


def note(name: str, text: str, remedy: str) -> Problem:
    """Return what looks like a problem and is none, or is one for few."""
    return Problem(name=name, severity="note", text=text, remedy=remedy)


def find_python_problems(facts: Diagnosis) -> Iterator[Problem]:
    """Yield an unsupported version of Python."""
    python = facts["software"]["python"]
    if python["status"] != "ok":
        text = f"Python {python['version']} is not supported, vitrail needs {python['supported']}"
        yield error("python-version", text, "make a virtual environment with a newer Python")


def find_torch_problems(facts: Diagnosis) -> Iterator[Problem]:
    """Yield why PyTorch or torchvision does not import."""
    torch = facts["software"]["torch"]
    installed = find_package(facts, "torch")
    if "error" in torch and installed is not None and installed["version"] is None and "No module" in torch["error"]:
        yield error("torch-missing", "PyTorch is not installed", "pip install torch")
    elif "error" in torch:
        version = f" {installed['version']}" if installed and installed["version"] else ""
        yield error("torch-import", f"PyTorch{version} does not import: {torch['error']}", REINSTALL)
    if "crash" in torch:
        yield error("torch-crash", torch["crash"], REINSTALL)
    for part in ("build", "cpu", "cuda", "mps"):
        if message := torch.get(f"describe_{part}_error"):
            yield error(f"torch-{part}", f"PyTorch imports, but its {part} facts fail: {message}", REINSTALL)
    if message := torch.get("choose_error"):
        yield error("torch-device", f"no device can be chosen: {message}", "try --device cpu")
    if message := torch.get("torchvision_error"):
        remedy = "nothing to do: vitrail does not need it; for timm or transformers: pip uninstall torchvision"
        yield note("torchvision-import", f"torchvision does not import: {message}", remedy)


def find_package(facts: Diagnosis, name: str) -> Any:
    """Return the facts of a package; None if vitrail does not know it."""
    groups = facts["software"]["packages"]
    return next((package for group in groups for package in group["packages"] if package["name"] == name), None)


def find_gpu_problems(facts: Diagnosis, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield why PyTorch does not use a GPU that the machine has."""
    torch, gpus = facts["software"]["torch"], facts["machine"]["gpus"]
    for gpu in torch.get("gpus", ()):
        built, wanted = torch.get("architectures", ()), "sm_" + gpu["capability"].replace(".", "")
        if wanted.startswith("sm_") and built and not runs_on(wanted, built):
            text = f"PyTorch was not built for {gpu['name']} ({wanted}): it has {', '.join(built)}"
            yield error("gpu-architecture", text, f"install another build of PyTorch: {SELECTOR}")
    if not gpus or torch.get("gpus") or "error" in torch or "version" not in torch:
        return
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
    vendors = {gpu["vendor"] for gpu in gpus}
    hidden = next((name for name in HIDING if environment.get(name, "x").strip() in ("", "-1", "none", "void")), None)
    if all(gpu["driver"] is None for gpu in gpus):
        yield warning("gpu-driver", f"{names}: no driver is loaded", "install the vendor's driver, then start again")
    elif torch["build"].startswith("CPU"):
        build = "a CUDA build" if "NVIDIA" in vendors else "a ROCm build"
        text = f"PyTorch {torch['version']} is a CPU build, and this machine has {names}"
        yield warning("torch-cpu-build", text, f"install {build} of PyTorch: {SELECTOR}")
    elif hidden:
        yield warning("gpu-hidden", f"{hidden} hides {names} from PyTorch", f"unset {hidden}")
    else:
        why = torch.get("cuda_warning") or torch.get("describe_cuda_error") or "it does not say why"
        driver = f" (driver for CUDA {facts['machine']['cuda']})" if facts["machine"]["cuda"] else ""
        text = f"PyTorch for {torch['build']} does not use {names}{driver}: {why}"
        yield warning("gpu-unused", text, f"update the driver, or install a build that fits it: {SELECTOR}")


HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def runs_on(wanted: str, built: Iterable[str]) -> bool:
    """Return whether a build has code for a GPU: of its own major version, or intermediate code of an older one."""
    if not wanted.removeprefix("sm_").isdecimal() or any(not name.startswith(("sm_", "compute_")) for name in built):
        return True  # ROCm names its processors otherwise
    number = int(wanted.removeprefix("sm_"))
    for name in built:
        kind, _, text = name.partition("_")
        have = int("".join(filter(str.isdecimal, text)) or 0)
        if have <= number and (kind == "compute" or have // 10 == number // 10):
            return True
    return False


def find_package_problems(facts: Diagnosis) -> Iterator[Problem]:
    """Yield required packages that are missing or do not import, and installed ones whose version is not supported."""
    for name, message in facts["software"]["torch"].get("import_errors", {}).items():
        if not message.startswith("ModuleNotFoundError: No module named"):
            package = {"PIL": "pillow"}.get(name, name)
            yield error(
                "package-import", f"{name} does not import: {message}", f"pip install --force-reinstall {package}"
            )
    for group in facts["software"]["packages"]:
        lacking = [package["name"] for package in group["packages"] if package["status"] == "missing"]
        lacking = [name for name in lacking if name != "torch"]
        if group["name"] == REQUIRED and lacking:
            text = f"not installed: {', '.join(lacking)}, which vitrail requires"
            yield error("package-missing", text, group["install"] or "pip install vitrail")
        some = [package for package in group["packages"] if package["status"] != "missing"]
        if group["name"] != REQUIRED and lacking and some:
            text = f"{group['name']} ({group['enables']}) is incomplete: {', '.join(lacking)} missing"
            yield note("extra-incomplete", text, group["install"] or "")
        for package in some:
            if package["status"] == "unsupported":
                text = f"{package['name']} {package['version']} is not supported: {package['supported']} is"
                remedy = f"pip install '{package['name']}{package['supported']}'"
                kind = error if group["name"] == REQUIRED else warning
                yield kind("package-version", text, remedy)


def find_thread_problems(facts: Diagnosis, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a processor that is busy already, more threads than cores, and far fewer."""
    usable = facts["machine"]["processor"]["usable_cores"]
    threads, load = facts["software"]["torch"].get("threads"), facts["machine"]["load"]
    if load is not None and load > BUSY * (facts["machine"]["processor"]["cores"] or 1):
        text = f"other programs use the processor: load {load:.1f} on {facts['machine']['processor']['cores']} cores"
        yield warning("busy", f"{text}, so runs and measured speeds are slow", "end them, or wait (see top)")
    given = environment.get("OMP_NUM_THREADS")
    if given is not None and not given.partition(",")[0].strip().isdecimal():
        text = f"OMP_NUM_THREADS must be a number of threads, got {given!r}"
        yield warning("threads-invalid", text, f"export OMP_NUM_THREADS={usable}")
    if not threads:
        return
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    processes = max(1, int(local)) if local.isdecimal() else 1
    cores = f"{usable} usable core{'' if usable == 1 else 's'}"
    fitting = max(1, usable // processes)
    if threads * processes > usable and threads > 1:
        each = f"{processes} processes of {threads} threads" if processes > 1 else f"{threads} threads of PyTorch"
        yield warning("threads-many", f"{each} share {cores}", f"export OMP_NUM_THREADS={fitting}")
    elif given is not None and threads == 1 and usable > 3 and processes == 1:
        text = f"OMP_NUM_THREADS={given}: PyTorch uses 1 thread of {cores}"
        yield note("threads-few", text, f"export OMP_NUM_THREADS={usable}, except beside other processes")


def find_memory_problems(facts: Diagnosis) -> Iterator[Problem]:
    """Yield too little memory, and a /dev/shm too small for the batches of worker processes."""
    memory, shared = facts["machine"]["memory"], facts["shared_memory"]
    available = memory["available"]
    if available is not None and available < MIN_MEMORY_BYTES:
        limit = f" of the container's {format_bytes(memory['limit'])}" if memory["limit"] else ""
        remedy = "use a smaller --batch-size and fewer --workers, or end other programs"
        yield warning("memory-low", f"{format_bytes(available)} of memory{limit} are available", remedy)
    if shared is None or shared["free"] is None:
        return
    workers = default_worker_count(facts)
    needed = (PREPARED_BATCHES * workers + 1) * BATCH_BYTES
    if shared["free"] < needed:
        counts = f"{workers} worker{'' if workers == 1 else 's'} with batches of 256 images need {format_bytes(needed)}"
        text = f"/dev/shm has {format_bytes(shared['free'])} free, and {counts}"
        container = facts["machine"]["system"]["container"] in ("docker", "podman")
        remedy = "start the container with --shm-size 2g" if container else "mount a larger /dev/shm"
        yield warning("shared-memory", text, f"{remedy}, or use --workers 0")


def default_worker_count(facts: Diagnosis) -> int:
    """Return the workers of a run: `utils.devices.default_workers` for the cores of these facts."""
    cores = facts["machine"]["processor"]["usable_cores"]
    on_gpu = (facts["device"]["name"] or "").startswith("cuda")
    return max(1, min(8, cores if on_gpu else cores // 2))


def find_storage_problems(folders: Iterable[Folder]) -> Iterator[Problem]:
    """Yield folders that cannot be written or have no space."""
    reported: set[str] = set()
    for folder in folders:
        if folder["name"].startswith("weights"):  # is only read
            continue
        remedy = REMEDIES.get(folder["name"], "free space there")
        where = f"{folder['name']} ({folder['path']})"
        if not folder["writable"]:
            yield warning("folder-read-only", f"{where} cannot be written", remedy)
        elif folder["free"] is not None and folder["free"] < MIN_CACHE_BYTES and folder["path"] not in reported:
            kind = error if folder["free"] < FULL_BYTES and folder["name"] != "Hugging Face Hub" else warning
            yield kind("disk-full", f"{where}: {format_bytes(folder['free'])} are free on its disk", remedy)
            reported.add(folder["path"])


REMEDIES = {
    "vitrail's cache": "free space, or export XDG_CACHE_HOME=/another/disk",
    "downloaded datasets (VITRAIL_DATA)": "free space, or export VITRAIL_DATA=/another/disk",
    "Hugging Face Hub": "free space, or export HF_HOME=/another/disk",
    "working directory": "runs are written here: free space, or give --out on another disk",
    "temporary files": "free space, or export TMPDIR=/another/disk",
}


def find_limit_problems(facts: Diagnosis) -> Iterator[Problem]:
    """Yield limits of this process that worker processes run into."""
    limits = facts["machine"]["limits"]
    soft, hard = limits["open_files"], limits["open_files_hard"]
    if soft is not None and soft < MIN_OPEN_FILES:
        higher = max(MIN_OPEN_FILES, min(hard or 65536, 65536))
        text = f"{soft} open files are allowed, and workers share batches as files"
        yield warning("open-files", text, f"ulimit -n {higher}")
    if limits["address_space"] is not None:
        text = f"the address space is limited to {format_bytes(limits['address_space'])}"
        yield warning("address-space", text, "ulimit -v unlimited")
