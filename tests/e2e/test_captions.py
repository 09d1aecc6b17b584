"""A table of images and captions through the command line: check, train, resume, two processes, zero-shot, refusals."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests import forked
from tests.checkpoints.towers_made import make_towers
from tests.training.runs import environment, interrupted, last, summary, train, trained
from tests.training.test_distributed import run as run_processes

NAMES = ("red", "green", "blue", "yellow")
COLOURS = ((200, 30, 30), (30, 180, 40), (30, 40, 200), (220, 210, 40))
TINY = ("--set", "model.image.size.depth=1", "--set", "model.text.size.depth=1", "--workers", "0", "--size", "16")
LENGTH = ("--batch-size", "16", "--steps", "30", "--set", "validate_every=4")


def write_pairs(folder: Path, count: int = 80) -> None:
    """Write images of four colours with captions that name them, and half as many as class folders."""
    rng, lines = np.random.default_rng(0), ["image,caption,split"]
    (folder / "images").mkdir()
    for number in range(count):
        kind = number % len(NAMES)
        pixels = (np.array(COLOURS[kind]) + rng.normal(0, 12, (16, 16, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:03}.png")
        split = "train" if number < 0.75 * count else "val"
        lines.append(f"images/{number:03}.png,a {NAMES[kind]} square,{split}")
        if split == "val":
            (folder / "classes" / NAMES[kind]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / "classes" / NAMES[kind] / f"{number:03}.png")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    (folder / "labels.csv").write_text("image,label\n" + "".join(f"images/{n:03}.png,{n % 2}\n" for n in range(40)))


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    write_pairs(folder)
    vitrail.save(make_towers(), folder / "towers.safetensors")
    image = vitrail.build(patch=8, width=32, depth=2, heads=2, image_size=16, classes=7)
    half = (0.5, 0.5, 0.5)
    vitrail.save(
        image, folder / "vit.safetensors", preprocessing=vitrail.Preprocessing((16, 16), (16, 16), mean=half, std=half)
    )
    return folder


@pytest.fixture(scope="module")
def whole(tmp: Path) -> Path:
    trained(tmp, "pairs.csv", "--objective", "clip", "--out", "whole", *TINY, *LENGTH)
    return tmp / "whole"


def test_run_learns_pairs_and_writes_both_towers(whole: Path) -> None:
    found, record = summary(whole), json.loads((whole / "run.json").read_text())
    assert (record["recipe_name"], record["task"]) == ("contrastive", "captions")
    assert (found["split"], found["images"], found["captions"]) == ("validation", 20, 4)
    assert found["image_to_text_1"] > 0.6  # of four colours
    assert found["image_to_text_5"] == 1
    assert found["interval"] == found["image_to_text_1_interval"]
    model = vitrail.load_towers(whole / "model.safetensors")
    assert model.tokenizer is not None
    assert model.config.text.vocabulary == model.tokenizer.vocabulary
    assert "most similar" in (whole / "report.html").read_text() or "own caption" in (whole / "report.html").read_text()


def test_written_model_has_the_recall_of_the_summary(tmp: Path, whole: Path) -> None:
    model = vitrail.load_towers(whole / "model.safetensors")
    files = sorted((tmp / "images").glob("*.png"))[60:]
    images = torch.stack([model.preprocessing(Image.open(path)) for path in files])
    assert model.tokenizer is not None
    best = model(images, model.tokenizer([f"a {name} square" for name in NAMES])).argmax(1)
    accuracy = float((best == torch.arange(60, 80) % 4).float().mean())
    assert accuracy == pytest.approx(summary(whole)["image_to_text_1"])


def test_model_predicts_and_is_evaluated_with_class_names_at_once(tmp: Path, whole: Path) -> None:
    named = ("--classes", ",".join(NAMES), "--template", "a {} square")
    done = forked.run("evaluate", "whole/model.safetensors", "classes", *named, "--json", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["top1"] == pytest.approx(summary(whole)["image_to_text_1"])
    done = forked.run("predict", "whole", "images", *named, "--out", "p.csv", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert len((tmp / "p.csv").read_text().splitlines()) == 81


def test_killed_run_resumes_to_the_same_weights(tmp: Path, whole: Path) -> None:
    arguments = ("pairs.csv", "--objective", "clip", "--out", "killed", *TINY, *LENGTH, "--save-seconds", "0")
    assert interrupted(tmp, tmp / "killed", signal.SIGTERM, 20, *arguments) == 143
    trained(tmp, "--resume", "killed")
    ours, theirs = last(tmp / "killed"), last(whole)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (tmp / "killed" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_learn_as_one(tmp: Path) -> None:
    plain = ("--objective", "siglip", *TINY, "--batch-size", "16", "--steps", "12", "--set", "optimizer=SGD")
    plain += ("--set", "optimizer.lr=0.05", "--set", "model.image.embed=Patches")
    trained(tmp, "pairs.csv", *plain, "--out", "one")
    run_processes(tmp, 2, "pairs.csv", *plain, "--out", "two")
    ours, theirs = last(tmp / "two"), last(tmp / "one")
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert summary(tmp / "two")["image_to_text_1"] == pytest.approx(summary(tmp / "one")["image_to_text_1"], abs=0.051)


def test_locked_image_tower_keeps_its_weights(tmp: Path) -> None:
    locked = ("--init-image", "vit.safetensors", "--tune", "text", "--out", "locked", "--workers", "0")
    trained(tmp, "pairs.csv", *locked, "--batch-size", "16", "--steps", "6")
    before = vitrail.load(tmp / "vit.safetensors", classes=None).state_dict()
    model = vitrail.load_towers(tmp / "locked" / "model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.image.state_dict().items())
    assert model.config.text.features == 32
    record = json.loads((tmp / "locked" / "run.json").read_text())["model"]
    assert record["trained"] == sum(p.numel() for n, p in model.named_parameters() if not n.startswith("image."))


def test_both_towers_of_a_checkpoint_are_trained_on(tmp: Path) -> None:
    trained(
        tmp,
        "pairs.csv",
        "--init",
        "towers.safetensors",
        "--out",
        "on",
        "--batch-size",
        "16",
        "--steps",
        "2",
        "--workers",
        "0",
    )
    model, start = vitrail.load_towers(tmp / "on" / "model.safetensors"), make_towers()
    assert model.tokenizer == start.tokenizer
    assert model.config == start.config
    assert not torch.equal(model.text.head.weight, start.text.head.weight)
    torch.testing.assert_close(model.text.head.weight, start.text.head.weight, atol=1e-3, rtol=0)


def test_tokeniser_of_a_file_is_used_and_a_recipe_is_repeated(tmp: Path) -> None:
    (tmp / "merges.txt").write_text("#version: 0.2\ns q\n")
    few = ("--batch-size", "16", "--steps", "1", *TINY)
    trained(tmp, "pairs.csv", "--tokenizer", "merges.txt", "--out", "own", *few)
    assert vitrail.load_towers(tmp / "own" / "model.safetensors").config.text.vocabulary == 512 + 1 + 2
    trained(tmp, "--recipe", "own/recipe.json", "--out", "again")
    one, two = (vitrail.load_towers(tmp / name / "model.safetensors").state_dict() for name in ("own", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("labels.csv", "--objective", "clip"), "labels.csv has no column of captions, got image, label"),
        (("digits", "--objective", "clip"), "digits has no captions: give a table with the columns image and caption"),
        (
            ("pairs.csv", "--recipe", "finetune", "--init", "vit.safetensors"),
            "the recipe finetune does not learn captions",
        ),
        (("pairs.csv", "--init", "vit.safetensors"), "has no text tower: give it as --init-image"),
        (
            ("pairs.csv", "--init-image", "vit.safetensors", "--tune", "head"),
            "the model has a text tower: use full or text",
        ),
        (("digits", "--tune", "text"), "the model has no text tower"),
        (("digits", "--init-image", "vit.safetensors"), "--init-image is for pairs of images and captions"),
        (("digits", "--tokenizer", "merges.txt"), "--tokenizer is for captions, and digits has one class per image"),
        (("pairs.csv", "--tokenizer", "nowhere.json"), "nowhere.json: no tokeniser"),
        (
            ("pairs.csv", "--init", "towers.safetensors", "--objective", "siglip"),
            "the checkpoint has no bias of the logits",
        ),
        (
            ("pairs.csv", "--objective", "clip", "--task", "single"),
            "learns captions, --task single classes: leave out one of them",
        ),
    ],
)
def test_what_cannot_be_trained_is_named_in_one_line(tmp: Path, arguments: tuple[str, ...], message: str) -> None:
    done = train(tmp, *arguments, "--out", "never", "--workers", "0")
    assert done.returncode == 2
    assert message in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("vitrail")]) == 1
    assert not (tmp / "never").exists()


def test_damaged_tokeniser_of_a_run_stops_its_resume(tmp: Path, whole: Path) -> None:
    import shutil

    shutil.copytree(whole, tmp / "damaged")
    (tmp / "damaged" / "summary.json").unlink()
    (tmp / "damaged" / "tokenizer.json").write_text("{}")
    done = train(tmp, "--resume", "damaged")
    assert done.returncode == 2
    assert "damaged/tokenizer.json: its version is not 1" in done.stderr


def test_check_counts_images_pairs_and_captions(tmp: Path) -> None:
    done = forked.run("check", "pairs.csv", cwd=tmp, env=environment(tmp))
    assert done.returncode == 0, done.stderr
    assert "pairs.csv: 80 images, 80 pairs, 4 different captions" in done.stdout
    assert "ready to train" in done.stdout


def test_captions_are_evaluated_with_class_names_only(tmp: Path, whole: Path) -> None:
    done = forked.run("evaluate", "whole", "pairs.csv", cwd=tmp, env=environment(tmp))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
