"""A runner finishes a study cell after cell; what fails or is taken by another concerns no other cell."""

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
from vitrail.engine.loop import Training
from vitrail.models.written import to_json
from vitrail.recipe import Data
from vitrail.studies.claims import Watcher
from vitrail.studies.runner import Runner
from vitrail.studies.study import LATER, Cell, Result, Setup, Study
from vitrail.studies.sweep import Sweep, begin_sweep, open_sweep


@pytest.fixture(autouse=True, scope="module")
def _tiny_is_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vitrail.studies, "NAMES", (*vitrail.studies.NAMES, "tiny"))
        patch.setitem(sys.modules, "vitrail.studies.tiny", tiny)
        yield


@pytest.fixture(scope="module")
def left_in_memory() -> list[Training]:
    """What a study left there, once it was run."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, left_in_memory: list[Training]) -> Sweep:
    """A study that nobody disturbed, nor helped with its memory."""
    sweep = begin_sweep(tmp_path_factory.mktemp("whole") / "study", tiny.STUDY, "test")
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is Training}  # of other tests
    gc.disable()
    try:
        Runner(sweep).run()
        left_in_memory += [each for each in gc.get_objects() if type(each) is Training and id(each) not in before]
    finally:
        gc.enable()
    return sweep


def ran(sweep: Sweep, **how: Any) -> list[dict[str, Any]]:
    """Runs to the end, and gives what was heard of cells."""
    heard: list[dict[str, Any]] = []
    Runner(sweep, hear=heard.append, **how).run()
    return [record for record in heard if record["kind"] == "cell"]


def small(tmp_path: Path, settings: tuple[str, ...] = (), study: Study = tiny.STUDY) -> Sweep:
    """Two cells."""
    return begin_sweep(tmp_path / "study", study, "laptop", settings=settings)


def test_every_planned_cell_is_run_once_and_has_its_result(whole: Sweep):
    state = whole.state()
    assert [result.phase for result in state.results.values()] == ["tune"] * 4 + ["final"] * 4
    assert not state.missing
    measured = (whole.directory.parent / "measured").read_text().split()[::2]
    assert sorted(measured) == sorted(state.cells)


def test_a_try_never_sees_the_test_pictures(whole: Sweep):
    for result in whole.state().results.values():
        run = whole.directory / result.run
        summary = json.loads((run / "summary.json").read_text())
        about = json.loads((run / "run.json").read_text())
        told = ("test" in result.numbers, "test" in summary, "test" in about["data"]["splits"])
        assert told == (result.phase == "final",) * 3
        assert (run / "evaluation" / "test.npz").exists() == (result.phase == "final")
        assert "validation" in result.numbers
        assert result.numbers.get("pictures") == (270 if result.phase == "final" else None)


def test_a_finished_run_keeps_its_model_and_nothing_else_that_is_large(whole: Sweep):
    for result in whole.state().results.values():
        home = (whole.directory / result.run).parent
        names = {path.name for path in (home / "run").iterdir()}
        assert {"model.safetensors", "summary.json", "metrics.jsonl", "recipe.json"} <= names
        assert not names & {"checkpoints", "best.safetensors"}
        assert {path.name for path in home.iterdir()} == {"run", "result.json", "claim-0"}


def test_a_finished_study_has_nothing_to_do(whole: Sweep):
    assert ran(open_sweep(whole.directory)) == []


def test_nothing_of_a_cell_stays_in_memory(whole: Sweep, left_in_memory: list[Training]):
    assert left_in_memory == []


def test_a_study_that_was_moved_is_still_finished(whole: Sweep, tmp_path: Path):
    shutil.copytree(whole.directory, tmp_path / "moved")
    moved = open_sweep(tmp_path / "moved")
    assert not moved.state().missing
    assert moved.state().results == whole.state().results


def test_a_cell_that_begins_with_a_model_of_the_study_has_one_name_wherever_it_lies(whole: Sweep, tmp_path: Path):
    def names(place: Path) -> set[str]:
        sweep = replace(whole, setup=replace(whole.setup, place=place))
        cell = next(iter(whole.state().cells.values()))
        inside, outside = str(place / "cells/a/run/model.safetensors"), "/models/b.safetensors"
        return {sweep.name(replace(cell, recipe=replace(cell.recipe, init=init))) for init in (inside, outside)}

    assert len(names(tmp_path / "a")) == 2
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_settings_are_of_every_cell_and_a_wrong_one_is_told_before_anything_runs(tmp_path: Path):
    sweep = small(tmp_path, ("steps=2", "batch_size=16"))
    assert {(cell.recipe.steps, cell.recipe.batch_size) for cell in sweep.state().cells.values()} == {(2, 16)}
    with pytest.raises(ValueError, match="no 'stps' in Recipe: did you mean 'steps'"):
        begin_sweep(tmp_path / "other", tiny.STUDY, "laptop", settings=["stps=2"])
    assert not (tmp_path / "other").exists()
    # Not even by a setting do tries see test pictures.
    seeing = replace(begin_sweep(tmp_path / "third", tiny.STUDY, "test"), settings=("data.test=true",))
    assert not any(cell.recipe.data.test for cell in seeing.state().cells.values())


def test_a_cell_that_fails_is_written_down_and_tried_again_the_next_time(tmp_path: Path):
    sweep = small(tmp_path)
    (tmp_path / "broken").write_text("class")
    heard = ran(sweep)
    assert [(record["what"], record["label"].split(",")[0]) for record in heard] == [
        ("begins", "final: pool class"),
        ("failed", "final: pool class"),
        ("begins", "final: pool mean"),
        ("done", "final: pool mean"),
    ]
    state = sweep.state()
    assert [failed.line for failed in state.failed.values()] == ["class is broken"]
    assert state.missing == list(state.failed)
    name = state.missing[0]
    assert "Traceback" in json.loads((sweep.home(name) / "failed.json").read_text())["traceback"]
    assert [record["what"] for record in ran(sweep)] == ["begins", "failed"]  # once, not for ever
    (tmp_path / "broken").unlink()
    assert [record["what"] for record in ran(sweep)] == ["begins", "done"]
    assert not sweep.state().failed
    assert not (sweep.home(name) / "failed.json").exists()


def test_a_try_whose_rate_is_too_high_is_the_worst_and_its_family_goes_on(tmp_path: Path):
    scale = replace(tiny.STUDY.scales["test"], rates=(1e-3, 1e38), seeds=1)
    begun = begin_sweep(tmp_path / "study", tiny.STUDY, "test", seeds=1)
    sweep = replace(begun, setup=replace(begun.setup, scale=scale))
    ran(sweep)
    state = sweep.state()
    assert not state.missing
    tries = {result.at["rate"]: result.numbers for result in state.results.values() if result.phase == "tune"}
    assert tries[1e38]["validation"] == 0
    assert "gradient norm" in tries[1e38]["diverged"] or "loss" in tries[1e38]["diverged"]
    assert {result.at["rate"] for result in state.results.values() if result.phase == "final"} == {1e-3}


def test_a_model_to_begin_with_that_diverges_is_a_try_where_rates_are_tried(tmp_path: Path):
    def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
        place = {"pool": "mean"}
        rates = [{**place, "rate": rate, "seed": 0} for rate in (1e-3, 1e38)]
        cells = [Cell(at, tiny.made(setup, place, float(at["rate"]), 0), "base") for at in rates]
        again = [Cell({**place, "rate": 1e38, "seed": 1}, tiny.made(setup, place, 1e38, 1), "base")]  # no try any more
        return [*cells, Cell({**place, "seed": 0}, cells[1].recipe, "base"), *again]

    sweep = small(tmp_path, study=replace(tiny.STUDY, plan=plan))
    sweep = replace(sweep, study=replace(tiny.STUDY, plan=plan))
    ran(sweep)
    state = sweep.state()
    assert [(r.at["rate"], "diverged" in r.numbers) for r in state.results.values()] == [(1e-3, False), (1e38, True)]
    assert [failed.at for failed in state.failed.values()] == [
        {"pool": "mean", "seed": 0},
        {"pool": "mean", "rate": 1e38, "seed": 1},
    ]


def test_a_final_cell_that_diverges_has_failed(tmp_path: Path):
    sweep = small(tmp_path, ("optimizer.lr=1e38",))
    ran(sweep)
    assert len(sweep.state().failed) == 2
    assert not sweep.state().results


class Enough(BaseException):
    """The test has seen what it wanted."""


def test_an_owner_who_is_overtaken_stops_and_writes_nothing(tmp_path: Path):
    sweep = small(tmp_path, ("steps=100000",))
    heard = overtaken(sweep, lambda home: None)
    name = heard[0]["cell"]
    assert [record["what"] for record in heard] == ["begins", "lost"]
    assert not (sweep.home(name) / "result.json").exists()
    assert not (sweep.home(name) / "failed.json").exists()


def test_an_owner_whose_run_was_taken_away_has_lost_and_not_failed(tmp_path: Path):
    sweep = small(tmp_path, ("steps=100000",))
    heard = overtaken(sweep, lambda home: (home / "run-0").rename(home / "run-1"), beat=3600)
    assert [record["what"] for record in heard] == ["begins", "lost"]
    home = sweep.home(heard[0]["cell"])
    assert not (home / "result.json").exists()
    assert not (home / "failed.json").exists()
    assert (home / "run-1" / "recipe.json").exists()


def overtaken(sweep: Sweep, then: Callable[[Path], object], beat: float = 0.01) -> list[dict[str, Any]]:
    """A runner whose first cell is taken by another machine in its first steps."""
    heard: list[dict[str, Any]] = []

    def hear(record: dict[str, Any]) -> None:
        if record["kind"] == "cell":
            heard.append(record)
            if record["what"] == "lost":
                raise Enough
        if record["kind"] == "begin":
            home = sweep.home(record["cell"])
            (home / "claim-1").write_text('{"machine": "elsewhere", "pid": 1, "id": "x", "over": false}')
            then(home)

    with pytest.raises(Enough):
        Runner(sweep, hear=hear, watcher=Watcher(beat=beat)).run()
    return heard


def test_a_plan_that_forgets_what_is_finished_is_noticed(tmp_path: Path):
    def forgetful(setup: Any, results: Any) -> list[Cell]:
        return [] if results else tiny.plan(setup, results)

    sweep = small(tmp_path)
    ran(sweep)
    with pytest.raises(AssertionError, match="forgets cells"):
        replace(sweep, study=replace(tiny.STUDY, plan=forgetful)).state()


def test_a_plan_is_asked_again_only_when_there_is_something_new(whole: Sweep):
    asked: list[int] = []

    def plan(setup: Any, results: Any) -> list[Cell]:
        asked.append(len(results))
        return tiny.plan(setup, results)

    sweep = replace(whole, study=replace(tiny.STUDY, plan=plan))
    sweep.state()
    assert asked == [0, 4, 8]
    assert not sweep.state().missing
    assert asked == [0, 4, 8]


def test_another_study_in_the_same_directory_is_refused_in_one_line(tmp_path: Path):
    sweep = small(tmp_path)
    for changed, word in (
        ({"scale": "test"}, "another scale, laptop and not test"),
        ({"data": Data("fashion-mnist")}, "another data, digits and not fashion-mnist"),
        ({"settings": ["steps=4"]}, "another --set, none and not steps=4"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            begin_sweep(sweep.directory, **({"study": tiny.STUDY, "scale": "laptop"} | changed))
        assert "\n" not in str(caught.value)
    assert begin_sweep(sweep.directory, tiny.STUDY, "laptop").setup == sweep.setup
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(ValueError, match="holds no study"):
        begin_sweep(tmp_path / "else", tiny.STUDY, "laptop")
    with pytest.raises(ValueError, match="holds no study"):
        open_sweep(tmp_path / "else")


def test_a_study_of_another_version_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep = small(tmp_path)
    monkeypatch.setattr(vitrail, "__version__", "9.9.9")
    with pytest.raises(
        ValueError, match=r"was begun with vitrail [\d.]+, and this is 9\.9\.9.*give --out another name"
    ) as told:
        small(tmp_path)
    assert "\n" not in str(told.value)
    assert open_sweep(sweep.directory).setup == sweep.setup  # what is there can still be shown


def test_a_plan_from_before_there_was_a_choice_of_classes_goes_on_with_the_same_cells(tmp_path: Path):
    sweep = small(tmp_path)
    path = sweep.directory / "plan.json"
    plan = json.loads(path.read_text())
    for name in ("asked", "data"):
        for later in LATER:
            assert plan[name].pop(later) is None
    path.write_text(json.dumps(plan))
    again = small(tmp_path)
    assert again.setup == sweep.setup
    cell = next(iter(sweep.state().cells.values()))
    written = to_json(cell.recipe)
    for later in LATER:
        del written["data"][later]
    told = hashlib.sha256(json.dumps([cell.phase, dict(cell.at), written], sort_keys=True).encode()).hexdigest()
    assert cell.name.endswith(told[:8])
    chosen = replace(cell, recipe=replace(cell.recipe, data=replace(cell.recipe.data, classes=(0, 2))))
    assert chosen.name != cell.name


def pictures(place: Path, count: int = 30) -> None:
    for name in ("bright", "dark"):
        (place / name).mkdir(parents=True)
        for number in range(count):
            shade = number + (120 if name == "bright" else 0)
            Image.new("RGB", (12, 12), (shade, number, 3 * number)).save(place / name / f"{number}.png")


def test_own_pictures_without_splits_are_divided_and_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pictures(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    sweep = begin_sweep("study", tiny.STUDY, "laptop", Data("photos"))
    facts = sweep.setup.facts
    assert (facts.classes, facts.side, facts.channels) == (2, (12, 12), 3)
    assert sweep.setup.data.fractions == (0.8, 0.1, 0.1)
    assert 0 < facts.images < 60
    monkeypatch.setattr("vitrail.studies.sweep.prepare", lambda *_: pytest.fail("the facts are known"))
    monkeypatch.chdir(tmp_path / "photos")  # the data is where it was, wherever one stands
    assert begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos")).setup.facts == facts
    assert begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos", (0.8, 0.1, 0.1))).setup.facts == facts
    with pytest.raises(ValueError, match="another data"):
        begin_sweep("../study", tiny.STUDY, "laptop", Data("../photos", (0.6, 0.2, 0.2)))
    ran(sweep)
    assert all(result.numbers["pictures"] > 0 for result in sweep.state().results.values())


def test_own_pictures_without_a_test_split_are_refused_before_anything_is_written(tmp_path: Path):
    pictures(tmp_path / "photos" / "train")
    pictures(tmp_path / "photos" / "val", 5)
    with pytest.raises(ValueError, match=r"has no test pictures.*add a test folder"):
        begin_sweep(tmp_path / "study", tiny.STUDY, "laptop", Data(str(tmp_path / "photos")))
    assert not (tmp_path / "study").exists()
