"""Facts about a machine, read from the system's files of made-up machines."""

import subprocess
from pathlib import Path

from vitrail.utils import environment
from vitrail.utils.environment import (
    describe_memory,
    describe_processor,
    describe_system,
    find_group,
    list_gpus,
    measure_disk,
    measure_folder,
    read_cpu_quota,
    read_memory_limit,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups_are_the_smallest_on_the_way_to_the_root(tmp_path):
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/memory.max": "4000\n",
        "sys/fs/cgroup/slice/memory.current": "1000\n",
        "sys/fs/cgroup/slice/job/memory.max": "max\n",
        "sys/fs/cgroup/slice/job/memory.current": "10\n",
        "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
    }
    root = write(tmp_path, files)
    assert read_memory_limit(root) == (4000, 1000)
    assert read_cpu_quota(root) == 1.5


def test_limits_inside_a_container_are_at_the_root_of_its_view(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5000", "sys/fs/cgroup/memory.current": "2000"}
    root = write(tmp_path, files | {"sys/fs/cgroup/cpu.max": "50000 100000", ".dockerenv": ""})
    assert read_memory_limit(root) == (5000, 2000)
    assert describe_processor(root)["usable_cores"] == 1  # half a core
    assert describe_system(root)["container"] == "docker"
    write(root, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\nSwapTotal: 0 kB\n"})
    assert describe_memory(root) == {"total": 102400, "available": 3000, "limit": 5000, "swap": 0}


def test_limits_of_version_1_of_control_groups(tmp_path):
    memory, cpu = "sys/fs/cgroup/memory/docker/a", "sys/fs/cgroup/cpu/docker/a"
    files = {
        "proc/self/cgroup": "5:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n",
        f"{memory}/memory.limit_in_bytes": "7000",
        f"{memory}/memory.usage_in_bytes": "500",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # none
        f"{cpu}/cpu.cfs_quota_us": "200000",
        f"{cpu}/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    }
    root = write(tmp_path, files)
    assert read_memory_limit(root) == (7000, 500)
    assert read_cpu_quota(root) == 2.0


def test_a_machine_without_limits_has_none(tmp_path):
    assert read_memory_limit(tmp_path) == (None, None)
    assert read_cpu_quota(tmp_path) is None
    assert describe_system(tmp_path)["container"] is None


def test_cores_and_instructions_are_read_from_the_processor_table(tmp_path):
    core = "processor : {0}\nphysical id : {1}\ncore id : {2}\nflags : fpu avx2 avx512f amx_bf16\n\n"
    table = "".join(core.format(k, k // 4, k % 2) for k in range(8))
    facts = describe_processor(write(tmp_path, {"proc/cpuinfo": table}))
    assert facts["physical_cores"] == 4
    assert facts["simd"] == ["avx2", "avx512f", "amx_bf16"]
    assert 1 <= facts["usable_cores"] <= facts["cores"]


def test_graphics_cards_are_found_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "run_tool", lambda *_: "")
    devices = "sys/bus/pci/devices"
    files = {
        f"{devices}/0000:01:00.0/vendor": "0x10de\n",
        f"{devices}/0000:01:00.0/class": "0x030200\n",
        f"{devices}/0000:01:00.1/vendor": "0x10de\n",
        f"{devices}/0000:01:00.1/class": "0x040300\n",  # its sound
        f"{devices}/0000:02:00.0/vendor": "0x1002\n",
        f"{devices}/0000:02:00.0/class": "0x038000\n",
        f"{devices}/0000:02:00.0/mem_info_vram_total": "17163091968\n",
        f"{devices}/0000:02:00.0/driver/module": "",
        f"{devices}/0000:03:00.0/vendor": "0x8086\n",
        f"{devices}/0000:03:00.0/class": "0x030000\n",
    }
    gpus, cuda = list_gpus(write(tmp_path, files))
    assert cuda is None
    assert [(gpu["name"], gpu["memory"], gpu["driver"]) for gpu in gpus] == [
        ("NVIDIA GPU", None, None),
        ("AMD GPU", 17163091968, "loaded"),
    ]


def test_graphics_cards_of_nvidia_smi(tmp_path, monkeypatch):
    table = "NVIDIA A100-SXM4-40GB, 40960, 40000, 550.54\nNVIDIA A100-SXM4-40GB, [N/A], [N/A], 550.54\n"
    banner = "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: 12.4     |\n"
    monkeypatch.setattr(environment, "run_tool", lambda *command: table if len(command) > 1 else banner)
    devices = {"sys/bus/pci/devices/0/vendor": "0x10de", "sys/bus/pci/devices/0/class": "0x030200"}
    gpus, cuda = list_gpus(write(tmp_path, devices))
    assert cuda == "12.4"
    assert [gpu["memory"] for gpu in gpus] == [40960 * 2**20, None]
    assert {gpu["driver"] for gpu in gpus} == {"550.54"}


def test_a_tool_that_hangs_or_is_missing_says_nothing(monkeypatch):
    monkeypatch.setattr(environment, "TOOL_SECONDS", 0.1)
    assert environment.run_tool("sleep", "5") == ""
    assert environment.run_tool("no-such-program-here") == ""
    assert environment.run_tool("false") == ""
    assert environment.run_tool("echo", "words") == "words\n"


def test_a_process_group_is_that_of_torchrun_or_of_srun():
    assert find_group({}) is None
    assert find_group({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert find_group({"SLURM_NTASKS": "4"}) is None  # the script around srun
    torchrun = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert find_group(torchrun | {"OTHER": "x", "SLURM_STEP_NUM_TASKS": "8"}) == torchrun
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[5-6]"}
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    group = find_group(step | job)
    assert group is not None
    assert (group["RANK"], group["WORLD_SIZE"], group["MASTER_ADDR"]) == ("3", "4", "n5")


def test_folders_are_measured_without_links_and_within_a_time(tmp_path):
    write(tmp_path, {"a/b": "1234", "c": "12"})
    (tmp_path / "again").symlink_to(tmp_path)
    size = (tmp_path / "again").lstat().st_size
    assert measure_folder(tmp_path) == {"bytes": 6 + size, "files": 3, "complete": True}
    assert measure_folder(tmp_path, -1.0) == {"bytes": 0, "files": 0, "complete": False}
    assert measure_disk(tmp_path / "not" / "there") == measure_disk(tmp_path)


def test_an_unreadable_folder_is_not_writable(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert environment.is_writable(tmp_path / "new" / "folder")
    assert not environment.is_writable(file)


def test_naming_the_processor_does_not_import_torch():
    script = "import sys, vitrail.utils.environment as e; e.describe_processor(); print('torch' in sys.modules)"
    done = subprocess.run([__import__("sys").executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
