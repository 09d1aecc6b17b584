"""The steps of the self-test, in a reduced form: each does what it says, and notices what is wrong."""

import shutil

import pytest
import torch

import vitrail
from vitrail.doctor import bandwidth_steps, package_steps, speed_steps, training_steps
from vitrail.doctor.worker import Context, run_function


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Context(tmp_path, "cpu", 0.02)


def test_a_killed_run_is_resumed_and_a_difference_is_noticed(context, monkeypatch):
    detail, values = training_steps.resume_killed_run(context)
    assert training_steps.KILL_AFTER <= values["killed_after"] < training_steps.STEPS
    assert "equal" in detail
    (context.folder / "whole" / "metrics.jsonl").write_text("other")
    monkeypatch.setattr(training_steps, "kill_run", lambda name: 8)  # the finished run stays
    with pytest.raises(AssertionError, match=r"metrics\.jsonl of the resumed run differ"):
        training_steps.resume_killed_run(context)


def test_weights_of_two_processes_are_compared(context, monkeypatch):
    """`tests/training/test_distributed.py` runs torchrun; here its run is a copy."""
    commands = []

    def copy_run(*command: str, scale: float = 1.0) -> None:
        commands.append(command)
        shutil.copytree("whole", "pair", dirs_exist_ok=True)
        model = vitrail.load("whole")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        vitrail.save(model, "pair/model.safetensors")

    monkeypatch.setattr(training_steps, "run_module", copy_run)
    _, values = training_steps.train_two_processes(context)
    assert values["max_difference"] == 0.0
    assert "--nproc-per-node=2" in commands[0]
    monkeypatch.setattr(training_steps, "run_module", lambda *command: copy_run(scale=1.1))
    with pytest.raises(AssertionError, match="of two processes differs from that of one by up to"):
        training_steps.train_two_processes(context)


def test_a_process_that_fails_is_reported_with_its_error():
    with pytest.raises(RuntimeError, match="vitrail ended with exit code 2: vitrail: unknown command 'trian'"):
        training_steps.run_module("vitrail", "trian")


def test_loading_is_measured_for_several_numbers_of_workers(context, monkeypatch):
    monkeypatch.setattr(speed_steps, "available_cores", lambda: 2)
    detail, values = speed_steps.measure_loader(context)
    assert set(values["images_per_second"]) == {"0", "1", "2"}
    assert min(values["images_per_second"].values()) > 0
    assert "images/s" in detail


def test_numbers_of_workers_double_up_to_the_cores():
    assert speed_steps.list_worker_counts(1) == [0, 1]
    assert speed_steps.list_worker_counts(6) == [0, 1, 2, 4, 6]
    assert speed_steps.list_worker_counts(64) == [0, 1, 2, 4, 8, 16]


def test_products_are_measured_and_compared(context, monkeypatch):
    _, values = speed_steps.measure_products(context)
    assert set(values["gflops"]) == {"fp32", "bf16"}
    monkeypatch.setattr(speed_steps, "MIN_AGREEMENT", 1e-6)
    with pytest.raises(AssertionError, match="bf16 products differ from fp32"):
        speed_steps.measure_products(context)


def test_a_model_is_measured_and_the_precision_chosen(context, monkeypatch):
    monkeypatch.setattr(speed_steps, "MODEL", "Ti/16")
    _, values = speed_steps.measure_model(context)
    assert values["prediction_images_per_second"]["fp32"] > 0
    assert values["training_images_per_second"]["fp32"] > 0
    assert values["training_precision"]["precision"] in ("fp32", "bf16")
    assert values["prediction_precision"]["reason"]


def test_a_device_that_computes_other_features_is_noticed(monkeypatch):
    class Wrong(torch.nn.Module):
        calls = 0

        def forward_features(self, images):
            self.calls += 1
            return torch.full((2, 3), float(self.calls))

    with pytest.raises(AssertionError, match="other features than the CPU"):
        speed_steps.compare_devices(Wrong(), torch.device("cpu"))


def test_collectives_of_two_local_processes(context, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    detail, values = bandwidth_steps.measure_collectives(context)
    assert (values["processes"], values["backend"]) == (2, "gloo")
    assert set(values["gigabytes_per_second"]) == {"1 MB", "25 MB"}
    assert detail.startswith("2 processes with gloo")


def test_a_package_that_does_not_import_is_named(context, monkeypatch, tmp_path):
    (tmp_path / "good_one.py").write_text("")
    (tmp_path / "bad_one.py").write_text("raise OSError('libx.so is missing')")
    (tmp_path / "dead_one.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("dead_one", "good_one", "bad_one")
    made = [{"packages": [{"name": name, "version": "1"} for name in names]}]
    monkeypatch.setattr(package_steps, "describe_packages", lambda: made)
    with pytest.raises(ImportError, match=r"dead_one: crashed \(SIGABRT\); bad_one: OSError: libx.so is missing"):
        package_steps.import_packages(context)
    made[0]["packages"] = [{"name": "good_one", "version": "1"}, {"name": "absent", "version": None}]
    assert package_steps.import_packages(context) == ("1 package imported", {"packages": 1})


def test_an_unknown_function_is_an_error_of_one_line(context):
    answer = run_function("vitrail.doctor.nothing:here", context)
    assert answer == {"error": "ModuleNotFoundError: No module named 'vitrail.doctor.nothing'"}
