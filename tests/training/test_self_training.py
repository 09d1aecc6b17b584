"""Self-training: selection of predicted labels, the file that holds them, and rounds through the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import train, trained
from vitrail.data.dataset import Images
from vitrail.data.sources import load_dataset
from vitrail.data.sources.joined import JoinedStore, join_images
from vitrail.training.recipe import Data, read_recipe
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.runs.pseudo_labels import (
    MAX_COPIES,
    PseudoLabels,
    load_unlabelled,
    read_pseudo_labels,
    select_pseudo_labels,
    write_pseudo_labels,
)

COLOURS = ("blue", "green", "red")
SMALL = ("--steps", "3", "--batch-size", "8", "--threshold", "0", "--unlabelled", "more")


def make_images(folder: Path, count: int, seed: int) -> None:
    """Class folders of noisy images of one colour each."""
    generator = np.random.default_rng(seed)
    for channel, colour in enumerate(COLOURS):
        (folder / colour).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 90, (16, 16, 3)).astype(np.uint8)
            pixels[..., 2 - channel] += 120
            Image.fromarray(pixels).save(folder / colour / f"{number}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled images with three splits, and unlabelled ones; one of these is a test image."""
    place = tmp_path_factory.mktemp("self-training")
    for seed, (folder, count) in enumerate({"train": 4, "validation": 4, "test": 4}.items()):
        make_images(place / "labelled" / folder, count, seed)
    make_images(place / "more", 6, 9)
    shutil.copy(place / "labelled/test/red/0.png", place / "more/red/a copy.png")
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """Two rounds that nobody disturbed."""
    done = trained(place, "labelled", *SMALL, "--out", "whole")
    assert "1 of 19 unlabelled images are left out" in done.stderr + done.stdout
    return place / "whole"


# --- selection ---


def test_confident_predictions_are_selected_in_equal_numbers() -> None:
    """Of a large class the most confident images are taken; those of a small one are repeated, up to a limit."""
    confidence = np.array([0.95, 0.9, 0.99, 0.85, 0.97, 0.91, 0.92, 0.93, 0.96, 0.5])
    targets = np.array([0, 0, 0, 0, 0, 1, 1, 2, 1, 1])
    probabilities = np.full((10, 3), 0.0)
    probabilities[np.arange(10), targets] = confidence
    chosen = select_pseudo_labels(np.arange(100, 110), probabilities, 0.8)
    by_class = {label: chosen.indices[chosen.targets == label].tolist() for label in range(3)}
    assert by_class == {0: [100, 102, 104], 1: [105, 106, 108], 2: [107]}
    assert chosen.copies[chosen.targets == 2].tolist() == [3]
    assert set(chosen.copies[chosen.targets != 2].tolist()) == {1}
    assert chosen.confidence[chosen.indices == 102] == pytest.approx([0.99])


def test_copies_are_limited() -> None:
    probabilities = np.zeros((41, 2))
    probabilities[:40, 0], probabilities[40, 1] = 1, 1
    assert select_pseudo_labels(np.arange(41), probabilities, 0.5).copies.max() == MAX_COPIES


def test_no_confident_prediction_selects_nothing() -> None:
    assert len(select_pseudo_labels(np.arange(4), np.full((4, 2), 0.5), 0.9)) == 0


# --- the file ---


def test_the_file_keeps_unusual_names(tmp_path: Path) -> None:
    names = ('comma, "quotes".png', "umlaut ä.png", "plain.png")
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    images = load_unlabelled(str(tmp_path))
    labels = PseudoLabels(np.arange(3), np.array([0, 1, 1]), np.array([0.5, 0.75, 1.0]), np.array([1, 2, 4]))
    write_pseudo_labels(tmp_path / "labels.csv", labels, images, ("a, b", "c"))
    again = read_pseudo_labels(tmp_path / "labels.csv", images, ("a, b", "c"))
    for one, other in zip(vars(labels).values(), vars(again).values(), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("missing.png,a,0.9,1", "line 2: missing.png is no unlabelled image"),
        ("IMAGE,z,0.9,1", "line 2: 'z' is no class of the labelled images"),
        ("IMAGE,a,0.9,9", "expected path, label, confidence and 1 to 4 copies"),
        ("IMAGE,a,0.9", "expected path, label, confidence and 1 to 4 copies"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    images = load_unlabelled(str(tmp_path))
    (tmp_path / "labels.csv").write_text(f"path,label,confidence,copies\n{line.replace('IMAGE', images.name(0))}\n")
    with pytest.raises(ValueError, match=message):
        read_pseudo_labels(tmp_path / "labels.csv", images, ("a", "b"))


def test_joined_images_are_those_of_both() -> None:
    digits = load_dataset("digits")["train"]
    first, second = digits.select([5, 3]), digits.select([9])
    joined = join_images(first, second)
    assert isinstance(joined.store, JoinedStore)
    assert [joined.name(index) for index in range(3)] == [digits.name(index) for index in (5, 3, 9)]
    assert joined.targets.tolist() == digits.targets[[5, 3, 9]].tolist()
    for index, original in enumerate((5, 3, 9)):
        assert np.array_equal(np.asarray(joined.open(index)), np.asarray(digits.open(original)))


def test_joined_shards_do_not_mix() -> None:
    digits = load_dataset("digits")["train"]
    first, second = (replace(digits.select([0, 1]), shards=np.array(shards)) for shards in ([0, 3], [0, 1]))
    shards = join_images(first, second).shards
    assert shards is not None
    assert shards.tolist() == [0, 3, 4, 5]


def test_data_needs_both_fields() -> None:
    with pytest.raises(ValueError, match="give both"):
        Data("digits", unlabelled="more")


# --- rounds ---


def test_rounds_leave_runs_labels_and_a_report(whole: Path) -> None:
    record = json.loads((whole / "rounds.json").read_text())
    assert [one["name"] for one in record["rounds"]] == ["round-0", "round-1", "round-2"]
    assert record["labelled"] == 12
    assert record["images"] == 18
    assert record["rounds"][1]["taken"] <= 18
    assert 0 <= record["rounds"][1]["correct"] <= record["rounds"][1]["taken"]
    assert (whole / "model.safetensors").read_bytes() == (whole / record["best"] / "model.safetensors").read_bytes()
    page = (whole / "report.html").read_text()
    assert all(text in page for text in ("labels alone", "round 2", "of these right", "test images"))
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["self_training"]["best"] == record["best"]


def test_the_kept_round_is_the_best_on_validation_images(whole: Path) -> None:
    record = json.loads((whole / "rounds.json").read_text())
    scores = {one["name"]: one["scores"]["validation"]["top1"] for one in record["rounds"]}
    assert scores[record["best"]] == max(scores.values())


def test_a_round_is_an_ordinary_run(place: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe names the images and their labels, which are joined to the labelled ones."""
    monkeypatch.chdir(place)
    recipe = read_recipe(whole / "round-1" / "recipe.json")
    prepared = prepare_data(recipe.data)
    rows = (whole / "pseudo-labels-1.csv").read_text().splitlines()[1:]
    copies = [int(row.rpartition(",")[2]) for row in rows]
    assert len(prepared.train) == 12 + sum(copies)
    listed = {row.partition(",")[0] for row in rows}
    assert {prepared.train.name(index) for index in range(12, len(prepared.train))} == listed
    assert not any("a copy" in name for name in listed)
    assert len(prepared.splits["test"]) == 12


def test_stopped_rounds_resume_to_the_same_weights(place: Path, whole: Path) -> None:
    """After a stop in round 1, what is finished is kept, and the rest is as it would have been."""
    stopped = place / "stopped"
    stopped.mkdir()
    for name in ("self_training.json", "pseudo-labels-1.csv"):
        shutil.copy(whole / name, stopped / name)
    shutil.copytree(whole / "round-0", stopped / "round-0")
    before = (stopped / "round-0" / "summary.json").stat().st_mtime_ns
    trained(place, "--resume", "stopped")
    assert (stopped / "round-0" / "summary.json").stat().st_mtime_ns == before
    assert (stopped / "pseudo-labels-2.csv").read_bytes() == (whole / "pseudo-labels-2.csv").read_bytes()
    for number in (1, 2):
        one, other = (run / f"round-{number}" / "metrics.jsonl" for run in (stopped, whole))
        assert one.read_bytes() == other.read_bytes()


def test_a_given_teacher_labels_the_first_round(place: Path, whole: Path) -> None:
    teacher = str(whole / "round-0" / "model.safetensors")
    trained(place, "labelled", *SMALL, "--rounds", "1", "--teacher", teacher, "--out", "taught", "--quiet")
    record = json.loads((place / "taught" / "rounds.json").read_text())
    assert [one["name"] for one in record["rounds"]] == [teacher, "round-1"]
    own = json.loads((whole / "rounds.json").read_text())["rounds"][0]["scores"]
    given = record["rounds"][0]["scores"]
    assert {split: scores["top1"] for split, scores in given.items()} == pytest.approx(
        {split: scores["top1"] for split, scores in own.items()}
    )
    assert "teacher model.safetensors" in (place / "taught" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("labelled", "--rounds", "2"), "--rounds needs --unlabelled"),
        (("labelled", "--unlabelled", "nothing"), "no such file, folder or dataset: nothing"),
        (("labelled", "--unlabelled", "labelled/test"), "has no image that is not among the labelled ones"),
        (("labelled", "--unlabelled", "more", "--rounds", "0"), "rounds must be >= 1, got 0"),
        (("labelled", "--unlabelled", "more", "--threshold", "1.5"), "threshold must be at least 0 and below 1"),
        (("labelled", "--unlabelled", "more", "--teacher", "whole", "--distil", "hard"), "--distil is not supported"),
        (("labelled", *SMALL, "--threshold", "0.9999", "--out", "none"), "use a lower threshold"),
        (("digits", "--unlabelled", "more", "--teacher", "whole"), "does not predict '0'"),
    ],
)
def test_bad_input_gives_one_line(place: Path, whole: Path, arguments: tuple[str, ...], message: str) -> None:
    done = train(place, *arguments)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


def test_several_labels_per_image_are_refused(place: Path) -> None:
    (place / "several.csv").write_text(
        "path,label\n" + "".join(f"more/{colour}/{n}.png,{colour}|any\n" for colour in COLOURS for n in range(6))
    )
    done = train(place, "several.csv", "--unlabelled", "more")
    assert done.returncode == 2
    assert "self-training needs one class per image" in done.stderr


def test_images_and_videos_do_not_join(place: Path) -> None:
    images = load_dataset("digits")["train"].select([0])

    class Videos:
        media = "video"

        def __len__(self) -> int:
            return 1

        def name(self, item: int) -> str:
            return "clip.mp4"

    videos = Images(Videos(), np.array([0]), np.array([0]), images.classes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give one kind"):
        join_images(images, videos)
