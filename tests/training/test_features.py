"""`vitrail pretrain --method features`: a trained model's features are learnt from pictures that nobody labelled."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.training.runs import interrupted, last, summary, trained
from tests.training.test_distributed import run as torchrun
from tests.training.test_teaching import PIPELINE, teacher
from tests.training.test_train import COLOURS, picture
from vitrail.cli import main
from vitrail.models.bit import BiT
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.training.recipe import Teacher, method_of, read_recipe
from vitrail.training.runs.setup import RunSetup
from vitrail.training.runs.teaching import RunTeacher

TINY = ("--set", "model.size.depth=1", "--set", "model.size.width=48", "--set", "model.size.mlp=64")
SHORT = (*TINY, "--batch-size", "16", "--workers", "0", "--quiet")
OTHERS = ("apple", "pear", "plum", "quince")  # classes that no picture here has


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures in a flat folder, and in folders by class."""
    place = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        for number in range(16):
            split = "val" if number < 4 else "train"
            path = place / "labelled" / split / name / f"{number}.png"
            picture(path, colour, 100 * number + len(name), 16)
            (place / "photos").mkdir(exist_ok=True)
            shutil.copy(path, place / "photos" / f"{name}-{number:02d}.png")
    return place


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("photos", "labelled"):
        shutil.copytree(folders / name, tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def learnt(*arguments: str, data: str = "photos", out: str = "run", steps: int = 3) -> int:
    given = ("--method", "features", "--teacher", "teacher.safetensors", "--out", out, "--steps", str(steps))
    return main(["pretrain", data, *given, *SHORT, *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, in one line, of a command that does not begin."""
    capsys.readouterr()
    assert main([*arguments, "--out", "never", "--quiet"]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert not Path("never").exists()
    return said


def about(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "run.json").read_text())


class Counted:
    """How many pictures a teacher was shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pictures = 0
        load = RunTeacher.__init__

        def counting(teacher: RunTeacher, setup: RunSetup) -> None:
            load(teacher, setup)
            teacher.teacher.model.get_submodule("pool").register_forward_hook(self.hear)

        monkeypatch.setattr(RunTeacher, "__init__", counting)

    def hear(self, module: object, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        self.pictures += len(inputs[0])


# --- a run ---


def test_features_approach_a_teacher_of_other_classes() -> None:
    teacher(labels=OTHERS, classes=4)
    assert learnt("--lr", "3e-3", steps=40) == 0
    found, run = summary(Path("run")), Path("run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    judged = [record["loss"] for record in records if record["kind"] == "validation"]
    assert judged[-1] < 0.8 * judged[0]  # 0.01 of it where this was measured
    assert found["cosine"] == pytest.approx(1 - judged[-1], abs=1e-6)
    assert (found["method"], found["steps"]) == ("features", 40)
    assert "knn" not in found
    assert found["rank"] > 1
    assert (about("run")["task"], about("run")["method"]) == ("pretraining", "features")
    assert about("run")["teacher"]["where"] == "teacher.safetensors"
    recipe = read_recipe(run / "recipe.json")
    assert isinstance(recipe.objective, FeatureDistillation)
    assert (recipe.name, method_of(recipe), recipe.teacher) == ("features", "features", Teacher("teacher.safetensors"))
    kept = {name.split(":")[0] for name in last(run)}
    assert all(".model." in name or ".projection." in name for name in kept)  # and nothing of the teacher
    page = (run / "report.html").read_text()
    assert "pretrained with feature distillation on photos" in page
    assert "teacher.safetensors" in page


def test_pretrained_model_can_be_fine_tuned_and_evaluated() -> None:
    teacher()
    assert learnt() == 0
    file = "run/model.safetensors"
    model = vitrail.load(file)
    assert (model.config.classes, model.labels) == (None, None)
    given = ("--init", file, "--out", "tuned", "--steps", "2", "--batch-size", "12", "--workers", "0", "--quiet")
    assert main(["train", "labelled", *given]) == 0
    tuned, name = vitrail.load("tuned/model.safetensors"), "blocks.0.mlp.fc1.weight"
    ours, theirs = model.state_dict()[name].flatten(), tuned.state_dict()[name].flatten()
    assert torch.nn.functional.cosine_similarity(ours, theirs, 0) > 0.9
    assert main(["evaluate", file, "labelled", "--probe", "knn", "--workers", "0"]) == 0
    assert main(["convert", file, "timm.safetensors", "--to", "timm"]) == 0


def test_labels_are_used_for_knn_only() -> None:
    teacher()
    assert learnt(data="labelled") == 0
    found = summary(Path("run"))
    assert {"knn", "knn_interval", "knn_pixels", "knn_random", "cosine"} <= set(found)
    assert vitrail.load("run/model.safetensors").config.classes is None


@pytest.mark.parametrize(
    ("given", "cached"),
    [
        ({"name": "R50x0.25", "labels": None, "classes": None}, ()),
        ({"name": "R50x0.25"}, ("--teacher-cache",)),
        ({"labels": None, "classes": None}, ("--teacher-cache",)),
        ({"prefix": "class+distillation"}, ("--teacher-cache",)),
        ({"channels": 1}, ()),
    ],
    ids=["ResNet without head", "ResNet", "without head", "distilled", "grey"],
)
def test_any_model_can_be_the_teacher(given: dict[str, Any], cached: tuple[str, ...]) -> None:
    teacher(**given)
    assert learnt(*cached, steps=2) == 0
    assert -1 <= summary(Path("run"))["cosine"] <= 1


def test_best_weights_have_the_highest_cosine() -> None:
    teacher()
    assert learnt("--set", "keep=best", "--lr", "3e-3", steps=10) == 0
    found = summary(Path("run"))
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert found["weights"] == "best"
    assert found["best_validation"] == max(r["cosine"] for r in records if r["kind"] == "validation" and r["step"])


# --- a teacher who is asked once ---


def test_number_of_teacher_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Counted(monkeypatch)
    teacher()
    assert learnt("--set", "validate_every=0.5") == 0
    splits = about("run")["data"]["splits"]
    train, watched = splits["train"]["images"], splits["validation"]["images"]
    assert (train, watched) == (48 - watched, watched)
    assert shown.pictures == 3 * 16 + watched  # three steps; the held-out crops are the same each time
    shown.pictures = 0
    assert learnt("--teacher-cache", out="cached") == 0
    assert shown.pictures == train + watched
    assert learnt("--teacher-cache", out="again") == 0
    assert shown.pictures == train + 2 * watched
    first, second = (load_file(f"{run}/model.safetensors") for run in ("cached", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- going on ---


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    teacher()
    given = ("photos", "--method", "features", "--teacher", "teacher.safetensors", *SHORT, "--steps", "12")
    trained(tmp_path, *given, "--out", "whole", verb="pretrain")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code = interrupted(
        tmp_path, killed, signal.SIGKILL, 5, *given, "--out", "killed", "--save-seconds", "0", verb="pretrain"
    )
    assert code == -signal.SIGKILL
    trained(tmp_path, "--resume", "killed", verb="pretrain")
    ours, theirs = last(killed), last(whole)
    assert set(ours) == set(theirs)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_resume_needs_the_same_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    teacher()
    assert learnt() == 0
    before = Path("run/model.safetensors").read_bytes()
    for name in ("summary.json", "model.safetensors"):  # as if it had been stopped before its end
        Path("run", name).unlink()
    assert main(["pretrain", "--resume", "run", "--quiet"]) == 0
    assert Path("run/model.safetensors").read_bytes() == before
    Path("run/summary.json").unlink()
    other = teacher(depth=1)
    assert not isinstance(other, BiT)
    capsys.readouterr()
    assert main(["pretrain", "--resume", "run", "--quiet"]) == 2
    assert "is another teacher than run started with" in capsys.readouterr().err
    assert main(["pretrain", "--resume", "run", "--teacher", "teacher.safetensors"]) == 2
    assert "leave out --teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    teacher()
    given = ("photos", "--method", "features", "--teacher", "teacher.safetensors", "--teacher-cache", *SHORT)
    given += ("--steps", "6")
    given += ("--set", "optimizer=SGD", "--set", "optimizer.lr=0.01")
    trained(tmp_path, *given, "--out", "one", verb="pretrain")
    torchrun(tmp_path, 2, *given, "--out", "two", "--parallel", "fsdp", verb="pretrain")
    ours, theirs = last(tmp_path / "two"), last(tmp_path / "one")
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-4)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "features"), "give --teacher MODEL"),
        (("--method", "features", "--teacher-cache"), "give --teacher MODEL"),
        (("--method", "mae", "--teacher", "teacher.safetensors"), "leave out --teacher, or use --method features"),
        (("--method", "dino", "--teacher-cache"), "leave out --teacher-cache, or use --method features"),
        (("--method", "mae", "--set", 'teacher={"type": "Teacher", "where": "t"}'), "uses no teacher"),
        (("--method", "features", "--teacher", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--method", "features", "--teacher", "five.safetensors"), "takes 5 channels, images have 1, 3 or 4"),
        (("--method", "features", "--teacher", "teacher.safetensors", "--set", "teacher=none"), "give --teacher MODEL"),
        (("--method", "features", "--teacher", "teacher.safetensors", "--set", "objective=MAE"), "uses no teacher"),
        (("--method", "features", "--teacher", "teacher.safetensors", "--set", "model.classes=3"), "vitrail train"),
        (("--method", "features", "--teacher", "teacher.safetensors", "--set", "model.head=PreLogits"), "model.head"),
        (("--method", "features", "--teacher", "teacher.safetensors", "--set", "tune=head"), "tune=head"),
        (
            ("--method", "features", "--teacher", "teacher.safetensors", "--batch-size", "1"),
            "--batch-size 2 or more, got 1",
        ),
        (
            ("--method", "features", "--teacher", "teacher.safetensors", "--init", "two.safetensors"),
            "only one of class",
        ),
    ],
)
def test_bad_input_is_one_line_before_training(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher()
    if "five.safetensors" in arguments:
        teacher("five.safetensors", channels=5)
    if "two.safetensors" in arguments:
        teacher("two.safetensors", prefix="class+distillation")
    assert said in refused(capsys, "pretrain", "photos", *arguments)


def test_train_and_pretrain_refuse_each_others_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    teacher()
    assert learnt() == 0
    assert "(features): use vitrail pretrain" in refused(capsys, "train", "labelled", "--recipe", "run/recipe.json")
    assert "vitrail pretrain with --method features" in refused(capsys, "train", "labelled", "--recipe", "features")
    taught = ("--teacher", "teacher.safetensors", "--distil", "features")
    assert main(["train", "labelled", *taught, "--out", "with", *SHORT, "--steps", "2"]) == 0
    assert "learns labels: use vitrail train" in refused(capsys, "pretrain", "photos", "--recipe", "with/recipe.json")
    without = refused(capsys, "train", "labelled", *taught, "--set", "model.classes=none")
    assert "use vitrail pretrain with --method features" in without


def test_recipe_file_with_another_teacher() -> None:
    teacher()
    assert learnt() == 0
    teacher("other.safetensors", depth=1)
    given = ("--recipe", "run/recipe.json", "--teacher", "other.safetensors", "--teacher-cache", "--out", "again")
    assert main(["pretrain", *given, "--workers", "0", "--quiet"]) == 0
    assert read_recipe(Path("again/recipe.json")).teacher == Teacher("other.safetensors", cached=True)
    assert PIPELINE.describe() == about("again")["teacher"]["preprocessing"]
