"""Videos in training and evaluation: from folders of frames to a run, its resume, and a page with strips of frames."""

import io
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import main
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.evaluate import evaluate
from vitrail.objectives.teacher import Teacher
from vitrail.tasks.base import STRIP_GAP
from vitrail.training.recipe import Facts, read_recipe
from vitrail.training.recipes.clips import fit_clip

SMALL: dict[str, Any] = {"width": 16, "depth": 1, "steps": 3, "batch_size": 4, "workers": 0, "clip": "4x1"}
SIDE = 16
STRIP = (4 * SIDE + 3 * STRIP_GAP, SIDE)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A square that moves left or right, as folders of frames."""
    root, rng = tmp_path_factory.mktemp("data") / "videos", np.random.default_rng(0)
    for name, way in (("left", -1), ("right", 1)):
        for number in range(8):
            folder = root / name / f"video{number}"
            folder.mkdir(parents=True)
            for frame in range(int(rng.integers(5, 8))):
                pixels = rng.integers(0, 40, (SIDE, SIDE, 3)).astype(np.uint8)
                pixels[6:10, (number + way * 2 * frame) % (SIDE - 4) :][:, :4] = 255
                Image.fromarray(pixels).save(folder / f"frame_{frame:03d}.png")
    return root


@pytest.fixture(scope="module")
def images_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "model.safetensors"
    model = vitrail.build(patch=8, width=16, depth=1, heads=2, image_size=SIDE, classes=2, pool="mean")
    vitrail.save(model, path, labels=("left", "right"), preprocessing=Preprocessing((SIDE, SIDE), (SIDE, SIDE)))
    return path


@pytest.fixture(scope="module")
def run(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(videos, out=tmp_path_factory.mktemp("runs") / "run", **SMALL)[0]


def test_a_run_records_its_clip_and_draws_strips_of_frames(run: Path) -> None:
    recipe = read_recipe(run / "recipe.json")
    assert (recipe.name, recipe.model.frames, recipe.preprocessing.clip) == ("video", 4, Clip(4, 1))
    model = vitrail.load(run)
    assert model.config.input_size == (4, SIDE, SIDE)
    assert isinstance(model.preprocessing, Preprocessing)
    assert model.preprocessing.clip == Clip(4, 1)
    strips = list((run / "evaluation" / "pictures").iterdir())
    assert all(Image.open(strip).size == STRIP for strip in strips)
    assert (run / "report.html").is_file()


def test_samples_are_called_videos(videos: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "3", "--batch-size", "4", "--clip", "4x1", "--workers", "0", "--out", str(tmp_path / "new")]
    for name, value in (("width", 16), ("depth", 1), ("heads", 1), ("mlp", 32)):
        options += ["--set", f"model.size.{name}={value}"]
    assert main(["train", str(videos), *options]) == 0
    options = ["--split", "train", "--workers", "0", "--out", str(tmp_path / "e")]
    assert main(["evaluate", str(run), str(videos), *options]) == 0
    printed = "".join(capsys.readouterr())
    assert "validation videos, after" in printed
    assert "videos/s with preprocessing" in printed
    pages = [(folder / "report.html").read_text() for folder in (run, tmp_path / "e")]
    shown = [re.sub(r"<(script|style|pre|details).*?</\1>|<[^>]*>", " ", page, flags=re.S) for page in pages]
    for text in (printed, *shown):
        assert "videos" in text
        assert re.findall(r".*\bimages?\b(?! size).*", text.replace("frames as images", "")) == []


def test_a_resumed_run_is_the_same_bit_for_bit(videos: Path, run: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: object) -> None:
        if isinstance(record, dict) and record.get("step") == 2:
            raise Stop

    machine = vitrail.training.recipe.Machine(save_seconds=0)
    with pytest.raises(Stop):
        vitrail.train(videos, out=tmp_path / "run", machine=machine, listeners=(stop,), **SMALL)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    resumed, _ = vitrail.resume(tmp_path / "run")
    assert (resumed / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    ours, theirs = (vitrail.load(path).state_dict() for path in (resumed, run))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_mean_of_several_views_is_evaluated(videos: Path, run: Path, tmp_path: Path) -> None:
    found = evaluate(str(run), str(videos), clips=2, crops=2, workers=0, precision="fp32").evaluations[0]
    model, images = vitrail.load(run), found.selection.images
    pipeline = found.deployed.contract.preprocessing
    assert pipeline.clip == Clip(4, 1, clips=2, crops=2)
    with torch.inference_mode(), images.open_video(0) as video:
        expected = model(pipeline.normalise(pipeline.to_views(video))).softmax(1).mean(0)
    probabilities = torch.from_numpy(found.outputs.logits[0]).softmax(0)
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-5)
    assert "2 clips × 2 crops" in found.model_dict()["preprocessing"]


def test_the_page_of_an_evaluation_shows_mistakes_as_strips(
    videos: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    for name, other in (("left", "right"), ("right", "left")):  # one class or the other has mistakes
        (swapped / name).symlink_to(videos / other)
    both = [str(videos), str(swapped)]
    sizes = set()
    for number, data in enumerate(both):
        assert main(["evaluate", str(run), data, "--workers", "0", "--out", str(tmp_path / f"out{number}")]) == 0
        page = (tmp_path / f"out{number}" / "report.html").read_text()
        found = re.findall(r"data:image/jpeg;base64,([A-Za-z0-9+/=]+)", page)
        sizes |= {Image.open(io.BytesIO(b64decode(image))).size for image in found}
    assert sizes == {STRIP}
    assert "Top-1 accuracy" in capsys.readouterr().out


def test_models_of_clips_and_of_images_are_fine_tuned(
    videos: Path, run: Path, images_model: Path, tmp_path: Path
) -> None:
    small: dict[str, Any] = {"steps": 2, "batch_size": 4, "workers": 0}
    again, _ = vitrail.train(videos, init=run, clip="6x1", out=tmp_path / "clips", **small)
    assert vitrail.load(again).config.frames == 6
    lines: list[str] = []
    listener = (lambda record: lines.append(record.get("text", "")),)
    inflated, _ = vitrail.train(videos, init=images_model, out=tmp_path / "inflated", listeners=listener, **small)
    config = vitrail.load(inflated).config
    assert config.frames == 8
    assert any("inflated to" in line for line in lines)
    assert not any(step["type"] == "Flip" for step in json.loads((inflated / "recipe.json").read_text())["augment"])


def test_an_inflated_model_starts_with_the_weights_of_images(videos: Path, images_model: Path, tmp_path: Path) -> None:
    frozen: dict[str, Any] = {"settings": ["optimizer.lr=1e-20", "ema=none", "calibrate=none"], "precision": "fp32"}
    small: dict[str, Any] = {"steps": 1, "batch_size": 4, "workers": 0}
    run, _ = vitrail.train(videos, init=images_model, out=tmp_path / "run", **small, **frozen)
    image = torch.randn(2, 3, SIDE, SIDE)
    still = image[:, :, None].expand(-1, -1, 8, -1, -1)
    clips, images = vitrail.load(run), vitrail.load(images_model)
    torch.testing.assert_close(clips(still), images(image), rtol=1e-4, atol=1e-4)


def test_features_of_videos_are_probed(videos: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), str(videos), "--probe", "knn", "--workers", "0", "--no-cache"]) == 0
    assert "features of 16 values" in capsys.readouterr().out


@pytest.mark.parametrize(("how", "cached"), [("hard", False), ("soft", True), ("features", False), ("features", True)])
def test_a_student_of_clips_learns_from_a_teacher(
    videos: Path, run: Path, tmp_path: Path, how: str, cached: bool
) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"teacher": run, "distil": how, "teacher_cache": cached}
    options["listeners"] = (lambda record: lines.append(record.get("text", "")),)
    student, _ = vitrail.train(videos, out=tmp_path / "student", **options, **SMALL)
    recipe = read_recipe(student / "recipe.json")
    assert (recipe.name, recipe.model.frames) == ("video", 4)
    assert type(recipe.objective).__name__ == ("FeatureDistillation" if how == "features" else "Distillation")
    assert vitrail.load(student).config.frames == 4
    assert any(" videos: " in line for line in lines) == cached


def test_a_teacher_sees_the_frames_of_the_student_as_it_would_see_images() -> None:
    model = vitrail.build(patch=8, width=16, depth=1, heads=2, image_size=24, classes=2, frames=4)
    pipeline = Preprocessing((24, 24), (24, 24), mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1), clip=Clip(4, 1))
    clips, teacher = torch.rand(2, 3, 4, 16, 16), Teacher(model, pipeline)
    seen = teacher.convert_images(clips, (0.5,) * 3, (0.5,) * 3)
    assert seen.shape == (2, 3, 4, 24, 24)
    for frame in range(4):
        torch.testing.assert_close(
            seen[:, :, frame], teacher.convert_images(clips[:, :, frame], (0.5,) * 3, (0.5,) * 3)
        )
    assert teacher.convert_images(clips, pipeline.mean, pipeline.std).shape == (2, 3, 4, 24, 24)


def test_videomae_pretrains_and_its_model_is_fine_tuned(videos: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 2, "batch_size": 4, "workers": 0}
    model = ["model.size.width=16", "model.size.depth=1", "model.size.heads=1", "model.size.mlp=32"]
    run, _ = vitrail.pretrain(
        videos,
        method="videomae",
        size=32,
        clip="4x1",
        settings=model,
        fractions=(0.7, 0.3, 0),
        out=tmp_path / "mae",
        **small,
    )
    assert (run / "pretraining.safetensors").is_file()
    assert (run / "evaluation" / "reconstructions" / "00-masked.png").is_file()
    tuned, _ = vitrail.train(videos, init=run, out=tmp_path / "tuned", **small)
    assert vitrail.load(tuned).config.input_size == (4, 32, 32)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("train", "digits", "--init", "{run}"),
            "digits has images, and the model takes clips of 4 frames: give videos",
        ),
        (
            ("train", "{videos}", "--recipe", "scratch-small"),
            "the recipe scratch-small trains a model of images: use --recipe video",
        ),
        (("pretrain", "{videos}", "--method", "mae"), "the recipe mae trains a model of images: use --method videomae"),
        (("train", "{videos}", "--clip", "5x1"), "5 frames are not divisible into tubelets of 2: use 4 or 6"),
        (("train", "{videos}", "--clip", "many"), "'many' is not a clip: give frames and stride, such as 16x4"),
        (("train", "digits", "--clip", "4x1"), "the recipe scratch-small does not use --clip"),
        (
            ("evaluate", "{run}", "digits", "--map", "index"),
            "the data has images, but the model takes clips of 4 frames: give videos",
        ),
        (("evaluate", "{image}", "{videos}"), "the data has videos, but the model takes images"),
        (("evaluate", "{image}", "{videos}", "--clips", "2"), "--clips is for models of clips"),
        (
            ("train", "{videos}", "--set", "preprocessing.clip.frames=2"),
            "the model takes clips of 8 frames and the preprocessing gives clips of 2 frames: use --clip, which changes both",
        ),
        (
            ("train", "{videos}", "--teacher", "{run}", "--clip", "6x1"),
            "takes clips of 4 frames, and the student clips of 6 frames: they must be the same",
        ),
        (
            ("train", "{videos}", "--clip", "4x1", "--teacher", "{image}"),
            "takes images, and the student clips of 4 frames",
        ),
        (
            ("train", "{videos}", "--clip", "4x1", "--teacher", "{run}", "--distil", "tokens"),
            "token labelling does not support models of clips",
        ),
        (("train", "{videos}", "--set", "preprocessing.clip.clips=2"), "a run has one view of each video, got 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    videos: Path,
    run: Path,
    images_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([part.format(run=run, videos=videos, image=images_model) for part in command]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("length", "rate", "clip"),
    [
        (300, 30.0, Clip(16, 4)),
        (300, 60.0, Clip(16, 8)),
        (300, None, Clip(16, 4)),
        (40, 30.0, Clip(16, 2)),
        (33, 8.0, Clip(16, 2)),
        (5, 8.0, Clip(16, 1)),
    ],
)
def test_the_stride_follows_rate_and_length_of_the_videos(length: int, rate: float | None, clip: Clip) -> None:
    facts = Facts(100, 2, False, (64, 64), 3, False, frames=length, rate=rate)
    assert fit_clip(facts, 16) == clip
