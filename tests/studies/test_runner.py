"""Runners: every cell runs once; failures and lost claims do not affect other cells."""

import gc
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitrail.studies
from tests.studies import tiny
from vitrail.studies.cells import CellClaimer
from vitrail.studies.runner import Runner
from vitrail.studies.study import OPTIONAL_DATA_FIELDS, Cell, CellResult, Study, StudySetup
from vitrail.studies.sweep import Sweep, begin_sweep, open_sweep
from vitrail.training.recipe import Data
from vitrail.training.trainer import Trainer
from vitrail.utils.json import to_json


@pytest.fixture(autouse=True, scope="module")
def _tiny_is_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vitrail.studies, "STUDY_NAMES", (*vitrail.studies.STUDY_NAMES, "tiny"))
        patch.setitem(sys.modules, "vitrail.studies.tiny", tiny)
        yield


@pytest.fixture(scope="module")
def left_in_memory() -> list[Trainer]:
    """Return the trainings left in memory after a study."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, left_in_memory: list[Trainer]) -> Sweep:
    """Return an uninterrupted study, run with the garbage collector disabled."""
    sweep = begin_sweep(tmp_path_factory.mktemp("whole") / "study", tiny.STUDY, "test")
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is Trainer}  # of other tests
    gc.disable()
    try:
        Runner(sweep).run()
        left_in_memory += [each for each in gc.get_objects() if type(each) is Trainer and id(each) not in before]
    finally:
        gc.enable()
    return sweep


def ran(sweep: Sweep, **how: Any) -> list[dict[str, Any]]:
    """Run to the end and return the records of cells."""
    heard: list[dict[str, Any]] = []
    Runner(sweep, on_record=heard.append, **how).run()
    return [record for record in heard if record["kind"] == "cell"]


def small(tmp_path: Path, settings: tuple[str, ...] = (), study: Study = tiny.STUDY) -> Sweep:
    """Return a study of two cells."""
    return begin_sweep(tmp_path / "study", study, "laptop", settings=settings)


def test_every_cell_runs_once(whole: Sweep):
    state = whole.read_state()
    assert [result.phase for result in state.results.values()] == ["tune"] * 4 + ["final"] * 4
    assert not state.missing
    measured = (whole.directory.parent / "measured").read_text().split()[::2]
    assert sorted(measured) == sorted(state.cells)


def test_tuning_runs_never_see_test_images(whole: Sweep):
    for result in whole.read_state().results.values():
        run = whole.directory / result.run
        summary = json.loads((run / "summary.json").read_text())
        about = json.loads((run / "run.json").read_text())
        told = ("test" in result.numbers, "test" in summary, "test" in about["data"]["splits"])
        assert told == (result.phase == "final",) * 3
        assert (run / "evaluation" / "test.npz").exists() == (result.phase == "final")
        assert "validation" in result.numbers
        assert result.numbers.get("pictures") == (270 if result.phase == "final" else None)


def test_finished_run_keeps_only_its_model(whole: Sweep):
    for result in whole.read_state().results.values():
        home = (whole.directory / result.run).parent
        names = {path.name for path in (home / "run").iterdir()}
        assert {"model.safetensors", "summary.json", "metrics.jsonl", "recipe.json"} <= names
        assert not names & {"checkpoints", "best.safetensors"}
        assert {path.name for path in home.iterdir()} == {"run", "result.json", "claim-0"}


def test_finished_study_runs_nothing(whole: Sweep):
    assert ran(open_sweep(whole.directory)) == []


def test_cells_are_freed_from_memory(whole: Sweep, left_in_memory: list[Trainer]):
    assert left_in_memory == []


def test_moved_study_is_still_finished(whole: Sweep, tmp_path: Path):
    shutil.copytree(whole.directory, tmp_path / "moved")
    moved = open_sweep(tmp_path / "moved")
    assert not moved.read_state().missing
    assert moved.read_state().results == whole.read_state().results


def test_cell_name_is_independent_of_the_directory(whole: Sweep, tmp_path: Path):
    def names(place: Path) -> set[str]:
        sweep = replace(whole, setup=replace(whole.setup, directory=place))
        cell = next(iter(whole.read_state().cells.values()))
        inside, outside = str(place / "cells/a/run/model.safetensors"), "/models/b.safetensors"
        return {sweep.cell_name(replace(cell, recipe=replace(cell.recipe, init=init))) for init in (inside, outside)}

    assert len(names(tmp_path / "a")) == 2
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_settings_apply_to_every_cell(tmp_path: Path):
    sweep = small(tmp_path, ("steps=2", "batch_size=16"))
    assert {(cell.recipe.steps, cell.recipe.batch_size) for cell in sweep.read_state().cells.values()} == {(2, 16)}
    with pytest.raises(ValueError, match="no 'stps' in Recipe: did you mean 'steps'"):
        begin_sweep(tmp_path / "other", tiny.STUDY, "laptop", settings=["stps=2"])
    assert not (tmp_path / "other").exists()
    # A setting cannot give tuning runs test images.
    seeing = replace(begin_sweep(tmp_path / "third", tiny.STUDY, "test"), settings=("data.test=true",))
    assert not any(cell.recipe.data.test for cell in seeing.read_state().cells.values())


def test_failed_cell_is_recorded_and_retried(tmp_path: Path):
    sweep = small(tmp_path)
    (tmp_path / "broken").write_text("class")
    heard = ran(sweep)
    assert [(record["what"], record["label"].split(",")[0]) for record in heard] == [
        ("begins", "final: pool class"),
        ("failed", "final: pool class"),
        ("begins", "final: pool mean"),
        ("done", "final: pool mean"),
    ]
    state = sweep.read_state()
    assert [failed.line for failed in state.failed.values()] == ["class is broken"]
    assert state.missing == list(state.failed)
    name = state.missing[0]
    assert "Traceback" in json.loads((sweep.cell_directory(name) / "failed.json").read_text())["traceback"]
    assert [record["what"] for record in ran(sweep)] == ["begins", "failed"]  # once per command
    (tmp_path / "broken").unlink()
    assert [record["what"] for record in ran(sweep)] == ["begins", "done"]
    assert not sweep.read_state().failed
    assert not (sweep.cell_directory(name) / "failed.json").exists()


def test_diverged_tuning_run_scores_zero(tmp_path: Path):
    scale = replace(tiny.STUDY.scales["test"], lrs=(1e-3, 1e38), seeds=1)
    begun = begin_sweep(tmp_path / "study", tiny.STUDY, "test", seeds=1)
    sweep = replace(begun, setup=replace(begun.setup, scale=scale))
    ran(sweep)
    state = sweep.read_state()
    assert not state.missing
    tries = {result.at["rate"]: result.numbers for result in state.results.values() if result.phase == "tune"}
    assert tries[1e38]["validation"] == 0
    assert "gradient norm" in tries[1e38]["diverged"] or "loss" in tries[1e38]["diverged"]
    assert {result.at["rate"] for result in state.results.values() if result.phase == "final"} == {1e-3}


def test_diverged_base_run_counts_only_while_tuning(tmp_path: Path):
    def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
        place = {"pool": "mean"}
        lrs = [{**place, "rate": lr, "seed": 0} for lr in (1e-3, 1e38)]
        cells = [Cell(at, tiny.made(setup, place, float(at["rate"]), 0), "base") for at in lrs]
        again = [Cell({**place, "rate": 1e38, "seed": 1}, tiny.made(setup, place, 1e38, 1), "base")]  # not a tuning run
        return [*cells, Cell({**place, "seed": 0}, cells[1].recipe, "base"), *again]

    sweep = small(tmp_path, study=replace(tiny.STUDY, plan=plan))
    sweep = replace(sweep, study=replace(tiny.STUDY, plan=plan))
    ran(sweep)
    state = sweep.read_state()
    assert [(r.at["rate"], "diverged" in r.numbers) for r in state.results.values()] == [(1e-3, False), (1e38, True)]
    assert [failed.at for failed in state.failed.values()] == [
        {"pool": "mean", "seed": 0},
        {"pool": "mean", "rate": 1e38, "seed": 1},
    ]


def test_diverged_final_cell_fails(tmp_path: Path):
    sweep = small(tmp_path, ("optimizer.lr=1e38",))
    ran(sweep)
    assert len(sweep.read_state().failed) == 2
    assert not sweep.read_state().results


class Enough(BaseException):
    """Raised to end the runner in a test."""


def test_overtaken_owner_writes_nothing(tmp_path: Path):
    sweep = small(tmp_path, ("steps=100000",))
    heard = overtaken(sweep, lambda home: None)
    name = heard[0]["cell"]
    assert [record["what"] for record in heard] == ["begins", "lost"]
    assert not (sweep.cell_directory(name) / "result.json").exists()
    assert not (sweep.cell_directory(name) / "failed.json").exists()


def test_owner_of_a_renamed_run_loses_without_failure(tmp_path: Path):
    sweep = small(tmp_path, ("steps=100000",))
    heard = overtaken(sweep, lambda home: (home / "run-0").rename(home / "run-1"), beat=3600)
    assert [record["what"] for record in heard] == ["begins", "lost"]
    home = sweep.cell_directory(heard[0]["cell"])
    assert not (home / "result.json").exists()
    assert not (home / "failed.json").exists()
    assert (home / "run-1" / "recipe.json").exists()


def overtaken(sweep: Sweep, then: Callable[[Path], object], beat: float = 0.01) -> list[dict[str, Any]]:
    """Run until another machine takes the first cell, and return the records of cells."""
    heard: list[dict[str, Any]] = []

    def hear(record: dict[str, Any]) -> None:
        if record["kind"] == "cell":
            heard.append(record)
            if record["what"] == "lost":
                raise Enough
        if record["kind"] == "begin":
            home = sweep.cell_directory(record["cell"])
            (home / "claim-1").write_text('{"machine": "elsewhere", "pid": 1, "id": "x", "over": false}')
            then(home)

    with pytest.raises(Enough):
        Runner(sweep, on_record=hear, claimer=CellClaimer(heartbeat_seconds=beat)).run()
    return heard


def test_plan_that_drops_finished_cells_raises(tmp_path: Path):
    def forgetful(setup: Any, results: Any) -> list[Cell]:
        return [] if results else tiny.plan(setup, results)

    sweep = small(tmp_path)
    ran(sweep)
    with pytest.raises(AssertionError, match="dropped finished cells"):
        replace(sweep, study=replace(tiny.STUDY, plan=forgetful)).read_state()


def test_plan_is_cached(whole: Sweep):
    asked: list[int] = []

    def plan(setup: Any, results: Any) -> list[Cell]:
        asked.append(len(results))
        return tiny.plan(setup, results)

    sweep = replace(whole, study=replace(tiny.STUDY, plan=plan))
    sweep.read_state()
    assert asked == [0, 4, 8]
    assert not sweep.read_state().missing
    assert asked == [0, 4, 8]


def test_different_study_in_the_directory_is_refused(tmp_path: Path):
    sweep = small(tmp_path)
    for changed, word in (
        ({"scale": "test"}, "a different scale: laptop, not test"),
        ({"data": Data("fashion-mnist")}, "a different data: digits, not fashion-mnist"),
        ({"settings": ["steps=4"]}, "a different --set: none, not steps=4"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            begin_sweep(sweep.directory, **({"study": tiny.STUDY, "scale": "laptop"} | changed))
        assert "\n" not in str(caught.value)
    assert begin_sweep(sweep.directory, tiny.STUDY, "laptop").setup == sweep.setup
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(ValueError, match="is not a study"):
        begin_sweep(tmp_path / "else", tiny.STUDY, "laptop")
    with pytest.raises(ValueError, match="is not a study"):
        open_sweep(tmp_path / "else")


def test_study_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep = small(tmp_path)
    monkeypatch.setattr(vitrail, "__version__", "9.9.9")
    with pytest.raises(
        ValueError, match=r"was started with vitrail [\d.]+, not 9\.9\.9.*choose another directory"
    ) as caught:
        small(tmp_path)
    assert "\n" not in str(caught.value)
    assert open_sweep(sweep.directory).setup == sweep.setup  # it can still be shown


def test_old_plan_keeps_its_cell_names(tmp_path: Path):
    sweep = small(tmp_path)
    path = sweep.directory / "plan.json"
    plan = json.loads(path.read_text())
    for name in ("asked", "data"):
        for later in OPTIONAL_DATA_FIELDS:
            assert plan[name].pop(later) is None
    path.write_text(json.dumps(plan))
    again = small(tmp_path)
    assert again.setup == sweep.setup
    cell = next(iter(sweep.read_state().cells.values()))
    written = to_json(cell.recipe)
    for later in OPTIONAL_DATA_FIELDS:
        del written["data"][later]
    told = hashlib.sha256(json.dumps([cell.phase, dict(cell.at), written], sort_keys=True).encode()).hexdigest()
    assert cell.name.endswith(told[:8])
    chosen = replace(cell, recipe=replace(cell.recipe, data=replace(cell.recipe.data, classes=(0, 2))))
    assert chosen.name != cell.name


def write_images(directory: Path, count: int = 30) -> None:
    for name in ("bright", "dark"):
        (directory / name).mkdir(parents=True)
        for number in range(count):
            shade = number + (120 if name == "bright" else 0)
            Image.new("RGB", (12, 12), (shade, number, 3 * number)).save(directory / name / f"{number}.png")


def test_own_images_without_splits_are_split_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    sweep = begin_sweep("study", tiny.STUDY, "laptop", Data("photos"))
    facts = sweep.setup.facts
    assert (facts.classes, facts.side, facts.channels) == (2, (12, 12), 3)
    assert sweep.setup.data.fractions == (0.8, 0.1, 0.1)
    assert 0 < facts.images < 60
    monkeypatch.setattr("vitrail.studies.sweep.prepare_data", lambda *_: pytest.fail("the facts are known"))
    monkeypatch.chdir(tmp_path / "photos")  # data paths are absolute
    assert begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos")).setup.facts == facts
    assert begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos", (0.8, 0.1, 0.1))).setup.facts == facts
    with pytest.raises(ValueError, match="a different data"):
        begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos", (0.6, 0.2, 0.2)))
    ran(sweep)
    assert all(result.numbers["pictures"] > 0 for result in sweep.read_state().results.values())


def test_own_images_without_test_split_are_refused(tmp_path: Path):
    write_images(tmp_path / "photos" / "train")
    write_images(tmp_path / "photos" / "val", 5)
    with pytest.raises(ValueError, match=r"has no test images.*add a test folder"):
        begin_sweep(tmp_path / "study", tiny.STUDY, "laptop", Data(str(tmp_path / "photos")))
    assert not (tmp_path / "study").exists()
