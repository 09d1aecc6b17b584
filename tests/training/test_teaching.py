"""`vitrail train --teacher`: who may teach, what is cached, what is kept, and what others read of the student."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.training.runs import last, summary, trained
from tests.training.test_distributed import LINEAR, assert_near
from tests.training.test_distributed import run as together
from tests.training.test_train import COLOURS, picture
from vitrail.checkpoints.convert import convert
from vitrail.cli import main
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.classification import Classification
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.training.recipe import Data, Teacher, read_recipe
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.runs.setup import RunSetup
from vitrail.training.runs.teaching import RunTeacher, match_classes, with_teacher

PIPELINE = Preprocessing((16, 16), (18, 18), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
NAMES = ("blue", "green", "red")
TINY = (
    "--set",
    "model.size.depth=1",
    "--set",
    "model.size.width=32",
    "--batch-size",
    "12",
    "--workers",
    "0",
    "--quiet",
)
SHORT = (*TINY, "--steps", "3", "--size", "16")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def photos(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(8):
            picture(tmp_path / "photos" / "train" / name / f"{number}.png", colour, 100 * number + len(name), 16)
        for number in range(3):
            picture(tmp_path / "photos" / "val" / name / f"{number}.png", colour, 7000 + 100 * number + len(name), 16)
    return tmp_path / "photos"


def teacher(
    path: str = "teacher.safetensors", labels: tuple[str, ...] | None = NAMES, name: str | None = None, **slots: Any
) -> ViT | BiT:
    """A model that has not learnt anything, as good a teacher as any for these tests."""
    torch.manual_seed(5)
    given: dict[str, object] = {"classes": 3, "image_size": 16}
    given |= {"patch": 4, "width": 16, "depth": 2, "heads": 2} if name is None else {"root": "small"}
    model = vitrail.build(name, **(given | slots)).eval()
    if isinstance(model.head, torch.nn.Linear):
        torch.nn.init.normal_(model.head.weight, std=1.0)
    channels = model.config.channels
    model.preprocessing = PIPELINE if channels == 3 else PIPELINE.with_channels(channels)
    model.labels = labels
    vitrail.save(model, path)
    return model


def taught(*arguments: str) -> int:
    return main(["train", "photos", "--teacher", "teacher.safetensors", "--out", "run", *SHORT, *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, in one line, of a run that does not begin."""
    assert taught(*arguments) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert not Path("run").exists()
    return said


class Counted:
    """How many pictures a teacher was shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pictures = 0
        load = RunTeacher.__init__

        def counting(teacher: RunTeacher, setup: RunSetup) -> None:
            load(teacher, setup)
            teacher.teacher.model.register_forward_hook(self.hear)

        monkeypatch.setattr(RunTeacher, "__init__", counting)

    def hear(self, module: object, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        self.pictures += len(inputs[0])


# --- a run ---


def test_teacher_is_not_saved_with_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Counted(monkeypatch)
    given = teacher()
    assert taught() == 0
    assert shown.pictures == 36  # three steps of twelve
    run = Path("run")
    recipe = read_recipe(run / "recipe.json")
    assert recipe.name == "distil"
    assert recipe.teacher == Teacher("teacher.safetensors")
    assert isinstance(recipe.objective, Distillation)
    assert recipe.objective.kind == "soft"
    about = json.loads((run / "run.json").read_text())["teacher"]
    assert about["where"] == "teacher.safetensors"
    assert about["parameters"] == sum(p.numel() for p in given.parameters())
    kept = {name.split(":")[0] for name in last(run)}
    assert all(name.startswith(("weights.model.", "optimizer.model.")) for name in kept)
    assert vitrail.load("run/model.safetensors").labels == NAMES
    assert summary(run)["split"] == "validation"


def test_resnet_teacher_and_student_with_a_recipe_file() -> None:
    teacher(name="R50x0.25")
    assert taught() == 0
    recipe = replace(
        read_recipe(Path("run/recipe.json")),
        model=vitrail.configure("R50x0.25", root="small", classes=3, image_size=16),
    )
    directory, found = vitrail.train(recipe=recipe, out="again")
    assert isinstance(vitrail.load(directory / "model.safetensors"), BiT)
    assert found["steps"] == 3


@pytest.mark.parametrize("taught_by", [(), ("--teacher", "teacher.safetensors")])
def test_named_resnet_trains_with_and_without_a_teacher(taught_by: tuple[str, ...]) -> None:
    teacher()
    short = ("--model", "R26x0.25", "--size", "16", "--batch-size", "12", "--steps", "2", "--workers", "0", "--quiet")
    assert main(["train", "photos", *taught_by, *short, "--out", "run"]) == 0
    assert isinstance(vitrail.load("run/model.safetensors"), BiT)


@pytest.mark.parametrize(
    ("how", "kind"),
    [("hard", Distillation), ("soft", Distillation), ("features", FeatureDistillation), ("tokens", TokenLabelling)],
)
def test_any_recipe_can_have_a_teacher(how: str, kind: type) -> None:
    teacher()
    assert taught("--recipe", "scratch-small", "--distil", how, "--set", "objective.smoothing=0.1") == 0
    objective = read_recipe(Path("run/recipe.json")).objective
    assert type(objective) is kind
    assert objective.smoothing == 0.1  # pyright: ignore[reportAttributeAccessIssue]
    assert getattr(objective, "kind", how) == how


@pytest.mark.parametrize("how", ["hard", "features", "tokens"])
def test_recipe_distil_has_a_student_for_each_method(how: str) -> None:
    teacher()
    assert taught("--distil", how) == 0
    recipe = read_recipe(Path("run/recipe.json"))
    assert recipe.name == "distil"
    assert recipe.model.prefix.outputs == (2 if how == "hard" else 0)  # pyright: ignore[reportAttributeAccessIssue]


def test_adding_a_teacher_keeps_settings_for_labels() -> None:
    teacher()
    assert taught() == 0
    recipe = read_recipe(Path("run/recipe.json"))
    plain = replace(recipe, teacher=None, objective=Classification(smoothing=0.1, cutmix=1.0, patch_dropout=0.25))
    found = with_teacher(plain, Teacher("t"), "soft").objective
    assert found == Distillation(kind="soft", smoothing=0.1, cutmix=1.0, patch_dropout=0.25)
    assert with_teacher(replace(recipe, objective=found), Teacher("u")).objective == found
    turned = with_teacher(replace(recipe, objective=replace(found, alpha=0.2)), Teacher("u"), "hard").objective
    assert turned == Distillation(kind="hard", alpha=0.2, smoothing=0.1, cutmix=1.0, patch_dropout=0.25)
    assert with_teacher(plain, Teacher("t"), "tokens").objective == TokenLabelling(smoothing=0.1)
    with pytest.raises(ValueError, match="unknown way to learn from a teacher"):
        with_teacher(plain, Teacher("t"), "osmosis")


def test_recipe_file_can_drop_its_teacher() -> None:
    teacher()
    assert taught() == 0
    Path("teacher.safetensors").rename("gone.safetensors")
    alone = (
        "--set",
        "objective=Classification",
        "--set",
        "teacher=none",
        "--out",
        "alone",
        "--quiet",
        "--workers",
        "0",
    )
    assert main(["train", "--recipe", "run/recipe.json", *alone]) == 0
    before, after = read_recipe(Path("run/recipe.json")), read_recipe(Path("alone/recipe.json"))
    assert isinstance(before.objective, Distillation)
    assert after.objective == Classification(mixup=before.objective.mixup)
    assert replace(after, objective=before.objective, teacher=before.teacher) == before


def test_fine_tuning_with_a_teacher() -> None:
    teacher()
    given = ("--init", "teacher.safetensors", "--teacher", "teacher.safetensors", "--out", "run", "--steps", "2")
    assert main(["train", "photos", *given, "--batch-size", "12", "--workers", "0", "--quiet"]) == 0
    recipe = read_recipe(Path("run/recipe.json"))
    assert isinstance(recipe.objective, Distillation)
    assert (recipe.name, recipe.objective.smoothing) == ("finetune", 0.0)  # as without a teacher in so few steps


# --- classes ---


def test_classes_in_another_order_are_reordered(capsys: pytest.CaptureFixture[str]) -> None:
    model = teacher(labels=("red", "blue", "green"))
    assert match_classes(Teacher("t"), model, NAMES) == [1, 2, 0]
    loud = [word for word in SHORT if word != "--quiet"]
    given = ["--teacher", "teacher.safetensors", "--out", "run", *loud, "--teacher-cache"]
    assert main(["train", "photos", *given]) == 0
    assert "same classes in another order" in capsys.readouterr().err


def test_class_names_are_compared_after_normalisation() -> None:
    model = teacher(labels=("blau", "gru\u0308n", "rot "))
    assert match_classes(Teacher("t"), model, ("blau", "gr\u00fcn", "rot")) is None


def test_a_teacher_of_other_classes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    teacher(labels=("blue", "green", "violet"))
    said = refused(capsys)
    assert "lacks 'red' and has 'violet' in addition" in said
    assert "--distil features" in said
    assert taught("--distil", "features") == 0


def test_a_teacher_of_more_classes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    teacher(labels=(*NAMES, "violet"), classes=4)
    assert "it has 'violet' in addition" in refused(capsys)


@pytest.mark.parametrize("labels", [None, ("LABEL_0", "LABEL_1", "LABEL_2")])
def test_teacher_without_class_names_needs_same_classes(
    labels: tuple[str, ...] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher(labels=labels)
    assert "--set teacher.same_classes=true" in refused(capsys)
    assert taught("--set", "teacher.same_classes=true") == 0


def test_a_teacher_without_names_of_another_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    teacher(labels=None, classes=7)
    assert "has 7 classes and the data 3" in refused(capsys, "--set", "teacher.same_classes=true")


def test_a_teacher_without_a_head_teaches_features_only(capsys: pytest.CaptureFixture[str]) -> None:
    teacher(labels=None, classes=None)
    assert "has no classifier: use --distil features" in refused(capsys, "--distil", "hard")
    assert taught("--distil", "features") == 0


# --- what else cannot be ---


def test_a_teacher_of_five_channels_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    teacher(channels=5)
    assert "takes 5 channels, images have 1, 3 or 4" in refused(capsys)


def test_grey_teacher_gets_grey_images() -> None:
    teacher(channels=1)
    assert taught() == 0


def test_missing_teacher_is_refused_before_reading_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "teacher.safetensors" in refused(capsys)
    assert not (tmp_path / "cache").exists()


def test_teacher_without_preprocessing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = teacher()
    model.preprocessing = None
    vitrail.save(model, "teacher.safetensors")
    assert "has no preprocessing" in refused(capsys)


def test_mixing_needs_a_batch_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    teacher()
    for how in (("--distil", "tokens"), ("--distil", "soft")):
        assert "--batch-size 2 or more, got 1" in refused(capsys, *how, "--batch-size", "1")


def test_untrained_label_head_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    teacher()
    assert "model.prefix.outputs=1" in refused(capsys, "--set", "objective.alpha=1")
    assert taught("--set", "objective.alpha=1", "--set", "model.prefix.outputs=1") == 0


def test_teacher_options_need_a_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (("--distil", "soft"), ("--teacher-cache",), ("--recipe", "distil")):
        assert main(["train", "photos", "--out", "run", *SHORT, *word]) == 2
        assert "--teacher MODEL" in capsys.readouterr().err
    assert main(["train", "photos", "--out", "run", *SHORT, "--set", "objective=Distillation"]) == 2
    assert "needs a teacher: give --teacher MODEL" in capsys.readouterr().err
    teacher()
    assert "uses no teacher" in refused(capsys, "--set", "objective=Classification")
    assert "leaves the head untrained" in refused(capsys, "--distil", "features", "--set", "objective.labels=0")
    assert not Path("run").exists()


# --- answers that are computed once ---


def test_cached_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Counted(monkeypatch)
    teacher()
    assert taught("--teacher-cache") == 0
    assert shown.pictures == 24  # each picture once
    again = ("--teacher", "teacher.safetensors", "--teacher-cache", "--out", "again", *SHORT)
    assert main(["train", "photos", *again]) == 0
    assert shown.pictures == 24  # and never again
    first, second = (load_file(f"{run}/model.safetensors") for run in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    picture(Path("photos/train/red/0.png"), (200, 10, 10), 1, 16)
    capsys.readouterr()
    assert main(["train", "photos", *again[:3], "--out", "third", *(word for word in SHORT if word != "--quiet")]) == 0
    assert "for 24 images: 1 computed, the others from the cache" in capsys.readouterr().err
    assert shown.pictures == 25  # the changed one alone


def test_cached_logits_are_those_of_whole_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = teacher(labels=("red", "blue", "green"))
    found: list[torch.Tensor] = []
    attach = RunTeacher.attach_outputs

    def record_targets(teacher: RunTeacher, loader: Loader) -> None:
        attach(teacher, loader)
        found.append(loader.targets)

    monkeypatch.setattr(RunTeacher, "attach_outputs", record_targets)
    assert taught("--teacher-cache") == 0
    train = prepare_data(Data("photos")).train
    assert found[0].shape == (24, 1 + 3)
    assert np.array_equal(found[0][:, 0].numpy(), train.targets)
    for index in (0, 9, 23):
        with train.open(index) as image, torch.inference_mode():
            expected = model(PIPELINE(image)[None])[0, [1, 2, 0]]
        torch.testing.assert_close(found[0][index, 1:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["hard", "features"])
def test_every_method_can_be_cached_and_mixed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Counted(monkeypatch)
    teacher()
    assert (
        taught("--teacher-cache", "--distil", how, "--set", "objective.mixup=0.8", "--set", "data.balance=sampling")
        == 0
    )
    assert shown.pictures == (24 if how == "hard" else 0)  # features are not the whole of a forward pass


def test_cached_maps_reach_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Counted(monkeypatch)
    teacher(labels=("red", "blue", "green"))
    assert taught("--teacher-cache", "--distil", "tokens") == 0
    maps = sorted(Path("cache/vitrail/maps").iterdir())
    before = maps[0].read_bytes()
    again = ("--teacher", "teacher.safetensors", "--teacher-cache", "--distil", "tokens", "--out", "again", *SHORT)
    assert main(["train", "photos", *again]) == 0
    assert [path.read_bytes() for path in Path("cache/vitrail/maps").iterdir()] == [before]
    assert shown.pictures == 0
    first, second = (load_file(f"{run}/model.safetensors") for run in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_features_and_logits_have_separate_caches(tmp_path: Path) -> None:
    teacher()
    assert taught("--teacher-cache") == 0
    assert main(["train", "photos", "--teacher", "teacher.safetensors", "--teacher-cache", "--distil", "features",
                 "--out", "other", *SHORT]) == 0  # fmt: skip
    assert len(list((tmp_path / "cache" / "vitrail" / "features").iterdir())) == 2


# --- going on ---


def test_resume_needs_the_same_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    teacher()
    assert taught("--set", "ema=EMA") == 0
    whole = last(Path("run"))
    for path in ("summary.json", "model.safetensors"):  # as if it had been stopped before its end
        Path("run", path).unlink()
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    assert all(torch.equal(tensor, whole[name]) for name, tensor in last(Path("run")).items())
    Path("run/summary.json").unlink()
    model = teacher()
    assert isinstance(model.head, torch.nn.Linear)
    torch.nn.init.ones_(model.head.bias)
    vitrail.save(model, "teacher.safetensors")
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--quiet"]) == 2
    assert "is another teacher than run started with" in capsys.readouterr().err
    Path("teacher.safetensors").unlink()
    assert main(["train", "--resume", "run", "--quiet"]) == 2
    assert "teacher teacher.safetensors not found" in capsys.readouterr().err


# --- several processes ---


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "how"), [("ddp", "soft"), ("fsdp", "features")])
def test_two_processes_with_a_teacher_give_the_result_of_one(tmp_path: Path, parallel: str, how: str) -> None:
    """Each process has the whole of it, asks it about its own pictures, and one that is cached is asked by the first."""
    teacher(labels=tuple("0123456789"), classes=10, channels=1)
    given = ("digits", "--teacher", "teacher.safetensors", "--distil", how, "--batch-size", "32", "--steps", "8")
    given += (
        *LINEAR,
        "--set",
        "model.size.depth=1",
        "--set",
        "ema=EMA",
        *(("--teacher-cache",) if how == "features" else ()),
    )
    trained(tmp_path, *given, "--out", "alone")
    together(tmp_path, 2, *given, "--out", "two", "--parallel", parallel)
    assert_near(tmp_path / "two", tmp_path / "alone")


# --- what others read ---


def test_the_students_file_is_timms_and_transformers_distilled_deit() -> None:
    from timm.models.deit import VisionTransformerDistilled
    from transformers import DeiTForImageClassificationWithTeacher

    teacher()
    given = ("--model", "Ti/16", "--distil", "hard", "--set", "model.size.depth=2", "--size", "32", "--steps", "3")
    more = ("--teacher", "teacher.safetensors", "--batch-size", "12", "--workers", "0", "--quiet", "--out", "run")
    assert main(["train", "photos", *more, *given]) == 0
    ours = vitrail.load("run/model.safetensors")
    image = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        expected = ours(image)
    assert expected.abs().max() > 0.01
    convert("run/model.safetensors", "timm.safetensors", "timm")
    timm = VisionTransformerDistilled(
        img_size=32, patch_size=16, embed_dim=192, depth=2, num_heads=3, num_classes=3,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    timm.load_state_dict(load_file("timm.safetensors"), strict=True)
    convert("run/model.safetensors", "hf", "hf")
    theirs = DeiTForImageClassificationWithTeacher.from_pretrained("hf")
    with torch.inference_mode():
        torch.testing.assert_close(timm.eval()(image), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs.eval()(image).logits, expected, rtol=1e-4, atol=1e-5)
