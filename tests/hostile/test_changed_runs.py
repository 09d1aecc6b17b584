"""A run whose recipe or data changed between stop and resume is refused with the difference."""

import json
import shutil
from pathlib import Path

import pytest

from tests.hostile.measured import Finished
from tests.hostile.measured import run_forked as run

TINY = (
    "--set",
    "model.size.depth=1",
    "--set",
    "model.size.heads=2",
    "--set",
    "model.size.width=16",
    "--set",
    "model.size.mlp=32",
)
START = ("--steps", "6", "--batch-size", "32", "--save-seconds", "0", "--workers", "0", "--device", "cpu", *TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that can be continued: all of its checkpoints, without the files of its end."""
    root = tmp_path_factory.mktemp("run")
    done = run("train", "digits", "--out", root / "run", *START)
    assert done.code == 0, done.err
    for name in ("summary.json", "model.safetensors", "report.html"):
        (root / "run" / name).unlink()
    return root / "run"


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(path: Path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def resume(directory: Path, *more: str) -> Finished:
    return run("train", "--resume", directory, *more)


def test_an_untouched_run_resumes(stopped: Path) -> None:
    assert resume(stopped).code == 0


def test_a_recipe_written_otherwise_but_equal_resumes(stopped: Path) -> None:
    edit(stopped / "recipe.json", lambda recipe: recipe.update(dict(reversed(recipe.items()))))
    assert resume(stopped).code == 0


def test_an_edited_recipe_is_refused_with_the_difference(stopped: Path) -> None:
    edit(stopped / "recipe.json", lambda recipe: recipe["optimizer"].update(lr=0.5))
    resume(stopped).assert_refused("recipe.json", "optimizer.lr", "0.5", "--accept-changes")
    assert not (stopped / "summary.json").exists()


def test_accepted_changes_are_used_and_said(stopped: Path) -> None:
    edit(stopped / "recipe.json", lambda recipe: recipe.update(steps=8))
    done = resume(stopped, "--accept-changes")
    assert done.code == 0, done.err
    assert "steps" in done.err
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 8
    (stopped / "summary.json").unlink()
    assert resume(stopped).code == 0, "an accepted change is remembered"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("checkpoints/*/progress.json", lambda data: data.update(step="x")),
        ("run.json", lambda data: data["data"].update(splits=-1)),
        ("run.json", lambda data: data.update(labels=[1, 2])),
        ("recipe.json", lambda data: data["optimizer"].update(lr=10**400)),
        ("recipe.json", lambda data: data["optimizer"].update(type=[])),
    ],
)
def test_damaged_files_of_a_run_are_one_line(name: str, change, stopped: Path) -> None:
    for path in stopped.glob(name):
        edit(path, change)
    done = resume(stopped)
    assert "Traceback" not in done.err
    if not name.startswith("checkpoints"):  # a damaged checkpoint is passed over for the one before
        done.assert_refused()
