"""Problems and their remedies, from the facts of made-up machines."""

import re
from pathlib import Path

import pytest

from tests.doctor.made import GB, NVIDIA, SEEN, make_facts
from vitrail.doctor.problems import list_problems, runs_on


def problems(facts, **environment):
    return {problem["name"]: problem for problem in list_problems(facts, environment)}


def with_gpu(build="CUDA 12.6", **torch):
    facts = make_facts()
    facts["machine"]["gpus"] = [dict(NVIDIA)]
    facts["machine"]["cuda"] = "12.4"
    facts["software"]["torch"] |= {"build": build} | torch
    return facts


def test_a_healthy_machine_has_none():
    assert list_problems(make_facts(), {}) == []


def test_every_problem_is_one_line_with_one_remedy():
    facts = with_gpu("CPU", error="ImportError: x", threads=64)
    facts["shared_memory"] = {"total": 64 * 2**20, "free": 64 * 2**20}
    facts["machine"]["limits"]["open_files"] = 256
    found = list_problems(facts, {"OMP_NUM_THREADS": "many"})
    assert len(found) >= 4
    assert [problem["severity"] for problem in found] == sorted(
        (problem["severity"] for problem in found), key=("error", "warning", "note").index
    )
    assert all("\n" not in problem["text"] + problem["remedy"] and problem["remedy"] for problem in found)


def test_a_broken_pytorch_is_an_error():
    facts = make_facts()
    facts["software"]["torch"] = {"error": "ImportError: libtorch_cpu.so: cannot open shared object file"}
    problem = problems(facts)["torch-import"]
    assert problem["severity"] == "error"
    assert "PyTorch 2.13.0+cpu does not import: ImportError: libtorch_cpu.so" in problem["text"]
    assert "pip install" in problem["remedy"]


def test_a_missing_pytorch_is_said_to_be_missing():
    facts = make_facts()
    facts["software"]["torch"] = {"error": "ModuleNotFoundError: No module named 'torch'"}
    facts["software"]["packages"][0]["packages"][0] |= {"version": None, "status": "missing"}
    assert set(problems(facts)) == {"torch-missing"}


def test_a_crash_after_the_import_and_parts_that_fail_are_errors():
    facts = make_facts()
    facts["software"]["torch"] |= {"crash": "after its import, PyTorch crashed (SIGILL)", "describe_cuda_error": "x"}
    assert {"torch-crash", "torch-cuda"} <= set(problems(facts))


def test_a_cpu_build_beside_a_gpu():
    problem = problems(with_gpu("CPU", version="2.13.0+cpu"))["torch-cpu-build"]
    assert "CPU build, and this machine has NVIDIA A100" in problem["text"]
    assert "CUDA build" in problem["remedy"]


def test_a_gpu_that_pytorch_uses_is_no_problem():
    assert problems(with_gpu(gpus=[SEEN], architectures=["sm_80", "sm_90"])) == {}


def test_a_gpu_without_a_driver_is_not_blamed_on_pytorch():
    facts = with_gpu("CPU")
    facts["machine"]["gpus"][0]["driver"] = None
    assert set(problems(facts)) == {"gpu-driver"}


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_variable_that_hides_the_gpu(value):
    problem = problems(with_gpu(), CUDA_VISIBLE_DEVICES=value)["gpu-hidden"]
    assert problem["remedy"] == "unset CUDA_VISIBLE_DEVICES"


def test_a_driver_that_is_too_old_is_quoted():
    facts = with_gpu(cuda_warning="UserWarning: The NVIDIA driver on your system is too old")
    problem = problems(facts)["gpu-unused"]
    assert "driver for CUDA 12.4" in problem["text"]
    assert "too old" in problem["text"]


def test_a_build_without_code_for_the_gpu():
    found = problems(with_gpu(gpus=[SEEN | {"capability": "12.0"}], architectures=["sm_80", "sm_90"]))
    assert "sm_120" in found["gpu-architecture"]["text"]
    assert found["gpu-architecture"]["severity"] == "error"


@pytest.mark.parametrize(
    ("wanted", "built", "runs"),
    [
        ("sm_86", ["sm_80"], True),
        ("sm_80", ["sm_86"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_75", ["sm_80", "compute_80"], False),
        ("sm_100", ["sm_100a"], True),
        ("sm_94", ["gfx90a"], True),
    ],
)
def test_code_of_a_major_version_runs_on_it(wanted, built, runs):
    assert runs_on(wanted, built) is runs


def test_torchvision_is_not_needed():
    facts = make_facts()
    facts["software"]["torch"]["torchvision_error"] = "RuntimeError: operator torchvision::nms does not exist"
    problem = problems(facts)["torchvision-import"]
    assert problem["severity"] == "note"
    assert "does not need it" in problem["remedy"]


def test_packages_outside_their_range_and_incomplete_extras():
    facts = make_facts()
    required, wandb = facts["software"]["packages"]
    required["packages"][1] |= {"version": "1.20.0", "status": "unsupported"}
    wandb["packages"].append({"name": "other", "version": "1.0", "supported": ">=1", "status": "ok"})
    found = problems(facts)
    assert "numpy 1.20.0 is not supported: >=1.26 is" in found["package-version"]["text"]
    assert found["package-version"]["severity"] == "error"
    assert found["extra-incomplete"]["severity"] == "note"


def test_a_package_that_does_not_import():
    facts = make_facts()
    facts["software"]["torch"]["import_errors"] = {"PIL": "ImportError: libjpeg.so.62"}
    assert problems(facts)["package-import"]["remedy"] == "pip install --force-reinstall pillow"


def test_an_extra_that_is_not_installed_is_no_problem_and_a_required_package_is_one():
    facts = make_facts()
    facts["software"]["packages"][0]["packages"][1] |= {"version": None, "status": "missing"}
    assert problems(facts)["package-missing"]["severity"] == "error"


@pytest.mark.parametrize(
    ("threads", "environment", "name"),
    [
        (64, {}, "threads-many"),
        (4, {"LOCAL_WORLD_SIZE": "4"}, "threads-many"),
        (1, {"OMP_NUM_THREADS": "1"}, "threads-few"),
        (4, {"OMP_NUM_THREADS": "four"}, "threads-invalid"),
        (1, {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, None),
        (2, {"LOCAL_WORLD_SIZE": "2"}, None),
        (4, {"OMP_NUM_THREADS": "4,2"}, None),
    ],
)
def test_threads_and_cores(threads, environment, name):
    facts = make_facts()
    facts["software"]["torch"]["threads"] = threads
    assert set(problems(facts, **environment)) == ({name} if name else set())


def test_a_share_of_a_processor_is_what_threads_are_compared_with():
    facts = make_facts()
    facts["machine"]["processor"] |= {"cores": 64, "affinity": 64, "quota": 2.0, "usable_cores": 2}
    assert problems(facts)["threads-many"]["remedy"] == "export OMP_NUM_THREADS=2"


def test_a_busy_processor_makes_measurements_slow():
    facts = make_facts()
    facts["machine"]["load"] = 9.3
    assert "load 9.3 on 4 cores" in problems(facts)["busy"]["text"]
    facts["machine"]["load"] = 4.5
    assert problems(facts) == {}


def test_shared_memory_of_a_container_is_too_small_for_workers():
    facts = make_facts()
    facts["machine"]["system"]["container"] = "docker"
    facts["shared_memory"] = {"total": 64 * 2**20, "free": 64 * 2**20}
    problem = problems(facts)["shared-memory"]
    assert "64.0 MB free" in problem["text"]
    assert "--shm-size" in problem["remedy"]


def test_little_memory_and_few_open_files():
    facts = make_facts()
    facts["machine"]["memory"] |= {"available": GB, "limit": 3 * GB}
    facts["machine"]["limits"] |= {"open_files": 256, "address_space": 8 * GB}
    found = problems(facts)
    assert "1.0 GB of memory of the container's 3.0 GB" in found["memory-low"]["text"]
    assert found["open-files"]["remedy"] == "ulimit -n 8192"
    assert "address-space" in found


@pytest.mark.parametrize(("free", "severity"), [(10 * 2**20, "error"), (GB, "warning")])
def test_a_full_disk(free, severity):
    facts = make_facts()
    facts["storage"][0]["free"] = free
    problem = problems(facts)["disk-full"]
    assert problem["severity"] == severity
    assert "XDG_CACHE_HOME" in problem["remedy"]


def test_a_cache_that_cannot_be_written():
    facts = make_facts()
    facts["storage"][0]["writable"] = False
    assert "folder-read-only" in problems(facts)


def test_every_problem_is_documented():
    root = Path(__file__).parents[2]
    source = (root / "vitrail" / "doctor" / "problems.py").read_text()
    page = (root / "docs" / "doctor.md").read_text()
    names = re.findall(r'(?:error|warning|note|kind)\("([\w-]+)"', source)
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in page] == []
