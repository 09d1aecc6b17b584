"""The precision of a training run: chosen by constructed measurements, recorded, the same after a resume and on all processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.training.test_objects import COUNT, LABELS, TINY, make_images
from vitrail.training import precision
from vitrail.training.distributed import Team
from vitrail.training.recipe import Machine, read_recipe
from vitrail.training.trainer import Stopped
from vitrail.utils.precision import PrecisionChoice

DATA = (make_images(), LABELS)
RUN: dict[str, Any] = TINY | {"steps": 6, "machine": Machine(workers=0), "settings": ["validate_every=0.5"]}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let bf16 be faster on any processor, for any length of a run; return the batch sizes of the measurements."""
    calls: list[int] = []

    def measure(recipe: Any, batch: int) -> PrecisionChoice:
        calls.append(batch)
        return PrecisionChoice("bf16", "measured 1.8 times as fast as fp32 on Zen")

    monkeypatch.setattr(precision, "MIN_TRAINING_MACS", 0)
    monkeypatch.setattr(precision, "measure_precision", measure)
    return calls


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipe of a short run."""
    run, _ = vitrail.train(DATA, out=tmp_path_factory.mktemp("short") / "run", **RUN)
    return run / "recipe.json"


def read_settings(run: Path) -> dict[str, Any]:
    return json.loads((run / "recipe.json").read_text())


def test_the_chosen_precision_is_stated_and_recorded(tmp_path: Path, measured: list[int]) -> None:
    lines: list[str] = []
    run, _ = vitrail.train(
        DATA, out=tmp_path / "run", listeners=(lambda record: lines.append(record.get("text", "")),), **RUN
    )
    assert "  precision bf16: measured 1.8 times as fast as fp32 on Zen" in lines
    assert (read_settings(run)["precision"], measured) == ("bf16", [8])
    record = json.loads((run / "run.json").read_text())
    assert record["environment"]["precision"] == record["recipe"]["precision"] == "bf16"
    assert "precision bf16: measured 1.8 times as fast as fp32 on Zen" in record["chosen"]


def test_a_resumed_run_keeps_its_precision_and_its_weights(tmp_path: Path, measured: list[int]) -> None:
    whole, _ = vitrail.train(DATA, out=tmp_path / "whole", **RUN)

    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "validation" and record["step"] >= 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        vitrail.train(DATA, out=tmp_path / "halved", listeners=(stop,), **RUN)
    measured.clear()
    halved, _ = vitrail.resume(tmp_path / "halved", data=DATA)
    assert not measured
    assert read_settings(halved)["precision"] == "bf16"
    one, two = (vitrail.load(run / "model.safetensors").state_dict() for run in (whole, halved))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_fp32_by_request_is_the_training_without_a_choice(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _ = vitrail.train(DATA, out=tmp_path / "asked", precision="fp32", **RUN)
    in_settings = RUN | {"settings": [*RUN["settings"], "precision=fp32"]}
    vitrail.train(DATA, out=tmp_path / "set", **in_settings)
    assert not measured
    monkeypatch.undo()  # a short run is not measured
    short, _ = vitrail.train(DATA, out=tmp_path / "short", precision="auto", **RUN)
    assert read_settings(asked) == read_settings(short)
    one, two = (vitrail.load(run / "model.safetensors").state_dict() for run in (asked, short))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_time_budget_has_one_precision(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(build: Any, *_: Any) -> Any:  # within a time that is not measured here
        build({})
        return build({"steps": 2})

    monkeypatch.setattr("vitrail.training.recipe_choice.fit_recipe", fit)
    changed = {name: value for name, value in RUN.items() if name != "steps"} | {"settings": []}
    run, _ = vitrail.train(DATA, out=tmp_path / "run", minutes=1, **changed)
    assert (read_settings(run)["precision"], len(measured)) == ("bf16", 1)


def test_the_real_measurement_leaves_the_random_generator_as_it_is(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(recipe_file)
    monkeypatch.setattr(precision, "multiplies_bf16", lambda device: True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert precision.measure_precision(recipe, 8, seconds=0.0).precision in ("fp32", "bf16")
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(precision, "multiplies_bf16", lambda device: False)
    choice = precision.measure_precision(recipe, 8)
    assert choice.precision == "fp32"
    assert choice.why.endswith(" does not multiply bf16 natively")


def test_cuda_is_not_measured(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(precision, "device_name", lambda device: "T4")
    recipe = read_recipe(recipe_file)
    choice = precision.choose_training_precision(recipe, COUNT, Team(0, 1, torch.device("cuda")))
    assert choice is not None
    assert (choice.precision, measured) == ("fp16", [])
    assert "no native bf16 on T4; TF32 o" in choice.why


AGREEING = """
import os
import sys
from pathlib import Path
from vitrail.training import precision
from vitrail.training.distributed import join_process_group
from vitrail.training.recipe import read_recipe
from vitrail.utils.precision import PrecisionChoice

precision.MIN_TRAINING_MACS = 0
with join_process_group("cpu") as team:
    precision.measure_precision = lambda *_: PrecisionChoice("fp32" if team.rank else "bf16", f"of {team.rank}")
    print(precision.choose_training_precision(read_recipe(Path(sys.argv[1])), 48, team), flush=True)
os._exit(0)  # without taking the threads of the group apart, as `python -m vitrail` ends
"""


@pytest.mark.slow
def test_two_processes_agree_on_the_main_one(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "agree.py").write_text(AGREEING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, tmp_path / "agree.py", recipe_file],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("precision: bf16 (of 0)") == 2  # both may write into one line
