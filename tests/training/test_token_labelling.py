"""`vitrail train --teacher MODEL --distil tokens`: maps of whole pictures, computed once, and runs that learn from them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import last
from tests.training.test_distributed import run
from tests.training.test_train import COLOURS, picture
from vitrail.cli import main
from vitrail.data.cache import ScoreMapFile
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset
from vitrail.objectives.teacher import Teacher, map_shape
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.training.recipe import Recipe, read_recipe
from vitrail.training.runs.teaching import compute_score_maps
from vitrail.training.runs.teaching import open_score_maps as opened

CPU = torch.device("cpu")
PIPELINE = Preprocessing((16, 16), (20, 20), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SHORT = ("--set", "model.size.depth=1", "--set", "model.size.width=32", "--batch-size", "12", "--size", "16", "--quiet")
TOKENS = ("--teacher", "teacher.safetensors", "--distil", "tokens")


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, colour in COLOURS.items():
        for number in range(8):
            picture(tmp_path / "photos" / "train" / name / f"{number}.png", colour, 100 * number + len(name), 16)
        for number in range(3):
            picture(tmp_path / "photos" / "val" / name / f"{number}.png", colour, 7000 + 100 * number + len(name), 16)
    return tmp_path / "photos"


@pytest.fixture
def teacher() -> Teacher:
    """A model that has not learnt anything, but is sure of what it says."""
    torch.manual_seed(5)
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=3, image_size=16).eval()
    assert isinstance(model.head, torch.nn.Linear)
    torch.nn.init.normal_(model.head.weight, std=1.0)
    model.preprocessing, model.labels = PIPELINE, tuple(sorted(COLOURS))
    vitrail.save(model, "teacher.safetensors")
    return Teacher(model, PIPELINE)


def lying(photos: Path) -> Images:
    """The training pictures, one of which lies on its side and is long."""
    exif = Image.Exif()
    exif[0x0112] = 6
    array = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(array).save(photos / "train" / "red" / "lying.jpg", exif=exif)
    return load_dataset(str(photos)).splits["train"]


def test_map_equals_the_teachers_output_for_the_whole_image(photos: Path, teacher: Teacher) -> None:
    pictures = lying(photos)
    place = Path("some.maps")
    assert compute_score_maps(teacher, place, pictures, 2, True, CPU, workers=0) == len(pictures)
    maps = opened(teacher, place, pictures, 2)
    indices = np.arange(len(pictures))
    _, classes, scores = maps.shape.split_columns(maps.target_columns(indices, np.zeros((len(pictures), 2, 3))))
    whole = replace(PIPELINE, fit="squash", resize=(16, 16), turn=True)
    for index in indices.tolist():
        with pictures.open(index) as image:
            said = teacher.model.dense_logits(whole(image)[None])[0].softmax(-1)
        chances, expected = said.topk(2)
        assert torch.equal(classes[index], expected)
        torch.testing.assert_close(scores[index], chances / chances.sum(-1, keepdim=True), rtol=0, atol=1e-3)
    long = next(i for i in indices.tolist() if "lying" in pictures.name(i))
    assert maps.image_sizes(np.array([long])).tolist() == [[40, 24]]


def test_only_new_images_are_computed(photos: Path, teacher: Teacher) -> None:
    before, heard = load_dataset(str(photos)).splits["train"], []
    compute_score_maps(
        teacher, Path("some.maps"), before, 2, True, CPU, workers=0, progress=lambda *said: heard.append(said)
    )
    assert heard == [("score maps of the teacher", 24, 24)]
    assert compute_score_maps(teacher, Path("some.maps"), before, 2, True, CPU, workers=0) == 0
    assert compute_score_maps(teacher, Path("some.maps"), lying(photos), 2, True, CPU, workers=0) == 1


def test_interruption_keeps_computed_maps(photos: Path, teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.training.runs import teaching as module

    monkeypatch.setattr(module, "BATCH_SIZE", 10)

    def stop(what: str, done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    pictures = load_dataset(str(photos)).splits["train"]
    with pytest.raises(KeyboardInterrupt):
        compute_score_maps(teacher, Path("some.maps"), pictures, 2, True, CPU, workers=0, progress=stop)
    assert len(ScoreMapFile(Path("some.maps"), map_shape(teacher, 2)).find_missing(pictures)) == 4
    assert compute_score_maps(teacher, Path("some.maps"), pictures, 2, True, CPU, workers=0) == 4


def test_image_that_changes_while_it_is_read_has_no_map(
    photos: Path, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, maps = load_dataset(str(photos)).splits["train"], Teacher.dense_logits

    def changed(self: Teacher, *arguments: Any) -> torch.Tensor:
        picture(photos / "train" / "red" / "0.png", COLOURS["blue"], 5, 16)
        return maps(self, *arguments)

    monkeypatch.setattr(Teacher, "dense_logits", changed)
    compute_score_maps(teacher, Path("some.maps"), pictures, 2, True, CPU, workers=0)
    assert len(ScoreMapFile(Path("some.maps"), map_shape(teacher, 2)).find_missing(pictures)) == 1


def trained(out: str, *more: str) -> Recipe:
    assert main(["train", "photos", *TOKENS, "--out", out, *SHORT, *more]) == 0
    return read_recipe(Path(out) / "recipe.json")


@pytest.mark.usefixtures("teacher")
def test_cached_runs_are_the_same_with_any_workers_and_after_a_stop() -> None:
    steps = ("--teacher-cache", "--steps", "4", "--set", "validate_every=1")  # two steps an epoch
    recipe = trained("one", *steps, "--workers", "0")
    assert isinstance(recipe.objective, TokenLabelling)
    assert recipe.teacher is not None
    assert recipe.teacher.cached
    trained("two", *steps, "--workers", "2")
    first = last(Path("one"))
    assert any(name.endswith("head.weight") and "model." not in name for name in first)  # the patches' head is trained
    second = last(Path("two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for gone in ("summary.json", "model.safetensors"):  # as if it had been stopped after its second step
        Path("two", gone).unlink()
    newest = max(Path("two/checkpoints").glob("step-*"))
    newest.rename("away")
    assert main(["train", "--resume", "two", "--quiet"]) == 0
    again = last(Path("two"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    model = vitrail.load("two/model.safetensors")
    assert set(model.state_dict()) == set(vitrail.build_from(recipe.model).state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("teacher")
def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    plain = ("--set", "model.embed=Patches", "--set", "optimizer=SGD", "--set", "optimizer.lr=0.05", "--workers", "0")
    steps = ("--teacher-cache", "--steps", "3", *plain)
    trained("one", *steps)
    run(tmp_path, 2, "photos", *TOKENS, "--out", "two", *SHORT, *steps)
    first, second = last(Path("one")), last(Path("two"))
    assert set(first) == set(second)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("teacher")
@pytest.mark.parametrize("cached", [(), ("--teacher-cache",)])
def test_loss_falls_online_and_cached(cached: tuple[str, ...]) -> None:
    trained("run", *cached, "--steps", "30", "--workers", "0", "--set", "validate_every=15")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1


@pytest.mark.usefixtures("teacher")
def test_students_without_patch_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = trained("run", "--steps", "1", "--workers", "0")
    resnet = vitrail.configure("R50x0.25", root="small", classes=3, image_size=16)
    with pytest.raises(ValueError, match="token labelling does not support BiT ResNets"):
        vitrail.train(recipe=replace(recipe, model=resnet), out="other")
    assert not Path("other").exists()
    assert main(["train", "photos", *TOKENS, "--out", "third", *SHORT, "--set", "objective.top=0"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("must be >= 1, got 0")
    assert len(said.splitlines()) == 1
    assert not Path("third").exists()


@pytest.mark.usefixtures("teacher")
def test_multi_label_images_are_refused(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["path,label,split"]
    for split in ("train", "val"):
        for path in sorted((photos / split).rglob("*.png")):
            rows.append(f"{path},{path.parent.name if path.stem == '0' else 'blue|green|red'},{split}")
    Path("table.csv").write_text("\n".join(rows))
    assert main(["train", "table.csv", *TOKENS, "--out", "other", *SHORT]) == 2
    assert "token labelling needs one label per image" in capsys.readouterr().err
    recipe = trained("run", "--steps", "1", "--workers", "0")  # finished, with a softmax
    with pytest.raises(ValueError, match="token labelling needs one label per image: use distil='soft'"):
        vitrail.train("table.csv", recipe=recipe, out="other")
    assert not Path("other").exists()
